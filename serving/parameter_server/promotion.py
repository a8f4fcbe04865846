"""Promotion: rows found in a slower tier are copied into faster tiers, in the background."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.background import QueueWorker
from serving.parameter_server.tier_table import CacheTable
from serving.storage.store import Keys, Vectors

# Waiting rows over all tables. Above it, the oldest are dropped: a key that is requested often is offered again soon.
MOST_WAITING_BYTES = 64 * 2**20
# How long to wait for a table that is being written: an update may wait for a disk, and rows of other tables wait too.
LONGEST_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class _Offer:
    tiers: Sequence[CacheTable]
    keys: Keys
    rows: Vectors
    version: int


class Promoter:
    """A bounded stack of waiting rows, and one thread that stores them. Every method may be called from any thread.

    The newest rows go first. The longer a row waits, the likelier it has changed since it was read, and a changed row
    cannot be stored. In first-in order nearly all rows would be too old once updates are faster than the thread.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        self._worker = QueueWorker("hotrow-promotion")
        self._lock = threading.Lock()  # guards the two fields below
        self._offers: deque[_Offer] = deque()
        self._waiting_bytes = 0

    def offer(self, tiers: Sequence[CacheTable], keys: Keys, rows: Vectors, version: int) -> None:
        """Queue rows for ``tiers``, which do not have them; never waits. Without room, the oldest rows are dropped.

        Args:
            tiers: the table in each of them, fastest first.
            keys: int64[N]; duplicates are allowed.
            rows: float32[N, D], as the slower tier returned them; the caller must not change the arrays.
            version: ``VersionClock.now`` before the rows were read.
        """
        takers = []
        for tier in tiers:
            if tier.takes_promotions:
                takers.append(tier)
            else:
                tier.drop_promotion(keys.size)
        if takers:
            self._queue(takers, keys, rows, version)

    def _queue(self, tiers: Sequence[CacheTable], keys: Keys, rows: Vectors, version: int) -> None:
        most_rows = MOST_WAITING_BYTES // rows[:1].nbytes
        offer = _Offer(tiers, keys[:most_rows], rows[:most_rows], version)
        dropped = [(tiers, keys.size - most_rows)]
        with self._lock:
            while self._waiting_bytes + offer.rows.nbytes > MOST_WAITING_BYTES:
                oldest = self._offers.popleft()
                self._waiting_bytes -= oldest.rows.nbytes
                dropped.append((oldest.tiers, oldest.keys.size))
            self._offers.append(offer)
            self._waiting_bytes += offer.rows.nbytes
        if len(dropped) == 1:  # else the work of a dropped offer still waits
            self._worker.submit(self._promote_newest)
        for takers, count in dropped:
            for tier in takers:
                tier.drop_promotion(max(count, 0))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no rows wait; returns whether that happened within ``timeout_s``."""
        return self._worker.wait(timeout_s)

    def close(self) -> None:
        """Drop waiting rows, and return when the thread has ended."""
        self._worker.close()
        self._offers.clear()

    def _promote_newest(self) -> None:
        with self._lock:
            if not self._offers:
                return
            offer = self._offers.pop()
            self._waiting_bytes -= offer.rows.nbytes
        _promote(offer)


def _promote(offer: _Offer) -> None:
    keys, first = np.unique(offer.keys, return_index=True)
    clock = offer.tiers[0].table.clock
    if not clock.lock.acquire(timeout=LONGEST_WAIT_S):
        for tier in offer.tiers:
            tier.drop_promotion(keys.size)
        return
    try:
        if clock.is_gone:
            return
        fresh = clock.unchanged_since(keys, offer.version)
        stale = int(fresh.size - np.count_nonzero(fresh))
        for tier in reversed(offer.tiers):  # slowest first, as in ``write``
            tier.drop_promotion(stale)
            tier.promote(keys[fresh], offer.rows[first[fresh]])
    finally:
        clock.lock.release()
