"""A slot of a Redis cluster moves to another node while its rows are read and changed."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from redis.crc import key_slot

from benchmarks.redis_servers import RedisServers, wait_until
from serving.errors import StoreError, StoreTimeoutError
from serving.storage import Marker, TableSpec
from serving.storage.redis.commands import Partition
from tests.serving.small_server import KEYS, ROWS, DurableDictStore, rows_of, serve, write_model
from tests.serving.storage.redis_stores import IMPATIENT, open_store

TABLE = "m.t"
FILE = {key: row.tolist() for key, row in zip(KEYS, ROWS, strict=True)}
SEVEN = np.full((1, 3), 7.0, dtype=np.float32)


@pytest.fixture
def cluster(redis_binary, tmp_path):
    cluster = RedisServers(tmp_path / "cluster", masters=2)
    yield cluster
    cluster.kill()


@contextmanager
def moving(cluster, slot):
    """A slot that moves, until the block ends; gives what moves its keys."""
    clients = [node.client() for node in cluster.nodes]
    source, target = clients if slot < 8192 else clients[::-1]
    names = source.cluster("MYID").decode(), target.cluster("MYID").decode()
    target.cluster("SETSLOT", slot, "IMPORTING", names[0])
    source.cluster("SETSLOT", slot, "MIGRATING", names[1])

    def move():
        keys = source.cluster("GETKEYSINSLOT", slot, 100)
        if keys:
            source.migrate("127.0.0.1", target.connection_pool.connection_kwargs["port"], keys, 0, 5000)

    yield move
    move()
    for client in (target, source):
        client.cluster("SETSLOT", slot, "NODE", names[1])
        client.close()


@contextmanager
def moving_for(cluster, slot, seconds):
    """A slot that has begun to move when the block begins, and has moved after ``seconds``."""
    has_begun = threading.Event()

    def move():
        with moving(cluster, slot):
            has_begun.set()
            time.sleep(seconds)

    thread = threading.Thread(target=move)
    thread.start()
    has_begun.wait()
    yield
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("is_cache", [True, False], ids=["a cache", "the source of truth"])
@pytest.mark.parametrize("have_moved", [False, True])
def test_rows_are_read_and_changed_while_their_slot_moves(cluster, tmp_path, have_moved, is_cache):
    redis = open_store(cluster.nodes[0], num_partitions=1)
    tiers = [redis, DurableDictStore()] if is_cache else [redis]
    with serve(write_model(tmp_path), *tiers) as server:
        with moving(cluster, key_slot(Partition(TABLE, 0).values)) as move:
            if have_moved:
                move()
            server.insert(TABLE, np.array([3]), SEVEN)
            server.evict(TABLE, np.array([4]))
            expected = {key: row for key, row in FILE.items() if key != 4} | {3: SEVEN[0].tolist()}
            assert rows_of(server) == rows_of(redis) == expected
            server.evict(TABLE, np.array(KEYS))
            assert rows_of(redis, [3]) == {}

        server.insert(TABLE, np.array([3]), SEVEN)
        assert rows_of(server) == rows_of(redis) == {3: SEVEN[0].tolist()}
        assert server.counters()[TABLE].tier_errors == {}


SPEC = TableSpec(TABLE, 3)


def batches():
    return iter([(np.array(KEYS), ROWS)])


class FileTruth:
    """A source of truth that has the files' rows."""

    def marker(self):
        return Marker("digest", len(KEYS))

    def batches(self):
        return batches()


def change(store, verb):
    """What Redis refuses while a slot moves: scripts of several keys of which one is nowhere."""
    if verb == "load":
        store.load(SPEC, batches(), Marker("digest"), keep=False)
    elif verb == "fill":
        assert store.fill(SPEC, FileTruth(), starting=False)
    else:
        store.insert(TABLE, np.array(KEYS), ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "fill", "insert into an empty partition"])
def test_what_is_refused_while_a_slot_moves_waits_until_it_has_moved(cluster, verb):
    redis = open_store(cluster.nodes[0], num_partitions=1, timeout_ms=10_000)
    redis.open_table(SPEC, 0)
    if verb != "load":
        redis.load(SPEC, batches(), Marker("digest"), keep=False)
        redis.evict(TABLE, np.array(KEYS))
    one = Partition(TABLE, 0)
    if verb == "fill":
        redis.serve_as_cache(SPEC, FileTruth())
        for node in cluster.nodes:
            with node.client() as client:
                client.flushall()

    with moving_for(cluster, key_slot(one.values), seconds=1):
        change(redis, verb)

    assert rows_of(redis) == FILE
    assert redis.marker(TABLE).digest == "digest"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "insert into an empty partition"])
def test_a_slot_that_does_not_stop_moving_is_waited_for_no_longer_than_the_time_out(cluster, verb):
    redis = open_store(cluster.nodes[0], num_partitions=1, timeout_ms=1500)
    redis.open_table(SPEC, 0)
    with moving(cluster, key_slot(Partition(TABLE, 0).values)):
        began = time.monotonic()
        with pytest.raises(StoreError, match="its slot is still moving to another node"):
            change(redis, verb)
        assert time.monotonic() - began >= 1

    change(redis, verb)
    assert rows_of(redis) == FILE


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["fetch", "insert"])
def test_a_slot_that_moves_to_a_silent_node_costs_one_timeout(cluster, verb):
    change(open_store(cluster.nodes[0], num_partitions=1), "load")
    redis = open_store(cluster.nodes[0], num_partitions=1, **IMPATIENT)
    redis.open_table(SPEC, 0)
    calls = {"fetch": lambda: rows_of(redis), "insert": lambda: redis.insert(TABLE, np.array([3]), SEVEN)}
    slot = key_slot(Partition(TABLE, 0).values)
    target = cluster.nodes[slot < 8192]
    with moving(cluster, slot) as move:
        move()
        target.freeze()
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=r"ASK .*timed out"):
            calls[verb]()
        took_s = time.monotonic() - began
        target.thaw()

    assert took_s < 1.9
    wait_until(lambda: is_answered(redis), "the moved rows are read again")


def is_answered(redis):
    try:
        return rows_of(redis).keys() == FILE.keys()
    except StoreError:
        return False
