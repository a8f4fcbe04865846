"""Training data in memory: labeled samples with their keys in bags, as in a request."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Bags:
    """The keys of B samples of S slots, with any number of keys per slot.

    Attributes:
        keys: int64[N], sample-major: sample 0's slot 0, slot 1, ..., then sample 1's.
        slots: S.
    """

    __slots__ = ("_row_ptrs", "keys", "slots")

    def __init__(self, keys: Ints, row_ptrs: Ints | None, slots: int) -> None:
        """Keep the arrays without checking them.

        Args:
            keys: int64[N].
            row_ptrs: int64[B * S + 1], CSR offsets of the bags, from 0 to N. None means one key per bag, and saves the
                memory of the offsets, which is as large as the keys.
            slots: S, at least 1.
        """
        self.keys = keys
        self.slots = slots
        self._row_ptrs = row_ptrs

    @classmethod
    def one_key_each(cls, keys: Ints) -> Self:
        """Make bags of one key each from int64[B, S]."""
        return cls(np.ascontiguousarray(keys).reshape(-1), None, keys.shape[1])

    @classmethod
    def padded(cls, keys: Ints, is_key: NDArray[np.bool_]) -> Self:
        """Make bags of one key or none from int64[B, S]. ``is_key`` is bool[B, S]."""
        if is_key.all():
            return cls.one_key_each(keys)
        return cls(keys[is_key], _offsets(is_key.astype(np.int64)), keys.shape[1])

    @property
    def has_one_key_each(self) -> bool:
        """Whether the bags were made without offsets, because each has one key."""
        return self._row_ptrs is None

    @property
    def row_ptrs(self) -> Ints:
        """int64[B * S + 1], CSR offsets of the bags, from 0 to N."""
        return np.arange(self.keys.size + 1, dtype=np.int64) if self._row_ptrs is None else self._row_ptrs

    @property
    def sizes(self) -> Ints:
        """int64[B, S], the number of keys of each bag. Read-only."""
        if self._row_ptrs is None:
            return np.broadcast_to(np.int64(1), (len(self), self.slots))
        return np.diff(self._row_ptrs).reshape(-1, self.slots)

    def __len__(self) -> int:
        """Return B."""
        bags = self.keys.size if self._row_ptrs is None else self._row_ptrs.size - 1
        return bags // self.slots

    def __getitem__(self, rows: slice | Ints) -> Self:
        """Select samples by slice or by int64 positions."""
        if self._row_ptrs is not None and isinstance(rows, slice) and rows.step in (None, 1):  # a view
            begin, end, _ = rows.indices(len(self))
            row_ptrs = self._row_ptrs[begin * self.slots : max(begin, end) * self.slots + 1]
            return type(self)(self.keys[row_ptrs[0] : row_ptrs[-1]], row_ptrs - row_ptrs[0], self.slots)
        return self._select(rows, slice(None))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate samples. ``parts`` has at least one item, all with the same S."""
        keys = np.concatenate([part.keys for part in parts])
        if all(part._row_ptrs is None for part in parts):
            return cls(keys, None, parts[0].slots)
        return cls(keys, _offsets(np.concatenate([part.sizes for part in parts])), parts[0].slots)

    @classmethod
    def side_by_side(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the slots of the same samples. ``parts`` has at least one item, all with the same B."""
        if len(parts) == 1:
            return parts[0]
        slots = sum(part.slots for part in parts)
        if all(part._row_ptrs is None for part in parts):
            keys = np.concatenate([part.keys.reshape(-1, part.slots) for part in parts], axis=1)
            return cls.one_key_each(keys)
        row_ptrs = _offsets(np.concatenate([part.sizes for part in parts], axis=1))
        starts = row_ptrs[:-1].reshape(-1, slots)
        keys = np.empty(row_ptrs[-1], dtype=np.int64)
        bounds = pairwise(accumulate((part.slots for part in parts), initial=0))
        for part, (begin, end) in zip(parts, bounds, strict=True):
            keys[_positions(starts[:, begin:end].reshape(-1), part.row_ptrs)] = part.keys
        return cls(keys, row_ptrs, slots)

    def split(self, slots: Sequence[int]) -> list[Self]:
        """Undo ``side_by_side``. ``slots`` has the S of each part."""
        if len(slots) == 1:
            return [self]
        bounds = pairwise(accumulate(slots, initial=0))
        return [self._select(slice(None), slice(begin, end)) for begin, end in bounds]

    def _select(self, rows: slice | Ints, columns: slice) -> Self:
        if self._row_ptrs is None:
            return self.one_key_each(self.keys.reshape(-1, self.slots)[rows][:, columns])
        starts, ends = (
            ptrs.reshape(-1, self.slots)[rows][:, columns] for ptrs in (self._row_ptrs[:-1], self._row_ptrs[1:])
        )
        row_ptrs = _offsets(ends - starts)
        return type(self)(self.keys[_positions(starts.reshape(-1), row_ptrs)], row_ptrs, starts.shape[1])


def _offsets(sizes: Ints) -> Ints:
    """Return the CSR offsets of bags of these sizes."""
    row_ptrs = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes.reshape(-1), out=row_ptrs[1:])
    return row_ptrs


def _positions(starts: Ints, row_ptrs: Ints) -> Ints:
    """Return int64[N], the positions of the keys of bags that begin at ``starts`` and end by ``row_ptrs``."""
    return np.arange(row_ptrs[-1], dtype=np.int64) + np.repeat(starts - row_ptrs[:-1], np.diff(row_ptrs))


@dataclass(frozen=True, slots=True)
class Samples:
    """B labeled samples.

    Attributes:
        labels: float32[B, L], such as 0.0 and 1.0; the loss of each label says which values it takes.
        dense: float32[B, F].
        bags: the keys of all slots of all sparse inputs, in the order of the graph. These are also a request's keys and
            its one CSR.
        weights: float32[B], how much each sample counts; None: all count the same.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    bags: Bags
    weights: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        """Return B."""
        return int(self.labels.shape[0])

    def __getitem__(self, rows: slice | Ints) -> Self:
        """Select samples by slice or by int64 positions."""
        weights = None if self.weights is None else self.weights[rows]
        return type(self)(self.labels[rows], self.dense[rows], self.bags[rows], weights)

    def parts(self) -> Iterator[Self]:
        """Yield all samples at once; see ``training.data.source.SampleSource``."""
        yield self

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate samples. ``parts`` has at least one item."""
        if len(parts) == 1:
            return parts[0]
        weights = [part.weights for part in parts if part.weights is not None]
        return cls(
            labels=np.concatenate([part.labels for part in parts]),
            dense=np.concatenate([part.dense for part in parts]),
            bags=Bags.joined([part.bags for part in parts]),
            weights=np.concatenate(weights) if weights else None,
        )


class ContentSum:
    """The CRC-32 of samples. It does not depend on how the samples are cut into parts."""

    def __init__(self) -> None:
        """Begin without samples."""
        self._sums: list[int] = []

    def add(self, part: Samples) -> None:
        """Take the next samples."""
        columns = [part.labels, part.dense, part.bags.keys, part.bags.sizes]
        columns += [] if part.weights is None else [part.weights]
        self._sums = self._sums or [0] * len(columns)
        for number, column in enumerate(columns):
            self._sums[number] = zlib.crc32(np.ascontiguousarray(column).data, self._sums[number])

    def __str__(self) -> str:
        """Return the sum as hexadecimal digits."""
        return f"{zlib.crc32(repr(self._sums or [0, 0, 0, 0]).encode()):08x}"
