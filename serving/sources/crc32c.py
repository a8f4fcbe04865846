"""CRC-32C, the check sum of TensorFlow's files, in NumPy: a loop over bytes would take minutes per GB."""

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli's, the lowest bit first
_WORDS: Final = 1 << 20  # that are folded at once


def crc32c(data: NDArray[np.uint8]) -> int:
    """Return the check sum of bytes.

    A check sum is linear: that of two halves is the sum of the second's and the first's, moved by the second's length.
    So words are added to their right neighbours, moved by one word, then pairs to pairs, moved by two, and so on.
    """
    state, head = 0xFFFFFFFF, data.size % 4
    for byte in data[:head].tolist():
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ _POLYNOMIAL * (state & 1)
    words = data[head:].view("<u4")
    for begin in range(0, words.size, _WORDS):
        part = words[begin : begin + _WORDS].astype(np.uint32)
        part[0] ^= state
        level = 0
        while part.size > 1:
            if part.size % 2:
                part = np.append(np.zeros(1, np.uint32), part)
            part = _moved(part[::2], level) ^ part[1::2]
            level += 1
        state = int(_moved(part, 0)[0])
    return state ^ 0xFFFFFFFF


def masked_crc32c(data: NDArray[np.uint8]) -> int:
    """Return the check sum as TensorFlow and LevelDB store it, so that one of data with check sums is as good."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _moved(words: NDArray[np.uint32], level: int) -> NDArray[np.uint32]:
    """Return the check sums of words, each followed by ``2**level`` words of zeros."""
    low, high = _tables(level)
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2)
    moved = low.take(halves[:, 0])
    moved ^= high.take(halves[:, 1])
    return moved


@cache
def _tables(level: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return where ``_moved`` takes the lower and the upper half of a word."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if level:
        bits = _moved(_moved(bits, level - 1), level - 1)
    else:
        for _ in range(32):
            bits = bits >> np.uint32(1) ^ np.uint32(_POLYNOMIAL) * (bits & np.uint32(1))
    tables = np.zeros((2, 1 << 16), np.uint32)
    for half, of_half in zip(tables, bits.reshape(2, 16), strict=True):
        for bit, value in enumerate(of_half):
            half[1 << bit : 2 << bit] = half[: 1 << bit] ^ value
    return tables[0], tables[1]
