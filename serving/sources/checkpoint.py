"""A checkpoint is a file or folder that holds several tables by name."""

import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from serving.errors import ModelFileError, nearest
from serving.sources.rows import BareRows, TableRows

_MOST_NAMES_SHOWN = 5
_log = logging.getLogger(__name__)
# TorchRec's tables are in EmbeddingBagCollection.embedding_bags and EmbeddingCollection.embeddings, both ModuleDicts.
_TORCHREC = re.compile(r"(^|\.)(embedding_bags|embeddings)\.[^.]+\.weight$")


class Checkpoint(Protocol):
    """A file or folder with several tables. ``path`` is where it is."""

    path: Path

    def names(self) -> Sequence[str]:
        """Return every name in it, whether it is a table or not."""

    def tables(self) -> Sequence[str]:
        """Return the names of what may be a table."""

    def rows(self, name: str) -> TableRows | BareRows:
        """Open one of ``names()``. Raise ModelFileError if it is damaged or not a table."""


def without_hidden(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Return the files in order, without those in hidden folders or with hidden names, which the log counts.

    Only ``.`` hides here: the name of a table or of a module may begin with ``_``.
    """
    visible: list[Path] = []
    hidden: list[Path] = []
    for file in sorted(files):
        parts = file.relative_to(folder).parts
        (hidden if any(part.startswith(".") for part in parts) else visible).append(file)
    if hidden:
        some = ", ".join(repr(str(file.relative_to(folder))) for file in hidden[:_MOST_NAMES_SHOWN])
        _log.warning("%s: skipped, because a name begins with '.': %d (%s)", folder, len(hidden), some)
    return visible


def check_parts(source: str, numbers: Iterable[int], count: int, first: int = 0) -> None:
    """Raise ModelFileError unless the parts of a table are numbered from ``first`` on and are ``count``."""
    ordered = sorted(numbers)
    if len(ordered) != count or ordered != list(range(first, first + len(ordered))):
        found = ", ".join(map(str, ordered[:_MOST_NAMES_SHOWN]))
        raise ModelFileError(source, f"expected {count} part{'s' * (count > 1)}, numbered from {first}, found {found}")


def matrices_of(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names in a ``state_dict`` that may be tables: matrices without a bias, because layers have one."""
    return [
        name for name, shape in shapes.items() if len(shape) == 2 and f"{name.removesuffix('weight')}bias" not in shapes
    ]


def table_name(name: str) -> str:
    """Return a table's short name: ``ads`` for ``model.embedding_bags.ads.weight``, ``tables.ads``, ``model/ads``."""
    return re.split("[./]", name.removesuffix(".weight"))[-1]


def is_called(name: str, table: str) -> bool:
    """Return whether ``name`` is ``table`` or ``table.weight``, with any prefix. A table's name may contain dots."""
    ends = (f".{table}", f"/{table}")
    # an input called "weight" must not match the weight of every module
    names = [name.removesuffix(".weight"), name] if table.endswith(".weight") else [name.removesuffix(".weight")]
    return any(f".{name}".endswith(ends) for name in names)


def find_table(checkpoint: Checkpoint, table: str) -> str | None:
    """Return a table's full name in a checkpoint, or None. Raise ModelFileError if several may be meant."""
    found = [name for name in checkpoint.tables() if is_called(name, table)]
    if len(found) > 1:
        found = [name for name in found if _TORCHREC.search(name)] or found
    if len(found) > 1:
        reason = (
            f"several entries may be the table {table!r}: {show_names(found)}; name one: {table}={checkpoint.path}#NAME"
        )
        raise ModelFileError(checkpoint.path, reason)
    return found[0] if found else None


def likeness(checkpoint: Checkpoint, wanted: str) -> float:
    """Return how similar ``wanted`` is to the most similar table name, from 0 to 1."""
    closest = nearest(table_name(wanted), map(table_name, checkpoint.tables()), cutoff=0)
    return max((difflib.SequenceMatcher(None, table_name(wanted), name).ratio() for name in closest), default=0)


def missing(checkpoint: Checkpoint, wanted: str, advice: str = "") -> ModelFileError:
    """Return the error that nothing is called ``wanted``. It lists the nearest names. ``advice`` follows."""
    names = list(checkpoint.names())
    by_short_name = {table_name(name): name for name in names}
    near = nearest(wanted, names, count=_MOST_NAMES_SHOWN, cutoff=0.5)
    near += [by_short_name[short] for short in nearest(table_name(wanted), by_short_name, count=3)]
    near = list(dict.fromkeys(near))
    tensors = (
        f"nearest are {show_names(near)}" if near else f"found {show_names(checkpoint.tables() or names) or 'nothing'}"
    )
    return ModelFileError(checkpoint.path, "; ".join(filter(None, (f"no table {wanted!r}", tensors, advice))))


def show_names(names: Sequence[str]) -> str:
    """Return the first names of a list, for a message."""
    more = f", and {len(names) - _MOST_NAMES_SHOWN} more" if len(names) > _MOST_NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_MOST_NAMES_SHOWN])) + more
