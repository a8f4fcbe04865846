"""Nodes that die, come back, change their parts or keep silent."""

import logging
import math
import re
import socket
import threading
import time
from contextlib import contextmanager, suppress
from unittest import mock

import numpy as np
import pytest
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, ResponseError, TryAgainError

from serving.config import RedisConfig
from serving.errors import StoreError, StoreTimeoutError
from serving.storage import RedisStore
from serving.storage.redis import nodes as redis_nodes
from serving.storage.redis.commands import Partition
from serving.storage.redis.nodes import Reply
from serving.storage.redis.rows import Partitions
from tests.serving.storage.redis_stores import IMPATIENT, KEYS, ROWS, SPEC, fetch, loaded_store, open_store
from tests.tools.redis_servers import wait_until


@contextmanager
def readers(store, count=3):
    """Threads that read all the while: how often each was answered, and keys of which an answer was wrong."""
    stop, wrong, answered = threading.Event(), [], [0] * count

    def read(number):
        rng = np.random.default_rng(number)
        while not stop.is_set():
            keys = rng.choice(KEYS, int(rng.integers(1, 400)))
            out = np.full((keys.size, 4), np.nan, dtype=np.float32)
            try:
                found = store.tables[SPEC.name].fetch(keys, out)
            except StoreError:
                continue
            if not found.all() or (out != ROWS[keys]).any():
                wrong.append(keys)
            answered[number] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield answered, wrong
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def all_are_answered(answered):
    before = list(answered)
    wait_until(lambda: all(a > b for a, b in zip(answered, before, strict=True)), "all readers are answered")


def ask_to_take_over(replica, holds, what):
    """Ask a replica to take its master's place, until ``holds``: Redis gives up after 5 s, and tells nobody."""
    asked_s = -math.inf

    def has_taken_over():
        nonlocal asked_s
        if holds():
            return True
        if time.monotonic() - asked_s > 10:
            with (
                replica.client() as client,
                suppress(ResponseError),
            ):  # it is no replica yet, or its master is not there
                client.cluster("FAILOVER")
            asked_s = time.monotonic()
        return False

    wait_until(has_taken_over, what)


def answers(store):
    try:
        fetch(store)
    except StoreError:
        return False
    return True


def masters(store):
    return [(node.host, node.port) for node in store.nodes.topology.client.get_primaries()]


def test_a_server_that_is_down_is_an_error_with_its_address_and_is_used_again_when_it_is_back(own_server):
    store = loaded_store(own_server)
    fetch(store)
    where = f"redis: table 'model.table': 127.0.0.1:{own_server.port}: cannot connect: Connection refused"

    own_server.kill()
    for _ in range(2):
        with pytest.raises(StoreError, match=re.escape(where)):
            fetch(store)
    own_server.start()

    wait_until(lambda: answers(store), "the store answers again")
    fetch(store)


def test_connections_that_a_restart_broke_cost_no_answer(own_server):
    store = loaded_store(own_server)
    barrier = threading.Barrier(3)

    def fetch_together():
        barrier.wait()
        fetch(store)

    for _ in range(2):  # so that the pool has several connections, all of which break at once
        threads = [threading.Thread(target=fetch_together) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    own_server.kill()
    own_server.start()
    with own_server.client() as client:
        wait_until(lambda: client.info("persistence")["loading"] == 0, "the rows are loaded")

    for _ in range(5):
        fetch(store)


def test_readers_never_get_anothers_rows_while_the_server_dies_and_comes_back(own_server):
    store = loaded_store(own_server, num_node_connections=2)

    with readers(store, count=4) as (answered, wrong):
        for _ in range(3):
            all_are_answered(answered)
            own_server.kill()
            own_server.start()
        all_are_answered(answered)

    assert not wrong


def test_one_lookup_waits_for_a_silent_server_which_is_used_again_when_it_answers(own_server):
    loaded_store(own_server)
    store = open_store(own_server, **IMPATIENT)
    store.table(SPEC).open(0)
    own_server.freeze()

    with pytest.raises(StoreTimeoutError, match=f"127.0.0.1:{own_server.port}: no reply: timed out$"):
        fetch(store)
    skipped = f"127.0.0.1:{own_server.port}: no reply: timed out in an earlier call; it is being probed$"
    probed_s = time.monotonic() + 2.0  # the pause has ended, and the probe is not answered
    while time.monotonic() < probed_s:
        with pytest.raises(StoreError, match=skipped) as caught:
            fetch(store)
        assert not isinstance(caught.value, StoreTimeoutError)  # it did not wait again
        time.sleep(0.02)

    own_server.thaw()
    wait_until(lambda: answers(store), "the store answers again")


def test_a_caller_waits_for_a_connection_no_longer_than_it_may(redis_server, monkeypatch):
    store = loaded_store(redis_server, num_node_connections=1)
    pool = store.nodes.topology.client.connection_pool
    taken = pool.get_connection()

    with monkeypatch.context() as impatient:
        impatient.setattr(store.nodes, "_timeout_s", 0.2)
        with pytest.raises(StoreTimeoutError, match="all 1 connections are busy"):
            fetch(store)

    pool.release(taken)
    fetch(store)  # at once: that others were busy tells nothing of the node


def test_a_node_that_accepts_and_never_answers_costs_the_connect_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = RedisConfig(addresses=(listener.getsockname(),), connect_timeout_ms=300, timeout_ms=60_000)
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=r"127\.0\.0\.1.*: cannot connect: timed out"):
            RedisStore(config)
        assert time.monotonic() - began < 10


