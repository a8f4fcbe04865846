"""Redis goes with one state of the RocksDB behind it: where either was put back, the next start loads Redis anew."""

import shutil
from contextlib import closing, contextmanager

import numpy as np
import pytest

from serving.errors import StoreError
from serving.parameter_server import TierSettings
from serving.storage import RedisStore, RocksDbStore, TableSpec, redis_seals
from serving.storage.redis.commands import Partition
from serving.storage.redis.seals import seals_of, without_seals
from serving.storage.redis.strings import StringTable
from serving.storage.redis.table import RedisTable
from serving.storage.store import new_seal, sealed_by
from tests.serving.small_server import KEYS, ROWS, rows_of, serve, write_model
from tests.serving.storage.redis_stores import open_store

TABLE = "m.t"
PARTITIONS = 4
RECORDS = [Partition(TABLE, number).record for number in range(PARTITIONS)]
FILE = {key: row.tolist() for key, row in zip(KEYS, ROWS, strict=True)}
KEPT = {"redis": TierSettings(is_initialized=False)}
BOTH_LAYOUTS = pytest.mark.parametrize("layout", ["hps", "strings"])


@pytest.fixture
def config(tmp_path):
    return write_model(tmp_path)


@pytest.fixture
def start(config, redis_server, tmp_path):
    """Serve as a process does that starts anew, with the RocksDB in ``db`` unless another is named."""

    @contextmanager
    def start(db="db", layout="hps", settings=None, read_only=False):
        redis = open_store(redis_server, num_partitions=PARTITIONS, layout=layout)
        rocksdb = RocksDbStore(tmp_path / db, num_threads=1, read_only=read_only)
        with serve(config, redis, rocksdb, settings=settings) as server:
            yield server

    return start


@pytest.fixture
def loads(monkeypatch):
    """How often Redis was loaded."""
    counted = []
    for kind in (RedisTable, StringTable):

        def load(*given, load=kind.load, **named):
            counted.append(1)
            load(*given, **named)

        monkeypatch.setattr(kind, "load", load)
    return counted


def row_of(number):
    return np.full((1, 3), number, dtype=np.float32)


def insert(server, key, number):
    server.insert(TABLE, np.array([key]), row_of(number))


def assert_holds(server, expected):
    """All answers are those that are ``expected``, and Redis has just these rows."""
    assert rows_of(server) == rows_of(server.stores[0]) == expected


def put_back(tmp_path, copy="copy"):
    """Put a copy in the place of the database."""
    shutil.rmtree(tmp_path / "db")
    shutil.copytree(tmp_path / copy, tmp_path / "db")


@BOTH_LAYOUTS
@pytest.mark.parametrize("how", ["checkpoint", "checkpoint of a server", "copy"])
@pytest.mark.parametrize("has_changed", [False, True])
def test_after_rocksdb_is_put_back_redis_has_its_rows(start, loads, tmp_path, layout, how, has_changed):
    expected = dict(FILE)
    with start(layout=layout) as server:
        if has_changed:
            insert(server, 3, 1.0)
            expected[3] = [1.0] * 3
        if how == "checkpoint of a server":
            server.stores[1].checkpoint(tmp_path / "copy")
            insert(server, 4, 1.5)
    if how == "checkpoint":
        with closing(RocksDbStore(tmp_path / "db", num_threads=1)) as store:
            store.checkpoint(tmp_path / "copy")
    elif how == "copy":
        shutil.copytree(tmp_path / "db", tmp_path / "copy")
    with start(layout=layout) as server:
        insert(server, 3, 2.0)
        server.evict(TABLE, np.array([5]))
    put_back(tmp_path)

    with start(layout=layout) as server:
        assert_holds(server, expected)
        insert(server, 6, 3.0)
    assert len(loads) == 2

    with start(layout=layout) as server:
        assert_holds(server, expected | {6: [3.0] * 3})
    assert len(loads) == 2


@BOTH_LAYOUTS
def test_as_long_as_nothing_is_put_back_redis_is_not_loaded_again(start, loads, layout):
    for number in range(3):
        with start(layout=layout) as server:
            for key in range(1, 4):
                insert(server, key, number)
    with start(layout=layout) as server:
        assert_holds(server, FILE | dict.fromkeys(range(1, 4), [2.0] * 3))
    assert len(loads) == 1


