"""What a tier has missed: until it has made up for that, its rows may be old, and none of them is served."""

import threading

import numpy as np

from serving.errors import StoreError
from serving.storage.store import ForgetfulStore, Keys, Store


class Backlog:
    """Tables that one tier could not be given, and keys whose change it did not take.

    Of such keys it must forget what it holds before it is asked again: then a slower tier answers for them. Changes are
    refused while there are any, so that there are never more than one call brings. Every method may be called from any
    thread.
    """

    def __init__(self, store: Store) -> None:
        """Begin with nothing missed by ``store``."""
        self._store = store
        self._forgetful = store if isinstance(store, ForgetfulStore) else None
        self._lock = threading.Lock()  # one ``make_up`` at a time; guards changes of the two below
        self._unloaded: dict[str, str] = {}  # why a table could not be loaded
        self._stale: dict[str, Keys] = {}  # by table

    def missed_load(self, table: str, reason: str) -> None:
        """The tier could not be given a table, for this reason."""
        with self._lock:
            self._unloaded[table] = reason

    def was_loaded(self, table: str) -> None:
        """The tier has been given the table, or need not have it any more."""
        with self._lock:
            self._unloaded.pop(table, None)

    def missed_change(self, table: str, keys: Keys) -> None:
        """The tier did not take new rows, or the removal, of int64[N] ``keys``."""
        with self._lock:
            self._stale[table] = np.concatenate((self._stale.get(table, keys[:0]), keys))

    def took_change(self, table: str, keys: Keys) -> None:
        """The tier has taken a change of ``keys``: as it was before, it is not to answer any more.

        Raises:
            StoreError: it cannot be told.
        """
        if self._forgetful is not None:
            self._forgetful.note_change(table, keys)

    def make_up(self, table: str) -> None:
        """Have the tier forget what it holds of keys whose change it missed, if any.

        Raises:
            StoreError: it does not, or it has not been given the table: it is not to be asked.
        """
        if table not in self._unloaded and table not in self._stale:  # as ever: takes no lock
            return
        with self._lock:
            reason, keys = self._unloaded.get(table), self._stale.get(table)
            if reason is not None:
                raise StoreError(self._store.name, table, reason)
            if keys is not None:
                self._store.evict(table, keys)
                self.took_change(table, keys)
                del self._stale[table]
