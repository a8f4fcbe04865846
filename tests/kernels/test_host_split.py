"""split_by_table against plain lists: a request is a list of samples, each a list of slots per table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import split_by_table


@st.composite
def requests(draw):
    """Samples as nested lists, sample / table / slot / keys, and the slots of each table."""
    slots = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    bag = st.lists(st.integers(-100, 100), max_size=4)
    sample = st.tuples(*(st.lists(bag, min_size=count, max_size=count) for count in slots))
    return slots, draw(st.lists(sample, min_size=1, max_size=6))


def csr(bags):
    return np.cumsum([0, *map(len, bags)])


def flat_keys(samples):
    return np.array([key for sample in samples for table in sample for bag in table for key in bag], np.int64)


def by_table(samples, table):
    return [bag for sample in samples for bag in sample[table]]


@settings(deadline=None)
@given(request=requests(), one_csr=st.booleans())
def test_every_table_gets_its_keys_in_order_whichever_form_the_offsets_have(request, one_csr):
    slots, samples = request
    if one_csr:
        row_ptrs = csr([bag for sample in samples for table in sample for bag in table])
    else:
        row_ptrs = np.concatenate([csr(by_table(samples, table)) for table in range(len(slots))])

    keys, blocks, most_keys = split_by_table(flat_keys(samples), row_ptrs, slots)

    bags = [by_table(samples, table) for table in range(len(slots))]
    assert keys.tolist() == [key for table in bags for bag in table for key in bag]
    assert blocks.tolist() == [offset for table in bags for offset in csr(table).tolist()]
    assert blocks.dtype == np.int32
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
def test_offsets_that_are_no_csr_of_the_keys_are_told_from_those_that_are(row_ptrs):
    keys = np.arange(5)
    assert split_by_table(keys, np.array([0, 2, 3, 0, 1, 2]), [1, 1]) is not None  # two samples
    assert split_by_table(keys, np.array([0, 2, 3, 4, 5]), [1, 1]) is not None

    assert split_by_table(keys, np.array(row_ptrs), [1, 1]) is None


@pytest.mark.parametrize(
    ("keys", "row_ptrs", "slots", "error", "message"),
    [
        pytest.param([1], np.array([0, 0, 1]), [1, 1], TypeError, r"keys: expected int64\[N\], got list", id="a list"),
        pytest.param(np.ones(1, np.int32), np.array([0, 0, 1]), [1, 1], TypeError, "keys: .* int32", id="int32 keys"),
        pytest.param(np.ones((1, 1), np.int64), np.array([0, 0, 1]), [1, 1], ValueError, "keys: ", id="a matrix"),
        pytest.param(np.ones(1, np.int64), np.zeros(3, np.int32), [1, 1], TypeError, "row_ptrs: ", id="int32 offsets"),
        pytest.param(np.ones(1, np.int64), np.array([0]), [1, 1], ValueError, "row_ptrs: expected B", id="no sample"),
        pytest.param(np.ones(1, np.int64), np.array([], np.int64), [1, 1], ValueError, "row_ptrs: ", id="no offset"),
        pytest.param(np.ones(1, np.int64), np.zeros(6, np.int64), [2, 1], ValueError, "row_ptrs: ", id="other length"),
        pytest.param(np.ones(1, np.int64), np.zeros(3, np.int64), [], ValueError, "slots: expected", id="no table"),
        pytest.param(np.ones(1, np.int64), np.zeros(3, np.int64), [1, 0], ValueError, "slots: expected", id="no slot"),
        pytest.param(np.ones(1, np.int64), np.zeros(3, np.int64), [2**62] * 4, ValueError, "slots: ", id="huge slots"),
    ],
)
def test_arguments_of_another_form_are_refused(keys, row_ptrs, slots, error, message):
    with pytest.raises(error, match=message):
        split_by_table(keys, row_ptrs, slots)


def test_keys_that_lie_askew_in_memory_are_read_all_the_same():
    memory = np.zeros(5 * 8 + 1, np.uint8)
    keys = memory[1:].view(np.int64)
    keys[:] = np.arange(5)

    split, _, _ = split_by_table(keys, np.array([0, 2, 3, 0, 1, 2]), [1, 1])

    assert split.tolist() == [0, 1, 3, 2, 4]
