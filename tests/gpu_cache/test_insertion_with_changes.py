"""Threads that ask and insert next to threads that change and refresh rows: every answer is as new as its request."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.missing import ABSENT
from tests.gpu_cache.bags import scheduled

DIM, KEYS, ROUNDS = 4, 60, 25
DEFAULT = -1.0


class Tier:
    """The versions of rows by key; a row has the value of its version, and odd versions mean that there is no row."""

    def __init__(self, cache):
        self.cache = cache
        # Held while keys change and while rows enter the cache, as the parameter server does.
        self.lock = threading.Lock()
        self.versions = np.arange(KEYS) % 2

    def values(self, keys):
        versions = self.versions[keys]
        return np.where(versions % 2, DEFAULT, versions).astype(np.float32)[:, None].repeat(DIM, axis=1)

    def change(self, rng):
        keys = rng.choice(KEYS, 5, replace=False)
        with self.lock:
            self.versions[keys] += rng.integers(1, 3, keys.size)
            self.cache.erase(keys)

    def refresh(self):
        keys = self.cache.dump()[0]
        with self.lock:
            found = keys[self.versions[keys] % 2 == 0]
            self.cache.update(found, self.values(found))

    def ask(self, work, keys):
        """Ask, insert, and return whether every row was there at some time of the request."""
        with self.lock:
            before = self.versions.copy()
        rows, reads = work.lookup([keys]), []
        while missing := work.missing():
            asked = missing[0].keys
            with self.lock:
                reads.append((asked, missing[0].times, self.versions[asked]))
                fetched = self.values(asked)
            work.complete([fetched])
        with self.cache.device.using(work.stream):
            got = self.cache.device.to_host(rows[0])
        with self.lock:
            after = self.versions.copy()
            misses = [
                np.where(self.versions[asked] != versions, 0, np.where(versions % 2, times | ABSENT, times))
                for asked, times, versions in reads
            ]
            if misses:
                work.insert(np.concatenate(misses).astype(np.uint32))
        are_whole = (got == got[:, :1]).all()
        is_default, value = got[:, 0] == DEFAULT, got[:, 0]
        was_missing = (before[keys] % 2 == 1) | (after[keys] != before[keys])
        was_there = (value >= before[keys]) & (value <= after[keys])
        return are_whole and np.where(is_default, was_missing, was_there).all()


@pytest.mark.parametrize(("kind", "capacity"), [("dynamic", 20), ("dynamic", 60), ("static", 60)])
@pytest.mark.parametrize("seed", [0, 2])
def test_every_answer_is_as_new_as_its_request(device, kind, capacity, seed):
    cache = EmbeddingCache(DIM, capacity, device, kind=kind)
    tier = Tier(cache)
    group = CacheGroup([cache], (1,), ("sum",), (DEFAULT,))

    def ask(seed):
        rng, work = np.random.default_rng(seed), group.workspace(1, 100, max_single_keys=100)
        return all(tier.ask(work, rng.integers(0, KEYS, 40)) for _ in range(ROUNDS))

    def change(seed):
        rng = np.random.default_rng(seed)
        for round_number in range(ROUNDS):
            tier.change(rng)
            if round_number % 4 == 0:
                tier.refresh()

    with scheduled(device, seed, 2), ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(ask, seed) for seed in (1, 2)]
        changing = threads.submit(change, 3)
        assert all(one.result() for one in asking)
        changing.result()

    keys, rows = cache.dump(with_rows=True)
    assert len(set(keys.tolist())) == keys.size
    assert rows.tobytes() == tier.values(keys).tobytes()
    assert (tier.versions[cache.absent_keys()] % 2 == 1).all()
    assert cache.stats().absent_answers > 0
    cache.close()
