"""A query returns the rows of held keys and lists the missed keys."""

import numpy as np
import pytest

from tests.kernels.cuda.device_table import DEFAULT_VALUE, DIMS, LINES, DeviceTable, home_line, rows_of

RESERVED = [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1]
KINDS_AND_DIMS = [(kind, dim) for kind, line in LINES.items() for dim in line.dims]


@pytest.mark.parametrize(("kind", "dim"), KINDS_AND_DIMS)
def test_a_held_key_gets_its_row_and_other_keys_get_the_default_value(device, kind, dim):
    rng = np.random.default_rng(dim)
    table = DeviceTable(device, kind, dim, lines=64)
    held = rng.choice(10**6, 60, replace=False)
    table.insert(held)
    keys = np.concatenate([rng.permutation(held), 10**6 + np.arange(40)])
    rng.shuffle(keys)

    rows, missed = table.query(keys)

    expected = rows_of(keys, dim)
    expected[keys >= 10**6] = DEFAULT_VALUE
    np.testing.assert_array_equal(missed, np.flatnonzero(keys >= 10**6))
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("n", [1, 3, 127, 128, 129, 256, 257, 1000])
def test_every_position_of_a_query_is_answered_once(device, kind, n):
    table = DeviceTable(device, kind, lines=4)
    table.insert([5, 6])
    keys = np.arange(n) % 11  # duplicates, in one block and in several

    rows, missed = table.query(keys)

    np.testing.assert_array_equal(missed, np.flatnonzero((keys != 5) & (keys != 6)))
    np.testing.assert_array_equal(rows[(keys == 5) | (keys == 6)], rows_of(keys[(keys == 5) | (keys == 6)], 16))
    assert table.counted()["found"] == n - len(missed)
    assert table.counted()["missed"] == len(missed)


@pytest.mark.parametrize("kind", LINES)
def test_a_key_that_no_line_can_hold_is_a_miss_and_is_not_stored(device, kind):
    keys = RESERVED + ([-1, 2**32 - 2, 2**32 - 1, 2**32 + 5] if kind == "15 x u32" else [])
    table = DeviceTable(device, kind, lines=1)
    table.insert([5])

    assert (table.claim(keys) == -1).all()

    _, missed = table.query([*keys, 5])
    np.testing.assert_array_equal(missed, np.arange(len(keys)))
    np.testing.assert_array_equal(table.held(), [5])


@pytest.mark.parametrize("kind", LINES)
def test_the_smallest_and_largest_keys_are_held(device, kind):
    keys = [0, 2**32 - 3] if kind == "15 x u32" else [-(2**63) + 2, -1, 0, 2**63 - 3]
    table = DeviceTable(device, kind, lines=2)

    table.insert(keys)

    _, missed = table.query(keys)
    assert missed.size == 0


@pytest.mark.parametrize("step", [1, 64, 2**20, 2**32, 2**40], ids=lambda step: f"multiples of {step}")
def test_keys_with_equal_low_bits_spread_over_the_lines(device, step):
    table = DeviceTable(device, lines=64)
    keys = np.arange(600) * step

    table.insert(keys)

    lines = np.array([home_line(int(key), 64) for key in keys])
    per_line = np.minimum(np.bincount(lines, minlength=64), 15)
    words, _ = table.words()
    np.testing.assert_array_equal((words != table.kind.empty).sum(axis=1), per_line)
    assert per_line.sum() > 560


def test_another_seed_maps_keys_to_other_lines(device):
    keys = np.arange(30)
    tables = [DeviceTable(device, lines=64, seed=seed) for seed in (0, 1)]
    for table in tables:
        table.insert(keys)

    places = [{key: line for line, row in enumerate(table.words()[0]) for key in row.tolist()} for table in tables]

    assert sum(places[0][key] == places[1][key] for key in keys.tolist()) < 10
    assert all(table.query(keys)[1].size == 0 for table in tables)


def test_successive_launches_use_the_same_progress(device):
    table = DeviceTable(device, lines=4, dim=DIMS[0])

    assert [table.query(np.arange(n))[1].size for n in (300, 1, 300)] == [300, 1, 300]
