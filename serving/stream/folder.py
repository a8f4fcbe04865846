"""A folder as a log: one message per file, ``0000000001.update`` and so on. It has one partition, ``folder``.

A file appears complete under the next number, or it does not appear. Files stay after they were applied. Old files may
be removed, except the newest file: a number that went backwards means that the folder was emptied.
"""

import errno
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic

from serving.errors import PositionLostError, SinkError, SourceUnreachableError
from serving.model.atomic import atomic_write, remove_killed_writes
from serving.model.regular_file import open_regular
from serving.stream.message import MOST_MESSAGE_BYTES
from serving.stream.source import MOST_POLL_BYTES, Record, UpdateSink, UpdateSource, check_sum

PARTITION = "folder"
_NAME = re.compile(r"([0-9]{10}|[1-9][0-9]{10,17})\.update")
_LOOK_INTERVAL_S = 0.02
_LIST_INTERVAL_S = 1.0
#: A folder with many files takes long to list, so the interval is at least so many times what the last list took.
_LIST_PAUSES = 50


def file_name(number: int) -> str:
    """Return the name of the file with a number, counted from 1."""
    return f"{number:010}.update"


def _numbers_in(folder: Path) -> Iterator[int]:
    return (int(match[1]) for match in map(_NAME.fullmatch, os.listdir(folder)) if match)


class FolderSource(UpdateSource):
    """See ``UpdateSource``. A position is the number of the last file that was read; ``0`` is before the first."""

    def __init__(self, folder: str | Path) -> None:
        """Open nothing yet."""
        self._folder = Path(folder)
        self._closed = threading.Event()
        self._position: int | None = None  # None: the earliest file
        self._last: int | None = None  # checksum of the file at the position, until compared
        self._checked_s = float("-inf")
        self._latest = 0  # the largest number of the last list
        self._listed_s = float("-inf")
        self._interval_s = _LIST_INTERVAL_S

    def start(self, positions: Mapping[str, str], last: Mapping[str, int] | None = None) -> None:
        """See ``UpdateSource``."""
        self._checked_s = float("-inf")
        self._position = None
        self._last = (last or {}).get(PARTITION)
        if (text := positions.get(PARTITION)) is not None:
            if not (text.isascii() and text.isdigit()):
                raise PositionLostError(str(self._folder), PARTITION, repr(text), "whole numbers", "whole numbers")
            self._position = int(text)

    def poll(self, timeout_s: float) -> list[Record]:
        """See ``UpdateSource``."""
        deadline = monotonic() + timeout_s
        self._compare_last()
        while not self._closed.is_set():
            records = self._read_next()
            if records:
                return records
            if monotonic() - self._checked_s >= self._interval_s:
                self._check_position()
            if monotonic() >= deadline:
                return []
            self._closed.wait(min(_LOOK_INTERVAL_S, max(deadline - monotonic(), 0)))
        return []

    def lag(self) -> dict[str, int]:
        """See ``UpdateSource``. It lists the folder only if files wait, and a large folder seldom."""
        try:
            if self._position is None:
                numbers = self._numbers()
                return {PARTITION: max(numbers) - min(numbers) + 1 if numbers else 0}
            if not (self._folder / file_name(self._position + 1)).exists():
                return {PARTITION: 0} if self._folder.is_dir() else {}
            if monotonic() - self._listed_s >= self._interval_s:
                self._numbers()
        except (OSError, SourceUnreachableError):
            return {}
        return {PARTITION: max(self._latest - self._position, 1)}

    def close(self) -> None:
        """See ``UpdateSource``."""
        self._closed.set()

    def _compare_last(self) -> None:
        """Raise PositionLostError if the file at the position has another content than the file that was read."""
        if self._last is None or self._position is None:
            return
        record = self._read(self._position)
        if record is not None and check_sum(record.payload) != self._last:
            first, last = self._ends(self._numbers())
            raise PositionLostError(str(self._folder), PARTITION, str(self._position), first, last, is_another=True)
        self._last = None

    def _read_next(self) -> list[Record]:
        records: list[Record] = []
        size_bytes = 0
        if self._position is None:
            earliest = self._earliest()
            if earliest is None:
                return []
            self._position = earliest - 1
        while size_bytes < MOST_POLL_BYTES:
            try:
                record = self._read(self._position + 1)
            except SourceUnreachableError:
                if records:
                    break  # the next call raises it again
                raise
            if record is None:
                break
            records.append(record)
            size_bytes += len(record.payload)
            self._position += 1
        return records

    def _read(self, number: int) -> Record | None:
        """Read a file; None if it is absent, or empty because something is still copying it.

        A file that is larger than any message is cut short, so ``decode`` refuses it and the stream goes on.
        """
        name = file_name(number)
        try:
            with open_regular(self._folder / name) as file:
                payload = file.read(MOST_MESSAGE_BYTES + 1)
                time_ms = os.fstat(file.fileno()).st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None
        except OSError as err:
            raise SourceUnreachableError(str(self._folder), f"{name}: cannot be read: {err.strerror}") from err
        return Record(PARTITION, str(number), payload, None, "", time_ms) if payload else None

    def _earliest(self) -> int | None:
        """Return the smallest number, or None without files.

        A list of a folder may miss a file that appears meanwhile, but then it has a later file too. So the second list
        has every file that was there before a file of the first list.
        """
        return min(self._numbers(), default=None) and min(self._numbers(), default=None)

    def _check_position(self) -> None:
        """Raise PositionLostError if the next file can never come: there are later files, or the folder was emptied."""
        numbers, position = self._numbers(), self._position or 0
        latest = max(numbers, default=0)
        # A later file appears after the next file, so the next file is there now if it ever was.
        if latest < position or (latest > position + 1 and self._read(position + 1) is None):
            first, last = self._ends(numbers)
            raise PositionLostError(str(self._folder), PARTITION, str(position), first, last)
        self._checked_s = monotonic()

    @staticmethod
    def _ends(numbers: set[int]) -> tuple[str, str]:
        return (file_name(min(numbers)), file_name(max(numbers))) if numbers else ("", "")

    def _numbers(self) -> set[int]:
        began_s = monotonic()
        try:
            numbers = set(_numbers_in(self._folder))
        except OSError as err:
            raise SourceUnreachableError(str(self._folder), f"cannot be listed: {err.strerror}") from err
        self._latest, self._listed_s = max(numbers, default=0), monotonic()
        self._interval_s = max(_LIST_INTERVAL_S, _LIST_PAUSES * (self._listed_s - began_s))
        return numbers


