"""Processes that are killed or that end, and databases that are restored: the next start finds every acknowledged row.

Redis is a cache, and RocksDB is the source of truth.
"""

import pytest

from serving.storage import SharedMemoryStore, TableSpec
from tests.serving.small_server import ROWS, held_by, rows_of, write_model
from tests.serving.storage.contract import (
    FILE,
    PARTITIONS,
    TABLE,
    Server,
    WriterProcess,
    redis_of,
    rocksdb_in,
    serve,
    serve_in_front,
)


def is_dirty(database):
    """Whether the database says that each cache may have missed a write; no server has it open."""
    store = rocksdb_in(database)
    try:
        return store.table(TableSpec(TABLE, 3)).marker().current_caches == ()
    finally:
        store.close()


def after(change):
    """The rows of the file after ``insert 3 7`` or ``evict 3``."""
    rows = {key: row for key, row in FILE.items() if key != 3}
    return rows | ({3: [7.0] * 3} if change.startswith("insert") else {})


def assert_every_tier_has(config, redis, database, rows):
    """Start a server; Redis and RocksDB must both hold these rows at once."""
    with serve_in_front(config, redis, database, rows) as server:
        server.check()
        assert server.tier.hits == len(rows)
        assert [held_by(store) for store in server.stores] == [rows] * 2
        server.insert([1], 11)
        server.check()


@pytest.mark.parametrize("change", ["insert 3 7", "evict 3"])
@pytest.mark.parametrize("first", ["nothing", "a change"])
def test_a_writer_that_is_killed_between_the_two_writes_leaves_redis_to_be_filled_again(
    redis_server, config, database, change, first
):
    rows = after(change) | ({5: [9.0] * 3} if first == "a change" else {})
    with WriterProcess(config, database, redis_server.port) as writer:
        if first == "a change":
            writer.do("insert 5 9")
        writer.do("stop change")
        writer.send(change)
        writer.expect("taken")
        writer.kill()
    assert rows_of(redis_of_file(redis_server), [3]) == {3: FILE[3]}  # Redis has not heard of the change

    assert_every_tier_has(config, redis_of(redis_server), database, rows)


def redis_of_file(redis_server):
    """A store that answers whatever Redis holds."""
    store = redis_of(redis_server)
    store.table(TableSpec(TABLE, 3)).open(0)
    return store


@pytest.mark.parametrize("change", ["insert 3 7", "evict 3"])
@pytest.mark.parametrize("redis_then", ["thaws", "restarts"])
def test_a_writer_that_is_killed_while_redis_is_frozen_leaves_redis_to_be_filled_again(
    own_server, config, database, change, redis_then
):
    with WriterProcess(config, database, own_server.port) as writer:
        writer.do("insert 5 9")
        own_server.freeze()
        writer.send(change)
        writer.expect("taken")
        writer.kill()
    if redis_then == "restarts":  # without the bytes that wait in its socket
        own_server.kill()
        own_server.start()
    else:
        own_server.thaw()

    assert_every_tier_has(config, redis_of(own_server), database, after(change) | {5: [9.0] * 3})


def test_a_filling_that_is_cut_short_brings_no_evicted_row_back(redis_server, client, config, database):
    with WriterProcess(config, database, redis_server.port) as writer:
        writer.do("insert 5 9")
        writer.do("stop items")
        client.flushall()
        writer.do("lookup")
        writer.expect("taken")
        writer.kill()
    raw_keys = [key for number in range(PARTITIONS) for key in client.hkeys(f"hps_et{{hps_et.{TABLE}/p{number}}}v")]
    partly_filled = [int.from_bytes(key, "little") for key in raw_keys]
    assert 0 < len(partly_filled) < len(FILE)
    rows = FILE | {5: [9.0] * 3}
    with Server(serve(config, rocksdb_in(database)), rows) as server:
        server.evict(partly_filled[:1])
        rows = server.rows
    client.delete(*client.keys("*.lease"))  # as time does

    assert_every_tier_has(config, redis_of(redis_server), database, rows)


