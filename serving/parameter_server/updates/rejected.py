"""The file of rejected update messages, for people who look for the reason."""

import errno
import json
import logging
import os
import stat
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving.errors import OutputError
from serving.stream import Record

logger = logging.getLogger(__name__)

#: A file of this size gets no more messages.
MOST_FILE_BYTES = 64 << 20
#: A longer payload is cut.
MOST_PAYLOAD_BYTES = 64 << 10
# A message may have a part of a model's rows, so only this user reads the file.
_MODE = 0o600
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class RejectedMessages:
    """Appends messages to a file, one JSON object per line. Every method may be called from any thread.

    The file is opened for each message, so it may be moved or removed at any time.
    """

    def __init__(self, path: Path) -> None:
        """Create the file if it is absent.

        Raises:
            OutputError: it cannot be written, or is not a regular file.
        """
        self._path = path
        self._lock = threading.Lock()  # one write at a time; guards the field below
        self._is_failing = False
        try:
            with self._opened():
                pass
        except OSError as err:
            raise OutputError(f"rejected_file: {path} cannot be written: {err.strerror}") from err

    def append(self, model: str, record: Record, reason: str, text: str) -> None:
        """Keep a message that ``model`` has rejected. A failure is logged and never raised."""
        payload = bytes(record.payload[:MOST_PAYLOAD_BYTES])
        document = {
            "model": model,
            "topic": record.topic,
            "partition": record.partition,
            "position": record.position,
            "reason": reason,
            "text": text,
            "time_ms": record.time_ms,
            "payload_bytes": len(record.payload),
            "payload": b64encode(payload).decode("ascii"),
        }
        line = json.dumps(document).encode() + b"\n"
        with self._lock:
            try:
                self._write(line)
            except OSError as err:
                if not self._is_failing:
                    logger.warning("rejected messages are not kept: %s: %s", self._path, err.strerror)
                self._is_failing = True
            else:
                self._is_failing = False

    def _write(self, line: bytes) -> None:
        with self._opened() as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes >= MOST_FILE_BYTES:
                raise OSError(errno.EFBIG, f"it has {size_bytes:,} bytes, which is the most")
            if os.write(descriptor, line) != len(line):
                os.ftruncate(descriptor, size_bytes)
                raise OSError(errno.ENOSPC, "the disk is full")

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self._path, _FLAGS, _MODE)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENODEV, "not a regular file")
            yield descriptor
        finally:
            os.close(descriptor)
