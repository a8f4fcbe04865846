"""One request's samples, checked once; later code trusts them.

All checks are vectorized; the first fault is located only when a check fails. Masks use
``np.count_nonzero``, which is faster than ``any`` for arrays of a request's size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.host import Tensors, first_outside, read_keys, split_by_table
from serving.arrays import flat_offsets, floats, integers
from serving.config import ModelConfig
from serving.errors import RequestError
from serving.features import Column, FeatureReader, places_of, rows_of, slots_of, spread
from serving.model.records import Output
from serving.model.sequences import TooLong
from serving.model.slot_sizes import SlotRange, shift_keys
from serving.model.sparse_rows import KeyType, key_range

# The three tensors' names on the wire, as in HugeCTR's Triton backend.
DENSE, KEYS, ROW_PTRS = "DES", "CATCOLUMN", "ROWINDEX"

INT32_MAX = 2**31 - 1

Ints = NDArray[np.int64]
Places = NDArray[np.int32]
Offsets = NDArray[np.int32] | NDArray[np.int64]


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
        dense: float32[B, F], all finite; the masks of sequences follow, see ``with_positions``.
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
            sent = _spread(sent, self.rows)
        return replace(self, given=_expanded(self.tables, self.bags), sent=sent, bags=None, rows={}, sent_bags=None)

    def parts(self, most: int) -> Iterator["Batch"]:
        """Yield the samples of an expanded batch in batches of at most ``most`` samples."""
        if self.samples <= most:
            yield self
            return
        for begin in range(0, self.samples, most):
            dense = self.dense[begin : begin + most]
            yield Batch(dense, [_part(keys, begin, len(dense), self.samples) for keys in self.tables])


def read_batch(config: ModelConfig, dense: Any, keys: Any, row_ptrs: Any) -> Batch:
    """Check one request and return it as a Batch, which may share memory with the given arrays.

    With one table, ``row_ptrs`` is one CSR: B * S + 1 offsets, sample-major. With several tables, keys are
    sample-major (sample 0's keys of table 0, then of table 1, ..., then sample 1's), and ``row_ptrs`` is either one
    block of B * S + 1 offsets per table, each starting at 0 (HugeCTR v4), or one CSR over the slots of all tables
    (v3.0); its length decides.

    If the model's keys begin at 0 in each slot, the batch has the keys of the tables. A key that is not one of its slot
    becomes a key of no table.

    Args:
        config: the model the request is for.
        dense: [B * F], [1, B * F] or [B, F] numbers, none of them NaN or infinite; None or empty where F is 0.
        keys: [N], [1, N] or, with one key per slot, [B, S] integers; 0 to 2**32 - 1 for a uint32 model, any int64
            except the two smallest and the two largest values for an int64 model.
        row_ptrs: [R] or [1, R] integers; None: the keys are [B, S], one key per slot.

    Raises:
        RequestError: a tensor is wrong, or the request has no sample or more than ``config.max_batchsize``; the
            message names the tensor and the position.
    """
    given_keys = integers(keys, KEYS)
    flat_keys = given_keys.reshape(-1)
    offsets = _one_key_per_slot(config, given_keys) if row_ptrs is None else flat_offsets(row_ptrs, ROW_PTRS)
    check_keys(flat_keys, config.key_type, KEYS)
    samples, sent = _by_table(config, flat_keys, offsets)
    if given_keys.ndim == 2 and len(given_keys) != 1:
        _check_rows(config, given_keys.shape, samples)
    return _batch_of(config, read_dense(dense, samples, config), sent)


def read_tensors(
    config: ModelConfig, tensors: Tensors, dense: int | None, keys: int, row_ptrs: int | None
) -> Batch | None:
    """Return the same as ``read_batch``, in one native call, or None if a number is wrong.

    Args:
        config: the model the request is for.
        tensors: the request's tensors, in shapes that ``read_batch`` has accepted before.
        dense: the number of the tensor that has the dense features, float32.
        keys: the number of the tensor that has the keys.
        row_ptrs: the number of the tensor that has the offsets.

    Raises:
        RequestError: a sample has too many keys.
    """
    slots = [table.slots for table in config.tables]
    found = read_keys(tensors, dense, keys, row_ptrs, slots, *key_range(config.key_type))
    if found is None:
        return None
    numbers, flat_keys, offsets, most_keys = found
    samples = (offsets.size - len(slots)) // sum(slots)
    sent = JoinedKeys(flat_keys, offsets, [samples * count + 1 for count in slots])
    _check_limits(config, sent, most_keys)
    return _batch_of(config, numbers.reshape(samples, config.dense_dim), sent)


def _batch_of(config: ModelConfig, dense: NDArray[np.float32], sent: JoinedKeys) -> Batch:
    joined = _shifted(config, sent) if config.slot_keys == "unshifted" else sent
    return with_positions(config, Batch(dense, joined, sent))


def with_positions(config: ModelConfig, batch: Batch) -> Batch:
    """Return a batch in which each position of a sequence has a bag, and the masks follow the dense features.

    Args:
        config: the model.
        batch: has one bag for each slot of each sample.

    Raises:
        RequestError: a sequence has too many keys.
    """
    if all(table.sequences is None for table in config.tables):
        return batch
    bags: list[Places | None] = list(batch.bags or [None] * len(config.tables))
    offsets, masks = [], []
    for place, (table, (_, row_ptrs)) in enumerate(zip(config.tables, batch.tables, strict=True)):
        sequences = table.sequences
        if sequences is not None:
            sizes, of_slots = np.diff(row_ptrs), bags[place]
            sizes = sizes if of_slots is None else sizes[of_slots]
            if found := sequences.too_long(sizes.reshape(-1, table.slots)):
                raise _too_long(config, place, found)
            row_ptrs, bags[place], has_key = sequences.spread(row_ptrs, of_slots)
            masks += [has_key] if sequences.mask else []
        offsets.append(row_ptrs)
    dense = np.concatenate([batch.dense, *masks], axis=1, dtype=np.float32) if masks else batch.dense
    given = JoinedKeys(batch.joined.keys, np.concatenate(offsets), [of_table.size for of_table in offsets])
    return Batch(dense, given, batch.sent, None if batch.bags is None else bags, batch.rows, batch.bags)


def _too_long(config: ModelConfig, place: int, found: TooLong) -> RequestError:
    table = config.tables[place]
    assert table.sequences is not None
    name = [slot.name for slot in slots_of(config) if slot.table == table.name][found.slot]
    most = table.sequences.most[found.slot]
    return RequestError(
        f"sample {found.sample} has {found.keys} keys in the sequence {name!r}, at most {most} are allowed"
    )


def read_features(config: ModelConfig, reader: FeatureReader, columns: Sequence[Column], samples: int) -> Batch:
    """Return a request of raw features as a Batch.

    Args:
        config: the model the request is for.
        reader: of the model's features.
        columns: what ``reader.columns`` returned.
        samples: B.

    Raises:
        RequestError: a value cannot be transformed, or the request has no sample or more than ``config.max_batchsize``.
    """
    if not 1 <= samples <= config.max_batchsize:
        raise RequestError(f"{samples} samples, but the model takes 1 to {config.max_batchsize}")
    return transformed(config, reader, columns, samples)


def transformed(
    config: ModelConfig,
    reader: FeatureReader,
    columns: Sequence[Column],
    samples: int,
    rows: Mapping[int, Places] | None = None,
) -> Batch:
    """Return the samples of columns as a Batch.

    Args:
        config: the model the request is for.
        reader: of the model's features.
        columns: by ``reader.inputs``.
        samples: B, which has been checked.
        rows: see ``Batch.rows``, for columns that samples share; None: each has a row for each sample.

    Raises:
        RequestError: a value cannot be transformed, or a sample has too many keys of a table.
    """
    users = next((of_users for size, of_users in (rows or {}).items() if size != 1), None)
    found = reader.transform_by_table(columns, samples, users)
    bags = None if rows is None else found.bags
    sent = JoinedKeys(found.keys, found.row_ptrs, found.lengths)
    try:
        check_keys(found.keys, config.key_type, KEYS)
    except RequestError:  # the message has the key's position among those of each sample
        check_keys(reader.transform(_spread(columns, rows), samples).keys, config.key_type, KEYS)
        raise
    _check_limits(config, sent, found.most_keys, found.bags)
    given = _shifted(config, sent, bags) if config.slot_keys == "unshifted" else sent
    reader.count(found)
    batch = Batch(found.dense, given, sent if reader.has_keys else columns, bags, rows or {})
    return with_positions(config, batch)


def check_batch(batch: Any) -> None:
    """Refuse what ``read_batch`` did not make.

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


