"""Slots are claimed, filled and freed."""

import numpy as np
import pytest

from tests.kernels.cuda.device_table import LINES, DeviceTable, rows_of

STATIC_LOADS = {"15 x i64": 0.8, "7 x i64": 0.7, "15 x u32": 0.8}


@pytest.mark.parametrize("kind", LINES)
def test_each_new_key_gets_its_own_slot(device, kind):
    table = DeviceTable(device, kind, lines=4)
    keys = np.random.default_rng(1).choice(10**6, 200, replace=False)

    numbers = table.insert(keys, misses=np.full(200, 2))

    taken = numbers[numbers >= 0]
    assert len(set(taken.tolist())) == len(taken) <= 4 * table.kind.keys
    np.testing.assert_array_equal(table.held(), np.sort(keys[numbers >= 0]))
    words, _ = table.words()
    np.testing.assert_array_equal(words.reshape(-1)[taken].astype(np.int64), keys[numbers >= 0])


@pytest.mark.parametrize("kind", LINES)
def test_in_one_call_a_line_takes_no_more_keys_than_it_has_slots(device, kind):
    table = DeviceTable(device, kind, lines=1)

    table.insert(np.arange(100), misses=np.full(100, 2))

    assert len(table.held()) == table.kind.keys
    counted = table.counted()
    assert (counted["rows"], counted["inserted"], counted["replaced"]) == (table.kind.keys, table.kind.keys, 0)
    assert counted["in_use"] == 100 - table.kind.keys


@pytest.mark.parametrize("kind", LINES)
def test_a_held_key_is_not_claimed_again(device, kind):
    table = DeviceTable(device, kind)
    table.insert([1, 2, 3])

    numbers = table.claim([3, 4])

    assert numbers[0] == -1
    assert numbers[1] >= 0


@pytest.mark.parametrize("kind", LINES)
def test_a_key_is_missed_from_its_claim_to_its_fill(device, kind):
    table = DeviceTable(device, kind)
    table.insert([1, 2])
    numbers = table.claim([1, 3], kernel="claim_held")

    assert table.query([1, 2])[1].tolist() == [0]
    assert numbers[1] == -1, "only held keys are updated"

    table.fill([1, 3], rows_of([10, 3], 16), numbers)
    rows, missed = table.query([1, 2, 3])
    assert missed.tolist() == [2]
    np.testing.assert_array_equal(rows[:2], rows_of([10, 2], 16))
    assert table.counted()["updated"] == 1


@pytest.mark.parametrize("kind", LINES)
def test_an_erased_key_leaves_an_empty_slot_whose_counter_is_zero(device, kind):
    table = DeviceTable(device, kind, lines=1)
    table.insert([1, 2, 3])
    table.query([2])
    words, meta = table.words()
    slot = int(np.flatnonzero(words[0] == 2)[0])
    assert int(meta[0]) >> 2 * slot & 3 == 1

    table.erase([2, 2, 9])

    np.testing.assert_array_equal(table.held(), [1, 3])
    words, meta = table.words()
    assert words[0, slot] == table.kind.empty
    assert int(meta[0]) >> 2 * slot & 3 == 0
    assert table.counted()["erased"] == 1
    assert table.counted()["rows"] == 2
    assert table.query([1, 2, 3])[1].tolist() == [1]


@pytest.mark.parametrize("kind", LINES)
def test_all_keys_of_a_static_table_are_found(device, kind):
    lines = 150
    table = DeviceTable(device, kind, lines=lines, chain_lines=16)
    count = int(lines * table.kind.keys * STATIC_LOADS[kind])
    keys = np.random.default_rng(2).choice(2**31, count, replace=False)

    for part in np.array_split(keys, 3):
        table.insert(part, kernel="claim_static")

    rows, missed = table.query(keys)
    assert missed.size == 0
    np.testing.assert_array_equal(rows, rows_of(keys, 16))
    np.testing.assert_array_equal(table.held(), np.sort(keys))
    overflows = table.words()[1] >> table.kind.word(2 * table.kind.keys) & table.kind.word(1)
    assert 0 < overflows.sum() < lines, "some keys are not in their first lines"


@pytest.mark.parametrize("kind", LINES)
def test_a_static_table_updates_and_erases_along_its_chains(device, kind):
    table = DeviceTable(device, kind, lines=10, chain_lines=16)
    keys = np.arange(int(10 * table.kind.keys * 0.9))
    table.insert(keys, kernel="claim_static")
    table.erase(keys[::2])

    table.insert(keys, kernel="claim_static")  # half of them are held, some behind lines that now have room
    table.insert(keys, rows_of(keys + 7, 16), kernel="claim_held")

    rows, missed = table.query(keys)
    assert missed.size == 0
    np.testing.assert_array_equal(rows, rows_of(keys + 7, 16))
    np.testing.assert_array_equal(table.held(), keys)


@pytest.mark.parametrize("kind", LINES)
def test_no_key_is_put_beyond_its_chain(device, kind):
    table = DeviceTable(device, kind, lines=20, chain_lines=2)
    keys = np.random.default_rng(5).choice(2**31, 30 * table.kind.keys, replace=False)

    numbers = table.insert(keys, kernel="claim_static")

    _, missed = table.query(keys)
    np.testing.assert_array_equal(np.sort(missed), np.flatnonzero(numbers < 0))
    assert 0 < missed.size == table.counted()["no_slot"]


def test_a_full_static_table_counts_the_keys_that_it_leaves_out(device):
    table = DeviceTable(device, lines=2, chain_lines=16)

    numbers = table.insert(np.arange(40), kernel="claim_static")

    assert (numbers >= 0).sum() == 30
    assert table.counted()["no_slot"] == 10
    assert table.query(np.arange(40))[1].size == 10


def test_all_keys_are_listed_with_their_rows(device):
    table = DeviceTable(device, lines=7)
    keys = np.random.default_rng(4).choice(10**6, 80, replace=False)
    table.insert(keys)
    slots = 7 * 15
    listed, numbers = device.empty(slots, np.int64), device.empty(slots, np.int64)
    count, rows = device.zeros(1, np.uint32), device.empty((slots, 16), np.float32)

    for first, lines in ((0, 3), (3, 4)):  # the second call appends to the first call's list
        table.launch_tiles(
            "list_keys.cu",
            "list_keys",
            lines,
            (table.table, np.uint32(first), np.uint32(lines), listed, numbers, count),
        )
    table.launch("gather.cu", "gather", 1, (table.table, numbers, count, rows))

    held = int(table.to_host(count)[0])
    np.testing.assert_array_equal(np.sort(table.to_host(listed)[:held]), table.held())
    np.testing.assert_array_equal(table.to_host(rows)[:held], rows_of(table.to_host(listed)[:held], 16))
