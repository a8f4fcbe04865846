"""KeyIndex against a dict, with both compilations of its probe."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import ReservedKeyError
from kernels.host import KeyIndex

KEYS = st.lists(st.one_of(st.integers(-30, 30), st.integers(-(2**63) + 2, 2**63 - 3)), max_size=60)


pytestmark = pytest.mark.usefixtures("reading_loops")


@settings(deadline=None)
@given(calls=st.lists(st.tuples(st.booleans(), KEYS), max_size=12), capacity=st.integers(1, 50))
def test_row_numbers_follow_first_appearance(calls, capacity):
    index, model = KeyIndex(capacity), {}
    for is_insert, keys in calls:
        if is_insert:
            expected = [model.setdefault(key, len(model)) for key in keys]
            assert index.find_or_insert(np.array(keys, dtype=np.int64)).tolist() == expected
        else:
            assert index.find(np.array(keys, dtype=np.int64)).tolist() == [model.get(key, -1) for key in keys]
        assert index.keys().tolist() == list(model)
        assert len(index) == len(model)


def test_growing_a_hundredfold_keeps_every_number():
    index = KeyIndex(1000)
    keys = np.random.default_rng(0).permutation(100_000).astype(np.int64) << 20

    numbers = np.concatenate([index.find_or_insert(part) for part in np.split(keys, 100)])

    assert np.array_equal(numbers, np.arange(100_000))
    assert np.array_equal(index.find(keys), numbers)
    assert np.array_equal(index.find_or_insert(keys[::-1].copy()), numbers[::-1])
    assert np.array_equal(index.keys(), keys)
    assert (index.find(keys + 1) == -1).all()


@pytest.mark.parametrize("key", [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1])
def test_reserved_keys_are_refused_and_nothing_is_added(key):
    index = KeyIndex()
    keys = np.array([7, 8, key])

    with pytest.raises(ReservedKeyError, match="at position 2"):
        index.find_or_insert(keys)
    with pytest.raises(ReservedKeyError, match="at position 2"):
        index.find(keys)

    assert len(index) == 0
