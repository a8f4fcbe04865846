"""Which rows feed which input of a network: matched by name."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigError
from serving.importers.checkpoint import Checkpoint, find_table, missing
from serving.importers.network import ImportedNetwork, NetworkInput
from serving.importers.rows import TableRows
from serving.importers.sources import open_checkpoint, open_table


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
    if not opened and place is not None and names:
        raise missing(place, names[0])
    if not opened:
        raise ConfigError(source, "", "no table for any of its inputs; a model has at least one")
    left = [entry for entry in network.inputs if entry.name not in opened]
    return Matching({name: opened[name] for name in names if name in opened}, _dense(source, left, place), unused)


def hint(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that a name is unknown: the one that comes nearest, else those that there are."""
    there = list(known)
    close = difflib.get_close_matches(name, there, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(map(repr, there)) or 'none'}"


def _dense(source: str, left: list[NetworkInput], checkpoint: Checkpoint | None) -> NetworkInput | None:
    """Return the one input without a table, if it can be that of the dense features."""
    vectors = [entry for entry in left if len(entry.sizes) == 2]
    if vectors and checkpoint is not None:
        raise missing(checkpoint, vectors[0].name)
    if vectors or len(left) > 1:
        names = ", ".join(f"{entry.name!r} {entry.shape}" for entry in vectors or left)
        reason = f"no table for {names}; only one input, [B, F], may have none, that of the dense features"
        raise ConfigError(source, "", reason)
    return left[0] if left else None
