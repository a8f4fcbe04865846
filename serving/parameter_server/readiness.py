"""Whether requests for a model can succeed, for load balancers."""

from collections.abc import Sequence
from random import randrange

import numpy as np

from serving.errors import StoreError
from serving.parameter_server.circuit_breaker import CallThreads
from serving.parameter_server.table import ServedTable
from serving.parameter_server.tier import Tier

# Smaller keys also fit tables of uint32 keys.
KEY_BOUND = 2**31


class Readiness:
    """Remembers how the tiers answered last. Every method may be called from any thread, and none waits.

    A load balancer sends no requests to a model that is not ready, so no request could show the recovery. A thread asks
    for a row instead. Its key is random, because a tier may have lost some partitions and not others.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Take the tiers, fastest first; start no thread yet."""
        self._tiers = tuple(tiers)
        self._threads = CallThreads("hotrow-readiness", 1)

    def is_answering(self, tables: Sequence[ServedTable]) -> bool:
        """Whether each of ``tables`` has a tier that answered its last request, or was not asked yet."""
        silent = [held for held in tables if all(tier.is_silent(held.name) for tier in self._tiers)]
        if silent and not self._threads.is_full:
            self._threads.submit(lambda: self._ask(silent))
        return not silent

    def close(self) -> None:
        """Stop asking; a thread whose call hangs ends with the call, or with the process."""
        self._threads.close()

    def _ask(self, tables: Sequence[ServedTable]) -> None:
        for held in tables:
            key = np.array([randrange(KEY_BOUND)], dtype=np.int64)
            for tier in self._tiers:
                if not isinstance(tier.fetch(held, key), StoreError):
                    break
