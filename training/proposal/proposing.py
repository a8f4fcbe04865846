"""Read the columns of a file, and propose.

Only rows that the model is trained on are looked at.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from training.data.columns import column_batches, has_csv, import_pyarrow, missing_from
from training.errors import ONE_SAMPLE, DataError
from training.model.losses import LOSS_OF_OPTION
from training.proposal.columns import proposed_column, typed
from training.proposal.document import Proposal, text_of
from training.proposal.labels import proposed_label

_MOST_ROWS = 1_000_000
_MOST_SHOWN = 8


def propose(
    path: Path,
    labels: Sequence[str],
    weight: str | None = None,
    *,
    losses: Sequence[str] | None = None,
    holds_out: bool,
) -> list[Proposal]:
    """Look at the columns of Parquet or CSV data, and propose features, and a loss for each label.

    Args:
        path: the file or the folder.
        labels: the columns of the labels.
        weight: the column of the weights; None: there is none.
        losses: one loss for all labels, or one for each, by their names for ``--loss``; None: they are proposed.
        holds_out: the last tenth of the rows is kept for evaluation and is not read.

    Raises:
        DataError: the data cannot be read, or no column can be a feature.
        MissingExtraError: pyarrow is not installed.
    """
    pa = import_pyarrow()
    batches = [pa.Table.from_batches([batch]) for batch in _batches(path)]
    table = whole = _together(pa, path, batches)
    if not whole.num_rows:
        raise DataError(path, "no samples")
    if holds_out and whole.num_rows <= _MOST_ROWS:
        table = whole.slice(0, whole.num_rows - max(1, whole.num_rows // 10))
    if not table.num_rows:
        raise DataError(path, ONE_SAMPLE)
    others = [*labels, *([] if weight is None else [weight])]
    for name in others:
        if name not in table.column_names:
            raise DataError(path, missing_from(table.column_names, name), column=name)
    given = [None] if losses is None else [LOSS_OF_OPTION[loss] for loss in losses]
    pairs = zip(labels, given * (len(labels) // len(given)), strict=True)
    of_labels = [proposed_label(pa, path, label, whole.column(label), table.num_rows, loss) for label, loss in pairs]
    read = typed if has_csv(path) else _as_it_is
    found = [
        proposed_column(pa, name, read(pa, table.column(name).combine_chunks()))
        for name in table.column_names
        if name not in others
    ]
    if not any(proposal.feature is not None and proposal.feature["kind"] != "dense" for proposal in found):
        each = (
            "; ".join(f"{proposal.column}: {text_of(proposal)}" for proposal in found[:_MOST_SHOWN]) or "there is none"
        )
        reason = f"no other column can be a category, which an embedding needs ({each})"
        raise DataError(path, f"{reason}. Write a features.json, and give it --features")
    return of_labels + found


def _batches(path: Path) -> Iterator[Any]:
    rows = 0
    for batch in column_batches(path):
        yield batch.slice(0, _MOST_ROWS + _MOST_ROWS // 9 - rows)
        rows += batch.num_rows
        if rows >= _MOST_ROWS + _MOST_ROWS // 9:
            return


def _together(pa: Any, path: Path, tables: Sequence[Any]) -> Any:
    """Return tables, whose columns may have different types in different files, as one."""
    if not tables:
        return pa.table({})
    names = tables[0].column_names
    try:
        return pa.concat_tables([table.select(names) for table in tables], promote_options="permissive")
    except pa.ArrowException as err:
        types = ({str(table.schema.field(name).type): None for table in tables} for name in names)
        name, of_name = next((name, kinds) for name, kinds in zip(names, types, strict=True) if len(kinds) > 1)
        raise DataError(path, f"expected one type in all files, found {', '.join(of_name)}", column=name) from err


def _as_it_is(pa: Any, array: Any) -> Any:
    return array
