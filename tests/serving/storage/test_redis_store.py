"""The Redis store: HPS's bytes, loads and their markers, and tables that it refuses."""

import logging
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from serving.config import RedisConfig
from serving.errors import MissingExtraError, StoreError
from serving.model.hps_hash import mix
from serving.storage import Marker, RedisStore, TableSpec
from serving.storage.redis.nodes import RedisNodes
from tests.serving.storage.redis_stores import KEYS, OPENED, ROWS, SPEC, loaded_store, open_store
from tests.tools.redis_servers import free_port

TABLE, DIM = SPEC.name, SPEC.dim
PARTITIONS = 16


@pytest.fixture
def store(redis_server):
    return open_store(redis_server)


def rows_of(keys, value=0.0):
    """float32[N, DIM] that can be told from the key."""
    return (np.asarray(keys, dtype=np.float64)[:, None] % 1000 + value + np.arange(DIM)).astype(np.float32)


def load(store, keys, digest="digest", value=0.0, batch_rows=100, spec=SPEC):
    keys = np.asarray(keys, dtype=np.int64)
    parts = (keys[start : start + batch_rows] for start in range(0, keys.size, batch_rows))
    batches = ((part, rows_of(part, value)) for part in parts)
    store.table(spec).load(batches, Marker(digest), keep=False)


def fetch(store, keys):
    out = np.full((len(keys), DIM), np.nan, dtype=np.float32)
    found = store.tables[TABLE].fetch(np.asarray(keys, dtype=np.int64), out)
    return out, found


def place(key, partitions=PARTITIONS):
    return int(mix(np.array([key], dtype=np.int64))[0] % np.uint64(partitions))


def hash_of(key, partitions=PARTITIONS, suffix="v"):
    return f"hps_et{{hps_et.{TABLE}/p{place(key, partitions)}}}{suffix}"


def names(client, part=""):
    """Names of everything in Redis that have ``part`` in them."""
    return {name.decode() for name in client.scan_iter(f"*{part}*")}


@pytest.mark.parametrize(("key_bytes", "code"), [(8, "<q"), (4, "<I")])
class TestLayout:
    keys = (0, 1, 255, 256, 2**31, 2**32 - 2)

    def test_what_hps_wrote_can_be_read(self, store, client, key_bytes, code):
        for key in self.keys:
            client.hset(hash_of(key), struct.pack(code, key), struct.pack("<4f", *rows_of([key])[0]))

        store.table(TableSpec(TABLE, DIM, key_bytes)).open(0)

        out, found = fetch(store, [*self.keys, 77])
        assert found.tolist() == [True] * len(self.keys) + [False]
        assert out.tolist() == [*rows_of(self.keys).tolist(), [0.0] * DIM]
        assert store.tables[TABLE].count() == len(self.keys)
        assert store.tables[TABLE].marker() is None

    def test_hps_can_read_what_was_inserted(self, store, client, key_bytes, code):
        store.table(TableSpec(TABLE, DIM, key_bytes)).open(0)

        store.tables[TABLE].insert(np.array(self.keys), rows_of(self.keys))

        for key in self.keys:
            assert client.hget(hash_of(key), struct.pack(code, key)) == struct.pack("<4f", *rows_of([key])[0])
        assert names(client) == {hash_of(key) for key in self.keys}

    def test_hps_can_read_what_was_loaded(self, store, client, key_bytes, code):
        load(store, self.keys, spec=TableSpec(TABLE, DIM, key_bytes))

        for key in self.keys:
            assert client.hget(hash_of(key), struct.pack(code, key)) == struct.pack("<4f", *rows_of([key])[0])
            assert client.ttl(hash_of(key)) == -1


def test_a_key_that_four_bytes_cannot_hold_is_absent_and_is_not_inserted(store):
    store.table(TableSpec(TABLE, DIM, 4)).open(0)
    store.tables[TABLE].insert(np.array([1]), rows_of([1]))

    out, found = fetch(store, [2**32 + 1, 1, -(2**32) + 1])
    with pytest.raises(StoreError, match="does not fit 4 bytes"):
        store.tables[TABLE].insert(np.array([2**32]), rows_of([0]))

    assert found.tolist() == [False, True, False]
    assert out.tolist() == [[0.0] * DIM, rows_of([1])[0].tolist(), [0.0] * DIM]
    store.tables[TABLE].evict(np.array([2**32 + 1]))


