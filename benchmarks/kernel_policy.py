"""The cache's own kernels as a policy of benchmarks.cache_policy."""

import numpy as np

from gpu_cache.embedding_cache import EmbeddingCache

DIM = 4


class KernelPolicy:
    """A cache of ``capacity`` rows on ``device`` with the interface of benchmarks.simulated_policies.

    The kernels differ from the simulation because they run in parallel: of several concurrent uses of a line one
    counts, and of several new keys any may come first.
    """

    def __init__(self, line_keys, capacity, device="runner"):
        self.name = f"kernels {line_keys}"
        lines = capacity // line_keys
        self._cache = EmbeddingCache(DIM, lines * line_keys, device, line_keys=line_keys, seed=0)

    def access(self, keys):
        """Look up int64[N], then offer the missing keys; return the number of hits, with duplicates."""
        answer = self._cache.query(keys)
        self._cache.stream.synchronize()
        missed = self._cache.device.to_host(answer.missing_keys)[: answer.missing_count[0]]
        distinct, counts = np.unique(missed, return_counts=True)
        rows = np.zeros((distinct.size, DIM), dtype=np.float32)
        self._cache.replace(distinct, rows, counts.astype(np.uint32))
        return keys.size - missed.size

    @property
    def rows_written(self):
        stats = self._cache.stats()
        return stats.inserted_rows + stats.replaced_rows

    def close(self):
        self._cache.close()
