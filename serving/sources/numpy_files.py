"""Tables in NumPy's files, and in files of bare numbers without a header.

    <file>.npy              float32 or float16 [V, D]; the keys are the row numbers
    <file>.npz              the arrays ``keys``, integers [V], and ``vectors``; or one array, as in a .npy; read whole
    <keys>,<vectors>        each a .npy, or else bare numbers: keys int64[V], vectors [V, D]
    <folder>/key            int64[V]          HugeCTR's directory format; see ``serving.model.sparse_file``
    <folder>/emb_vector     float32[V, D]

Bare numbers are little-endian. ``ndarray.tofile`` writes this form, and NVIDIA's NV Embedding Cache and HugeCTR read
and write it. Such vectors are float32, float16 or bfloat16. The bytes of a row and the network's input show the type,
or the user says it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.mapped_file import map_file
from serving.model.numpy_faults import NPY, NPZ, UNREADABLE, unreadable
from serving.model.pooling import Pooling
from serving.model.regular_file import check_regular, open_regular
from serving.sources.rows import BareRows, TableRows, as_int64, rows_of_array


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


def open_folder(folder: Path) -> TableRows:
    """Open HugeCTR's ``key`` and ``emb_vector``, whose numbers are float32, and ``pooling.json`` if it is there.

    Raise ModelFileError if the files do not fit each other.
    """
    rows = open_pair(folder / "key", folder / "emb_vector")
    rows = rows.as_dtype("fp32") if isinstance(rows, BareRows) else rows
    return replace(rows, pooling=Pooling.read(folder))


def open_pair(keys: Path, vectors: Path) -> TableRows | BareRows:
    """Open a file of keys and a file of vectors. Raise ModelFileError if they do not fit each other."""
    key_array = _matrix_in(keys) if keys.suffix == ".npy" else bare_numbers(keys, "<i8")
    if vectors.suffix == ".npy":
        return rows_of_array(str(vectors), _matrix_in(vectors), key_array, str(keys))
    if not key_array.size:
        raise ModelFileError(keys, "expected at least one key, found none")
    int64_keys = as_int64(str(keys), key_array)
    return BareRows(str(vectors), int64_keys, [bare_rows(vectors, keys, int64_keys.size)], str(keys))


def bare_rows(path: Path, keys: Path, count: int) -> NDArray[np.uint8]:
    """Return a view of a file of vectors, uint8[V, R]. Raise ModelFileError unless each of V keys has a vector."""
    stored = bare_numbers(path, "u1")
    if not stored.size or stored.size % count:
        expected = f"expected a multiple of {count:,} bytes, a vector for each of {count:,} keys in {keys}"
        raise ModelFileError(path, f"{expected}, found {stored.size:,} bytes")
    return stored.reshape(count, -1)


def bare_numbers(path: Path, dtype: str) -> NDArray[Any]:
    """Return a view of a file of bare numbers. Raise ModelFileError if its size is not a multiple of a number's."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes % np.dtype(dtype).itemsize:
            expected = f"a multiple of {np.dtype(dtype).itemsize} bytes, little-endian {np.dtype(dtype).name}"
            raise ModelFileError(path, f"expected {expected}, found {size_bytes:,} bytes")
        if not size_bytes:
            check_regular(path)
            return np.empty(0, dtype)
        return map_file(path, dtype, (size_bytes // np.dtype(dtype).itemsize,))
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err


def arrays_in(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of a ``.npz`` by name. The one array of a ``.npy`` has an empty name."""
    with _faults_of(path), open_regular(path) as file:
        loaded = np.load(file, allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded}


def _matrix_in(path: Path) -> NDArray[Any]:
    """Return a view of the array in a ``.npy``. It keeps no descriptor open, because a model may have many tables."""
    with _faults_of(path, (NPY,)):
        check_regular(path)
        array = np.lib.format.open_memmap(path, mode="r")
        stored = map_file(path, "u1", (array.offset + array.nbytes,))[array.offset :]
        return stored.view(array.dtype).reshape(array.shape, order="C" if array.flags.c_contiguous else "F")


@contextmanager
def _faults_of(path: Path, beginnings: tuple[bytes, ...] = (NPY, NPZ)) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror or err}") from err
    except (MemoryError, *UNREADABLE) as err:
        raise ModelFileError(path, unreadable(path, "a NumPy file of numbers", err, beginnings)) from err
