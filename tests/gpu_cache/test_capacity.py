"""The memory of a cache is known before the cache allocates it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.layout import Capacity, Layout

LAYOUTS = st.builds(
    lambda dim, row_dtype, line: Layout(dim, row_dtype, *line),
    st.integers(1, 300),
    st.sampled_from(["fp32", "fp16", "bf16", "int8", "uint8", "fp8"]),
    st.sampled_from([("I64", 15), ("I64", 7), ("U32", 15)]),
)
KINDS = st.sampled_from(["dynamic", "static", "uvm"])


class CountingDevice:
    """A device that adds up its allocations."""

    def __init__(self, device):
        self.device = device
        self.device_bytes = self.pinned_bytes = 0

    def __getattr__(self, name):
        return getattr(self.device, name)

    def empty(self, shape, dtype):
        array = self.device.empty(shape, dtype)
        self.device_bytes += array.nbytes
        return array

    def zeros(self, shape, dtype):
        array = self.device.zeros(shape, dtype)
        self.device_bytes += array.nbytes
        return array

    def pinned(self, shape, dtype):
        array = self.device.pinned(shape, dtype)
        self.pinned_bytes += array.nbytes
        return array


@pytest.mark.parametrize(
    "form",
    [
        {"dim": 1},
        {"dim": 33, "line_keys": 7},
        {"dim": 16, "key_type": "U32", "row_dtype": "int8"},
        {"dim": 16, "kind": "static"},
        {"dim": 8, "kind": "uvm"},
    ],
)
def test_a_cache_takes_the_memory_that_it_announced(device, form):
    counting = CountingDevice(device)

    cache = EmbeddingCache(capacity_rows=1000, device=counting, **form)

    taken = counting.device_bytes, counting.pinned_bytes
    assert taken == EmbeddingCache.memory_bytes(capacity_rows=1000, **form) == cache.capacity.memory_bytes
    assert (counting.pinned_bytes > 0) == (form.get("kind") == "uvm")
    assert (cache.stats().device_bytes, cache.stats().host_bytes) == taken
    cache.close()


@pytest.mark.parametrize("kind", ["dynamic", "static", "uvm"])
def test_a_cache_sized_in_bytes_takes_no_more_and_exactly_what_it_announced(device, kind):
    counting = CountingDevice(device)
    capacity = Capacity.of_bytes(Layout(16, "fp16", "U32"), kind, 40_000)

    with EmbeddingCache.of_capacity(capacity, counting, seed=7) as cache:
        assert (cache.capacity, cache.seed) == (capacity, 7)
        assert (counting.device_bytes, counting.pinned_bytes) == capacity.memory_bytes
        assert 39_000 < counting.device_bytes <= 40_000


def test_a_cache_sized_as_a_ratio_has_room_for_that_part_of_the_table(device):
    with EmbeddingCache.of_capacity(Capacity.of_ratio(Layout(4), "dynamic", 1000, 0.2), device) as cache:
        assert 200 <= cache.capacity.rows < 215


@settings(deadline=None)
@given(layout=LAYOUTS, kind=KINDS, lines=st.integers(1, 2**32 - 1))
def test_a_capacity_counts_the_rows_of_its_own_lines(layout, kind, lines):
    capacity = Capacity(layout, kind, lines)

    assert Capacity.of_rows(layout, kind, capacity.rows) == capacity


def test_a_capacity_of_the_wrong_type_is_refused(device):
    with pytest.raises(TypeError, match="capacity: expected a Capacity, got 1000"):
        EmbeddingCache.of_capacity(1000, device)


@settings(deadline=None)
@given(layout=LAYOUTS, kind=KINDS, rows=st.integers(1, 10**9))
def test_a_capacity_in_rows_is_the_smallest_that_has_room(layout, kind, rows):
    capacity = Capacity.of_rows(layout, kind, rows)

    assert capacity.rows >= rows
    if capacity.line_count > 1:
        assert Capacity(layout, kind, capacity.line_count - 1).rows < rows


@settings(deadline=None)
@given(layout=LAYOUTS, kind=KINDS, size_bytes=st.integers(100_000, 10**12))
def test_a_capacity_in_bytes_is_the_largest_that_fits(layout, kind, size_bytes):
    capacity = Capacity.of_bytes(layout, kind, size_bytes)

    assert capacity.device_bytes <= size_bytes
    if capacity.line_count < 2**32 - 1:
        assert Capacity(layout, kind, capacity.line_count + 1).device_bytes > size_bytes


@settings(deadline=None)
@given(layout=LAYOUTS, kind=KINDS, table_rows=st.integers(1, 10**9), ratio=st.floats(1e-6, 1))
def test_a_capacity_as_a_ratio_has_room_for_that_part_of_the_table(layout, kind, table_rows, ratio):
    capacity = Capacity.of_ratio(layout, kind, table_rows, ratio)

    assert capacity.rows >= table_rows * ratio - 1e-6
    assert capacity.rows < np.ceil(table_rows * ratio) + layout.line_keys


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, float("nan")])
def test_a_ratio_out_of_its_range_is_refused(ratio):
    with pytest.raises(ValueError, match="ratio: expected more than 0 and at most 1"):
        Capacity.of_ratio(Layout(16), "dynamic", 100, ratio)


def test_bytes_for_less_than_a_line_are_refused():
    with pytest.raises(ValueError, match="a cache of one line takes 1456 bytes, got 1455"):
        Capacity.of_bytes(Layout(16), "dynamic", 1455)