def _spread(columns: Sequence[Column], rows: Mapping[int, Places] | None) -> Sequence[Column]:
    """Return columns with a row for each sample; see ``Batch.rows``."""
    return [spread(column, rows[size]) if rows and (size := rows_of(column)) in rows else column for column in columns]


def _part(keys: TableKeys, begin: int, samples: int, of: int) -> TableKeys:
    """Return the keys of some samples of a table; ``of`` is the number of all samples."""
    slots = (keys.row_ptrs.size - 1) // of
    row_ptrs = keys.row_ptrs[begin * slots : (begin + samples) * slots + 1]
    return TableKeys(keys.keys[row_ptrs[0] : row_ptrs[-1]], row_ptrs - row_ptrs[0])


def _one_key_per_slot(config: ModelConfig, keys: Ints) -> Offsets:
    """Return the offsets of [B, S] keys."""
    slots = sum(table.slots for table in config.tables)
    if keys.ndim != 2 or keys.shape[1] != slots:
        expected = f"expected the shape [B, {slots}], one key per slot"
        raise RequestError(f"{KEYS}: {expected}, because {ROW_PTRS} is missing; got {list(keys.shape)}")
    if not 1 <= len(keys) <= config.max_batchsize:
        raise RequestError(f"{KEYS}: {len(keys)} samples, but the model takes 1 to {config.max_batchsize}")
    return np.arange(keys.size + 1, dtype=np.int32)