def test_rows_go_into_an_array_that_is_not_contiguous(store):
    load(store, range(10))
    out = np.full((3, 2 * DIM), np.nan, dtype=np.float32)

    found = store.tables[TABLE].fetch(np.array([3, 99, 4]), out[:, ::2])

    assert found.tolist() == [True, False, True]
    assert out[:, ::2].tolist() == [rows_of([3])[0].tolist(), [0.0] * DIM, rows_of([4])[0].tolist()]


@pytest.mark.parametrize("max_batch_size", [1, 7, 65536])
def test_however_many_keys_one_command_takes_the_rows_are_the_same(redis_server, max_batch_size):
    store = open_store(redis_server, max_batch_size=max_batch_size)
    load(store, range(200))

    out, found = fetch(store, range(-10, 210))

    assert found.tolist() == [False] * 10 + [True] * 200 + [False] * 10
    assert (out[10:210] == rows_of(range(200))).all()
    store.tables[TABLE].evict(np.arange(150, 300))
    assert sorted(key for keys, _ in store.tables[TABLE].items(13) for key in keys.tolist()) == list(range(150))


def test_the_last_of_many_duplicates_in_one_insert_wins(store):
    store.table(SPEC).open(0)
    keys = np.random.default_rng(0).integers(0, 50, 5000)
    values = np.arange(5000, dtype=np.float32)

    store.tables[TABLE].insert(keys, np.repeat(values[:, None], DIM, axis=1))

    last = dict(zip(keys.tolist(), values.tolist(), strict=True))
    assert fetch(store, list(last))[0][:, 0].tolist() == list(last.values())


def test_evicting_takes_away_what_hps_knows_of_a_key(store, client):
    load(store, [1, 2])
    client.hset(hash_of(1, suffix="t"), struct.pack("<q", 1), "12")

    store.tables[TABLE].evict(np.array([1]))

    assert client.hlen(hash_of(1, suffix="t")) == 0


