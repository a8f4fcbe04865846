"""One table of a ``RocksDbStore``."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from serving.errors import StoreError
from serving.metrics import MetricSample
from serving.storage.hps_layout import storable
from serving.storage.marker import NOT_LOADED, Marker, kept_rows
from serving.storage.rocksdb.database import Database, RowsChange
from serving.storage.rocksdb.family import FamilyRows, family_rows
from serving.storage.rocksdb.follower import followed_rows
from serving.storage.rocksdb.shown import ShownChanges
from serving.storage.rocksdb.sorted_files import sorted_files
from serving.storage.row_codec import RowCodec, rounded
from serving.storage.store import (
    Batches,
    Change,
    Keys,
    LastingTable,
    Mask,
    Reached,
    StoreTable,
    TableSpec,
    Vectors,
    with_sums,
)
from serving.storage.tables import NoRows

if TYPE_CHECKING:
    from serving.storage.rocksdb.store import RocksDbStore

logger = logging.getLogger(__name__)


class RocksDbTable(LastingTable):
    """A column family. Reads take no lock.

    ``_rows`` is replaced as a whole. It is None while the table is not open. It is ``NoRows`` after another process,
    which writes, has dropped the table.
    """

    store: "RocksDbStore"

    def __init__(self, store: "RocksDbStore", spec: TableSpec) -> None:
        """Read nothing yet."""
        super().__init__(store, spec)
        self._codec = RowCodec(store.name, spec, store.row_dtype)
        self._rows: FamilyRows | NoRows | None = None
        self._digest: str | None = None  # of the files that the table was opened with
        self._logged = ""  # the last message about a difference from the writer's table
        self._shown = ShownChanges(spec.dim)  # of a read-only store

    @property
    def capacity_rows(self) -> int | None:
        """See ``StoreTable.capacity_rows``."""
        self._open_rows()
        return None

    def open(self, rows: int) -> None:
        """See ``StoreTable.open``; a read-only store must already have the table."""
        with self.store.changing(self.spec.name) as database:
            self.store.check_name(self)
            if database.family(self.spec.name) is None:
                if not self.store.writes:
                    raise self._error("the database has no such table, and is open read-only")
                database.create_family(self.spec.name)
            self._take(database)
            self.store.add(self)

    def count(self) -> int:
        """See ``StoreTable.count``; reads every row."""
        rows = self._open_rows()
        return rows.count() if isinstance(rows, FamilyRows) else 0

    @property
    def estimated_rows(self) -> int:
        """RocksDB's fast guess at ``count``, for progress bars and metrics only."""
        rows = self._open_rows()
        return rows.estimated_rows() if isinstance(rows, FamilyRows) else 0

    def samples(self) -> Iterable[MetricSample]:
        """See ``StoreTable.samples``."""
        try:
            rows = self.estimated_rows
        except StoreError:  # the table or the store is being closed
            return ()
        help_text = "RocksDB's estimate of its rows: too high after rows were overwritten."
        return (MetricSample("hotrow_tier_estimated_rows", help_text, (), rows, is_gauge=True),)

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``StoreTable.fetch``."""
        self._check_dim(out.shape[1])
        if not len(self._shown):
            return self._fetch_view(self._open_rows(), keys, out)
        # The view is read after the changes, because changes are forgotten after the view has them.
        return self._fetch_shown(self._open_rows, keys, out)

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """See ``StoreTable.insert``; rows are written in batches, each whole or absent, and are then on the disk."""
        self.write(Change(self, keys, rows))

    def evict(self, keys: Keys) -> None:
        """See ``StoreTable.evict``."""
        self.write(Change(self, keys, None))

    def write(self, change: Change[StoreTable], reached: Reached | None = None) -> None:
        """See ``RocksDbStore.write``."""
        self.store.write([change], reached)

    def items(self, batch_rows: int = 65536) -> Batches:
        """See ``StoreTable.items``; rows as they were when the walk began, in the order of the keys' raw bytes."""
        yield from self._open_rows().items(batch_rows)

    def close(self) -> None:
        """See ``StoreTable.close``: running calls keep the database open until they end."""
        with self.store.locked():
            self.store.remove(self)
            rows, self._rows = self._rows, None
            if isinstance(rows, FamilyRows) and self.store.is_closed:
                rows.close()

    def marker(self) -> Marker | None:
        """See ``LastingTable.marker``; in a read-only store every cache is current, as the writer refills caches."""
        with self.store.using(self.spec.name) as database:
            return database.marker(self.spec.name)

    def load(self, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """See ``LastingTable.load``.

        The rows are first sorted and written to files, while the table stays as it is. Then three short steps follow:
        the marker goes, the files replace or join the rows, and the new marker is written. Other tables can be changed
        all the while.
        """
        name, codec, store = self.spec.name, self._codec, self.store
        with store.loading(name) as database:
            store.check_name(self)
            if not store.writes:
                raise self._not_loaded(database, f"{marker.digest} as {codec.row_dtype}")
            written = sorted_files(database.path / "loading", codec, batches)
            with written as (files, rows), store.using(name):
                keeps_rows = keep and self._has_rows_to_keep(database)
                if database.record(name) is not None:  # a cache may have rows of an earlier load
                    marker = replace(marker, current_caches=())
                database.begin_load(name, keeps_rows)
                try:
                    database.ingest(name, files)
                    if keeps_rows:
                        rows = self._family_rows(database).count()
                    changed = marker.changed or keeps_rows
                    database.end_load(name, replace(marker, rows=rows, row_dtype=codec.row_dtype, changed=changed))
                finally:
                    self._take(database)  # the old column family must not be read any more
                    store.add(self)
            if store.warms_up:
                database.read_ahead(wait=True)

    def write_flags(self, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None) -> None:
        """See ``LastingTable.write_flags``; a table of another program gets one, a read-only store does nothing."""
        with self.store.using(self.spec.name) as database:
            if not self.store.writes:
                return
            self._open_rows()
            marker = database.record(self.spec.name)
            marker = marker or Marker(NOT_LOADED, row_dtype=self._codec.row_dtype, changed=True)
            new = replace(
                marker,
                changed=marker.changed if changed is None else changed,
                current_caches=marker.current_caches if current_caches is None else current_caches,
            )
            if new != marker:
                database.write_flags(self.spec.name, new)

    def reached(self) -> Mapping[str, str]:
        """See ``LastingTable.reached``."""
        with self.store.using(self.spec.name) as database:
            return database.reached(self.spec.name)

    def show(
        self, change: Change[StoreTable], is_reached: Callable[[Mapping[str, str]], bool]
    ) -> Change[StoreTable] | None:
        """Show readers of a read-only store a change that another process writes, until this process's view has it.

        Args:
            change: of this table.
            is_reached: whether the states of a view, see ``reached``, say that it has the change.

        Returns:
            The change with the rows that result; None if the view has it already.
        """
        view = self._open_rows()  # all of the call: a newer view may have the change
        if isinstance(view, FamilyRows) and is_reached(view.reached):
            self._shown.forget(change.keys)
            return None
        change = with_sums(change, self.spec.name, partial(self._fetch_shown, lambda: view))
        keys, rows, name, row_dtype = change.keys, change.rows, self.store.name, self._codec.row_dtype
        self._shown.change(keys, None if rows is None else rounded(name, self.spec.name, row_dtype, keys, rows))
        return change

    def rotate_shown(self) -> None:
        """Begin another generation of shown changes, unless there is an old one."""
        if len(self._shown) and not self._shown.has_old:
            self._shown.rotate()

    def drop_shown(self, is_reached: Callable[[Mapping[str, str]], bool]) -> bool:
        """Forget the old generation of shown changes if the view has them; returns whether there is none."""
        view = self._rows
        if self._shown.has_old and isinstance(view, FamilyRows) and is_reached(view.reached):
            self._shown.drop_old()
        return not self._shown.has_old

    @property
    def shown_bytes(self) -> int:
        """The bytes of the changes that are shown."""
        return self._shown.size_bytes

    def encoded(self, keys: Keys, rows: Vectors | None) -> RowsChange:
        """Encode a change of the open table for the database."""
        self._open_rows()
        if rows is None:
            fits = storable(keys, self.spec.key_bytes)
            return RowsChange(self.spec, keys if fits is None else keys[fits], None)
        self._check_dim(rows.shape[1])
        return RowsChange(self.spec, keys, self._codec.encode(keys, rows))

    def follow(self, database: Database) -> None:
        """Read from ``database``, a newer opening, from now on.

        A table stays as it was while it is being loaded, and if it belongs to other files now: its rows keep the older
        files open. A table that the writer has dropped has no rows until the writer loads it again.
        """
        rows_until_now = self._rows if isinstance(self._rows, FamilyRows) else None
        rows, error = followed_rows(database, self._codec, self._digest, rows_until_now)
        if error is not None and str(error) != self._logged:
            effect = "its keys are unknown until it is back" if rows is None else "the table stays as it was"
            logger.warning("%s; %s", error, effect)
        self._logged = "" if error is None else str(error)
        self._rows = NoRows() if rows is None else rows
        if rows is not None:
            self._digest = rows.digest

    def _fetch_shown(self, view: Callable[[], FamilyRows | NoRows], keys: Keys, out: Vectors) -> Mask:
        """Read shown changes, and then the other rows of the view."""
        found = np.zeros(keys.size, dtype=np.bool_)
        is_left = self._shown.fetch(keys, out, found)
        rows = np.empty((int(is_left.sum()), self.spec.dim), dtype=np.float32)
        found[is_left] = self._fetch_view(view(), keys[is_left], rows)
        out[is_left] = rows
        return found

    def _fetch_view(self, view: FamilyRows | NoRows, keys: Keys, out: Vectors) -> Mask:
        if isinstance(view, NoRows):
            return view.fetch(keys, out)
        found = np.zeros(keys.size, dtype=np.bool_)
        for part in self.store.parts(keys.size):
            view.fetch(keys[part], out[part], found[part])
        return found

    def _take(self, database: Database) -> None:
        self._rows = self._family_rows(database)
        self._digest = self._rows.digest

    def _family_rows(self, database: Database) -> FamilyRows:
        return family_rows(database, self._codec)

    def _open_rows(self) -> FamilyRows | NoRows:
        rows = self._rows
        if rows is None:
            raise self._not_open()
        return rows

    def _has_rows_to_keep(self, database: Database) -> bool:
        """Whether a load must keep rows: those of a killed load are dropped; logs rows of other programs."""
        record = database.record(self.spec.name)
        is_only_of_killed_load = record is not None and not record.digest and not record.changed
        if database.family(self.spec.name) is None or is_only_of_killed_load:
            return False
        if next(self._family_rows(database).items(1), None) is None:
            return False
        if record is None or not record.digest:
            logger.warning("%s", kept_rows(str(database.path), self.spec.name))
        return True

    def _not_loaded(self, database: Database, expected: str) -> StoreError:
        marker = database.marker(self.spec.name)
        was = (
            f"was loaded from {marker.digest} as {marker.row_dtype}" if marker else "has no record of a completed load"
        )
        return self._error(f"{was}, expected {expected}; the database is open read-only")

    def _error(self, reason: str) -> StoreError:
        return StoreError(self.store.name, self.spec.name, f"{self.store.path}: {reason}")
