"""The log of ``hotrow serve``: standard error, which never blocks the server. A JSON log has standard output too."""

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from traceback import print_exc
from types import TracebackType
from typing import TextIO

from serving.cli.standard_error import LineStream, StandardError
from serving.errors import printable

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
_MOST_LINE_CHARACTERS = 64 << 10
_STREAMS = {1: "stdout", 2: "stderr"}  # the loggers of other lines


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether these words of a `hotrow serve`, which may be wrong, or the environment ask for a JSON log."""
    forms = [os.environ.get("HOTROW_LOG_FORMAT"), *(two[1] for two in pairwise(words) if two[0] == "--log-format")]
    forms += [word.partition("=")[2] for word in words if word.startswith("--log-format=")]
    return forms[-1] == "json"


@contextmanager
def process_log(level: str, form: str, worker: int | None = None) -> Iterator[int]:
    """Log to standard error, from this level on, as text or as one JSON object per line, with the worker's number.

    Python code never waits for the reader of standard error. With ``json``, every line that other code writes to
    standard output or standard error becomes a JSON object too. The standard output of a worker stays as it is,
    because only its supervisor reads it.

    Yields:
        the descriptor of the standard error that this process was started with.
    """
    formatter = _json_formatter(worker) if form == "json" else _TextFormatter(worker)
    root, before = logging.getLogger(), (sys.stdout, sys.stderr)
    with ExitStack() as opened:
        started_with, handler = opened.enter_context(_unblocked(2, formatter))
        root.addHandler(handler)
        opened.callback(root.removeHandler, handler)
        opened.callback(root.setLevel, root.level)
        root.setLevel(level.upper())
        opened.callback(_restore_streams, *before)
        sys.stderr = handler.stream
        if form == "json":
            if faulthandler.is_enabled():  # a process that crashes runs no thread that could read a pipe
                faulthandler.enable(file=started_with)
            sys.stderr = opened.enter_context(_as_records(2, logging.WARNING, handler))
            if worker is None:
                _, printer = opened.enter_context(_unblocked(1, formatter))
                sys.stdout = opened.enter_context(_as_records(1, logging.INFO, printer))
        try:
            yield started_with
        except Exception:  # one line of JSON per line of its traceback
            if form != "json":
                raise
            print_exc()
            raise SystemExit(1) from None


def _restore_streams(output: TextIO, errors: TextIO) -> None:
    sys.stdout, sys.stderr = output, errors


@contextmanager
def _unblocked(number: int, formatter: logging.Formatter) -> Iterator[tuple[int, logging.StreamHandler[StandardError]]]:
    """Yield a copy of a standard stream's descriptor, and a handler that writes to it and never waits."""

    def dropped_line(dropped: int) -> str:
        text = f"the log was not read in time, or its disk was full: {dropped:,} lines were dropped"
        return formatter.format(_record("hotrow.log", logging.WARNING, text)) + "\n"

    descriptor = os.dup(number)
    stream = StandardError(descriptor, dropped_line)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    try:
        yield descriptor, handler
    finally:
        if stream.finish():
            os.close(descriptor)


@contextmanager
def _as_records(number: int, level: int, handler: logging.Handler) -> Iterator[LineStream]:
    """Make records of the lines on a standard stream that are not of the log, such as those of C++ libraries.

    Yields:
        the stream for Python's code.
    """
    stream = LineStream(lambda line: handler.handle(_record(_STREAMS[number], level, line)))
    started_with = os.dup(number)
    readable, writable = os.pipe()
    os.dup2(writable, number)
    os.close(writable)

    def read() -> None:
        with open(readable, encoding="utf-8", errors="backslashreplace") as lines:
            while line := lines.readline(_MOST_LINE_CHARACTERS):
                stream.write(line if line.endswith("\n") else line + "\n")

    thread = threading.Thread(target=read, name=f"lines-of-{_STREAMS[number]}", daemon=True)
    thread.start()
    try:
        yield stream
    finally:
        os.dup2(started_with, number)  # closes the pipe, unless a child process has it too
        os.close(started_with)
        thread.join(0.5)
        stream.write("\n")  # for a line without an end


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

    class Formatter(JsonFormatter):
        def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
            """Return the time in UTC, as RFC 3339 has it."""
            return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    fields = ["asctime", "levelname", "name", "message"]
    renamed = {"asctime": "time", "levelname": "level", "name": "logger"}
    of_worker = {} if worker is None else {"worker": worker}
    return Formatter(fields, rename_fields=renamed, static_fields=of_worker)


def _record(name: str, level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, message, None, None)
