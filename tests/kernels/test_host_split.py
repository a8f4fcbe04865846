"""``first_outside``, and ``split_by_table`` against plain lists: samples of tables of slots of keys."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import first_outside, read_keys, read_tensors, split_by_table, split_message


@st.composite
def requests(draw):
    """Samples as nested lists, sample / table / slot / keys, and the slots of each table."""
    slots = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    bag = st.lists(st.integers(-100, 100), max_size=4)
    sample = st.tuples(*(st.lists(bag, min_size=count, max_size=count) for count in slots))
    samples = draw(st.lists(sample, min_size=1, max_size=6))
    return slots, samples * draw(st.sampled_from([1, 1, 64]))  # more than 64 samples are split in several tiles


def csr(bags):
    return np.cumsum([0, *map(len, bags)])


def flat_keys(samples):
    return np.array([key for sample in samples for table in sample for bag in table for key in bag], np.int64)


def by_table(samples, table):
    return [bag for sample in samples for bag in sample[table]]


@settings(deadline=None)
@given(request=requests(), one_csr=st.booleans(), dtype=st.sampled_from([np.int32, np.int64]))
def test_every_table_gets_its_keys_in_order_with_either_form_of_offsets(request, one_csr, dtype):
    slots, samples = request
    if one_csr:
        row_ptrs = csr([bag for sample in samples for table in sample for bag in table])
    else:
        row_ptrs = np.concatenate([csr(by_table(samples, table)) for table in range(len(slots))])

    keys, blocks, key_counts, most_keys = split_by_table(flat_keys(samples), row_ptrs.astype(dtype), slots)

    bags = [by_table(samples, table) for table in range(len(slots))]
    assert keys.tolist() == [key for table in bags for bag in table for key in bag]
    assert blocks.tolist() == [offset for table in bags for offset in csr(table).tolist()]
    assert blocks.dtype == np.int32
    assert key_counts == [sum(map(len, table)) for table in bags]
    assert most_keys == [max(sum(map(len, sample[table])) for sample in samples) for table in range(len(slots))]


@pytest.mark.parametrize(
    "row_ptrs",
    [
        pytest.param([1, 2, 3, 0, 1, 2], id="the first CSR begins at 1"),
        pytest.param([0, 2, 3, 1, 1, 2], id="the second CSR begins at 1"),
        pytest.param([0, 3, 2, 0, 1, 2], id="a fall"),
        pytest.param([0, 2, 3, 0, 1, 1], id="ends before the last key"),
        pytest.param([0, 2, 3, 0, 1, 3], id="ends beyond the last key"),
        pytest.param([0, 2, 2**62, 0, 1, 2**62], id="ends that add up beyond int64"),
        pytest.param([0, -(2**63), 3, 0, 1, 2], id="the smallest int64"),
        pytest.param([1, 2, 3, 4, 5], id="one CSR begins at 1"),
        pytest.param([0, 2, 1, 4, 5], id="one CSR falls"),
        pytest.param([0, 2, 3, 4, 4], id="one CSR ends early"),
        pytest.param([0, 2, 3, 4, 2**63 - 1], id="one CSR ends far beyond"),
    ],
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_offsets_that_are_not_a_csr_of_the_keys_are_recognised(row_ptrs, dtype):
    keys, limits = np.arange(5), np.iinfo(dtype)
    assert split_by_table(keys, np.array([0, 2, 3, 0, 1, 2], dtype), [1, 1]) is not None  # two samples
    assert split_by_table(keys, np.array([0, 2, 3, 4, 5], dtype), [1, 1]) is not None

    assert split_by_table(keys, np.clip(row_ptrs, limits.min, limits.max).astype(dtype), [1, 1]) is None


def test_offsets_that_fall_below_zero_and_rise_again_are_not_a_csr():
    # From the largest int32 to the smallest the difference, in 32 bits, is 1.
    largest, smallest = 2**31 - 1, -(2**31)
    row_ptrs = np.array([0, largest, smallest, -1, 0, 2], np.int32)

    assert split_by_table(np.arange(2), row_ptrs, [1]) is None


@pytest.mark.parametrize("keys_of_sample", [1, 2])
def test_one_csr_with_a_table_that_is_empty_in_most_samples(keys_of_sample):
    """130 samples make three tiles; in the first tile, the table has as many keys as samples, unevenly spread."""
    counts = np.zeros((130, 2), np.int64)
    counts[:, 0] = 1
    counts[:64:keys_of_sample, 1] = keys_of_sample
    keys = np.arange(counts.sum())
    owners = np.repeat(np.tile([0, 1], 130), counts.reshape(-1))

    split, _, key_counts, most_keys = split_by_table(keys, np.append(0, counts.reshape(-1).cumsum()), [1, 1])

    assert split.tolist() == [*keys[owners == 0], *keys[owners == 1]]
    assert key_counts == [130, 64]
    assert most_keys == [1, keys_of_sample]


def test_the_keys_of_one_table_are_not_copied():
    keys = np.arange(5)

    split, row_ptrs, key_counts, most_keys = split_by_table(keys, np.array([0, 2, 3, 4, 5]), [2])

    assert split is keys
    assert (row_ptrs.tolist(), key_counts, most_keys) == ([0, 2, 3, 4, 5], [5], [3])


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("bounds", [(-(2**63), 2**63 - 1), (-(2**63) + 2, 2**63 - 3), (0, 2**32 - 1), (5, 5)])
def test_the_first_key_out_of_bounds_is_found_at_any_position(reading_loops, size, bounds):
    smallest, largest = bounds
    right = np.resize(np.array([smallest, largest]), size)
    assert first_outside(right, smallest, largest) == size

    for at in range(size):
        for wrong in {max(smallest - 1, -(2**63)), min(largest + 1, 2**63 - 1)} - set(bounds):
            keys = right.copy()
            keys[at], keys[at + 1 :: 7] = wrong, wrong

            assert first_outside(keys, smallest, largest) == at


@pytest.mark.parametrize(
    ("keys", "row_ptrs", "slots", "error", "message"),
    [
        pytest.param([1], np.array([0, 0, 1]), [1, 1], TypeError, r"keys: expected int64\[N\], got list", id="a list"),
        pytest.param(np.ones(1, np.int32), np.array([0, 0, 1]), [1, 1], TypeError, "keys: .* int32", id="int32 keys"),
        pytest.param(np.ones((1, 1), np.int64), np.array([0, 0, 1]), [1, 1], ValueError, "keys: ", id="a matrix"),
        pytest.param(np.ones(1, np.int64), np.zeros(3, np.int16), [1, 1], TypeError, "row_ptrs: ", id="int16 offsets"),
        pytest.param(np.ones(1, np.int64), np.array([0]), [1, 1], ValueError, "row_ptrs: expected B", id="no sample"),
        pytest.param(np.ones(1, np.int64), np.array([], np.int64), [1, 1], ValueError, "row_ptrs: ", id="no offset"),
        pytest.param(np.ones(1, np.int64), np.zeros(6, np.int64), [2, 1], ValueError, "row_ptrs: ", id="other length"),
        pytest.param(np.ones(1, np.int64), np.zeros(3, np.int64), [], ValueError, "slots: expected", id="no table"),
        pytest.param(np.ones(1, np.int64), np.zeros(3, np.int64), [1, 0], ValueError, "slots: expected", id="no slot"),
        pytest.param(np.ones(1, np.int64), np.zeros(3, np.int64), [2**62] * 4, ValueError, "slots: ", id="huge slots"),
    ],
)
def test_arguments_of_the_wrong_form_are_refused(keys, row_ptrs, slots, error, message):
    with pytest.raises(error, match=message):
        split_by_table(keys, row_ptrs, slots)


def test_keys_of_the_wrong_type_are_not_compared_with_bounds():
    with pytest.raises(TypeError, match=r"keys: expected int64\[N\], got int32"):
        first_outside(np.ones(1, np.int32), 0, 1)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("one_csr", [True, False])
def test_offsets_that_change_while_they_are_read_do_no_harm(one_csr, dtype):
    samples = 1 << 14
    right = np.arange(2 * samples + 1) if one_csr else np.tile(np.arange(samples + 1), 2)
    row_ptrs, keys = right.astype(dtype), np.arange(2 * samples)
    is_done = threading.Event()

    def change():
        while not is_done.is_set():
            row_ptrs[1::3] = 2**31 - 1
            row_ptrs[:] = right

    with ThreadPoolExecutor(1) as threads:
        threads.submit(change)
        for _ in range(1000):
            split = split_by_table(keys, row_ptrs, [1, 1])
            if split is not None:
                for of_table, key_count in zip(np.split(split[1], 2), split[2], strict=True):
                    assert of_table[0] == 0
                    assert (np.diff(of_table) >= 0).all()
                    assert of_table[-1] == key_count
                assert sum(split[2]) == keys.size
        is_done.set()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_misaligned_keys_and_offsets_are_read_correctly(dtype):
    keys, row_ptrs = askew(np.arange(5)), askew(np.array([0, 2, 3, 0, 1, 2], dtype))

    split, _, _, _ = split_by_table(keys, row_ptrs, [1, 1])

    assert split.tolist() == [0, 1, 3, 2, 4]
    assert first_outside(keys, 0, 3) == 4


def askew(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype)
    moved[:] = array
    return moved


# The datatype's number, items, bytes and first extent of each tensor. ``tests/serving/protocol/test_messages.py`` tests
# what ``read_keys`` and ``split_message`` return.
TENSORS = read_tensors(np.array([[4, 2, 8, 2], [1, 2, 16, 2], [2, 3, 12, 3]]), bytes(36), 0)


@pytest.mark.parametrize(
    ("dense", "keys", "row_ptrs", "slots", "message"),
    [
        pytest.param(0, 3, 2, [1], "tensor: there are fewer", id="no such tensor"),
        pytest.param(0, 0, 2, [1], "tensor: has another datatype", id="floats as keys"),
        pytest.param(0, 1, 0, [1], "tensor: has another datatype", id="floats as offsets"),
        pytest.param(1, 1, 2, [1], "tensor: has another datatype", id="integers as dense features"),
        pytest.param(0, 1, 2, [3], "row_ptrs: expected", id="offsets of no whole samples"),
        pytest.param(0, 1, None, [4], "row_ptrs: expected", id="keys of no whole samples"),
        pytest.param(0, 1, 2, [], "slots: expected", id="no table"),
        pytest.param(0, 1, 2, [0], "slots: expected", id="a table without slots"),
    ],
)
def test_tensors_that_cannot_be_those_of_a_request_are_refused(dense, keys, row_ptrs, slots, message):
    with pytest.raises(ValueError, match=message):
        read_keys(TENSORS, dense, keys, row_ptrs, slots, 0, 9)


def test_a_message_with_too_many_fields_is_counted_no_further():
    assert split_message(b"\x3a\x00" * 100, 10) == (11, None)
    assert split_message(b"\x2a\x02\x0a\x00" * 100, 10) == (11, None)
