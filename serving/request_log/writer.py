"""Writes a sample of the requests while a server serves: the request log, and the keys of ``--record``."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import random
from typing import Generic, TypeVar

from serving.background import PeriodicWorker

_INTERVAL_S = 1.0
_MOST_WAITING_BYTES = 64 << 20
#: How long ``close`` waits for a disk that hangs.
_CLOSE_TIMEOUT_S = 4.0

Entry = TypeVar("Entry")


class SampleWriter(ABC, Generic[Entry]):
    """Writes what a random share of the requests left. Any thread may call ``add``.

    A background thread writes once a second, so a slow disk delays no request. If too much data waits, or if the disk
    is full, requests are dropped and counted.
    """

    def __init__(self, log: logging.Logger, written: str, share: float) -> None:
        """Start the thread. A subclass calls this last.

        Args:
            log: for what happens to the disk.
            written: what happens to a request, for example "logged".
            share: of the requests that are written.
        """
        self._log = log
        self._verb = written
        self._share = share
        self._lock = threading.Lock()  # guards the fields below
        self._waiting: list[Entry] = []
        self._waiting_bytes = self._written = self._dropped = 0
        self._unwritten = 0  # requests that wait or are being written
        self._writing = threading.Lock()  # held by the thread that writes, and guards the field below
        self._lost = 0  # requests dropped since the last successful write
        self._worker = PeriodicWorker(f"hotrow-requests-{written}", self._run, _INTERVAL_S, first_after_s=0.0)

    @property
    @abstractmethod
    def _place(self) -> Path:
        """Where requests are written."""

    @abstractmethod
    def _writes(self, entries: Sequence[Entry]) -> Iterable[tuple[Callable[[], object], int]]:
        """Return functions that each write some of the requests, and how many."""

    @abstractmethod
    def _tidy(self, is_end: bool) -> None:
        """Do what remains after each second's writing, and at the end."""

    @property
    def counts(self) -> tuple[int, int]:
        """How many requests were written, and dropped."""
        with self._lock:
            return self._written, self._dropped

    def is_drawn(self) -> bool:
        """Whether the sample has the next request."""
        return random() < self._share

    def add(self, entry: Entry, size_bytes: int) -> None:
        """Have a request written."""
        with self._lock:
            if self._waiting_bytes + size_bytes > _MOST_WAITING_BYTES:
                self._dropped += 1
                return
            self._waiting_bytes += size_bytes
            self._waiting.append(entry)
            self._unwritten += 1

    def drop(self) -> None:
        """Count a request that cannot be written."""
        with self._lock:
            self._dropped += 1

    def close(self) -> None:
        """Write the waiting requests, and log how many were written. Those that a hanging disk has kept are dropped."""
        self._worker.close(_CLOSE_TIMEOUT_S)
        ending = threading.Thread(target=self._run, args=(True,), daemon=True)  # a disk may hang
        ending.start()
        ending.join(_CLOSE_TIMEOUT_S)
        with self._lock:
            written, dropped = self._written, self._dropped + self._unwritten
        left_out = f"; {dropped:,} were dropped because the disk was too slow or full" if dropped else ""
        self._log.info("%s requests were %s in %s%s", f"{written:,}", self._verb, self._place, left_out)

    def _run(self, is_end: bool = False) -> None:
        with self._writing:
            with self._lock:
                waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
            for write, requests in self._writes(waiting):
                try:
                    write()
                except Exception as err:  # noqa: BLE001  # an error must not stop the thread
                    self._fail(err, requests)
                else:
                    self._succeed(requests)
            self._tidy(is_end)

    def _fail(self, error: Exception, requests: int) -> None:
        if not self._lost:
            reason = getattr(error, "strerror", None) or error
            unexpected = None if isinstance(error, OSError) else error
            self._log.error(
                "%s cannot be written, so requests are not %s: %s", self._place, self._verb, reason, exc_info=unexpected
            )
        self._lost += requests
        with self._lock:
            self._dropped += requests
            self._unwritten -= requests

    def _succeed(self, requests: int) -> None:
        with self._lock:
            self._written += requests
            self._unwritten -= requests
        if self._lost:
            self._log.warning("%s is written again; %s requests were dropped", self._place, f"{self._lost:,}")
            self._lost = 0
