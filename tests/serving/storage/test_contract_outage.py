"""Redis in front of RocksDB is down, frozen, full or empty: no change fails, and no answer is old."""

import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from serving.config import RedisOverflow
from serving.errors import StoreError
from serving.parameter_server import models as served_models
from serving.parameter_server import tier_table, truth
from serving.storage.redis.commands import RedisNodeError
from serving.storage.redis.nodes import RedisNodes, Reply
from serving.storage.redis.overflow import Overflow
from serving.storage.redis.table import RedisTable
from tests.serving.small_server import KEYS, HookedRocksDb, held_by
from tests.serving.storage.contract import (
    ENDS,
    FILE,
    STARTS,
    TABLE,
    Server,
    redis_of,
    serve,
    serve_in_front,
)
from tests.serving.storage.redis_stores import IMPATIENT, said
from tests.serving.storage.tiers import QUICK_FOLDER
from tests.tools.redis_servers import RedisServer, wait_until

pytestmark = pytest.mark.usefixtures("short_pauses")
AGAIN = f"tier redis was refilled, table {TABLE!r}"


@pytest.fixture(params=["nothing", "an old RDB file", "an old log"])
def comes_back(request, redis_binary, tmp_path):
    """A Redis that has ``nothing`` or old rows when it is restarted: ``save()`` fixes them, ``restart()`` restarts."""
    kind, folder = request.param, tmp_path / "redis"
    options = ("--appendonly", "yes", "--appendfsync", "always") if kind == "an old log" else ()
    server = RedisServer(folder, *options)
    copies = {}

    def save():
        if kind == "an old RDB file":
            with server.client() as client:
                client.save()
        if kind == "an old log":
            copies.update({file: file.read_bytes() for file in folder.rglob("*") if file.is_file()})

    def restart():
        server.kill()
        for file, content in copies.items():
            file.write_bytes(content)
        server.start()

    server.save, server.restart = save, restart
    yield server
    server.kill()


@pytest.mark.parametrize("written", ["before and after", "after"])
def test_a_redis_that_restarts_with_nothing_or_old_rows_is_filled_again_and_no_answer_is_old(
    comes_back, config, database, caplog, written
):
    with serve_in_front(config, redis_of(comes_back), database) as server:
        if written != "after":
            server.insert([2, 3], 6)
        comes_back.save()
        server.insert([3], 7)
        server.evict([4])
        server.insert([777], 8)
        server.check()

        comes_back.restart()

        server.check()
        server.wait_for_redis()
        server.insert([5], 9)
        server.check()
        assert held_by(server.stores[0]) == held_by(server.stores[1]) == server.rows
    assert AGAIN in said(caplog, "tier redis")


def test_a_redis_that_restarts_with_every_row_of_a_table_that_never_changed_is_not_filled_again(
    own_server, config, database, caplog
):
    with serve_in_front(config, redis_of(own_server), database) as server:
        own_server.kill()
        own_server.start()
        server.check()
        server.wait_for_redis()
        assert server.tier.refills == 0
    assert AGAIN not in said(caplog, "tier redis")


def test_rows_that_are_removed_from_a_redis_that_restarts_are_found_though_the_table_never_changed(
    own_server, config, database
):
    with serve_in_front(config, redis_of(own_server), database) as server:
        with own_server.client() as client:
            client.delete(*client.keys("*v"))
        own_server.kill()
        own_server.start()
        server.check()
        server.wait_for_redis()


@pytest.mark.parametrize("change", ["insert", "evict"])
def test_a_change_between_the_loss_and_the_filling_is_in_redis_afterwards(forgetful, config, database, change):
    with serve_in_front(config, redis_of(forgetful), database) as server:
        forgetful.kill()
        forgetful.start()
        server.insert([3], 7) if change == "insert" else server.evict([3])
        server.check()
        server.wait_for_redis()


