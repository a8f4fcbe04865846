"""The valid keys and vectors of a table, in both sparse model formats."""

from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError

Keys: TypeAlias = NDArray[np.int64]
StoredKeys: TypeAlias = NDArray[np.int64] | NDArray[np.uint32]
Vectors: TypeAlias = NDArray[np.float32]
KeyType: TypeAlias = Literal["I64", "I32"]
RowLayout: TypeAlias = Literal["distributed", "localized"]

SMALLEST_KEY, LARGEST_KEY = -(2**63) + 2, 2**63 - 3  # other values mark empty and deleted slots of a table
_LARGEST_UINT32 = 2**32 - 1


def key_range(key_type: KeyType) -> tuple[int, int]:
    """Return the smallest and the largest key that a model may have."""
    return (0, _LARGEST_UINT32) if key_type == "I32" else (SMALLEST_KEY, LARGEST_KEY)


def row_dtype(dim: int, key_type: KeyType, row_layout: RowLayout) -> np.dtype[Any]:
    """Return the packed dtype of one row of a single file. Its item size is the row's size in bytes."""
    key = ("key", "<i8" if key_type == "I64" else "<u4")
    slot_id = [("slot_id", "<u8")] if row_layout == "localized" else []
    return np.dtype([key, *slot_id, ("vector", "<f4", (dim,))])


def check_range(path: Path | str, keys: Keys, key_type: KeyType, first_row: int = 0) -> None:
    """Raise ModelFileError for the first key out of range. ``first_row`` is the number of the first key's row."""
    lowest, highest = key_range(key_type)
    refused = (keys < lowest) | (keys > highest)
    if refused.any():
        at = int(np.argmax(refused))
        reason = "not a uint32, the model's key type" if key_type == "I32" else "reserved"
        raise ModelFileError(
            path, f"row {first_row + at:,}: key {keys[at]} is {reason}; keys go from {lowest} to {highest}"
        )


def repeated_keys(path: Path | str, keys: StoredKeys, key_type: KeyType) -> Keys:
    """Check the range of every key, and return each key that occurs more than once.

    Takes 8 bytes of memory per key. ``keys`` may be a view of a file. Raises ModelFileError for a key out of range.
    """
    ordered = np.array(keys, dtype=np.int64)
    ordered.sort()
    lowest, highest = key_range(key_type)
    for key, refused in ((ordered[0], ordered[0] < lowest), (ordered[-1], ordered[-1] > highest)):
        if refused:
            row = int(np.argmax(keys == key))
            reason = "not a uint32, the model's key type" if key_type == "I32" else "reserved"
            raise ModelFileError(path, f"row {row:,}: key {key} is {reason}; keys go from {lowest} to {highest}")
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def refuse_repeated_keys(path: Path | str, keys: StoredKeys, key_type: KeyType) -> None:
    """Raise ModelFileError for a key out of range or a repeated key."""
    repeated = repeated_keys(path, keys, key_type)
    if repeated.size:
        first, second = np.flatnonzero(keys == repeated[0])[:2]
        raise ModelFileError(path, f"key {repeated[0]} is in row {first:,} and again in row {second:,}")


def fault_of_values(keys: Keys, vectors: Vectors) -> str | None:
    """Return a message about the first key whose float32 row is NaN or infinite, or None."""
    if np.isfinite(vectors).all():
        return None
    row = int(np.argmax(~np.isfinite(vectors).all(axis=1)))
    return f"the row of key {keys[row]} has values that are NaN or infinite"


def check_rows(path: Path, keys: Keys, vectors: Vectors) -> None:
    """Raise ModelFileError unless these are int64[N] and float32[N, D], N at least 1, with valid unique keys."""
    if keys.ndim != 1 or keys.dtype != np.int64:
        raise ModelFileError(path, f"expected keys int64[N], got {keys.dtype} {list(keys.shape)}")
    if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.shape[1]:
        raise ModelFileError(path, f"expected vectors float32[N, D], got {vectors.dtype} {list(vectors.shape)}")
    if not keys.size or keys.size != vectors.shape[0]:
        raise ModelFileError(
            path, f"expected as many vectors as keys, at least one; got {keys.size} keys, {vectors.shape[0]} vectors"
        )
    refuse_repeated_keys(path, keys, "I64")
