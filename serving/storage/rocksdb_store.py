"""The durable tier: one RocksDB database, one column family per table."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.errors import StoreError
from serving.storage.hps_layout import key_list, keys_of, row_list, storable, tag
from serving.storage.rocksdb_engine import (
    STORE_NAME,
    all_items,
    import_rocksdict,
    open_database,
    table_options,
    translated_errors,
)
from serving.storage.rocksdb_load import RunWriter
from serving.storage.store import CHANGED, Keys, Mask, TableSpec, Vectors

# A write batch is applied with Python's global lock held, so it is kept short.
WRITE_BATCH_ROWS = 2048
# The lock is held too while keys and values are converted; values of a short read are still in the CPU's cache then.
READ_BATCH_ROWS = 2048


@dataclass(frozen=True, slots=True)
class _Table:
    spec: TableSpec
    family: Any  # rocksdict's handle of the column family


class RocksDbStore:
    """Rows on disk, one database per store. See ``DurableStore``.

    Keys and values have HPS's layout, so a database written by HPS (HugeCTR v24.06) can be read. What a table was
    loaded from is recorded in the default column family, which HPS does not use. An ``insert`` that has returned
    survives the process and the machine; reads verify checksums.
    """

    def __init__(
        self, path: str | Path, read_only: bool = False, num_threads: int = 16, max_batch_size: int = 65536
    ) -> None:
        """Open the database, creating it if it is absent and ``read_only`` is False.

        Args:
            path: its folder.
            read_only: open beside a process that writes; later writes are not seen.
            num_threads: background threads.
            max_batch_size: most keys of one read; never more than ``READ_BATCH_ROWS``.

        Raises:
            MissingExtraError: rocksdict is not installed.
            StoreError: the database is open for writing elsewhere, damaged, or (read-only) absent.
        """
        self._rocksdict = import_rocksdict()
        self._path = Path(path)
        self._read_only = read_only
        self._read_rows = min(max_batch_size, READ_BATCH_ROWS)
        self._options = table_options(self._rocksdict, num_threads)
        self._database, self._families = open_database(self._rocksdict, self._path, read_only, num_threads)
        self._tables: dict[str, _Table] = {}
        self._closed = False
        self._lock = threading.RLock()  # one user of the database handle at a time; reads use their column family's

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return STORE_NAME

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``; a read-only store must already have the table."""
        with self._lock, self._translated(spec.name):
            family = self._families.get(tag(spec.name))
            if family is None:
                if self._read_only:
                    raise self._error(spec.name, "the database has no such table, and is open read-only")
                family = self._create_family(spec.name)
            table = _Table(spec, family)
            self._check_first_row(table)
            self._tables = {**self._tables, spec.name: table}

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``."""
        self._check_open(table)
        return None if table in self._tables else 0

    def tables(self) -> list[str]:
        """See ``Store.tables``."""
        self._check_open()
        return sorted(self._tables)

    def count(self, table: str) -> int:
        """See ``Store.count``; RocksDB's estimate, which counts an overwritten row twice until it is compacted."""
        with self._translated(table):
            held = self._tables.get(table)
            return int(held.family.property_int_value("rocksdb.estimate-num-keys")) if held else 0

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``."""
        self._check_open(table)
        held = self._tables.get(table)
        found = np.zeros(keys.size, dtype=np.bool_)
        if held is None:
            out[...] = 0.0
            return found
        if out.shape[1] != held.spec.dim:
            raise self._error(table, f"holds vectors of {held.spec.dim} floats, asked for {out.shape[1]}")
        for start in range(0, keys.size, self._read_rows):
            part = slice(start, start + self._read_rows)
            self._fetch_part(held, keys[part], out[part], found[part])
        return found

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """See ``Store.insert``; on the disk when it returns, in write batches each of which is there whole or not."""
        with self._lock, self._translated(table):
            held = self._writable_table(table)
            if rows.shape[1] != held.spec.dim:
                raise self._error(table, f"holds vectors of {held.spec.dim} floats, got {rows.shape[1]}")
            if storable(keys, held.spec.key_bytes) is not None:
                raise self._error(table, f"a key does not fit {held.spec.key_bytes} bytes")
            handle = self._database.get_column_family_handle(tag(table))
            for start in range(0, keys.size, WRITE_BATCH_ROWS):
                part = slice(start, start + WRITE_BATCH_ROWS)
                batch = self._rocksdict.WriteBatch(raw_mode=True)
                batch.set_default_column_family(handle)
                for key, row in zip(key_list(keys[part], held.spec.key_bytes), row_list(rows[part]), strict=True):
                    batch[key] = row
                self._database.write(batch)
            self._database.flush_wal(True)

    def evict(self, table: str, keys: Keys) -> int | None:
        """See ``Store.evict``; RocksDB deletes without looking, so it cannot tell how many there were."""
        with self._lock, self._translated(table):
            if table not in self._tables:
                return 0
            held = self._writable_table(table)
            fits = storable(keys, held.spec.key_bytes)
            handle = self._database.get_column_family_handle(tag(table))
            raw = key_list(keys if fits is None else keys[fits], held.spec.key_bytes)
            for start in range(0, len(raw), WRITE_BATCH_ROWS):
                batch = self._rocksdict.WriteBatch(raw_mode=True)
                batch.set_default_column_family(handle)
                for key in raw[start : start + WRITE_BATCH_ROWS]:
                    del batch[key]
                self._database.write(batch)
            self._database.flush_wal(True)
            return None

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; a read-only store only closes it."""
        with self._lock, self._translated(table):
            self._tables = {name: held for name, held in self._tables.items() if name != table}
            if not self._read_only and tag(table) in self._families:
                self._forget_load(table)
                del self._families[tag(table)]
                self._database.drop_column_family(tag(table))

    def items(self, table: str, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Store.items``; in the order of the keys' raw bytes."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is None:
            return
        raw_keys: list[bytes] = []
        raw_rows: list[bytes] = []
        with self._translated(table):
            for key, row in all_items(held.family):
                raw_keys.append(key)
                raw_rows.append(row)
                if len(raw_keys) == batch_rows:
                    yield keys_of(raw_keys, held.spec.key_bytes), self._rows(held.spec, raw_keys, raw_rows)
                    raw_keys, raw_rows = [], []
            if raw_keys:
                yield keys_of(raw_keys, held.spec.key_bytes), self._rows(held.spec, raw_keys, raw_rows)

    def loaded_from(self, table: str) -> str | None:
        """See ``DurableStore.loaded_from``."""
        with self._lock, self._translated(table):
            digest = self._database.get(_digest_key(table))
            return None if digest is None else bytes(digest).decode()

    def mark_changed(self, table: str) -> None:
        """See ``DurableStore.mark_changed``."""
        with self._lock, self._translated(table):
            self._writable_table(table)
            record = self.loaded_from(table)
            if record is not None and not record.endswith(CHANGED):
                self._database.put(_digest_key(table), (record + CHANGED).encode())
                self._database.flush_wal(True)

    def bulk_load(self, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]], digest: str) -> None:
        """See ``DurableStore.bulk_load``.

        The old rows go first, and with them the record of what they were loaded from; the new record is written when
        every row is in the database and on the disk. Between the two the table counts as not loaded.
        """
        with self._lock, self._translated(spec.name):
            if self._read_only:
                held = self.loaded_from(spec.name)
                raise self._error(spec.name, f"open read-only, and loaded from {held}, not from {digest}")
            self.drop_table(spec.name)
            self.open_table(spec, capacity_rows=0)
            self._ingest(self._tables[spec.name].family, spec, batches)
            self._database.put(_digest_key(spec.name), digest.encode())
            self._database.flush_wal(True)

    def close(self) -> None:
        """See ``Store.close``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # Reads in hand keep their column family, and with it the database, open until they end.
            self._tables, self._families = {}, {}
            with translated_errors(self._path):
                self._database.close()

    def _ingest(self, family: Any, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]]) -> None:
        options = self._rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        writer = RunWriter(self._rocksdict, self._options, self._path / "loading", spec)
        runs = 0
        try:
            for file in writer.write(batches):
                family.ingest_external_file([file], options)
                runs += 1
        finally:
            writer.clear()  # a full disk is not left fuller
        if runs > 1:
            family.compact_range(None, None)
        family.flush()

    def _fetch_part(self, held: _Table, keys: Keys, out: Vectors, found: Mask) -> None:
        fits = storable(keys, held.spec.key_bytes)
        if fits is not None:
            rows = np.empty((int(fits.sum()), held.spec.dim), dtype=np.float32)
            hits = np.zeros(rows.shape[0], dtype=np.bool_)
            self._fetch_part(held, keys[fits], rows, hits)
            out[...], out[fits], found[fits] = 0.0, rows, hits
            return
        raw_keys = key_list(keys, held.spec.key_bytes)
        with self._translated(held.spec.name):
            values = held.family.get(raw_keys)
        try:
            out[...] = self._rows(held.spec, raw_keys, values)
            found[...] = True
        except TypeError:  # bytes are not joined with None, an absent key's value: as quick a test as there is
            found[...] = np.fromiter((value is not None for value in values), dtype=np.bool_, count=len(values))
            present = [pair for pair in zip(raw_keys, values, strict=True) if pair[1] is not None]
            out[...] = 0.0
            out[found] = self._rows(held.spec, [key for key, _ in present], [value for _, value in present])

    def _rows(self, spec: TableSpec, raw_keys: list[bytes], values: list[bytes]) -> Vectors:
        """The values as float32[N, D]; TypeError where one is None."""
        joined = b"".join(values)
        if set(map(len, values)) - {4 * spec.dim}:
            at = next(place for place, value in enumerate(values) if len(value) != 4 * spec.dim)
            key = int(keys_of(raw_keys[at : at + 1], spec.key_bytes)[0])
            reason = f"the value of key {key} has {len(values[at])} bytes, {spec.dim} floats are {4 * spec.dim}"
            raise self._error(spec.name, reason)
        return np.frombuffer(joined, dtype=np.float32).reshape(-1, spec.dim)

    def _check_first_row(self, table: _Table) -> None:
        key, value = next(all_items(table.family), (None, None))
        if key is None or value is None:
            return
        if len(key) != table.spec.key_bytes:
            raise self._error(table.spec.name, f"holds keys of {len(key)} bytes, expected {table.spec.key_bytes}")
        if len(value) != 4 * table.spec.dim:
            reason = f"holds values of {len(value)} bytes, {table.spec.dim} floats are {4 * table.spec.dim}"
            raise self._error(table.spec.name, reason)

    def _create_family(self, table: str) -> Any:
        family = self._database.create_column_family(tag(table), self._options)
        self._families[tag(table)] = family
        return family

    def _forget_load(self, table: str) -> None:
        self._database.delete(_digest_key(table))
        self._database.flush_wal(True)

    def _writable_table(self, table: str) -> _Table:
        self._check_open(table)
        self._check_writable(table)
        held = self._tables.get(table)
        if held is None:
            raise self._error(table, "not an open table")
        return held

    def _check_writable(self, table: str) -> None:
        if self._read_only:
            raise self._error(table, "the database is open read-only, and this would write")

    def _check_open(self, table: str = "") -> None:
        if self._closed:
            raise self._error(table, "the store is closed")

    def _error(self, table: str, reason: str) -> StoreError:
        return StoreError(STORE_NAME, table, f"{self._path}: {reason}")

    def _translated(self, table: str) -> Any:
        self._check_open(table)
        return translated_errors(self._path, table)


def _digest_key(table: str) -> bytes:
    return f"hotrow.loaded_from.{table}".encode()
