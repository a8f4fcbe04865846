"""Warp collectives and atomics, against a Python model of CUDA's documentation."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCE = Path(__file__).parent / "collectives.cu"
LANES = 32

values = st.lists(st.integers(0, 5), min_size=LANES, max_size=LANES)
masks = st.integers(1, 2**LANES - 1)


@pytest.fixture(scope="module")
def collect(device):
    """Run one of the file's kernels on the lanes of a mask; other lanes' results are 0."""

    def collect(kernel, values, mask, *numbers):
        stream = device.stream()
        given, out = device.empty(LANES, np.int32), device.zeros(LANES, np.uint32)
        device.upload(np.array(values, np.int32), given, stream)
        numbers = [np.int32(number) for number in numbers]
        device.kernel(SOURCE, kernel)((1,), (LANES,), (given, out, np.uint32(mask), *numbers), stream)
        stream.synchronize()
        return device.to_host(out).tolist()

    return collect


def lanes_of(mask):
    return [lane for lane in range(LANES) if mask >> lane & 1]


def of_lanes(mask, result):
    return [result(lane) if mask >> lane & 1 else 0 for lane in range(LANES)]


@settings(deadline=None, max_examples=30)
@given(values=values, mask=masks)
def test_votes_count_only_the_lanes_of_the_mask(collect, values, mask):
    ballot = sum(1 << lane for lane in lanes_of(mask) if values[lane] > 2)

    assert collect("ballot", values, mask) == of_lanes(mask, lambda _: ballot)
    assert collect("any_and_all", values, mask) == of_lanes(mask, lambda _: (ballot != 0) + 2 * (ballot == mask))


@settings(deadline=None, max_examples=30)
@given(values=values, mask=masks)
def test_a_match_gives_each_lane_the_lanes_with_an_equal_value(collect, values, mask):
    def equal(lane):
        return sum(1 << other for other in lanes_of(mask) if values[other] == values[lane])

    assert collect("match", values, mask) == of_lanes(mask, equal)


@settings(deadline=None, max_examples=30)
@given(values=values, mask=masks)
def test_a_sum_adds_the_lanes_of_the_mask(collect, values, mask):
    total = sum(values[lane] for lane in lanes_of(mask))

    assert collect("sum", values, mask) == of_lanes(mask, lambda _: total)


@pytest.mark.parametrize("width", [2, 8, 32])
@settings(deadline=None, max_examples=15)
@given(values=values, by=st.integers(0, 31))
def test_shuffles_stay_in_their_segment(collect, values, width, by):
    def read(lane, source):
        segment = lane - lane % width
        return values[source] if segment <= source < segment + width else values[lane]

    def read_xor(lane):  # a lane may read an earlier segment, not a later segment
        source = lane ^ by
        return values[source] if source < lane - lane % width + width else values[lane]

    everyone = 2**LANES - 1
    assert collect("shuffle", values, everyone, by, width) == [
        values[lane - lane % width + by % width] for lane in range(LANES)
    ]
    assert collect("shuffle_up", values, everyone, by, width) == [read(lane, lane - by) for lane in range(LANES)]
    assert collect("shuffle_down", values, everyone, by, width) == [read(lane, lane + by) for lane in range(LANES)]
    assert collect("shuffle_xor", values, everyone, by, width) == [read_xor(lane) for lane in range(LANES)]


def test_eight_byte_values_are_shuffled_as_a_whole(device):
    stream, out = device.stream(), device.zeros(LANES, np.uint64)

    device.kernel(SOURCE, "shuffle_wide")((1,), (LANES,), (out,), stream)
    stream.synchronize()

    assert device.to_host(out).tolist() == [((31 - lane) << 40) + 7 for lane in range(LANES)]


@pytest.mark.parametrize("kernel", ["count_by_add", "count_by_compare_and_swap"])
def test_no_atomic_addition_is_lost(device, kernel):
    stream, counts = device.stream(), device.zeros(3, np.uint64)

    device.kernel(SOURCE, kernel)((20,), (96,), (counts,), stream)
    stream.synchronize()

    assert device.to_host(counts).tolist() == [640, 640, 640]


def test_atomics_return_the_old_value_and_store_the_new_value(device):
    stream, words, old = device.stream(), device.empty(9, np.int32), device.zeros(9, np.int32)
    before = [10, 10, 12, 12, 12, 10, 10, 10, 10]

    device.upload(np.array(before, np.int32), words, stream)
    device.kernel(SOURCE, "each_atomic")((1,), (1,), (words, old), stream)
    stream.synchronize()

    assert device.to_host(old).tolist() == before
    assert device.to_host(words).tolist() == [13, 7, 12 & 6, 12 | 3, 12 ^ 5, 4, 20, 99, 10]
