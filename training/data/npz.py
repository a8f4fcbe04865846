"""Read samples from NumPy's ``.npz`` files: an array for each input of a graph, by its name in the Data layer.

A file has these arrays for B samples. ``<name>`` is a ``top`` of the graph's Data layer:

- ``<label>``: [B], or [B, C] for a label with C columns; each value 0 or 1.
- ``<dense>``: [B, F] finite numbers; no such array if F is 0.
- for a sparse input of S slots, either ``<sparse>``: integers [B, S], one key per slot, -1 for an empty slot;
  or ``<sparse>.keys``: integers [N], and ``<sparse>.row_ptrs``: integers [B * S + 1], CSR offsets of the slots,
  sample-major, for any number of keys per slot (here -1 is an ordinary key).

An array with one column may be [B] or [B, 1].
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serving.model.graph import SparseInput
from training.data.checks import ColumnMap, checked
from training.data.npz_arrays import NpzArray, open_arrays
from training.errors import DataError
from training.model.document import TrainingDocument
from training.samples import Bags, Samples

_NO_KEY = -1

Ints = NDArray[np.int64]


def read_npz(path: Path, document: TrainingDocument, batch_size: int = 16_384) -> Iterator[Samples]:
    """Yield the samples of a file. The module describes its arrays.

    Memory does not grow with the file, except for arrays in Fortran order, which are read whole.

    Args:
        path: the file.
        document: its Data layer names the arrays.
        batch_size: the samples of a batch. The last batch may be smaller.

    Raises:
        DataError: the file is missing or damaged, or an array is missing, unknown or wrong. The message names the file,
            the array, what was expected and what was found.
    """
    graph = document.graph
    with ExitStack() as stack:
        arrays = open_arrays(path, stack)
        labels = {label.name: len(label.weights) for label in document.labels}
        dense = {graph.dense_top: graph.dense_dim} if graph.dense_dim else {}
        _check_names(path, arrays, [*labels, *dense], [entry.top for entry in graph.sparse])
        rows = arrays[document.labels[0].name].rows()
        for name, columns in {**labels, **dense}.items():
            arrays[name].check((rows, columns))
        inputs = [_sparse_input(arrays, entry, rows) for entry in graph.sparse]
        slots = {entry.top: entry.slots for entry in graph.sparse}
        names = ColumnMap(_column_names(labels), _column_names(dense), _column_names(slots))
        for first in range(0, rows, batch_size):
            count = min(batch_size, rows - first)
            samples = Samples(
                np.concatenate([_floats(arrays[name], count) for name in labels], axis=1),
                _floats(arrays[graph.dense_top], count) if dense else np.empty((count, 0), np.float32),
                Bags.side_by_side([entry.read(count) for entry in inputs]),
            )
            yield checked(
                samples, path, first, columns=names, slot_sizes=document.data.slot_sizes, losses=document.losses
            )
        for array in arrays.values():
            array.finish()


def _check_names(path: Path, arrays: dict[str, NpzArray], plain: list[str], sparse: list[str]) -> None:
    """Check that the file has the arrays that the graph reads, and no others."""
    known, names = set(plain), ", ".join(arrays) or "no arrays"
    for name in plain:
        if name not in arrays:
            raise DataError(path, f"missing; the file has {names}", array=name)
    for name in sparse:
        pair = (f"{name}.keys", f"{name}.row_ptrs")
        given = [part for part in (name, *pair) if part in arrays]
        if given not in ([name], list(pair)):
            got = ", ".join(given) if given else names
            raise DataError(path, f"expected either {name}, or {pair[0]} and {pair[1]}; got {got}", array=name)
        known.update(given)
    for name, array in arrays.items():
        if name not in known:
            raise array.error(f"the graph has no such input; expected {', '.join([*plain, *sparse])}")


def _column_names(counts: dict[str, int]) -> tuple[str, ...]:
    """Return a name for each column of each array."""
    return tuple(
        name if count == 1 else f"{name}[{column}]" for name, count in counts.items() for column in range(count)
    )


def _floats(array: NpzArray, count: int) -> NDArray[np.float32]:
    values = array.read(count)
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def _keys(array: NpzArray, count: int) -> Ints:
    values = array.read(count)
    if values.dtype == np.uint64:
        array.refuse(values >= 2**63, values, f"keys below {2**63}")
    return values.astype(np.int64, copy=False)


class _Input(Protocol):
    """A sparse input, read some samples at a time."""

    def read(self, count: int) -> Bags:
        """Return the bags of the next samples."""


class _OneKeyEach:
    """A sparse input with at most one key in each slot."""

    def __init__(self, keys: NpzArray, rows: int, slots: int) -> None:
        keys.check((rows, slots), "iu")
        self._keys = keys

    def read(self, count: int) -> Bags:
        keys = _keys(self._keys, count)
        return Bags.padded(keys, keys != _NO_KEY)


class _Ragged:
    """A sparse input with any number of keys in each slot."""

    def __init__(self, keys: NpzArray, row_ptrs: NpzArray, rows: int, slots: int) -> None:
        keys.check_flat("[N]")
        row_ptrs.check_flat(f"[{rows * slots + 1}], an offset per slot and one more", rows * slots + 1)
        self._keys, self._row_ptrs, self._slots = keys, row_ptrs, slots
        self._key_count = keys.shape[0]
        self._slots_left = rows * slots
        self._end = 0
        first = int(self._offsets(1)[0])
        if first != 0:
            raise row_ptrs.error(f"expected offsets from 0 to {self._key_count}, got {first} at [0]")

    def read(self, count: int) -> Bags:
        begin = self._end
        offsets = np.concatenate([[begin], self._offsets(count * self._slots)])
        self._end = int(offsets[-1])
        self._slots_left -= count * self._slots
        if not self._slots_left and self._end != self._key_count:
            found = f"the last one is {self._end}"
            raise self._row_ptrs.error(f"expected offsets from 0 to {self._key_count}, {found}")
        return Bags(_keys(self._keys, self._end - begin), offsets - begin, self._slots)

    def _offsets(self, count: int) -> Ints:
        values = self._row_ptrs.read(count)
        wrong = (values < 0) | (values > self._key_count)
        self._row_ptrs.refuse(wrong, values, f"offsets from 0 to {self._key_count}, the number of keys")
        offsets = values.astype(np.int64, copy=False)
        falls = np.diff(offsets, prepend=self._end) < 0
        self._row_ptrs.refuse(falls, values, "offsets that never fall")
        return offsets


def _sparse_input(arrays: dict[str, NpzArray], entry: SparseInput, rows: int) -> _Input:
    if entry.top in arrays:
        return _OneKeyEach(arrays[entry.top], rows, entry.slots)
    return _Ragged(arrays[f"{entry.top}.keys"], arrays[f"{entry.top}.row_ptrs"], rows, entry.slots)
