"""The arguments of DeepRec's fused lookups, and which partition has which ids."""

from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from training.arguments import one_of, shown, whole

PartitionStrategy = Literal["div", "mod"]
Ints = NDArray[np.int64]


class Part(NamedTuple):
    """The ids of one partition.

    Attributes:
        keys: their rows in the partition.
        row_ptrs: of the same bags.
        places: where they are among all ids.
    """

    keys: Ints
    row_ptrs: Ints
    places: Ints


def split(
    name: str, keys: Ints, row_ptrs: Ints, sizes: Sequence[int], strategy: PartitionStrategy | None
) -> list[Part]:
    """Divide ids between partitions.

    Args:
        name: of the lookup, for messages.
        keys: int64[N], ids that the partitions have.
        row_ptrs: int64[R + 1], where the ids of each row begin.
        sizes: the rows of each of the n partitions.
        strategy: "div": ranges of ids. "mod": id k is row k // n of partition k % n. None: there is one partition.

    Raises:
        ValueError: the strategy is unknown, or the sizes are none that it makes.
    """
    one_of(name, "partition_strategy", strategy, (None, *get_args(PartitionStrategy)))
    if len(sizes) == 1:
        return [Part(keys, row_ptrs, np.arange(len(keys)))]
    if strategy is None:
        raise ValueError(f"{name}: expected the partition_strategy 'div' or 'mod' of {len(sizes)} partitions, got None")
    rows, more = divmod(sum(sizes), len(sizes))
    expected = [rows + (number < more) for number in range(len(sizes))]
    if list(sizes) != expected:
        raise ValueError(f"{name}: expected partitions of {expected} rows, got {list(sizes)}")
    if strategy == "mod":
        places_in_part, part_of = np.divmod(keys, len(sizes))
    else:
        ends = np.cumsum(sizes)
        part_of = np.searchsorted(ends, keys, side="right")
        places_in_part = keys - (ends - sizes)[part_of]
    places = [np.flatnonzero(part_of == number) for number in range(len(sizes))]
    return [Part(places_in_part[some], np.searchsorted(some, row_ptrs), some) for some in places]


def require_norm(place: str, max_norm: Any) -> None:
    """Refuse a ``max_norm`` that is not a number. ``kernels.host`` refuses numbers that are not above 0."""
    if not isinstance(max_norm, Real | None):
        raise TypeError(f"{place}: expected max_norm as a number, got {shown(max_norm)}")


def refuse_blocknums(name: str, blocknums: Any) -> None:
    """Refuse what no fused lookup of DeepRec supports."""
    if blocknums is not None:
        reason = "it is for elastic dimensions (DynamicEmbeddingVariable), which no fused lookup of DeepRec supports"
        raise ValueError(f"{name}: expected no blocknums: {reason}")


def checked_default(name: str, default_id: Any, rows: int) -> int:
    """Return the id of rows without ids."""
    if default_id is None:
        return 0
    checked = whole(name, "default_id", default_id)
    if not 0 <= checked < rows:
        raise IndexError(f"{name}: expected a default_id from 0 to {rows - 1}, got {checked}")
    return checked
