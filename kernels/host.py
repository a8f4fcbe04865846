"""Embedding rows in RAM: a table that many threads read while others write, and what goes with looking rows up.

Shapes are given in letters: N keys, R bags of keys, B samples, S slots, T tables, D the table's embedding_vec_size,
V rows of an index.
The four reserved int64 values (the two smallest and the two largest) are refused wherever keys are taken, before
anything is read or written.
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
    decode_rows,
    encode_rows,
    first_outside,
    lookup_threads,
    pool_rows,
    round_rows,
    row_bytes,
    set_lookup_threads,
    split_by_table,
)

__all__ = [
    "HostTable",
    "HostTableStats",
    "KeyIndex",
    "OverflowPolicy",
    "RowDtype",
    "decode_rows",
    "encode_rows",
    "first_outside",
    "lookup_threads",
    "pool_rows",
    "round_rows",
    "row_bytes",
    "set_lookup_threads",
    "split_by_table",
]

RowDtype = Literal["fp32", "fp16", "bf16", "int8", "uint8"]
OverflowPolicy = Literal["evict_random", "evict_least_used", "evict_oldest", "evict_oldest_written"]


@dataclass(frozen=True)
class HostTableStats:
    """What a ``HostTable`` holds and takes.

    Args:
        rows: keys in the table now.
        capacity_rows: keys the table has room for.
        spare_rows: rows beyond the capacity, through which updates go.
        buckets: 64-byte buckets of the index, of five slots each.
        load_ratio: part of the slots that is used now.
        memory_bytes: index, rows, spare rows and stamps.
        longest_probe_buckets: buckets visited to find the key that lies furthest from its home; 0 if there is none.
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

    Rows are given and returned in float32 and kept as ``row_dtype`` says, each value rounded to the nearest there is,
    ties to even:

    - ``"fp32"``: 4 D bytes, any bits;
    - ``"fp16"``, ``"bf16"``: 2 D bytes; a finite value must stay finite;
    - ``"int8"``: D + 4 bytes, value = code * scale, scale = max|x| / 127 of the row; finite values only;
    - ``"uint8"``: D + 8 bytes, value = code * scale + min x, scale = (max x - min x) / 255; finite values only.

    fp32, fp16 and bf16 rows of at most 64 bytes take the next power of two, longer ones whole 32 bytes.

    Every method may be called from any thread. Reads (``fetch``, ``fetch_pooled``, ``items``) take no lock and wait for
    nobody; each row they return is one that was written whole. Writes (``insert``, ``evict``) take turns; a reader sees
    a write row by row. A write waits for reads only if it uses up all spare rows while one read runs. A lookup of many
    keys uses several cores: see ``set_lookup_threads``.
    Another thread may change the arguments of a running call: which rows it then reads or writes is open, but it stays
    inside the arrays and leaves the table whole.
    After ``os.fork()`` the child may read. It must not write if other threads used the table at the time of the fork.
    All memory is taken, and touched, by the constructor: ``HostTable.memory_bytes`` of its arguments.

    What an insert does when there is no room for its keys is the ``overflow_policy``:

    - None: it is refused;
    - ``"evict_random"``: any rows go;
    - ``"evict_least_used"``: those go that were read least often since they were inserted. Counts above 31 are
      estimates; each time as many rows as the capacity were evicted, they are halved;
    - ``"evict_oldest"``: those go that were read or written least recently. Time is counted in rows that were added, to
      a 128th of the capacity;
    - ``"evict_oldest_written"``: the same, without regard to reads.

    Rows go until at most ``target_rows`` are left, or fewer where the call needs more room. Who was first to go among
    equals is open. All but ``"evict_random"`` take a byte more per row and spare row, which reads write to. Choosing
    rows takes the inserting call a pass over the table; reads go on meanwhile.

    Args:
        dim: embedding_vec_size, 1 to 65,536.
        capacity_rows: most keys held at a time, 1 to 3,500,000,000.
        row_dtype: the form in which rows are kept.
        overflow_policy: what a full table does; see above.
        target_rows: how many rows an overflow leaves, 0 to ``capacity_rows``, which is the default.

    Raises:
        ValueError: a number is out of its range, or ``row_dtype`` or ``overflow_policy`` is unknown.
        MemoryError: the system does not give the memory.
    """

    def items(self, batch_rows: int = 65536) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Walk over the table in no particular order.

        A key that is in the table during the whole walk is met exactly once. Of keys that writers add, evict or
        re-insert meanwhile, each may be met or not, and one that was evicted and re-inserted even twice.

        Args:
            batch_rows: most rows per step; at least 1.

        Yields:
            keys int64[N] and their rows float32[N, D], N at most ``batch_rows`` and never 0.

        Raises:
            ValueError: ``batch_rows`` is less than 1.
        """
        cursor = 0
        most = min(batch_rows, self.capacity_rows)
        while True:
            keys, rows, cursor = self._read_items(cursor, most)
            if not keys.size:
                return
            yield keys, rows

    def stats(self) -> HostTableStats:
        """Return the table's figures, as of about now if writers are at work."""
        return HostTableStats(*self._stats())


class KeyIndex(_host.KeyIndex):
    """Int64 key -> row number, 0, 1, 2, ... in order of first appearance; grows as needed, never forgets a key.

    Every method may be called from any thread; ``find`` runs beside other ``find`` calls, ``find_or_insert`` alone.

    Args:
        capacity_rows: keys it has room for before it first grows, 1 to 3,500,000,000.

    Raises:
        ValueError: ``capacity_rows`` is out of its range.
        MemoryError: the system does not give the memory.
    """


def _read_lookup_threads() -> None:
    said = os.environ.get("HOTROW_LOOKUP_THREADS")
    if said is None:
        return
    try:
        set_lookup_threads(int(said))
    except ValueError:
        raise ValueError(f"HOTROW_LOOKUP_THREADS: expected 1 to 64, got {said!r}") from None


_read_lookup_threads()
