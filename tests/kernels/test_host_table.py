"""HostTable against a dict, with both compilations of its reading loops."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kernels.errors import ReservedKeyError, TableFullError
from kernels.host import HostTable, pool_rows, round_rows

POISON = np.float32(-12345.0)
RESERVED = [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1]
DIMS = [1, 2, 3, 7, 8, 9, 16, 17, 24, 31, 32, 33, 64, 100, 128, 130]
EDGE_KEYS = [0, -1, 1, -(2**63) + 2, 2**63 - 3]


pytestmark = pytest.mark.usefixtures("reading_loops")


def int64(values):
    return np.array(values, dtype=np.int64)


def guarded(rows, dim):
    """A poisoned float32[rows, dim] between poisoned guard words; returns ``out`` and a check of the guards."""
    memory = np.full(rows * dim + 32, POISON, dtype=np.float32)

    def guards_stand():
        return (memory[:16] == POISON).all() and (memory[-16:] == POISON).all()

    return memory[16:-16].reshape(rows, dim), guards_stand


def pooled_by_numpy(rows, row_ptrs, combiner):
    """Bags summed row by row in float32; an oracle that shares no code with the extension."""
    out = np.zeros((len(row_ptrs) - 1, rows.shape[1]), dtype=np.float32)
    for bag, (begin, end) in enumerate(itertools.pairwise(row_ptrs)):
        for i in range(begin, end):
            out[bag] = out[bag] + rows[i]
        if combiner == "mean" and end - begin > 1:
            out[bag] = out[bag] / np.float32(end - begin)
        if combiner == "sqrtn" and end - begin > 1:
            out[bag] = out[bag] / np.sqrt(np.float32(end - begin))
    return out


def random_table(dim, n=300, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.choice(2**40, size=n, replace=False) - 2**39
    rows = rng.standard_normal((n, dim), dtype=np.float32)
    table = HostTable(dim, n)
    table.insert(keys, rows)
    return table, keys, rows


class TableMachine(RuleBasedStateMachine):
    """Any order of calls leaves the table equal to a dict."""

    keys = st.lists(st.one_of(st.integers(-20, 20), st.sampled_from(EDGE_KEYS)), max_size=40)

    @initialize(
        dim=st.sampled_from([1, 3, 8, 10, 32]),
        capacity=st.sampled_from([1, 5, 24]),
        row_dtype=st.sampled_from(["fp32", "fp16", "bf16", "int8", "uint8"]),
    )
    def make(self, dim, capacity, row_dtype):
        self.table = HostTable(dim, capacity, row_dtype)
        self.model = {}
        self.version = 0

    @rule(keys=keys)
    def insert(self, keys):
        rows = np.random.default_rng(self.version).standard_normal((len(keys), self.table.dim), dtype=np.float32)
        self.version += 1
        new_rows = len(set(keys) - self.model.keys())
        if len(self.model) + new_rows > self.table.capacity_rows:
            with pytest.raises(TableFullError) as caught:
                self.table.insert(int64(keys), rows)
            assert (caught.value.rows, caught.value.new_rows) == (len(self.model), new_rows)
        else:
            self.table.insert(int64(keys), rows)
            round_rows(rows, self.table.row_dtype, rows)
            self.model.update(zip(keys, rows, strict=True))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def overwrite(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, max_size=8))
        self.insert(keys)

    @rule(keys=keys)
    def evict(self, keys):
        present = {key for key in keys if self.model.pop(key, None) is not None}
        assert self.table.evict(int64(keys)) == len(present)

    @rule(keys=keys)
    def fetch(self, keys):
        out, guards_stand = guarded(len(keys), self.table.dim)
        found = self.table.fetch(int64(keys), out)
        assert found.tolist() == [key in self.model for key in keys]
        assert np.array_equal(out, self.gathered(keys))
        assert guards_stand()

    @rule(keys=keys)
    def holds(self, keys):
        assert self.table.holds(int64(keys)).tolist() == [key in self.model for key in keys]

    @rule(keys=keys, data=st.data(), combiner=st.sampled_from(["sum", "mean", "sqrtn"]))
    def fetch_pooled(self, keys, data, combiner):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=5)))
        row_ptrs = [0, *cuts, len(keys)]
        out, guards_stand = guarded(len(row_ptrs) - 1, self.table.dim)
        found = self.table.fetch_pooled(int64(keys), np.array(row_ptrs, dtype=np.int32), out, combiner)
        assert found.tolist() == [key in self.model for key in keys]
        assert np.array_equal(out, pooled_by_numpy(self.gathered(keys), row_ptrs, combiner))
        assert guards_stand()

    @rule(batch_rows=st.integers(1, 9))
    def walk(self, batch_rows):
        met = [(key, row) for keys, rows in self.table.items(batch_rows) for key, row in zip(keys, rows, strict=True)]
        assert sorted(key for key, _ in met) == sorted(self.model)
        assert all(np.array_equal(row, self.model[key]) for key, row in met)

    @invariant()
    def has_the_models_size(self):
        assert len(self.table) == len(self.model) == self.table.stats().rows

    def gathered(self, keys):
        rows = [self.model.get(key, np.zeros(self.table.dim, dtype=np.float32)) for key in keys]
        return np.array(rows, dtype=np.float32).reshape(len(keys), self.table.dim)


def test_any_order_of_calls_leaves_the_table_equal_to_a_dict():
    run_state_machine_as_test(TableMachine, settings=settings(deadline=None, max_examples=20, stateful_step_count=25))


@pytest.mark.parametrize("dim", DIMS)
def test_fetch_writes_exactly_the_rows_of_out(dim):
    table, keys, rows = random_table(dim)
    asked = np.concatenate([keys[::-1], int64([2**50]), keys[:7]])
    out, guards_stand = guarded(len(asked), dim)

    found = table.fetch(asked, out)

    assert found.tolist() == [True] * 300 + [False] + [True] * 7
    assert np.array_equal(out, np.concatenate([rows[::-1], np.zeros((1, dim), np.float32), rows[:7]]))
    assert guards_stand()


@pytest.mark.parametrize("dim", DIMS)
def test_pooling_equals_sequential_float32_sums_bit_for_bit(dim):
    table, keys, rows = random_table(dim)
    rng = np.random.default_rng(1)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 9, size=200))])
    asked = rng.integers(0, len(keys), size=offsets[-1])
    absent = rng.random(len(asked)) < 0.1
    gathered = np.where(absent[:, None], np.float32(0), rows[asked])

    for combiner, integers in itertools.product(("sum", "mean", "sqrtn"), (np.int32, np.int64)):
        row_ptrs = offsets.astype(integers)
        pooled, pooled_guards_stand = guarded(200, dim)
        recomputed, recomputed_guards_stand = guarded(200, dim)
        found = table.fetch_pooled(np.where(absent, 2**50 + asked, keys[asked]), row_ptrs, pooled, combiner)
        pool_rows(gathered, row_ptrs, recomputed, combiner)

        assert np.array_equal(found, ~absent)
        assert pooled.tobytes() == recomputed.tobytes() == pooled_by_numpy(gathered, row_ptrs, combiner).tobytes()
        assert pooled_guards_stand()
        assert recomputed_guards_stand()


def test_a_long_bag_and_a_long_batch_span_several_reads():
    table, keys, rows = random_table(8)
    asked = np.arange(50_000) % len(keys)
    row_ptrs = int64([0, 20_000, 20_001, 20_001, 50_000])
    out, pooled = np.empty((50_000, 8), np.float32), np.empty((4, 8), np.float32)

    assert table.fetch(keys[asked], out).all()
    assert table.fetch_pooled(keys[asked], row_ptrs, pooled, "sum").all()

    assert np.array_equal(out, rows[asked])
    assert np.array_equal(pooled, pooled_by_numpy(rows[asked], row_ptrs, "sum"))


def test_rows_of_any_bits_come_back_unchanged():
    bits = np.array([[0x7FC00001, 0xFFC12345, 0x7F800000, 0x80000000]], dtype=np.uint32)  # NaNs, infinity, -0
    table = HostTable(4, 1)
    table.insert(int64([5]), bits.view(np.float32))
    out = np.zeros((1, 4), np.float32)

    table.fetch(int64([5]), out)

    assert out.view(np.uint32).tolist() == bits.tolist()


def test_no_keys_and_no_bags_are_allowed():
    table = HostTable(4, 10)
    none, no_rows = int64([]), np.empty((0, 4), np.float32)

    table.insert(none, no_rows)

    assert table.evict(none) == 0
    assert table.fetch(none, no_rows).shape == (0,)
    assert table.fetch_pooled(none, int64([0]), no_rows, "sum").shape == (0,)
    assert list(table.items()) == []
    pool_rows(no_rows, int64([0]), no_rows, "mean")


def test_a_full_table_takes_overwrites_and_refuses_new_keys():
    table = HostTable(2, 3)
    table.insert(int64([1, 2, 3]), np.ones((3, 2), np.float32))

    table.insert(int64([3, 3, 1]), np.array([[4, 4], [5, 5], [6, 6]], np.float32))
    with pytest.raises(TableFullError, match=r"holds 3 of 3 rows, and the call adds 1 new keys"):
        table.insert(int64([1, 9, 9]), np.full((3, 2), 7, np.float32))

    out = np.empty((4, 2), np.float32)
    assert table.fetch(int64([1, 2, 3, 9]), out).tolist() == [True, True, True, False]
    assert out[:, 0].tolist() == [6, 1, 5, 0]


@pytest.mark.parametrize("key", RESERVED)
def test_reserved_keys_are_refused_before_anything_happens(key):
    table = HostTable(2, 200)
    table.insert(int64([1]), np.ones((1, 2), np.float32))
    keys = int64([1] * 100 + [key])
    rows, row_ptrs = np.full((101, 2), 9, np.float32), int64([0, 101])

    for call in (
        lambda: table.insert(keys, rows),
        lambda: table.evict(keys),
        lambda: table.fetch(keys, rows),
        lambda: table.fetch_pooled(keys, row_ptrs, rows[:1], "sum"),
    ):
        with pytest.raises(ReservedKeyError, match="at position 100") as caught:
            call()
        assert (caught.value.key, caught.value.position) == (key, 100)

    assert (rows == 9).all()
    out = np.empty((1, 2), np.float32)
    assert table.fetch(int64([1]), out).all()
    assert out.tolist() == [[1, 1]]


def test_more_memory_than_the_machine_has_is_a_memory_error():
    with pytest.raises(MemoryError):
        HostTable(65_536, 3_500_000_000)


@pytest.mark.parametrize(("dim", "capacity", "name"), [
    (0, 10, "dim"), (-1, 10, "dim"), (65_537, 10, "dim"),
    (8, 0, "capacity_rows"), (8, -5, "capacity_rows"), (8, 2**32, "capacity_rows"),
])  # fmt: skip
def test_sizes_out_of_range_are_refused_by_name(dim, capacity, name):
    for make in (HostTable, HostTable.memory_bytes):
        with pytest.raises(ValueError, match=rf"^{name}: expected 1 to [0-9]+, got"):
            make(dim, capacity)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_last_of_equal_keys_in_one_call_wins(seed):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 50, size=400)
    rows = rng.standard_normal((400, 3), dtype=np.float32)
    table = HostTable(3, 50)
    table.insert(keys, rows)
    last = {int(key): row for key, row in zip(keys, rows, strict=True)}
    out = np.empty((len(last), 3), np.float32)

    assert table.fetch(int64(list(last)), out).all()
    assert np.array_equal(out, np.array(list(last.values())))


def test_the_environment_can_switch_avx2_off():
    program = "from kernels import _host; print(_host.instruction_set())"
    environment = {**os.environ, "HOTROW_DISABLE_AVX2": "1"}

    chosen = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )

    assert chosen.stdout == "portable\n"
