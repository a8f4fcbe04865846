"""HostTable's index: how it spreads keys, how it handles churn, and its stats."""

import dataclasses

import numpy as np
import pytest

from kernels.host import HostTable


def test_churn_leaves_probes_short_and_rows_right():
    capacity, dim = 2000, 4
    table = HostTable(dim, capacity)
    untouched = table.stats()
    for start in range(0, 50 * capacity, capacity // 2):
        keys = np.arange(start, start + capacity // 2)
        table.insert(keys, np.repeat(keys[:, None], dim, axis=1).astype(np.float32))
        if start >= capacity // 2:
            assert table.evict(keys - capacity // 2) == capacity // 2

    last = np.arange(50 * capacity - capacity // 2, 50 * capacity)
    out = np.empty((len(last), dim), np.float32)

    assert table.fetch(last, out).all()
    assert (out == last[:, None]).all()
    assert not table.fetch(last - capacity // 2, out).any()
    assert table.stats().longest_probe_buckets <= 16
    assert table.evict(last) == len(last)
    assert table.stats() == untouched


IDS = np.arange(100_000)
STRIDES = {
    **{f"k << {shift}": IDS << shift for shift in (0, 1, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44)},
    "k * 1000": IDS * 1000,
    "k * 1000003": IDS * 1_000_003,
    "k * (2^32 + 1)": IDS * (2**32 + 1),
    "-k": -IDS,
    **{f"slot << {shift} | id": (IDS % 26 << shift) | IDS // 26 for shift in (20, 32, 40, 48, 56)},
}


@pytest.mark.parametrize("keys", [pytest.param(keys, id=name) for name, keys in STRIDES.items()])
def test_patterned_ids_spread_like_random_ones(keys):
    table = HostTable(1, len(keys))
    table.insert(keys, np.zeros((len(keys), 1), np.float32))

    # Random keys at this load need at most 5 to 11 buckets (300 seeds); clustered ids would need hundreds.
    assert table.stats().longest_probe_buckets <= 16


def test_stats_report_the_tables_rows_and_memory():
    table = HostTable(32, 10_000)
    table.insert(np.arange(5000), np.zeros((5000, 32), np.float32))

    stats = table.stats()

    assert (stats.rows, stats.capacity_rows, stats.spare_rows) == (5000, 10_000, 2000)
    assert stats.memory_bytes == HostTable.memory_bytes(32, 10_000)
    assert stats.memory_bytes >= 12_000 * 128 + stats.buckets * 64
    assert stats.load_ratio == pytest.approx(5000 / (stats.buckets * 5))
    assert 0.24 <= stats.load_ratio <= 0.26
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.rows = 1
