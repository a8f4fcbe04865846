"""Find the table that feeds each input of a network, by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigError, ModelFileError, ServingError, did_you_mean
from serving.importers.network import ImportedNetwork, NetworkInput
from serving.sources import open_checkpoint, open_table
from serving.sources.checkpoint import Checkpoint, find_table, likeness, missing, show_names
from serving.sources.rows import BareDtype, BareRows, TableRows

_MISSPELT = 0.6  # the ``likeness`` above which a name is taken for misspelt

_DENSE = "dense"
_ADVICE = "if it takes the dense features, add --dense {0} (dense={0!r})"


@dataclass(frozen=True, slots=True)
class Matching:
    """What feeds each input of a network.

    Attributes:
        rows: each table's rows by the name of its input, in the order of the inputs.
        dense: the input that takes the dense features. None if every input has a table.
        unused: possible tables of the checkpoint that no input is named after.
    """

    rows: Mapping[str, TableRows]
    dense: NetworkInput | None
    unused: tuple[str, ...]


def match_tables(
    network: ImportedNetwork,
    tables: Mapping[str, str | Path],
    checkpoint: str | Path | None,
    dense: str | None = None,
    row_dtype: BareDtype | None = None,
) -> Matching:
    """Open the rows of every input except the dense features.

    Args:
        network: the network.
        tables: where a table's rows are, by the name of its input.
        checkpoint: where the tables of all other inputs are looked up by name.
        dense: the input of the dense features. None: the input called ``dense``, if there is one without a table.
        row_dtype: the type of vectors in files without a header. None: the type that alone fits the input.

    Raises:
        ConfigError: a table has no input, an input has no table, or the type of its vectors is unknown.
        ModelFileError: a source cannot be read, or is not a table.
        MissingExtraError: a source needs PyTorch, which is not installed.
    """
    source, names = network.source, [entry.name for entry in network.inputs]
    for name in tables:
        if name not in names:
            raise ConfigError(source, f"table {name!r}", f"the network has no input of this name{hint(name, names)}")
    if dense is not None and (dense not in names or dense in tables):
        reason = "has a table" if dense in tables else f"the network has no input of this name{hint(dense, names)}"
        raise ConfigError(source, f"dense {dense!r}", reason)
    opened = {name: open_table(name, where) for name, where in tables.items()}
    place = open_checkpoint(Path(checkpoint)) if checkpoint is not None else None
    unused: tuple[str, ...] = ()
    if place is not None:
        wanted = [name for name in names if name not in tables and name != dense]
        found = {name: inside for name in wanted if (inside := find_table(place, name))}
        if dense is None and len(network.inputs) > 1 and _DENSE in found:
            reason = f"takes the dense features, or the rows of {found[_DENSE]!r}"
            advice = f"choose: --dense {_DENSE} (dense=...), or --table {_DENSE}={place.path}#{found[_DENSE]}"
            raise ConfigError(source, f"input {_DENSE!r}", f"{reason}; {advice}")
        _refuse_shared(place, found)
        opened.update((name, place.rows(inside)) for name, inside in found.items())
        unused = tuple(inside for inside in place.tables() if inside not in found.values())
    left = [entry for entry in network.inputs if entry.name not in opened]
    if not opened and left and place is not None:
        raise _without_table(source, left, place)
    if not opened:
        raise ConfigError(source, "", "none of its inputs has a table; a model needs at least one table")
    of_dense = _dense(source, left, place, dense or _DENSE)
    if row_dtype is not None and not any(isinstance(rows, BareRows) for rows in opened.values()):
        raise ConfigError("row_dtype", "", "has no effect: every table's file states its type")
    decided = {
        entry.name: _decided(source, entry, opened[entry.name], row_dtype)
        for entry in network.inputs
        if entry.name in opened
    }
    return Matching(decided, of_dense, unused)


def _decided(source: str, entry: NetworkInput, rows: TableRows | BareRows, row_dtype: BareDtype | None) -> TableRows:
    """Return rows with a known type: the user's, or the only type that fits the input."""
    if not isinstance(rows, BareRows):
        return rows
    if row_dtype is not None:
        return rows.as_dtype(row_dtype)
    fitting = rows.fitting(entry.sizes)
    if "fp16" not in fitting:  # the size alone does not tell the two halves apart
        return rows.as_dtype("fp32")
    maybe = f"float32 [{rows.row_bytes // 4}] or " if "fp32" in fitting else ""
    reason = (
        f"is {entry.shape}, and {rows.source} has {rows.row_bytes} bytes per key: {maybe}float16 or bfloat16 "
        f"[{rows.row_bytes // 2}]; no file says which; add --row-dtype fp32, fp16 or bf16 (row_dtype=...)"
    )
    raise ConfigError(source, f"input {entry.name!r}", reason)


def _refuse_shared(checkpoint: Checkpoint, found: Mapping[str, str]) -> None:
    """Refuse an entry whose name ends like two inputs, because it can be the table of only one input."""
    inputs: dict[str, str] = {}
    for name, inside in found.items():
        if inside in inputs:
            both = f"{inputs[inside]!r} and {name!r}"
            reason = f"may be the table of two inputs, {both}; name the table of each: {name}={checkpoint.path}#NAME"
            raise ModelFileError(f"{checkpoint.path}#{inside}", reason)
        inputs[inside] = name


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or all of them."""
    names = list(known)
    return did_you_mean(name, names) or f"; there are {show_names(names) or 'none'}"


def _dense(source: str, left: list[NetworkInput], checkpoint: Checkpoint | None, name: str) -> NetworkInput | None:
    """Return the input of the dense features. Every other input must have a table."""
    dense = next((entry for entry in left if entry.name == name and len(entry.sizes) == 1), None)
    others = [entry for entry in left if entry is not dense]
    if others:
        raise _without_table(source, others, checkpoint)
    return dense


def _without_table(source: str, left: list[NetworkInput], checkpoint: Checkpoint | None) -> ServingError:
    """Return the error that inputs have no table. Name the input that is most likely a misspelt table."""
    vectors = [entry for entry in left if len(entry.sizes) == 2]
    if checkpoint is not None:
        likest = max(vectors or left, key=lambda entry: likeness(checkpoint, entry.name))
        if vectors or len(left) == 1 or likeness(checkpoint, likest.name) > _MISSPELT:
            is_flat = len(likest.sizes) == 1
            return missing(checkpoint, likest.name, _ADVICE.format(likest.name) if is_flat else "")
    names = ", ".join(f"{entry.name!r} {entry.shape}" for entry in vectors or left)
    flat = [entry.name for entry in left if len(entry.sizes) == 1]
    advice = f"; {_ADVICE.format(flat[0])}" if len(left) == 1 and flat else ""
    if len(flat) > 1:
        advice = f"; one of {', '.join(map(repr, flat))} may take the dense features: --dense NAME (dense=...)"
    reason = f"no table for {names}{advice}"
    tables = f"; {checkpoint.path} has {show_names(checkpoint.tables())}" if checkpoint is not None else ""
    return ConfigError(source, "", reason + tables)
