"""A Redis that comes back without rows while it is used: RocksDB answers, and gives Redis its rows again."""

import logging
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.redis_servers import wait_until
from serving.config import RedisOverflow
from serving.errors import StoreError
from serving.parameter_server import TierSettings, durable_load, late_tables, rows_beside_changes
from serving.storage import RocksDbStore
from serving.storage.redis.commands import Partition
from tests.serving.small_server import KEYS, NEW, ROWS, DurableDictStore, rows_of, serve, write_model
from tests.serving.storage.redis_stores import open_store, said

TABLE = "m.t"
PARTITIONS = 4
HASHES = [Partition(TABLE, number) for number in range(PARTITIONS)]
FILE = {key: row.tolist() for key, row in zip(KEYS, ROWS, strict=True)}
SEVEN = np.full((1, 3), 7.0, dtype=np.float32)


@pytest.fixture
def config(tmp_path):
    return write_model(tmp_path)


def redis_of(server, **options):
    return open_store(server, num_partitions=PARTITIONS, **options)


def refills(server):
    return server.counters()[TABLE].tiers[0].refills


def wait_for_refill(server, expected, times=1):
    """Look up, and get what is ``expected``, until Redis has been filled again."""

    def is_filled():
        assert rows_of(server) == expected
        return refills(server) == times

    wait_until(is_filled, "Redis is filled again")


def bring_back(server):
    """Do now what the server's thread does some time after rows were found to be lost."""
    ((_, lost),) = server._served._losable.items()
    return lost.try_to_load()


@contextmanager
def no_thread(monkeypatch):
    """What is lost waits until the test brings it back."""
    with monkeypatch.context() as patched:
        patched.setattr(late_tables, "FIRST_PAUSE_S", 3600)
        yield


