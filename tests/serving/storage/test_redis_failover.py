"""A replica takes over, and the old master answers again for a moment: no process answers a row older than its change.

The nodes are behind a relay, which decides at once and for all connections which node answers.
"""

import socket
import threading
from contextlib import suppress

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage.redis.states import PartitionStates
from tests.serving.storage.redis_stores import KEYS, ROWS, SPEC, Truth, open_store
from tests.tools.redis_servers import RedisServer, wait_until

KEY, OTHER_KEYS = 3, [key for key in range(KEYS.size) if key != 3]


class Relay:
    """An address that leads to one Redis server at a time, like the address of a load balancer."""

    def __init__(self, server):
        self._server, self._sockets = server, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def switch(self, server):
        """Lead to another server, and break the open connections."""
        self._server = server
        for opened in self._sockets:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.switch(None)

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server.address)
                self._sockets += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    @staticmethod
    def _pump(source, target):
        with suppress(OSError), source:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


class Process:
    """A process that serves Redis as a cache, and has the rows that it acknowledged."""

    def __init__(self, relay):
        self.rows, self.act = ROWS.copy(), lambda: None
        self.truth = Truth(KEYS, self.rows, act=lambda: self.act())
        self.store = open_store(relay, num_partitions=1)
        self.store.table(SPEC).serve_as_cache(self.truth)

    def fill(self, starting=False):
        return self.store.table(SPEC).fill(self.truth, starting=starting)

    def insert(self, keys, value):
        self.store.tables[SPEC.name].write_flags(changed=True)
        self.insert_more(keys, value)

    def insert_more(self, keys, value):
        """Insert rows after the flag was written."""
        self.rows[keys] = value
        self.store.tables[SPEC.name].insert(np.array(keys), self.rows[keys])

    def check(self):
        """Look up every key, and return whether all are found."""
        out = np.empty_like(self.rows)
        found = self.store.tables[SPEC.name].fetch(KEYS, out)
        assert (out[found] == self.rows[found]).all()
        return found.all()


@pytest.fixture
def nodes(redis_binary, tmp_path):
    """A master and its replica."""
    old, new = RedisServer(tmp_path / "old"), RedisServer(tmp_path / "new")
    with new.client() as client:
        client.replicaof(*old.address)
    yield old, new
    old.kill()
    new.kill()


@pytest.fixture
def relay(nodes):
    relay = Relay(nodes[0])
    yield relay
    relay.close()


@pytest.fixture
def process(relay):
    process = Process(relay)
    process.fill(starting=True)
    return process


@pytest.fixture
def fail_over(nodes, relay):
    """A function that lets the replica take over with every write. It returns a function that switches back."""
    old, new = nodes

    def fail_over():
        with old.client() as main, new.client() as copy:
            wait_until(
                lambda: main.info("replication")["master_repl_offset"] == copy.info("replication")["slave_repl_offset"],
                "the replica has every write",
            )
            copy.replicaof("NO", "ONE")
        relay.switch(new)
        return lambda: relay.switch(old)

    return fail_over


def test_a_change_that_one_node_took_is_not_missing_on_the_other(process, fail_over):
    process.insert([KEY], 5)
    fail_back = fail_over()
    process.insert([KEY], 6)
    fail_back()
    process.insert(OTHER_KEYS, 7)

    process.check()
    process.fill()
    assert process.check()


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_change_of_an_invalid_partition_is_not_missing_on_the_other_node(nodes, process, fail_over, is_empty):
    process.insert([KEY], 5)
    fail_back = fail_over()
    if is_empty:
        with nodes[1].client() as client:
            client.flushall()
    assert not process.check()
    process.insert([KEY], 6)
    fail_back()

    process.check()
    process.fill()
    assert process.check()


def test_the_first_change_of_a_partition_that_was_not_filled_yet_is_not_missing_on_the_other_node(
    relay, process, fail_over
):
    late = Process(relay)
    fail_back = fail_over()
    late.insert([KEY], 6)
    fail_back()

    late.fill()
    assert late.check()


def test_a_change_on_the_other_node_while_a_partition_is_filled_is_not_missing(nodes, process, fail_over):
    def change():
        fail_back = fail_over()
        process.insert([KEY], 6)
        fail_back()

    with nodes[0].client() as client:
        client.flushall()
    assert not process.check()
    process.act = change
    assert process.fill()
    process.act = lambda: None

    process.check()
    process.fill()
    assert process.check()


@pytest.mark.parametrize("first", ["is refused", "goes to the other node"])
def test_changes_right_after_a_filling_has_begun_are_not_missing(nodes, relay, process, fail_over, monkeypatch, first):
    old, new = nodes
    begin = PartitionStates.fill_on

    def change_at_once(states, run_ids):
        """Begin, and let a change come before anything else happens."""
        begun = begin(states, run_ids)
        if first == "is refused":
            client.config_set("maxmemory", 1)
            with pytest.raises(StoreError, match="OOM"):
                process.insert_more([KEY], 6)
            client.config_set("maxmemory", 0)
        else:
            change_elsewhere(6)
        return begun

    def change_elsewhere(value):
        relay.switch(new)
        process.insert_more([KEY], value)
        relay.switch(old)

    process.insert([KEY], 5)
    fail_over()()  # both nodes are masters from now on
    with old.client() as client:
        client.flushall()
        assert not process.check()
        process.act = lambda: change_elsewhere(7)
        with monkeypatch.context() as patched:
            patched.setattr(PartitionStates, "fill_on", change_at_once)
            process.fill()
    process.act = lambda: None

    process.check()
    process.fill()
    assert process.check()
