"""What every store must do, against a dict."""

import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serving.errors import StoreError
from serving.storage import Marker, TableSpec
from serving.storage.store import Change, LastingStore, LastingTable
from serving.storage.tables import LocalTable
from tests.serving.storage.tiers import QUICK_FOLDER, STORES

DIM = 4
TABLE = "model.table"
LARGEST_UINT32 = 2**32 - 1
# Neighbours in value and in raw bytes, and the ends of the range.
WIDE_KEYS = st.sampled_from([0, 1, 255, 256, 257, -1, -256, 2**32, 2**62, 2**63 - 3, -(2**63) + 2])
NARROW_KEYS = st.sampled_from([0, 1, 255, 256, 257, 65536, 2**31, LARGEST_UINT32])


def fetch(store, keys, dim=DIM, table=TABLE):
    """Fetch into a buffer full of NaN, so that a row that is not written shows."""
    out = np.full((len(keys), dim), np.nan, dtype=np.float32)
    found = store.tables[table].fetch(np.array(keys, dtype=np.int64), out)
    return out, found


def insert(store, rows, table=TABLE):
    """Insert a list of (key, value) pairs; a value stands for a row filled with it."""
    keys = np.array([key for key, _ in rows], dtype=np.int64)
    store.tables[table].insert(keys, np.array([[value] * DIM for _, value in rows], dtype=np.float32).reshape(-1, DIM))


def assert_holds(store, rows, absent=()):
    keys = [*rows, *absent]
    out, found = fetch(store, keys)
    assert found.tolist() == [True] * len(rows) + [False] * len(absent)
    assert out.tolist() == [[value] * DIM for value in rows.values()] + [[0.0] * DIM for _ in absent]


class StoreMachine(RuleBasedStateMachine):
    """Random inserts, evictions, fetches and drops must leave a store as they leave a dict."""

    def __init__(self, open_store, key_bytes):
        super().__init__()
        self.open_store, self.spec = open_store, TableSpec(TABLE, DIM, key_bytes)
        self.keys = WIDE_KEYS if key_bytes == 8 else NARROW_KEYS
        self.store = None

    @initialize()
    def begin(self):
        self.folder = TemporaryDirectory(dir=QUICK_FOLDER)
        self.store = self.open_store(Path(self.folder.name))
        self.drop()  # a Redis has what earlier examples left

    def teardown(self):
        if self.store is not None:
            self.store.close()
            self.folder.cleanup()

    @rule(data=st.data())
    def insert(self, data):
        rows = data.draw(st.lists(st.tuples(self.keys, st.integers(1, 99)), max_size=6))
        insert(self.store, rows)
        self.model |= dict(rows)

    @rule(data=st.data())
    def evict(self, data):
        keys = data.draw(st.lists(self.keys, max_size=4, unique=True))
        self.store.tables[TABLE].evict(np.array(keys, dtype=np.int64))
        for key in keys:
            self.model.pop(key, None)

    @rule(data=st.data())
    def fetch(self, data):
        keys = data.draw(st.lists(self.keys, max_size=8))
        out, found = fetch(self.store, keys)
        assert found.tolist() == [key in self.model for key in keys]
        assert out.tolist() == [[float(self.model.get(key, 0))] * DIM for key in keys]

    @rule()
    def drop(self):
        self.store.erase(TABLE)
        assert TABLE not in self.store.tables
        self.store.table(self.spec).open(64)
        self.model = {}

    @precondition(lambda self: isinstance(self.store, LastingStore))
    @rule()
    def reopen(self):
        self.store.close()
        self.store = self.open_store(Path(self.folder.name))
        self.store.table(self.spec).open(0)

    @invariant()
    def items_are_the_dict(self):
        if self.store is None:
            return
        seen = [
            (key, row)
            for keys, rows in self.store.tables[TABLE].items(3)
            for key, row in zip(keys.tolist(), rows.tolist(), strict=True)
        ]
        assert sorted(seen) == sorted((key, [float(value)] * DIM) for key, value in self.model.items())
        assert self.store.tables[TABLE].count() == len(self.model)


#: A cluster differs from one Redis in where its rows are, which the tests of clusters ask for.
EXAMPLES = dict.fromkeys(STORES, 5) | {"memory": 10, "redis": 3, "redis_cluster": 2}


@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.long)])
@pytest.mark.parametrize("key_bytes", [8, 4])
@pytest.mark.parametrize("kind", STORES)
def test_a_store_holds_what_a_dict_would(kind, key_bytes, times, request):
    run_state_machine_as_test(
        lambda: StoreMachine(lambda folder: STORES[kind](request, folder), key_bytes),
        settings=settings(deadline=None, max_examples=times * EXAMPLES[kind], stateful_step_count=15),
    )


def test_erasing_an_unknown_table_is_no_error(store):
    store.erase("model.unknown")

    assert "model.unknown" not in store.tables


