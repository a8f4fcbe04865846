"""Promotion: rows found in a slower tier are copied into faster tiers, in the background."""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serving.parameter_server.table import ServedTable
from serving.parameter_server.tier import Tier
from serving.storage.store import Keys, Vectors

logger = logging.getLogger(__name__)

# Waiting rows over all tables. Above it, the oldest are dropped: a key that is requested often is offered again soon.
MOST_WAITING_BYTES = 64 * 2**20
# How long to wait for a table that is being written: an update may wait for a disk, and rows of other tables wait too.
LONGEST_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class _Offer:
    held: ServedTable
    tiers: Sequence[Tier]
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
        self._condition = threading.Condition()  # guards the fields below
        self._offers: deque[_Offer] = deque()
        self._waiting_bytes = 0
        self._is_busy = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def offer(self, held: ServedTable, tiers: Sequence[Tier], keys: Keys, rows: Vectors, version: int) -> None:
        """Queue rows for ``tiers``, which do not have them; never waits. Without room, the oldest rows are dropped.

        Args:
            held: the table.
            tiers: fastest first.
            keys: int64[N]; duplicates are allowed.
            rows: float32[N, D], as the slower tier returned them; the caller must not change the arrays.
            version: ``VersionClock.now`` before the rows were read.
        """
        takers = []
        for tier in tiers:
            if tier.takes_promotions(held):
                takers.append(tier)
            else:
                tier.drop_promotion(held, keys.size)
        if takers:
            self._queue(held, takers, keys, rows, version)

    def _queue(self, held: ServedTable, tiers: Sequence[Tier], keys: Keys, rows: Vectors, version: int) -> None:
        most = MOST_WAITING_BYTES // rows[:1].nbytes
        offer, dropped = _Offer(held, tiers, keys[:most], rows[:most], version), [(tiers, held, keys.size - most)]
        with self._condition:
            if self._is_closed:
                return
            while self._waiting_bytes + offer.rows.nbytes > MOST_WAITING_BYTES:
                oldest = self._offers.popleft()
                self._waiting_bytes -= oldest.rows.nbytes
                dropped.append((oldest.tiers, oldest.held, oldest.keys.size))
            self._offers.append(offer)
            self._waiting_bytes += offer.rows.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hotrow-promotion", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        for takers, table, count in dropped:
            for tier in takers:
                tier.drop_promotion(table, max(count, 0))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the queue is empty; returns whether it was within ``timeout_s``."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._offers and not self._is_busy, timeout_s)

    def close(self) -> None:
        """Drop waiting rows, and return when the thread has ended."""
        with self._condition:
            self._is_closed = True
            self._offers.clear()
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (offer := self._next()) is not None:
            try:
                _promote(offer)
            except Exception:  # a thread's top: the rows stay where they are, and the next rows are promoted
                logger.exception("rows of %s were not promoted", offer.held.name)
            del offer  # an idle thread keeps no rows

    def _next(self) -> _Offer | None:
        with self._condition:
            self._is_busy = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._offers or self._is_closed)
            if self._is_closed:
                return None
            offer = self._offers.pop()
            self._waiting_bytes -= offer.rows.nbytes
            self._is_busy = True
            return offer


def _promote(offer: _Offer) -> None:
    keys, first = np.unique(offer.keys, return_index=True)
    clock = offer.held.clock
    if not clock.lock.acquire(timeout=LONGEST_WAIT_S):
        for tier in offer.tiers:
            tier.drop_promotion(offer.held, keys.size)
        return
    try:
        if clock.is_gone:
            return
        fresh = clock.unchanged_since(keys, offer.version)
        stale = int(fresh.size - np.count_nonzero(fresh))
        for tier in reversed(offer.tiers):  # slowest first, as in ``updates``
            tier.drop_promotion(offer.held, stale)
            tier.promote(offer.held, keys[fresh], offer.rows[first[fresh]])
    finally:
        clock.lock.release()
