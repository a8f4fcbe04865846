"""Rows that another program wrote to Redis or RocksDB in HPS's layout, without markers: a model load keeps them."""

import struct

import numpy as np
import pytest

from serving.cli.main import main
from serving.model.hps_hash import mix
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer, TierSettings
from tests.serving.small_server import KEYS, ROWS, RefusingMemory, held_by, write_model
from tests.serving.storage.contract import (
    FILE,
    PARTITIONS,
    TABLE,
    Server,
    late_redis,
    redis_of,
    rocksdb_in,
    serve,
    serve_in_front,
)
from tests.serving.storage.redis_stores import IMPATIENT
from tests.tools.redis_servers import wait_until

OTHERS = {777: [5.0] * 3, -5: [6.0] * 3}  # the files do not have these keys
OLD = {3: [4.0] * 3}  # and they have another row for this key
KEPT = "holds rows that Hotrow did not load; the files' rows are inserted over them and every other row is kept"


def write_to_redis(client, rows, table=TABLE, partitions=PARTITIONS):
    """Write rows with redis-py, as HPS does."""
    for key, row in rows.items():
        place = int(mix(np.array([key]))[0] % np.uint64(partitions))
        client.hset(f"hps_et{{hps_et.{table}/p{place}}}v", struct.pack("<q", key), struct.pack(f"<{len(row)}f", *row))


def write_to_rocksdb(folder, rows):
    """Write rows with rocksdict, as HPS does."""
    import rocksdict

    raw = rocksdict.Rdict(str(folder), rocksdict.Options(raw_mode=True))
    family = raw.create_column_family(f"hps_et.{TABLE}", rocksdict.Options(raw_mode=True))
    for key, row in rows.items():
        family[struct.pack("<q", key)] = struct.pack("<3f", *row)
    del family
    raw.close()


def kept_lines(caplog):
    return [line for line in caplog.messages if KEPT in line]


def test_a_load_into_redis_alone_keeps_the_rows_of_another_program(redis_server, client, config, caplog):
    write_to_redis(client, OTHERS | OLD)
    for _ in range(2):
        with Server(serve(config, redis_of(redis_server)), FILE | OTHERS) as server:
            server.check()
            assert held_by(server.stores[0]) == server.rows
    assert len(kept_lines(caplog)) == 1


def test_a_load_into_rocksdb_keeps_the_rows_of_another_program(config, database, caplog):
    write_to_rocksdb(database, OTHERS | OLD)
    for _ in range(2):
        with Server(serve(config, rocksdb_in(database)), FILE | OTHERS) as server:
            server.check()
            assert held_by(server.stores[0]) == server.rows
    assert len(kept_lines(caplog)) == 1


def test_rocksdb_takes_the_rows_that_only_redis_has(redis_server, client, config, database, caplog):
    write_to_redis(client, OTHERS | OLD)
    for _ in range(2):
        with serve_in_front(config, redis_of(redis_server), database, FILE | OTHERS) as server:
            server.check()
            assert [held_by(store) for store in server.stores] == [server.rows] * 2
    assert len(kept_lines(caplog)) == 1
    assert kept_lines(caplog)[0].endswith(f"; the source of truth took {len(OTHERS)} of them")
    client.flushall()
    with Server(serve(config, rocksdb_in(database)), FILE | OTHERS) as server:
        server.check()


def test_redis_gets_the_rows_of_another_program_that_rocksdb_has(redis_server, client, config, database, caplog):
    write_to_rocksdb(database, OTHERS | OLD)
    write_to_redis(client, {777: [9.0] * 3} | OLD)  # RocksDB's row is the true one
    with serve_in_front(config, redis_of(redis_server), database, FILE | OTHERS) as server:
        server.check()
        assert [held_by(store) for store in server.stores] == [server.rows] * 2
        server.insert([777], 8)
        server.evict([-5])
        server.check()
        rows = server.rows
    assert len(kept_lines(caplog)) == 2  # one for each store
    with serve_in_front(config, redis_of(redis_server), database, rows) as server:
        server.check()
        assert [held_by(store) for store in server.stores] == [rows] * 2


@pytest.mark.usefixtures("short_pauses")
def test_the_rows_of_another_program_are_kept_in_a_redis_that_comes_late(own_server, config, database, caplog):
    with own_server.client() as client:
        write_to_redis(client, OTHERS | OLD)
    own_server.kill()
    with serve_in_front(config, late_redis(own_server.address), database, own=tuple(FILE)) as server:
        server.insert([3], 7)
        server.evict([4])
        server.check()
        changed = []
        copies = server.server.copies(TABLE, lambda keys: changed.extend(keys.tolist()))
        read = copies.read([np.array([777])], is_request=False)
        assert not read.found.any()  # a GPU cache notes such a key as absent
        own_server.start()
        rows = {key: row for key, row in (FILE | OTHERS | {3: [7.0] * 3}).items() if key != 4}
        wait_until(lambda: server.stores[0].tables[TABLE].is_whole, "Redis is filled")
        server.check()
        assert [held_by(store) for store in server.stores] == [rows] * 2
        assert sorted(changed) == sorted(OTHERS)
    assert len(kept_lines(caplog)) == 1