def _check_rows(config: ModelConfig, shape: tuple[int, ...], samples: int) -> None:
    slots = sum(table.slots for table in config.tables)
    if shape != (samples, slots):
        expected = f"[n], [1, n] or, with one key per slot, [{samples}, {slots}]"
        raise RequestError(f"{KEYS}: expected the shape {expected}, got {list(shape)}")


def check_keys(keys: Ints, key_type: KeyType, tensor: str) -> None:
    """Refuse keys that no table of ``key_type`` can hold.

    Raises:
        RequestError: a key is reserved or out of range, or there are too many keys; the message names ``tensor``.
    """
    if keys.size > INT32_MAX:
        raise RequestError(f"{tensor}: {keys.size} keys, but 32-bit offsets reach {INT32_MAX}")
    smallest, largest = key_range(key_type)
    at = first_outside(keys, smallest, largest)
    if at < keys.size:
        why = "a uint32 key is" if key_type == "I32" else "is reserved: a key is"
        raise RequestError(f"{tensor}: {keys[at]} at position {at}: {why} in {smallest}..{largest}")


def _samples(bags: int, slots: int, config: ModelConfig, length: int) -> int:
    samples, rest = divmod(bags, slots)
    if rest or bags < 0:
        tables = len(config.tables)
        form = "B * S + 1" if tables == 1 else f"B * S + {tables} (or B * S + 1)"
        raise RequestError(f"{ROW_PTRS}: expected {form} offsets for S = {slots} slots, got {length}")
    if not samples:
        raise RequestError(f"{ROW_PTRS}: the request has no sample")
    if samples > config.max_batchsize:
        raise RequestError(f"{ROW_PTRS}: {samples} samples, but the model takes at most {config.max_batchsize}")
    return samples


def _check_offsets(offsets: Offsets, start: int) -> None:
    """Check that ``offsets``, which begins at position ``start`` of the tensor, starts at 0 and never decreases."""
    if offsets[0] != 0:
        raise RequestError(f"{ROW_PTRS}: expected 0 at position {start}, got {offsets[0]}")
    falls = offsets[1:] < offsets[:-1]
    if np.count_nonzero(falls):
        at = int(np.argmax(falls)) + 1
        raise RequestError(f"{ROW_PTRS}: falls from {offsets[at - 1]} to {offsets[at]} at position {start + at}")


def _check_end(end: int, keys: Ints) -> None:
    if end != keys.size:
        raise RequestError(f"{ROW_PTRS}: the offsets end at {end}, but {KEYS} has {keys.size} keys")


