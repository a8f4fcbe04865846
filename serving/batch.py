"""One request's samples, checked once by ``reading``; later code trusts them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.errors import RequestError
from serving.features import Column, places_of, spread_columns
from serving.model.names import KEYS
from serving.model.records import Output

INT32_MAX = 2**31 - 1

Ints = NDArray[np.int64]
Places = NDArray[np.int32]


class TableKeys(NamedTuple):
    """The keys of one table for all samples of a batch.

    Attributes:
        keys: int64[N], bag after bag.
        row_ptrs: int32[R + 1], CSR offsets of R bags; starts at 0, ends at N. A batch without ``bags`` has one bag for
            each slot of each sample, sample-major: sample 0's slot 0, slot 1, ..., then sample 1's.
    """

    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int32]


class JoinedKeys(NamedTuple):
    """The keys of all tables for all samples of a batch.

    Attributes:
        keys: int64[N], table after table in graph order.
        row_ptrs: int32[R + T], one CSR per table, table after table; see ``TableKeys``.
        lengths: how many offsets each table has in ``row_ptrs``.
    """

    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int32]
    lengths: Sequence[int]

    @property
    def tables(self) -> tuple[TableKeys, ...]:
        """One entry per table."""
        keys, row_ptrs, lengths = self
        tables = []
        for length in lengths:
            of_table, row_ptrs = row_ptrs[:length], row_ptrs[length:]
            count = int(of_table[-1])
            tables.append(TableKeys(keys[:count], of_table))
            keys = keys[count:]
        return tuple(tables)


class Top(NamedTuple):
    """The best candidates of each user: how many, and the output that ranks them."""

    k: int
    output: Output


@dataclass(frozen=True)
class Batch:
    """B samples.

    Attributes:
        dense: float32[B, F], all finite; the masks of sequences follow, see ``SequenceSlots``.
        given: the keys in one of two forms: one entry per embedding table, in graph order, or joined.
        sent: what the request had, for the request log: columns of raw features, or the keys of all tables before those
            of each slot are shifted. None: unknown.
        bags: by table, the bag of each slot of each sample, int32[B * S]; None of a table, or of all tables: each slot
            of each sample has a bag of its own, in order. Samples that share a bag are looked up once. A sequence has a
            bag for each position.
        rows: by the number of rows of a column of ``sent``, the row of each sample; columns with a row for each sample
            are not in it.
        sent_bags: the bags of ``sent``, before sequences have a bag for each position; None: they are ``bags``.
        wanted: the outputs that the request asks for; None: those of a request that names none.
        counts: how many candidates each user has, int64[U]; None: all samples are candidates of one user.
        top: which candidates the request asks for; None: it does not ask for the best.
    """

    dense: NDArray[np.float32]
    given: Sequence[TableKeys] | JoinedKeys
    sent: Sequence[Column] | JoinedKeys | None = None
    bags: Sequence[Places | None] | None = None
    rows: Mapping[int, Places] = field(default_factory=dict)
    sent_bags: Sequence[Places | None] | None = None
    wanted: tuple[Output, ...] | None = None
    counts: Ints | None = None
    top: Top | None = None

    @property
    def counts_of_users(self) -> Ints:
        """``counts``, or the number of all samples as those of one user."""
        return np.array([self.samples]) if self.counts is None else self.counts

    @property
    def samples(self) -> int:
        """B."""
        return int(self.dense.shape[0])

    @cached_property
    def tables(self) -> tuple[TableKeys, ...]:
        """One entry per embedding table, in graph order."""
        return self.given.tables if isinstance(self.given, JoinedKeys) else tuple(self.given)

    @property
    def joined(self) -> JoinedKeys:
        """The keys of all tables."""
        return self.given if isinstance(self.given, JoinedKeys) else self._joined

    @cached_property
    def _joined(self) -> JoinedKeys:
        keys, row_ptrs = zip(*self.tables, strict=True)
        return JoinedKeys(np.concatenate(keys), np.concatenate(row_ptrs), [of_table.size for of_table in row_ptrs])

    def expanded(self) -> "Batch":
        """Return the same samples, each with bags of its own.

        Raises:
            RequestError: they would have too many keys.
        """
        if self.bags is None:
            return self
        sent = self.sent
        if isinstance(sent, JoinedKeys):
            sent = Batch(self.dense, _expanded(sent.tables, self.sent_bags or self.bags)).joined
        elif sent is not None:
            sent = spread_columns(sent, self.rows)
        return replace(self, given=_expanded(self.tables, self.bags), sent=sent, bags=None, rows={}, sent_bags=None)

    def parts(self, most: int) -> Iterator["Batch"]:
        """Yield the samples of an expanded batch in batches of at most ``most`` samples."""
        if self.samples <= most:
            yield self
            return
        for begin in range(0, self.samples, most):
            dense = self.dense[begin : begin + most]
            yield Batch(dense, [_part(keys, begin, len(dense), self.samples) for keys in self.tables])


def check_batch(batch: Any) -> None:
    """Refuse what ``reading`` did not make.

    Raises:
        RequestError: it is no Batch.
    """
    if not isinstance(batch, Batch):
        raise RequestError(f"expected a Batch, which read_batch returns, got {type(batch).__name__}")


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return the samples of several batches of one model, one after the other.

    Raises:
        RequestError: a table would have more keys than 32-bit offsets reach.
    """
    for batch in batches:
        check_batch(batch)
    by_table = list(zip(*(batch.tables for batch in batches), strict=True))
    bags = None
    if any(batch.bags is not None for batch in batches):
        of_batches = [batch.bags or [None] * len(by_table) for batch in batches]
        bags = [_joined_bags(*both) for both in zip(by_table, zip(*of_batches, strict=True), strict=True)]
    dense = np.concatenate([batch.dense for batch in batches])
    return Batch(dense, [join_keys(of_table) for of_table in by_table], bags=bags)


