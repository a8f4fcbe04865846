"""A cache belongs to the process that made it."""

import subprocess
import sys

FORK = """
import os
import numpy as np
from gpu_cache import EmbeddingCache
from kernels.errors import DeviceUnavailableError

keys, rows = np.arange(1, 4), np.ones((3, 2), dtype=np.float32)
uses = (lambda: cache.query(keys), lambda: cache.replace(keys, rows), lambda: cache.stats(), lambda: cache.dump())
cache = EmbeddingCache(2, 100, "runner")
cache.replace(keys, rows)
child = os.fork()
if child == 0:
    refused = 0
    for use in uses:
        try:
            use()
        except DeviceUnavailableError:
            refused += 1
    with EmbeddingCache(2, 100, "runner") as own:
        own.replace(keys, rows)
        found = own.device.to_host(own.query(keys).rows)
    os._exit(10 * int(found.sum()) + refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cache.device.to_host(cache.query(keys).rows).sum())
"""


def test_a_forked_child_cannot_use_its_parents_cache_and_can_make_its_own():
    told = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)

    assert told.stdout.split() == ["64", "6.0"], told.stderr
