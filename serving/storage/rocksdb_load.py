"""Bulk loading of RocksDB: rows become sorted files beside the database, which then takes the files in."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serving.storage.hps_layout import key_list, row_list
from serving.storage.rocksdb_engine import bytewise_order
from serving.storage.store import Keys, TableSpec, Vectors

# Rows of one sorted file are gathered in memory; a table of more becomes several files, merged once at the end.
RUN_BYTES = 256 * 2**20


class RunWriter:
    """Writes batches of rows as sorted files into one folder, which it owns and clears."""

    def __init__(self, rocksdict: Any, options: Any, folder: Path, spec: TableSpec) -> None:
        """Clear ``folder``, where a killed load may have left files."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._rocksdict = rocksdict
        self._options = options
        self._folder = folder
        self._spec = spec
        self._run_rows = max(RUN_BYTES // (spec.key_bytes + 4 * spec.dim), 1)

    def write(self, batches: Iterator[tuple[Keys, Vectors]]) -> Iterator[str]:
        """Yield one file after the other. Of equal keys the last wins, within a file and over the files."""
        pending: list[tuple[Keys, Vectors]] = []
        rows = 0
        number = 0
        for batch in batches:
            pending.append(batch)
            rows += batch[0].size
            if rows >= self._run_rows:
                yield self._write_run(number, pending)
                pending, rows, number = [], 0, number + 1
        if rows:
            yield self._write_run(number, pending)

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write_run(self, number: int, batches: list[tuple[Keys, Vectors]]) -> str:
        keys = np.concatenate([keys for keys, _ in batches])
        rows = np.concatenate([rows for _, rows in batches])
        order = bytewise_order(keys, self._spec.key_bytes)
        ordered = keys[order]
        last_of_equal = np.append(ordered[1:] != ordered[:-1], True)
        order = order[last_of_equal]
        file = str(self._folder / f"{number:06}.sst")
        writer = self._rocksdict.SstFileWriter(self._options)
        writer.open(file)
        for start in range(0, order.size, 65536):
            part = order[start : start + 65536]
            for key, row in zip(key_list(keys[part], self._spec.key_bytes), row_list(rows[part]), strict=True):
                writer[key] = row
        writer.finish()
        return file
