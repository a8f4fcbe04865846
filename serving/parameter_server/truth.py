"""One table in its source of truth, as its caches see it."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import numpy as np

from serving.errors import AdditionError, ConfigError, StoreError, StoreFullError
from serving.parameter_server.first_rows import FirstRows
from serving.parameter_server.table import Table
from serving.parameter_server.tier_table import Tier, TierTable
from serving.storage.marker import NOT_LOADED, Marker
from serving.storage.rocksdb.table import RocksDbTable
from serving.storage.store import Batches, Keys, StoreTable, Vectors

logger = logging.getLogger(__name__)

LOAD_BATCH_ROWS = 65536
ALL_ROWS = FirstRows()


class TruthTable(TierTable):
    """A table in the last tier; see ``storage.store.Truth``.

    Attributes:
        reached: see ``LastingTable.reached``, before any cache got rows: a cache may miss later changes.
        is_loaded: every tier has the table, so the model's files may be removed.
    """

    def __init__(self, tier: Tier, table: Table) -> None:
        """Assume that the tier answers."""
        super().__init__(tier, table)
        self.reached: Mapping[str, str] = {}
        self.is_loaded = False
        self._digest = ""  # of the marker when the table was loaded

    @property
    def writes(self) -> bool:
        """See ``LastingStore.writes``."""
        return self.lasting is None or self.lasting.store.writes

    @property
    def view(self) -> RocksDbTable | None:
        """The table in a database that another process writes: what this process sees of it lags behind."""
        return self.stored if isinstance(self.stored, RocksDbTable) and not self.writes else None

    @property
    def has_rows_of_files(self) -> bool:
        """Whether the files have the same rows: nothing changed them, and the truth was loaded from these files."""
        marker = self.marker()
        return not marker.changed and marker.digest == self.table.source.digest

    def marker(self) -> Marker:
        """See ``Truth.marker``.

        Raises:
            StoreError: this process reads a database, and its writer has loaded other files since.
        """
        marker = self.lasting.marker() if self.lasting is not None else None
        if marker is not None and marker.digest == NOT_LOADED:
            return replace(marker, digest=self.table.source.digest, rows=self.table.source.model.rows)
        if marker is not None:
            self._digest = self._digest or marker.digest
            if marker.digest != self._digest:
                raise self._error("another process has loaded it from other files: load the model again")
        else:
            changed = self.lasting is not None or not self.tier.settings.fills_at_start
            marker = Marker(self.table.source.digest, self.table.source.model.rows, changed=changed)
        if self.table.is_written and marker.current_caches is None:  # a truth other than RocksDB does not keep them
            return replace(marker, changed=True, current_caches=())
        return marker

    def write_flags(self, *, changed: bool | None = None, current_caches: tuple[str, ...]) -> None:
        """See ``LastingTable.write_flags``; nothing happens in memory."""
        if self.lasting is not None:
            self.lasting.write_flags(changed=changed, current_caches=current_caches)

    def batches(self) -> Batches:
        """See ``Truth.batches``. Until the table is loaded everywhere, unchanged rows come in the files' order."""
        if self.lasting is not None:
            self.lasting.store.catch_up()
        batches: Batches = iter(())
        if not self.is_loaded and self.has_rows_of_files:
            batches = self.table.source.model.batches(LOAD_BATCH_ROWS)
        elif self.may_be_copied:
            batches = self.stored.items(LOAD_BATCH_ROWS)
        else:
            self.log_no_copies()
        for batch in batches:
            if self.table.clock.is_gone:
                raise self._error("the table was unloaded")
            yield batch

    def insert_absent(self, keys: Keys, rows: Vectors) -> int:
        """See ``Truth.insert_absent``."""
        clock = self.table.clock
        with clock.lock:
            removed_keys = set[int]().union(*(cache.removed_keys or () for cache in self.table.caches))
            removed = np.fromiter(removed_keys, dtype=np.int64)
            is_new = ~self.stored.fetch(keys, np.empty_like(rows)) & ~np.isin(keys, removed)
            if is_new.any():
                if self.lasting is not None:
                    self.lasting.write_flags(changed=True)  # caches may miss these rows
                try:
                    self.stored.insert(keys[is_new], rows[is_new])
                finally:
                    clock.note(keys[is_new])  # copies may remember that no tier holds these keys
        return int(np.count_nonzero(is_new))

    def copy_to(self, cache: StoreTable, first_rows: FirstRows = ALL_ROWS) -> None:
        """See ``Truth.copy_to``. Under the table's lock, each row that is copied is the newest."""
        try:
            hottest = first_rows.hottest(self.table.name)
        except ConfigError as err:  # the file has changed since the start
            raise StoreError(cache.store.name, self.table.name, str(err)) from err
        for keys, _ in cache.items(LOAD_BATCH_ROWS):
            cache.evict(keys)
        if not self.may_be_copied:
            return self.log_no_copies()
        most_rows = first_rows.most_rows(self.marker().rows, cache.capacity_rows)
        for keys in chain([hottest], (keys for keys, _ in self.batches())):
            with self.table.clock.lock:
                room = most_rows - cache.count()
                if room <= 0:
                    return
                held_keys, rows = self.held_rows(keys)
                try:
                    cache.insert(held_keys[:room], rows[:room])
                except StoreFullError:
                    return

    def check_adding(self, *, is_from_log: bool) -> None:
        """Refuse to add to rows where the sum would not be exact. Several processes can only add what a log brings.

        Raises:
            AdditionError: the truth keeps narrow rows, evicts rows, or other processes write to it too.
        """
        reason = ""
        if not self.tier.store.has_one_writer and not is_from_log:
            reason = "several processes write this tier"
        elif self.table.spec.row_dtype != "fp32":
            reason = f"{self.table.spec.row_dtype} rows round every sum"
        elif self.stored.evicts:
            reason = "this tier evicts rows, and no tier is behind it"
        if reason:
            raise AdditionError(self.tier.name, self.table.name, f"rows cannot be added to, because {reason}")

    def held_rows(self, keys: Keys) -> tuple[Keys, Vectors]:
        """Those of ``keys`` that the truth holds, and their rows."""
        rows = np.empty((keys.size, self.table.dim), dtype=np.float32)
        found = self.stored.fetch(keys, rows)
        return keys[found], rows[found]

    def log_no_copies(self) -> None:
        """Log that caches get none of the rows."""
        reason = f"in a faster tier its {self.table.spec.row_dtype} rows would be rounded twice"
        logger.warning("%s is served from %s alone: %s", self.table.name, self.tier.name, reason)

    def _error(self, reason: str) -> StoreError:
        return StoreError(self.tier.name, self.table.name, reason)
