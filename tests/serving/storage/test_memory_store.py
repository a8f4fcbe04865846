import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import HostTable, round_rows
from serving.errors import StoreError, StoreFullError
from serving.storage import MemoryStore, TableSpec
from serving.storage.memory_budget import MemoryBudget, rows_within

TABLE = "model.table"


def insert(store, keys, value=1.0, dim=4, table=TABLE):
    store.tables[table].insert(np.asarray(keys, dtype=np.int64), np.full((len(keys), dim), value, dtype=np.float32))


def test_an_insert_beyond_the_capacity_writes_nothing():
    store = MemoryStore(capacity_rows=10)
    store.table(TableSpec(TABLE, 4)).open(100)
    insert(store, range(8))

    with pytest.raises(StoreFullError, match="holds 8 of 10 rows, and the call adds 3 new keys"):
        insert(store, [0, 8, 9, 10], value=2.0)

    out = np.full((11, 4), np.nan, dtype=np.float32)
    assert store.tables[TABLE].fetch(np.arange(11), out).sum() == 8
    assert (out[:8] == 1.0).all()
    assert store.tables[TABLE].count() == 8


@pytest.mark.parametrize(("capacity", "room"), [(2500, 2000), (1900, 1600)])
def test_a_budget_gives_a_table_that_gets_updates_its_headroom_if_there_is_room(capacity, room):
    store = MemoryStore(capacity_rows=capacity, headroom_ratio=0.25)

    store.table(TableSpec(TABLE, 4)).open(1600)

    assert store.tables[TABLE].capacity_rows == room


def test_without_a_budget_a_table_gets_what_it_asks_for_and_headroom():
    store = MemoryStore()

    store.table(TableSpec(TABLE, 4)).open(1600)

    assert store.tables[TABLE].capacity_rows == 1700


def test_tables_that_are_announced_together_share_a_budget_of_rows_in_proportion():
    store = MemoryStore(capacity_rows=1000)
    specs = [TableSpec(f"m.{name}", 4) for name in "abcde"]

    store.share_bounds(list(zip(specs, [20_000, 40_000, 10, 0], strict=False)))
    store.table(specs[4]).open(100)  # was not announced
    for spec in specs[:4]:
        store.table(spec).open(40_000)

    rows = [store.tables[spec.name].capacity_rows for spec in specs]
    assert (sum(rows), rows[4]) == (1000, 0)
    assert rows[:2] == [pytest.approx(333, abs=2), pytest.approx(666, abs=2)]
    assert all(1 <= count <= 2 for count in rows[2:4])


def test_tables_that_are_announced_together_share_a_budget_of_bytes_in_proportion():
    store = MemoryStore(capacity_bytes=2_000_000)
    specs = [TableSpec("m.a", 16), TableSpec("m.b", 8), TableSpec("m.c", 32, row_dtype="int8")]
    wanted = [30_000, 60_000, 100]

    store.share_bounds(list(zip(specs, wanted, strict=True)))
    for spec, rows in zip(specs, wanted, strict=True):
        store.table(spec).open(rows)

    needed = [HostTable.memory_bytes(spec.dim, n, spec.row_dtype) for spec, n in zip(specs, wanted, strict=True)]
    taken = [store.tables[spec.name].size_bytes for spec in specs]
    assert 1_980_000 < sum(taken) <= 2_000_000
    for part, whole in zip(taken[:2], needed[:2], strict=True):
        assert part / sum(taken) == pytest.approx(whole / sum(needed), rel=0.05)
    assert store.tables["m.c"].capacity_rows >= 1


@settings(deadline=None)
@given(
    bound=st.sampled_from(["capacity_rows", "capacity_bytes"]),
    capacity=st.integers(1, 300_000),
    wanted=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000)), max_size=6),
    opened=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 300)), max_size=2),
)
def test_shares_keep_within_the_budget_and_leave_no_table_out_that_there_is_room_for(bound, capacity, wanted, opened):
    def cost(tables):
        return sum(HostTable.memory_bytes(dim, n) if bound == "capacity_bytes" else n for dim, n in tables if n)

    quotas = MemoryBudget(**{bound: capacity}).quotas(
        [(TableSpec(f"m.{n}", dim), rows) for n, (dim, rows) in enumerate(wanted)],
        [(TableSpec(f"h.{n}", dim), rows) for n, (dim, rows) in enumerate(opened)],
    )

    given_rows = [quota.rows for quota in quotas]
    dims, left = [dim for dim, _ in wanted], capacity - cost(opened)
    wanted_rows = [max(rows, 1) for _, rows in wanted]
    assert all(rows <= limit for rows, limit in zip(given_rows, wanted_rows, strict=True))
    assert cost(zip(dims, given_rows, strict=True)) <= max(left, 0)
    if cost((dim, 1) for dim in dims) <= left:
        assert all(given_rows)
    if cost(zip(dims, wanted_rows, strict=True)) <= left:
        assert given_rows == wanted_rows
    elif bound == "capacity_rows":
        assert sum(given_rows) == max(left, 0)


