"""Which rows a full HostTable evicts, against a dict with exact times and counts."""

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kernels.errors import TableFullError
from kernels.host import HostTable

POLICIES = ["evict_random", "evict_least_used", "evict_oldest", "evict_oldest_written"]
STAMPED = POLICIES[1:]
DIM = 2


def int64(keys):
    return np.array(keys, dtype=np.int64)


def rows_of(keys, version=0.0):
    return np.stack([np.asarray(keys, np.float32), np.full(len(keys), version, np.float32)], axis=1)


def insert(table, keys, version=0.0):
    return table.insert(int64(keys), rows_of(keys, version))


def read(table, keys, times=1):
    out = np.empty((len(keys), DIM), np.float32)
    for _ in range(times):
        table.fetch(int64(keys), out)


def held(table):
    return {key for keys, _ in table.items() for key in keys.tolist()}


class OverflowMachine(RuleBasedStateMachine):
    """After any calls, the table evicts the right rows, and only when it is full."""

    keys = st.lists(st.integers(0, 40), max_size=12, unique=True)

    @initialize(policy=st.sampled_from(POLICIES), capacity=st.integers(1, 30), target_ratio=st.floats(0, 1))
    def make(self, policy, capacity, target_ratio):
        self.policy, self.capacity, self.target = policy, capacity, int(target_ratio * capacity)
        self.table = HostTable(DIM, capacity, overflow_policy=policy, target_rows=self.target)
        self.versions = {}
        self.times, self.counts = {}, {}
        self.clock, self.version, self.evicted, self.evicted_since_aging = 0, 0, 0, 0

    @rule(keys=keys)
    def insert(self, keys):
        self.version += 1
        before = set(self.versions)
        added = set(keys) - before
        if len(before) + len(added) > self.capacity and len(keys) > self.capacity:
            with pytest.raises(TableFullError):
                insert(self.table, keys, self.version)
            return
        room_needed = len(before) + len(added) - self.capacity
        left = max(min(self.target, self.capacity - len(added)), len(before & set(keys)))
        expected = len(before) - left if room_needed > 0 else 0

        assert insert(self.table, keys, self.version) == expected

        gone = before - held(self.table)
        assert len(gone) == expected
        assert not gone & set(keys)
        self.check_order(gone, before - gone - set(keys))
        self.forget(gone)
        self.age(expected)
        for key in keys:
            self.versions[key] = self.version
            self.times[key] = self.clock
            self.counts.setdefault(key, 0)
        self.clock += bool(added)

    def check_order(self, gone, stayed):
        turn = self.counts if self.policy == "evict_least_used" else self.times
        if self.policy != "evict_random" and gone and stayed:
            assert max(turn[key] for key in gone) <= min(turn[key] for key in stayed)

    def forget(self, keys):
        for key in keys:
            del self.versions[key], self.times[key], self.counts[key]

    def age(self, evicted):
        self.evicted += evicted
        self.evicted_since_aging += evicted
        if evicted and self.evicted_since_aging >= self.capacity:
            least = min(self.counts.values(), default=0)
            self.counts = {key: (count - least) // 2 for key, count in self.counts.items()}
            self.evicted_since_aging = 0

    @rule(keys=keys, pooled=st.booleans())
    def read(self, keys, pooled):
        if pooled:
            out = np.empty((1, DIM), np.float32)
            self.table.fetch_pooled(int64(keys), int64([0, len(keys)]), out, "sum")
        else:
            read(self.table, keys)
        for key in set(keys) & set(self.versions):
            self.counts[key] += 1
            if self.policy != "evict_oldest_written":
                self.times[key] = self.clock

    @rule(keys=keys)
    def evict(self, keys):
        present = set(keys) & set(self.versions)
        assert self.table.evict(int64(keys)) == len(present)
        self.forget(present)

    @invariant()
    def the_table_holds_what_the_dict_holds(self):
        stored = {key: row for keys, rows in self.table.items() for key, row in zip(keys.tolist(), rows, strict=True)}
        assert {key: row[1] for key, row in stored.items()} == self.versions
        assert all(row[0] == key for key, row in stored.items())
        assert self.table.stats().evicted_rows == self.evicted
        assert len(self.table) <= self.capacity


def test_any_order_of_calls_evicts_the_right_rows(reading_loops):
    # At most 30 reads of a row: up to there its count is exact.
    run_state_machine_as_test(
        OverflowMachine, settings=settings(deadline=None, max_examples=20, stateful_step_count=30)
    )


def full_table(policy, capacity=10, target=8):
    table = HostTable(DIM, capacity, overflow_policy=policy, target_rows=target)
    insert(table, range(capacity))
    return table


@pytest.mark.parametrize("policy", POLICIES)
def test_an_insert_that_overflows_evicts_down_to_the_target_before_it_adds(policy):
    table = full_table(policy)

    assert insert(table, [100]) == 2

    assert len(table) == 9
    assert 100 in held(table)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_insert_that_needs_more_room_evicts_below_the_target(policy):
    table = full_table(policy)

    assert insert(table, range(100, 107)) == 7

    assert held(table) >= set(range(100, 107))
    assert len(table) == 10


@pytest.mark.parametrize("policy", POLICIES)
def test_an_insert_never_evicts_the_rows_it_writes(policy):
    table = full_table(policy, target=0)

    insert(table, [0, 1, 2, 100, 0], version=7)

    assert held(table) == {0, 1, 2, 100}


@pytest.mark.parametrize("policy", POLICIES)
def test_overwriting_rows_of_a_full_table_evicts_nothing(policy):
    table = full_table(policy)

    assert insert(table, range(10), version=1) == 0

    assert len(table) == 10


@pytest.mark.parametrize("policy", POLICIES)
def test_a_call_with_more_keys_than_the_table_can_hold_writes_nothing(policy):
    table = full_table(policy)

    with pytest.raises(TableFullError, match="10"):
        insert(table, range(5, 16))

    assert held(table) == set(range(10))


def test_a_table_without_a_policy_refuses_to_overflow():
    table = HostTable(DIM, 2)
    insert(table, [1, 2])

    with pytest.raises(TableFullError, match="holds 2 of 2 rows, and the call adds 1 new key"):
        insert(table, [3])

    assert table.overflow_policy is None


def test_random_eviction_covers_the_whole_table():
    table = HostTable(DIM, 1000, overflow_policy="evict_random", target_rows=500)
    survivals = np.zeros(1000)
    for _ in range(20):
        insert(table, range(1000))
        insert(table, [10_000])
        survivals += np.isin(range(1000), list(held(table)))
        table.evict(int64([10_000]))
    # Rows of the last fill stay with probability 1/2: a mean over 100 neighbours and 20 draws deviates by 0.011.
    assert np.abs(survivals.reshape(10, 100).mean(axis=1) / 20 - 0.5).max() < 0.07


def test_age_counts_reads_and_writes_or_writes_only():
    for policy, survivor in (("evict_oldest", 0), ("evict_oldest_written", 9)):
        table = HostTable(DIM, 10, overflow_policy=policy, target_rows=1)
        for key in range(10):
            insert(table, [key])
        read(table, [0])

        insert(table, [100])

        assert held(table) == {survivor, 100}


def test_an_update_makes_a_row_young_and_keeps_its_use_count():
    for policy in STAMPED:
        table = full_table(policy, target=9)
        read(table, range(1, 10), times=3)
        insert(table, [100])
        read(table, [100])
        insert(table, range(1, 9), version=1)

        insert(table, [101])

        assert (9 in held(table)) == (policy == "evict_least_used")


def test_counts_beyond_the_exact_ones_keep_their_order_of_magnitude():
    table = full_table("evict_least_used", target=5)
    read(table, range(5), times=20_000)
    read(table, range(5, 10), times=2_000)

    insert(table, [100])

    assert held(table) == {*range(5), 100}


def test_counts_age_and_a_once_hot_row_can_be_evicted():
    table = full_table("evict_least_used", target=8)
    read(table, range(8), times=31)
    for fresh in range(1000, 1100, 2):
        insert(table, [fresh, fresh + 1])
        read(table, [fresh, fresh + 1], times=3)

    assert not held(table) & set(range(8)), "rows that nobody reads any more stayed"


@pytest.mark.parametrize("policy", POLICIES)
def test_stamps_are_the_only_memory_that_a_policy_takes(policy):
    plain = HostTable.memory_bytes(32, 10_000_000)

    extra = HostTable.memory_bytes(32, 10_000_000, overflow_policy=policy) - plain

    stamps = 12_000_000 if policy in STAMPED else 0
    assert stamps <= extra < stamps + 2**21
    table = HostTable(DIM, 10, overflow_policy=policy)
    assert table.stats().memory_bytes == HostTable.memory_bytes(DIM, 10, overflow_policy=policy)
    assert table.overflow_policy == policy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"overflow_policy": "evict_newest"}, "overflow_policy: expected None or one of evict_random"),
        ({"target_rows": -1}, "target_rows: expected 0 to capacity_rows, 10, got -1"),
        ({"target_rows": 11}, "target_rows: expected 0 to capacity_rows, 10, got 11"),
    ],
)
def test_an_invalid_policy_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        HostTable(DIM, 10, **{"overflow_policy": "evict_random"} | change)


@pytest.mark.parametrize("policy", POLICIES)
def test_readers_see_whole_rows_of_the_right_keys_during_evictions(policy):
    table = HostTable(DIM, 3000, overflow_policy=policy, target_rows=2000)
    stop = threading.Event()
    rng = np.random.default_rng(0)

    def write():
        version = 0
        while not stop.is_set():
            version += 1
            insert(table, rng.integers(0, 20_000, 500), version)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        draws, met = np.random.default_rng(1), 0
        out = np.empty((2000, DIM), np.float32)
        for _ in range(300):
            keys = draws.integers(0, 20_000, 2000)
            found = table.fetch(keys, out)
            met += found.sum()
            assert (out[found, 0] == keys[found]).all()
            assert not out[~found].any()
            assert len(table) <= 3000
    finally:
        stop.set()
        writer.join()
    assert met
    assert table.stats().evicted_rows
