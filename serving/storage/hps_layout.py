"""HPS's layout of tables, keys and rows in RocksDB and Redis (HugeCTR v24.06).

A table is named by its tag, ``hps_et.<model>.<table>``. A key is stored as its raw native-endian bytes: 8 for int64
models, 4 for uint32 models. A row is stored as its float32 bytes.
"""

import numpy as np
from numpy.typing import NDArray

from serving.storage.store import Keys, Vectors


def tag(table: str) -> str:
    """Return the tag of a table's full name."""
    return f"hps_et.{table}"


def storable(keys: Keys, key_bytes: int) -> NDArray[np.bool_] | None:
    """Return a mask of the keys that fit ``key_bytes`` bytes, or None if all keys fit."""
    if key_bytes == 8:
        return None
    fits = (keys >= 0) & (keys <= 0xFFFFFFFF)
    return None if fits.all() else fits


def raw_keys(keys: Keys, key_bytes: int) -> NDArray[np.int64] | NDArray[np.uint32]:
    """Return contiguous keys of the stored width."""
    return np.ascontiguousarray(keys, np.int64) if key_bytes == 8 else np.ascontiguousarray(keys, np.uint32)


def key_list(keys: Keys, key_bytes: int) -> list[bytes]:
    """Return the raw native-endian bytes of each key."""
    listed: list[bytes] = raw_keys(keys, key_bytes).view(f"V{key_bytes}").tolist()
    return listed


def row_list(rows: Vectors) -> list[bytes]:
    """Return the float32 bytes of each row."""
    listed: list[bytes] = np.ascontiguousarray(rows).view(f"V{4 * rows.shape[1]}").reshape(-1).tolist()
    return listed


def keys_of(raw: list[bytes], key_bytes: int) -> Keys:
    """The inverse of ``key_list``."""
    return np.frombuffer(b"".join(raw), dtype=np.int64 if key_bytes == 8 else np.uint32).astype(np.int64)
