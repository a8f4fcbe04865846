"""Sends the deltas of an outbox to the log, in a thread, again and again until the log has them."""

import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from kernels.errors import HotrowError
from serving.errors import SinkError, StreamError
from serving.stream import UpdateSink, open_sink
from training.publishing.outbox import Outbox

_PAUSE_S = 1.0
_log = logging.getLogger(__name__)


class Sender:
    """The thread that sends. A log that is away is logged when that begins, and when it ends.

    Attributes:
        error: what a delta's file or the outbox's folder is wrong about; None: nothing. Nothing is sent any more.
    """

    def __init__(self, url: str, settings: Mapping[str, str] | None, outbox: Outbox) -> None:
        """Begin to send.

        Raises:
            ConfigError: the URL cannot be used.
            MissingExtraError: the log needs a library that is not installed.
        """
        self.error: HotrowError | None = None
        self._open = partial(open_sink, url, settings)
        self._outbox = outbox
        self._sink: UpdateSink | None = None
        self._is_away = False
        self._failures = 0
        self._is_closing = False
        self._changed = threading.Condition()
        try:
            self._sink = self._open()
        except SinkError as err:
            self._failed(err)
        self._thread = threading.Thread(target=self._run, name="hotrow-publisher", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Send what is in the outbox now."""
        with self._changed:
            self._changed.notify_all()

    def flush(self) -> bool:
        """Wait until the log has every delta. Return False if the log does not take one."""
        with self._changed:
            failures = self._failures
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._outbox.waiting() or self._failures > failures or self.error or self._is_closing
            )
            return not self._outbox.waiting()

    def close(self) -> None:
        """Send no more, after the delta that is being sent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._close_sink()

    def _run(self) -> None:
        while not self._is_closing and self.error is None:
            try:
                for number in self._outbox.waiting():
                    self._send(number)
                    if self._is_closing:
                        return
                pause_s = None
            except StreamError as err:
                self._failed(err)
                pause_s = _PAUSE_S
            except HotrowError as err:
                _log.error("no more updates are published: %s", err)
                self.error = err
                pause_s = None
            with self._changed:
                self._changed.notify_all()
                if pause_s is not None or (not self._outbox.waiting() and not self._is_closing and self.error is None):
                    self._changed.wait(pause_s)

    def _send(self, number: int) -> None:
        if self._sink is None:
            self._sink = self._open()
        for message in self._outbox.read(number):
            self._sink.send(message.payload, message.key_group, message.topic)
        self._outbox.confirm(number, self._sink.flush())
        if self._is_away:
            self._is_away = False
            _log.warning("updates are published again")
        with self._changed:
            self._changed.notify_all()

    def _failed(self, err: StreamError) -> None:
        if not self._is_away:
            self._is_away = True
            _log.warning("updates wait in the outbox, because the log does not take them: %s", err)
        self._close_sink()
        with self._changed:
            self._failures += 1

    def _close_sink(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(SinkError):
                sink.close()
