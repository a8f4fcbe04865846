"""What a graph reads, for people who prepare its data."""

from collections.abc import Iterator

from training.data.opening import default_columns
from training.model.document import TrainingDocument


def describe(document: TrainingDocument) -> Iterator[str]:
    """Yield lines about the arrays of an ``.npz`` file, and about the columns of Parquet and CSV files."""
    graph = document.graph
    yield f"{document.name} reads these arrays of an .npz file with B samples:"
    losses = document.losses  # of each column; those of a label are equal
    first, rows = 0, list[tuple[str, str, str]]()
    for label in document.labels:
        rows.append((label.name, _numbers(len(label.weights)), f"each {losses[first].expected}"))
        first += len(label.weights)
    if graph.dense_dim:
        rows.append((graph.dense_top, _numbers(graph.dense_dim), "finite"))
    for entry in graph.sparse:
        rows.append((entry.top, f"integers [B, {entry.slots}]", "one key per slot, -1 where it is empty; or instead:"))
        bound = f"at most {entry.max_keys_per_sample} in a sample"
        rows.append((f"{entry.top}.keys", "integers [N]", f"the keys of the slots, sample by sample, {bound}"))
        rows.append((f"{entry.top}.row_ptrs", f"integers [B * {entry.slots} + 1]", "where the keys of each slot begin"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, array, meaning in rows:
        yield f"  {name:{widths[0]}}  {array:{widths[1]}}  {meaning}"
    columns = default_columns(document)
    yield "or these columns of Parquet or CSV files, unless --columns names others:"
    for kind, names in (("labels", columns.labels), ("numbers", columns.dense), ("keys", columns.slots)):
        if names:
            yield f"  {kind:{widths[0]}}  {', '.join(names)}"


def _numbers(columns: int) -> str:
    return "numbers [B]" if columns == 1 else f"numbers [B, {columns}]"
