"""A checkpoint: one place that holds tables by name; and how a table is found in it."""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from serving.errors import ModelFileError
from serving.importers.rows import TableRows

_MOST_NAMES_SHOWN = 5
# Where TorchRec keeps tables: EmbeddingBagCollection.embedding_bags, EmbeddingCollection.embeddings (both ModuleDicts).
_TORCHREC = re.compile(r"(^|\.)(embedding_bags|embeddings)\.[^.]+\.weight$")


class Checkpoint(Protocol):
    """A file or folder with tables in it.

    Attributes:
        path: the file or folder.
    """

    path: Path

    def names(self) -> Sequence[str]:
        """Return the name of everything in it, tables or not."""

    def tables(self) -> Sequence[str]:
        """Return the names of what may be a table."""

    def rows(self, name: str) -> TableRows:
        """Open one of ``names()``.

        Raises:
            ModelFileError: it is no table, or damaged.
        """


def matrices_of(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names of a ``state_dict`` that may be tables: matrices without a bias beside, which layers have."""
    return [
        name for name, shape in shapes.items() if len(shape) == 2 and f"{name.removesuffix('weight')}bias" not in shapes
    ]


def table_name(name: str) -> str:
    """Return what a table is called: ``ads`` for ``model.embedding_bags.ads.weight``, ``tables.ads``, ``model/ads``."""
    return re.split("[./]", name.removesuffix(".weight"))[-1]


def is_called(name: str, table: str) -> bool:
    """Tell whether ``name`` is ``table`` or ``table.weight``, with anything in front; a table's name may have dots."""
    ends = (f".{table}", f"/{table}")
    # an input that is called "weight" is not every module's weight
    names = [name.removesuffix(".weight"), name] if table.endswith(".weight") else [name.removesuffix(".weight")]
    return any(f".{one}".endswith(ends) for one in names)


def find_table(checkpoint: Checkpoint, table: str) -> str | None:
    """Return the name under which a checkpoint has a table; None where it has none of this name.

    Of several, the one in a TorchRec collection counts.

    Raises:
        ModelFileError: more than one may be meant.
    """
    found = [name for name in checkpoint.tables() if is_called(name, table)]
    if len(found) > 1:
        found = [name for name in found if _TORCHREC.search(name)] or found
    if len(found) > 1:
        reason = f"which one is the table {table!r}: {show_names(found)}? Name it: {table}={checkpoint.path}#NAME"
        raise ModelFileError(checkpoint.path, reason)
    return found[0] if found else None


def likeness(checkpoint: Checkpoint, wanted: str) -> float:
    """Return how like the likest table's name is to what no table is called, 0 to 1."""
    names = (table_name(name) for name in checkpoint.tables())
    return max((difflib.SequenceMatcher(None, table_name(wanted), name).ratio() for name in names), default=0)


def missing(checkpoint: Checkpoint, wanted: str) -> ModelFileError:
    """Return the error that nothing is called ``wanted``; it lists what comes nearest."""
    names = list(checkpoint.names())
    by_short_name = {table_name(name): name for name in names}
    near = difflib.get_close_matches(wanted, names, n=_MOST_NAMES_SHOWN, cutoff=0.5)
    near += [by_short_name[short] for short in difflib.get_close_matches(table_name(wanted), by_short_name, n=3)]
    near = list(dict.fromkeys(near))
    there = (
        f"nearest are {show_names(near)}"
        if near
        else f"there is {show_names(checkpoint.tables() or names) or 'nothing'}"
    )
    return ModelFileError(checkpoint.path, f"no table {wanted!r}; {there}")


def show_names(names: Sequence[str]) -> str:
    """Return the first of many names, for a message."""
    more = f", and {len(names) - _MOST_NAMES_SHOWN} more" if len(names) > _MOST_NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_MOST_NAMES_SHOWN])) + more
