"""Which partition of a table in Redis holds a key, and how a batch of keys is cut into commands."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.storage.hps_layout import mix
from serving.storage.redis.commands import Partition
from serving.storage.store import Keys, Mask

# Redis does nothing else while it works on one command.
MOST_FIELDS = 10_000


class Group(NamedTuple):
    """Keys of one partition, as many as one command takes: ``order[begin:end]`` of a batch's keys."""

    partition: int
    begin: int
    end: int


class Partitions(tuple[Partition, ...]):
    """The partitions of one table, in their order. HPS's hash says which of them holds a key."""

    __slots__ = ()

    def __new__(cls, table: str, count: int) -> "Partitions":
        """Name the partitions of a table's full name."""
        return super().__new__(cls, (Partition(table, number) for number in range(count)))

    def places(self, keys: Keys) -> NDArray[np.intp]:
        """The partition of each key: intp[N]."""
        return (mix(keys) % np.uint64(len(self))).astype(np.intp)

    def groups(self, keys: Keys, most: int) -> tuple[NDArray[np.intp], list[Group]]:
        """The order of ``keys`` by partition, equal keys in their order, and commands of at most ``most`` of them."""
        places = self.places(keys).astype(np.uint16)
        order = np.argsort(places, kind="stable")
        ends = np.cumsum(np.bincount(places, minlength=len(self))).tolist()
        most = min(MOST_FIELDS, most)
        groups = [
            Group(number, begin, min(begin + most, end))
            for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
            for begin in range(start, end, most)
        ]
        return order, groups

    def fitting(self, keys: Keys, sizes: NDArray[np.int64], margin: int) -> Mask:
        """Which of ``keys`` their partitions still have room for; ``sizes``, int64[partitions], grows by them."""
        places = self.places(keys)
        order = np.argsort(places, kind="stable")
        starts = np.searchsorted(places[order], np.arange(len(self)))
        ranks = np.empty(keys.size, dtype=np.int64)
        ranks[order] = np.arange(keys.size) - starts[places[order]]
        fits: Mask = sizes[places] + ranks < margin
        sizes += np.bincount(places[fits], minlength=sizes.size)
        return fits