def test_a_redis_that_came_back_older_while_nobody_used_it_is_loaded_again(start, client, loads):
    with start() as server:
        insert(server, 3, 1.0)
    before = {name: client.dump(name) for name in client.scan_iter()}
    with start() as server:
        insert(server, 3, 2.0)
    client.flushall()
    for name, value in before.items():
        client.restore(name, 0, value)

    with start() as server:
        assert_holds(server, FILE | {3: [2.0] * 3})
    assert len(loads) == 2


@BOTH_LAYOUTS
def test_processes_with_rocksdbs_of_their_own_do_not_load_redis_again_and_again(start, loads, layout):
    with start("db", layout) as one, start("db2", layout) as other:
        insert(one, 3, 1.0)
        insert(other, 4, 2.0)
        insert(one, 5, 3.0)
    expected = FILE | {3: [1.0] * 3, 4: [2.0] * 3, 5: [3.0] * 3}

    for db in ("db", "db2", "db3", "db", "db2", "db3"):
        with start(db, layout) as server:
            assert rows_of(server) == expected
            insert(server, 3, 1.0)
    assert len(loads) == 1


def test_of_processes_with_rocksdbs_of_their_own_one_may_be_put_back(start, loads, tmp_path):
    with start("db2"), start() as server:
        shutil.copytree(tmp_path / "db", tmp_path / "copy")
        insert(server, 3, 1.0)
    put_back(tmp_path)

    with start("db2") as server:
        assert rows_of(server)[3] == [1.0] * 3  # of it nobody knows yet
    assert len(loads) == 1
    with start() as server:
        assert_holds(server, FILE)
    with start("db2") as server:
        assert_holds(server, FILE)
    assert len(loads) == 2


def test_that_redis_has_changes_which_a_new_rocksdb_has_not_is_told(start, loads, tmp_path, caplog):
    with start() as server:
        insert(server, 3, 1.0)
    assert "has changes" not in caplog.text
    shutil.rmtree(tmp_path / "db")

    with start() as server:
        assert rows_of(server)[3] == [1.0] * 3
    assert "m.t: redis has changes that rocksdb has not: those of a process with a database of its own" in caplog.text
    assert len(loads) == 1


def test_records_of_older_versions_are_taken_as_they_are_and_get_a_seal(start, client, loads, tmp_path):
    with start() as server:
        insert(server, 3, 1.0)
        server.stores[1]._database._record(puts={}, deletes=[b"hotrow.seal.m.t"])
    for record in RECORDS:
        client.set(record, without_seals(client.get(record)))

    with start() as server:
        assert_holds(server, FILE | {3: [1.0] * 3})
        shutil.copytree(tmp_path / "db", tmp_path / "copy")
    assert [len(seals_of(client.get(record))) for record in RECORDS] == [1] * PARTITIONS
    with start() as server:
        insert(server, 3, 2.0)
    assert len(loads) == 1