@pytest.mark.parametrize("end", ["never opened", "closed", "erased"])
def test_a_table_that_is_not_open_refuses_to_read_and_write_instead_of_knowing_no_key(store, end):
    table = store.table(TableSpec(TABLE, DIM))
    if end != "never opened":
        table.open(10)
        table.insert(np.array([1]), np.ones((1, DIM), np.float32))
    if end == "closed":
        table.close()
    elif end == "erased":
        store.erase(TABLE)

    assert TABLE not in store.tables
    for call in calls_for_rows(table):
        with pytest.raises(StoreError, match=r"'model\.table': .*not an open table"):
            call()


def calls_for_rows(table):
    """The calls that read and write rows."""
    keys, rows = np.array([1]), np.zeros((1, DIM), np.float32)
    return [
        lambda: table.fetch(keys, rows),
        lambda: table.insert(keys, rows),
        lambda: table.insert_absent(keys, rows),
        lambda: table.evict(keys),
        table.count,
        lambda: table.capacity_rows,
        lambda: list(table.items()),
    ]


def test_the_metrics_show_the_rows_of_an_open_table_unless_they_lie_in_another_process(store):
    def shown():
        return {sample.name: sample.value for sample in table.samples()}

    table = store.table(TableSpec(TABLE, DIM))
    table.open(10)
    insert(store, [(5, 1), (6, 2), (7, 3)])

    name = {"rocksdb": "hotrow_tier_estimated_rows", "redis": None}.get(store.name, "hotrow_tier_rows")
    assert shown().get(name) == (3 if name else None)
    assert ("hotrow_tier_bytes" in shown()) == (name == "hotrow_tier_rows")
    store.erase(TABLE)
    assert not shown().keys() & {name, "hotrow_tier_bytes"}


def test_no_keys_are_no_error(store):
    store.table(TableSpec(TABLE, DIM)).open(10)

    insert(store, [])
    out, found = fetch(store, [])

    assert (out.shape, found.shape) == ((0, DIM), (0,))


def test_of_duplicates_in_one_insert_the_last_wins(store):
    store.table(TableSpec(TABLE, DIM)).open(10)

    insert(store, [(5, 1), (6, 2), (5, 3)])

    assert_holds(store, {5: 3.0, 6: 2.0}, absent=[7])