def join_keys(parts: Sequence[TableKeys]) -> TableKeys:
    """Return the keys that several batches have of one table.

    Raises:
        RequestError: there are more keys than 32-bit offsets reach.
    """
    if len(parts) == 1:
        return parts[0]
    starts = list(accumulate((part.keys.size for part in parts), initial=0))
    if starts[-1] > INT32_MAX:
        raise RequestError(f"{KEYS}: {starts[-1]} keys of one table, but 32-bit offsets reach {INT32_MAX}")
    row_ptrs = [part.row_ptrs[1:] + np.int32(start) for part, start in zip(parts, starts, strict=False)]
    return TableKeys(np.concatenate([part.keys for part in parts]), np.concatenate([parts[0].row_ptrs[:1], *row_ptrs]))


def _joined_bags(parts: Sequence[TableKeys], bags: Sequence[Places | None]) -> Places | None:
    """Return the bags of the samples of several batches in one table, after their keys were joined."""
    if all(of_part is None for of_part in bags):
        return None
    counts = [part.row_ptrs.size - 1 for part in parts]
    begins = accumulate(counts, initial=0)
    return np.concatenate(
        [
            np.arange(begin, begin + count, dtype=np.int32) if of_part is None else of_part + np.int32(begin)
            for of_part, begin, count in zip(bags, begins, counts, strict=False)
        ]
    )


def _expanded(tables: Sequence[TableKeys], bags: Sequence[Places | None]) -> list[TableKeys]:
    """Return the keys of each table with a bag for each slot of each sample; see ``places_of``."""
    expanded = []
    for keys, of_table in zip(tables, bags, strict=True):
        if of_table is not None:
            places, row_ptrs = places_of(keys.row_ptrs, of_table)
            keys = TableKeys(keys.keys[places], row_ptrs.astype(np.int32))
        expanded.append(keys)
    return expanded


def _part(keys: TableKeys, begin: int, samples: int, of: int) -> TableKeys:
    """Return the keys of some samples of a table; ``of`` is the number of all samples."""
    slots = (keys.row_ptrs.size - 1) // of
    row_ptrs = keys.row_ptrs[begin * slots : (begin + samples) * slots + 1]
    return TableKeys(keys.keys[row_ptrs[0] : row_ptrs[-1]], row_ptrs - row_ptrs[0])