@BOTH_LAYOUTS
@pytest.mark.parametrize("fault", [StoreError("redis", TABLE, "lost"), None], ids=["none", "all"])
def test_a_seal_that_came_before_a_change_which_failed_costs_no_load(start, loads, monkeypatch, layout, fault):
    put_seal = RedisStore.put_seal

    def fail(store, *given, **named):
        if fault is None:  # Redis has taken it, and the answer was lost
            put_seal(store, *given, **named)
        raise StoreError("redis", TABLE, "lost")

    with start(layout=layout) as server:
        insert(server, 3, 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(RedisStore, "put_seal", fail)
            with pytest.raises(StoreError, match="lost"):
                insert(server, 3, 2.0)
        assert rows_of(server)[3] == [1.0] * 3
        insert(server, 3, 3.0)

    with start(layout=layout) as server:
        assert_holds(server, FILE | {3: [3.0] * 3})
    assert len(loads) == 1


def test_a_redis_that_is_left_as_it_is_keeps_the_seal_by_which_the_next_start_knows_it(start, loads, tmp_path):
    with start():
        pass
    shutil.copytree(tmp_path / "db", tmp_path / "copy")
    with start() as server:
        insert(server, 3, 2.0)
    put_back(tmp_path)

    with start(settings=KEPT) as server:
        insert(server, 4, 1.0)
        assert rows_of(server) == FILE | {3: [2.0] * 3, 4: [1.0] * 3}  # as it was told to
    with start() as server:
        assert_holds(server, FILE | {4: [1.0] * 3})
    assert len(loads) == 2


@BOTH_LAYOUTS
def test_a_redis_that_was_filled_while_it_was_used_has_a_seal(start, client, loads, tmp_path, layout):
    with start(layout=layout):
        pass
    shutil.copytree(tmp_path / "db", tmp_path / "copy")
    with start(layout=layout) as server:
        insert(server, 3, 2.0)
        client.flushall()
        ((_, lost),) = server._served._losable.items()
        assert lost.try_to_load()
    put_back(tmp_path)

    with start(layout=layout) as server:
        assert_holds(server, FILE)


def test_who_only_reads_rocksdb_loads_no_redis_that_goes_with_another_state(start, loads, tmp_path):
    with start():
        pass
    shutil.copytree(tmp_path / "db", tmp_path / "copy")
    with start() as server:
        insert(server, 3, 2.0)

    with start("copy", read_only=True) as server:  # as one does that is behind the writer
        assert rows_of(server)[3] == [2.0] * 3
    assert len(loads) == 1


def test_after_a_model_was_loaded_from_other_files_and_back_redis_has_no_change_from_before(
    start, config, loads, tmp_path
):
    with start() as server:
        insert(server, 3, 2.0)
    for rows in (ROWS + 1, ROWS):  # while Redis is not used
        with serve(write_model(tmp_path, rows), RocksDbStore(tmp_path / "db", num_threads=1)):
            pass

    with start() as server:
        assert_holds(server, FILE)
    assert len(loads) == 2


@BOTH_LAYOUTS
def test_a_table_bears_the_seals_of_the_databases_that_were_heard_of_last(redis_server, layout):
    spec, databases = TableSpec("m.t", 3), redis_seals.MOST_SEALS + 4
    store = open_store(redis_server, layout=layout)
    store.bulk_load(spec, iter([(np.array(KEYS), ROWS)]), "digest")
    first = [new_seal(None) for _ in range(databases)]
    second = [new_seal(seal) for seal in first]

    for seal in first:
        store.put_seal("m.t", seal, None, has_changed=False)
    assert store.seals("m.t") == set(first[4:])
    for former, seal in zip(first, second, strict=True):
        store.put_seal("m.t", seal, former, has_changed=True)
    assert store.seals("m.t") == set(second[4:])
    store.put_seal("m.t", new_seal(second[-1]), first[-1], has_changed=False)  # not the one before

    assert store.seals("m.t") == set(second[4:])
    assert store.loaded_from("m.t") == "digest+changed"
    assert rows_of(store) == FILE
    store.bulk_load(spec, iter([(np.array(KEYS), ROWS)]), "digest")
    assert store.seals("m.t") == set()


def test_a_rocksdb_has_a_seal_of_each_table_that_changes_with_it(tmp_path):
    spec = TableSpec("m.t", 3)
    with closing(RocksDbStore(tmp_path / "db", num_threads=1)) as store:
        store.bulk_load(spec, iter([(np.array(KEYS), ROWS)]), "digest")
        first = store.seal("m.t")
        following = store.next_seal("m.t")
        assert (store.seal("m.t"), store.next_seal("m.t")) == (first, following)
        store.note_others("m.t", are_behind=True, seal=following)
        assert store.seal("m.t") == following != first
        assert (
            sealed_by(store.next_seal("m.t")) == sealed_by(following) == sealed_by(first) != sealed_by(new_seal(None))
        )
    with closing(RocksDbStore(tmp_path / "db", num_threads=1, read_only=True)) as reader:
        assert reader.seal("m.t") is None
        with pytest.raises(StoreError, match="open read-only"):
            reader.next_seal("m.t")
    with closing(RocksDbStore(tmp_path / "db", num_threads=1)) as store:
        assert store.seal("m.t") == following
        store.bulk_load(spec, iter([(np.array(KEYS), ROWS)]), "digest")
        assert store.seal("m.t") != following
        assert sealed_by(store.seal("m.t")) == sealed_by(following)
        store.drop_table("m.t")
        assert sealed_by(store.seal("m.t")) != sealed_by(following)


def test_what_a_load_leaves_of_another_that_ended_before_it_keeps_its_seal(redis_server):
    first, second, seal = open_store(redis_server), open_store(redis_server), new_seal(None)
    spec = TableSpec(TABLE, 3)

    def rows():
        first.bulk_load(spec, iter([(np.array(KEYS), ROWS)]), "digest")
        first.put_seal(TABLE, seal, None, has_changed=True)
        first.insert(TABLE, np.array([3]), row_of(7))
        yield np.array(KEYS), ROWS

    second.bulk_load(spec, rows(), "digest", unless_loaded=True)

    assert rows_of(first) == rows_of(second) == FILE | {3: [7.0] * 3}
    assert second.seals(TABLE) == {seal}
    assert second.loaded_from(TABLE) == "digest+changed"
