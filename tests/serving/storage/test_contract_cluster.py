"""A Redis cluster: replicas take over with and without every write, and slots move."""

import numpy as np
import pytest
from redis.crc import key_slot

from serving.errors import StoreUnreachableError
from serving.parameter_server import models as served_models
from serving.storage import Marker, TableSpec
from serving.storage.redis.commands import Partition
from tests.serving.small_server import KEYS, ROWS, held_by
from tests.serving.storage.contract import PARTITIONS, TABLE, move_slot, nodes_of, redis_of, serve_in_front
from tests.serving.storage.redis_stores import IMPATIENT, wait_for_master
from tests.tools.redis_servers import SLOTS, wait_until

pytestmark = pytest.mark.usefixtures("short_pauses")


def wait_for_replica(master, replica):
    """Wait until the replica has every write of its master."""
    with master.client() as main, replica.client() as copy:
        wait_until(
            lambda: main.info("replication")["master_repl_offset"] == copy.info("replication")["slave_repl_offset"],
            "the replica has every write",
        )


def take_over(replica):
    with replica.client() as client:
        client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
    wait_for_master(replica)


@pytest.mark.parametrize("changed", [False, True])
def test_a_replica_that_takes_over_with_every_write_gives_no_old_row(pair, config, tmp_path, changed):
    master, replica = pair.nodes
    with serve_in_front(config, redis_of(master, **IMPATIENT), tmp_path / "db") as server:
        if changed:
            server.insert([3, 777], 7)
            server.evict([4])
        wait_for_replica(master, replica)
        with server.asked():
            master.kill()
            take_over(replica)
            server.check()
            server.wait_for_redis()
            server.insert([5], 9)
            server.wait_for_redis()
        # A table that never changed is whole on the replica: it is taken as it is.
        assert (server.tier.refills > 0) == changed


def test_a_replica_that_is_found_when_a_model_is_loaded_again_is_known_from_then_on(
    pair, config, tmp_path, monkeypatch
):
    monkeypatch.setattr(served_models, "LOOK_INTERVAL_S", 3600)
    master, replica = pair.nodes
    with serve_in_front(config, redis_of(master), tmp_path / "db") as server:
        server.server.unload_model("m")
        wait_for_replica(master, replica)
        master.kill()
        take_over(replica)
        server.server.load_model(config)
        server.insert([3, 777], 7)
        server.check()
        assert server.stores[0].tables[TABLE].is_whole


def test_a_load_whose_first_rows_the_replica_does_not_have_is_refused(pair, tmp_path):
    master, replica = pair.nodes
    store, spec = redis_of(master), TableSpec(TABLE, 3)

    def batches():
        wait_for_replica(master, replica)  # it has the leases
        yield np.array(KEYS), ROWS
        master.kill()
        take_over(replica)
        with replica.client() as client:
            for name in client.keys("*v"):  # as where the rows did not reach it
                client.delete(name)
        yield np.array([], dtype=np.int64), np.empty((0, 3), dtype=np.float32)

    with pytest.raises(StoreUnreachableError, match="its lease or its node was lost while it was filled"):
        store.table(spec).load(batches(), Marker("digest"), keep=True)
    assert store.table(spec).marker() is None


@pytest.mark.parametrize("end", ["killed", "frozen"])
@pytest.mark.parametrize("first", ["the load", "a change"])
def test_a_replica_that_takes_over_without_the_last_writes_gives_no_old_row(pair, config, tmp_path, end, first):
    master, replica = pair.nodes
    with serve_in_front(config, redis_of(master, **IMPATIENT), tmp_path / "db") as server:
        if first == "a change":
            server.insert([2, 3], 6)
        wait_for_replica(master, replica)
        replica.freeze()
        server.insert([3, 777], 7)
        server.evict([4])
        server.check()
        master.kill() if end == "killed" else master.freeze()
        server.insert([5], 8)
        replica.thaw()
        take_over(replica)
        with server.asked():
            server.insert([6], 9)
            if end == "frozen":
                master.thaw()  # it believes to be the master for a moment, and takes writes that are lost
            server.insert([8], 10)
            server.wait_for_redis()
            server.evict([9])
        server.check()
        server.wait_for_redis()
        assert held_by(server.stores[0]) == held_by(server.stores[1]) == server.rows
        assert server.tier.refills > 0


