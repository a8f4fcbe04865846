"""Caches in front of a small RAM tier and a database on disk."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.device import open_device
from serving.lookup import LookupSession
from serving.storage import MemoryStore, RocksDbStore
from tests.serving.lookup.cached import cached, request, same, served, with_cache, write_model


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(config, tmp_path_factory):
    with served(config, MemoryStore(capacity_rows=64), RocksDbStore(tmp_path_factory.mktemp("db"))) as server:
        yield server


@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    size_ratio=st.sampled_from([0.05, 0.5]),
    hottest=st.sampled_from([3, None]),
    unknown_ratio=st.sampled_from([0.0, 0.3]),
)
def test_caches_over_rocksdb_answer_what_the_tiers_answer(config, server, seed, size_ratio, hottest, unknown_ratio):
    rng = np.random.default_rng(seed)

    with cached(server, with_cache(config, size_ratio=size_ratio), open_device("runner")) as lookup:
        for _ in range(3):
            batch = request(config, rng, hottest=hottest, unknown_ratio=unknown_ratio)
            assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))
