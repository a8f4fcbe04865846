"""Files of sorted rows, as RocksDB ingests them, and a second Python that writes many of them.

rocksdict holds Python's global lock for each row and for the end of each file. So a server that wrote the files of a
large table itself would let requests wait for seconds. The second Python reads rows from its standard input: their
number as int64, the keys as int64 and the encoded values, again and again. The number -1 ends the rows. Without it no
file counts, because the process that sends the rows may have been killed.
"""

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from serving.background import giving_way
from serving.storage.hps_layout import key_list
from serving.storage.rocksdb.engine import import_rocksdict, table_options
from serving.storage.rocksdb.sort import RowSorter, Values
from serving.storage.row_codec import RowCodec, value_list
from serving.storage.store import Batches, Keys

logger = logging.getLogger(__name__)

FILE_BYTES = 256 * 2**20
# Writing this many bytes takes about 30 ms. A second Python starts in about 300 ms.
APART_BYTES = 8 * 2**20
# Python's global lock is held while a piece of this many rows is converted.
PIECE_ROWS = 2048

_READY, _END = "ready\n", -1


@contextmanager
def sorted_files(folder: Path, codec: RowCodec, batches: Batches) -> Iterator[tuple[list[str], int]]:
    """Write the rows of a table to sorted files that exist while the block runs.

    The last row of equal keys wins. Memory is bounded, see ``RowSorter``. The disk holds the rows twice for a while.

    Args:
        folder: it is made, and removed in the end.
        codec: the table, and the form of its values.
        batches: keys int64[N] and rows float32[N, dim].

    Returns:
        the files, and how many rows are in them, each key once.

    Raises:
        OSError: the files cannot be written; the text says why.
        Exception: the same, from rocksdict.
    """
    shutil.rmtree(folder, ignore_errors=True)  # what a killed load left
    began_s = time.monotonic()
    try:
        folder.mkdir(parents=True)
        rows = giving_way(partial(_write_somewhere, folder, codec, batches))
        took_s = time.monotonic() - began_s
        logger.info("%s: %s rows are in sorted files after %.1f s", codec.spec.name, f"{rows:,}", took_s)
        yield [str(file) for file in folder.glob("*.sst")], rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a full disk is not left fuller


def _write_somewhere(folder: Path, codec: RowCodec, batches: Batches) -> int:
    """Write the rows here if they are few, else in the second Python."""
    encoded = ((keys, codec.encode(keys, vectors)) for keys, vectors in batches)
    key_bytes, size, first = codec.spec.key_bytes, 0, []
    for keys, values in encoded:
        first.append((keys, values))
        size += values.nbytes
        if size >= APART_BYTES:
            return _write_apart(folder, key_bytes, codec.value_bytes, chain(first, encoded))
    return _write(folder, key_bytes, codec.value_bytes, FILE_BYTES, first)


def _write(folder: Path, key_bytes: int, value_bytes: int, file_bytes: int, rows: Iterable[tuple[Keys, Values]]) -> int:
    """Write files ``<number of the first row>.sst``, and files of the sorter, to ``folder``; return how many rows."""
    rocksdict = import_rocksdict()
    options, sorter = table_options(rocksdict, num_threads=1), RowSorter(folder, key_bytes, value_bytes)
    for keys, values in rows:
        sorter.add(keys, values)
    writer, written, in_file = None, 0, 0
    for keys, values in sorter.parts():
        if writer is None:
            writer = rocksdict.SstFileWriter(options)
            writer.open(str(folder / f"{written}.sst"))
        for start in range(0, keys.size, PIECE_ROWS):
            piece = slice(start, start + PIECE_ROWS)
            for key, value in zip(key_list(keys[piece], key_bytes), value_list(values[piece]), strict=True):
                writer[key] = value
        written, in_file = written + keys.size, in_file + keys.size
        if in_file * (key_bytes + value_bytes) >= file_bytes:
            writer.finish()
            writer, in_file = None, 0
    if writer is not None:
        writer.finish()
    return written


def _write_apart(folder: Path, key_bytes: int, value_bytes: int, rows: Iterable[tuple[Keys, Values]]) -> int:
    with _second_python(folder, f"{key_bytes}, {value_bytes}, {FILE_BYTES}") as second:
        if second is None:
            return _write(folder, key_bytes, value_bytes, FILE_BYTES, rows)
        with suppress(BrokenPipeError):  # the second Python says why
            for keys, values in rows:
                for block in (np.array([keys.size]), keys, values):
                    second.stdin.write(np.ascontiguousarray(block).data)
            second.stdin.write(np.array([_END]).data)
            second.stdin.flush()
        said, fault = second.communicate()
    if second.returncode:
        raise OSError(_last_line(fault) or f"the process that writes the files ended with {second.returncode}")
    return int(said)


@contextmanager
def _second_python(folder: Path, arguments: str) -> Iterator[Any]:
    """Start the program below; give None if that fails, for example where Python is a part of another program."""
    program = f"from {__name__} import write_received; write_received({arguments})"
    paths = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    fault = "there is no program python"
    if sys.executable:
        try:
            second = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                cwd=folder,  # so a folder that is removed and made again gets no file from it
                env=os.environ | {"PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as err:
            fault = str(err)
        else:
            with second:
                if second.stdout is not None and second.stdout.readline() == _READY.encode():
                    yield second
                    return
                fault = _last_line(second.communicate()[1])
    logger.warning("no second Python starts, so requests wait while files are written: %s", fault)
    yield None


def _last_line(said: bytes) -> str:
    return said.decode(errors="replace").strip().rpartition("\n")[2]


def write_received(key_bytes: int, value_bytes: int, file_bytes: int) -> None:
    """Be the second Python: write the rows of the standard input to files in the current folder."""
    import_rocksdict()
    sys.stdout.write(_READY)
    sys.stdout.flush()
    try:
        rows = _write(Path(), key_bytes, value_bytes, file_bytes, _received(sys.stdin.buffer, value_bytes))
    except Exception as err:  # noqa: BLE001 - rocksdict raises nothing narrower
        sys.exit(str(err))
    sys.stdout.write(str(rows))


def _received(stream: IO[bytes], value_bytes: int) -> Iterator[tuple[Keys, Values]]:
    while (rows := int(np.frombuffer(_exactly(stream, 8), np.int64)[0])) != _END:
        keys = np.frombuffer(_exactly(stream, 8 * rows), np.int64)
        yield keys, np.frombuffer(_exactly(stream, value_bytes * rows), np.uint8).reshape(rows, value_bytes)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the rows ended early")
    return data
