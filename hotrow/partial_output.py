"""The rows that ``hotrow predict --data`` has predicted, until they are complete and become its output.

``scores.parquet.partial`` is an Arrow IPC stream. Its schema says what the rows were made from. A record batch is
durable before the next one is appended, so after a kill or a power loss every batch except the last is whole. The next
run keeps these rows and continues after them.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import OutputError
from serving.model.atomic import atomic_write
from serving.model.regular_file import check_regular
from serving.request_log import stream_batches

#: In the metadata of files that ``hotrow predict --data`` wrote: what the rows were made from, as JSON.
MARK = b"hotrow.predictions"
#: In the same metadata: the names of the file's columns, as JSON.
COLUMNS = b"hotrow.columns"


class PartialOutput:
    """The rows so far, in order. Only one thread may use it.

    Attributes:
        path: the file.
        rows: how many rows it has.
    """

    def __init__(self, path: Path, file: FileIO, schema: Any, rows: int) -> None:
        """Append to ``file``, which has ``rows``; ``open_partial_output`` opens it."""
        self.path = path
        self.rows = rows
        self._file = file
        self._schema = schema
        self._end = file.seek(0, os.SEEK_END)

    def append(self, rows: NDArray[np.float32]) -> None:
        """Append the next rows, float32[B, L]: the columns of numbers and lists of numbers, side by side.

        Raises:
            OSError: the disk refuses; the rows before are still there.
        """
        os.fdatasync(self._file.fileno())
        pa, arrays, first = import_module("pyarrow"), [], 0
        for kind in self._schema.types:
            width = kind.list_size if pa.types.is_fixed_size_list(kind) else 1
            numbers = pa.array(np.ascontiguousarray(rows[:, first : first + width]).reshape(-1))
            arrays.append(numbers if kind == numbers.type else pa.FixedSizeListArray.from_arrays(numbers, width))
            first += width
        batch = pa.record_batch(arrays, schema=self._schema)
        message = batch.serialize()
        view = memoryview(message)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            self._file.truncate(self._end)
            raise
        self._end += message.size
        self.rows += batch.num_rows

    def batches(self) -> Iterator[Any]:
        """Yield all rows as record batches."""
        return stream_batches(self.path)


@contextmanager
def open_partial_output(path: Path, schema: Any, origin: Mapping[str, str]) -> Iterator[PartialOutput]:
    """Open the rows of an earlier run, or begin without rows. Until the block ends, no other process can open them.

    After the block, the file is gone. If the block raises, the file stays, unless it has no rows.

    Args:
        path: the file.
        schema: Arrow's, of the rows.
        origin: what the rows are made from.

    Raises:
        OutputError: another program wrote the file, another process writes it, or its rows have another origin.
        OSError: the file cannot be read or written.
    """
    schema = schema.with_metadata({MARK: json.dumps(origin)})
    with suppress(FileExistsError), atomic_write(path, replace=False) as created:
        created.write(schema.serialize())
    check_regular(path)
    with FileIO(path, "r+") as file:
        if not _lock(path, file):
            raise OutputError(f"{path}: another `hotrow predict` writes this file")
        rows, end = _rows_of(path, schema, origin)
        file.truncate(end)
        if not end:
            file.write(schema.serialize())
        partial = PartialOutput(path, file, schema, rows)
        is_whole = False
        try:
            yield partial
            is_whole = True
        finally:
            if is_whole or not partial.rows:
                path.unlink(missing_ok=True)


def _lock(path: Path, file: FileIO) -> bool:
    """Lock the file, and return False if another process has locked or removed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _rows_of(path: Path, schema: Any, origin: Mapping[str, str]) -> tuple[int, int]:
    """Return how many rows are durable, and where they end: at 0 if the file must be written again.

    Raises:
        OutputError: another program wrote the file, or its rows have another origin.
    """
    pa = import_module("pyarrow")
    rows, ends, found = [0], [0], pa.schema([])
    if not path.stat().st_size:  # killed while the file was written again
        return 0, 0
    try:
        with pa.OSFile(str(path)) as source:
            reader = pa.ipc.open_stream(source)
            found, ends = reader.schema, [source.tell()]
            while True:
                rows.append(rows[-1] + reader.read_next_batch().num_rows)
                ends.append(source.tell())
    except (pa.ArrowInvalid, StopIteration):
        pass
    except OSError as err:
        if err.errno:  # not an early end
            raise
    of_file = (found.metadata or {}).get(MARK)
    if of_file is None:
        raise OutputError(f"{path}: exists, and `hotrow predict` did not write it")
    if len(rows) < 3:  # the last batch may not be durable
        return 0, ends[0] if found.equals(schema, check_metadata=True) else 0
    made_from = json.loads(of_file)
    if differs := [what for what in origin if made_from.get(what) != origin[what]]:
        reason = f"has {rows[-2]:,} predictions of an earlier run, but {' and '.join(differs)} changed since"
        raise OutputError(f"{path}: {reason}; delete this file to begin again")
    return rows[-2], ends[-2]
