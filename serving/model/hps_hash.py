"""HPS's hash of keys. It chooses a key's partition in Redis, and in a stream of updates."""

import numpy as np
from numpy.typing import NDArray

#: HPS sorts the keys of an update into this many groups; partition = group modulo the number of the log's partitions.
KEY_GROUPS = 8


def key_groups(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return each key's group, 0 to 7, for int64[N]. A message of a stream holds keys of one group."""
    return mix(keys) % np.uint64(KEY_GROUPS)


def mix(keys: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return HPS's hash of each key, rrmxmx; modulo the number of partitions it is the key's partition.

    Source: Pelle Evensen's rrmxmx, as in HugeCTR v24.06's ``HCTR_HPS_KEY_TO_PART_INDEX``.

    Args:
        keys: int64[N]; uint32 keys widened.

    Returns:
        uint64[N].
    """
    x = keys.astype(np.int64, copy=False).view(np.uint64)
    x = (x ^ _rotated(x, 25) ^ _rotated(x, 50)) * np.uint64(0xA24BAED4963EE407)
    x = (x ^ _rotated(x, 24) ^ _rotated(x, 49)) * np.uint64(0x9FB21C651E98DF25)
    return x ^ (x >> np.uint64(28))


def _rotated(x: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return (x >> np.uint64(bits)) | (x << np.uint64(64 - bits))
