import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from serving.model.hps_hash import mix
from serving.storage.hps_layout import key_list, keys_of, storable, tag
from serving.storage.redis.commands import Partition

# Key: modulo 8, modulo 16, as HPS of HugeCTR v24.06 places them.
PLACES = {
    0: (0, 0),
    1: (3, 3),
    2: (6, 14),
    3: (0, 0),
    4: (5, 13),
    5: (5, 13),
    6: (6, 6),
    7: (7, 7),
    100: (2, 10),
    12345: (3, 11),
    -1: (4, 12),
    2**32 - 1: (3, 11),
    2**63 - 1: (6, 14),
}


@pytest.mark.parametrize(("partitions", "which"), [(8, 0), (16, 1)])
def test_keys_fall_into_the_partitions_that_hps_chooses(partitions, which):
    places = mix(np.array(list(PLACES), dtype=np.int64)) % np.uint64(partitions)

    assert places.tolist() == [both[which] for both in PLACES.values()]


def test_one_is_mixed_as_in_hps():
    assert mix(np.array([1])).tolist() == [0x0DADBFEEB7D64133]


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1))
def test_mixing_is_that_of_unbounded_integers_cut_to_64_bits(key):
    def rotated(x, bits):
        return (x >> bits) | (x << (64 - bits)) & (2**64 - 1)

    x = key % 2**64
    x ^= rotated(x, 25) ^ rotated(x, 50)
    x = x * 0xA24BAED4963EE407 % 2**64
    x ^= rotated(x, 24) ^ rotated(x, 49)
    x = x * 0x9FB21C651E98DF25 % 2**64

    assert mix(np.array([key], dtype=np.int64)).tolist() == [x ^ (x >> 28)]


@pytest.mark.parametrize(("key_bytes", "code"), [(8, "<q"), (4, "<I")])
def test_a_key_is_its_raw_bytes(key_bytes, code):
    keys = [0, 1, 256, 2**31, 2**32 - 1]

    raw = key_list(np.array(keys), key_bytes)

    assert raw == [struct.pack(code, key) for key in keys]
    assert keys_of(raw, key_bytes).tolist() == keys


def test_a_key_of_four_bytes_is_neither_negative_nor_longer():
    keys = np.array([-1, 0, 2**32 - 1, 2**32])

    assert storable(keys, 4).tolist() == [False, True, True, False]
    assert storable(keys[1:3], 4) is None
    assert storable(keys, 8) is None


def test_tables_and_partitions_are_named_as_in_hps():
    partition = Partition("dcn.user", 3)

    assert tag("dcn.user") == "hps_et.dcn.user"
    assert (partition.values, partition.times) == (b"hps_et{hps_et.dcn.user/p3}v", b"hps_et{hps_et.dcn.user/p3}t")


def test_all_keys_of_a_partition_lie_in_one_slot_of_a_cluster():
    partition = Partition("dcn.user", 3)
    own = (partition.marker, partition.lease, partition.removed, partition.evicting, *partition.loading("0f"))
    names = (partition.values, partition.times, *own)

    assert len({key_slot(name) for name in names}) == 1
