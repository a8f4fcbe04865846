"""Standard error that never blocks its writers. A pipe that is not read is full after 64 KiB."""

import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable

_MOST_WAITING_BYTES = 4 << 20
#: How long a process that ends waits for the reader.
_LAST_WAIT_S = 2.0


class StandardError(io.TextIOBase):
    """A text stream. Other threads queue text, and one thread writes it.

    Text above a limit is dropped and counted, and so are lines that the disk has no room for.

    Any thread may write. Bytes that are not UTF-8 are written as backslash escapes.
    """

    def __init__(self, descriptor: int, dropped_line: Callable[[int], str]) -> None:
        """Start the thread.

        Args:
            descriptor: where it writes; stays open.
            dropped_line: makes the line that says how many writes were dropped.
        """
        super().__init__()
        self._descriptor = descriptor
        self._dropped_line = dropped_line
        self._change = threading.Condition()  # guards the fields below
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="standard-error", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, text: str, /) -> int:
        """Take the text, or drop it if too much waits."""
        data = text.encode(errors="backslashreplace")
        with self._change:
            if self._is_ending or self._waiting_bytes + len(data) > _MOST_WAITING_BYTES:
                self._dropped += 1
            elif data:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
                self._change.notify_all()
        return len(text)

    def finish(self) -> bool:
        """Write the queued text; return False if it takes too long. Later writes are dropped."""
        with self._change:
            self._is_ending = True
            self._change.notify_all()
        self._thread.join(_LAST_WAIT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        begin = b""  # ends the line that the last write began
        while True:
            with self._change:
                while not self._waiting and not self._is_ending:
                    self._change.wait()
                if not self._waiting:
                    return
                data = b"".join(self._waiting)
                self._waiting.clear()
            text = begin + data
            lost = self._write_all(text)
            lost_lines = lost.count(b"\n")
            if not lost:
                begin = b""
            elif len(lost) < len(text):
                begin = b"" if text[: len(text) - len(lost)].endswith(b"\n") else b"\n"
            else:
                lost_lines -= len(begin)  # it ends a line that was counted when it was cut
            with self._change:
                self._waiting_bytes -= len(data)
                self._dropped += lost_lines
                if self._dropped and not lost:
                    report = self._dropped_line(self._dropped).encode()
                    self._waiting.append(report)
                    self._waiting_bytes += len(report)
                    self._dropped = 0

    def _write_all(self, data: bytes) -> bytes:
        """Write everything, however long it takes; return what cannot be written."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process has made the pipe non-blocking
                select.select((), (self._descriptor,), ())
            except OSError:  # the reader has left, or the disk is full
                return data
        return b""


class LineStream(io.TextIOBase):
    """A text stream that passes on whole lines."""

    def __init__(self, take: Callable[[str], object]) -> None:
        """Pass lines without their ends to ``take``, which may be called from any thread."""
        super().__init__()
        self._take = take
        self._begun = ""
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Pass on the lines that the text ends, except empty lines."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self._take(line)
        return len(text)
