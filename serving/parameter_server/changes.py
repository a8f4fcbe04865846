"""The order of a table's writes: so that a row which was read before a change is not stored after it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

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

    Copies outside the tiers are stored beside a writer, inside ``storing``. His change is noted, and then their holders
    told, when all tiers have it: a row that was read before is stored before that, and then removed, or is left out.

    Attributes:
        lock: held while rows of the table are written or the table goes.
    """

    def __init__(self) -> None:
        """No key has changed."""
        self.lock = threading.Lock()
        self._is_gone = False
        self._now = 0
        self._changed_at = np.zeros(1 << _STRIPE_BITS, dtype=np.int64)
        self._storing = threading.Lock()  # guards the three above where copies are stored; taken after ``lock``
        self._telling = threading.Lock()  # guards the listeners, and is held while they are told; taken after ``lock``
        self._listeners: tuple[Callable[[Keys], None], ...] = ()

    @property
    def is_gone(self) -> bool:
        """Whether the table is no longer served: nothing is to be written."""
        return self._is_gone

    def end(self) -> None:
        """The table is no longer served. The lock is held."""
        with self._storing:
            self._is_gone = True

    def now(self) -> int:
        """The moment; needs no lock."""
        return self._now

    def note(self, keys: Keys) -> None:
        """``keys`` have changed in all tiers. The lock is held, since before the first tier was written.

        Whoever read ``now`` before this may have read a row as it was.
        """
        with self._storing:
            self._changed_at[_stripes(keys)] = self._now + 1
            self._now += 1
        with self._telling, ExitStack() as told:  # each is told, though another fails
            for listener in self._listeners:
                told.callback(listener, keys)

    @contextmanager
    def storing(self, keys: Keys, moment: int) -> Iterator[Mask]:
        """Which of ``keys``, read after ``moment``, copies may be stored of inside the block: bool[N].

        Nobody else stores copies, and no change is noted, until the block ends.
        """
        with self._storing:
            yield self.unchanged_since(keys, moment) & (not self._is_gone)

    def listen(self, listener: Callable[[Keys], None]) -> None:
        """From now on tell ``listener`` which keys have changed, with the lock held: it must not take it.

        Neither this nor ``unlisten`` waits for who is writing: to fill a whole tier may take minutes.
        """
        with self._telling:
            self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[Keys], None]) -> None:
        """Tell it no more; when this returns, it is not being told. One that does not listen is no error."""
        with self._telling:
            self._listeners = tuple(one for one in self._listeners if one != listener)

    def unchanged_since(self, keys: Keys, moment: int) -> Mask:
        """Which of ``keys`` have certainly not changed since ``moment``. The lock is held."""
        unchanged: Mask = self._changed_at[_stripes(keys)] <= moment
        return unchanged


def _stripes(keys: Keys) -> NDArray[np.uint64]:
    return (keys.view(np.uint64) * _GOLDEN) >> np.uint64(64 - _STRIPE_BITS)