def test_a_share_of_a_table_that_is_not_opened_can_be_given_back():
    store = MemoryStore(capacity_rows=100)
    store.share_bounds([(TableSpec("m.a", 4), 60), (TableSpec("m.b", 4), 60)])
    store.give_back({"m.a", "m.unknown"})

    store.table(TableSpec("m.c", 4)).open(100)

    assert store.tables["m.c"].capacity_rows == 50


def test_tables_that_are_announced_later_keep_what_they_have_and_share_what_is_left():
    store = MemoryStore(capacity_rows=100)
    specs = [TableSpec(f"m.{name}", 4) for name in "abc"]
    store.table(specs[0]).open(60)

    for _ in range(2):
        store.share_bounds([(spec, 60) for spec in specs])
    for spec in specs:
        store.table(spec).open(60)

    assert [store.tables[spec.name].capacity_rows for spec in specs] == [60, 20, 20]


def test_a_budget_of_rows_is_shared_in_the_order_of_opening_where_nothing_was_announced():
    store = MemoryStore(capacity_rows=100)

    for name in ("m.a", "m.b", "m.c"):
        store.table(TableSpec(name, 4)).open(60)

    assert [store.tables[name].capacity_rows for name in ("m.a", "m.b", "m.c")] == [60, 40, 0]


@pytest.mark.parametrize(
    ("bound", "advice"),
    [
        ({}, "bound the rows in RAM with volatile_db.capacity_bytes"),
        ({"capacity_rows": 10**7}, "lower volatile_db.capacity_rows"),
        ({"capacity_bytes": 10**12}, "lower volatile_db.capacity_bytes"),
        ({"capacity_rows_per_table": {"m.a": 10**7}}, "lower volatile_db.capacity_rows_per_table"),
        ({"capacity_rows_of_each_table": 10**7}, "lower volatile_db.overflow_margin"),
    ],
)
def test_tables_that_do_not_fit_into_memory_together_are_refused_before_one_takes_any(monkeypatch, bound, advice):
    monkeypatch.setattr("kernels.system_memory.available_memory_bytes", lambda: 20_000_000)
    store = MemoryStore(**bound)
    specs = [TableSpec(f"m.{name}", 32) for name in "abc"]

    numbers = r"[0-9,]+ bytes of memory are needed, but 20,000,000 are available"
    with pytest.raises(StoreError, match=rf"memory: .*{numbers}; {re.escape(advice)}$"):
        store.share_bounds([(spec, 100_000) for spec in specs])
    with pytest.raises(StoreError, match=rf"memory: .*'m\.a': {numbers}; {re.escape(advice)}$"):
        store.table(specs[0]).open(1_000_000)
    assert not store.tables

    store.share_bounds([(spec, 10_000) for spec in specs])
    for spec in specs:
        store.table(spec).open(10_000)
    assert all(store.tables[spec.name].capacity_rows for spec in specs)


def test_a_dropped_table_gives_its_budget_back():
    store = MemoryStore(capacity_rows=100)
    store.table(TableSpec("m.a", 4)).open(60)
    store.erase("m.a")

    store.table(TableSpec("m.b", 4)).open(100)

    assert store.tables["m.b"].capacity_rows == 100


def test_a_table_without_any_room_holds_nothing_and_says_so():
    store = MemoryStore(capacity_rows=10)
    store.table(TableSpec("m.a", 4)).open(10)
    store.table(TableSpec(TABLE, 4)).open(10)
    out = np.full((2, 4), np.nan, dtype=np.float32)
    pooled = np.full((1, 4), np.nan, dtype=np.float32)

    assert not store.tables[TABLE].fetch(np.array([1, 2]), out).any()
    assert not store.tables[TABLE].fetch_pooled(np.array([1, 2]), np.array([0, 2]), pooled, "sum").any()

    assert (out == 0.0).all()
    assert (pooled == 0.0).all()
    store.tables[TABLE].evict(np.array([1]))
    assert (store.tables[TABLE].count(), list(store.tables[TABLE].items())) == (0, [])
    insert(store, [])
    with pytest.raises(StoreFullError, match="no room"):
        insert(store, [1])


@pytest.mark.parametrize("dim", [1, 16, 100])
@pytest.mark.parametrize("size_bytes", [1, 30_000, 1_000_000, 12_345_678])
def test_a_budget_of_bytes_is_used_up_and_never_exceeded(dim, size_bytes):
    rows = rows_within(size_bytes, dim)

    assert rows == 0 or HostTable.memory_bytes(dim, rows) <= size_bytes
    assert HostTable.memory_bytes(dim, rows + 1) > size_bytes


def test_all_tables_together_keep_within_the_budget_of_bytes():
    store = MemoryStore(capacity_bytes=2_000_000)

    for name, dim in (("m.a", 16), ("m.b", 8), ("m.c", 32)):
        store.table(TableSpec(name, dim)).open(9000)

    rows = [store.tables[name].capacity_rows for name in ("m.a", "m.b", "m.c")]
    sizes = [HostTable.memory_bytes(dim, count) for dim, count in zip((16, 8, 32), rows, strict=True)]
    assert 1_900_000 < sum(sizes) <= 2_000_000
    assert rows[:2] == [9000, 9000]


