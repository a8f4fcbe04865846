"""Bulk loading of RocksDB: rows are written to sorted files, which RocksDB then ingests."""

import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving.storage.hps_layout import key_list
from serving.storage.rocksdb.sort import RowSorter, Values
from serving.storage.row_codec import RowCodec, value_list
from serving.storage.store import Batches, Keys, TableSpec

logger = logging.getLogger(__name__)

FILE_BYTES = 256 * 2**20
# Python's global lock is held while a piece of so many rows is converted.
PIECE_ROWS = 2048


class BulkLoader:
    """Writes batches of rows to sorted files in a folder of its own, and ingests the files into a column family.

    Memory is bounded, see ``RowSorter``. The disk holds the rows twice for a while.

    Attributes:
        rows: rows in the files, each key once.
    """

    def __init__(self, rocksdict: Any, options: Any, folder: Path, spec: TableSpec, codec: RowCodec) -> None:
        """Take the options of the database's files; ``folder`` is created, and removed in the end."""
        self.rows = 0
        self._rocksdict = rocksdict
        self._options = options
        self._folder = folder
        self._spec = spec
        self._codec = codec
        self._begun = time.monotonic()

    @contextmanager
    def written(self, batches: Batches) -> Iterator[list[str]]:
        """Write the rows to sorted files that exist while the block runs; the last of equal keys wins."""
        shutil.rmtree(self._folder, ignore_errors=True)  # what a killed load left
        try:
            self._folder.mkdir(parents=True)
            yield list(self._files(self._sorted(batches)))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)  # a full disk is not left fuller

    def ingest(self, family: Any, files: list[str]) -> None:
        """Ingest the files as one act; newer than every row of the column family, their rows win."""
        options = self._rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        if files:
            family.ingest_external_file(files, options)

    def _sorted(self, batches: Batches) -> Iterator[tuple[Keys, Values]]:
        sorter = RowSorter(self._folder, self._spec.key_bytes, self._codec.value_bytes)
        rows = 0
        for keys, vectors in batches:
            sorter.add(keys, self._codec.encode(keys, vectors))
            rows += keys.size
        self._log(rows, "read and sorted")
        return sorter.parts()

    def _files(self, parts: Iterable[tuple[Keys, Values]]) -> Iterator[str]:
        """Write sorted rows; yield one file after the other."""
        writer, file, rows = None, "", 0
        for keys, values in parts:
            if writer is None:
                file = str(self._folder / f"{self.rows}.sst")
                writer = self._rocksdict.SstFileWriter(self._options)
                writer.open(file)
            for start in range(0, keys.size, PIECE_ROWS):
                piece = slice(start, start + PIECE_ROWS)
                raw = key_list(keys[piece], self._spec.key_bytes)
                for key, value in zip(raw, value_list(values[piece]), strict=True):
                    writer[key] = value
            rows, self.rows = rows + keys.size, self.rows + keys.size
            if rows * (self._spec.key_bytes + self._codec.value_bytes) >= FILE_BYTES:
                writer.finish()
                self._log(self.rows, "written")
                yield file
                writer, rows = None, 0
        if writer is not None:
            writer.finish()
            self._log(self.rows, "written")
            yield file

    def _log(self, rows: int, what: str) -> None:
        took_s = time.monotonic() - self._begun
        logger.info("%s: %s rows %s after %.1f s", self._spec.name, f"{rows:,}", what, took_s)
