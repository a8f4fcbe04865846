"""Which node of a Redis Cluster holds which hash slot."""

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.storage.redis_connection import Address

SLOTS = 16384
NO_NODE = -1


def slot_of(key: bytes) -> int:
    """The hash slot of a key: CRC16 (XMODEM) of what stands in its first braces, or of all of it.

    Source: Redis Cluster specification, "Hash tags".
    """
    opening = key.find(b"{")
    closing = key.find(b"}", opening + 1)
    if opening >= 0 and closing > opening + 1:
        key = key[opening + 1 : closing]
    return binascii.crc_hqx(key, 0) % SLOTS


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """What one node said of all.

    Attributes:
        masters: the nodes that hold slots.
        replicas: the nodes that follow one of them; asked for nothing but the topology.
        owners: int16[SLOTS], which of ``masters`` holds a slot, or NO_NODE.
    """

    masters: tuple[Address, ...]
    replicas: tuple[Address, ...]
    owners: NDArray[np.int16]

    def owner(self, slot: int) -> Address | None:
        """The node that holds ``slot``, None where there is none."""
        index = int(self.owners[slot])
        return None if index == NO_NODE else self.masters[index]

    def spread(self, slots: Sequence[int]) -> Mapping[Address, int]:
        """How many of ``slots`` each master holds."""
        counts = dict.fromkeys(self.masters, 0)
        for slot in slots:
            owner = self.owner(slot)
            if owner is not None:
                counts[owner] += 1
        return counts

    def agrees_with(self, other: "Topology") -> bool:
        """Whether the same nodes hold the same slots."""
        return self.masters == other.masters and bool((self.owners == other.owners).all())


def single_node(address: Address) -> Topology:
    """A server that is not part of a cluster holds everything."""
    return Topology((address,), (), np.zeros(SLOTS, dtype=np.int16))


def parse_cluster_slots(reply: Sequence[Any], asked: Address) -> Topology:
    """Read the answer to CLUSTER SLOTS: ``[first, last, [host, port, ...] master, [host, port, ...] replica, ...]``.

    Args:
        reply: the answer.
        asked: the node it came from; a node without a host in the answer has its host.
    """
    masters: dict[Address, int] = {}
    replicas: dict[Address, None] = {}
    owners = np.full(SLOTS, NO_NODE, dtype=np.int16)
    for first, last, *nodes in reply:
        master, *followers = (Address(node[0].decode() if node[0] else asked.host, int(node[1])) for node in nodes)
        owners[first : last + 1] = masters.setdefault(master, len(masters))
        replicas.update(dict.fromkeys(followers))
    return Topology(tuple(masters), tuple(replicas), owners)
