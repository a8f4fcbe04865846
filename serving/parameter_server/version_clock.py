"""The order of a table's writes, so that a row read before a change is never stored after it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from serving.storage.store import Keys, Mask

_STRIPE_BITS = 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: spreads neighbouring keys


class ModelVersions:
    """The version of all tables of a model: every change of any of them raises it.

    So one comparison says that no table has changed, however many there are.

    Attributes:
        now: the current version; reading it needs no lock.
        lock: guards ``now``, and what clocks note of changes where copies are stored; taken after a clock's lock.
    """

    def __init__(self) -> None:
        """Start with no changes."""
        self.now = 0
        self.lock = threading.Lock()

    @contextmanager
    def storing(self, clocks: "Sequence[VersionClock]", reads: Sequence[tuple[Sequence[Keys], int]]) -> Iterator[Mask]:
        """Yield which keys may be stored inside the block: bool[N], read after read, table after table.

        Args:
            clocks: of all tables of the model.
            reads: for each read, its keys of each table, and the version before them.

        No other copies are stored, and no change is noted, until the block ends.
        """
        with self.lock:
            if all(version == self.now for _, version in reads):
                yield np.ones(sum(of_table.size for keys, _ in reads for of_table in keys), dtype=np.bool_)
                return
            masks = [
                clock.storable(of_table, version)
                for keys, version in reads
                for clock, of_table in zip(clocks, keys, strict=True)
            ]
            yield np.concatenate(masks)


class VersionClock:
    """One writer of a table at a time, and the time of each key's last change.

    A promotion copies a row that it read a while ago. It notes ``now`` before it reads and takes the lock before it
    writes. It skips keys that changed in between. Keys share 4,096 stripes: the clock may report an unchanged key as
    changed, never the reverse.

    Copies outside the tiers are stored inside ``storing``, without the lock. A change is noted when every tier has it,
    and then the listeners are called. A row read before the change is stored before that call, and the listener removes
    it, or it is not stored.

    Attributes:
        lock: held while rows of the table are written, and while the table is removed.
        versions: of all tables of its model.
    """

    def __init__(self, versions: ModelVersions | None = None) -> None:
        """Start with no changes; ``versions`` is shared by the clocks of a model's tables."""
        self.lock = threading.Lock()
        self.versions = versions or ModelVersions()  # its lock guards the fields below where copies are stored
        self._is_gone = False
        self._changed_at = np.zeros(1 << _STRIPE_BITS, dtype=np.int64)
        self._notifying = threading.Lock()  # guards the listeners, and is held during their calls; taken after ``lock``
        self._listeners: tuple[Callable[[Keys], None], ...] = ()

    @property
    def is_gone(self) -> bool:
        """Whether the table is no longer served; nothing may be written then."""
        return self._is_gone

    def end(self) -> None:
        """Stop serving the table. The caller holds the lock."""
        with self.versions.lock:
            self._is_gone = True
            self.versions.now += 1

    def now(self) -> int:
        """The current version; needs no lock."""
        return self.versions.now

    def note(self, keys: Keys) -> None:
        """Note that ``keys`` changed in all tiers. The caller has held the lock since before the first write."""
        versions = self.versions
        with versions.lock:
            self._changed_at[_stripes(keys)] = versions.now + 1
            versions.now += 1
        with self._notifying, ExitStack() as calls:  # every listener is called, even if another one fails
            for listener in self._listeners:
                calls.callback(listener, keys)

    def storable(self, keys: Keys, version: int) -> Mask:
        """Which of ``keys``, read after ``version``, may be stored now. The caller holds the lock of the versions."""
        return self.unchanged_since(keys, version) & (not self._is_gone)

    def listen(self, listener: Callable[[Keys], None]) -> None:
        """Call ``listener`` with the keys of every later change. The lock is held then: it must not take it.

        ``listen`` and ``unlisten`` do not wait for a writer, because filling a tier may take minutes.
        """
        with self._notifying:
            self._listeners = (*self._listeners, listener)

    def unlisten(self, listener: Callable[[Keys], None]) -> None:
        """Stop calling ``listener``; no call is running when this returns. An unknown listener is no error."""
        with self._notifying:
            self._listeners = tuple(one for one in self._listeners if one != listener)

    def unchanged_since(self, keys: Keys, version: int) -> Mask:
        """Which of ``keys`` have certainly not changed since ``version``. The caller holds the lock."""
        unchanged: Mask = self._changed_at[_stripes(keys)] <= version
        return unchanged


def _stripes(keys: Keys) -> NDArray[np.uint64]:
    return (keys.view(np.uint64) * _GOLDEN) >> np.uint64(64 - _STRIPE_BITS)
