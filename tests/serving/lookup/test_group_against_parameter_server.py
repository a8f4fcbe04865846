"""A cache group gives the same answers as the parameter server behind it."""

import numpy as np
import pytest

from gpu_cache.bag_layout import COMBINERS
from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from serving.storage import MemoryStore
from tests.gpu_cache.bags import Bags
from tests.serving.small_server import KEYS, ROWS, UNKNOWN, model_of, serve, write_model


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_rows_equal_the_rows_of_the_parameter_server(device, tmp_path, combiner, weighted):
    write_model(tmp_path)
    server = serve(model_of(tmp_path, default_value=-0.7), MemoryStore())
    rng = np.random.default_rng(0)
    keys = rng.choice(KEYS + UNKNOWN, 200)
    bags = Bags(keys, np.sort(rng.integers(0, 201, 40)).astype(np.int32))
    bags.row_ptrs[[0, -1]] = 0, 200
    weights = rng.standard_normal(200, dtype=np.float32) if weighted else None
    cache = EmbeddingCache(3, 100, device)
    cache.replace(np.array(KEYS[:6]), ROWS[:6])
    cache.stream.synchronize()
    work = CacheGroup([cache], (1,), (combiner,), default_values=(-0.7,)).workspace(39, 200)

    (pooled,) = work.pool([bags], [weights])
    at_once = work.missing()
    work.complete([server.lookup("m.t", at_once[0].keys)[0]])
    assert work.missing() == ()

    expected, _ = server.lookup_pooled("m.t", bags.keys, bags.row_ptrs, combiner, weights)
    assert device.to_host(pooled).reshape(39, 3).tobytes() == expected.tobytes()
