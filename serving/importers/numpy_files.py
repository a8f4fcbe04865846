"""Tables in NumPy's files, and in files of bare numbers without a header.

    <file>.npy              float32 or float16 [V, D]; the keys are the row numbers
    <file>.npz              the arrays ``keys``, integers [V], and ``vectors``; or one array, as in a .npy; read whole
    <keys>,<vectors>        each a .npy, or else bare numbers: keys int64[V], vectors float32[V, D]
    <folder>/key            int64[V]          HugeCTR's directory format; see ``serving.model.sparse_file``
    <folder>/emb_vector     float32[V, D]

Bare numbers are little-endian. ``ndarray.tofile`` writes this form, and NVIDIA's NV Embedding Cache and HugeCTR read
and write it. D follows from the sizes of both files.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.importers.rows import TableRows, rows_of_array
from serving.model.numpy_faults import UNREADABLE, explain


def open_npy(path: Path) -> TableRows:
    """Open a matrix. Raise ModelFileError if the file is not one."""
    return rows_of_array(str(path), _matrix_in(path), None)


def open_npz(path: Path) -> TableRows:
    """Read ``keys`` and ``vectors``, or one matrix. Raise ModelFileError if the file holds something else."""
    arrays = arrays_in(path)
    if arrays.keys() == {"keys", "vectors"}:
        return rows_of_array(f"{path}#vectors", arrays["vectors"], arrays["keys"], f"{path}#keys")
    if len(arrays) == 1:
        [(name, vectors)] = arrays.items()
        return rows_of_array(f"{path}#{name}", vectors, None)
    found = ", ".join(map(repr, arrays)) or "none"
    raise ModelFileError(path, f"expected the arrays 'keys' and 'vectors', or one array, found {found}")


def open_pair(keys: Path, vectors: Path) -> TableRows:
    """Open a file of keys and a file of vectors. Raise ModelFileError if they do not fit each other."""
    key_array = _matrix_in(keys) if keys.suffix == ".npy" else bare_numbers(keys, "<i8")
    if vectors.suffix == ".npy":
        return rows_of_array(str(vectors), _matrix_in(vectors), key_array, str(keys))
    numbers = bare_numbers(vectors, "<f4")
    if not key_array.size:
        raise ModelFileError(keys, "expected at least one key, found none")
    if numbers.size % key_array.size:
        reason = f"expected a multiple of {4 * key_array.size:,} bytes, float32[D] for each of {key_array.size:,} keys "
        raise ModelFileError(vectors, f"{reason}in {keys}, found {4 * numbers.size:,}")
    return rows_of_array(str(vectors), numbers.reshape(key_array.size, -1), key_array, str(keys))


def bare_numbers(path: Path, dtype: str) -> NDArray[Any]:
    """Return a view of a file of bare numbers. Raise ModelFileError if its size is not a multiple of a number's."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes % np.dtype(dtype).itemsize:
            expected = f"a multiple of {np.dtype(dtype).itemsize} bytes, little-endian {np.dtype(dtype).name}"
            raise ModelFileError(path, f"expected {expected}, found {size_bytes:,} bytes")
        return np.memmap(path, dtype=dtype, mode="r") if size_bytes else np.empty(0, dtype)
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err


def arrays_in(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of a ``.npz`` by name. The one array of a ``.npy`` has an empty name."""
    with _faults_of(path), path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded}


def _matrix_in(path: Path) -> NDArray[Any]:
    """Return a view of the array in a ``.npy``."""
    with _faults_of(path):
        return np.lib.format.open_memmap(path, mode="r")


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror or err}") from err
    except MemoryError as err:
        raise ModelFileError(path, f"does not fit into memory: {explain(err)}") from err
    except UNREADABLE as err:
        raise ModelFileError(path, f"not a NumPy file of numbers: {explain(err)}") from err
