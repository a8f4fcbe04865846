"""The hash slots of a Redis cluster, of many keys at once."""

import binascii
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from serving.storage.redis.commands import SLOTS


def slots_of(names: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """The hash slot of each of uint8[N, ...] names.

    Source: Redis Cluster specification: CRC16 (XMODEM) of what stands in the first braces, or of all of it.
    """
    table, crc = _crc_table(), np.zeros(len(names), dtype=np.uint16)
    for column in names.T:
        crc = (crc << np.uint16(8)) ^ table[(crc >> np.uint16(8)) ^ column]
    slots: NDArray[np.uint16] = crc % np.uint16(SLOTS)
    for at in np.flatnonzero((names == ord("{")).any(axis=1)).tolist():
        _, _, rest = names[at].tobytes().partition(b"{")
        inside, closing, _ = rest.partition(b"}")
        if inside and closing:
            slots[at] = binascii.crc_hqx(inside, 0) % SLOTS
    return slots


@lru_cache
def _crc_table() -> NDArray[np.uint16]:
    return np.array([binascii.crc_hqx(bytes([byte]), 0) for byte in range(256)], dtype=np.uint16)


@lru_cache
def spread_numbers(count: int) -> tuple[int, ...]:
    """So many numbers whose texts have slots that are spread evenly."""
    by_range: dict[int, int] = {}
    number = 0
    while len(by_range) < count:
        slot = binascii.crc_hqx(str(number).encode(), 0) % SLOTS
        by_range.setdefault(slot * count // SLOTS, number)
        number += 1
    return tuple(by_range[part] for part in range(count))
