"""HugeCTR's keyset files: the unique keys of a data set, uint32 or int64 as in the data, and nothing else."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from serving.model.atomic import atomic_write
from serving.model.regular_file import open_regular
from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY
from training.data.norm import key_type_of
from training.errors import DataError
from training.samples import Samples


def write_keyset(path: str | Path, parts: Iterable[Samples], key_dtype: DTypeLike) -> None:
    """Write the unique keys of samples, in ascending order. Memory grows with the unique keys only.

    Raises:
        ValueError: a key does not fit ``key_dtype``, or ``key_dtype`` is neither uint32 nor int64.
        OSError: the file cannot be written.
    """
    dtype, keys = key_type_of(key_dtype), np.empty(0, np.int64)
    for samples in parts:
        keys = np.union1d(keys, samples.bags.keys)
    if keys.size and not np.iinfo(dtype).min <= keys[0] <= keys[-1] <= np.iinfo(dtype).max:
        raise ValueError(f"a key does not fit {dtype.name}")
    with atomic_write(path) as file:
        file.write(keys.astype(dtype.newbyteorder("<")).tobytes())


def read_keyset(path: str | Path, key_dtype: DTypeLike) -> NDArray[np.int64]:
    """Return the keys in ascending order, int64[N].

    Raises:
        DataError: the file cannot be read, its size is not a multiple of a key's, or a key is reserved.
        ValueError: ``key_dtype`` is neither uint32 nor int64.
    """
    path, dtype = Path(path), key_type_of(key_dtype)
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as err:
        raise DataError(path, (err.strerror or str(err)).lower()) from err
    if len(data) % dtype.itemsize:
        reason = f"expected a multiple of {dtype.itemsize} bytes ({dtype.name} keys), found {len(data):,} bytes"
        raise DataError(path, reason)
    keys = np.unique(np.frombuffer(data, dtype.newbyteorder("<")).astype(np.int64))
    if keys.size and not SMALLEST_KEY <= keys[0] <= keys[-1] <= LARGEST_KEY:
        wrong = keys[0] if keys[0] < SMALLEST_KEY else keys[-1]
        raise DataError(path, f"expected keys from {SMALLEST_KEY} to {LARGEST_KEY}, found {wrong}")
    return keys
