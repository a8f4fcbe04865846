"""Read requests into batches: tensors as HugeCTR's clients send them, or columns of features.

All checks are vectorized; the first fault is located only when a check fails. Masks use
``np.count_nonzero``, which is faster than ``any`` for arrays of a request's size.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import Tensors, first_outside, read_keys, split_by_table
from serving.arrays import flat_offsets, floats, integers
from serving.batch import INT32_MAX, Batch, Ints, JoinedKeys, Places, TableKeys
from serving.config import ModelConfig, TableConfig
from serving.errors import RequestError
from serving.features import Column, FeatureReader, slots_of, spread_columns
from serving.model.names import DENSE, KEYS, ROW_PTRS
from serving.model.sequences import TooLong, slots_of_bags
from serving.model.slot_sizes import SlotRange, shift_keys
from serving.model.sparse_rows import KeyType, key_range

Offsets = NDArray[np.int32] | NDArray[np.int64]
Flags = NDArray[np.bool_]
_NO_KEY = np.iinfo(np.int64).min  # no request has this key


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
    check_request_keys(flat_keys, config.key_type, KEYS)
    samples, sent = _by_table(config, flat_keys, offsets)
    if given_keys.ndim == 2 and len(given_keys) != 1:
        _check_keys_shape(config, given_keys.shape, samples)
    return _batch_of(config, _read_numbers(dense, samples, config), sent)


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
    return _with_positions(config, Batch(dense, joined, sent))


def _with_positions(config: ModelConfig, batch: Batch) -> Batch:
    """Return a batch without the keys that stand for no key, in which each position of a sequence has a bag.

    The masks of sequences follow the dense features.

    Args:
        config: the model.
        batch: has one bag for each slot of each sample.

    Raises:
        RequestError: a sequence has too many keys.
    """
    if all(table.sequences is None and not table.paddings for table in config.tables):
        return batch
    bags: list[Places | None] = list(batch.bags or [None] * len(config.tables))
    parts: list[TableKeys] = []
    masks: list[Flags] = []
    for place, (table, (keys, row_ptrs)) in enumerate(zip(config.tables, batch.tables, strict=True)):
        sequences, of_slots = table.sequences, bags[place]
        is_padding = _is_padding(table, keys, row_ptrs, of_slots)
        if sequences is not None:
            sizes = np.diff(row_ptrs)
            sizes = sizes if of_slots is None else sizes[of_slots]
            if found := sequences.too_long(sizes.reshape(-1, table.slots)):
                raise _too_long(config, place, found)
            row_ptrs, bags[place] = sequences.spread(row_ptrs, of_slots)
        if is_padding is not None:
            left_out = np.zeros(keys.size + 1, np.int32)
            np.cumsum(is_padding, out=left_out[1:])
            keys, row_ptrs = keys[~is_padding], row_ptrs - left_out[row_ptrs]
        if sequences is not None and sequences.mask:
            has_key, of_positions = row_ptrs[1:] > row_ptrs[:-1], bags[place]
            masks.append((has_key if of_positions is None else has_key[of_positions]).reshape(-1, sequences.positions))
        parts.append(TableKeys(keys, row_ptrs))
    dense = np.concatenate([batch.dense, *masks], axis=1, dtype=np.float32) if masks else batch.dense
    return Batch(dense, parts, batch.sent, None if batch.bags is None else bags, batch.rows, batch.bags)


def _is_padding(table: TableConfig, keys: Ints, row_ptrs: Offsets, bags: Places | None) -> Flags | None:
    """Return which keys of a table stand for no key; None if none does."""
    if not any(np.count_nonzero(keys == key) for key in {*table.paddings} - {None}):
        return None
    of_slots = np.array([_NO_KEY if key is None else key for key in table.paddings], np.int64)
    found: Flags = keys == np.repeat(of_slots[slots_of_bags(table.slots, row_ptrs.size - 1, bags)], np.diff(row_ptrs))
    return found


def _too_long(config: ModelConfig, place: int, found: TooLong) -> RequestError:
    table = config.tables[place]
    assert table.sequences is not None
    name = [slot.name for slot in slots_of(config) if slot.table == table.name][found.slot]
    most = table.sequences.most[found.slot]
    return RequestError(
        f"sample {found.sample} has {found.keys} keys in the sequence {name!r}, at most {most} are allowed"
    )


def read_columns(config: ModelConfig, reader: FeatureReader, columns: Sequence[Column], samples: int) -> Batch:
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
    return transform_columns(config, reader, columns, samples)


def transform_columns(
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
        check_request_keys(found.keys, config.key_type, KEYS)
    except RequestError:  # the message has the key's position among those of each sample
        check_request_keys(reader.transform(spread_columns(columns, rows), samples).keys, config.key_type, KEYS)
        raise
    _check_limits(config, sent, found.most_keys, found.bags)
    given = _shifted(config, sent, bags) if config.slot_keys == "unshifted" else sent
    reader.count(found)
    batch = Batch(found.dense, given, sent if reader.has_keys else columns, bags, rows or {})
    return _with_positions(config, batch)


def _one_key_per_slot(config: ModelConfig, keys: Ints) -> Offsets:
    """Return the offsets of [B, S] keys."""
    slots = sum(table.slots for table in config.tables)
    if keys.ndim != 2 or keys.shape[1] != slots:
        expected = f"expected the shape [B, {slots}], one key per slot"
        raise RequestError(f"{KEYS}: {expected}, because {ROW_PTRS} is missing; got {list(keys.shape)}")
    if not 1 <= len(keys) <= config.max_batchsize:
        raise RequestError(f"{KEYS}: {len(keys)} samples, but the model takes 1 to {config.max_batchsize}")
    return np.arange(keys.size + 1, dtype=np.int32)


def _check_keys_shape(config: ModelConfig, shape: tuple[int, ...], samples: int) -> None:
    slots = sum(table.slots for table in config.tables)
    if shape != (samples, slots):
        expected = f"[n], [1, n] or, with one key per slot, [{samples}, {slots}]"
        raise RequestError(f"{KEYS}: expected the shape {expected}, got {list(shape)}")


def check_request_keys(keys: Ints, key_type: KeyType, tensor: str) -> None:
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
            slots = slots_of_bags(table.slots, of_table.row_ptrs.size - 1, of_bags)
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


def _read_numbers(value: Any, samples: int, config: ModelConfig) -> NDArray[np.float32]:
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