@pytest.mark.parametrize("change", ["insert", "evict"])
def test_changes_during_a_filling_are_in_redis_afterwards(redis_server, client, config, tmp_path, monkeypatch, change):
    is_walked, go_on = threading.Event(), threading.Event()

    class Walked(HookedRocksDb):
        def on_items(self, table, batch_rows=65536):
            for number, batch in enumerate(super().on_items(table, 3)):
                if number == 2:
                    is_walked.set()
                    assert go_on.wait(60)
                yield batch

    with Server(serve(config, redis_of(redis_server), Walked(tmp_path / "db", num_threads=1))) as server:
        client.flushall()
        server.check()
        assert is_walked.wait(60)
        for value, key in enumerate(KEYS):  # some of which have been filled, and some have not
            server.insert([key], value) if change == "insert" or key % 2 else server.evict([key])
            server.check()
        go_on.set()
        server.wait_for_redis()


@pytest.mark.parametrize("outage", ["down", "frozen"])
def test_changes_succeed_while_redis_does_not_answer_and_lookups_are_right_throughout(
    own_server, config, database, caplog, outage
):
    with serve_in_front(config, redis_of(own_server, **IMPATIENT), database) as server:
        server.insert([2], 6)
        with server.asked() as answers:
            own_server.kill() if outage == "down" else own_server.freeze()
            server.insert([3], 7)
            server.evict([4])
            server.insert([4, 5, 777], 8)
            server.evict([5])
            server.check()
            before = answers()
            wait_until(lambda: answers() > before, "lookups are answered meanwhile")
            assert server.tier.errors > 0
            assert said(caplog, "tier redis") == [STARTS]
            own_server.start() if outage == "down" else own_server.thaw()
            server.wait_for_redis()
            server.insert([6], 9)
        server.check()
        assert held_by(server.stores[0]) == held_by(server.stores[1]) == server.rows
        assert server.tier.refills >= 1
    assert [line for line in said(caplog, "tier redis") if line != AGAIN] == [STARTS, ENDS]


@pytest.mark.parametrize("change", ["insert", "evict"])
def test_a_redis_that_freezes_during_a_change_holds_it_up_no_longer_than_its_time_out(
    own_server, config, database, monkeypatch, change
):
    with serve_in_front(config, redis_of(own_server, **IMPATIENT), database) as server:
        method = getattr(RedisTable, change)

        def freeze(table, *arguments):
            own_server.freeze()
            return method(table, *arguments)

        monkeypatch.setattr(RedisTable, change, freeze)
        began = time.monotonic()
        server.insert([3], 7) if change == "insert" else server.evict([3])
        assert time.monotonic() - began < 25  # a call that waited for the thaw would not end
        monkeypatch.undo()
        server.check()
        assert server.tier.timeouts > 0
        own_server.thaw()
        server.wait_until(lambda: server.stores[0].tables[TABLE].is_whole, "Redis is filled again")
        assert held_by(server.stores[0]) == server.rows


@pytest.mark.parametrize("end", ["unload_model", "close"])
def test_a_filling_under_way_ends_with_its_model_or_server(redis_server, client, config, tmp_path, monkeypatch, end):
    began, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(truth, "LOAD_BATCH_ROWS", 5)

    class Slow(HookedRocksDb):
        def on_items(self, table, batch_rows=65536):
            for batch in super().on_items(table, batch_rows):
                began.set()
                assert go_on.wait(60)
                yield batch

    server = Server(serve(config, redis_of(redis_server), Slow(tmp_path / "db", num_threads=1)))
    client.flushall()
    server.check()
    assert began.wait(60)
    (table,) = server.server._tables.values()
    ending = threading.Thread(target=server.close if end == "close" else lambda: server.server.unload_model("m"))
    ending.start()
    wait_until(lambda: table.clock.is_gone, "the filling is cancelled")
    go_on.set()
    ending.join(60)

    assert not ending.is_alive()
    assert client.keys("*.lease") == []
    server.close()
    with serve_in_front(config, redis_of(redis_server), tmp_path / "db") as again:
        again.wait_for_redis()


