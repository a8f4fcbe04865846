"""The formats of dumps, by the suffix of the name. Tables of other systems can be loaded, but are not written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Protocol

from serving.dumps.hps_bin import BinDump, write_bin
from serving.dumps.sst import SstDump, write_sst
from serving.errors import ModelFileError, OutputError
from serving.model.atomic import atomic_directory
from serving.model.sparse_writer import TABLE_FILES, write_sparse_batches
from serving.sources import BareRows, TableRows, open_table
from serving.storage.store import Keys, TableSpec, Vectors

SUFFIXES = (".bin", ".sst", "")  # HPS's, RocksDB's, a folder


class Dump(Protocol):
    """An open dump: a file or folder with the rows of one table."""

    @property
    def rows(self) -> int:
        """The number of rows. For an SST file it is RocksDB's estimate."""

    def batches(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """Yield all rows, at most ``batch_rows`` at a time. May be called again.

        Raises:
            ModelFileError: a part is damaged, or a key is reserved; the message says where.
        """


def check_target(path: Path) -> None:
    """Refuse a path where a dump cannot be written, or where it would replace something that is not a dump.

    Raises:
        OutputError: a dump cannot be written there.
    """
    if path.suffix not in SUFFIXES:
        reason = "expected a file that ends in .bin (HPS) or .sst (RocksDB), or a folder without an extension"
        raise OutputError(f"{path}: {reason}; got {path.suffix!r}")
    try:
        found = sorted(os.listdir(path)) if path.is_dir() else []
    except OSError as err:
        raise OutputError(f"{path}: cannot be read: {err.strerror}") from err
    strange = [name for name in found if path.suffix or name not in TABLE_FILES]
    if strange:
        raise OutputError(f"{path}: is a folder with {strange[0]!r} in it, and a dump would replace the folder")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}")


@contextmanager
def open_dump(path: Path, spec: TableSpec, table: str) -> Iterator[Dump]:
    """Open the rows of a table in a file or folder.

    Args:
        path: ``.bin``, ``.sst``, or what ``serving.sources.open_table`` opens, with rows of float32 if no file says
            their type.
        spec: the table.
        table: its name in the model, by which it is found among several tables.

    Raises:
        ModelFileError: the file cannot be read or is damaged, or its keys or values have the wrong size.
        MissingExtraError: a package is needed that is not installed.
    """
    if path.suffix == ".bin":
        yield BinDump(path, spec)
    elif path.suffix == ".sst":
        dump = SstDump(path, spec)
        try:
            yield dump
        finally:
            dump.close()
    else:
        yield _source(path, spec, table)


def _source(path: Path, spec: TableSpec, table: str) -> TableRows:
    rows = open_table(table, path, SUFFIXES[:2])
    rows = rows.as_dtype("fp32") if isinstance(rows, BareRows) else rows
    if rows.dim != spec.dim:
        raise ModelFileError(rows.source, f"expected rows of {spec.dim} floats, found rows of {rows.dim}")
    rows.check_keys("I64" if spec.key_bytes == 8 else "I32")
    return rows


def write_dump(path: Path, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]], in_key_order: bool) -> None:
    """Write all rows of a table. An existing dump is replaced when all rows are on the disk.

    Args:
        path: a path that ``check_target`` accepts.
        spec: the table.
        batches: the rows of the table, each key once.
        in_key_order: the rows are sorted by the raw bytes of their keys.

    Raises:
        OutputError: the file cannot be written, or there are no rows and the format is not ``.bin``.
        StoreError: the rows cannot be read to their end.
        MissingExtraError: the dump is an SST file, and rocksdict is not installed.
    """
    try:
        if path.suffix == ".bin":
            write_bin(path, spec, batches)
            return
        first = next(batches, None)
        if first is None:
            kind = "an SST file" if path.suffix else "HugeCTR's folder"
            raise OutputError(f"{path}: table {spec.name!r} is empty, but {kind} cannot be empty; write a .bin file")
        batches = chain([first], batches)
        if path.suffix == ".sst":
            write_sst(path, spec, batches, in_key_order)
        else:
            with atomic_directory(path) as folder:
                write_sparse_batches(folder, batches)
    except OSError as err:
        raise OutputError(f"{path}: cannot be written: {err.strerror}") from err
