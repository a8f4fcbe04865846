"""Any order of calls leaves the cache in agreement with a dict."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from gpu_cache.embedding_cache import EmbeddingCache
from tests.state_machines import run_on

DIM = 4
LINES = [("I64", 15), ("I64", 7), ("U32", 15)]
KEYS = st.lists(st.integers(0, 60), max_size=40)
DISTINCT_KEYS = st.lists(st.integers(0, 60), max_size=40, unique=True)


class CacheMachine(RuleBasedStateMachine):
    """The dict has the last row of every key ever written, and the cache has some of these rows."""

    device = None

    @initialize(line=st.sampled_from(LINES), capacity=st.sampled_from([1, 20, 60]), seed=st.integers(0, 3))
    def make(self, line, capacity, seed):
        self.cache = EmbeddingCache(DIM, capacity, device=self.device, key_type=line[0], line_keys=line[1], seed=seed)
        self.streams = [self.cache.stream, self.device.stream()]
        self.rows = {}
        self.held = set()
        self.version = 0

    def new_rows(self, keys):
        self.version += 1
        return (np.array(keys, dtype=np.float32).reshape(-1, 1) * 1000 + self.version).repeat(DIM, axis=1)

    @rule(keys=DISTINCT_KEYS, stream=st.integers(0, 1), misses=st.integers(1, 2))
    def replace(self, keys, stream, misses):
        rows = self.new_rows(keys)
        counts = np.full(len(keys), misses, np.uint32)

        self.cache.replace(np.array(keys, dtype=np.int64), rows, misses=counts, stream=self.streams[stream])

        held = self.read_out()
        for key, row in zip(keys, rows, strict=True):
            if key in held and key not in self.held:
                self.rows[key] = row
        assert held <= self.held | set(keys)
        if len(held) < len(self.held | set(keys)) and self.cache.capacity.line_count == 1:
            assert len(held) == self.cache.capacity.rows, "a key was left out although a slot was empty"
        self.held = held

    @rule(keys=DISTINCT_KEYS, stream=st.integers(0, 1))
    def update(self, keys, stream):
        rows = self.new_rows(keys)

        self.cache.update(np.array(keys, dtype=np.int64), rows, stream=self.streams[stream])

        self.rows |= {key: row for key, row in zip(keys, rows, strict=True) if key in self.held}
        assert self.read_out() == self.held

    @rule(keys=KEYS, stream=st.integers(0, 1))
    def erase(self, keys, stream):
        self.cache.erase(np.array(keys, dtype=np.int64), stream=self.streams[stream])

        self.held -= set(keys)
        assert self.read_out() == self.held

    @rule(keys=KEYS)
    def query(self, keys):
        answer = self.cache.query(np.array(keys, dtype=np.int64))
        self.cache.stream.synchronize()

        rows, positions = (self.device.to_host(array) for array in (answer.rows, answer.missing_positions))
        missed = np.sort(positions[: answer.missing_count[0]]).tolist()
        assert missed == [i for i, key in enumerate(keys) if key not in self.held]
        for key, row in zip(keys, rows, strict=True):
            np.testing.assert_array_equal(row, self.rows[key] if key in self.held else np.zeros(DIM))

    @invariant()
    def no_key_is_held_twice_and_no_other_key_is_held(self):
        if hasattr(self, "cache"):
            assert self.cache.stats().rows == len(self.held) <= self.cache.capacity.rows

    def read_out(self):
        """The held keys after all queued work."""
        keys, rows = self.cache.dump(with_rows=True)
        assert len(set(keys.tolist())) == len(keys)
        for key, row in zip(keys.tolist(), rows, strict=True):
            if key in self.held:
                assert key in self.rows
            assert (row == row[0]).all()
            assert row[0] // 1000 == key
        return set(keys.tolist())

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()


@pytest.mark.kernels
@pytest.mark.slow
def test_the_cache_agrees_with_a_dict(device):
    run_on(CacheMachine, examples=20, device=device)


def test_the_cache_agrees_with_a_dict_in_drawn_orders_of_threads(runner):
    with runner.scheduled(seed=7, os_threads=2):
        run_on(CacheMachine, examples=10, device=runner)
