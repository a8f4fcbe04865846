"""Layer 1: the embedding cache, a data structure on one device. It never fetches anything."""

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheClosedError, CacheFullError
from gpu_cache.layout import Capacity, Layout, MemoryBytes
from gpu_cache.readers import Readers

__all__ = [
    "CacheClosedError",
    "CacheFullError",
    "CacheGroup",
    "Capacity",
    "EmbeddingCache",
    "Layout",
    "MemoryBytes",
    "Readers",
]