def test_fetching_a_key_twice_gives_its_row_twice(store):
    store.table(TableSpec(TABLE, DIM)).open(10)
    insert(store, [(5, 1)])

    out, found = fetch(store, [5, 9, 5])

    assert found.tolist() == [True, False, True]
    assert out[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_tables_do_not_see_each_others_keys(store):
    store.table(TableSpec("m.a", DIM)).open(10)
    store.table(TableSpec("m.b", DIM)).open(10)
    insert(store, [(1, 1)], "m.a")
    insert(store, [(1, 2)], "m.b")

    store.erase("m.a")

    assert store.tables.keys() == {"m.b"}
    assert fetch(store, [1], table="m.b")[0][0, 0] == 2.0


def test_opening_an_open_table_again_keeps_its_rows(store):
    store.table(TableSpec(TABLE, DIM)).open(10)
    insert(store, [(1, 1)])

    store.table(TableSpec(TABLE, DIM)).open(10)

    assert_holds(store, {1: 1.0})


def test_a_table_is_not_opened_with_another_dimension(store):
    store.table(TableSpec(TABLE, DIM)).open(10)
    insert(store, [(1, 1)])

    with pytest.raises(StoreError, match=r"model\.table"):
        store.table(TableSpec(TABLE, DIM + 1)).open(10)


def test_a_table_whose_name_is_open_changes_nothing(store):
    first, second = (store.table(TableSpec(TABLE, DIM)) for _ in range(2))
    other = store.table(TableSpec(TABLE, DIM + 1))
    first.open(10)
    insert(store, [(1, 1)])

    for table in (second, other):
        calls = [lambda table=table: table.open(10)]
        if isinstance(table, LastingTable):
            calls.append(lambda table=table: table.load(iter(()), Marker("digest"), keep=False))
        for call in calls:
            with pytest.raises(
                StoreError, match=r"is open with 4 floats of fp32, but [45] floats of fp32 were asked for"
            ):
                call()
        with pytest.raises(StoreError, match="not an open table"):
            table.count()
    assert_holds(store, {1: 1.0})


def test_rows_of_another_dimension_are_neither_given_nor_taken(store):
    store.table(TableSpec(TABLE, DIM)).open(10)
    insert(store, [(1, 1)])

    with pytest.raises(StoreError, match="4 floats"):
        fetch(store, [1], dim=DIM + 1)
    with pytest.raises(StoreError, match="4 floats"):
        store.tables[TABLE].insert(np.array([2]), np.zeros((1, DIM + 1), np.float32))
    assert_holds(store, {1: 1.0}, absent=[2])


def test_every_call_after_close_is_refused(store):
    table = store.table(TableSpec(TABLE, DIM))
    table.open(10)
    store.close()
    store.close()

    others = [lambda: table.open(10), lambda: store.erase(TABLE), lambda: store.table(TableSpec(TABLE, DIM))]
    for call in (*calls_for_rows(table), *others):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_readers_see_whole_rows_while_a_writer_overwrites_them(store):
    store.table(TableSpec(TABLE, DIM)).open(200)
    keys = np.arange(100)
    store.tables[TABLE].insert(keys, np.zeros((100, DIM), np.float32))
    stop = threading.Event()

    def write():
        for value in range(1, 40):
            store.tables[TABLE].insert(keys, np.full((100, DIM), value, np.float32))
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not stop.is_set():
        out, found = fetch(store, keys)
        assert found.all()
        assert (out == out[:, :1]).all()
    writer.join()

    assert (fetch(store, keys)[0] == 39.0).all()


@pytest.mark.parametrize("store", ["shared_memory", "rocksdb", "redis", "redis_cluster"], indirect=True)
def test_a_store_that_outlives_the_process_remembers_its_files_and_that_rows_came_since(store):
    spec = TableSpec(TABLE, DIM)
    store.table(spec).open(10)
    store.tables[TABLE].write_flags(changed=True)
    assert store.tables[TABLE].marker() is None

    store.table(spec).load(iter([(np.array([1]), np.ones((1, DIM), np.float32))]), Marker("digest", 1), keep=False)
    assert store.tables[TABLE].marker() == Marker("digest", 1)
    store.tables[TABLE].write_flags(changed=True)
    store.tables[TABLE].write_flags(changed=True)
    assert store.tables[TABLE].marker() == Marker("digest", 1, changed=True)
    assert_holds(store, {1: 1.0})
    store.table(spec).load(iter([(np.array([2]), np.ones((1, DIM), np.float32))]), Marker("other", 1), keep=False)
    assert replace(store.tables[TABLE].marker(), current_caches=None) == Marker("other", 1)
    assert_holds(store, {2: 1.0}, absent=[1])


@pytest.mark.parametrize("store", ["shared_memory", "rocksdb", "redis", "redis_cluster"], indirect=True)
def test_a_load_may_keep_the_rows_that_are_there(store):
    spec = TableSpec(TABLE, DIM)
    store.table(spec).open(10)
    insert(store, [(1, 1), (2, 2)])

    store.table(spec).load(iter([(np.array([2, 3]), np.full((2, DIM), 7, np.float32))]), Marker("digest", 2), keep=True)

    assert_holds(store, {1: 1.0, 2: 7.0, 3: 7.0})
    assert store.tables[TABLE].marker() == Marker("digest", 3, changed=True)


@pytest.mark.parametrize("store", ["shared_memory", "rocksdb", "redis", "redis_cluster"], indirect=True)
def test_a_table_that_is_not_open_cannot_be_marked_as_changed(store):
    with pytest.raises(StoreError, match="not an open table"):
        store.table(TableSpec(TABLE, DIM)).write_flags(changed=True)


def test_insert_absent_inserts_only_keys_that_are_not_there(store):
    store.table(TableSpec(TABLE, DIM)).open(10)
    insert(store, [(1, 1), (2, 2)])

    assert store.tables[TABLE].insert_absent(np.array([2, 3]), np.full((2, DIM), 7, np.float32)) == 1
    assert store.tables[TABLE].insert_absent(np.array([1, 2]), np.full((2, DIM), 8, np.float32)) == 0

    assert_holds(store, {1: 1.0, 2: 2.0, 3: 7.0})


@pytest.mark.parametrize("count", [1, 3])
def test_changes_of_several_tables_are_made_in_their_order(store, count):
    tables = [store.table(TableSpec(f"m.t{number}", DIM)) for number in range(count)]
    for table in tables:
        table.open(10)
        table.insert(np.array([1, 2]), np.ones((2, DIM), np.float32))

    new = np.full((1, DIM), 7, np.float32)
    changes = [Change(table, *change) for table in tables for change in ((np.array([1]), None), (np.array([2]), new))]
    store.write([*changes, Change(tables[0], np.array([1]), new)])

    for number, table in enumerate(tables):
        rows = {key: row[0] for keys, rows in table.items() for key, row in zip(keys.tolist(), rows, strict=True)}
        assert rows == ({1: 7.0, 2: 7.0} if number == 0 else {2: 7.0})
    store.write([])


def test_a_store_of_lasting_rows_has_lasting_tables(store):
    table = store.table(TableSpec(TABLE, DIM))

    assert isinstance(table, LastingTable) == isinstance(store, LastingStore)
    assert store.keeps_row_dtype or not isinstance(table, LocalTable)