def test_a_replica_that_joined_later_and_takes_over_is_not_trusted(pair, config, tmp_path):
    master, replica = pair.nodes
    with master.client() as main, replica.client() as copy:
        former = copy.cluster("MYID")
        copy.cluster("RESET", "HARD")
        main.cluster("FORGET", former)
        with serve_in_front(config, redis_of(master), tmp_path / "db") as server:
            server.insert([3, 777], 7)
            copy.cluster("MEET", *master.address)
            name = main.cluster("MYID")
            wait_until(lambda: name in copy.execute_command("CLUSTER", "NODES"), "the nodes have met")
            copy.cluster("REPLICATE", name)
            pair.wait()
            wait_for_replica(master, replica)
            take_over(replica)
            wait_until(lambda: main.info("replication")["role"] == "slave", "the old master is a replica")
            server.check()
            server.wait_for_redis()
            assert server.tier.refills > 0


@pytest.mark.slow
def test_no_row_is_old_while_a_master_dies_and_comes_back_as_a_replica(own_cluster, config, tmp_path):
    place = key_slot(Partition(TABLE, 0).values) * 3 // SLOTS
    master, replica = own_cluster.nodes[place], own_cluster.nodes[place + 3]
    with serve_in_front(config, redis_of(own_cluster.nodes[place - 1], **IMPATIENT), tmp_path / "db") as server:
        with server.asked():
            server.insert([3], 7)
            master.kill()
            server.insert([3, 777], 8)
            server.evict([4])
            wait_for_master(replica)
            server.insert([5], 9)
            server.wait_for_redis()
            master.start()
            own_cluster.wait()
            server.insert([6], 10)
            server.wait_for_redis()
        assert held_by(server.stores[0]) == held_by(server.stores[1]) == server.rows


@pytest.mark.parametrize("changed", [False, True])
def test_a_slot_that_moves_to_another_master_is_not_filled_again(two_masters, config, tmp_path, changed):
    with serve_in_front(config, redis_of(two_masters.nodes[0]), tmp_path / "db") as server:
        if changed:
            server.insert([3, 777], 7)
            server.evict([4])
        with server.asked():
            for number in range(PARTITIONS):
                move_slot(two_masters, key_slot(Partition(TABLE, number).values))
                server.check()
                if changed:
                    server.insert([5], number)
        server.wait_for_redis()
        assert server.tier.refills == 0
        assert server.tier.errors == 0


def test_a_change_after_its_slot_has_moved_does_not_have_it_filled_again(two_masters, config, tmp_path):
    with serve_in_front(config, redis_of(two_masters.nodes[0]), tmp_path / "db") as server:
        server.insert(KEYS, 6)
        for number in range(PARTITIONS):
            move_slot(two_masters, key_slot(Partition(TABLE, number).values))
        server.insert(KEYS, 7)  # before a lookup has found the new node
        server.wait_for_redis()
        assert server.tier.refills == 0


@pytest.mark.parametrize("changed", [False, True])
def test_a_slot_that_moved_while_no_process_ran_is_not_filled_again(two_masters, config, tmp_path, changed, caplog):
    with serve_in_front(config, redis_of(two_masters.nodes[0]), tmp_path / "db") as server:
        if changed:
            server.insert([3], 7)
        rows = server.rows
    for number in range(PARTITIONS):
        move_slot(two_masters, key_slot(Partition(TABLE, number).values))

    with serve_in_front(config, redis_of(two_masters.nodes[0]), tmp_path / "db", rows) as server:
        server.wait_for_redis()
    assert "refilled" not in caplog.text


def test_a_slot_whose_former_node_restarted_with_nothing_is_filled_again_if_its_rows_changed(
    two_masters, config, tmp_path
):
    with serve_in_front(config, redis_of(two_masters.nodes[0]), tmp_path / "db") as server:
        server.insert([3], 7)
        server.evict([4])
        slot = key_slot(Partition(TABLE, 0).values)
        move_slot(two_masters, slot)
        source, _ = nodes_of(two_masters, slot)
        source.kill()
        source.start()
        two_masters.wait()
        server.check()
        server.wait_for_redis()
        assert server.tier.refills > 0
