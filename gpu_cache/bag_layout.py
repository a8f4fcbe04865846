"""The layout of a request of bags in memory, and how blocks share its bags: bags.cuh and missing.cuh for the host.

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

MOST_KEYS = 2**30  # of a request: each key has two slots, and slots are numbered in 31 bits
BLOCK_THREADS = 256

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
MISSING_REPORT = np.dtype([("keys", "<u4"), ("bags", "<u4"), ("distinct", "<u4"), ("used", "<u4"), ("absent", "<u4")])


@dataclass(frozen=True)
class BagRows:
    """How the bags of one table are pooled.

    Args:
        slots: S.
        combiner: how the rows of a bag become one row.
        max_norm: a row with a larger L2 norm is first scaled to this norm; 0: no row is scaled.
    """

    slots: int
    combiner: Combiner
    max_norm: float = 0.0


def aligned(size: int, to: int = 16) -> int:
    """Return the next multiple of ``to``."""
    return -(-size // to) * to


def most_request_bytes(tables: Sequence[BagRows], max_samples: int, max_keys: int, dense_dim: int = 0) -> int:
    """Return the bytes of the largest request, with F dense features per sample."""
    row_ptrs = sum(max_samples * table.slots + 1 for table in tables)
    dense_bytes = aligned(4 * max_samples * dense_dim)
    return len(tables) * TABLE_BAGS.itemsize + dense_bytes + aligned(4 * row_ptrs) + 12 * max_keys


def row_floats(rows: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return the first float of each table's rows in an answer, and the number of floats in the answer."""
    return list(accumulate((aligned(count * dim, 4) for count, dim in zip(rows, dims, strict=True)), initial=0))


def out_floats(tables: Sequence[BagRows], dims: Sequence[int], samples: int) -> list[int]:
    """Return ``row_floats`` for the pooled rows of this many samples."""
    return row_floats([samples * table.slots for table in tables], dims)


def most_floats(tables: Sequence[BagRows], dims: Sequence[int], max_samples: int, max_single_keys: int = 0) -> int:
    """Return the floats of the largest answer: of pooled rows, or of the rows of single keys of any tables."""
    of_keys = aligned(max_single_keys * max(dims), 4) + 4 * len(dims) if max_single_keys else 0
    return max(out_floats(tables, dims, max_samples)[-1], of_keys)


def incomplete_sizes(tables: Sequence[BagRows], max_samples: int, max_single_keys: int = 0) -> tuple[int, int]:
    """Return the most bags or single keys that a launch lists as incomplete, and the most bags of the next launch."""
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
    """Return the device memory that a new ``Workspace`` takes; staging adds at most twice the bytes of missing rows."""
    tables_bytes = MISSING_SET_BYTES + 4 * (PROGRESS_WORDS + TEAM_WORDS + 3 * len(tables)) + 16 * len(tables)
    keys_bytes = 2 * max_keys * MISSING_SLOT_BYTES + 16 * max_keys + 8 * missing_words(max_keys)
    incomplete_bytes = 4 * sum(incomplete_sizes(tables, max_samples, max_single_keys))
    rows_bytes = 4 * most_floats(tables, dims, max_samples, max_single_keys)
    request_bytes = most_request_bytes(tables, max_samples, max_keys, dense_dim)
    return request_bytes + tables_bytes + keys_bytes + incomplete_bytes + rows_bytes


def workspace_host_bytes(tables: Sequence[BagRows], max_samples: int, max_keys: int, dense_dim: int = 0) -> int:
    """Return the page-locked host memory that a new ``Workspace`` takes; see ``workspace_bytes`` about staging."""
    report_bytes = len(tables) * (MISSING_REPORT.itemsize + 16) + 16 * max_keys
    return most_request_bytes(tables, max_samples, max_keys, dense_dim) + report_bytes


def missing_words(max_keys: int) -> int:
    """Return the words of a bit set with one bit per key."""
    return max_keys // 32 + 1


def deal_items(head: NDArray[np.void]) -> int:
    """Write each table's ``first_item`` into TableBags[T], and return the number of items."""
    bags = head["bags"].astype(np.int64)
    ends = np.cumsum(-(-bags // head["item_bags"]))
    head["first_item"][0] = 0
    head["first_item"][1:] = ends[:-1]
    return int(ends[-1])
