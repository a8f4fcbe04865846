"""Which rows the elements of a gradient belong to."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from kernels.host import BagLookup, TrainingTable, merge_lookups

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GradientRows:
    """The rows of a gradient.

    Attributes:
        table: has the rows.
        count: U, the number of rows.
        lookup: finds the rows; None: they are the rows of several processes.
        is_shard: other processes have other rows of the gradient.
        is_notice: there are no rows. One row without a key says that the gradient of another process is not finite.
    """

    table: TrainingTable
    count: int
    lookup: BagLookup | None
    is_shard: bool = False
    is_notice: bool = False


class Piece(NamedTuple):
    """Elements that follow each other in a tensor, if the tensor is read as a vector.

    Attributes:
        rows: the elements are some of the elements [U * width] of these rows. None: they are not of a gradient of rows.
        width: the number of elements of a row.
        start: the first element among those of the rows.
        stop: the end of the elements.
    """

    rows: GradientRows | None
    width: int
    start: int
    stop: int


#: The elements of a tensor. None: their places are unknown.
Pieces = tuple[Piece, ...] | None


def piece_of(rows: GradientRows | None, shape: Sequence[int]) -> Piece:
    """Return the elements of a tensor of a shape, whose first dimension has the rows."""
    return Piece(rows, 0 if rows is None else math.prod(shape[1:]), 0, math.prod(shape))


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Join pieces that follow each other, and leave out empty ones if there are others."""
    together: list[Piece] = []
    for piece in pieces:
        rows, width, start, stop = piece
        last = together[-1] if together else None
        if last is not None and (last.rows, last.width) == (rows, width) and (rows is None or last.stop == start):
            together[-1] = last._replace(stop=last.stop + stop - start)
        else:
            together.append(piece)
    return tuple(span for span in together if span.start < span.stop) or tuple(together)


def cut(pieces: Pieces, start: int, stop: int) -> Pieces:
    """Return the elements from ``start`` to ``stop``."""
    if pieces is None:
        return None
    parts, begin = [], 0
    for rows, width, first, last in pieces:
        end = begin + last - first
        if max(begin, start) <= min(end, stop):
            part = (first + max(start - begin, 0), first + min(end, stop) - begin)
            parts.append(Piece(rows, width, *(part if rows is not None else (0, part[1] - part[0]))))
        begin = end
    return joined(parts)


def union(name: str, parts: Sequence[GradientRows]) -> tuple[GradientRows, dict[GradientRows, Places]]:
    """Return the rows of all parts, and the place of each row in each part, or -1. {}: the parts have the same rows.

    Args:
        name: of the operation that needs them.
        parts: rows of one table.
    """
    lookups = [part.lookup for part in parts if part.lookup is not None]
    if len(lookups) < len(parts):
        refuse(name, parts, "they have different rows, which only all processes together could align")
    lookup, places = merge_lookups(lookups)
    if all(np.array_equal(one, np.arange(part.count)) for part, one in zip(parts, places, strict=True)):
        return parts[0], {}
    return GradientRows(parts[0].table, len(places[0]), lookup, parts[0].is_shard), dict(
        zip(parts, places, strict=True)
    )


def refuse(name: str, rows: Iterable[GradientRows], reason: str) -> NoReturn:
    """Raise an error about gradients of some rows.

    Args:
        name: of the operation that is refused.
        rows: of the gradients.
        reason: why.
    """
    tables = " and ".join(dict.fromkeys(repr(row.table.name) for row in rows))
    # no TypeError, which + would take for "ask the other operand"
    raise ValueError(f"table {tables}: PyTorch's {name!r} of gradients: {reason}")
