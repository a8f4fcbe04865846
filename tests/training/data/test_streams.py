"""Streams: batches of one size, and reading ahead in a thread."""

import gc
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.streams import batches_of, read_ahead
from training.samples import Bags, Samples


def numbered(first, count):
    """Samples whose labels count from ``first``, with 0 to 2 keys per slot."""
    sizes = np.arange(first, first + 2 * count, dtype=np.int64) % 3
    row_ptrs = np.concatenate([[0], np.cumsum(sizes)])
    labels = np.arange(first, first + count, dtype=np.float32)[:, None]
    return Samples(labels, np.zeros((count, 0), np.float32), Bags(np.arange(row_ptrs[-1]), row_ptrs, 2))


@given(st.lists(st.integers(0, 30)), st.integers(1, 20), st.booleans())
def test_batches_have_one_size_and_all_samples_in_order(counts, batch_size, keeps_rest):
    parts = [numbered(sum(counts[:index]), count) for index, count in enumerate(counts)]

    batches = list(batches_of(parts, batch_size, keeps_rest=keeps_rest))

    whole, rest = divmod(sum(counts), batch_size)
    assert [len(batch) for batch in batches] == [batch_size] * whole + [rest] * (keeps_rest and rest > 0)
    kept = sum(len(batch) for batch in batches)
    if batches:
        expected, found = Samples.joined(parts)[:kept], Samples.joined(batches)
        for name in ("labels", "dense"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        np.testing.assert_array_equal(found.bags.keys, expected.bags.keys)
        np.testing.assert_array_equal(found.bags.row_ptrs, expected.bags.row_ptrs)


def test_items_come_in_order_and_from_a_thread():
    threads = set()

    def items():
        for number in range(5):
            threads.add(threading.current_thread())
            yield number

    assert list(read_ahead(items())) == [0, 1, 2, 3, 4]
    assert threading.current_thread() not in threads


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield 1
        raise ValueError("broken")

    ahead = read_ahead(items())

    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken"):
        next(ahead)


def test_a_stream_may_be_dropped_by_a_garbage_collection_in_its_own_thread():
    """Sessions in reference cycles are collected in any thread."""
    collected = threading.Event()

    def items():
        yield 1
        dropped.wait(10)
        gc.collect()
        collected.set()
        yield 2

    dropped = threading.Event()
    cycle = [read_ahead(items())]
    cycle.append(cycle)
    assert next(cycle[0]) == 1
    gc.disable()
    try:
        del cycle
        dropped.set()
        assert collected.wait(10)
    finally:
        gc.enable()
