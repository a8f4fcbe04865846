"""All rows of a table, for a tier that lost them, while they change: what is given ends as the rows are then."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack

import numpy as np

from kernels.host import KeyIndex
from serving.parameter_server.changes import Changes
from serving.storage.store import Keys, Mask, Vectors

# Most keys that are given while changes wait, unless they come faster than they are taken.
MOST_KEYS = 65536


def rows_beside_changes(
    rows: Iterator[tuple[Keys, Vectors]],
    read: Callable[[Keys], tuple[Keys, Vectors]],
    changes: Changes,
    check: Callable[[], None],
    until_taken: ExitStack,
) -> Generator[tuple[Keys, Vectors | None]]:
    """Give all rows, as ``ForgetfulStore.refill`` wants them: those that have changed since the beginning at the end.

    Each batch is given with the lock of ``changes`` held, so that no row comes behind a change of it.

    Args:
        rows: all rows; they may be as old as the beginning.
        read: reads keys as they are now; returns those that have rows, and these.
        changes: the table's.
        check: called before rows are given; raises where they are not to be given any more.
        until_taken: from the end on holds the lock, so that nothing changes before all has been taken.
    """
    changed = _ChangedKeys()
    listener = changed.add
    changes.listen(listener)
    try:
        for keys, vectors in rows:
            with changes.lock:
                check()
                is_current = ~changed.contains(keys)
                yield keys[is_current], vectors[is_current]
        before = len(changed) + 1
        while MOST_KEYS < len(changed) < before:  # they become fewer, unless changes come faster than they are taken
            before = len(changed)
            for part in changed.take():
                with changes.lock:
                    check()
                    yield part, None
                    yield read(part)
        until_taken.enter_context(changes.lock)
        check()
        for part in changed.take():
            yield part, None
            yield read(part)
    finally:
        changes.unlisten(listener)


class _ChangedKeys:
    """Keys that have changed, each once. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._index = KeyIndex()
        self._parts: list[Keys] = []

    def __len__(self) -> int:
        return len(self._index)

    def add(self, keys: Keys) -> None:
        """``keys`` have changed."""
        with self._lock:
            known = len(self._index)
            numbers, first = np.unique(self._index.find_or_insert(keys), return_index=True)
            self._parts.append(keys[first[numbers >= known]])

    def contains(self, keys: Keys) -> Mask:
        """Which of ``keys`` have changed."""
        with self._lock:
            has_changed: Mask = self._index.find(keys) >= 0
        return has_changed

    def take(self) -> list[Keys]:
        """All of them, in parts of at most ``MOST_KEYS``; what changes again is a change anew."""
        with self._lock:
            parts, self._parts, self._index = self._parts, [], KeyIndex()
        keys = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        return [keys[start : start + MOST_KEYS] for start in range(0, keys.size, MOST_KEYS)]
