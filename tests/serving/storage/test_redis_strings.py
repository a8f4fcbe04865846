"""Rows under keys of their own, as those read them who know of no hashes."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from redis.crc import key_slot

from benchmarks.redis_servers import RedisServers
from serving.errors import StoreError
from serving.storage import TableSpec
from serving.storage.redis.commands import plain
from serving.storage.redis.strings import StringTable, slots_of
from serving.storage.store import replaced
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, fetch, loaded_store, open_store

PREFIX = b"hps_et.model.table:"


def opened(server, spec=SPEC, **options):
    store = open_store(server, layout="strings", **options)
    store.open_table(spec, 0)
    return store


@settings(deadline=None)
@given(
    arrays(
        np.uint8, st.tuples(st.integers(1, 30), st.integers(1, 24)), elements=st.sampled_from([0, 65, 123, 125, 255])
    )
)
def test_slots_are_those_of_redis_py_braces_or_not(names):
    assert slots_of(names).tolist() == [key_slot(name.tobytes()) for name in names]


@pytest.mark.parametrize(("key_bytes", "code"), [(8, "<q"), (4, "<I")])
@pytest.mark.parametrize("server", ["redis_server", "redis_cluster"])
class TestBytes:
    keys = (0, 1, 0x7B, 0x7D7B, 2**31, 2**32 - 2)

    @pytest.fixture
    def where(self, request, server):
        return request.getfixturevalue(server)

    @pytest.fixture
    def store(self, where, key_bytes):
        return opened(where.nodes[0] if isinstance(where, RedisServers) else where, TableSpec(SPEC.name, 4, key_bytes))

    def test_a_row_lies_under_the_tag_and_the_raw_key(self, store, where, code, key_bytes):
        rows = np.arange(4 * len(self.keys), dtype=np.float32).reshape(-1, 4)

        store.insert(SPEC.name, np.array(self.keys), rows)

        with where.client() as client:
            for key, row in zip(self.keys, rows, strict=True):
                assert client.get(PREFIX + struct.pack(code, key)) == row.tobytes()

    def test_what_others_wrote_is_read(self, store, where, code, key_bytes):
        rows = np.arange(4 * len(self.keys), dtype=np.float32).reshape(-1, 4)
        with where.client() as client:
            for key, row in zip(self.keys, rows, strict=True):
                client.set(PREFIX + struct.pack(code, key), row.tobytes())
            client.set(PREFIX + b"no key", "of this table")
        out = np.full((len(self.keys) + 1, 4), np.nan, dtype=np.float32)

        found = store.fetch(SPEC.name, np.array([*self.keys, 77]), out)

        assert found.tolist() == [True] * len(self.keys) + [False]
        assert out.tolist() == [*rows.tolist(), [0.0] * 4]
        assert store.count(SPEC.name) == len(self.keys)
        held = {key: row.tolist() for keys, some in store.items(SPEC.name) for key, row in zip(keys, some, strict=True)}
        assert held == dict(zip(self.keys, rows.tolist(), strict=True))


@pytest.mark.parametrize("missing", [0, 5, 999])
def test_batches_with_and_without_gaps_agree_in_a_cluster(redis_cluster, missing):
    store = loaded_store(redis_cluster.nodes[0], layout="strings")

    fetch(store)
    assert store.evict(SPEC.name, np.array([missing])) == 1

    fetch(store, np.delete(KEYS, missing))
    out = np.empty((KEYS.size, 4), dtype=np.float32)
    found = store.fetch(SPEC.name, KEYS, out)
    assert np.flatnonzero(~found).tolist() == [missing]
    assert (out[found] == ROWS[found]).all()


def test_a_value_of_another_length_is_refused_by_its_key(redis_cluster):
    store = loaded_store(redis_cluster.nodes[0], layout="strings")
    with redis_cluster.client() as client:
        client.set(PREFIX + struct.pack("<q", 42), bytes(15))

    with pytest.raises(StoreError, match=r"model\.table.*the value of key 42 has 15 bytes, 4 floats are 16"):
        fetch(store)


def test_keys_of_another_width_are_refused_and_a_drop_takes_them_away(redis_server, client):
    opened(redis_server, TableSpec(SPEC.name, 4, 4)).insert(SPEC.name, KEYS, ROWS)
    store = open_store(redis_server, layout="strings")

    with pytest.raises(StoreError, match="holds a key of 4 bytes, expected 8"):
        store.open_table(SPEC, 0)
    store.drop_table(SPEC.name)

    assert not client.keys("*")


def test_a_node_that_lost_its_rows_is_an_outage_and_not_a_lack_of_keys(redis_cluster):
    store = loaded_store(redis_cluster.nodes[0], layout="strings")
    out = np.empty((1, 4), dtype=np.float32)
    assert not store.fetch(SPEC.name, np.array([10**6]), out).any()
    with redis_cluster.nodes[1].client() as client:
        client.flushall()

    with pytest.raises(StoreError, match="has lost the rows that it was loaded with"):
        fetch(store)

    assert store.loaded_from(SPEC.name) is None


def test_a_dropped_table_leaves_its_neighbours_alone(redis_server, client):
    store = loaded_store(redis_server, layout="strings")
    other = TableSpec("model.table2", 4)
    store.bulk_load(other, iter([(KEYS, ROWS)]), "digest")

    store.drop_table(SPEC.name)

    assert store.count("model.table2") == KEYS.size
    assert not client.keys("hps_et.model.table:*")
    store.drop_table("model.table2")
    assert not client.keys("*")


def test_a_table_whose_name_has_signs_of_a_pattern_in_it_is_counted(redis_server):
    spec = TableSpec("model[a-z]*.ta?ble\\", 4)
    store = opened(redis_server, spec)

    store.insert(spec.name, KEYS, ROWS)

    assert store.count(spec.name) == KEYS.size


class TestLoading:
    """Beside readers and other loads, for which a table changes where it lies."""

    def test_a_key_that_a_load_brought_between_the_reading_and_the_asking_is_found(self, redis_server, monkeypatch):
        store = loaded_store(redis_server, layout="strings")
        other = open_store(redis_server, layout="strings")
        read = StringTable._fetch_round

        def reading(table, keys, out, found):
            """Another process loads the table after its first rows were read, and ends before anything else."""
            read(table, keys, out, found)
            monkeypatch.setattr(StringTable, "_fetch_round", read)
            other.bulk_load(SPEC, iter([(KEYS, ROWS)]), "digest")

        with redis_server.client() as client:  # as the load has removed it
            client.delete(PREFIX + struct.pack("<q", 7))
        monkeypatch.setattr(StringTable, "_fetch_round", reading)

        fetch(store, np.array([7, 8]))

    def test_while_a_table_is_loaded_a_key_that_is_absent_is_an_outage(self, redis_server):
        store = loaded_store(redis_server, layout="strings")
        other = open_store(redis_server, layout="strings")

        def batches():
            yield KEYS[:10], ROWS[:10]
            with pytest.raises(StoreError, match="has lost the rows"):
                fetch(store, np.array([10**6]))
            with pytest.raises(StoreError, match="are being replaced"):
                fetch(store)  # some of the rows are the new ones already

        other.bulk_load(SPEC, batches(), replaced("digest"))

        out = np.empty((KEYS.size, 4), dtype=np.float32)
        assert store.fetch(SPEC.name, KEYS, out).tolist() == [True] * 10 + [False] * (KEYS.size - 10)

    def test_loads_of_the_same_files_at_once_take_no_row_from_each_other(self, redis_server):
        store = open_store(redis_server, layout="strings")
        other = open_store(redis_server, layout="strings")

        def batches():
            yield KEYS[:500], ROWS[:500]
            other.bulk_load(SPEC, iter([(KEYS, ROWS)]), "digest")  # from its beginning to its end
            fetch(other)
            yield KEYS[500:], ROWS[500:]
            fetch(other)

        store.bulk_load(SPEC, batches(), "digest")

        fetch(store)
        fetch(other)
        assert store.loaded_from(SPEC.name) == other.loaded_from(SPEC.name) == "digest"

    def test_of_what_others_change_meanwhile_the_load_overwrites_and_removes_as_documented(self, redis_server):
        store = loaded_store(redis_server, layout="strings")
        other = open_store(redis_server, layout="strings")
        other.open_table(SPEC, 0)
        sevens = np.full((3, 4), 7.0, dtype=np.float32)

        def batches():
            other.insert(SPEC.name, np.array([1, 900, 5000]), sevens)  # the last is none of the rows that are loaded
            other.evict(SPEC.name, np.array([2, 901]))
            yield KEYS[:500], ROWS[:500]
            other.insert(SPEC.name, np.array([3, 902, 5001]), sevens)
            other.evict(SPEC.name, np.array([4, 903]))
            yield KEYS[500:], ROWS[500:]

        store.bulk_load(SPEC, batches(), "digest")

        out = np.empty((KEYS.size, 4), dtype=np.float32)
        found = other.fetch(SPEC.name, KEYS, out)
        assert KEYS[~found].tolist() == [4]  # removed, and stays so: its batch had been written
        assert KEYS[found & (out == 7).all(axis=1)].tolist() == [3]
        assert other.count(SPEC.name) == KEYS.size - 1
        assert other.loaded_from(SPEC.name) == "digest"  # which does not tell of the two

    @pytest.mark.parametrize("before", [TableSpec(SPEC.name, 4, 4), TableSpec(SPEC.name, 6)])
    def test_rows_of_another_form_leave_with_the_load(self, redis_server, client, before):
        earlier = open_store(redis_server, layout="strings")
        keys = np.arange(2000)
        earlier.bulk_load(before, iter([(keys, np.ones((2000, before.dim), np.float32))]), "before")

        store = loaded_store(redis_server, layout="strings")

        fetch(store)
        assert len(client.keys(PREFIX + b"*")) == KEYS.size

    def test_a_change_that_comes_during_a_load_brings_no_record_back(self, redis_server):
        store = loaded_store(redis_server, layout="strings")
        other = open_store(redis_server, layout="strings")

        def batches():
            store.mark_changed(SPEC.name)
            assert store.loaded_from(SPEC.name) is None
            yield KEYS, ROWS

        other.bulk_load(SPEC, batches(), "after, with a space")

        assert store.loaded_from(SPEC.name) == "after, with a space"
        for _ in range(2):
            other.mark_changed(SPEC.name)  # of whose files the rows are now
        assert store.loaded_from(SPEC.name) == "after, with a space+changed"
        assert not other.fetch(SPEC.name, np.array([10**6]), np.empty((1, 4), dtype=np.float32)).any()


def test_a_name_that_would_be_a_reserved_key_is_an_error_of_the_store(redis_server, client):
    store = opened(redis_server)
    client.set(PREFIX + struct.pack("<q", 2**63 - 1), bytes(16))

    with pytest.raises(StoreError, match="reserved"):
        store.count(SPEC.name)


def loaded_elsewhere(store, digest):
    """Have the records say that another process has loaded other files."""
    for record in store._tables[SPEC.name]._records:
        store._nodes.run([plain("SET", record, f"{digest} {'0' * 16}")])


@pytest.mark.slow
def test_a_slot_that_moves_is_followed(redis_binary, tmp_path):
    cluster = RedisServers(tmp_path, masters=2)
    store = loaded_store(cluster.nodes[0], layout="strings")
    keys = [PREFIX + struct.pack("<q", key) for key in KEYS.tolist()]
    moved = sorted(slot for slot in map(key_slot, keys) if slot < 8192)[0]
    source, target = (node.client() for node in cluster.nodes)
    names = source.cluster("MYID").decode(), target.cluster("MYID").decode()

    target.cluster("SETSLOT", moved, "IMPORTING", names[0])
    source.cluster("SETSLOT", moved, "MIGRATING", names[1])
    fetch(store)
    inside = [key for key in keys if key_slot(key) == moved]
    source.migrate("127.0.0.1", cluster.nodes[1].port, inside, 0, 5000)
    fetch(store)  # the source says ASK
    store.insert(SPEC.name, KEYS, ROWS)
    assert store.evict(SPEC.name, KEYS) == KEYS.size
    store.insert(SPEC.name, KEYS, ROWS)
    loaded_elsewhere(store, "retrained")
    for change in (lambda: store.insert(SPEC.name, KEYS, ROWS), lambda: store.evict(SPEC.name, KEYS)):
        with pytest.raises(StoreError, match="retrained"):
            change()
    loaded_elsewhere(store, "digest")
    for client in (target, source):
        client.cluster("SETSLOT", moved, "NODE", names[1])
    fetch(store)  # the source says MOVED
    fetch(store)

    (group,) = store._nodes.topology.grouped(np.array([moved, 16383], dtype=np.uint16))
    assert group.tolist() == [0, 1]  # on one node, as the store knows by now
    source.close()
    target.close()
    cluster.kill()
