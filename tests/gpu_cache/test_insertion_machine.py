"""Any order of requests, late insertions, changes and refreshes leaves caches that agree with the tiers."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.missing import ABSENT
from gpu_cache.readers import Readers
from tests.gpu_cache.bags import Bags
from tests.state_machines import run_on

DIMS, DEFAULTS = (3, 8), (0.5, -1.0)
LINES = [("I64", 15), ("I64", 7), ("U32", 15)]
KEYS = st.lists(st.integers(0, 50), max_size=25)
DISTINCT_KEYS = st.lists(st.integers(0, 50), min_size=1, max_size=15, unique=True)
TABLE = st.integers(0, 1)
WORKSPACE = st.integers(0, 1)


class InsertionMachine(RuleBasedStateMachine):
    """One dict per table is the tiers. A change erases its keys from the cache, as the parameter server does."""

    device = None

    @initialize(
        line=st.sampled_from(LINES), capacity=st.sampled_from([1, 20, 60]), kind=st.sampled_from(["dynamic", "static"])
    )
    def make(self, line, capacity, kind):
        readers = Readers()
        options = {"key_type": line[0], "line_keys": line[1], "kind": kind, "readers": readers}
        self.caches = [EmbeddingCache(dim, capacity, self.device, seed=dim, **options) for dim in DIMS]
        group = CacheGroup(self.caches, (1, 1), ("sum", "sum"), DEFAULTS)
        self.work = [group.workspace(25, 100, max_single_keys=50) for _ in range(2)]
        self.tiers = [{key: 0 for key in range(0, 50, 2)}, {key: 0 for key in range(25)}]
        self.version = 0
        self.changed = [{}, {}]  # the version in which a key changed
        self.pending = [None, None]  # by workspace: the reads of a request that was answered and not inserted

    def row(self, table, key):
        value = self.tiers[table].get(key)
        return np.full(DIMS[table], DEFAULTS[table] if value is None else value * 100 + key, np.float32)

    def rows(self, table, keys):
        return np.array([self.row(table, key) for key in keys], np.float32).reshape(-1, DIMS[table])

    @rule(workspace=WORKSPACE, first=KEYS, second=KEYS, are_bags=st.booleans(), inserts=st.booleans())
    def ask(self, workspace, first, second, are_bags, inserts):
        work, asked = self.work[workspace], (first, second)
        keys = [np.array(of_table, np.int64) for of_table in asked]
        if are_bags:
            samples = max(len(first), len(second), 1)
            row_ptrs = [np.minimum(np.arange(samples + 1), of_table.size).astype(np.int32) for of_table in keys]
            rows = work.pool([Bags(*bags) for bags in zip(keys, row_ptrs, strict=True)])
        else:
            rows = work.lookup(keys)
        reads = []
        while missing := work.missing():
            work.complete([self.rows(table, part.keys.tolist()) for table, part in enumerate(missing)])
            reads += [(table, part, set(self.tiers[table])) for table, part in enumerate(missing)]
        self.pending[workspace] = (self.version, reads)

        for table, (got, of_table) in enumerate(zip(rows, asked, strict=True)):
            with self.device.using(work.stream):
                got = self.device.to_host(got).reshape(-1, DIMS[table])[: len(of_table)]
            np.testing.assert_array_equal(got, self.rows(table, of_table))
        if inserts:
            self.insert(workspace)

    @rule(workspace=WORKSPACE)
    def insert(self, workspace):
        """The insertion comes any time after the answer; keys that changed meanwhile are left out."""
        if self.pending[workspace] is None:
            return
        (version, reads), self.pending[workspace] = self.pending[workspace], None
        misses = [np.empty(0, np.uint32)]
        for table, part, found in reads:
            changed = self.changed[table]
            misses.append(part.times.copy())
            for place, key in enumerate(part.keys.tolist()):
                if changed.get(key, 0) > version:
                    misses[-1][place] = 0
                elif key not in found:
                    misses[-1][place] |= ABSENT
        self.work[workspace].insert(np.concatenate(misses))

    @rule(table=TABLE, keys=DISTINCT_KEYS, are_removed=st.booleans())
    def change(self, table, keys, are_removed):
        self.version += 1
        for key in keys:
            if are_removed:
                self.tiers[table].pop(key, None)
            else:
                self.tiers[table][key] = self.version
            self.changed[table][key] = self.version
        self.caches[table].erase(np.array(keys))

    @rule(table=TABLE)
    def refresh(self, table):
        cache, tier = self.caches[table], self.tiers[table]
        held = cache.dump()[0].tolist()
        found, gone = ([key for key in held if (key in tier) == wanted] for wanted in (True, False))
        cache.update(np.array(found, np.int64), self.rows(table, found))
        cache.erase(np.array(gone, np.int64))
        cache.erase(np.array([key for key in cache.absent_keys().tolist() if key in tier], np.int64))

    @rule(table=TABLE, keys=DISTINCT_KEYS, misses=st.integers(1, 2))
    def offer(self, table, keys, misses):
        keys = [key for key in keys if key in self.tiers[table]]
        if keys and self.caches[table].capacity.kind != "static":
            counts = np.full(len(keys), misses, np.uint32)
            self.caches[table].replace(np.array(keys), self.rows(table, keys), counts)

    @invariant()
    def caches_agree_with_the_tiers(self):
        if not hasattr(self, "caches"):
            return
        for table, (cache, tier) in enumerate(zip(self.caches, self.tiers, strict=True)):
            keys, rows = cache.dump(with_rows=True)
            absent = cache.absent_keys().tolist()
            stats = cache.stats()
            assert len(set(keys.tolist())) == keys.size == stats.rows, "a key is held twice"
            np.testing.assert_array_equal(rows, self.rows(table, keys.tolist()))
            assert set(keys.tolist()) <= set(tier), "a default is stored"
            assert len(set(absent)) == len(absent) == stats.absent_keys
            assert not set(absent) & set(tier), "a key that a tier holds is answered with a default"

    def teardown(self):
        if hasattr(self, "caches"):
            for cache in self.caches:
                cache.close()


@pytest.mark.kernels
@pytest.mark.slow
def test_caches_agree_with_the_tiers(device):
    run_on(InsertionMachine, examples=20, device=device)


@pytest.mark.kernels
def test_caches_agree_with_the_tiers_in_drawn_orders_of_threads(runner):
    with runner.scheduled(seed=5, os_threads=2):
        run_on(InsertionMachine, examples=10, device=runner)
