"""An open RocksDB database: its column families, one per table, and what the default one records of them."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.storage.hps_layout import key_list, tag
from serving.storage.rocksdb.engine import all_items, import_rocksdict, open_database, table_options
from serving.storage.rocksdb.exit_gate import exit_gate
from serving.storage.row_codec import value_list
from serving.storage.store import Keys, TableSpec, new_seal

READ_AHEAD_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """What the rows of a table were loaded from, and their form; kept as ``<digest> as int8``, or as the digest."""

    digest: str
    row_dtype: str

    @staticmethod
    def read(record: str) -> "LoadRecord":
        """Read what ``str`` gives."""
        digest, _, row_dtype = record.partition(" as ")
        return LoadRecord(digest, row_dtype or "fp32")

    def __str__(self) -> str:
        """Give what is kept in the database; of float32 rows the digest alone."""
        return self.digest if self.row_dtype == "fp32" else f"{self.digest} as {self.row_dtype}"


class Database:
    """One opening of a database. Callers keep users apart, but for reads of column families.

    Tables are known by their full names. HPS does not use the default column family, so loads are recorded there.
    Methods raise what rocksdict raises; see ``translated_errors``.

    Attributes:
        rocksdict: the module.
        options: those of the database and of each column family.
    """

    def __init__(self, path: Path, num_threads: int, read_only: bool) -> None:
        """Open the database at ``path`` with all its column families.

        Args:
            path: the database's folder.
            num_threads: background threads.
            read_only: open it as it is now, beside a process that writes; else make it if it is absent.

        Raises:
            MissingExtraError: rocksdict is not installed.
            StoreError: it cannot be opened; the message names the folder, and what is wrong with it.
        """
        self.rocksdict = import_rocksdict()
        self.options = table_options(self.rocksdict, num_threads)
        self._path = path
        self._handle, self._families = open_database(self.rocksdict, path, read_only, num_threads)

    def family(self, table: str) -> Any | None:
        """The handle of the table's column family, if there is one; reads of it need no lock."""
        return self._families.get(tag(table))

    def create_family(self, table: str) -> None:
        """Make an empty table."""
        self._families[tag(table)] = self._handle.create_column_family(tag(table), self.options)

    def drop_family(self, table: str) -> None:
        """Remove a table and, before it, the record of what it was loaded from."""
        self._record(puts={}, deletes=[key(table) for key in _KEYS_OF_TABLE])
        self._remove_family(table)

    def begin_load(self, table: str) -> None:
        """Make an empty table in place of what there is; until ``record_load`` it ``is_loading``, whatever happens.

        Its seal, if it has one, becomes another.
        """
        seal = self.seal(table)
        seals = {} if seal is None else {_seal_key(table): new_seal(seal).encode()}
        self._record(puts={_loading_key(table): b"", **seals}, deletes=[_digest_key(table)])
        if self.family(table) is not None:
            self._remove_family(table)
        self.create_family(table)

    def record_load(self, table: str, load: LoadRecord) -> None:
        """Record that every row of a load is on the disk, and what they were loaded from."""
        self._record(puts={_digest_key(table): str(load).encode()}, deletes=[_loading_key(table)])

    def is_loading(self, table: str) -> bool:
        """Whether a load of the table has begun and not ended, so that it may have some of its rows only."""
        return self._handle.get(_loading_key(table)) is not None

    def last_load(self, table: str) -> LoadRecord | None:
        """The table's last load, if that has ended."""
        record = self._handle.get(_digest_key(table))
        return None if record is None else LoadRecord.read(bytes(record).decode())

    def record_others(self, table: str, are_behind: bool, seal: str | None) -> None:
        """Record whether the tiers before this one may lack a change; on the disk when the next ``write`` is.

        With it, as one act, the ``seal`` of the change, if there is one.
        """
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        if seal is not None:
            batch[_seal_key(table)] = seal.encode()
        if are_behind:
            batch[_behind_key(table)] = b""
        else:
            del batch[_behind_key(table)]
        self._handle.write(batch)

    def others_are_behind(self, table: str) -> bool:
        """Whether the tiers before this one may lack a change."""
        return self._handle.get(_behind_key(table)) is not None

    def seal(self, table: str) -> str | None:
        """The seal of the table's last change; None where there is none yet."""
        seal = self._handle.get(_seal_key(table))
        return None if seal is None else bytes(seal).decode()

    def record_seal(self, table: str, seal: str) -> None:
        """Record the seal of a table; on the disk when it returns."""
        self._record(puts={_seal_key(table): seal.encode()}, deletes=[])

    def write(self, spec: TableSpec, keys: Keys, values: NDArray[np.uint8] | None, batch_rows: int) -> None:
        """Write the values uint8[N, B] of keys int64[N] that fit the table; None: delete the keys.

        Of every ``batch_rows`` all are there or none; when this returns, all are on the disk.
        """
        family = self._handle.get_column_family_handle(tag(spec.name))
        for start in range(0, keys.size, batch_rows):
            part = slice(start, start + batch_rows)
            batch = self.rocksdict.WriteBatch(raw_mode=True)
            batch.set_default_column_family(family)
            raw = key_list(keys[part], spec.key_bytes)
            if values is None:
                for key in raw:
                    del batch[key]
            else:
                for key, value in zip(raw, value_list(values[part]), strict=True):
                    batch[key] = value
            self._handle.write(batch)
        exit_gate.call(self._handle.flush_wal, True)

    def read_ahead(self, wait: bool) -> None:
        """Have the system read the files ahead, so that first reads do not run at the pace of the device.

        A load leaves most of its pages on the disk only. Pages that memory holds already are passed over, a GiB in
        some 30 milliseconds. Of a database larger than half of the memory, the rest is left where it is.

        Args:
            wait: return when they are in memory; else when reading has begun.
        """
        left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        for file in self._handle.live_files():
            # Compaction may have removed it meanwhile; a file that cannot be read is told when a row is read from it.
            with suppress(OSError), (self._path / file["name"].lstrip("/")).open("rb") as opened:
                size = min(os.fstat(opened.fileno()).st_size, left)
                starts = range(0, size, READ_AHEAD_BYTES)
                for start in starts:
                    length = min(READ_AHEAD_BYTES, size - start)
                    os.posix_fadvise(opened.fileno(), start, length, os.POSIX_FADV_WILLNEED)
                for start in starts if wait else ():
                    os.pread(opened.fileno(), 1, min(start + READ_AHEAD_BYTES, size) - 1)
                left -= size

    def read_all(self) -> int:
        """Read every row of every table, of whichever model, and return how many; RocksDB verifies each checksum."""
        return sum(1 for family in self._families.values() for _ in all_items(family))

    def checkpoint(self, folder: Path) -> None:
        """Make a database at ``folder`` of what this one holds now: links to its files where the file system can."""
        self.rocksdict.Checkpoint(self._handle).create_checkpoint(str(folder))

    def close(self) -> None:
        """Close it; reads in hand keep their column family, and with it the database, open until they end."""
        self._families = {}
        self._handle.close()

    def _record(self, puts: dict[bytes, bytes], deletes: list[bytes]) -> None:
        """Change the records of loads, all or none; on the disk when it returns."""
        batch = self.rocksdict.WriteBatch(raw_mode=True)
        for key, value in puts.items():
            batch[key] = value
        for key in deletes:
            del batch[key]
        self._handle.write(batch)
        exit_gate.call(self._handle.flush_wal, True)

    def _remove_family(self, table: str) -> None:
        del self._families[tag(table)]
        self._handle.drop_column_family(tag(table))


def _digest_key(table: str) -> bytes:
    return f"hotrow.loaded_from.{table}".encode()


def _behind_key(table: str) -> bytes:
    return f"hotrow.others_are_behind.{table}".encode()


def _loading_key(table: str) -> bytes:
    return f"hotrow.loading.{table}".encode()


def _seal_key(table: str) -> bytes:
    return f"hotrow.seal.{table}".encode()


_KEYS_OF_TABLE = (_digest_key, _loading_key, _behind_key, _seal_key)
