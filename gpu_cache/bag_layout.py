"""How a request of bags lies in memory, and how its bags are dealt to blocks: bags.cuh and missing.cuh, from the host.

Letters for shapes: B samples, S slots, T tables, N keys, F dense features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Combiner = Literal["sum", "mean", "sqrtn"]
COMBINERS: tuple[Combiner, ...] = get_args(Combiner)

MOST_KEYS = 2**30  # of a request: two slots for each are numbered in 31 bits
ITEM_BAGS = 128
BLOCK_THREADS = 256
# Of small requests, enough for a block's tiles to have four keys each under way: more blocks beat longer ones. Where
# there are more blocks than a GPU runs at a time, a whole round: the rows of few long bags leave many threads idle.
_ITEM_KEYS, _LARGE_ITEM_KEYS = 128, 256
_MANY_KEYS = 1 << 18

# ``struct TableBags`` of bags.cuh.
TABLE_BAGS = np.dtype(
    [
        ("row_ptrs_at", "<i8"),
        ("keys_at", "<i8"),
        ("weights_at", "<i8"),
        ("first_float", "<i8"),
        ("bags", "<u4"),
        ("first_item", "<u4"),
        ("item_bags", "<u4"),
        ("first_bag", "<u4"),
        ("first_position", "<u4"),
        ("keys", "<u4"),
        ("combiner", "<u4"),
        ("max_norm", "<f4"),
    ]
)
# ``struct MissingSlot``, ``MissingSet`` and ``MissingReport`` of missing.cuh.
MISSING_SLOT_BYTES = 16
MISSING_SET_BYTES = 88
PROGRESS_WORDS = 2
TEAM_WORDS = 70  # ``struct Team`` of team.cuh
MISSING_REPORT = np.dtype([("keys", "<u4"), ("bags", "<u4"), ("distinct", "<u4"), ("used", "<u4")])


@dataclass(frozen=True)
class BagRows:
    """One table's part in a group.

    Args:
        slots: S.
        combiner: how the rows of a bag become one.
        max_norm: a row that is longer, in the L2 norm, is scaled to this length first; 0: none is.
    """

    slots: int
    combiner: Combiner
    max_norm: float = 0.0


def aligned(size: int, to: int = 16) -> int:
    """Return the next multiple of ``to``."""
    return -(-size // to) * to


def most_request_bytes(tables: Sequence[BagRows], max_samples: int, max_keys: int, dense_dim: int = 0) -> int:
    """Return the bytes of the largest request, with F dense features of each sample."""
    row_ptrs = sum(max_samples * table.slots + 1 for table in tables)
    dense_bytes = aligned(4 * max_samples * dense_dim)
    return len(tables) * TABLE_BAGS.itemsize + dense_bytes + aligned(4 * row_ptrs) + 12 * max_keys


def row_floats(rows: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return where each table's rows, so many of D floats, begin in an answer, and last how many floats it has."""
    return list(accumulate((aligned(count * dim, 4) for count, dim in zip(rows, dims, strict=True)), initial=0))


def out_floats(tables: Sequence[BagRows], dims: Sequence[int], samples: int) -> list[int]:
    """Return the same for the pooled rows of so many samples."""
    return row_floats([samples * table.slots for table in tables], dims)


def room_floats(tables: Sequence[BagRows], dims: Sequence[int], max_samples: int, max_single_keys: int = 0) -> int:
    """Return how many floats the largest answer has: pooled rows, or those of single keys of whichever tables."""
    of_keys = aligned(max_single_keys * max(dims), 4) + 4 * len(dims) if max_single_keys else 0
    return max(out_floats(tables, dims, max_samples)[-1], of_keys)


def lacking_sizes(tables: Sequence[BagRows], max_samples: int, max_single_keys: int = 0) -> tuple[int, int]:
    """Return how many bags, or single keys, each of two launches in a row may list as lacking rows.

    A launch that completes single keys lists none.
    """
    bags = max_samples * sum(table.slots for table in tables)
    return max(bags, max_single_keys), bags


def workspace_bytes(
    tables: Sequence[BagRows],
    dims: Sequence[int],
    max_samples: int,
    max_keys: int,
    dense_dim: int = 0,
    max_single_keys: int = 0,
) -> int:
    """Return how much of the device's memory a ``Workspace`` takes when it is made.

    Its staging comes to that: of each request as many bytes as its missing rows have, twice at most.
    """
    tables_bytes = MISSING_SET_BYTES + 4 * (PROGRESS_WORDS + TEAM_WORDS + 2 * len(tables))
    keys_bytes = 2 * max_keys * MISSING_SLOT_BYTES + 4 * max_keys + 8 * missing_words(max_keys)
    lacking_bytes = 4 * sum(lacking_sizes(tables, max_samples, max_single_keys))
    rows_bytes = 4 * room_floats(tables, dims, max_samples, max_single_keys)
    request_bytes = most_request_bytes(tables, max_samples, max_keys, dense_dim)
    return request_bytes + tables_bytes + keys_bytes + lacking_bytes + rows_bytes


def workspace_host_bytes(tables: Sequence[BagRows], max_samples: int, max_keys: int, dense_dim: int = 0) -> int:
    """Return how much page-locked memory of the host a ``Workspace`` takes when it is made; see ``workspace_bytes``."""
    told_bytes = len(tables) * MISSING_REPORT.itemsize + 12 * max_keys
    return most_request_bytes(tables, max_samples, max_keys, dense_dim) + told_bytes


def missing_words(max_keys: int) -> int:
    """Return the words of a set of bits, one per key."""
    return max_keys // 32 + 1


def deal_items(head: NDArray[np.void]) -> int:
    """Write which items each table's bags make, ``item_bags`` and ``first_item``, into TableBags[T].

    Returns:
        how many items there are.
    """
    bags = head["bags"].astype(np.int64)
    ends = np.cumsum(-(-bags // head["item_bags"]))
    head["first_item"][0] = 0
    head["first_item"][1:] = ends[:-1]
    return int(ends[-1])


def choose_item_bags(head: NDArray[np.void]) -> None:
    """Write how many bags make an item, by the keys they have on average, into TableBags[T]."""
    item_keys = _ITEM_KEYS if head["keys"].sum(dtype=np.int64) < _MANY_KEYS else _LARGE_ITEM_KEYS
    per_item = item_keys * head["bags"].astype(np.int64) // np.maximum(head["keys"], 1)
    head["item_bags"] = np.clip(per_item, 1, ITEM_BAGS)
