"""A table as one RocksDB SST file: raw little-endian keys in the order of their bytes, float32 rows, checksums.

HPS's RocksDB backend writes such files, and RocksDB ingests them without rewriting them.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from serving.errors import ModelFileError, StoreError
from serving.model.atomic import atomic_write, temporary_directory
from serving.model.regular_file import wrong_kind
from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY
from serving.storage.hps_layout import key_list, keys_of, row_list
from serving.storage.rocksdb.engine import all_items, import_rocksdict, open_database, table_options, translated_errors
from serving.storage.rocksdb.sort import RowSorter
from serving.storage.store import Keys, TableSpec, Vectors

_THREADS = 2  # of a temporary database
#: How RocksDB reports a block that was changed.
_DAMAGED_BLOCK = re.compile(r"block checksum mismatch.* offset (\d+)")


def write_sst(path: Path, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]], in_key_order: bool) -> None:
    """Write a table batch by batch. An existing file is replaced at once when all rows are on the disk.

    Args:
        path: the file.
        spec: the table.
        batches: at least one row. The last row of a repeated key counts.
        in_key_order: the rows are sorted by the raw bytes of their keys, each key once. Other rows are sorted here, in
            temporary files that take as much disk space as the dump.

    Raises:
        MissingExtraError: rocksdict is not installed.
        OSError: the file cannot be written.
        StoreError: RocksDB cannot write the file, or ``in_key_order`` is wrong.
    """
    rocksdict = import_rocksdict()
    with ExitStack() as stack:
        if not in_key_order:
            folder = stack.enter_context(_scratch_folder(path))
            batches = _sorted(folder, spec, batches)
        file = stack.enter_context(atomic_write(path))
        writer = rocksdict.SstFileWriter(table_options(rocksdict, _THREADS))
        with translated_errors(path, spec.name):
            writer.open(file.name)  # the same file again, which is renamed or removed at the end
            for keys, rows in batches:
                for key, row in zip(key_list(keys, spec.key_bytes), row_list(rows), strict=True):
                    writer[key] = row
            writer.finish()


class SstDump:
    """An SST file in a temporary database, which is deleted when the dump is closed. See ``Dump``."""

    def __init__(self, path: Path, spec: TableSpec) -> None:
        """Ingest the file, which checks its footer, properties and index.

        Raises:
            MissingExtraError: rocksdict is not installed.
            ModelFileError: the file cannot be read, is not an SST file, or is damaged.
        """
        rocksdict = import_rocksdict()
        self._path = path
        self._spec = spec
        self._opened = ExitStack()
        with ExitStack() as opened:
            folder = opened.enter_context(_scratch_folder(path))
            with self._translated():
                self._database, _ = open_database(rocksdict, folder, read_only=False, num_threads=_THREADS)
                opened.callback(self._database.close)
                self._database.ingest_external_file([str(_linked(path, folder))], _ingest_options(rocksdict))
                self.rows = int(self._database.property_int_value("rocksdb.estimate-num-keys"))
            self._opened = opened.pop_all()

    def batches(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Dump.batches``. Rows are in the order of the keys' raw bytes, and every checksum is verified."""
        with self._translated():
            pairs = all_items(self._database)
            begin = 0
            while part := list(islice(pairs, batch_rows)):
                yield self._decoded(begin, part)
                begin += len(part)

    def close(self) -> None:
        """Remove the database."""
        self._opened.close()

    def _decoded(self, begin: int, pairs: list[tuple[bytes, bytes]]) -> tuple[Keys, Vectors]:
        raw_keys, values = [key for key, _ in pairs], [value for _, value in pairs]
        key_bytes, value_bytes = self._spec.key_bytes, 4 * self._spec.dim
        for what, found, expected in (("a key", raw_keys, key_bytes), ("a value", values, value_bytes)):
            if set(map(len, found)) != {expected}:
                at = next(place for place, value in enumerate(found) if len(value) != expected)
                reason = f"{what} has {len(found[at])} bytes, expected {expected}"
                raise ModelFileError(self._path, f"pair {begin + at:,}: {reason}")
        keys = keys_of(raw_keys, key_bytes)
        refused = (keys < SMALLEST_KEY) | (keys > LARGEST_KEY)
        if refused.any():
            at = int(np.argmax(refused))
            raise ModelFileError(self._path, f"pair {begin + at:,}: key {keys[at]} is reserved")
        return keys, np.frombuffer(b"".join(values), dtype=np.float32).reshape(-1, self._spec.dim)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with translated_errors(self._path):
                yield
        except StoreError as err:
            if isinstance(err.__cause__, OSError):
                reason = f"cannot be read: {err.reason.removeprefix(f'{self._path}: ')}"
            elif block := _DAMAGED_BLOCK.search(err.reason):
                reason = f"damaged: the block at byte {int(block[1]):,} does not match its checksum"
            else:
                reason = wrong_kind(self._path, "a whole SST file of RocksDB")
            raise ModelFileError(self._path, reason) from err


def _scratch_folder(path: Path) -> AbstractContextManager[Path]:
    """Make a hidden folder, next to ``path`` if possible, and remove the folder at the end."""
    parent = path.parent if os.access(path.parent, os.W_OK) else Path(tempfile.gettempdir())
    return temporary_directory(parent / path.name)


def _sorted(folder: Path, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]]) -> Iterator[tuple[Keys, Vectors]]:
    """Yield the last row of each key, in the order of the keys' raw bytes."""
    sorter = RowSorter(folder, spec.key_bytes, 4 * spec.dim)
    for keys, rows in batches:
        sorter.add(keys, np.ascontiguousarray(rows).view(np.uint8))
    for keys, values in sorter.parts():
        yield keys, values.view(np.float32)


def _linked(path: Path, folder: Path) -> Path:
    """Return a hard link to the file, or a copy if links are not possible, because ingestion moves the file."""
    linked = folder / "taken_in.sst"
    try:
        os.link(path.resolve(), linked)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(path, linked)
    return linked


def _ingest_options(rocksdict: Any) -> Any:
    options = rocksdict.IngestExternalFileOptions()
    options.set_move_files(True)
    options.set_allow_global_seqno(False)  # a number would be written into the file itself
    return options
