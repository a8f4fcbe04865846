"""The order of a table's writes: so that a row which was read before a change is not stored after it."""

import threading

import numpy as np
from numpy.typing import NDArray

from serving.storage.store import Keys, Mask

_STRIPE_BITS = 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: spreads keys that follow each other


class Changes:
    """One writer of a table at a time, and when each key changed last.

    A promotion copies a row that it has read a while ago. It takes ``now`` before it reads, and the lock before it
    writes, and leaves out the keys that changed between. Keys share 4,096 stripes: of a key that did not change it may
    be said that it did, never the other way round.

    Attributes:
        lock: held while rows of the table are written or the table goes.
        is_gone: the table is no longer served: nothing is to be written. Changed with the lock held.
    """

    def __init__(self) -> None:
        """No key has changed."""
        self.lock = threading.Lock()
        self.is_gone = False
        self._now = 0
        self._changed_at = np.zeros(1 << _STRIPE_BITS, dtype=np.int64)

    def now(self) -> int:
        """The moment; needs no lock."""
        return self._now

    def note(self, keys: Keys) -> None:
        """``keys`` have changed in all tiers. The lock is held, since before the first tier was written.

        Whoever read ``now`` before this may have read a row as it was.
        """
        self._changed_at[_stripes(keys)] = self._now + 1
        self._now += 1

    def unchanged_since(self, keys: Keys, moment: int) -> Mask:
        """Which of ``keys`` have certainly not changed since ``moment``. The lock is held."""
        unchanged: Mask = self._changed_at[_stripes(keys)] <= moment
        return unchanged


def _stripes(keys: Keys) -> NDArray[np.uint64]:
    return (keys.view(np.uint64) * _GOLDEN) >> np.uint64(64 - _STRIPE_BITS)
