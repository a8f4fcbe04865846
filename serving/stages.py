"""What a request spends its time on, for traces. Code that works on it notes stages if somebody listens."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


class Stage(NamedTuple):
    """Some work on a request.

    Attributes:
        name: what was done.
        began_s: by ``time.perf_counter``.
        ended_s: by ``time.perf_counter``.
        attributes: what it was done with.
    """

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, str | int]


class _Listener(threading.local):
    stages: list[Stage] | None = None


#: Has the stages of this thread's request; None: nobody listens, and there is no need to take the time.
listener = _Listener()


@contextmanager
def listening() -> Iterator[list[Stage]]:
    """Yield a list of the stages that this thread notes inside the block."""
    stages: list[Stage] = []
    listener.stages = stages
    try:
        yield stages
    finally:
        listener.stages = None
