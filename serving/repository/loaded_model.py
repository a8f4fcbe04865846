"""One version of a model that answers requests, and its end."""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from kernels.errors import HotrowError
from serving.background import InFlightCounter
from serving.batch import read_batch
from serving.config.models import ModelConfig
from serving.errors import RequestError, UnknownModelError
from serving.lookup_model import LookupModelSession
from serving.model.manifest import Stamp
from serving.session import InferenceSession

logger = logging.getLogger("hotrow.repository")

#: How long a swap waits for the requests of an old version. A longer request drops the version itself when it ends.
DRAIN_TIMEOUT_S = 30.0


class LoadedModel:
    """One version of a model that answers requests. Any thread may use it.

    Attributes:
        config: the model.
        session: answers its requests.
        stamp: of its files when they were read; None: they are not looked at again.
    """

    def __init__(self, session: InferenceSession | LookupModelSession) -> None:
        """Take a session, which ``close`` closes."""
        self.config = session.config
        self.session = session
        self.stamp: Stamp | None = None
        # No reference to this object: the cycle would keep the model in memory until the garbage collector runs.
        self._calls = InFlightCounter(partial(_was_dropped, session.config))
        self._lock = threading.Lock()  # guards the two fields below
        self._releases: list[Callable[[], None]] = [session.close]
        self._is_closed = False

    def begin(self) -> None:
        """Keep the version loaded until ``end``; UnknownModelError if it is being dropped."""
        self._calls.begin()

    def end(self) -> None:
        """Let the version go that ``begin`` has kept."""
        self._calls.end()

    def on_close(self, release: Callable[[], None]) -> None:
        """Call ``release`` after the session is closed; now, if a swap has closed it already."""
        with self._lock:
            if not self._is_closed:
                self._releases.append(release)
                return
        release()

    def close(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Wait for the requests in flight, and close the session."""
        if not self._calls.close(self._release, timeout_s):
            logger.warning(
                "model %s version %s: requests take longer than %g s", self.config.name, self.config.version, timeout_s
            )

    def _release(self) -> None:
        with self._lock:
            self._is_closed = True
        with ExitStack() as releases:  # calls every release, also after one of them fails
            for release in reversed(self._releases):
                releases.callback(release)


def _was_dropped(config: ModelConfig) -> HotrowError:
    return UnknownModelError(f"version {config.version} of model {config.name!r} was unloaded")


def warm_up(session: InferenceSession | LookupModelSession) -> None:
    """Answer a request without keys, so that the first request does not wait for code to be compiled."""
    config = session.config
    if isinstance(session, LookupModelSession):
        session.lookup([np.empty(0, np.int64)] * len(config.tables))
        return
    slots = sum(table.slots for table in config.tables)
    dense, keys = np.zeros((1, config.dense_dim), np.float32), np.empty(0, np.int64)
    with suppress(RequestError):  # a network may refuse so few samples, or have no finite answer to zeros
        session.predict_batch(read_batch(config, dense, keys, np.zeros(slots + 1, np.int32)))
