"""When caches are refreshed: once after a delay, and then as often as is said, by a thread of its own."""

import logging
import threading
from collections.abc import Callable
from time import monotonic as now_s

from kernels.errors import HotrowError

logger = logging.getLogger(__name__)


class Refreshing:
    """A thread that refreshes by the clock. Methods may be called from any thread."""

    def __init__(
        self, refresh: Callable[[threading.Event], None], delay_s: float, interval_s: float, name: str
    ) -> None:
        """Start the thread.

        Args:
            refresh: reads everything anew; it is to end soon after the event is set.
            delay_s: from now to the first time; 0: the interval.
            interval_s: from one time to the next; 0: there is no next.
            name: what is refreshed, for messages.
        """
        self._refresh = refresh
        self._delay_s = delay_s or interval_s
        self._interval_s = interval_s
        self._name = name
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hotrow-refresh", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the thread end; a refresh that runs is told to break off, which nobody waits for here."""
        self._closing.set()

    def _work(self) -> None:
        try:
            self._keep_time()
        except Exception:  # the thread's top
            logger.exception("the GPU cache of %s is not refreshed any more", self._name)

    def _keep_time(self) -> None:
        due_s = now_s() + self._delay_s
        while not self._closing.wait(max(due_s - now_s(), 0.0)):
            try:
                self._refresh(self._closing)
            except HotrowError as err:
                logger.warning("the GPU cache of %s was not refreshed: %s", self._name, err)
            except Exception:  # a thread's top: the next time comes
                logger.exception("the GPU cache of %s was not refreshed", self._name)
            if not self._interval_s:
                return
            due_s = max(due_s + self._interval_s, now_s())  # a refresh that takes longer is followed by the next
