"""Read samples from NumPy's ``.npz`` files: an array for each input of a graph, by its name in the Data layer.

A file has these arrays for B samples. ``<name>`` is a ``top`` of the graph's Data layer:

- ``<label>``: [B], or [B, C] for a label with C columns; each value 0 or 1.
- ``<dense>``: [B, F] finite numbers; no such array if F is 0.
- for a sparse input of S slots, either ``<sparse>``: integers [B, S], one key per slot, -1 for an empty slot;
  or ``<sparse>.keys``: integers [N], and ``<sparse>.row_ptrs``: integers [B * S + 1], CSR offsets of the slots,
  sample-major, for any number of keys per slot (here -1 is an ordinary key).

An array with one column may be [B] or [B, 1].
"""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.model.graph import SparseInput
from serving.model.numpy_faults import UNREADABLE, explain
from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY
from training.errors import DataError
from training.model.document import TrainingDocument
from training.samples import Bags, Samples

_NO_KEY = -1

Array = NDArray[Any]
Ints = NDArray[np.int64]


def read_npz(path: Path, document: TrainingDocument) -> Samples:
    """Read a whole file into memory. The module describes its arrays.

    Args:
        path: the file.
        document: its Data layer names the arrays.

    Raises:
        DataError: the file is missing or damaged, or an array is missing, unknown or wrong. The message names the file,
            the array, what was expected and what was found.
    """
    arrays = _Arrays(path)
    graph = document.graph
    arrays.expect(
        [label.name for label in document.labels] + [graph.dense_top] * (graph.dense_dim > 0),
        [entry.top for entry in graph.sparse],
    )
    rows = arrays.rows(document.labels[0].name)
    labels = [_labels(arrays, label.name, (rows, len(label.weights))) for label in document.labels]
    dense = np.empty((rows, 0), np.float32)
    if graph.dense_dim:
        dense = _dense(arrays, graph.dense_top, (rows, graph.dense_dim))
    parts = [_bags(arrays, entry, rows) for entry in graph.sparse]
    return Samples(np.concatenate(labels, axis=1), dense, Bags.side_by_side(parts))


class _Arrays:
    """The arrays of one file, by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrays: dict[str, Array] = {}
        name = None
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                for member in archive.namelist():
                    name = member.removesuffix(".npy")
                    self._arrays[name] = _read_member(archive, member)
        except OSError as err:
            raise DataError(path, (err.strerror or str(err)).lower()) from err
        except MemoryError as err:
            raise DataError(path, "the array does not fit into memory", array=name) from err
        except UNREADABLE as err:
            raise DataError(path, f"not a readable .npz file: {explain(err)}", array=name) from err

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def fail(self, name: str, reason: str) -> DataError:
        return DataError(self._path, reason, array=name)

    def expect(self, plain: list[str], sparse: list[str]) -> None:
        """Check that the file has the arrays that the graph reads, and no others."""
        known = set(plain)
        for name in plain:
            if name not in self:
                raise self.fail(name, f"missing; the file has {self._names()}")
        for name in sparse:
            pair = (f"{name}.keys", f"{name}.row_ptrs")
            given = [part for part in (name, *pair) if part in self]
            if given not in ([name], list(pair)):
                got = ", ".join(given) if given else self._names()
                raise self.fail(name, f"expected either {name}, or {pair[0]} and {pair[1]}; got {got}")
            known.update(given)
        for name in self._arrays:
            if name not in known:
                raise self.fail(name, f"the graph has no such input; expected {', '.join([*plain, *sparse])}")

    def _names(self) -> str:
        return ", ".join(self._arrays) or "no arrays"

    def rows(self, name: str) -> int:
        """Return B, the length of an array."""
        array = self._arrays[name]
        if not array.ndim or not array.shape[0]:
            raise self.fail(name, f"expected at least one sample, got shape {list(array.shape)}")
        return int(array.shape[0])

    def numbers(self, name: str, shape: tuple[int, int], kinds: str = "biuf") -> Array:
        """Return the array as ``shape``, [B, columns]. Its dtype must be of one of ``kinds``."""
        array = self.typed(name, kinds)
        if array.ndim == 1 and shape[1] == 1:
            array = array[:, None]
        if array.shape != shape:
            raise self.fail(name, f"expected shape {list(shape)}, got {list(array.shape)}")
        return array

    def typed(self, name: str, kinds: str) -> Array:
        """Return the array. Its dtype must be of one of ``kinds``."""
        array = self._arrays[name]
        if array.dtype.kind not in kinds:
            expected = "integers" if kinds == "iu" else "numbers"
            raise self.fail(name, f"expected {expected}, got {array.dtype}")
        return array

    def refuse(self, name: str, wrong: NDArray[np.bool_], expected: str) -> None:
        """Raise DataError for the first value that is ``wrong``."""
        if wrong.any():
            array = self._arrays[name]
            place = np.unravel_index(int(np.argmax(wrong.reshape(-1))), array.shape)
            at = ", ".join(str(index) for index in place)
            raise self.fail(name, f"expected {expected}, got {array[place]} at [{at}]")


def _read_member(archive: zipfile.ZipFile, member: str) -> Array:
    with archive.open(member) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):  # reading to the end also verifies the checksum
            raise ValueError("bytes after the array")
    return array


def _labels(arrays: _Arrays, name: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    values = arrays.numbers(name, shape)
    arrays.refuse(name, (values != 0) & (values != 1), "0 or 1")
    return values.astype(np.float32, copy=False)


def _dense(arrays: _Arrays, name: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    values = arrays.numbers(name, shape)
    with np.errstate(over="ignore"):
        dense = values.astype(np.float32, copy=False)
    arrays.refuse(name, ~np.isfinite(dense), "finite float32 numbers")
    return dense


def _bags(arrays: _Arrays, entry: SparseInput, rows: int) -> Bags:
    if entry.top in arrays:
        keys = _keys(arrays, entry.top, arrays.numbers(entry.top, (rows, entry.slots), "iu"))
        return Bags.padded(keys, keys != _NO_KEY)
    keys_name, offsets_name = f"{entry.top}.keys", f"{entry.top}.row_ptrs"
    keys = _keys(arrays, keys_name, arrays.typed(keys_name, "iu"))
    if keys.ndim != 1:
        raise arrays.fail(keys_name, f"expected shape [N], got {list(keys.shape)}")
    return Bags(keys, _row_ptrs(arrays, offsets_name, rows * entry.slots + 1, keys.size), entry.slots)


def _keys(arrays: _Arrays, name: str, values: Array) -> Ints:
    arrays.refuse(name, (values < SMALLEST_KEY) | (values > LARGEST_KEY), f"keys from {SMALLEST_KEY} to {LARGEST_KEY}")
    return values.astype(np.int64, copy=False)


def _row_ptrs(arrays: _Arrays, name: str, length: int, keys: int) -> Ints:
    values = arrays.typed(name, "iu")
    if values.shape != (length,):
        raise arrays.fail(name, f"expected shape [{length}], an offset per slot and one more, got {list(values.shape)}")
    arrays.refuse(name, (values < 0) | (values > keys), f"offsets from 0 to {keys}, the number of keys")
    offsets = values.astype(np.int64, copy=False)
    if offsets[0] != 0 or offsets[-1] != keys:
        raise arrays.fail(name, f"expected offsets from 0 to {keys}, got {offsets[0]} to {offsets[-1]}")
    arrays.refuse(name, np.diff(offsets, prepend=0) < 0, "offsets that never fall")
    return offsets