def _by_table(config: ModelConfig, keys: Ints, offsets: Offsets) -> tuple[int, JoinedKeys]:
    slots = [table.slots for table in config.tables]
    total = sum(slots)
    # B * total + 1 and B * total + T cannot be mistaken for each other: 0 < T - 1 < total, or T is 1.
    is_one_csr = len(slots) == 1 or offsets.size % total == 1
    samples = _samples(offsets.size - (1 if is_one_csr else len(slots)), total, config, offsets.size)
    split = split_by_table(keys, offsets, slots)
    lengths = [samples * count + 1 for count in slots]
    if split is None:
        blocks = [offsets.size] if is_one_csr else lengths
        _check_blocks(keys, offsets, list(accumulate(blocks, initial=0)))
        raise RequestError(f"{ROW_PTRS}: changed while it was read")
    keys, row_ptrs, _, most_keys = split
    joined = JoinedKeys(keys, row_ptrs, lengths)
    _check_limits(config, joined, most_keys)
    return samples, joined


def _shifted(config: ModelConfig, joined: JoinedKeys, bags: Sequence[Places | None] | None = None) -> JoinedKeys:
    """Return the same bags with keys of the tables in place of keys that begin at 0 in each slot."""
    parts = []
    for place, (table, of_table) in enumerate(zip(config.tables, joined.tables, strict=True)):
        of_slots, of_bags = _ranges(table.slot_ranges), None if bags is None else bags[place]
        if of_bags is not None:  # the range of each bag
            slots = np.zeros(of_table.row_ptrs.size - 1, np.int64)
            slots[of_bags] = np.arange(of_bags.size) % table.slots
            of_slots = of_slots[0][slots], of_slots[1][slots]
        parts.append(shift_keys(of_table.keys, np.diff(of_table.row_ptrs), of_slots))
    return JoinedKeys(np.concatenate(parts), joined.row_ptrs, joined.lengths)


@cache
def _ranges(of_slots: tuple[SlotRange, ...]) -> tuple[Ints, Ints]:
    """Return the offsets and the sizes as arrays."""
    offsets, sizes = np.array(of_slots, np.int64).T
    return offsets, sizes


def _check_limits(
    config: ModelConfig, joined: JoinedKeys, most_keys: Sequence[int], bags: Sequence[Places | None] | None = None
) -> None:
    """Refuse a sample with more keys of a table than it may have. No sample has more than ``most_keys`` of a table."""
    for place, (table, most) in enumerate(zip(config.tables, most_keys, strict=True)):
        limit = table.max_keys_per_sample
        if limit is None or most <= limit:
            continue
        lengths, of_table = np.diff(joined.tables[place].row_ptrs), None if bags is None else bags[place]
        counts = (lengths if of_table is None else lengths[of_table]).reshape(-1, table.slots).sum(axis=1)
        if counts.max() > limit:
            at = int(np.argmax(counts > limit))
            reason = f"{counts[at]} keys, but table {table.name!r} takes at most {limit} per sample"
            raise RequestError(f"sample {at} has {reason}")


def _check_blocks(keys: Ints, offsets: Offsets, borders: list[int]) -> None:
    """Raise the error of the first wrong CSR; ``borders`` separate the CSRs in ``offsets``."""
    for start, end in pairwise(borders):
        _check_offsets(offsets[start:end], start)
    _check_end(sum(int(offsets[end - 1]) for end in borders[1:]), keys)


def read_dense(value: Any, samples: int, config: ModelConfig) -> NDArray[np.float32]:
    """Check the dense features of a request, and return float32[B, F].

    Raises:
        RequestError: they have another shape, or one of them is not finite.
    """
    features = config.dense_dim
    if value is None and not features:
        return np.empty((samples, 0), dtype=np.float32)
    dense = floats(value, DENSE)
    flat = dense.ndim == 1 or (dense.ndim == 2 and dense.shape[0] == 1)
    if not (flat and dense.size == samples * features) and dense.shape != (samples, features):
        expected = f"{samples} samples of {features} features"
        raise RequestError(f"{DENSE}: expected {expected}, got the shape {list(dense.shape)}")
    dense = dense.reshape(samples, features)
    is_finite = np.isfinite(dense)
    if np.count_nonzero(is_finite) < dense.size:
        sample, feature = (int(place) for place in np.argwhere(~is_finite)[0])
        name = repr(config.dense_names[feature]) if config.dense_names else feature
        raise RequestError(f"{DENSE}: sample {sample}, feature {name} is {dense[sample, feature]} in float32")
    return dense
