"""The standard streams of a command. Their readers may leave early, as ``head`` and a pager do."""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

_PIPE_CLOSED = 141  # of a program that SIGPIPE ends
_FAILED = 1
#: The errors of a stream whose reader has left, and of a closed stream.
_UNREAD = (errno.EPIPE, errno.EBADF)


class _Stream(io.FileIO):
    """One standard stream. After a failed write, all output is discarded.

    Attributes:
        ends_command: whether a failed write ends the command.
        exit_code: the command's exit code after a failed write; 0 before.
    """

    def __init__(self, number: int, ends_command: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self.ends_command = ends_command
        self.exit_code = 0

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as err:
            _open_null(self.fileno())
            self.exit_code = _PIPE_CLOSED if isinstance(err, BrokenPipeError) else _FAILED
            if err.errno in _UNREAD and not self.ends_command:
                self.exit_code = 0
            if self.exit_code == _FAILED and self.fileno() == 1:
                print(f"hotrow: standard output cannot be written: {err.strerror}", file=sys.stderr)
            if self.ends_command:
                raise SystemExit(self.exit_code) from err
            return len(data)


def watch_streams() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr``. A write to a closed stream still fails."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # another file would get this number
            _open_null(number, os.O_RDONLY)
    sys.stdout = _text(sys.stdout, _Stream(1, ends_command=True))
    sys.stderr = _text(sys.stderr, _Stream(2, ends_command=False))


def outlive_readers() -> None:
    """Let the command continue if its output cannot be written, because it does more than print."""
    stream = _stream()
    if stream is not None:
        stream.ends_command = False


def finish_output() -> int:
    """Flush the output; return the exit code for lost output, or 0.

    Raises:
        SystemExit: the output cannot be written, and the command only prints.
    """
    sys.stdout.flush()
    stream = _stream()
    return 0 if stream is None else stream.exit_code


def _stream() -> _Stream | None:
    """Return the stream of ``sys.stdout``. None: ``watch_streams`` was not called."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Stream) else None


def _text(before: TextIO | None, stream: _Stream) -> TextIO:
    encoding, errors = ("utf-8", "backslashreplace") if before is None else (before.encoding, before.errors)
    is_prompt = stream.fileno() == 2 or stream.isatty() or getattr(before, "write_through", False)  # PYTHONUNBUFFERED
    return io.TextIOWrapper(io.BufferedWriter(stream), encoding, errors, line_buffering=is_prompt)


def _open_null(number: int, flags: int = os.O_RDWR) -> None:
    with suppress(OSError):
        null = os.open(os.devnull, flags)
        if null != number:
            os.dup2(null, number)
            os.close(null)
