"""Hit curves compared with caches that are simulated lookup by lookup."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.planner import reuse
from serving.planner.curve import HitCurve
from serving.planner.policies import (
    file_order_curve,
    lru_curve,
    pinned_curve,
    sampled_lru_curves,
    standard_error,
)
from serving.planner.reuse import earlier_and_smaller, previous_lookups, reuse_distances

PLACES = st.lists(st.integers(0, 12), max_size=80)
KEYS = st.lists(st.sampled_from([-(2**62), -1, 0, 1, 7, 2**33, 2**62]), max_size=40)


def simulate_lru(keys, capacity):
    """Simulate an LRU cache lookup by lookup, and return its hits."""
    cache, hits = OrderedDict(), 0
    for key in keys:
        hits += key in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def zipf(rng, rows, lookups, exponent=1.05):
    """Return lookups of a table whose popular rows are anywhere in the table."""
    weights = 1 / np.arange(1, rows + 1) ** exponent
    return rng.permutation(rows)[rng.choice(rows, lookups, p=weights / weights.sum())].astype(np.int32)


@settings(deadline=None)
@given(keys=st.one_of(PLACES, KEYS))
def test_a_reuse_distance_is_the_number_of_other_keys_since_the_last_lookup(keys):
    distances = reuse_distances(np.array(keys, dtype=np.int64))

    last, expected = {}, []
    for place, key in enumerate(keys):
        expected.append(len(set(keys[last[key] + 1 : place])) if key in last else -1)
        last[key] = place
    assert distances.tolist() == expected


@settings(deadline=None)
@given(keys=PLACES)
def test_the_previous_lookup_agrees_with_a_dict(keys):
    last, expected = {}, []
    for place, key in enumerate(keys):
        expected.append(last.get(key, -1))
        last[key] = place

    assert previous_lookups(np.array(keys, dtype=np.int32)).tolist() == expected


@settings(deadline=None)
@given(values=st.integers(0, 70).flatmap(lambda count: st.permutations(range(count))))
def test_smaller_values_to_the_left_are_counted_for_every_value(values):
    counts = earlier_and_smaller(np.array(values, dtype=np.int32))

    assert [counts[value] for value in values] == [
        sum(other < value for other in values[:place]) for place, value in enumerate(values)
    ]


@settings(deadline=None)
@given(places=PLACES, unknown=st.integers(0, 5))
def test_the_lru_curve_is_exact_for_every_size_of_cache(places, unknown):
    curve = lru_curve(np.array(places, dtype=np.int32), len(places) + unknown)

    for capacity in range(16):
        hits = simulate_lru(places, capacity) if capacity else 0
        assert curve.hits_at(capacity) == hits
        assert curve.hit_rate(capacity) == hits / max(len(places) + unknown, 1)


@settings(deadline=None)
@given(places=PLACES)
def test_no_fixed_set_of_rows_answers_more_than_the_pinned_curve(places):
    curve = pinned_curve(np.array(places, dtype=np.int32), len(places))

    for capacity in range(16):
        assert curve.hits_at(capacity) == sum(count for _, count in Counter(places).most_common(capacity))


@settings(deadline=None)
@given(places=PLACES)
def test_the_file_order_curve_counts_lookups_of_the_first_rows(places):
    curve = file_order_curve(np.array(places, dtype=np.int32), len(places))

    for capacity in range(16):
        assert curve.hits_at(capacity) == sum(place < capacity for place in places)


def test_a_cycle_never_hits_in_an_lru_cache_that_is_one_row_too_small():
    curve = lru_curve(np.tile(np.arange(100, dtype=np.int32), 50), 5000)

    assert curve.hits_at([1, 50, 99]).tolist() == [0, 0, 0]
    assert curve.hits_at([100, 101, 5000]).tolist() == [4900, 4900, 4900]
    assert curve.best_hit_rate == 0.98


def test_a_repeated_key_misses_once():
    assert lru_curve(np.zeros(1000, dtype=np.int32), 1000).hits_at([0, 1]).tolist() == [0, 999]


def test_a_longer_trace_agrees_with_the_simulation_too():
    places = zipf(np.random.default_rng(0), rows=3000, lookups=20_000)

    curve = lru_curve(places, places.size)

    for capacity in (1, 30, 300, 1500):
        assert curve.hits_at(capacity) == simulate_lru(places.tolist(), capacity)


class TestCurve:
    CURVE = HitCurve.of_steps(np.array([2, 5]), np.array([30, 90]), lookups=100)

    def test_hits_rise_only_at_the_steps(self):
        assert self.CURVE.hits_at(np.arange(7)).tolist() == [0, 0, 30, 30, 30, 90, 90]

    @pytest.mark.parametrize(("hit_rate", "rows"), [(0.1, 2), (0.3, 2), (0.31, 5), (0.9, 5), (0.91, None)])
    def test_the_smallest_size_for_a_hit_rate(self, hit_rate, rows):
        assert self.CURVE.rows_for(hit_rate) == rows

    def test_an_empty_trace_hits_nothing(self):
        curve = lru_curve(np.empty(0, dtype=np.int32), 0)

        assert curve.hit_rate([0, 10]).tolist() == [0, 0]
        assert curve.rows_for(0.1) is None


class TestSample:
    ROWS = np.array([100, 1000, 5000, 20_000, 50_000])

    @pytest.mark.parametrize("exponent", [0.8, 1.05])
    def test_a_tenth_of_the_rows_of_a_zipf_trace_estimates_the_hit_rate_of_large_caches(self, exponent):
        places = zipf(np.random.default_rng(1), rows=50_000, lookups=400_000, exponent=exponent)

        curve, _ = sampled_lru_curves(places, places.size, 0.1)

        error = np.abs(curve.hit_rate(self.ROWS) - lru_curve(places, places.size).hit_rate(self.ROWS))
        assert error[self.ROWS >= 1000].max() < 0.03  # 100 rows of the sample
        assert error[self.ROWS >= 5000].max() < 0.01

    @pytest.mark.parametrize("seed", range(4))
    def test_the_error_is_within_three_reported_standard_errors(self, seed):
        places = zipf(np.random.default_rng(seed), rows=50_000, lookups=200_000)

        curve, groups = sampled_lru_curves(places, places.size, 0.05)

        error = np.abs(curve.hit_rate(self.ROWS) - lru_curve(places, places.size).hit_rate(self.ROWS))
        said = standard_error(groups, self.ROWS)
        assert (error <= 3 * said + 0.001).all()
        assert said.max() < 0.1

    def test_a_sample_of_all_rows_is_exact(self):
        places = zipf(np.random.default_rng(2), rows=500, lookups=3000)

        curve, _ = sampled_lru_curves(places, places.size + 7, 1.0)

        sizes = np.arange(501)
        assert curve.hits_at(sizes).tolist() == lru_curve(places, places.size + 7).hits_at(sizes).tolist()

    def test_a_sample_without_a_row_is_refused(self):
        with pytest.raises(ValueError, match="take a larger sample"):
            sampled_lru_curves(np.arange(100, dtype=np.int32), 100, 0.001)


def test_more_lookups_than_int32_counts_are_refused(monkeypatch):
    monkeypatch.setattr(reuse, "MOST_LOOKUPS", 9)

    with pytest.raises(ValueError, match="at most 9 lookups, got 10"):
        reuse_distances(np.zeros(10, dtype=np.int32))
