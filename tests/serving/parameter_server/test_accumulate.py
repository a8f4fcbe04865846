"""Changes that add to rows, and how far a log has come: both are there after a kill, or neither is."""

import os
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import AdditionError, RequestError
from serving.storage import MemoryStore, RocksDbStore, SharedMemoryStore
from serving.storage.marker import Marker
from serving.storage.store import Change, Reached, TableSpec
from tests.serving.small_server import KEYS, ROWS, DictStore, held_by, model_of, serve, write_model
from tests.tools.warm import Warm

SPEC = TableSpec("m.t", 2)


def deltas_of(*rows):
    return np.array(rows, dtype=np.float32)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.lists(st.tuples(st.sampled_from([*KEYS, 77, 78]), st.integers(-9, 9)), max_size=6), max_size=5))
def test_additions_equal_those_of_a_dict(tmp_path_factory, calls):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    expected = {key: row.copy() for key, row in zip(KEYS, ROWS, strict=True)}
    with serve(model_of(folder, default_value=0.5), MemoryStore(), DictStore("slow")) as server:
        for call in calls:
            deltas = np.array([[delta, 1, 0.25] for _, delta in call], dtype=np.float32).reshape(-1, 3)
            server.accumulate("m.t", np.array([key for key, _ in call], dtype=np.int64), deltas)
            for (key, _), delta in zip(call, deltas, strict=True):
                expected[key] = expected.get(key, np.full(3, 0.5, np.float32)) + delta
        rows_by_key = {key: row.tolist() for key, row in expected.items()}
        assert [held_by(store) for store in server.stores] == [rows_by_key] * 2


def test_an_addition_is_the_only_change_of_its_table_in_a_call(server):
    addition = Change("m.t", np.array([1]), deltas_of([1, 1, 1]), adds=True)
    with pytest.raises(RequestError, match=r"table 'm\.t': a change that adds to rows must be its table's only change"):
        server.write([("m.t", np.array([1]), None), addition])
    assert held_by(server.stores[1])[1] == ROWS[0].tolist()


def test_a_sum_that_is_infinite_changes_nothing(server):
    large = np.full((1, 3), 3e38, dtype=np.float32)
    server.insert("m.t", np.array([5]), large)
    with pytest.raises(RequestError, match=r"table 'm\.t': .*key 5.*inf"):
        server.accumulate("m.t", np.array([1, 5]), np.vstack([large * 0, large]))
    assert held_by(server.stores[1])[1] == ROWS[0].tolist()


@pytest.mark.parametrize(
    ("store", "row_dtype", "reason"),
    [
        pytest.param(lambda: MemoryStore(), "fp16", "fp16 rows round every sum", id="narrow rows"),
        pytest.param(
            lambda: MemoryStore(capacity_rows=12, overflow_policy="evict_random"), "fp32", "evicts rows", id="eviction"
        ),
        pytest.param(
            lambda: SharedMemoryStore(f"add-{os.getpid()}", 1 << 22), "fp32", "several processes", id="shared"
        ),
    ],
)
def test_a_truth_that_cannot_add_exactly_refuses(tmp_path, store, row_dtype, reason):
    write_model(tmp_path, np.abs(ROWS) % 8)
    refused = pytest.raises(AdditionError, match=f"'m.t': rows cannot be added to, because .*{reason}")
    with serve(model_of(tmp_path, row_dtype=row_dtype), store()) as server, refused:
        server.accumulate("m.t", np.array([1]), deltas_of([1, 1, 1]))


def opened(path):
    store = RocksDbStore(path, num_threads=1, max_batch_size=4)
    table = store.table(SPEC)
    table.open(0)
    return store, table


@pytest.mark.parametrize("is_repeatable", [False, True])
def test_rocksdb_keeps_how_far_a_log_has_come_with_the_rows(tmp_path, is_repeatable):
    store, table = opened(tmp_path / "db")
    other = store.table(TableSpec("m.t2", 2))
    other.open(0)
    keys = np.arange(10)
    store.write([Change(table, keys, np.ones((10, 2), np.float32))], Reached("log/0", "7", is_repeatable))
    store.write([Change(table, keys[:0], None), Change(other, keys[:0], None)], Reached("log/1", "x", is_repeatable))
    assert (table.reached(), other.reached()) == ({"log/0": "7", "log/1": "x"}, {"log/1": "x"})
    store.close()

    store, table = opened(tmp_path / "db")
    with closing(store):
        assert (table.reached(), table.count()) == ({"log/0": "7", "log/1": "x"}, 10)
        table.load(iter([(keys[:1], np.zeros((1, 2), np.float32))]), Marker("new files"), keep=False)
        assert (table.reached(), table.count()) == ({}, 1)


def test_a_dropped_table_forgets_its_logs(tmp_path):
    store, table = opened(tmp_path / "db")
    with closing(store):
        store.write([Change(table, np.array([1]), np.ones((1, 2), np.float32))], Reached("log/0", "7"))
        store.erase("m.t")
        table = store.table(SPEC)
        table.open(0)
        assert (table.reached(), table.count()) == ({}, 0)


KILLED = """
import os, signal, sys
import numpy as np
from serving.storage import RocksDbStore
from serving.storage.store import Change, Reached, TableSpec
store = RocksDbStore(sys.argv[1], num_threads=1)
table = store.table(TableSpec("m.t", 2))
table.open(0)
for number in range(1, 10_000):
    rows = np.full((3000, 2), number, np.float32)
    store.write([Change(table, np.arange(3000), rows)], Reached("log", str(number)))
    print(number, flush=True)
"""


def test_after_a_kill_the_rows_are_those_of_the_position(tmp_path):
    process = Warm("-c", KILLED, tmp_path / "db")
    seen = [int(process.stdout.readline()) for _ in range(5)][-1]
    process.kill()
    process.communicate()

    store, table = opened(tmp_path / "db")
    with closing(store):
        number = int(table.reached()["log"])
        rows = np.empty((3000, 2), dtype=np.float32)
        assert table.fetch(np.arange(3000), rows).all()
        assert number >= seen
        assert set(rows.ravel().tolist()) == {float(number)}
