"""Signs against Persia's rules in plain Python, and against golden values of FarmHash."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.persia.config import Feature
from training.persia.signs import (
    farmhash64,
    prefixed_signs,
    request_keys,
    row_signs,
    servers_of,
    table_keys,
)

# From Google's FarmHash (pyfarmhash 0.4, hash64 of the eight little-endian bytes).
GOLDEN = {
    0: 1457330246272086660,
    1: 5925585971146611297,
    2: 3353244675891348105,
    5: 3312746975386716960,
    123456789: 7924445591521747672,
    2**63: 7578918962206252314,
    2**64 - 1: 3458737730936475989,
    0x68FD1E64: 6680566135128693009,
}
SIGNS = st.lists(st.integers(0, 2**64 - 1), max_size=20)
BITS = st.integers(2, 32)


def feature(bits=8, group=1, rounds=0, size=0):
    spacing = (1 << 64 - bits) - 1
    return Feature("f", "f", 4, True, 10, False, rounds, size, group << 64 - bits, spacing)


def uint64(signs):
    return np.array(signs, dtype=np.uint64)


def test_the_hash_is_farmhash():
    assert farmhash64(uint64(list(GOLDEN))).tolist() == list(GOLDEN.values())


def test_a_row_is_on_the_server_that_the_hash_of_its_sign_says():
    keys = (uint64(list(GOLDEN)) ^ np.uint64(1 << 63)).view(np.int64)

    assert servers_of(keys, 3).tolist() == [hashed % 3 for hashed in GOLDEN.values()]


@given(signs=SIGNS, bits=BITS, data=st.data())
def test_a_sign_gets_the_prefix_of_its_group(signs, bits, data):
    group = data.draw(st.integers(1, 2**bits - 2))
    keys = table_keys(feature(bits, group), uint64(signs))

    expected = [sign % (2 ** (64 - bits) - 1) + (group << 64 - bits) for sign in signs]
    assert prefixed_signs(keys).tolist() == expected


@given(signs=SIGNS, bits=BITS, data=st.data())
def test_no_key_is_one_that_tables_reserve(signs, bits, data):
    group = data.draw(st.sampled_from([1, 2 ** (bits - 1) - 1 or 1, 2 ** (bits - 1), 2**bits - 2]))
    edges = [0, 1, 2 ** (64 - bits) - 2, 2**64 - 1, *signs]
    keys = table_keys(feature(bits, group), uint64(edges))

    assert keys.min() >= -(2**63) + 2
    assert keys.max() <= 2**63 - 3


@given(signs=SIGNS, rounds=st.integers(1, 4), size=st.integers(1, 1000))
def test_a_hash_stack_reads_one_bucket_in_each_round(signs, rounds, size):
    buckets = row_signs(feature(rounds=rounds, size=size), uint64(signs))

    expected = []
    for sign in signs:
        for number in range(rounds):
            sign = int(farmhash64(uint64([sign]))[0])
            expected.append(sign % size + number * size)
    assert buckets.tolist() == expected


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_request_has_the_key_without_the_prefix(rounds):
    one = feature(rounds=rounds, size=1000)
    signs = uint64([3, 2**63 + 5, 2**64 - 1])

    keys = request_keys(one, signs)

    assert keys.dtype == np.int64
    assert keys.tolist() == (prefixed_signs(table_keys(one, signs)) - np.uint64(one.prefix)).tolist()
    assert rounds or keys[0] == 3