class TestLoading:
    def test_a_loaded_table_is_there_in_the_next_process(self, redis_server, store):
        load(store, range(1000))

        other = open_store(redis_server)

        assert other.table(SPEC).marker().digest == "digest"
        other.table(SPEC).open(0)
        assert fetch(other, range(1001))[1].sum() == 1000
        assert (fetch(other, range(1000))[0] == rows_of(range(1000))).all()

    def test_a_load_replaces_what_the_table_held_of_whatever_dimension(self, store, client):
        store.table(TableSpec(TABLE, 2)).load(
            iter([(np.arange(50), np.ones((50, 2), np.float32))]), Marker("before"), keep=False
        )

        store.tables[TABLE].close()
        load(store, range(40, 60), "after, with a space", value=0.5)

        assert store.tables[TABLE].marker().digest == "after, with a space"
        assert sorted(np.concatenate([keys for keys, _ in store.tables[TABLE].items()])) == list(range(40, 60))
        assert (fetch(store, range(40, 60))[0] == rows_of(range(40, 60), 0.5)).all()
        assert not names(client, "loading")

    def test_an_empty_load_leaves_an_empty_table_that_counts_as_loaded(self, store):
        load(store, range(10), "before")

        store.table(SPEC).load(iter(()), Marker("nothing"), keep=False)

        assert store.tables[TABLE].marker().digest == "nothing"
        assert store.tables[TABLE].count() == 0
        assert not fetch(store, range(10))[1].any()

    def test_the_last_of_duplicates_in_a_load_wins(self, store):
        batches = [(np.array([1, 2, 1]), rows_of([1, 2, 3])), (np.array([2]), rows_of([4]))]

        store.table(SPEC).load(iter(batches), Marker("digest"), keep=False)

        assert fetch(store, [1, 2])[0].tolist() == rows_of([3, 4]).tolist()

    def test_other_processes_read_the_old_rows_until_the_load_is_whole(self, redis_server, store):
        load(store, range(100), "files")
        reader = open_store(redis_server)
        reader.table(SPEC).open(0)

        def batches():
            yield np.arange(50), rows_of(range(50), 0.5)
            assert (fetch(reader, range(100))[0] == rows_of(range(100))).all()
            yield np.arange(50, 100), rows_of(range(50, 100), 0.5)
            assert (fetch(reader, range(100))[0] == rows_of(range(100))).all()

        store.table(SPEC).load(batches(), Marker("files"), keep=False)

        assert (fetch(reader, range(100))[0] == rows_of(range(100), 0.5)).all()

    def test_a_load_that_fails_halfway_leaves_the_old_rows_and_nothing_else(self, store, client):
        load(store, range(10), "before")
        before = names(client)

        def batches():
            yield np.arange(20), rows_of(range(20), 0.5)
            raise OSError("the file ends here")

        with pytest.raises(OSError, match="the file ends here"):
            store.table(SPEC).load(batches(), Marker("after"), keep=False)

        assert store.tables[TABLE].marker().digest == "before"
        assert (fetch(store, range(10))[0] == rows_of(range(10))).all()
        assert names(client) == before

    def test_a_server_without_room_is_an_error_and_keeps_the_old_rows(self, store, client):
        load(store, range(10), "before")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2**20)
        try:
            with pytest.raises(StoreError, match="OOM command not allowed"):
                load(store, range(100_000), "after", batch_rows=10_000)
        finally:
            client.config_set("maxmemory", 0)

        assert store.tables[TABLE].marker().digest == "before"
        assert (fetch(store, range(10))[0] == rows_of(range(10))).all()
        assert not names(client, "loading")

    def test_an_error_in_a_script_begins_with_the_servers_reason(self, redis_server, store, client):
        load(store, range(10))
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreError) as full:
                store.tables[TABLE].insert(np.array([11]), rows_of([11]))
        finally:
            client.config_set("maxmemory", 0)

        reason = f"127.0.0.1:{redis_server.port}: OOM command not allowed when used memory > 'maxmemory'."
        assert full.value.reason == reason

    def test_redis_forgets_in_time_what_a_killed_load_gathered(self, store, client):
        def batches():
            yield np.arange(200), rows_of(range(200))
            gathered = names(client, "loading")
            assert len(gathered) == PARTITIONS
            assert all(0 < client.ttl(name) <= 600 for name in gathered)

        store.table(SPEC).load(batches(), Marker("digest"), keep=False)

    def test_rows_that_redis_forgot_during_the_load_are_not_taken_for_loaded(self, store, client):
        load(store, range(100), "before")

        def batches():
            yield np.arange(200), rows_of(range(200), 0.5)
            client.delete(*names(client, "loading"))

        with pytest.raises(StoreError, match="the rows gathered so far are gone"):
            store.table(SPEC).load(batches(), Marker("after"), keep=False)
        assert store.tables[TABLE].marker().digest == "before"
        assert (fetch(store, range(100))[0] == rows_of(range(100))).all()

    def test_commands_whose_answer_was_lost_may_be_sent_again(self, store, monkeypatch):
        load(store, range(100), "before")
        run = RedisNodes.run
        monkeypatch.setattr(RedisNodes, "run", lambda *args: (run(*args), run(*args))[1])

        load(store, range(50, 250), "after", value=0.5)
        store.tables[TABLE].insert(np.array([1000]), rows_of([1000]))

        assert store.tables[TABLE].marker().digest == "after"
        assert store.tables[TABLE].count() == 201
        assert (fetch(store, range(50, 250))[0] == rows_of(range(50, 250), 0.5)).all()

    def test_processes_that_load_the_same_files_at_once_do_not_disturb_each_other(self, redis_server, client):
        stores = [open_store(redis_server) for _ in range(3)]
        barrier = threading.Barrier(3)

        def load_together(store_of_thread):
            barrier.wait()
            load(store_of_thread, range(2000))

        loaders = [threading.Thread(target=load_together, args=(store_of_thread,)) for store_of_thread in stores]
        for loader in loaders:
            loader.start()
        for loader in loaders:
            loader.join()

        for store_of_thread in stores:
            assert store_of_thread.tables[TABLE].marker().digest == "digest"
            assert (fetch(store_of_thread, range(2000))[0] == rows_of(range(2000))).all()
        assert not names(client, "loading")

    def test_a_closed_table_is_not_served_and_keeps_its_rows(self, redis_server, store):
        load(store, range(100))

        store.tables[TABLE].close()

        assert TABLE not in store.tables
        assert store.table(SPEC).marker().digest == "digest"
        store.table(SPEC).open(0)
        assert fetch(store, range(100))[1].all()

    def test_a_table_is_closed_while_redis_is_down(self, own_server):
        store = open_store(own_server)
        load(store, range(100))
        own_server.kill()

        store.tables[TABLE].close()

        assert TABLE not in store.tables
        store.close()

    def test_a_dropped_table_is_gone_for_every_process(self, redis_server, store, client):
        load(store, range(100))
        client.hset(hash_of(1, suffix="t"), b"12345678", "1")
        client.set("another", "1")

        other = open_store(redis_server)
        other.erase(TABLE)

        assert names(client) == {"another"}
        assert store.table(SPEC).marker() is None


