"""A client that knows the kernels' hash cannot choose keys that are slow to look up."""

import secrets

import numpy as np
import pytest

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from tests.gpu_cache.bags import Bags

KEYS = 2000
NO_KEY = -(2**63)
WORD = (1 << 64) - 1
INVERSE_FACTORS = [pow(factor, -1, 1 << 64) for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD)]


@pytest.fixture(autouse=True)
def drawn_cache_seeds(monkeypatch):
    monkeypatch.setattr("gpu_cache.embedding_cache.randbits", secrets.randbits)


def unmixed(value):
    """The argument for which ``mix`` of types.cuh returns ``value``."""
    for factor in INVERSE_FACTORS:
        value = (value ^ value >> 33) * factor & WORD
    return value ^ value >> 33


def keys_with_hash_zero(rounds):
    """Keys whose hash, the upper half of ``mix``, is 0 after so many rounds without a seed."""
    values = list(range(1, KEYS + 1))
    for _ in range(rounds):
        values = [unmixed(value) for value in values]
    return np.array(values, np.uint64).view(np.int64)


def random_keys():
    return np.random.default_rng(0).integers(-(2**62), 2**62, KEYS)


def most_probes(device, keys, answers_single_keys):
    """The most slots that a new workspace probes to enter a missing key: a probe never leaves a run of slots."""
    with EmbeddingCache(4, 100, device) as cache:
        work = CacheGroup([cache], (1,), ("sum",)).workspace(1, KEYS, max_single_keys=KEYS)
        if answers_single_keys:
            work.lookup([keys])
        else:
            work.pool([Bags(keys, np.array([0, KEYS], np.int32))])
        [missing] = work.missing()
        assert missing.keys.tolist() == keys.tolist()
        slots = device.to_host(work._missing.slots).view(np.int64)[:, 0]
    ends = np.flatnonzero(slots == NO_KEY)
    runs = np.diff(ends, prepend=-1, append=slots.size) - 1
    return int((runs * (runs + 1) // 2).sum())


@pytest.mark.parametrize("answers_single_keys", [False, True], ids=["pool", "lookup"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_crafted_missing_keys_take_no_more_probes_than_random_keys(device, rounds, answers_single_keys):
    crafted = most_probes(device, keys_with_hash_zero(rounds), answers_single_keys)

    assert crafted < 2 * most_probes(device, random_keys(), answers_single_keys)


def test_crafted_missing_keys_form_one_run_if_the_seed_is_known(device, monkeypatch):
    monkeypatch.setattr("gpu_cache.missing.randbits", lambda bits: 0)

    assert most_probes(device, keys_with_hash_zero(2), False) == KEYS * (KEYS + 1) // 2


@pytest.mark.parametrize(("seed", "fewest", "most"), [(0, 15, 15), (None, 200, 300)], ids=["known seed", "drawn seed"])
def test_crafted_keys_crowd_a_line_only_if_the_seed_is_known(device, seed, fewest, most):
    keys = keys_with_hash_zero(1)[:300]
    with EmbeddingCache(4, 1500, device, seed=seed) as cache:
        cache.replace(keys, np.zeros((keys.size, 4), np.float32))

        assert fewest <= cache.stats().rows <= most


def test_every_cache_draws_its_own_seed(device):
    with EmbeddingCache(4, 100, device) as first, EmbeddingCache(4, 100, device) as second:
        assert first.seed != second.seed
