"""Embedding rows in RAM: a table that many threads read while others write, and functions for lookups.

Letters for shapes: N keys, R bags of keys, B samples, S slots, T tables, D embedding_vec_size, V keys of an index.
Every call refuses the four reserved int64 keys (the two smallest and the two largest) before it reads or writes.
Methods that are not documented here are documented in ``kernels/_host.pyi``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kernels import _host
from kernels._host import (
    ArrayRows,
    BagLookup,
    FeatureTransform,
    PooledLookup,
    RequestPacker,
    Tensors,
    TrainingTable,
    array_gradients,
    cut_texts,
    decode_norm,
    decode_rows,
    encode_rows,
    fetch_tables,
    find_texts,
    first_outside,
    floats_of,
    gather_bags,
    integers_of,
    keys_by_owner,
    look_up_bags,
    lookup_threads,
    merge_gradients,
    merge_lookups,
    numbers_in_json,
    pack_rows,
    pool_rows,
    read_keys,
    read_tensors,
    round_rows,
    row_bytes,
    set_lookup_threads,
    split_by_table,
    split_message,
    sum_row_gradients,
    tensor_forms,
    update_tables,
    vocabulary_file,
    weight_gradients,
)
from kernels.system_cores import usable_cores
from kernels.system_memory import check_memory

__all__ = [
    "ArrayRows",
    "BagLookup",
    "FeatureTransform",
    "HostTable",
    "HostTableStats",
    "KeyIndex",
    "OverflowPolicy",
    "PooledLookup",
    "RequestPacker",
    "RowDtype",
    "Tensors",
    "TrainingTable",
    "array_gradients",
    "cut_texts",
    "decode_norm",
    "decode_rows",
    "encode_rows",
    "fetch_tables",
    "find_texts",
    "first_outside",
    "floats_of",
    "gather_bags",
    "integers_of",
    "keys_by_owner",
    "look_up_bags",
    "lookup_threads",
    "merge_gradients",
    "merge_lookups",
    "numbers_in_json",
    "pack_rows",
    "pool_rows",
    "read_keys",
    "read_tensors",
    "round_rows",
    "row_bytes",
    "set_lookup_threads",
    "split_by_table",
    "split_message",
    "sum_row_gradients",
    "tensor_forms",
    "update_tables",
    "vocabulary_file",
    "weight_gradients",
]

_DEFAULT_MOST_LOOKUP_THREADS = 8

RowDtype = Literal["fp32", "fp16", "bf16", "int8", "uint8"]
OverflowPolicy = Literal["evict_random", "evict_least_used", "evict_oldest", "evict_oldest_written"]


@dataclass(frozen=True)
class HostTableStats:
    """The figures of a ``HostTable``.

    Args:
        rows: keys in the table now.
        capacity_rows: keys that fit.
        spare_rows: rows beyond the capacity, which updates use.
        buckets: 64-byte buckets of the index, with five slots each.
        load_ratio: the share of the slots that is used now.
        memory_bytes: index, rows, spare rows and stamps.
        longest_probe_buckets: buckets visited to find the key that is furthest from its home; 0 without keys.
        evicted_rows: keys that the table evicted to make room for others.
    """

    rows: int
    capacity_rows: int
    spare_rows: int
    buckets: int
    load_ratio: float
    memory_bytes: int
    longest_probe_buckets: int
    evicted_rows: int


class HostTable(_host.HostTable):
    """One table's embedding rows in RAM: int64 key -> float32[D].

    Rows are passed and returned in float32 and kept in the ``row_dtype``, each value rounded to the nearest, ties to
    even:

    - ``"fp32"``: 4 D bytes, any bits;
    - ``"fp16"``, ``"bf16"``: 2 D bytes; a finite value must stay finite;
    - ``"int8"``: D + 4 bytes, value = code * scale, scale = max|x| / 127 of the row; finite values only;
    - ``"uint8"``: D + 8 bytes, value = code * scale + min x, scale = (max x - min x) / 255; finite values only.

    fp32, fp16 and bf16 rows of at most 64 bytes take the next power of two, longer rows a multiple of 32 bytes.

    Every method may be called from any thread. Reads (``fetch``, ``fetch_pooled``, ``items``) take no lock and never
    wait; every row they return was written as a whole. Writes (``insert``, ``evict``) take turns; a reader sees a write
    row by row. A write waits for reads only if it uses up all spare rows while one read runs. A lookup of many keys
    uses several cores: see ``set_lookup_threads``.

    If another thread changes the arguments of a running call, the call may read or write other rows, but it stays
    inside the arrays and does not damage the table. After ``os.fork()`` the child may read. It must not write if other
    threads used the table at the time of the fork. The constructor takes and touches all memory:
    ``HostTable.memory_bytes`` of its arguments.

    The ``overflow_policy`` decides what an insert does when its new keys do not fit:

    - None: the insert is refused;
    - ``"evict_random"``: it evicts random rows;
    - ``"evict_least_used"``: it evicts the rows that were read least often since they were inserted. Counts above 31
      are estimates. All counts are halved each time ``capacity_rows`` rows were evicted;
    - ``"evict_oldest"``: it evicts the rows that were read or written least recently. Time is counted in added rows, to
      a 128th of the capacity;
    - ``"evict_oldest_written"``: the same, ignoring reads.

    It evicts until at most ``target_rows`` are left, or fewer if the call needs more room. The order among equal rows
    is undefined. Every policy except ``"evict_random"`` takes one more byte per row and spare row, and reads write to
    it. To choose rows, the inserting call scans the table; reads go on.

    Args:
        dim: embedding_vec_size, 1 to 65,536.
        capacity_rows: the most keys held at a time, 1 to 3,500,000,000.
        row_dtype: how rows are kept.
        overflow_policy: what a full table does; see above.
        target_rows: how many rows an overflow leaves, 0 to ``capacity_rows``; by default ``capacity_rows``.

    Raises:
        ValueError: a number is out of range, or ``row_dtype`` or ``overflow_policy`` is unknown.
        MemoryError: the system or the container does not have the memory; it is checked before any is touched.
    """

    def __init__(
        self,
        dim: int,
        capacity_rows: int,
        row_dtype: RowDtype = "fp32",
        overflow_policy: OverflowPolicy | None = None,
        target_rows: int | None = None,
    ) -> None:
        """See the class."""
        needed_bytes = self.memory_bytes(dim, capacity_rows, row_dtype, overflow_policy)
        check_memory(needed_bytes)
        try:
            super().__init__(dim, capacity_rows, row_dtype, overflow_policy, target_rows)
        except MemoryError:
            raise MemoryError(f"the system refused {needed_bytes:,} bytes of memory") from None

    def items(self, batch_rows: int = 65536) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Iterate over the table in no particular order.

        A key that is in the table all the time is returned exactly once. A key that is added or evicted during the
        call may be returned or not, and a key that is evicted and inserted again may be returned twice.

        Args:
            batch_rows: the most rows per step; at least 1.

        Yields:
            keys int64[N] and their rows float32[N, D], N at most ``batch_rows`` and never 0.

        Raises:
            ValueError: ``batch_rows`` is less than 1.
        """
        cursor = 0
        most_rows = min(batch_rows, self.capacity_rows)
        while True:
            keys, rows, cursor = self._read_items(cursor, most_rows)
            if not keys.size:
                return
            yield keys, rows

    def stats(self) -> HostTableStats:
        """Return the table's figures, which are approximate during writes."""
        return HostTableStats(*self._stats())


class KeyIndex(_host.KeyIndex):
    """Int64 key -> row number 0, 1, 2, ... in order of first appearance; thread-safe, grows from ``capacity_rows``."""


def _read_lookup_threads() -> None:
    value = os.environ.get("HOTROW_LOOKUP_THREADS")
    if value is None:
        set_lookup_threads(min(usable_cores(), _DEFAULT_MOST_LOOKUP_THREADS))
        return
    try:
        set_lookup_threads(int(value))
    except ValueError:
        raise ValueError(f"HOTROW_LOOKUP_THREADS: expected 1 to 64, got {value!r}") from None


_read_lookup_threads()
