"""Bulk loading of RocksDB: rows become sorted files beside the database, which then takes the files in."""

import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.storage.hps_layout import key_list
from serving.storage.rocksdb_database import Database
from serving.storage.rocksdb_engine import bytewise_order
from serving.storage.row_codec import RowCodec, value_list
from serving.storage.store import Keys, TableSpec, Vectors

logger = logging.getLogger(__name__)

# Rows of one sorted file are gathered in memory; a table of more becomes several files, merged once at the end.
RUN_BYTES = 256 * 2**20
# Keys and values are converted with Python's global lock held, a piece at a time.
PIECE_ROWS = 2048

Values = NDArray[np.uint8]


class BulkLoader:
    """Brings batches of rows into an empty column family, by way of a folder that it owns.

    Memory is bounded: the rows of one file, sorted, and a copy of a piece of them.
    """

    def __init__(self, database: Database, folder: Path, spec: TableSpec, codec: RowCodec) -> None:
        """Clear ``folder``, where a killed load may have left files."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._rocksdict = database.rocksdict
        self._options = database.options
        self._folder = folder
        self._spec = spec
        self._codec = codec
        self._run_rows = max(RUN_BYTES // (spec.key_bytes + codec.value_bytes), 1)

    def load(self, family: Any, batches: Iterator[tuple[Keys, Vectors]]) -> None:
        """Fill ``family``; when it returns, every row is on the disk. Of equal keys the last wins."""
        options = self._rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        runs, rows, begun = 0, 0, time.monotonic()
        try:
            for file, run_rows in self.write(batches):
                family.ingest_external_file([file], options)  # a link and an entry: short, though the lock is held
                runs, rows = runs + 1, rows + run_rows
                took_s = time.monotonic() - begun
                logger.info("%s: %s rows written in %.1f s", self._spec.name, f"{rows:,}", took_s)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)  # a full disk is not left fuller
        if runs > 1:
            family.compact_range(None, None)
            logger.info("%s: %d files merged, %.1f s in all", self._spec.name, runs, time.monotonic() - begun)
        family.flush()

    def write(self, batches: Iterator[tuple[Keys, Vectors]]) -> Iterator[tuple[str, int]]:
        """Yield one file after the other, and how many rows it has."""
        pending: list[tuple[Keys, Values]] = []
        rows = 0
        number = 0
        for keys, vectors in batches:
            pending.append((keys, self._codec.encode(keys, vectors)))
            rows += keys.size
            if rows >= self._run_rows:
                yield self._write_run(number, pending)
                pending, rows, number = [], 0, number + 1
        if rows:
            yield self._write_run(number, pending)

    def _write_run(self, number: int, batches: list[tuple[Keys, Values]]) -> tuple[str, int]:
        keys = np.concatenate([keys for keys, _ in batches])
        values = np.concatenate([values for _, values in batches])
        batches.clear()
        order = bytewise_order(keys, self._spec.key_bytes)
        ordered = keys[order]
        order = order[np.append(ordered[1:] != ordered[:-1], True)]
        file = str(self._folder / f"{number:06}.sst")
        writer = self._rocksdict.SstFileWriter(self._options)
        writer.open(file)
        for start in range(0, order.size, PIECE_ROWS):
            part = order[start : start + PIECE_ROWS]
            for key, value in zip(key_list(keys[part], self._spec.key_bytes), value_list(values[part]), strict=True):
                writer[key] = value
        writer.finish()
        return file, order.size
