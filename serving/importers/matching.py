"""Which rows feed which input of a network: matched by name."""

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigError, ModelFileError, ServingError
from serving.importers.checkpoint import Checkpoint, find_table, likeness, missing, show_names
from serving.importers.network import ImportedNetwork, NetworkInput
from serving.importers.rows import TableRows
from serving.importers.sources import open_checkpoint, open_table

_MISSPELT = 0.6  # of ``likeness``

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Matching:
    """What each input of a network is fed with.

    Attributes:
        rows: of the tables, by name of their input, in the order of the inputs.
        dense: the input that no table feeds, that of the dense features; None where every input has a table.
        unused: what in the checkpoint may be a table, and no input is called like.
    """

    rows: Mapping[str, TableRows]
    dense: NetworkInput | None
    unused: tuple[str, ...]


def match_tables(network: ImportedNetwork, tables: Mapping[str, str | Path], checkpoint: str | Path | None) -> Matching:
    """Open the rows for every input of a network, but for that of the dense features.

    Args:
        network: the network.
        tables: where the rows of a table are, by the name of its input.
        checkpoint: where the tables of all other inputs are looked for by name.

    Raises:
        ConfigError: a table for no input, or an input for no table.
        ModelFileError: a source cannot be read, or is no table.
        MissingExtraError: reading a source takes PyTorch, which is not installed.
    """
    source, names = str(network.path), [entry.name for entry in network.inputs]
    for name in tables:
        if name not in names:
            raise ConfigError(source, f"table {name!r}", f"no input of the network is called so{hint(name, names)}")
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
        raise ConfigError(source, "", "no table for any of its inputs; a model has at least one")
    dense = _dense(source, left, place)
    if dense is not None and place is not None:
        _tell_of_feeding_tables(source, dense, place, unused)
    return Matching({name: opened[name] for name in names if name in opened}, dense, unused)


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that a name is unknown: the one that comes nearest, else those that there are."""
    there = list(known)
    close = difflib.get_close_matches(name, there, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(map(repr, there)) or 'none'}"


def _dense(source: str, left: list[NetworkInput], checkpoint: Checkpoint | None) -> NetworkInput | None:
    """Return the one input without a table, if it can be that of the dense features."""
    if len(left) > 1 or any(len(entry.sizes) == 2 for entry in left):
        raise _without_table(source, left, checkpoint)
    return left[0] if left else None


def _without_table(source: str, left: list[NetworkInput], checkpoint: Checkpoint | None) -> ServingError:
    """Return the error that inputs lack a table; it names one that is surely a table's, if there is such a one.

    That is one of [B, S, D]; or the only one; or of several [B, F], the one that a table of the checkpoint is called
    almost like.
    """
    vectors = [entry for entry in left if len(entry.sizes) == 2]
    if checkpoint is not None:
        likest = max(vectors or left, key=lambda entry: likeness(checkpoint, entry.name))
        if vectors or len(left) == 1 or likeness(checkpoint, likest.name) > _MISSPELT:
            return missing(checkpoint, likest.name)
    names = ", ".join(f"{entry.name!r} {entry.shape}" for entry in vectors or left)
    reason = f"no table for {names}; only one input, [B, F], may have none, that of the dense features"
    there = f"; in {checkpoint.path} there is {show_names(checkpoint.tables())}" if checkpoint is not None else ""
    return ConfigError(source, "", reason + there)


def _tell_of_feeding_tables(source: str, dense: NetworkInput, checkpoint: Checkpoint, unused: Sequence[str]) -> None:
    """Warn where an unused table's rows would fill the input that was taken for dense features: is it misspelt?"""
    fitting = [name for name in unused if _fills(dense, checkpoint, name)]
    if fitting:
        _log.warning(
            "%s: input %r %s is taken for dense features, as no table is called so; should one of these feed it: %s?",
            *(source, dense.name, dense.shape, show_names(fitting)),
        )


def _fills(entry: NetworkInput, checkpoint: Checkpoint, name: str) -> bool:
    try:
        return entry.sizes[0] % checkpoint.rows(name).dim == 0
    except ModelFileError:  # it is no table
        return False
