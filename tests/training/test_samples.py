"""Bags compared with nested lists: one list of keys per slot, one list of slots per sample."""

from itertools import chain, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from training.samples import Bags, Samples

KEYS = st.lists(st.integers(-5, 5), max_size=3)
ONE_KEY = st.lists(st.integers(-5, 5), min_size=1, max_size=1)


@st.composite
def lists(draw, slots=None, samples=None):
    """Samples of 1 to 4 slots as nested lists, and the number of slots. Often every slot has one key."""
    slots = slots or draw(st.integers(1, 4))
    bag = draw(st.sampled_from([KEYS, ONE_KEY]))
    sample = st.lists(bag, min_size=slots, max_size=slots)
    least, most = (0, 5) if samples is None else (samples, samples)
    return draw(st.lists(sample, min_size=least, max_size=most)), slots


def bags_of(nested, slots):
    """The same as Bags, in the short form if every slot has one key."""
    bags = [bag for sample in nested for bag in sample]
    keys = np.array([key for bag in bags for key in bag], dtype=np.int64)
    if all(len(bag) == 1 for bag in bags):
        return Bags.one_key_each(keys.reshape(-1, slots))
    return Bags(keys, np.cumsum([0, *map(len, bags)], dtype=np.int64), slots)


def nested_of(bags):
    ends = bags.row_ptrs.tolist()
    assert bags.keys.flags.c_contiguous
    assert (ends[0], ends[-1]) == (0, bags.keys.size)
    flat = [bags.keys[begin:end].tolist() for begin, end in pairwise(ends)]
    assert [[len(bag) for bag in flat[i : i + bags.slots]] for i in range(0, len(flat), bags.slots)] == (
        bags.sizes.tolist()
    )
    return [flat[i : i + bags.slots] for i in range(0, len(flat), bags.slots)]


@settings(deadline=None)
@given(data=lists())
def test_bags_hold_what_was_put_in(data):
    nested, _ = data

    bags = bags_of(*data)

    assert len(bags) == len(nested)
    assert nested_of(bags) == nested


@settings(deadline=None)
@given(data=lists(), choose=st.data())
def test_samples_are_selected_by_slice_and_by_position(data, choose):
    nested, slots = data
    bags = bags_of(*data)
    bounds = choose.draw(st.slices(len(nested)))
    rows = choose.draw(st.lists(st.integers(0, len(nested) - 1), max_size=6)) if nested else []

    assert nested_of(bags[bounds]) == nested[bounds]
    assert nested_of(bags[np.array(rows, dtype=np.int64)]) == [nested[row] for row in rows]
    assert bags[bounds].slots == slots


@settings(deadline=None)
@given(slots=st.integers(1, 3), choose=st.data())
def test_parts_are_joined_one_after_another(slots, choose):
    parts = choose.draw(st.lists(lists(slots), min_size=1, max_size=3))

    joined = Bags.joined([bags_of(*part) for part in parts])

    assert nested_of(joined) == [sample for nested, _ in parts for sample in nested]


@settings(deadline=None)
@given(samples=st.integers(0, 4), choose=st.data())
def test_slots_put_side_by_side_are_split_again(samples, choose):
    parts = choose.draw(st.lists(lists(samples=samples), min_size=1, max_size=3))

    whole = Bags.side_by_side([bags_of(*part) for part in parts])

    assert nested_of(whole) == [list(chain(*(nested[row] for nested, _ in parts))) for row in range(samples)]
    assert [nested_of(part) for part in whole.split([slots for _, slots in parts])] == [nested for nested, _ in parts]


def test_padding_makes_empty_bags():
    keys = np.array([[7, -1, 8], [-1, -1, 9]])

    assert nested_of(Bags.padded(keys, keys != -1)) == [[[7], [], [8]], [[], [], [9]]]
    assert nested_of(Bags.padded(keys, keys != 5)) == [[[7], [-1], [8]], [[-1], [-1], [9]]]


def test_labels_dense_features_and_keys_of_a_sample_stay_together():
    parts = []
    for first in (0, 10):
        numbers = np.arange(first, first + 4)
        bags = bags_of([[[n] * (n % 3)] for n in numbers.tolist()], 1)
        parts.append(Samples(numbers[:, None].astype(np.float32), numbers[:, None].astype(np.float32), bags))

    chosen = Samples.joined(parts)[np.array([6, 1, 3])]

    assert len(chosen) == 3
    assert chosen.labels[:, 0].tolist() == chosen.dense[:, 0].tolist() == [12, 1, 3]
    assert nested_of(chosen.bags) == [[[]], [[1]], [[]]]
