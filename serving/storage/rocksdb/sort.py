"""Sorting more rows than fit into memory, in the order in which RocksDB compares keys.

Sorted runs are written to files. Then each part of the key range is gathered from all runs. RocksDB ingests such parts
as they are. It would have to compact overlapping files, which writes the rows twice and reads them once more.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serving.storage.hps_layout import raw_keys
from serving.storage.store import Keys

Values = NDArray[np.uint8]
Ordinals = NDArray[np.uint64] | NDArray[np.uint32]  # numbers that compare as the raw bytes of the keys do

# Memory of one run or one part: a million rows of 128 bytes.
RUN_BYTES = 128 * 2**20
PIECE_ROWS = 65536


def ordinals(keys: Keys, key_bytes: int) -> Ordinals:
    """Return numbers in RocksDB's order of the keys, which compares raw little-endian bytes from the first byte on."""
    raw = raw_keys(keys, key_bytes)
    return raw.view(np.uint64).byteswap() if raw.dtype == np.int64 else raw.view(np.uint32).byteswap()


def keys_of_ordinals(numbers: Ordinals) -> Keys:
    """The inverse of ``ordinals``."""
    raw = numbers.byteswap()
    return raw.view(np.int64) if raw.itemsize == 8 else raw.astype(np.int64)


class RowSorter:
    """Sorts rows; the last row of equal keys wins. Not thread-safe."""

    def __init__(self, folder: Path, key_bytes: int, value_bytes: int) -> None:
        """Take an empty folder for the runs."""
        self._folder = folder
        self._key_bytes = key_bytes
        self._run_rows = max(RUN_BYTES // (8 + value_bytes), 1)
        self._keys = np.empty(self._run_rows, dtype=np.int64)
        self._values = np.empty((self._run_rows, value_bytes), dtype=np.uint8)
        self._rows = 0
        self._runs: list[tuple[Ordinals, Values]] = []  # mapped from files

    def add(self, keys: Keys, values: Values) -> None:
        """Take keys int64[N] and their values uint8[N, value_bytes]."""
        for start in range(0, keys.size, self._run_rows):
            part = slice(start, start + self._run_rows)
            while (room := self._run_rows - self._rows) < keys[part].size:
                part = slice(part.start + self._take(keys[part][:room], values[part][:room]), part.stop)
                self._spill()
            self._take(keys[part], values[part])

    def parts(self) -> Iterator[tuple[Keys, Values]]:
        """Yield sorted keys int64[N] and values uint8[N, value_bytes]; the sorter takes no rows afterwards."""
        if not self._runs:
            numbers, order = self._sorted()
            for start in range(0, order.size, PIECE_ROWS):
                piece = slice(start, start + PIECE_ROWS)
                yield keys_of_ordinals(numbers[piece]), self._values.take(order[piece], axis=0)
            return
        self._spill()
        self._values = self._values[:0].copy()
        bounds = self._bounds()
        begins = [0] * len(self._runs)
        for bound in [*bounds, None]:
            ends = [
                numbers.size if bound is None else int(np.searchsorted(numbers, bound)) for numbers, _ in self._runs
            ]
            cuts = [slice(begin, end) for begin, end in zip(begins, ends, strict=True)]
            numbers = np.concatenate([run[0][cut] for run, cut in zip(self._runs, cuts, strict=True)])
            values = np.concatenate([run[1][cut] for run, cut in zip(self._runs, cuts, strict=True)])
            numbers, order = last_of_equals(numbers)
            if order.size:
                yield keys_of_ordinals(numbers), values.take(order, axis=0)
            begins = ends

    def _take(self, keys: Keys, values: Values) -> int:
        place = slice(self._rows, self._rows + keys.size)
        self._keys[place], self._values[place] = keys, values
        self._rows += keys.size
        return keys.size

    def _sorted(self) -> tuple[Ordinals, NDArray[np.intp]]:
        return last_of_equals(ordinals(self._keys[: self._rows], self._key_bytes))

    def _spill(self) -> None:
        """Write the rows in memory as one run."""
        if not self._rows:
            return
        numbers, order = self._sorted()
        name = f"{len(self._runs):06}"
        numbers.tofile(self._folder / f"{name}.keys")
        with (self._folder / f"{name}.values").open("wb") as file:
            for start in range(0, order.size, PIECE_ROWS):
                file.write(self._values.take(order[start : start + PIECE_ROWS], axis=0).data)  # twice as quick as [ ]
        mapped_keys = np.memmap(self._folder / f"{name}.keys", numbers.dtype, mode="r")
        shape = (order.size, self._values.shape[1])
        mapped_values = np.memmap(self._folder / f"{name}.values", np.uint8, mode="r", shape=shape)
        self._runs.append((mapped_keys, mapped_values))
        self._rows = 0

    def _bounds(self) -> list[np.unsignedinteger]:
        """Return where to split the order: a part has about half the rows of a run, and never more than a run."""
        part_rows = max(self._run_rows // 2, 1)
        stride = max(part_rows // (2 * len(self._runs)), 1)  # each run adds at most one stride to a part
        samples = np.sort(np.concatenate([numbers[::stride] for numbers, _ in self._runs]))
        return list(np.unique(samples[:: max(part_rows // stride, 1)])[1:])


def last_of_equals(numbers: Ordinals) -> tuple[Ordinals, NDArray[np.intp]]:
    """Return the sorted distinct numbers, and the position of each number's last occurrence."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)[: ordered.size]
    return ordered[is_last], order[is_last]