def test_a_restored_checkpoint_fills_redis_with_the_restored_rows(redis_server, config, database, tmp_path):
    copy = tmp_path / "copy"
    server = serve_in_front(config, redis_of(redis_server), database)
    server.insert([3], 7)
    server.evict([4])
    restored = server.rows
    server.stores[1].checkpoint(copy)
    server.insert([3], 8)
    server.insert([4, 777], 9)
    server.evict([5])
    server.close()

    assert not is_dirty(database)
    assert is_dirty(copy)
    assert_every_tier_has(config, redis_of(redis_server), copy, restored)


@pytest.mark.parametrize("change", ["insert 3 7", "evict 3"])
def test_a_clean_close_says_that_the_caches_took_every_write_and_a_kill_does_not(
    redis_server, config, database, change
):
    with WriterProcess(config, database, redis_server.port) as writer:
        writer.do(change)
        writer.kill()
    assert is_dirty(database)

    serve_in_front(config, redis_of(redis_server), database).close()
    assert not is_dirty(database)

    with serve_in_front(config, redis_of(redis_server), database, after(change)) as server:
        server.insert([5], 9)
        assert server.stores[1].tables[TABLE].marker().current_caches == ()
    assert not is_dirty(database)
    assert_every_tier_has(config, redis_of(redis_server), database, after(change) | {5: [9.0] * 3})


@pytest.mark.parametrize("change", ["insert", "evict"])
def test_what_a_process_without_caches_wrote_is_in_redis_after_the_next_start(redis_server, config, database, change):
    serve_in_front(config, redis_of(redis_server), database).close()
    assert not is_dirty(database)
    with Server(serve(config, rocksdb_in(database))) as server:
        server.insert([3], 7) if change == "insert" else server.evict([3])
        rows = server.rows
    assert is_dirty(database)

    assert_every_tier_has(config, redis_of(redis_server), database, rows)
    assert not is_dirty(database)


@pytest.mark.parametrize("missed", [True, False])
def test_a_clean_close_speaks_only_for_the_caches_of_its_process(own_server, config, database, tmp_path, missed):
    with serve_in_front(config, redis_of(own_server), database) as server:
        server.insert([5], 9)
        if missed:
            own_server.kill()
        server.insert([3], 7)
        server.evict([4])
        rows = server.rows
    if missed:
        own_server.start()
    for _ in range(2):
        shared = SharedMemoryStore("shared", 2**26, auto_remove=False, folder=tmp_path)
        with Server(serve(config, shared, rocksdb_in(database)), rows) as server:
            server.check()
            assert server.tier.hits == len(rows)
            server.insert([6], 8)
            server.evict([7])
            rows = server.rows

    assert_every_tier_has(config, redis_of(own_server), database, rows)


def test_files_that_were_replaced_and_come_back_bring_no_old_row_back(redis_server, config, database, tmp_path):
    with serve_in_front(config, redis_of(redis_server), database) as server:
        server.insert([3], 7)
    (tmp_path / "other").mkdir()
    serve(write_model(tmp_path / "other", ROWS + 1), rocksdb_in(database)).close()
    serve(config, rocksdb_in(database)).close()

    assert_every_tier_has(config, redis_of(redis_server), database, FILE)


def test_a_redis_that_another_redis_stood_in_for_is_filled_again(redis_server, forgetful, config, database):
    rows = FILE
    for number, redis in enumerate([redis_server, forgetful, redis_server]):
        assert_every_tier_has(config, redis_of(redis), database, rows)
        with serve_in_front(config, redis_of(redis), database, rows | {1: [11.0] * 3}) as server:
            server.insert([3], number)
            server.evict([5 + number])
            rows = server.rows


def test_a_change_that_redis_missed_when_its_process_ends_is_in_redis_after_the_next_start(
    own_server, config, database
):
    with serve_in_front(config, redis_of(own_server), database) as server:
        server.insert([5], 9)
        own_server.kill()
        server.insert([3], 7)
        server.evict([4])
        rows = server.rows
    assert is_dirty(database)
    own_server.start()

    assert_every_tier_has(config, redis_of(own_server), database, rows)
    assert not is_dirty(database)