def test_redis_is_filled_from_rocksdb_though_the_models_files_are_gone(redis_server, client, config, database):
    with serve_in_front(config, redis_of(redis_server), database) as server:
        for file in config.tables[0].file.iterdir():
            file.unlink()
        client.flushall()
        server.wait_for_redis()


@pytest.mark.parametrize("written", [True, False])
def test_a_redis_that_is_flushed_while_it_is_used_is_filled_again(
    redis_server, client, config, database, caplog, written
):
    with serve_in_front(config, redis_of(redis_server), database) as server, server.asked():
        for value in range(3):
            if written:
                server.insert([3, 777], value)
                server.evict([4])
            client.flushall()
            server.wait_for_redis()
        wait_until(lambda: server.tier.refills >= 3, "the last refill is counted")
        assert server.tier.errors == 0
    assert AGAIN in said(caplog, "tier redis")


def test_a_redis_that_evicts_keys_itself_gives_no_default_for_a_row_that_rocksdb_has(
    redis_binary, config, database, tmp_path
):
    redis = RedisServer(tmp_path / "redis", "--maxmemory-policy", "allkeys-random")
    try:
        with serve_in_front(config, redis_of(redis), database) as server, redis.client() as client:
            with server.asked() as answers:
                for value in range(5):
                    client.config_set("maxmemory", 1)  # less than it holds: it evicts every key that it can
                    server.insert([3, 777], value)
                    server.evict([4])
                    before = answers()
                    wait_until(lambda before=before: answers() > before, "lookups are answered meanwhile")
                    client.config_set("maxmemory", 0)
            server.wait_for_redis()
    finally:
        redis.kill()


def test_a_redis_that_is_full_fails_no_call(redis_server, client, config, database):
    with serve_in_front(config, redis_of(redis_server), database) as server, server.asked():
        server.insert([2], 6)
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(ResponseError, match="maxmemory"):
                client.set("more", "rows")
            server.insert([3, 777], 7)
            server.evict([4])
            server.insert([4], 8)
            server.check()
        finally:
            client.config_set("maxmemory", 0)
        server.wait_for_redis()


def test_rows_that_go_again_and_again_are_brought_back_now_and_then_only(
    redis_server, client, config, database, monkeypatch
):
    monkeypatch.setattr(tier_table, "REST_RATIO", 1e9)
    with serve_in_front(config, redis_of(redis_server), database) as server:
        client.flushall()
        server.wait_for_redis()
        for _ in range(3):
            client.flushall()
            server.check()
            time.sleep(0.1)
        assert server.tier.refills == 1
        assert server.rows == FILE


@pytest.mark.parametrize("written", [True, False])
def test_a_redis_with_an_overflow_policy_is_filled_again(redis_server, client, config, database, written):
    redis = redis_of(redis_server, overflow=RedisOverflow(margin_rows=2))
    with serve_in_front(config, redis, database) as server:
        if written:
            server.insert([3, 777], 7)
            server.evict([4])
        client.flushall()
        server.check()
        server.wait_until(
            lambda: redis.tables[TABLE].is_whole and redis.tables[TABLE].count() > 0, "Redis is filled again"
        )
        before = server.tier.hits
        server.check()
        assert server.tier.hits > before
        assert held_by(redis).items() <= server.rows.items()


def test_a_redis_that_dies_before_an_overflow_is_trimmed_is_used_again(own_server, config, database, monkeypatch):
    trim = Overflow.trim

    def die(overflow, *arguments):
        monkeypatch.setattr(Overflow, "trim", trim)
        own_server.kill()
        return trim(overflow, *arguments)

    redis = redis_of(own_server, overflow=RedisOverflow(margin_rows=100))
    with serve_in_front(config, redis, database) as server:
        monkeypatch.setattr(Overflow, "trim", die)
        server.insert([3, 777], 7)
        server.check()
        own_server.start()
        server.wait_for_redis()