class TestWrongContent:
    def open_wrong(self, store, match, key_bytes=8):
        with pytest.raises(StoreError, match=match):
            store.table(TableSpec(TABLE, DIM, key_bytes)).open(0)
        assert TABLE not in store.tables

    def test_keys_of_another_width_are_refused(self, store, client):
        client.hset(hash_of(1), struct.pack("<q", 1), bytes(16))

        self.open_wrong(store, "a key of 8 bytes, expected 4", key_bytes=4)

    def test_rows_of_another_size_are_refused(self, store, client):
        client.hset(hash_of(1), struct.pack("<q", 1), bytes(12))

        self.open_wrong(store, "the value of key 1 has 12 bytes, 4 floats are 16")

    def test_a_partition_far_beyond_the_last_shows_another_number_of_partitions(self, store, client):
        client.hset(hash_of(1), struct.pack("<q", 1), bytes(16))
        client.hset(f"hps_et{{hps_et.{TABLE}/p31}}v", struct.pack("<q", 2), bytes(16))

        self.open_wrong(store, "was written with more than 16 partitions")

    def test_a_load_clears_the_partitions_that_a_larger_number_left(self, redis_server, store):
        writer = open_store(redis_server, num_partitions=24)
        load(writer, range(1000), "before")
        writer.close()

        load(store, range(10), "after")

        store.table(SPEC).open(0)
        assert store.tables[TABLE].count() == 10

    def test_a_partition_that_is_no_hash_is_refused(self, store, client):
        client.set(hash_of(1), "1")

        self.open_wrong(store, "WRONGTYPE")

    def test_a_value_of_another_size_names_its_key(self, store, client):
        load(store, range(100))
        client.hset(hash_of(42), struct.pack("<q", 42), bytes(15))

        with pytest.raises(StoreError, match=r"model\.table.*the value of key 42 has 15 bytes, 4 floats are 16"):
            fetch(store, range(100))
        with pytest.raises(StoreError, match="key 42 has 15 bytes"):
            list(store.tables[TABLE].items())
        assert fetch(store, [41, 43])[1].all()


@pytest.mark.parametrize("module", ["hiredis", "redis"])
def test_without_its_client_the_error_names_the_extra(redis_server, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "serving.storage.redis.nodes", raising=False)

    with pytest.raises(MissingExtraError, match=rf"{module}.*pip install 'hotrow\[redis\]'"):
        open_store(redis_server)


def test_the_client_is_imported_only_when_a_store_is_opened():
    code = "import sys, serving.storage; print({'redis', 'hiredis'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


def test_the_first_address_that_answers_is_enough(redis_server):
    closed = ("127.0.0.1", free_port())

    store = RedisStore(RedisConfig(addresses=(closed, redis_server.address)))
    OPENED.append(store)

    load(store, [1])
    assert fetch(store, [1])[1].all()


def test_no_address_that_answers_is_an_error_that_names_them_all():
    ports = [free_port(), free_port()]

    with pytest.raises(StoreError, match=f"127.0.0.1:{ports[0]}: .*refused.*127.0.0.1:{ports[1]}: .*refused"):
        RedisStore(RedisConfig(addresses=tuple(("127.0.0.1", port) for port in ports)))


def test_the_spread_over_nodes_is_logged(redis_server, store, caplog):
    with caplog.at_level(logging.INFO):
        store.table(SPEC).open(0)

    assert store.tables[TABLE].spread() == {f"127.0.0.1:{redis_server.port}": PARTITIONS}
    assert f"partitions by node: 127.0.0.1:{redis_server.port} holds 16" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_row_that_redis_gives_twice_comes_once(redis_server, monkeypatch):
    store = loaded_store(redis_server)
    run = RedisNodes.run

    def repeating(nodes, commands):
        """Redis may give a key in several answers to HSCAN."""
        replies = run(nodes, commands)
        if commands[0].name != "HSCAN":
            return replies
        ((cursor, rows),) = replies
        repeated = repeating.earlier | rows
        repeating.earlier = rows if cursor else {}
        return [(cursor, repeated)]

    repeating.earlier = {}
    monkeypatch.setattr(RedisNodes, "run", repeating)
    monkeypatch.setattr("serving.storage.redis.table.SCAN_FIELDS", 10)

    keys = np.concatenate([keys for keys, rows in store.tables[SPEC.name].items(64) if (rows == ROWS[keys]).all()])

    assert sorted(keys.tolist()) == KEYS.tolist()
