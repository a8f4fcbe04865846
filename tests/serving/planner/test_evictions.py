"""The LRU curve of `hotrow plan` compared with a table that evicts its oldest rows, on the same lookups."""

import numpy as np
import pytest

from serving.planner.policies import lru_curve, pinned_curve
from serving.storage import MemoryStore, TableSpec

ROWS, BOUND, BATCH = 2000, 500, 8


def zipf(lookups, exponent=1.05, seed=0):
    weights = 1 / np.arange(1, ROWS + 1) ** exponent
    places = np.random.default_rng(seed).choice(ROWS, lookups, p=weights / weights.sum())
    return np.random.default_rng(seed + 1).permutation(ROWS)[places]


def hits_of(store, lookups):
    """Return how many lookups RAM answers if the missing rows of a batch are inserted before the next batch."""
    out, hits = np.empty((BATCH, 4), dtype=np.float32), 0
    for start in range(0, lookups.size, BATCH):
        keys = lookups[start : start + BATCH]
        found = store.tables["m.t"].fetch(keys, out)
        hits += np.count_nonzero(found)
        store.tables["m.t"].insert(keys[~found], np.ones((np.count_nonzero(~found), 4), dtype=np.float32))
    return hits


@pytest.fixture(params=["steady", "drifting"])
def lookups(request):
    steady = zipf(40_000)
    return steady if request.param == "steady" else np.concatenate([steady[:20_000], zipf(20_000, seed=7)])


@pytest.mark.parametrize("target", [0.5, 0.8, 0.95])
def test_evicting_the_oldest_row_has_the_planned_hit_rate_of_lru(lookups, target):
    store = MemoryStore(
        capacity_rows_of_each_table=BOUND, overflow_policy="evict_oldest", overflow_resolution_target=target
    )
    store.table(TableSpec("m.t", 4)).open(ROWS)

    hits = hits_of(store, lookups)

    curve = lru_curve(lookups, lookups.size)
    # An overflow keeps the youngest part of the bound. A repeated key in a batch of 8 counts as two misses here and as
    # one in the plan. Rows of one 128th of the bound are equally old. The difference is less than 0.01.
    least, most = curve.hit_rate([round(target * BOUND), BOUND])
    assert least - 0.01 <= hits / lookups.size <= most + 0.002


def test_evicting_the_least_used_row_is_close_to_the_best_fixed_set_under_steady_traffic():
    lookups = zipf(60_000)
    store = MemoryStore(capacity_rows_of_each_table=BOUND, overflow_policy="evict_least_used")
    store.table(TableSpec("m.t", 4)).open(ROWS)
    hits_of(store, lookups[:20_000])

    rate = hits_of(store, lookups[20_000:]) / 40_000

    best = float(pinned_curve(lookups[20_000:], 40_000).hit_rate(BOUND))
    lru = float(lru_curve(lookups, lookups.size).hit_rate(BOUND))
    assert lru < rate <= best
    assert rate >= 0.94 * best  # 0.951 on average, with a standard deviation of 0.001 over seeds