class FolderSink(UpdateSink):
    """See ``UpdateSink``. Several sinks may write to one folder; none replaces another's file."""

    def __init__(self, folder: str | Path) -> None:
        """Make the folder if it is absent, and remove what killed sinks left behind.

        Raises:
            SinkError: the folder cannot be made or read.
        """
        self._folder = Path(folder)
        self._failure: str | None = None
        self._sent = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_killed_writes(self._folder, _NAME.pattern)
            self._last = max(_numbers_in(self._folder), default=0)
        except OSError as err:
            raise SinkError(str(self._folder), f"cannot be used: {err.strerror}") from err

    def send(self, payload: bytes, key_group: int, topic: str | None = None) -> None:
        """See ``UpdateSink``. The message is durable at once."""
        if topic:
            raise SinkError(str(self._folder), f"a folder has no topic {topic!r}: HPS's format needs Kafka or Redis")
        self._check()
        try:
            self._write(payload)
        except OSError as err:
            self._failure = f"cannot write {file_name(self._last + 1)}: {err.strerror}"
            raise SinkError(str(self._folder), self._failure) from err
        self._sent = True

    def flush(self) -> dict[str, str]:
        """See ``UpdateSink``."""
        self._check()
        return {PARTITION: str(self._last)} if self._sent else {}

    def close(self) -> None:
        """See ``UpdateSink``."""

    def _write(self, payload: bytes) -> None:
        if not payload:
            raise OSError(errno.EINVAL, "the message is empty")
        while True:
            try:
                with atomic_write(self._folder / file_name(self._last + 1), replace=False) as file:
                    file.write(payload)
            except FileExistsError:  # another sink's
                self._last += 1
            else:
                self._last += 1
                return

    def _check(self) -> None:
        if self._failure is not None:
            raise SinkError(str(self._folder), self._failure)
