import math
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from serving.batch import Batch, TableKeys, join_batches
from serving.config import ModelConfig, TableConfig
from serving.errors import RequestError
from serving.reading import read_batch

SMALLEST, LARGEST = -(2**63) + 2, 2**63 - 3


def model(*slots, features=2, key_type="I64", max_batchsize=8, limit=6):
    tables = tuple(
        TableConfig(name=f"t{i}", dim=4, slots=s, combiner="sum", file=Path("x"), max_keys_per_sample=limit)
        for i, s in enumerate(slots)
    )
    return ModelConfig(
        name="m",
        graph_file=Path("x"),
        dense_file=Path("x"),
        tables=tables,
        key_type=key_type,
        max_batchsize=max_batchsize,
        dense_dim=features,
        label_dim=1,
    )


def flat_ints(value, shape=None):
    """Read a flat list of integers, or rows of this shape, as the oracle does; None for anything else."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu" or value.ndim not in (1, 2):
            return None
        value = value.tolist()
    if not isinstance(value, list):
        return None
    if value and all(isinstance(row, list) for row in value):
        if len(value) > 1 and (len(value), *{len(row) for row in value}) != shape:
            return None
        value = [one for row in value for one in row]
    if any(type(one) is not int or not -(2**63) <= one < 2**63 for one in value):
        return None
    return value


def float32(number):
    """Round as IEEE 754 does; None if the result is not finite."""
    try:
        single = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return None
    return single if math.isfinite(single) else None


def dense_rows(value, samples, features):
    if value is None:
        return [[] for _ in range(samples)] if not features else None
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiu":
            return None
        value = value.tolist()
    if not isinstance(value, list):
        return None
    nested = bool(value) and all(isinstance(one, list) for one in value)
    rows = value if nested else [value]
    if len({len(row) for row in rows}) > 1 or any(type(one) not in (int, float) for row in rows for one in row):
        return None
    flat = [one for row in rows for one in row]
    if len(flat) != samples * features or (nested and len(rows) not in (1, samples)):
        return None
    if nested and len(rows) == samples and samples > 1 and any(len(row) != features for row in rows):
        return None
    singles = [float32(one) for one in flat]
    return None if None in singles else [singles[i * features : (i + 1) * features] for i in range(samples)]


def one_csr(row_ptrs, keys, slots):
    """Return bags by sample and slot, or None."""
    if not row_ptrs or (len(row_ptrs) - 1) % slots or row_ptrs[0] != 0 or row_ptrs[-1] != len(keys):
        return None
    if any(a > b for a, b in pairwise(row_ptrs)):
        return None
    bags = [keys[a:b] for a, b in pairwise(row_ptrs)]
    return [bags[i : i + slots] for i in range(0, len(bags), slots)]


def split_request(config, keys, row_ptrs):
    """The oracle: bags[sample][slot over all tables], or None if it is not a request."""
    slots = [table.slots for table in config.tables]
    total = sum(slots)
    if len(slots) == 1 or (len(row_ptrs) - 1) % total == 0:
        return one_csr(row_ptrs, keys, total)
    samples, rest = divmod(len(row_ptrs) - len(slots), total)
    if rest or samples < 0:
        return None
    sizes, start = [], 0
    for count in slots:
        block = row_ptrs[start : start + samples * count + 1]
        start += samples * count + 1
        if block[0] != 0 or any(a > b for a, b in pairwise(block)):
            return None
        sizes.append([b - a for a, b in pairwise(block)])
    if sum(map(sum, sizes)) != len(keys):
        return None
    bags, at = [], 0
    for sample in range(samples):
        bags.append([])
        for count, of_table in zip(slots, sizes, strict=True):
            for size in of_table[sample * count : (sample + 1) * count]:
                bags[-1].append(keys[at : at + size])
                at += size
    return bags


def samples_of(config, row_ptrs):
    """The number of samples that offsets of either form describe."""
    slots = sum(table.slots for table in config.tables)
    return (len(row_ptrs) - 1) // slots if slots else 0


def one_key_per_slot(config, keys):
    """The offsets of rows with one key per slot, or None."""
    rows = keys.tolist() if isinstance(keys, np.ndarray) else keys
    slots = sum(table.slots for table in config.tables)
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == slots for row in rows):
        return None
    return list(range(len(rows) * slots + 1))


def oracle(config, dense, keys, row_ptrs):
    """(dense rows, bags[sample][slot]) in plain Python, or None if the request must be refused."""
    row_ptrs = one_key_per_slot(config, keys) if row_ptrs is None else flat_ints(row_ptrs)
    if row_ptrs is None:
        return None
    keys = flat_ints(keys, (samples_of(config, row_ptrs), sum(table.slots for table in config.tables)))
    if keys is None:
        return None
    low, high = (0, 2**32 - 1) if config.key_type == "I32" else (SMALLEST, LARGEST)
    bags = split_request(config, keys, row_ptrs)
    if not bags or len(bags) > config.max_batchsize or any(not low <= key <= high for key in keys):
        return None
    first = 0
    for table in config.tables:
        limit = table.max_keys_per_sample
        if limit and any(sum(map(len, sample[first : first + table.slots])) > limit for sample in bags):
            return None
        first += table.slots
    rows = dense_rows(dense, len(bags), config.dense_dim)
    return None if rows is None else (rows, bags)


def bags_of(batch, config):
    samples = [[] for _ in range(batch.samples)]
    for table, of_table in zip(config.tables, batch.tables, strict=True):
        assert of_table.keys.dtype == np.int64
        assert of_table.row_ptrs.dtype == np.int32
        assert of_table.row_ptrs.size == batch.samples * table.slots + 1
        for sample in range(batch.samples):
            for slot in range(table.slots):
                bag = sample * table.slots + slot
                samples[sample].append(of_table.keys[of_table.row_ptrs[bag] : of_table.row_ptrs[bag + 1]].tolist())
    return samples


def agree(config, dense, keys, row_ptrs):
    expected = oracle(config, dense, keys, row_ptrs)
    if expected is None:
        with pytest.raises(RequestError):
            read_batch(config, dense, keys, row_ptrs)
        return
    batch = read_batch(config, dense, keys, row_ptrs)
    assert batch.dense.dtype == np.float32
    assert batch.dense.shape == (len(expected[1]), config.dense_dim)
    assert batch.dense.tolist() == expected[0]
    assert bags_of(batch, config) == expected[1]


CONFIGS = st.builds(
    lambda slots, features, key_type: model(*slots, features=features, key_type=key_type),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(0, 3),
    st.sampled_from(["I64", "I32"]),
)
EDGE_INTS = st.sampled_from(
    [-1, 0, 2**31, 2**32 - 1, 2**32, SMALLEST, SMALLEST - 1, LARGEST, LARGEST + 1, 2**63, -(2**64)]
)
ANY_INT = st.integers(0, 9) | EDGE_INTS
ANY_FLOAT = st.floats() | st.floats(width=32, allow_nan=False, allow_infinity=False) | st.integers(-5, 5)
JUNK = (
    st.none() | st.booleans() | st.text(max_size=2) | st.binary(max_size=2) | st.dictionaries(st.integers(), st.none())
)
ANY_ARRAY = hnp.arrays(
    hnp.integer_dtypes() | hnp.floating_dtypes() | hnp.boolean_dtypes() | hnp.unicode_string_dtypes(max_len=2),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
ANYTHING = (
    ANY_ARRAY | JUNK | st.recursive(ANY_INT | ANY_FLOAT | JUNK, lambda inner: st.lists(inner, max_size=6), max_leaves=9)
)


@settings(deadline=None, max_examples=50)
@given(CONFIGS, ANYTHING, ANYTHING, ANYTHING)
def test_any_input_is_read_as_the_oracle_reads_it_or_is_a_request_error(config, dense, keys, row_ptrs):
    agree(config, dense, keys, row_ptrs)


@st.composite
def near_requests(draw):
    """A correct request in any form, with at most a few values changed."""
    config = draw(CONFIGS)
    samples = draw(st.integers(1, 9))
    slots = [table.slots for table in config.tables]
    sizes = [[draw(st.integers(0, 2)) for _ in range(samples * count)] for count in slots]
    total = sum(map(sum, sizes))
    keys = draw(st.lists(st.integers(0, 2**32 - 1), min_size=total, max_size=total))
    if draw(st.booleans()):
        row_ptrs = [0]
        for sample in range(samples):
            for count, of_table in zip(slots, sizes, strict=True):
                for size in of_table[sample * count : (sample + 1) * count]:
                    row_ptrs.append(row_ptrs[-1] + size)
    else:
        row_ptrs = []
        for of_table in sizes:
            row_ptrs += np.cumsum([0, *of_table]).tolist()
    dense = draw(st.lists(st.floats(width=32, allow_nan=False), min_size=(n := samples * config.dense_dim), max_size=n))
    for values, replacement in ((keys, ANY_INT), (row_ptrs, ANY_INT), (dense, ANY_FLOAT | JUNK)):
        if values and draw(st.integers(0, 5)) == 0:
            values[draw(st.integers(0, len(values) - 1))] = draw(replacement)
    return config, dense, keys, row_ptrs


@st.composite
def in_some_form(draw, values, dtypes):
    if draw(st.booleans()):
        try:
            with np.errstate(over="ignore"):
                values = np.array(values, dtype=draw(st.sampled_from(dtypes)))
        except (OverflowError, TypeError, ValueError, DeprecationWarning):  # NumPy 1.26 warns, NumPy 2 raises
            return values
        values = np.repeat(values, 2)[::2] if draw(st.booleans()) else values
        return values[None] if draw(st.booleans()) else values
    return [values] if draw(st.booleans()) else values


@settings(deadline=None, max_examples=50)
@given(st.data(), near_requests())
def test_almost_right_requests_are_read_as_the_oracle_reads_them(data, request_):
    config, dense, keys, row_ptrs = request_
    dense = data.draw(in_some_form(dense, ["f4", "f8", ">f4"]))
    keys = data.draw(in_some_form(keys, ["i8", "u8", ">i8", "u4"]))
    row_ptrs = data.draw(in_some_form(row_ptrs, ["i4", "i8", "u8", "u2"]))

    agree(config, dense, keys, row_ptrs)


DENSE, KEYS, ROW_PTRS = [0.5, 1.5, 2.5, 3.5], [7, 8, 9], [0, 1, 1, 2, 3]  # two samples, two slots, two features


@pytest.mark.parametrize("form", [list, np.array, lambda v: [v], lambda v: np.array([v]), lambda v: tuple(v)])
def test_flat_and_one_row_tensors_mean_the_same(form):
    batch = read_batch(model(2), form(DENSE), form(KEYS), form(ROW_PTRS))

    assert batch.samples == 2
    assert batch.dense.tolist() == [[0.5, 1.5], [2.5, 3.5]]
    assert bags_of(batch, model(2)) == [[[7], []], [[8], [9]]]


@pytest.mark.parametrize("form", [list, np.array])
@pytest.mark.parametrize("slots", [(2,), (1, 1)])
def test_keys_with_one_key_per_slot_need_no_offsets(slots, form):
    batch = read_batch(model(*slots), DENSE, form([[7, 8], [9, 10]]), None)

    assert bags_of(batch, model(*slots)) == [[[7], [8]], [[9], [10]]]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([7, 8, 9, 10], r"expected the shape \[B, 2\], one key per slot, because ROWINDEX is missing; got \[4\]"),
        ([[7, 8, 9, 10]], r"because ROWINDEX is missing; got \[1, 4\]"),
        (np.zeros((0, 2), np.int64), "CATCOLUMN: 0 samples, but the model takes 1 to 8"),
        (np.zeros((9, 2), np.int64), "CATCOLUMN: 9 samples, but the model takes 1 to 8"),
        ([[7, 8], [9, 2**63 - 1]], "CATCOLUMN: 9223372036854775807 at position 3"),
        ([[7, 8]], "DES: expected 1 samples of 2 features"),
    ],
)
def test_keys_without_offsets_must_have_one_key_per_slot(keys, message):
    with pytest.raises(RequestError, match=message):
        read_batch(model(2), DENSE, keys, None)


def test_dense_may_come_with_one_row_per_sample():
    assert read_batch(model(2), np.reshape(DENSE, (2, 2)), KEYS, ROW_PTRS).dense.tolist() == [[0.5, 1.5], [2.5, 3.5]]


@pytest.mark.parametrize("dense", [None, [], [[]], np.empty(0, np.float32), np.empty((1, 0)), np.empty((2, 0))])
def test_a_model_without_dense_features_takes_an_absent_or_empty_tensor(dense):
    assert read_batch(model(2, features=0), dense, KEYS, ROW_PTRS).dense.shape == (2, 0)


def test_arrays_of_the_right_dtype_are_not_copied():
    dense, keys = np.array(DENSE, np.float32), np.array(KEYS, np.int64)

    batch = read_batch(model(2), dense, keys, np.array(ROW_PTRS, np.int32))

    assert np.shares_memory(batch.dense, dense)
    assert np.shares_memory(batch.tables[0].keys, keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": [7, 8.5, 9]}, "CATCOLUMN: expected integers, got a value of type float at position 1"),
        ({"keys": np.array([7.0, 8, 9])}, "CATCOLUMN: expected integers, got an array of float64"),
        ({"keys": [7, True, 9]}, "CATCOLUMN: expected integers, got a value of type bool at position 1"),
        ({"keys": np.array([True] * 3)}, "CATCOLUMN: expected integers, got an array of bool"),
        ({"keys": ["7", "8", "9"]}, "CATCOLUMN: expected integers, got a value of type str at position 0"),
        ({"keys": [7, None, 9]}, "CATCOLUMN: expected integers, got nothing at position 1"),
        ({"keys": [[7], [8, 9]]}, "CATCOLUMN: ragged: row 0 has 1 values, row 1 has 2"),
        ({"keys": [7, [8], 9]}, "CATCOLUMN: expected integers, got a value of type list at position 1"),
        ({"keys": None}, "CATCOLUMN: expected a list or an array, got nothing"),
        ({"keys": "789"}, "CATCOLUMN: expected a list or an array, got a value of type str"),
        ({"keys": [7, np.timedelta64(8, "s"), 9]}, "CATCOLUMN: expected integers, got a value of type timedelta64"),
        ({"keys": [7, 2**63, 9]}, "CATCOLUMN: 9223372036854775808 at position 1 does not fit int64"),
        ({"keys": np.array([7, 2**63, 9], np.uint64)}, "CATCOLUMN: 9223372036854775808 at position 1 does not fit"),
        (
            {"keys": np.array([[7], [8], [9]])},
            "CATCOLUMN: expected the shape [n], [1, n] or, with one key per slot, [2, 2], got [3, 1]",
        ),
        ({"keys": [7, LARGEST + 1, 9]}, "CATCOLUMN: 9223372036854775806 at position 1: is reserved"),
        ({"keys": [7, 8, SMALLEST - 1]}, "CATCOLUMN: -9223372036854775807 at position 2: is reserved"),
        ({"keys": [7, 8]}, "ROWINDEX: the offsets end at 3, but CATCOLUMN has 2 keys"),
        ({"row_ptrs": [1, 1, 1, 2, 3]}, "ROWINDEX: expected 0 at position 0, got 1"),
        ({"row_ptrs": [0, 2, 1, 2, 3]}, "ROWINDEX: falls from 2 to 1 at position 2"),
        ({"row_ptrs": [0, 1, 1, 2]}, "ROWINDEX: expected B * S + 1 offsets for S = 2 slots, got 4"),
        ({"row_ptrs": []}, "ROWINDEX: expected B * S + 1 offsets for S = 2 slots, got 0"),
        ({"row_ptrs": [0], "keys": [], "dense": []}, "ROWINDEX: the request has no sample"),
        ({"row_ptrs": [0.0, 1, 1, 2, 3]}, "ROWINDEX: expected integers, got a value of type float at position 0"),
        ({"row_ptrs": [0] * 19}, "ROWINDEX: 9 samples, but the model takes at most 8"),
        ({"row_ptrs": [0, 5, 7, 7, 7], "keys": [1] * 7}, "sample 0 has 7 keys, but table 't0' takes at most 6"),
        ({"dense": [0.5, math.nan, 2.5, 3.5]}, "DES: sample 0, feature 1 is nan in float32"),
        ({"dense": [0.5, 1.5, -math.inf, 3.5]}, "DES: sample 1, feature 0 is -inf in float32"),
        ({"dense": [0.5, 1.5, 2.5, 1e39]}, "DES: sample 1, feature 1 is inf in float32"),
        ({"dense": [0.5, 1.5, 2.5, 10**400]}, "DES: the number at position 3 does not fit float32"),
        ({"dense": [0.5, 1.5, 2**1024 - 2**970, 3.5]}, "DES: the number at position 2 does not fit float32"),
        ({"dense": [0.5, 1.5, 2**1024 - 2**970 - 1, 3.5]}, "DES: sample 1, feature 0 is inf in float32"),
        ({"dense": [0.5, 1.5, 2.5]}, "DES: expected 2 samples of 2 features, got the shape [3]"),
        ({"dense": np.zeros((4, 1))}, "DES: expected 2 samples of 2 features, got the shape [4, 1]"),
        ({"dense": None}, "DES: expected a list or an array, got nothing"),
        ({"dense": ["0.5"] * 4}, "DES: expected numbers, got a value of type str at position 0"),
        ({"dense": np.zeros(4, complex)}, "DES: expected floats, got an array of complex128"),
    ],
)
def test_a_wrong_value_is_named_with_its_tensor_and_position(change, message):
    given_ = {"dense": DENSE, "keys": KEYS, "row_ptrs": ROW_PTRS} | change

    with pytest.raises(RequestError) as caught:
        read_batch(model(2), **given_)

    assert message in str(caught.value)


@pytest.mark.parametrize(("key", "position"), [(-1, 2), (2**32, 0)])
def test_a_key_that_is_not_a_uint32_is_refused_by_a_uint32_model(key, position):
    keys = [7, 8, 9]
    keys[position] = key

    with pytest.raises(
        RequestError, match=f"CATCOLUMN: {key} at position {position}: a uint32 key is in 0..4294967295"
    ):
        read_batch(model(2, key_type="I32"), DENSE, keys, ROW_PTRS)


@pytest.mark.parametrize("key", [0, 2**32 - 1])
def test_the_smallest_and_the_largest_uint32_are_keys(key):
    keys = np.array([7, key, 9], np.uint32)

    assert read_batch(model(2, key_type="I32"), DENSE, keys, ROW_PTRS).tables[0].keys.tolist() == [7, key, 9]


def test_a_block_that_does_not_restart_at_zero_is_named_by_its_position_in_the_tensor():
    config = model(1, 2, features=0)  # blocks of 2 + 1 and 2 * 2 + 1 offsets for two samples

    with pytest.raises(RequestError, match="ROWINDEX: expected 0 at position 3, got 2"):
        read_batch(config, None, [1] * 6, [0, 1, 2, 2, 3, 4, 5, 6])


def test_ends_that_add_up_beyond_int64_are_refused():
    with pytest.raises(
        RequestError, match="ROWINDEX: the offsets end at 18446744073709551614, but CATCOLUMN has 0 keys"
    ):
        read_batch(model(1, 2, features=0), None, [], [0, 2**63 - 1, 0, 0, 2**63 - 1])


def test_a_wrong_length_for_several_tables_names_both_forms():
    with pytest.raises(
        RequestError, match=r"ROWINDEX: expected B \* S \+ 2 \(or B \* S \+ 1\) offsets for S = 3 slots, got 6"
    ):
        read_batch(model(1, 2, features=0), None, [], [0] * 6)


def test_the_documented_request_for_two_tables_means_the_same_bags_in_both_forms():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    chapter = page.partition("\n## Requests for several tables\n")[2]
    names = {}
    exec(chapter.partition("```python\n")[2].partition("```")[0], names)

    for form in ("ROWINDEX", "ROWINDEX_BY_TABLE"):
        batch = read_batch(model(1, 2, features=0), None, names["CATCOLUMN"], names[form])

        bags = [[table.keys[a:b].tolist() for a, b in pairwise(table.row_ptrs)] for table in batch.tables]
        assert bags == [[[7], [8]], [[10, 11], [12], [], [13]]]


def test_joined_batches_have_the_samples_of_each_one_after_the_other():
    config = model(1, 2)
    first = read_batch(config, [1.0, 2.0], [5, 6, 7], [0, 1, 2, 3])
    second = read_batch(config, [3.0, 4.0, 5.0, 6.0], [8, 9, 10], [0, 0, 1, 1, 2, 3, 3])
    empty = read_batch(config, [7.0, 8.0], [], [0, 0, 0, 0])

    joined = join_batches([first, second, empty])

    assert joined.dense.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [(table.keys.tolist(), table.row_ptrs.tolist()) for table in joined.tables] == [
        ([5, 9], [0, 1, 1, 2, 2]),
        ([6, 7, 8, 10], [0, 1, 2, 3, 3, 4, 4, 4, 4]),
    ]
    assert {table.row_ptrs.dtype for table in joined.tables} == {np.dtype(np.int32)}


def test_batches_with_more_keys_than_offsets_reach_are_not_joined():
    keys = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (2**30,), (0,))
    half = Batch(np.zeros((1, 1), np.float32), [TableKeys(keys, np.array([0, 2**30], np.int32))])

    with pytest.raises(RequestError, match=f"CATCOLUMN: {2**31} keys of one table"):
        join_batches([half, half])
