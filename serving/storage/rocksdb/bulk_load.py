"""Bulk loading of RocksDB: rows become sorted files beside the database, which then takes the files in."""

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
from serving.storage.store import Keys, TableSpec, Vectors

logger = logging.getLogger(__name__)

FILE_BYTES = 256 * 2**20
# Keys and values are converted with Python's global lock held, a piece at a time.
PIECE_ROWS = 2048


class BulkLoader:
    """Brings batches of rows into an empty column family, by way of files in a folder that it owns.

    Memory is bounded, see ``RowSorter``; the disk holds the rows twice for a while.
    """

    def __init__(self, rocksdict: Any, options: Any, folder: Path, spec: TableSpec, codec: RowCodec) -> None:
        """Take the options of the database's files; ``folder`` is made, and removed in the end."""
        self._rocksdict = rocksdict
        self._options = options
        self._folder = folder
        self._spec = spec
        self._codec = codec
        self._begun = time.monotonic()

    @contextmanager
    def written(self, batches: Iterable[tuple[Keys, Vectors]]) -> Iterator[list[str]]:
        """Write every row, sorted, to files that are there while the block runs. Of equal keys the last wins.

        Raises:
            OSError, or what rocksdict raises: the disk refuses.
            StoreError: a key or a value does not fit the table.
        """
        shutil.rmtree(self._folder, ignore_errors=True)  # what a killed load left
        try:
            self._folder.mkdir(parents=True)
            yield list(self._files(self._sorted(batches)))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)  # a full disk is not left fuller

    def take_in(self, family: Any, files: list[str]) -> None:
        """Fill an empty column family as one act: links and entries, short, though Python's global lock is held."""
        options = self._rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        if files:
            family.ingest_external_file(files, options)

    def _sorted(self, batches: Iterable[tuple[Keys, Vectors]]) -> Iterator[tuple[Keys, Values]]:
        sorter = RowSorter(self._folder, self._spec.key_bytes, self._codec.value_bytes)
        rows = 0
        for keys, vectors in batches:
            sorter.add(keys, self._codec.encode(keys, vectors))
            rows += keys.size
        self._tell(rows, "read and sorted")
        return sorter.parts()

    def _files(self, parts: Iterable[tuple[Keys, Values]]) -> Iterator[str]:
        """Write rows that come sorted; yield one file after the other."""
        writer, file, rows, total = None, "", 0, 0
        for keys, values in parts:
            if writer is None:
                file = str(self._folder / f"{total}.sst")
                writer = self._rocksdict.SstFileWriter(self._options)
                writer.open(file)
            for start in range(0, keys.size, PIECE_ROWS):
                piece = slice(start, start + PIECE_ROWS)
                raw = key_list(keys[piece], self._spec.key_bytes)
                for key, value in zip(raw, value_list(values[piece]), strict=True):
                    writer[key] = value
            rows, total = rows + keys.size, total + keys.size
            if rows * (self._spec.key_bytes + self._codec.value_bytes) >= FILE_BYTES:
                writer.finish()
                self._tell(total, "written")
                yield file
                writer, rows = None, 0
        if writer is not None:
            writer.finish()
            self._tell(total, "written")
            yield file

    def _tell(self, rows: int, what: str) -> None:
        took_s = time.monotonic() - self._begun
        logger.info("%s: %s rows %s after %.1f s", self._spec.name, f"{rows:,}", what, took_s)
