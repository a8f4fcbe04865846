"""Find the table that feeds each input of a network, by name."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigError, ModelFileError, ServingError, did_you_mean
from serving.importers.checkpoint import Checkpoint, find_table, likeness, missing, show_names
from serving.importers.network import ImportedNetwork, NetworkInput
from serving.importers.rows import TableRows
from serving.importers.sources import open_checkpoint, open_table

_MISSPELT = 0.6  # the ``likeness`` above which a name is taken for misspelt

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Matching:
    """What feeds each input of a network.

    Attributes:
        rows: each table's rows by the name of its input, in the order of the inputs.
        dense: the input without a table, which takes the dense features. None if every input has a table.
        unused: possible tables of the checkpoint that no input is named after.
    """

    rows: Mapping[str, TableRows]
    dense: NetworkInput | None
    unused: tuple[str, ...]


def match_tables(network: ImportedNetwork, tables: Mapping[str, str | Path], checkpoint: str | Path | None) -> Matching:
    """Open the rows of every input except the dense features.

    Args:
        network: the network.
        tables: where a table's rows are, by the name of its input.
        checkpoint: where the tables of all other inputs are looked up by name.

    Raises:
        ConfigError: a table has no input, or an input has no table.
        ModelFileError: a source cannot be read, or is not a table.
        MissingExtraError: a source needs PyTorch, which is not installed.
    """
    source, names = network.source, [entry.name for entry in network.inputs]
    for name in tables:
        if name not in names:
            raise ConfigError(source, f"table {name!r}", f"the network has no input of this name{hint(name, names)}")
    opened = {name: open_table(name, where) for name, where in tables.items()}
    place = open_checkpoint(Path(checkpoint)) if checkpoint is not None else None
    unused: tuple[str, ...] = ()
    if place is not None:
        found = {name: inside for name in names if name not in tables and (inside := find_table(place, name))}
        opened.update((name, place.rows(inside)) for name, inside in found.items())
        unused = tuple(inside for inside in place.tables() if inside not in found.values())
    left = [entry for entry in network.inputs if entry.name not in opened]
    if not opened and left and place is not None:
        raise _without_table(source, left, place)
    if not opened:
        raise ConfigError(source, "", "none of its inputs has a table; a model needs at least one table")
    dense = _dense(source, left, place)
    if dense is not None and place is not None:
        _tell_of_feeding_tables(source, dense, place, unused)
    return Matching({name: opened[name] for name in names if name in opened}, dense, unused)


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or all of them."""
    there = list(known)
    return did_you_mean(name, there) or f"; there are {show_names(there) or 'none'}"


def _dense(source: str, left: list[NetworkInput], checkpoint: Checkpoint | None) -> NetworkInput | None:
    """Return the one input without a table, which must have the shape of dense features."""
    if len(left) > 1 or any(len(entry.sizes) == 2 for entry in left):
        raise _without_table(source, left, checkpoint)
    return left[0] if left else None


def _without_table(source: str, left: list[NetworkInput], checkpoint: Checkpoint | None) -> ServingError:
    """Return the error that inputs have no table. Name the input that is most likely a misspelt table."""
    vectors = [entry for entry in left if len(entry.sizes) == 2]
    if checkpoint is not None:
        likest = max(vectors or left, key=lambda entry: likeness(checkpoint, entry.name))
        if vectors or len(left) == 1 or likeness(checkpoint, likest.name) > _MISSPELT:
            return missing(checkpoint, likest.name)
    names = ", ".join(f"{entry.name!r} {entry.shape}" for entry in vectors or left)
    reason = f"no table for {names}; only the input of the dense features, [B, F], may have no table"
    there = f"; {checkpoint.path} has {show_names(checkpoint.tables())}" if checkpoint is not None else ""
    return ConfigError(source, "", reason + there)


def _tell_of_feeding_tables(source: str, dense: NetworkInput, checkpoint: Checkpoint, unused: Sequence[str]) -> None:
    """Warn if an unused table fits the input that was taken for dense features: it may be misspelt."""
    fitting = [name for name in unused if _fills(dense, checkpoint, name)]
    if fitting:
        _log.warning(
            "%s: input %r %s has no table and takes the dense features; should one of these tables feed it: %s?",
            *(source, dense.name, dense.shape, show_names(fitting)),
        )


def _fills(entry: NetworkInput, checkpoint: Checkpoint, name: str) -> bool:
    try:
        return entry.sizes[0] % checkpoint.rows(name).dim == 0
    except ModelFileError:  # it is not a table
        return False
