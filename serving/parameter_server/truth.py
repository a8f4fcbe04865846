"""The source of truth of a table, as its caches see it."""

import logging
from dataclasses import replace
from itertools import chain

import numpy as np

from serving.errors import ConfigError, StoreError, StoreFullError
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.table import ServedTable
from serving.parameter_server.table_files import TableSource
from serving.parameter_server.tier import Tier
from serving.storage.marker import NOT_LOADED, Marker
from serving.storage.row_codec import may_be_copied
from serving.storage.store import Batches, Keys, Store, TableSpec, Vectors

logger = logging.getLogger(__name__)

LOAD_BATCH_ROWS = 65536
ALL_ROWS = FirstRows()


class TableTruth:
    """The source of truth of one served table; see ``storage.store.Truth``."""

    def __init__(self, tier: Tier, table: ServedTable, source: TableSource) -> None:
        """Take the last tier, and the file that the table was loaded from."""
        self._tier = tier
        self._store = tier.store
        self._table = table
        self._source = source
        self._is_loaded = False
        self._digest = ""  # of the marker when the table was loaded

    @property
    def writes(self) -> bool:
        """See ``Store.writes``."""
        return self._store.writes

    @property
    def gives_rows(self) -> bool:
        """Whether caches may keep its rows: not if they would be rounded twice."""
        return may_be_copied(self._store, self._source.spec.row_dtype)

    @property
    def has_rows_of_files(self) -> bool:
        """Whether the files have the same rows: nothing changed them, and the truth was loaded from these files."""
        held = self.marker()
        return not held.changed and held.digest == self._source.digest

    def marker(self) -> Marker:
        """See ``Truth.marker``.

        Raises:
            StoreError: this process reads a database, and its writer has loaded other files since.
        """
        held = self._store.marker(self._table.name) if self._store.outlives_process else None
        if held is not None and held.digest == NOT_LOADED:
            return replace(held, digest=self._source.digest, rows=self._source.model.rows)
        if held is not None:
            self._digest = self._digest or held.digest
            if held.digest != self._digest:
                reason = "another process has loaded it from other files: load the model again"
                raise StoreError(self._store.name, self._table.name, reason)
        else:
            changed = self._store.outlives_process or not self._tier.settings.is_initialized
            held = Marker(self._source.digest, self._source.model.rows, changed=changed)
        if self._table.is_written and held.current_caches is None:  # a truth other than RocksDB does not keep them
            return replace(held, changed=True, current_caches=())
        return held

    def batches(self) -> Batches:
        """See ``Truth.batches``. Until the table is loaded everywhere, unchanged rows come in the files' order."""
        self._store.catch_up()
        batches: Batches = iter(())
        if not self._is_loaded and self.has_rows_of_files:
            batches = self._source.model.batches(LOAD_BATCH_ROWS)
        elif self.gives_rows:
            batches = self._store.items(self._table.name, LOAD_BATCH_ROWS)
        else:
            self.log_no_copies()
        for batch in batches:
            if self._table.clock.is_gone:
                raise StoreError(self._store.name, self._table.name, "the table was unloaded")
            yield batch

    def take(self, keys: Keys, rows: Vectors) -> int:
        """See ``Truth.take``."""
        name, clock = self._table.name, self._table.clock
        with clock.lock:
            removed = np.fromiter(self._table.removed_keys or (), dtype=np.int64)
            is_new = ~self._store.fetch(name, keys, np.empty_like(rows)) & ~np.isin(keys, removed)
            if is_new.any():
                self._store.write_flags(name, changed=True)  # caches may miss these rows
                try:
                    self._store.insert(name, keys[is_new], rows[is_new])
                finally:
                    clock.note(keys[is_new])  # copies may remember that no tier holds these keys
        return int(np.count_nonzero(is_new))

    def refill(self, cache: Store, first_rows: FirstRows = ALL_ROWS) -> None:
        """See ``Truth.refill``. Under the table's lock, each row that is copied is the newest."""
        spec = self._source.spec
        try:
            hottest = first_rows.hottest(spec.name)
        except ConfigError as err:  # the file has changed since the start
            raise StoreError(cache.name, spec.name, str(err)) from err
        for keys, _ in cache.items(spec.name, LOAD_BATCH_ROWS):
            cache.evict(spec.name, keys)
        if not self.gives_rows:
            return self.log_no_copies()
        most_rows = first_rows.most_rows(self.marker().rows, cache.capacity_rows(spec.name))
        for keys in chain([hottest], (keys for keys, _ in self.batches())):
            with self._table.clock.lock:
                room = most_rows - cache.count(spec.name)
                if room <= 0:
                    return
                held_keys, rows = held_rows(self._store, spec, keys)
                try:
                    cache.insert(spec.name, held_keys[:room], rows[:room])
                except StoreFullError:
                    return

    def log_no_copies(self) -> None:
        """Log that caches get none of the rows."""
        reason = f"in a faster tier its {self._source.spec.row_dtype} rows would be rounded twice"
        logger.warning("%s is served from %s alone: %s", self._table.name, self._store.name, reason)

    def was_loaded(self) -> None:
        """The model's files may be removed from now on."""
        self._is_loaded = True


def held_rows(store: Store, spec: TableSpec, keys: Keys) -> tuple[Keys, Vectors]:
    """Those of ``keys`` that ``store`` holds, and their rows."""
    rows = np.empty((keys.size, spec.dim), dtype=np.float32)
    found = store.fetch(spec.name, keys, rows)
    return keys[found], rows[found]