def test_a_table_with_a_capacity_of_its_own_gets_at_most_that_and_others_get_all_they_ask_for():
    store = MemoryStore(capacity_rows_per_table={"m.a": 10, "m.b": 0, "m.c": 900})

    for name in ("m.a", "m.b", "m.c", "m.d"):
        store.table(TableSpec(name, 4)).open(100)

    assert [store.tables[name].capacity_rows for name in ("m.a", "m.b", "m.c")] == [10, 0, 100]
    assert store.tables["m.d"].capacity_rows > 100  # with headroom


@pytest.mark.parametrize(
    "budget",
    [
        {"capacity_rows": 0},
        {"capacity_bytes": -1},
        {"capacity_rows_per_table": {"m.a": -1}},
        {"capacity_rows": 1, "capacity_bytes": 1},
        {"capacity_rows": 1, "capacity_rows_per_table": {}},
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(budget):
    with pytest.raises(ValueError, match="expected"):
        MemoryStore(**budget)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_pooling_agrees_with_pytorchs_embedding_bag(combiner):
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(50, 8)).astype(np.float32)
    store = MemoryStore()
    store.table(TableSpec(TABLE, 8)).open(50)
    store.tables[TABLE].insert(np.arange(50), rows)
    row_ptrs = np.array([0, 3, 3, 4, 20, 40])
    keys = rng.integers(0, 50, 40)
    out = np.full((5, 8), np.nan, dtype=np.float32)

    found = store.tables[TABLE].fetch_pooled(keys, row_ptrs, out, combiner)

    expected = torch.nn.functional.embedding_bag(
        torch.from_numpy(keys),
        torch.from_numpy(rows),
        torch.from_numpy(row_ptrs),
        mode=combiner,
        include_last_offset=True,
    )
    assert found.all()
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-5, atol=1e-6)  # float32 sums of at most 20 rows


def test_pooling_into_another_dimension_is_refused():
    store = MemoryStore()
    store.table(TableSpec(TABLE, 8)).open(50)

    with pytest.raises(StoreError, match="8 floats, but 4 came"):
        store.tables[TABLE].fetch_pooled(np.array([1]), np.array([0, 1]), np.zeros((1, 4), np.float32), "sum")


def test_a_reserved_key_is_not_taken():
    store = MemoryStore()
    store.table(TableSpec(TABLE, 4)).open(10)

    with pytest.raises(StoreError, match="reserved"):
        insert(store, [2**63 - 1])


@pytest.mark.parametrize("row_dtype", ["fp16", "bf16", "int8", "uint8"])
def test_a_narrow_table_gives_rounded_rows_and_takes_less(row_dtype):
    store = MemoryStore()
    store.table(TableSpec(TABLE, 64, row_dtype=row_dtype)).open(1000)
    rows = np.random.default_rng(0).standard_normal((1000, 64), dtype=np.float32)
    expected, out = np.empty_like(rows), np.empty_like(rows)
    round_rows(rows, row_dtype, expected)

    store.tables[TABLE].insert(np.arange(1000), rows)

    assert store.tables[TABLE].fetch(np.arange(1000), out).all()
    assert out.tobytes() == expected.tobytes() != rows.tobytes()
    capacity = store.tables[TABLE].capacity_rows
    assert (
        store.tables[TABLE].size_bytes
        == HostTable.memory_bytes(64, capacity, row_dtype)
        < HostTable.memory_bytes(64, capacity)
    )


def test_a_budget_of_bytes_has_room_for_more_narrow_rows():
    stores = {row_dtype: MemoryStore(capacity_bytes=20_000_000) for row_dtype in ("fp32", "int8")}
    for row_dtype, store in stores.items():
        store.table(TableSpec(TABLE, 128, row_dtype=row_dtype)).open(10**6)

    rows = {row_dtype: store.tables[TABLE].capacity_rows for row_dtype, store in stores.items()}

    assert rows["int8"] > 2.9 * rows["fp32"]
    assert HostTable.memory_bytes(128, rows["int8"], "int8") <= 20_000_000
    assert HostTable.memory_bytes(128, rows["int8"] + 1, "int8") > 20_000_000


def test_an_open_table_is_not_opened_with_another_row_type():
    store = MemoryStore()
    store.table(TableSpec(TABLE, 4)).open(10)

    with pytest.raises(StoreError, match="is open with 4 floats of fp32, but 4 floats of int8 were asked for"):
        store.table(TableSpec(TABLE, 4, row_dtype="int8")).open(10)


def test_a_row_that_the_row_type_cannot_hold_is_refused():
    store = MemoryStore()
    store.table(TableSpec(TABLE, 4, row_dtype="int8")).open(10)

    with pytest.raises(StoreError, match="row 0, of key 5: column 0 is nan, which int8 rows cannot hold"):
        insert(store, [5], value=np.nan)

    assert store.tables[TABLE].count() == 0
