"""A slot of a Redis cluster moves to another node while its rows are read and changed."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from redis.crc import key_slot

from serving.errors import StoreError, StoreTimeoutError
from serving.storage import Marker, TableSpec
from serving.storage.redis.commands import Partition
from tests.serving.small_server import KEYS, ROWS, DurableDictStore, errors_of, rows_of, serve, write_model
from tests.serving.storage.contract import FILE, TABLE, moving, nodes_of
from tests.serving.storage.redis_stores import IMPATIENT, Truth, open_store
from tests.tools.redis_servers import wait_until

SEVEN = np.full((1, 3), 7.0, dtype=np.float32)


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
def test_rows_are_read_and_changed_while_their_slot_moves(two_masters, tmp_path, have_moved, is_cache):
    redis = open_store(two_masters.nodes[0], num_partitions=1)
    tiers = [redis, DurableDictStore()] if is_cache else [redis]
    with serve(write_model(tmp_path), *tiers) as server:
        with moving(two_masters, key_slot(Partition(TABLE, 0).values)) as move:
            if have_moved:
                move()
            server.insert(TABLE, np.array([3]), SEVEN)
            server.evict(TABLE, np.array([4]))
            expected = {key: row for key, row in FILE.items() if key != 4} | {3: SEVEN[0].tolist()}
            assert rows_of(server) == expected
            assert rows_of(redis).items() <= expected.items()
            server.evict(TABLE, np.array(KEYS))
            assert rows_of(redis, [3]) == {}

        server.insert(TABLE, np.array([3]), SEVEN)
        assert rows_of(server) == {3: SEVEN[0].tolist()}
        wait_until(lambda: rows_of(redis) == rows_of(server), "Redis has every row")
        assert errors_of(server, TABLE) == {}


@pytest.mark.slow
def test_a_change_that_a_node_took_while_its_slot_moved_is_not_lost_if_the_node_goes_back_in_time(
    two_masters, tmp_path
):
    redis = open_store(two_masters.nodes[0], num_partitions=1)
    slot = key_slot(Partition(TABLE, 0).values)
    _, target = nodes_of(two_masters, slot)
    with serve(write_model(tmp_path), redis, DurableDictStore()) as server:
        server.insert(TABLE, np.array([4]), SEVEN)
        with moving(two_masters, slot) as move:
            move()
            with target.client() as client:
                client.save()
            server.insert(TABLE, np.array([3]), SEVEN)
            target.kill()
            target.start()
            two_masters.wait()

        expected = FILE | dict.fromkeys([3, 4], SEVEN[0].tolist())
        assert rows_of(server) == expected
        wait_until(lambda: rows_of(redis) == expected, "Redis has every row")
        assert rows_of(server) == expected


SPEC = TableSpec(TABLE, 3)


def batches():
    return iter([(np.array(KEYS), ROWS)])


TRUTH = Truth(np.array(KEYS), ROWS)


def change(store, verb):
    """What Redis refuses while a slot moves: scripts of several keys of which one is nowhere."""
    if verb == "load":
        store.table(SPEC).load(batches(), Marker("digest"), keep=False)
    elif verb == "fill":
        assert store.table(SPEC).fill(TRUTH, starting=False)
    else:
        store.tables[TABLE].insert(np.array(KEYS), ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "fill", "insert into an empty partition"])
def test_what_is_refused_while_a_slot_moves_waits_until_it_has_moved(two_masters, verb):
    redis = open_store(two_masters.nodes[0], num_partitions=1, timeout_ms=10_000)
    redis.table(SPEC).open(0)
    if verb != "load":
        redis.table(SPEC).load(batches(), Marker("digest"), keep=False)
        redis.tables[TABLE].evict(np.array(KEYS))
    partition = Partition(TABLE, 0)
    if verb == "fill":
        redis.table(SPEC).serve_as_cache(TRUTH)
        for node in two_masters.nodes:
            with node.client() as client:
                client.flushall()

    with moving_for(two_masters, key_slot(partition.values), seconds=1):
        change(redis, verb)

    assert rows_of(redis) == FILE
    assert redis.tables[TABLE].marker().digest == "digest"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "insert into an empty partition"])
def test_a_slot_that_does_not_stop_moving_is_waited_for_no_longer_than_the_time_out(two_masters, verb):
    redis = open_store(two_masters.nodes[0], num_partitions=1, timeout_ms=1500)
    redis.table(SPEC).open(0)
    with moving(two_masters, key_slot(Partition(TABLE, 0).values)):
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"its slot is still moving to another node|timed out"):
            change(redis, verb)
        assert time.monotonic() - began >= 1

    change(redis, verb)
    assert rows_of(redis) == FILE


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["fetch", "insert"])
def test_a_slot_that_moves_to_a_silent_node_costs_one_timeout(two_masters, verb):
    change(open_store(two_masters.nodes[0], num_partitions=1), "load")
    redis = open_store(two_masters.nodes[0], num_partitions=1, **IMPATIENT)
    redis.table(SPEC).open(0)
    calls = {"fetch": lambda: rows_of(redis), "insert": lambda: redis.tables[TABLE].insert(np.array([3]), SEVEN)}
    slot = key_slot(Partition(TABLE, 0).values)
    _, target = nodes_of(two_masters, slot)
    with moving(two_masters, slot) as move:
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
