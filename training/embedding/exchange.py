"""Lookups in tables whose rows are spread over several processes.

Each process sends the distinct keys of its bags to the processes that own them, gets their rows, and pools them. On the
way back it sums the gradients of each row and sends them to the row's owner. So a row that many bags read crosses once.
All tables share each message.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels.host import ArrayRows, BagLookup, KeyIndex, look_up_bags, sum_row_gradients, weight_gradients
from training.embedding.inputs import FeatureBags
from training.embedding.lookups import Floats, weights_of
from training.embedding.table import EmbeddingTable
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
    """

    table: EmbeddingTable
    owner: int | None


class _Request:
    """The distinct keys of one lookup, in the order of their owners."""

    def __init__(self, of: OwnedTable, bags: FeatureBags, processes: int) -> None:
        keys, places = bags.keys, np.arange(bags.keys.size)
        firsts = places
        if of.table.config.admit_after == 1:  # otherwise every sighting counts
            index = KeyIndex(max(keys.size, 1))
            places = index.find_or_insert(keys)
            keys = index.keys()
            firsts = np.empty(keys.size, np.int64)
            firsts[places[::-1]] = np.arange(places.size)[::-1]
        owners = np.full(keys.size, of.owner) if of.owner is not None else keys % processes
        order = np.argsort(owners, kind="stable")
        self.keys: Ints = keys[order]
        self.counts: Ints = np.bincount(owners, minlength=processes)
        self.slots: Ints = bags.slots_of(firsts[order])
        #: Where each key of the bags is among ``keys``.
        self.places: Ints = np.empty(order.size, np.int64)
        self.places[order] = np.arange(order.size)
        self.places = self.places[places]


class SharedLookups:
    """Lookups in the tables of several processes. See ``Lookups``. Every process makes the same lookups at a time."""

    def __init__(
        self, processes: Processes, tables: Sequence[OwnedTable], bags: Sequence[FeatureBags], trains: bool
    ) -> None:
        """Look up the bags of each table. With ``trains``, keys get rows."""
        self._processes = processes
        requests = [_Request(table, one, processes.size) for table, one in zip(tables, bags, strict=True)]
        self._sent = np.stack([request.counts for request in requests], axis=1)  # [processes, lookups]
        received = processes.exchange([[counts] for counts in self._sent], [len(tables)] * processes.size)
        self._received = received.reshape(self._sent.shape)
        sends_slots = trains and any(one.slots > 1 for one in bags)
        keys = self._to_owners([request.keys for request in requests])
        slots = self._to_owners([request.slots for request in requests]) if sends_slots else [1] * len(keys)
        count = len(tables)
        owned = look_up_bags(
            [of.table.native for of in tables], keys, [None] * count, ["sum"] * count, [None] * count, slots, trains
        )
        self._owned: list[BagLookup] = [lookup for lookup, _ in owned]
        rows = self._from_owners([vectors for _, vectors in owned])
        answers = look_up_bags(
            [ArrayRows(vectors, of.table.name) for vectors, of in zip(rows, tables, strict=True)],
            [request.places for request in requests],
            [one.row_ptrs for one in bags],
            [of.table.config.combiner for of in tables],
            [weights_of(one) for one in bags],
            [1] * count,
            False,
        )
        self._lookups: list[BagLookup] = [lookup for lookup, _ in answers]
        self.pooled: list[Floats] = [pooled for _, pooled in answers]

    def row_gradients(self, gradients: Sequence[Floats]) -> Sequence[tuple[BagLookup, Floats]]:
        """See ``Lookups``. A row gets the mean over the processes, as ``DistributedDataParallel`` does."""
        sums = []
        counts = self._sent.sum(axis=0)
        for (places, of_rows), count in zip(sum_row_gradients(self._lookups, gradients), counts, strict=True):
            ordered = np.zeros((count, of_rows.shape[1]), np.float32)
            ordered[places] = of_rows / self._processes.size
            sums.append(ordered)
        return list(zip(self._owned, self._to_owners(sums), strict=True))

    def weight_gradients(self, number: int, gradient: Floats) -> Floats:
        """See ``Lookups``."""
        return weight_gradients([self._lookups[number]], [gradient])[0]

    def _to_owners(self, of_lookups: Sequence[Numbers]) -> list[Numbers]:
        return self._exchange(of_lookups, self._sent, self._received)

    def _from_owners(self, of_lookups: Sequence[Numbers]) -> list[Numbers]:
        return self._exchange(of_lookups, self._received, self._sent)

    def _exchange(self, of_lookups: Sequence[Numbers], sent: Ints, received: Ints) -> list[Numbers]:
        """Send arrays [N, ...] of each lookup, cut by process, and join what came for each lookup.

        Args:
            of_lookups: one array per lookup, all of one dtype.
            sent: int64[processes, lookups], how many rows of each array each process gets.
            received: the same of what comes.
        """
        widths = np.array([math.prod(array.shape[1:]) for array in of_lookups])
        cuts = [np.split(array, ends[:-1]) for array, ends in zip(of_lookups, sent.cumsum(axis=0).T, strict=True)]
        to_processes = [[part.reshape(-1) for part in of_process] for of_process in zip(*cuts, strict=True)]
        came = self._processes.exchange(to_processes, (received @ widths).tolist())
        parts = np.split(came, (received * widths).reshape(-1).cumsum()[:-1])
        return [
            np.concatenate(parts[number :: len(of_lookups)]).reshape(-1, *array.shape[1:])  # type: ignore[misc]
            for number, array in enumerate(of_lookups)
        ]