@pytest.mark.usefixtures("short_pauses")
def test_a_read_only_database_leaves_the_rows_of_another_program_in_redis_to_the_process_that_writes(
    redis_server, client, config, database, caplog
):
    with Server(serve(config, rocksdb_in(database))):
        pass
    write_to_redis(client, OTHERS | OLD)
    before = {name: client.hgetall(name) for name in client.keys("*v")}
    reader = rocksdb_in(database, read_only=True)
    with Server(serve(config, redis_of(redis_server), reader), FILE, own=tuple(FILE)) as server:
        wait_until(lambda: "the process that writes the source of truth fills it" in caplog.text, "the log says so")
        server.check()
        assert server.tier.hits == 0
        assert {name: client.hgetall(name) for name in client.keys("*v")} == before
        with serve_in_front(config, redis_of(redis_server), database, FILE | OTHERS) as writer:
            writer.check()
            assert [held_by(store) for store in writer.stores] == [FILE | OTHERS] * 2
            wait_until(lambda: server.stores[0].tables[TABLE].is_whole, "the reader uses Redis")
            server.check()
            assert server.tier.hits > 0


@pytest.mark.parametrize("alone", [False, True])
def test_erase_model_erases_the_rows_of_another_program(redis_server, client, config, database, alone):
    write_to_redis(client, OTHERS | OLD)
    stores = [redis_of(redis_server)] if alone else [redis_of(redis_server), rocksdb_in(database)]
    with Server(serve(config, *stores), FILE | OTHERS) as server:
        server.check()
        server.server.erase_model("m")
        assert client.keys() == []
    stores = [redis_of(redis_server)] if alone else [redis_of(redis_server), rocksdb_in(database)]
    with Server(serve(config, *stores)) as server:
        server.check()


@pytest.mark.parametrize("alone", [False, True])
def test_hotrow_load_with_replace_erases_the_rows_of_another_program(
    redis_server, client, model, ps_file, tmp_path, alone
):
    keys = np.array([10**9, *list(model.tables[0])[:2]])
    table, unknown = "dcn.table0", keys[:1]
    write_to_redis(client, {10**9: [5.0] * 4}, table, partitions=16)
    file = ps_file(redis_server.port, alone)
    with ParameterServer.from_config(file) as server:
        assert server.lookup(table, unknown)[0].tolist() == [[5.0] * 4]
    write_sparse_directory(tmp_path / "new_rows", keys[1:], np.full((2, 4), 7, np.float32))

    assert main(["load", str(file), table, str(tmp_path / "new_rows"), "--replace"]) == 0

    with ParameterServer.from_config(file) as server:
        rows, found = server.lookup(table, keys)
        assert found.tolist() == [False, True, True]
        assert rows[1:].tolist() == [[7.0] * 4] * 2
        assert [sum(part.size for part, _ in store.tables[table].items()) for store in server.stores] == [2] * len(
            server.stores
        )


def test_a_cache_that_missed_a_write_to_a_table_of_another_program_is_filled_at_the_next_start(
    own_server, config, database
):
    """The table has no marker of a load, so the flag for its caches must be kept without one."""
    write_to_rocksdb(database, OLD | OTHERS)
    kept = {"rocksdb": TierSettings(fills_at_start=False)}
    rows = OLD | OTHERS
    with Server(serve(config, redis_of(own_server, **IMPATIENT), rocksdb_in(database), settings=kept), rows) as server:
        server.check()
        own_server.freeze()
        server.insert([777], 8)
        server.evict([-5])
        server.check()
        rows = server.rows
        server.close()
        own_server.thaw()
    with Server(serve(config, redis_of(own_server), rocksdb_in(database), settings=kept), rows) as server:
        server.check()
        assert [held_by(store) for store in server.stores] == [rows] * 2


def test_a_checkpoint_of_a_table_of_another_program_fills_its_caches(redis_server, client, config, tmp_path):
    write_to_rocksdb(tmp_path / "db", OLD | OTHERS)

    def served(folder):
        stores = redis_of(redis_server), rocksdb_in(folder)
        kept = {"rocksdb": TierSettings(fills_at_start=False)}
        return Server(serve(config, *stores, settings=kept), OLD | OTHERS)

    with served(tmp_path / "db") as server:
        server.stores[-1].checkpoint(tmp_path / "copy")
        server.insert([777], 8)
        server.check()
    with served(tmp_path / "copy") as server:
        server.check()


def test_files_that_replace_changed_rows_are_a_line_in_the_log(config, database, tmp_path, caplog):
    with Server(serve(config, rocksdb_in(database))) as server:
        server.insert([777], 8)
    write_model(tmp_path, rows=ROWS + 1)
    with Server(
        serve(config, rocksdb_in(database)), {key: row.tolist() for key, row in zip(KEYS, ROWS + 1, strict=True)}
    ) as server:
        server.check()
    assert [line for line in caplog.messages if "replace all rows, including rows written since" in line]


def test_ram_in_front_of_another_programs_table_is_filled_again_after_a_missed_change(config, tmp_path):
    write_to_rocksdb(tmp_path / "db", FILE)

    fast, kept = RefusingMemory(), {"rocksdb": TierSettings(fills_at_start=False)}
    with Server(serve(config, fast, rocksdb_in(tmp_path / "db"), settings=kept), FILE) as server:
        assert held_by(fast) == FILE
        fast.refuses = True
        server.insert([3], 8)
        fast.refuses = False
        wait_until(lambda: server.server.counters()[TABLE].tiers[0].refills == 1, "RAM is filled again")

        server.check()
        assert held_by(fast) == server.rows
