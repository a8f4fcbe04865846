"""Lookups in tables whose rows are spread over several processes.

Each process sends the distinct keys of its bags to the processes that own them, gets their rows, and pools them. On the
way back it sums the gradients of each row and sends them to the row's owner. So a row that many bags read crosses once.
All tables share each message.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels.host import (
    ArrayRows,
    BagLookup,
    array_gradients,
    first_outside,
    keys_by_owner,
    look_up_bags,
    weight_gradients,
)
from training.embedding.inputs import FeatureBags
from training.embedding.lookups import Floats, Table, need_rows, weights_of
from training.processes import Processes

Ints = NDArray[np.int64]
Numbers = TypeVar("Numbers", bound=NDArray[Any])
#: Which process owns a row: the process ``key % processes``, or the process of the row's table.
Sharding = Literal["key", "table"]


@dataclass(frozen=True, slots=True)
class OwnedTable:
    """A table, and which of its rows a process owns.

    Attributes:
        table: the rows of this process.
        owner: the process that owns all rows; None: process ``key % processes`` owns a row.
        row_of: finds the rows int64[N] of keys that this process owns in its array; -1: a key has none, and its vector
            is zero. None: the table finds them.
    """

    table: Table
    owner: int | None
    row_of: Callable[[Ints], Ints] | None = None

    def bags(self, keys: Ints) -> tuple[Ints, Ints | None]:
        """Return one bag for each key, in the table's own numbers: keys and row_ptrs."""
        if self.row_of is None:
            return keys, None
        rows = self.row_of(keys)
        has_row = rows >= 0
        if has_row.all():
            return rows, None
        return rows[has_row], np.concatenate([[0], has_row.cumsum()])


class _Request:
    """The distinct keys of one lookup, in the order of their owners.

    Attributes:
        keys: int64[U].
        counts: int64[processes], how many each process owns.
        places: int64[N], where each key of the bags is among ``keys``.
        slots: int64[U], the slot in which each key is; empty if the table does not keep them.
    """

    def __init__(self, of: OwnedTable, bags: FeatureBags, processes: int) -> None:
        config = of.table.config
        if config.rows is not None:
            _require_rows(of.table.name, bags.keys, config.rows)
        owner = -1 if of.owner is None else of.owner
        distinct = config.admit_after == 1  # otherwise every sighting counts
        self.keys, self.counts, self.places, firsts = keys_by_owner(bags.keys, processes, owner, distinct)
        self.slots = bags.slots_of(firsts) if config.keeps_slots else np.empty(0, np.int64)


def _require_rows(table: str, keys: Ints, rows: int) -> None:
    """Raise IndexError for a key outside fixed rows before it is sent, so the process that has it raises."""
    place = first_outside(keys, 0, rows - 1)
    if place < keys.size:
        raise IndexError(f"table {table!r}: expected keys from 0 to {rows - 1}, got {keys[place]} at position {place}")


