"""The changes that an update log brings to a table in shared memory, and how far the table has come in each log."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from serving.storage.store import Keys, Vectors

_REDO, _REACHED = ".redo", ".reached"


class RedoLog:
    """The last change of a table, in a file that is written before the table and renamed after it. Not thread-safe.

    ``<table>.redo`` has a change that may not be in the table, ``<table>.reached`` the last one that is. A file has the
    rows that result, so a change may be made again. It also has the states of all logs after the change. It begins with
    a JSON object in one line, then come the keys, and the rows as float32. A file of a table that was replaced since
    does not count.
    """

    def __init__(self, table_file: Path) -> None:
        """Name the files of the table of ``table_file``; they need not exist."""
        self._redo = table_file.with_name(table_file.name + _REDO)
        self._reached = table_file.with_name(table_file.name + _REACHED)
        self._header_bytes = 0  # of the change that waits

    def states(self, table: int) -> Mapping[str, str]:
        """The states of logs of the table with the inode ``table``, by partition; any process may ask.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with self._reached.open("rb") as file:
                header = json.loads(file.readline())
        except FileNotFoundError:
            return {}
        return header["states"] if header["table"] == table else {}

    def write(self, table: int, states: Mapping[str, str], keys: Keys, rows: Vectors | None) -> None:
        """Write a change that is about to be made; a killed process leaves all of it or nothing.

        Raises:
            OSError: there is no memory.
        """
        header = {"table": table, "states": states, "keys": keys.size, "dim": None if rows is None else rows.shape[1]}
        text = json.dumps(header).encode()
        line = text + b" " * (-(len(text) + 1) % 8) + b"\n"  # numbers lie where processors read them
        new = self._redo.with_name(self._redo.name + ".new")
        with new.open("wb") as file:
            file.writelines([line, keys.tobytes(), b"" if rows is None else rows.tobytes()])
        new.rename(self._redo)

    def waiting(self, table: int) -> tuple[Keys, Vectors | None] | None:
        """The change that may not be in the table; None: there is none.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            content = self._redo.read_bytes()
        except FileNotFoundError:
            return None
        at = content.index(b"\n") + 1
        header, self._header_bytes = json.loads(content[:at]), at
        count, dim = header["keys"], header["dim"]
        keys = np.frombuffer(content, np.int64, count, at)
        rows = None if dim is None else np.frombuffer(content, np.float32, count * dim, at + keys.nbytes)
        return (keys, None if rows is None else rows.reshape(count, dim)) if header["table"] == table else None

    def made(self) -> None:
        """Note that the change that ``waiting`` returned is in the table.

        Raises:
            OSError: the file cannot be renamed.
        """
        self._redo.rename(self._reached)
        os.truncate(self._reached, self._header_bytes)

    def remove(self) -> None:
        """Remove the files."""
        for file in (self._redo, self._reached):
            file.unlink(missing_ok=True)
