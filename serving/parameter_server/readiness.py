"""Whether requests for a model can succeed at all, as a load balancer wants to know before it sends any."""

from collections.abc import Sequence
from random import randrange

import numpy as np

from serving.errors import StoreError
from serving.parameter_server.circuit_breaker import CallThreads
from serving.parameter_server.table import ServedTable
from serving.parameter_server.tier import Tier

# Keys below fit tables of uint32 keys, too.
KEY_BOUND = 2**31


class Readiness:
    """Tells it from how the tiers answered last. Every method may be called from any thread, and waits for nobody.

    Nobody sends requests where it is told that they fail, so that they could not tell when that is over: then a thread
    asks for a row instead, of a key drawn at random, for a tier that lacks a part of its rows answers about the others.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Take the tiers, fastest first; start no thread yet."""
        self._tiers = tuple(tiers)
        self._threads = CallThreads("hotrow-readiness", 1)

    def is_answering(self, tables: Sequence[ServedTable]) -> bool:
        """Whether of each of ``tables`` some tier answered when it was asked last, or was not asked yet."""
        silent = [held for held in tables if all(tier.is_silent(held.name) for tier in self._tiers)]
        if silent and not self._threads.is_full:
            self._threads.submit(lambda: self._ask(silent))
        return not silent

    def close(self) -> None:
        """Ask no more; a thread whose call hangs ends when that does, or with the process."""
        self._threads.close()

    def _ask(self, tables: Sequence[ServedTable]) -> None:
        for held in tables:
            key = np.array([randrange(KEY_BOUND)], dtype=np.int64)
            for tier in self._tiers:
                if not isinstance(tier.fetch(held, key), StoreError):
                    break