@pytest.mark.parametrize("during", ["the rows are read", "the marker is read"])
def test_a_change_that_redis_misses_during_a_lookup_stays_missed(redis_server, config, database, monkeypatch, during):
    monkeypatch.setattr(served_models, "LOOK_INTERVAL_S", 3600)
    run_each, changes = RedisNodes.run_each, [3]

    def interposed(nodes, commands):
        names = {command.name for command in commands}
        if "HSET" in names:
            return [Reply(RedisNodeError("the connection is lost")) for _ in commands]
        replies = run_each(nodes, commands)
        if changes and ("HMGET" if during == "the rows are read" else "HGETALL") in names:
            server.insert([changes.pop()], 7)
        if "HMGET" in names:
            for reply in replies:  # as where the commands were sent again
                reply.run_id = ""
        return replies

    with serve_in_front(config, redis_of(redis_server), database) as server:
        monkeypatch.setattr(RedisNodes, "run_each", interposed)
        server.check()
        monkeypatch.undo()
        assert not changes
        server.check()
        assert not server.stores[0].tables[TABLE].is_whole


def test_a_redis_that_misses_a_change_before_any_partition_is_asked_is_filled_again(
    redis_server, config, database, monkeypatch
):
    run_each = RedisNodes.run_each

    def interposed(nodes, commands):
        if any(command.name == "HSET" for command in commands):
            raise RedisNodeError("the nodes of the cluster are unknown")
        return run_each(nodes, commands)

    with serve_in_front(config, redis_of(redis_server), database) as server:
        with monkeypatch.context() as patch:
            patch.setattr(RedisNodes, "run_each", interposed)
            server.insert([3, 777], 7)
            server.check()
            server.evict([4])
        server.check()
        server.wait_for_redis()
        assert server.tier.refills == 1


class Story:
    """A server, what is done to it and to its Redis, and the rows that it must answer."""

    def __init__(self, start, redis):
        self._start, self._redis, self._saved = start, redis, None
        self.server = start(FILE)

    def insert(self, key, number):
        self.server.insert([key], number)

    def evict(self, key, number):
        self.server.evict([key])

    def save(self, key, number):
        with self._redis.client() as client:
            client.save()
        self._saved = (self._redis.folder / "dump.rdb").read_bytes()

    def restart(self, key, number):
        """Redis has the rows of the last ``save`` then."""
        self._redis.kill()
        if self._saved is not None:
            (self._redis.folder / "dump.rdb").write_bytes(self._saved)
        self._redis.start()

    def flush(self, key, number):
        with self._redis.client() as client:
            client.flushall()

    def load_again(self, key, number):
        (config,) = self.server.server.models()
        self.server.server.unload_model("m")
        self.server.server.load_model(config)

    def start_again(self, key, number):
        self.server.close()
        until = time.monotonic() + 20
        while True:
            try:
                self.server = self._start(self.server.rows)
                return
            except StoreError as err:  # a background filling of the closed server may still read RocksDB
                if "already open for writing, in this process" not in str(err) or time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def fill(self, key, number):
        self.server.wait_until(lambda: self.server.stores[0].tables[TABLE].is_whole, "Redis is filled")


DEEDS = [name for name in vars(Story) if not name.startswith("_")]


@pytest.mark.slow
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deeds=st.lists(st.tuples(st.sampled_from(DEEDS), st.sampled_from(KEYS[:4])), max_size=12))
def test_whatever_happens_to_redis_every_row_is_the_one_that_was_acknowledged_last(redis_binary, config, deeds):
    with TemporaryDirectory(dir=QUICK_FOLDER) as folder:
        redis = RedisServer(Path(folder) / "redis")
        database = Path(folder) / "db"
        story = Story(lambda rows: serve_in_front(config, redis_of(redis), database, rows), redis)
        try:
            for number, (deed, key) in enumerate(deeds):
                getattr(story, deed)(key, number)
                story.server.check()
            story.server.wait_for_redis()
        finally:
            story.server.close()
            redis.kill()
