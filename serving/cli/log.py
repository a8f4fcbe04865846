"""The log of ``hotrow serve``: standard error, which never blocks the server."""

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import print_exc
from types import TracebackType

from serving.cli.standard_error import LineStream, StandardError
from serving.errors import printable

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
_MOST_LINE_CHARACTERS = 64 << 10


@contextmanager
def logging_to_standard_error(level: str, form: str, worker: int | None = None) -> Iterator[int]:
    """Log to standard error, from this level on, as text or as one JSON object per line, with the worker's number.

    Python code never waits for the reader of standard error. With ``json``, every line that other code writes there
    becomes a JSON object too.

    Yields:
        the descriptor of the standard error that this process was started with.
    """
    formatter = _json_formatter(worker) if form == "json" else _TextFormatter(worker)

    def dropped_line(dropped: int) -> str:
        text = f"the log was not read in time, or its disk was full: {dropped:,} lines were dropped"
        return formatter.format(_record("hotrow.log", logging.WARNING, text)) + "\n"

    started_with, root, before = os.dup(2), logging.getLogger(), sys.stderr
    output = StandardError(started_with, dropped_line)
    handler = logging.StreamHandler(output)
    handler.setFormatter(formatter)
    root.addHandler(handler)
    level_before = root.level
    root.setLevel(level.upper())
    other = _OtherLines(started_with, handler) if form == "json" else None
    sys.stderr = output if other is None else other.stream
    try:
        yield started_with
    except Exception:  # one line of JSON per line of its traceback
        if other is None:
            raise
        print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stderr = before
        if other is not None:
            other.finish()
        root.removeHandler(handler)
        root.setLevel(level_before)
        if output.finish():
            os.close(started_with)


class _TextFormatter(logging.Formatter):
    """Text in which no message can forge a line or control a terminal: names and errors may come from clients."""

    def __init__(self, worker: int | None) -> None:
        name = "%(name)s" if worker is None else f"worker {worker} %(name)s"
        super().__init__(f"%(asctime)s %(levelname)s {name}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(  # noqa: N802
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return "\n".join("  " + printable(line) for line in super().formatException(ei).split("\n"))


def _json_formatter(worker: int | None) -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter

    fields = ["asctime", "levelname", "name", "message"]
    renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
    of_worker = {} if worker is None else {"worker": worker}
    return JsonFormatter(fields, rename_fields=renamed, static_fields=of_worker)


class _OtherLines:
    """Lines on standard error that are not of the log, such as those of C++ libraries, become records of the log."""

    def __init__(self, started_with: int, handler: logging.Handler) -> None:
        self._started_with = started_with
        self.stream = LineStream(lambda line: handler.handle(_record("stderr", logging.WARNING, line)))
        if faulthandler.is_enabled():  # a process that crashes runs no thread that could read the pipe
            faulthandler.enable(file=started_with)
        readable, writable = os.pipe()
        os.dup2(writable, 2)
        os.close(writable)
        self._thread = threading.Thread(target=self._read, args=(readable,), name="other-lines", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        os.dup2(self._started_with, 2)  # closes the pipe, unless a child process has it too
        self._thread.join(0.5)

    def _read(self, readable: int) -> None:
        with open(readable, encoding="utf-8", errors="backslashreplace") as lines:
            while line := lines.readline(_MOST_LINE_CHARACTERS):
                self.stream.write(line if line.endswith("\n") else line + "\n")


def _record(name: str, level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, message, None, None)
