"""Cache policies without rows: benchmarks/cache_policy.cpp, compiled on first use.

A policy has ``name``, ``access(keys) -> hits`` and ``rows_written``.
"""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np


class SimulatedPolicy:
    """The rows that a cache of ``capacity`` slots holds under one rule.

    Args:
        name: ``ours <keys of a line>``, ``ours 15 x 32 bits``, ``NVE``, ``clock`` or ``LRU``.
        capacity: slots; only whole sets and lines count.
        key_count: keys are 0 to ``key_count`` - 1.
        seed: seed of the random draws of NVE.
    """

    def __init__(self, name, capacity, key_count, seed=0):
        self.name, self._key_count = name, key_count
        self._library = compiled()
        self._policy = ctypes.c_void_p(_OPEN[name](self._library, capacity, key_count, seed))

    def access(self, keys):
        """Look up int64[N], then let missing keys enter; return the number of hits, with duplicates."""
        keys = np.ascontiguousarray(keys, dtype=np.int64)
        if keys.size and not (keys.min() >= 0 and keys.max() < self._key_count):
            raise ValueError(f"keys must lie between 0 and {self._key_count - 1}: {keys.min()} .. {keys.max()}")
        return self._library.access_keys(self._policy, keys.ctypes.data_as(ctypes.c_void_p), keys.size)

    def holds(self, key):
        return bool(self._library.holds_key(self._policy, key))

    @property
    def rows_written(self):
        return self._library.rows_written(self._policy)

    def __del__(self):
        if hasattr(self, "_policy"):
            self._library.delete_policy(self._policy)


_OPEN = {
    "ours 15": lambda library, capacity, key_count, seed: library.new_counters(capacity, 15, 1, key_count),
    "ours 7": lambda library, capacity, key_count, seed: library.new_counters(capacity, 7, 1, key_count),
    "ours 15 x 32 bits": lambda library, capacity, key_count, seed: library.new_counters(capacity, 15, 0, key_count),
    "NVE": lambda library, capacity, key_count, seed: library.new_nve(capacity, key_count, seed),
    "clock": lambda library, capacity, key_count, seed: library.new_clock(capacity, 15, key_count),
    "LRU": lambda library, capacity, key_count, seed: library.new_lru(capacity, key_count),
}
POLICIES = tuple(_OPEN)


@cache
def compiled():
    source = Path(__file__).with_name("cache_policy.cpp")
    with tempfile.TemporaryDirectory(prefix="cache_policy") as folder:
        file = Path(folder) / "cache_policy.so"
        subprocess.run(["c++", "-std=c++17", "-O2", "-shared", "-fPIC", source, "-o", file], check=True)
        library = ctypes.CDLL(str(file))
    u64, i64, pointer = ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p
    for name, result, arguments in (
        ("new_counters", pointer, (u64, ctypes.c_uint32, ctypes.c_int, i64)),
        ("new_nve", pointer, (u64, i64, u64)),
        ("new_clock", pointer, (u64, ctypes.c_uint32, i64)),
        ("new_lru", pointer, (u64, i64)),
        ("delete_policy", None, (pointer,)),
        ("access_keys", u64, (pointer, pointer, u64)),
        ("holds_key", ctypes.c_int, (pointer, i64)),
        ("rows_written", u64, (pointer,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
