"""A store as one tier of a parameter server: what to do when it does not answer."""

import logging
import threading

from kernels.host import RowDtype
from serving.errors import StoreError, StoreFullError
from serving.model.records import Combiner
from serving.parameter_server.counters import TableCounting
from serving.storage.row_dtype import rounded
from serving.storage.store import Keys, Mask, PooledStore, RowPtrs, Store, Vectors

logger = logging.getLogger(__name__)


class Tier:
    """One store, and whether it is answering. An outage is logged once when it starts and once when it ends."""

    def __init__(self, store: Store) -> None:
        """Take ``store`` as answering."""
        self.store = store
        self.name = store.name
        self._pooled = store if isinstance(store, PooledStore) else None
        self._lock = threading.Lock()  # guards the flag below, so that each outage is logged once
        self._is_down = False

    def fetch(self, table: str, keys: Keys, out: Vectors, counting: TableCounting) -> Mask | StoreError:
        """Return which keys were found, as ``Store.fetch`` does, or the error of a tier that did not answer."""
        try:
            found = self.store.fetch(table, keys, out)
        except StoreError as err:
            return self._failed(err, counting)
        self._answered()
        return found

    def fetch_pooled(
        self, table: str, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, counting: TableCounting
    ) -> Mask | StoreError | None:
        """Return the same as ``fetch``, for ``PooledStore.fetch_pooled``; None where the store does not pool."""
        if self._pooled is None:
            return None
        try:
            found = self._pooled.fetch_pooled(table, keys, row_ptrs, out, combiner)
        except StoreError as err:
            return self._failed(err, counting)
        self._answered()
        return found

    def gives_rounded(self, row_dtype: RowDtype) -> bool:
        """Whether rows of a table of ``row_dtype`` come from here as that type rounds them: see ``PooledStore``."""
        return row_dtype != "fp32" and self._pooled is not None

    def as_served(self, table: str, row_dtype: RowDtype, keys: Keys, rows: Vectors) -> Vectors:
        """Rows that this tier gave, as every tier of the server gives them: rounded to ``row_dtype``, once.

        Raises:
            StoreError: a store that keeps float32 has a value that ``row_dtype`` cannot hold.
        """
        return rows if self.gives_rounded(row_dtype) else rounded(self.name, table, row_dtype, keys, rows)

    def promote(self, table: str, keys: Keys, rows: Vectors, counting: TableCounting) -> None:
        """Take rows that a slower tier held, if there is room for them."""
        try:
            self.store.insert(table, keys, rows)
        except StoreFullError:
            return
        except StoreError as err:
            self._failed(err, counting)

    def _failed(self, error: StoreError, counting: TableCounting) -> StoreError:
        counting.tier_failed(self.name)
        with self._lock:
            started, self._is_down = not self._is_down, True
        if started:
            logger.warning("tier %s does not answer: %s", self.name, error)
        return error

    def _answered(self) -> None:
        if self._is_down:
            with self._lock:
                ended, self._is_down = self._is_down, False
            if ended:
                logger.warning("tier %s answers again", self.name)
