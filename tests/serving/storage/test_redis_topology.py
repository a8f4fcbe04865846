import numpy as np
import pytest

from serving.storage.redis_connection import Address
from serving.storage.redis_topology import SLOTS, parse_cluster_slots, single_node

ASKED = Address("10.0.0.9", 7009)
# As Redis 6 and 7 answer CLUSTER SLOTS, with a node's name and, since 7, what else is known of it.
REPLY = [
    [0, 99, [b"10.0.0.1", 7001, b"id1"], [b"10.0.0.4", 7004, b"id4"]],
    [100, 199, [b"10.0.0.2", 7002, b"id2", []], [b"10.0.0.5", 7005, b"id5", [b"hostname", b"five"]]],
    [200, 200, [b"10.0.0.1", 7001, b"id1"], [b"10.0.0.4", 7004, b"id4"]],
]


def test_every_slot_has_the_node_that_was_told():
    topology = parse_cluster_slots(REPLY, ASKED)

    assert topology.masters == (("10.0.0.1", 7001), ("10.0.0.2", 7002))
    assert topology.replicas == (("10.0.0.4", 7004), ("10.0.0.5", 7005))
    first, second = topology.masters
    assert [topology.owner(slot) for slot in (0, 99, 100, 199, 200)] == [first, first, second, second, first]
    assert topology.owner(201) is None
    assert np.count_nonzero(topology.owners >= 0) == 201


@pytest.mark.parametrize("host", [None, b""])
def test_a_node_that_does_not_tell_its_host_has_the_one_that_was_asked(host):
    topology = parse_cluster_slots([[0, 10, [host, 7001, b"id1"]]], ASKED)

    assert topology.owner(5) == ("10.0.0.9", 7001)


def test_the_spread_counts_slots_of_each_master_and_masters_without_any():
    topology = parse_cluster_slots(REPLY, ASKED)

    assert topology.spread([0, 1, 200, 300]) == {("10.0.0.1", 7001): 3, ("10.0.0.2", 7002): 0}


def test_topologies_agree_where_the_same_nodes_hold_the_same_slots():
    topology = parse_cluster_slots(REPLY, ASKED)
    moved = [[0, 150, *REPLY[0][2:]], [151, 199, *REPLY[1][2:]], REPLY[2]]

    assert topology.agrees_with(parse_cluster_slots(REPLY, ASKED))
    assert not topology.agrees_with(parse_cluster_slots(moved, ASKED))
    assert not topology.agrees_with(single_node(ASKED))


def test_a_single_node_holds_every_slot():
    topology = single_node(ASKED)

    assert topology.spread(range(SLOTS)) == {ASKED: SLOTS}