@pytest.mark.usefixtures("short_pauses")
def test_a_redis_that_restarts_empty_is_filled_again_while_rocksdb_answers(forgetful, config, tmp_path, caplog):
    with serve(config, redis_of(forgetful), RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        server.insert(TABLE, np.array([3]), SEVEN)
        expected = FILE | {3: SEVEN[0].tolist()}
        with caplog.at_level(logging.WARNING):
            forgetful.kill()
            assert rows_of(server) == expected
            forgetful.start()
            wait_for_refill(server, expected)
            assert rows_of(server) == rows_of(server.stores[0]) == expected
        assert server.stores[0].count(TABLE) == len(KEYS)

    table = f"table {TABLE!r}"
    assert said(caplog, "brought back") == [f"tier redis has lost rows of {table}"]
    assert said(caplog, "all rows again") == [f"tier redis has all rows again, {table}"]
    assert said(caplog, "answers again") == [f"tier redis answers again, {table}"]


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_change_between_the_loss_and_the_filling_is_in_redis_afterwards(forgetful, config, verb):
    with serve(config, redis_of(forgetful), DurableDictStore()) as server:
        forgetful.kill()
        forgetful.start()
        if verb == "insert":
            server.insert(TABLE, np.array([3]), SEVEN)
        else:
            server.evict(TABLE, np.array([3]))
        expected = {key: row for key, row in FILE.items() if key != 3}
        expected |= {3: SEVEN[0].tolist()} if verb == "insert" else {}

        wait_for_refill(server, expected)

        assert rows_of(server.stores[0]) == expected


class Walked(DurableDictStore):
    """A store that stops in the middle of the walk over its rows, until it is told to go on."""

    def __init__(self):
        super().__init__()
        self.is_walked, self.go_on = threading.Event(), threading.Event()

    def items(self, table, batch_rows=65536):
        for number, batch in enumerate(super().items(table)):
            if number == 6:
                self.is_walked.set()
                assert self.go_on.wait(60)
            yield batch


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("layout", ["hps", "strings"])
@pytest.mark.parametrize("most_keys", [1, 65536])
def test_changes_go_on_while_redis_is_filled_and_are_in_redis_afterwards(
    redis_server, client, config, monkeypatch, caplog, layout, most_keys
):
    monkeypatch.setattr(rows_beside_changes, "MOST_KEYS", most_keys)
    slowest = Walked()
    with serve(config, redis_of(redis_server, layout=layout), slowest) as server:
        client.flushall()
        assert rows_of(server) == FILE
        assert slowest.is_walked.wait(60)

        server.insert(TABLE, np.array([2, 8]), np.repeat(SEVEN, 2, axis=0))  # one was given already, one was not
        server.insert(TABLE, np.array([777, 3]), np.repeat(SEVEN, 2, axis=0))
        server.evict(TABLE, np.array([3, 9, 5]))
        server.insert(TABLE, np.array([5]), SEVEN)
        expected = FILE | dict.fromkeys((2, 8, 777, 5), SEVEN[0].tolist())
        expected = {key: row for key, row in expected.items() if key not in (3, 9)}
        assert rows_of(server) == expected
        slowest.go_on.set()
        wait_for_refill(server, expected)

        assert rows_of(server.stores[0]) == expected
        assert server.stores[0].loaded_from(TABLE) == slowest.loaded_from(TABLE)
        server.insert(TABLE, np.array([2]), NEW)
        assert rows_of(server.stores[0], [2]) == {2: NEW[0].tolist()}
        assert refills(server) == 1
    assert not said(caplog, "not loaded")  # at the first attempt


@pytest.mark.usefixtures("short_pauses")
def test_partitions_of_which_all_rows_are_evicted_while_redis_is_filled_are_empty(redis_server, client, config, caplog):
    slowest = Walked()
    with serve(config, redis_of(redis_server), slowest) as server:
        client.flushall()
        assert rows_of(server) == FILE
        assert slowest.is_walked.wait(60)
        server.evict(TABLE, np.array(KEYS))
        slowest.go_on.set()
        wait_for_refill(server, {})

        assert rows_of(server.stores[0]) == {}
        assert server.stores[0].loaded_from(TABLE) == slowest.loaded_from(TABLE)
    assert not said(caplog, "not loaded")


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("end", ["unload_model", "close"])
def test_a_filling_under_way_ends_with_its_model_or_server(redis_server, client, config, monkeypatch, end):
    began, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(durable_load, "LOAD_BATCH_ROWS", 5)

    class Slow(DurableDictStore):
        def items(self, table, batch_rows=65536):
            for batch in super().items(table):
                began.set()
                assert go_on.wait(60)
                yield batch

    server = serve(config, redis_of(redis_server), Slow())
    client.flushall()
    assert rows_of(server) == FILE
    assert began.wait(60)
    ending = threading.Thread(target=server.close if end == "close" else lambda: server.unload_model("m"))
    ending.start()
    wait_until(lambda: not server._served._late._tables, "the filling is cancelled")
    go_on.set()
    ending.join(60)

    assert not ending.is_alive()
    assert client.keys() == []
    server.close()


def test_redis_is_filled_from_rocksdb_though_the_models_files_are_gone(redis_server, client, config, monkeypatch):
    with no_thread(monkeypatch), serve(config, redis_of(redis_server), DurableDictStore()) as server:
        for file in config.tables[0].file.iterdir():
            file.unlink()
        client.flushall()

        assert bring_back(server)

        assert rows_of(server.stores[0]) == FILE


def test_where_redis_is_to_keep_what_it_has_nothing_is_brought_back(redis_server, client, config, monkeypatch):
    with serve(config, redis_of(redis_server), DurableDictStore()):
        pass
    kept = {"redis": TierSettings(is_initialized=False)}
    with serve(config, redis_of(redis_server), DurableDictStore(), settings=kept) as server:
        client.flushall()
        assert rows_of(server) == FILE

        assert not server._served._losable
        assert not server._served._late._tables


def test_rows_that_go_again_and_again_are_brought_back_now_and_then_only(redis_server, client, config, monkeypatch):
    monkeypatch.setattr(late_tables, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(late_tables, "LONGEST_PAUSE_S", 0.3)
    with serve(config, redis_of(redis_server), DurableDictStore()) as server:
        client.flushall()
        wait_for_refill(server, FILE)
        ((_, lost),) = server._served._losable.items()
        assert not lost.is_due

        client.flushall()
        wait_for_refill(server, FILE, times=2)

        monkeypatch.setattr(late_tables, "LONGEST_PAUSE_S", 3600)
        wait_until(lambda: lost.is_due, "it has rested")
        client.flushall()
        wait_for_refill(server, FILE, times=3)
        client.flushall()
        for _ in range(3):
            assert rows_of(server) == FILE
        assert (refills(server), lost.is_due) == (3, False)


def test_a_redis_that_evicts_rows_is_filled_again_where_its_records_are_gone(redis_server, client, config, monkeypatch):
    overflow = RedisOverflow(margin_rows=100)
    with no_thread(monkeypatch), serve(config, redis_of(redis_server, overflow=overflow), DurableDictStore()) as server:
        client.flushall()
        assert rows_of(server) == FILE
        with pytest.raises(StoreError, match="has lost the rows"):
            rows_of(server.stores[0])

        assert bring_back(server)

        assert rows_of(server.stores[0]) == FILE


@pytest.mark.parametrize("gone", ["everything", "rows"])
@pytest.mark.parametrize("asks_first", [True, False])
def test_of_processes_with_rocksdbs_of_their_own_the_one_that_changed_rows_does_not_trust_the_others(
    redis_server, client, config, monkeypatch, gone, asks_first
):
    stores = [redis_of(redis_server), redis_of(redis_server)]
    with (
        no_thread(monkeypatch),
        serve(config, stores[0], DurableDictStore()) as server,
        serve(config, stores[1], DurableDictStore()) as other,
    ):
        server.insert(TABLE, np.array([3]), SEVEN)
        expected = FILE | {3: SEVEN[0].tolist()}
        client.delete(*(one.values for one in HASHES)) if gone == "rows" else client.flushall()
        assert bring_back(other)
        assert rows_of(stores[1]) == FILE

        if asks_first:
            assert rows_of(server) == expected
        assert bring_back(server)

        assert [rows_of(store) for store in stores] == [expected] * 2
        for one in (other, server):  # neither finds anything lost in what the other has brought
            assert bring_back(one)
            assert rows_of(one) == expected
        assert [refills(one) for one in (server, other)] == [1, 1]


def test_who_follows_a_rocksdb_catches_up_before_redis_is_filled_from_it(
    redis_server, client, config, tmp_path, monkeypatch
):
    stores = [redis_of(redis_server), redis_of(redis_server)]
    with no_thread(monkeypatch), serve(config, stores[0], RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        follower = RocksDbStore(tmp_path / "db", read_only=True, num_threads=1)
        with serve(config, stores[1], follower) as other:
            server.insert(TABLE, np.array([3]), SEVEN)
            client.flushall()

            assert bring_back(other)

            assert rows_of(stores[1]) == FILE | {3: SEVEN[0].tolist()}
            assert rows_of(server) == FILE | {3: SEVEN[0].tolist()}


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_a_process_loads_that_starts_while_redis_is_empty_is_not_trusted_by_one_that_has_changed_rows(
    redis_server, client, config, tmp_path, monkeypatch, is_shared
):
    stores = [redis_of(redis_server), redis_of(redis_server)]
    with no_thread(monkeypatch), serve(config, stores[0], RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        # A follower that has seen the database before the change, or a process with a database of its own.
        late = RocksDbStore(tmp_path / "db", read_only=True, num_threads=1) if is_shared else DurableDictStore()
        server.insert(TABLE, np.array([3]), SEVEN)
        expected = FILE | {3: SEVEN[0].tolist()}
        client.flushall()
        with serve(config, stores[1], late) as other:
            assert rows_of(other) == FILE

            assert rows_of(server) == expected
            assert bring_back(server)

            assert [rows_of(store) for store in stores] == [expected] * 2
            for one in (other, server):
                assert bring_back(one)
                assert rows_of(one) == expected


def test_who_loads_other_files_after_another_process_does_not_miss_in_these_what_it_has_changed_before(
    redis_server, config, tmp_path
):
    stores = [redis_of(redis_server), redis_of(redis_server)]
    with serve(config, stores[0], DurableDictStore()) as server, serve(config, stores[1], DurableDictStore()) as other:
        server.insert(TABLE, np.array(KEYS), ROWS)
        retrained = write_model(tmp_path, ROWS + 1)
        for one in (other, server):
            one.unload_model("m")
            one.load_model(retrained)
            if one is other:
                other.insert(TABLE, np.array([3]), SEVEN)

        assert rows_of(stores[0], [3]) == {3: SEVEN[0].tolist()}
        server.insert(TABLE, np.array([4]), SEVEN)
        assert rows_of(stores[1], [3, 4]) == {3: SEVEN[0].tolist(), 4: SEVEN[0].tolist()}


def test_a_follower_whose_writer_goes_by_other_files_by_now_brings_nothing_back(
    redis_server, client, config, tmp_path, monkeypatch, caplog
):
    with no_thread(monkeypatch), serve(config, RocksDbStore(tmp_path / "db", num_threads=1)) as writer:
        follower = RocksDbStore(tmp_path / "db", read_only=True, num_threads=1)
        with serve(config, redis_of(redis_server), follower) as server:
            writer.unload_model("m")
            other = write_model(tmp_path, ROWS + 1)
            writer.load_model(other)
            client.flushall()

            assert not bring_back(server)

            assert "rocksdb: table 'm.t': was loaded from other files" in caplog.text
            assert rows_of(server) == FILE
            assert client.keys() == []
