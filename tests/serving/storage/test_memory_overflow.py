"""What MemoryStore evicts, when, and what it says of it; who is evicted is tests/kernels/test_overflow.py's matter."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import HostTable
from serving.errors import StoreFullError
from serving.storage import MemoryStore, TableSpec

TABLE = "model.table"
POLICIES = ["evict_random", "evict_least_used", "evict_oldest", "evict_oldest_written"]


def insert(store, keys, table=TABLE):
    keys = np.asarray(keys, dtype=np.int64)
    store.tables[table].insert(keys, np.repeat(keys.astype(np.float32)[:, None], 4, axis=1))


def keys_in(store, table=TABLE):
    rows = {
        key: row for keys, rows in store.tables[table].items() for key, row in zip(keys.tolist(), rows, strict=True)
    }
    assert all((row == key).all() for key, row in rows.items())
    return set(rows)


def full_store(policy="evict_oldest", **options):
    store = MemoryStore(capacity_rows_of_each_table=100, overflow_policy=policy, **options)
    store.table(TableSpec(TABLE, 4)).open(1000)
    insert(store, range(100))
    return store


@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_at_its_bound_evicts_down_to_the_target_and_takes_the_new_rows(policy):
    store = full_store(policy, overflow_resolution_target=0.605)

    insert(store, range(1000, 1010))

    assert store.tables[TABLE].count() == 70
    assert set(range(1000, 1010)) <= keys_in(store)
    assert store.tables[TABLE].evicted_rows == 40


@settings(deadline=None, max_examples=25)
@given(
    calls=st.lists(st.lists(st.integers(0, 400), max_size=250), max_size=12),
    policy=st.sampled_from(POLICIES),
    target=st.floats(0.01, 1.0),
)
def test_whatever_is_inserted_the_bound_holds_and_the_last_keys_are_there(calls, policy, target):
    store = MemoryStore(capacity_rows_of_each_table=100, overflow_policy=policy, overflow_resolution_target=target)
    store.table(TableSpec(TABLE, 4)).open(1000)
    size_bytes = store.tables[TABLE].size_bytes

    for keys in calls:
        insert(store, keys)

        assert store.tables[TABLE].count() <= 100
        tail = set(keys[len(keys) // 100 * 100 :])  # a call of more keys than fit is taken in parts
        assert tail <= keys_in(store)
    assert store.tables[TABLE].size_bytes == size_bytes == HostTable.memory_bytes(4, 100, overflow_policy=policy)


def test_a_table_whose_bound_is_beyond_its_rows_and_headroom_refuses_as_without_a_policy():
    store = MemoryStore(capacity_rows_of_each_table=100, overflow_policy="evict_oldest")
    store.table(TableSpec(TABLE, 4)).open(20)
    insert(store, range(84))  # 20 and 64

    with pytest.raises(StoreFullError, match="holds 84 of 84 rows"):
        insert(store, [100])

    assert keys_in(store) == set(range(84))
    assert store.tables[TABLE].size_bytes == HostTable.memory_bytes(4, 84)  # no stamps


@pytest.mark.parametrize(
    "bound", [{"capacity_rows": 100}, {"capacity_rows_per_table": {TABLE: 100}}, {"capacity_bytes": 100_000}]
)
def test_any_bound_evicts_where_a_policy_is_given_and_refuses_where_none_is(bound):
    evicting, refusing = MemoryStore(**bound, overflow_policy="evict_least_used"), MemoryStore(**bound)
    for store in (evicting, refusing):
        store.table(TableSpec(TABLE, 4)).open(100_000)
        insert(store, range(store.tables[TABLE].capacity_rows))

    insert(evicting, range(100_000, 100_010))
    with pytest.raises(StoreFullError):
        insert(refusing, range(100_000, 100_010))

    assert evicting.tables[TABLE].evicted_rows
    assert not refusing.tables[TABLE].evicted_rows
    assert set(range(100_000, 100_010)) <= keys_in(evicting)


def test_a_table_that_the_budget_gives_all_of_its_rows_does_not_evict():
    store = MemoryStore(capacity_rows=100, overflow_policy="evict_oldest")
    store.table(TableSpec("m.small", 4)).open(40)
    store.table(TableSpec("m.large", 4)).open(90)
    insert(store, range(40), "m.small")
    insert(store, range(60), "m.large")

    insert(store, [1000], "m.large")
    with pytest.raises(StoreFullError):
        insert(store, [1000], "m.small")

    assert keys_in(store, "m.small") == set(range(40))


def test_stamps_are_part_of_a_budget_of_bytes():
    store = MemoryStore(capacity_bytes=10_000_000, overflow_policy="evict_oldest")

    store.table(TableSpec(TABLE, 4)).open(10**6)

    rows = store.tables[TABLE].capacity_rows
    assert store.tables[TABLE].size_bytes <= 10_000_000
    assert HostTable.memory_bytes(4, rows + 1, overflow_policy="evict_oldest") > 10_000_000


@pytest.mark.parametrize(
    ("is_backed", "level", "outlook"),
    [(False, "WARNING", "a row that no other tier holds is lost"), (True, "INFO", "the next tier has them")],
)
def test_the_first_eviction_of_a_table_is_logged_once_and_is_a_warning_where_rows_are_lost(
    caplog, is_backed, level, outlook
):
    store = full_store(is_backed=is_backed)
    with caplog.at_level(logging.INFO):
        assert not caplog.messages
        for start in range(1000, 2000, 50):
            insert(store, range(start, start + 50))

    assert caplog.messages == [
        "memory: table model.table reached its bound of 100 rows and evicts rows from now on (evict_oldest); " + outlook
    ]
    assert [record.levelname for record in caplog.records] == [level]
    assert store.tables[TABLE].evicted_rows > 900


def test_evictions_are_shown_by_the_metrics():
    store = full_store()
    insert(store, [1000])

    shown = {sample.name: sample.value for sample in store.tables[TABLE].samples()}

    assert shown["hotrow_tier_evicted_rows"] == store.tables[TABLE].evicted_rows != 0


def test_a_table_without_room_refuses_whatever_the_policy():
    store = MemoryStore(capacity_rows_per_table={TABLE: 0}, overflow_policy="evict_oldest")
    store.table(TableSpec(TABLE, 4)).open(10)

    with pytest.raises(StoreFullError, match="no room"):
        insert(store, [1])

    assert store.tables[TABLE].evicted_rows == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_rows_of_each_table": 0}, "capacity_rows_of_each_table: expected at least 1, got 0"),
        ({"capacity_rows_of_each_table": 1, "capacity_rows": 1}, "capacity_rows and capacity_rows_of_each_table"),
        ({"overflow_resolution_target": 0.0}, "overflow_resolution_target: expected more than 0"),
        ({"overflow_resolution_target": 1.1}, "overflow_resolution_target: expected more than 0"),
    ],
)
def test_an_overflow_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MemoryStore(**options)
