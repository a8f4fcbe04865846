"""Several processes, each with a RocksDB of its own, on one Redis: none answers an older row than it acknowledged."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving.parameter_server import models as served_models
from serving.storage import RocksDbStore
from tests.serving.small_server import KEYS, UNKNOWN, held_by, rows_of, write_model
from tests.serving.storage.contract import (
    FILE,
    TABLE,
    Server,
    WriterProcess,
    redis_of,
    rocksdb_in,
    serve,
    serve_in_front,
)
from tests.tools.redis_servers import RedisServer, wait_until

pytestmark = pytest.mark.usefixtures("short_pauses")
MINE, YOURS = [*KEYS[::2], 777], [*KEYS[1::2], -5]


@pytest.fixture
def start(redis_server, config, tmp_path, monkeypatch):
    """Start a server with a RocksDB of this name; it fills Redis again only where it ``fills``."""
    servers = []

    def start(name, own, fills=True, redis=redis_server, rows=FILE):
        monkeypatch.setattr(served_models, "LOOK_INTERVAL_S", 0.02 if fills else 3600)
        servers.append(serve_in_front(config, redis_of(redis), tmp_path / name, rows, own=own))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def has(server, rows):
    """Whether Redis is whole and holds these rows."""
    return server.stores[0].tables[TABLE].is_whole and held_by(server.stores[0]).items() >= rows.items()


@pytest.mark.parametrize("writes", [False, True])
def test_servers_that_start_together_fill_redis_and_answer_their_own_rows(redis_server, config, tmp_path, writes):
    together = threading.Barrier(3)

    def run(number):
        together.wait(60)
        own = KEYS[number::3]
        with serve_in_front(config, redis_of(redis_server), tmp_path / f"db{number}", own=own) as server:
            server.check()
            for value in range(20 if writes else 0):
                server.insert(own, value)
                server.check()
            if writes:
                server.evict(own[:1])
            else:
                server.wait_until(lambda: has(server, FILE), "Redis is filled")
            together.wait(60)
            server.check()
            together.wait(60)

    with ThreadPoolExecutor(3) as threads:
        for _ in threads.map(run, range(3)):
            pass


def test_a_server_that_writes_while_another_starts_keeps_its_rows(start):
    mine = start("mine", MINE)
    began, stop = threading.Event(), threading.Event()

    def write():
        value = 0
        while not stop.is_set():
            value += 1
            mine.insert([3, 777], value)
            mine.evict([5])
            mine.insert([5], value)
            mine.check()
            began.set()

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        assert began.wait(60)
        for number in range(5):
            yours = start(f"yours{number}", YOURS)
            yours.insert([4], number)
            yours.check()
        stop.set()
        writing.result(60)
    mine.check()
    yours.check()
    wait_until(lambda: has(mine, mine.rows), "Redis has every row of the writer")


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_server_does_not_trust_partitions_that_another_filled_after_it_had_written(client, start, asks_first):
    mine, yours = start("mine", MINE, fills=False), start("yours", YOURS)
    mine.insert([3, 777], 7)
    mine.evict([5])
    client.flushall()
    if asks_first:
        mine.check()
    wait_until(lambda: rows_of(yours.server) == FILE and has(yours, FILE), "the other server has filled Redis")

    mine.check()
    mine.insert([1], 8)
    mine.check()
    yours.check()


def test_a_server_brings_its_rows_back_after_another_filled_redis(client, start):
    mine, yours = start("mine", MINE), start("yours", YOURS)
    mine.insert([3, 777], 7)
    mine.evict([5])
    for _ in range(3):
        client.flushall()
        with mine.asked(), yours.asked():
            wait_until(lambda: has(mine, mine.rows), "Redis has the rows of the server that wrote")
    # The other server's own RocksDB still has the evicted row.
    expected = mine.rows | {key: FILE[key] for key in [*YOURS, 5] if key in FILE}
    wait_until(lambda: rows_of(yours.server) == expected, "the server that never wrote takes Redis as it is")


def test_servers_that_have_both_written_never_answer_older_rows_of_their_own(client, start):
    mine, yours = start("mine", MINE), start("yours", YOURS)
    with mine.asked(), yours.asked():
        for value in range(10):
            mine.insert([3, 777], value)
            yours.insert([4, -5], value)
            client.flushall()
            mine.evict([5])
            yours.evict([6])
            mine.insert([5], value)


def test_a_server_does_not_trust_an_old_redis_that_another_found_to_be_whole(redis_binary, start, tmp_path):
    redis = RedisServer(tmp_path / "redis")
    try:
        mine, yours = start("mine", MINE, fills=False, redis=redis), start("yours", YOURS, redis=redis)
        with redis.client() as client:
            client.save()
        mine.insert([3, 777], 7)
        mine.evict([5])
        redis.kill()
        redis.start()
        yours.wait_until(lambda: has(yours, FILE), "the other server, which never wrote, takes Redis as it is")

        mine.check()
        yours.check()
    finally:
        redis.kill()


def test_a_start_that_fills_redis_again_does_not_make_another_server_answer_old_rows(
    redis_server, config, start, tmp_path
):
    with WriterProcess(config, tmp_path / "yours", redis_server.port) as writer:
        writer.do("insert 4 6")
        writer.kill()  # its next start fills Redis again
    mine = start("mine", MINE)
    mine.insert([3, 777], 7)
    mine.evict([5])
    with mine.asked():
        # Key 4 is left out: a refill by the server that wrote drops the row that only the other RocksDB has.
        yours = start("yours", [key for key in YOURS if key != 4])
        yours.check()
        mine.insert([1], 8)
        mine.wait_until(lambda: has(mine, mine.rows), "Redis has the rows of the server that wrote")


def test_a_follower_fills_redis_with_the_rows_of_its_writer(redis_server, client, config, tmp_path, monkeypatch):
    with Server(serve(config, rocksdb_in(tmp_path / "db"))) as writer:
        follower = rocksdb_in(tmp_path / "db", read_only=True)
        with Server(serve(config, redis_of(redis_server), follower)) as server:
            writer.insert([3, 777], 7)
            client.flushall()
            rows = writer.rows
            wait_until(
                lambda: rows_of(server.server) == rows and held_by(server.stores[0]) == rows,
                "Redis has the writer's rows",
            )


def test_a_follower_does_not_bring_a_removed_row_back_into_redis(redis_server, client, config, tmp_path):
    with serve_in_front(config, redis_of(redis_server), tmp_path / "db") as writer:
        follower = rocksdb_in(tmp_path / "db", read_only=True)
        with serve(config, redis_of(redis_server), follower, promote=True) as server:
            writer.evict([3])
            client.delete(*client.keys("*.hotrow.removed"))  # as time does
            assert 3 in rows_of(server, [3])  # its view of the database is older
            assert server.wait_for_promotions()

            writer.check()
            assert held_by(writer.stores[0]) == writer.rows


def test_a_server_of_old_files_bypasses_a_redis_of_other_files_and_leaves_it_alone(
    redis_server, config, start, tmp_path, caplog
):
    old = start("old", (*KEYS, *UNKNOWN))
    (tmp_path / "retrained").mkdir()
    retrained = write_model(tmp_path / "retrained", np.full((len(KEYS), 3), 5, np.float32))
    rows = dict.fromkeys(KEYS, [5.0] * 3)
    with serve_in_front(retrained, redis_of(redis_server), tmp_path / "new", rows) as new:
        with old.asked(), new.asked():
            old.check()
            old.insert([3, 777], 7)
            old.evict([4])
            new.insert([5], 8)
            wait_until(lambda: "was loaded from other files" in caplog.text, "the log says so")
        assert held_by(new.stores[0]) == new.rows
    rows = old.rows
    old.close()
    old = start("old", (*KEYS, *UNKNOWN), rows=rows)  # a start replaces them
    old.check()
    assert held_by(old.stores[0]) == rows


@pytest.mark.parametrize("alone", [True, False])
def test_servers_that_load_one_model_keep_what_the_first_has_changed(redis_server, config, tmp_path, alone):
    def load(name):
        stores = [redis_of(redis_server), *([] if alone else [RocksDbStore(tmp_path / name, num_threads=1)])]
        return serve(config, *stores)

    with Server(load("first")) as first:
        first.insert([3], 7)
        first.evict([4])
        with Server(load("second"), first.rows) as second:
            assert held_by(second.stores[0]) == first.rows
            if alone:
                second.check()
            first.check()


@pytest.mark.parametrize("new_files", [False, True])
def test_a_follower_whose_writer_loads_other_files_leaves_no_old_rows_in_redis(
    redis_server, client, config, tmp_path, caplog, new_files
):
    (tmp_path / "retrained").mkdir()
    retrained = write_model(tmp_path / "retrained", np.full((len(KEYS), 3), 5, np.float32))
    rows = dict.fromkeys(KEYS, [5.0] * 3)
    with Server(serve(config, rocksdb_in(tmp_path / "db"))) as writer:
        follower = rocksdb_in(tmp_path / "db", read_only=True)
        with Server(serve(config, redis_of(redis_server), follower)) as server:
            writer.server.unload_model("m")
            writer.server.load_model(retrained)
            client.flushall()
            server.check()
            server.wait_until(lambda: "has loaded it from other files" in caplog.text, "the log says so")
            assert not any(client.hget(name, "digest") for name in client.keys("*.hotrow"))
            server.check()
            assert rows_of(writer.server) == rows
    with serve_in_front(
        retrained if new_files else config, redis_of(redis_server), tmp_path / "new", rows if new_files else FILE
    ) as new:
        new.check()
        assert held_by(new.stores[0]) == new.rows