class TestCluster:
    def test_every_master_has_some_of_the_rows(self, redis_cluster):
        store = loaded_store(redis_cluster.nodes[0])

        spread = store.tables[SPEC.name].spread()

        fetch(store)
        assert sum(spread.values()) == 16
        assert set(spread) == {f"127.0.0.1:{node.port}" for node in redis_cluster.nodes[:3]}
        for node in redis_cluster.nodes[:3]:
            with node.client() as client:
                hashes = [name for name in client.scan_iter() if name.endswith(b"v")]
                assert len(hashes) == spread[f"127.0.0.1:{node.port}"]

    def test_the_masters_are_learned_from_a_replica_too(self, redis_cluster):
        store = loaded_store(redis_cluster.nodes[4])

        fetch(store)

    def test_callers_who_need_several_nodes_do_not_wait_for_each_other_in_a_ring(self, redis_cluster):
        store = loaded_store(redis_cluster.nodes[0], num_node_connections=1)
        failures = []

        def read(number):
            rng = np.random.default_rng(number)
            try:
                for _ in range(50):
                    fetch(store, rng.choice(KEYS, int(rng.integers(1, 5))))
            except StoreError as err:
                failures.append(err)

        readers = [threading.Thread(target=read, args=(number,)) for number in range(6)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

        assert not failures

    def test_busy_connections_of_several_nodes_are_waited_for_no_longer_than_the_timeout(
        self, redis_cluster, monkeypatch
    ):
        store = loaded_store(redis_cluster.nodes[0], num_node_connections=1)
        pools = [client.connection_pool for client in store.nodes.topology._clients()]
        taken = [pool.get_connection() for pool in pools]
        monkeypatch.setattr(store.nodes, "_timeout_s", 0.5)

        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=r"all 1 connections are busy"):
            fetch(store)
        assert time.monotonic() - began < 1.0  # three nodes, one timeout

        for pool, connection in zip(pools, taken, strict=True):
            pool.release(connection)
        monkeypatch.undo()
        fetch(store)

    def test_frozen_nodes_cost_one_timeout_together(self, own_cluster, monkeypatch):
        loaded_store(own_cluster.nodes[0])
        store = open_store(own_cluster.nodes[0], **IMPATIENT)
        store.table(SPEC).open(0)
        for node in own_cluster.nodes[:2]:
            node.freeze()

        began = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            fetch(store)
        took_s = time.monotonic() - began

        for node in own_cluster.nodes[:2]:
            node.thaw()
        assert took_s < 1.0 + 0.5 + 1.0  # a timeout, and looking for the successors

    @pytest.mark.slow
    def test_readers_get_no_wrong_rows_while_the_cluster_fails_over_and_back(self, own_cluster):
        store = loaded_store(own_cluster.nodes[1])
        own_cluster.wait_for_replicas()
        old, new = own_cluster.nodes[0], own_cluster.nodes[3]

        with readers(store) as (answered, wrong):
            all_are_answered(answered)
            old.kill()
            wait_until(lambda: new.address in masters(store), "the replica has taken over")
            all_are_answered(answered)
            old.start()
            own_cluster.wait()
            all_are_answered(answered)
            ask_to_take_over(old, lambda: old.address in masters(store), "the old master is asked again")
            all_are_answered(answered)

        assert not wrong

    def test_only_the_silent_node_is_skipped(self, two_masters):
        loaded_store(two_masters.nodes[0])
        store = open_store(two_masters.nodes[0], **IMPATIENT)
        store.table(SPEC).open(0)
        partitions, node = Partitions(SPEC.name, store.config.num_partitions), store.nodes.topology.node
        ports = np.array([node(partition.values)[0].port for partition in partitions])
        is_silent = ports[partitions.places(KEYS)] == two_masters.nodes[0].port
        two_masters.nodes[0].freeze()

        with pytest.raises(StoreTimeoutError):
            fetch(store)
        for _ in range(20):
            fetch(store, KEYS[~is_silent])
            with pytest.raises(StoreError, match="it is being probed") as caught:
                fetch(store, KEYS[is_silent])
            assert not isinstance(caught.value, StoreTimeoutError)

        two_masters.nodes[0].thaw()
        wait_until(lambda: answers(store), "the node is used again")

    @pytest.mark.slow
    def test_a_replica_replaces_a_silent_master(self, own_cluster):
        loaded_store(own_cluster.nodes[0])
        store = open_store(own_cluster.nodes[0], **IMPATIENT)
        store.table(SPEC).open(0)
        own_cluster.wait_for_replicas()
        own_cluster.nodes[0].freeze()

        wait_until(lambda: answers(store), "the replica has taken over")

        assert own_cluster.nodes[0].address not in masters(store)

    def test_a_warning_says_that_one_node_holds_most_of_a_table(self, redis_cluster, caplog):
        store = open_store(redis_cluster.nodes[0], num_partitions=1, num_node_connections=1)

        with caplog.at_level(logging.INFO):
            store.table(SPEC).open(0)

        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        holder = key_slot(Partition(SPEC.name, 0).values) * 3 // 16384
        assert "one node has far more partitions than the others" in record.message
        assert f"127.0.0.1:{redis_cluster.nodes[holder].port} holds 1" in record.message

    @pytest.mark.parametrize("error", [IndexError("list index out of range"), RedisClusterException("no node")])
    def test_what_redis_py_raises_where_no_node_knows_of_a_slot_is_translated(self, redis_cluster, monkeypatch, error):
        store = loaded_store(redis_cluster.nodes[0])
        again = TryAgainError("TRYAGAIN the slot moves")
        monkeypatch.setattr(
            redis_nodes.RedisNodes, "_at_once", lambda nodes, commands, deadline: [Reply(again) for _ in commands]
        )
        monkeypatch.setattr(store.nodes.topology.client, "execute_command", mock.Mock(side_effect=error))

        with pytest.raises(StoreError, match=f"model.table.*TRYAGAIN the slot moves: {error}"):
            fetch(store)

    def test_a_second_try_that_ends_at_the_deadline_is_a_timeout(self, redis_cluster, monkeypatch):
        store = loaded_store(redis_cluster.nodes[0])
        again = TryAgainError("TRYAGAIN the slot moves")
        monkeypatch.setattr(
            redis_nodes.RedisNodes, "_at_once", lambda nodes, commands, deadline: [Reply(again) for _ in commands]
        )
        monkeypatch.setattr(store.nodes, "_timeout_s", 0.0)

        with pytest.raises(StoreTimeoutError, match=r"TRYAGAIN the slot moves: timed out"):
            fetch(store)

    def test_a_slot_without_a_node_is_an_error(self, redis_cluster, monkeypatch):
        store = loaded_store(redis_cluster.nodes[0])
        monkeypatch.setattr(store.nodes.topology.client.nodes_manager, "slots_cache", {})

        with pytest.raises(StoreError, match="no node of the cluster holds slot"):
            fetch(store)


def test_a_port_that_speaks_another_protocol_is_an_error(tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        client, _ = listener.accept()
        with client:
            client.recv(100)
            client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(StoreError, match="Protocol error"):
        RedisStore(RedisConfig(addresses=(listener.getsockname(),)))
    thread.join()
    listener.close()