class SharedLookups:
    """Lookups in the tables of several processes. See ``Lookups``. Every process makes the same lookups at a time."""

    def __init__(
        self,
        processes: Processes,
        tables: Sequence[OwnedTable],
        bags: Sequence[FeatureBags],
        trains: Sequence[bool],
        divisor: int,
    ) -> None:
        """Look up the bags of each table.

        Args:
            processes: that make the lookups.
            tables: of each lookup.
            bags: of each lookup.
            trains: of each lookup: keys get rows.
            divisor: a row's gradient is the sum over the processes, divided by this number.
        """
        self._processes = processes
        self._divisor = divisor
        requests = [_Request(table, one, processes.size) for table, one in zip(tables, bags, strict=True)]
        self._sent = np.stack([request.counts for request in requests], axis=1)  # [processes, lookups]
        count = len(tables)
        keys, self._received = self._exchange([request.keys for request in requests], self._sent)
        slots: Sequence[int | Ints] = [1] * count
        if any(does and of.table.config.keeps_slots for does, of in zip(trains, tables, strict=True)):
            kept = [of.table.config.keeps_slots for of in tables]
            came, _ = self._exchange([request.slots for request in requests], self._sent * kept, self._received * kept)
            slots = [numbers if keeps else 1 for numbers, keeps in zip(came, kept, strict=True)]
        own_keys, row_ptrs = zip(*(of.bags(one) for of, one in zip(tables, keys, strict=True)), strict=True)
        owned = look_up_bags(
            [of.table.native for of in tables], own_keys, row_ptrs, ["sum"] * count, [None] * count, slots, trains
        )
        self._owned: list[BagLookup] = [lookup for lookup, _ in owned]
        rows, _ = self._exchange([vectors for _, vectors in owned], self._received, self._sent)
        answers = look_up_bags(
            [ArrayRows(vectors, of.table.name) for vectors, of in zip(rows, tables, strict=True)],
            [request.places for request in requests],
            [one.row_ptrs for one in bags],
            [of.table.config.combiner for of in tables],
            [weights_of(one) for one in bags],
            [1] * count,
            [False] * count,
        )
        self._lookups: list[BagLookup] = [lookup for lookup, _ in answers]
        self.pooled: list[Floats] = [pooled for _, pooled in answers]
        self.gradients_need_rows = need_rows([of.table for of in tables], bags)

    def row_gradients(self, gradients: Sequence[Floats | None]) -> Sequence[tuple[BagLookup, Floats] | None]:
        """See ``Lookups``."""
        # The losses of the processes may use different lookups. Each message has all lookups, and says which are used.
        floats = [
            np.zeros_like(pooled) if gradient is None else gradient
            for pooled, gradient in zip(self.pooled, gradients, strict=True)
        ]
        sums = array_gradients(self._lookups, floats, self._divisor)
        is_finite = all(np.isfinite(one.sum()) for one in sums)
        flags = np.array([is_finite, *(gradient is not None for gradient in gradients)], np.float32)
        one_row = np.ones((self._processes.size, 1), np.int64)
        *came, of_processes = self._exchange(
            [*sums, np.tile(flags, (self._processes.size, 1))],
            np.hstack([self._sent, one_row]),
            np.hstack([self._received, one_row]),
        )[0]
        if not of_processes[:, 0].all():  # so that every process's GradScaler skips the step
            came = [np.full_like(one, np.nan) for one in came]
        is_used: list[bool] = np.any(of_processes[:, 1:], axis=0).tolist()
        return [
            (lookup, gradient) if used else None
            for lookup, gradient, used in zip(self._owned, came, is_used, strict=True)
        ]

    def weight_gradients(self, number: int, gradient: Floats) -> Floats:
        """See ``Lookups``."""
        return weight_gradients([self._lookups[number]], [gradient])[0]

    def _exchange(
        self, of_lookups: Sequence[Numbers], sent: Ints, received: Ints | None = None
    ) -> tuple[list[Numbers], Ints]:
        """Send arrays [N, ...] of each lookup, cut by process, and join what came for each lookup.

        Args:
            of_lookups: one array per lookup, all of one dtype.
            sent: int64[processes, lookups], how many rows of each array each process gets.
            received: the same of what comes; None: unknown, and each array has one dimension.

        Returns:
            an array of each lookup, and ``received``.
        """
        if self._processes.size == 1:
            return list(of_lookups), sent
        widths = np.array([math.prod(array.shape[1:]) for array in of_lookups])
        cuts = [np.split(array, ends[:-1]) for array, ends in zip(of_lookups, sent.cumsum(axis=0).T, strict=True)]
        to_processes = [[part.reshape(-1) for part in of_process] for of_process in zip(*cuts, strict=True)]
        came, sizes = self._processes.exchange(to_processes, None if received is None else received * widths)
        parts = np.split(came, sizes.reshape(-1).cumsum()[:-1])
        count = len(of_lookups)
        joined = [came] if count == 1 else [np.concatenate(parts[number::count]) for number in range(count)]
        arrays = [one.reshape(-1, *array.shape[1:]) for one, array in zip(joined, of_lookups, strict=True)]
        return arrays, sizes  # type: ignore[return-value]
