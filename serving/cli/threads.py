"""Lets a process react to signals while a call hangs, such as a read from a dead file server."""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from time import monotonic

_log = logging.getLogger("hotrow.server")
_LOG_TIMEOUT_S = 0.2
#: A thread that takes longer to end hangs.
_END_TIMEOUT_S = 0.2
_OUR_THREADS = "hotrow-"  # prefix of the names of threads that may run a call; gRPC's own threads never end


def in_thread(name: str, work: Callable[[], None]) -> None:
    """Do some work in a thread and wait for it. A signal ends the wait at once."""
    errors: list[BaseException] = []
    has_ended = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as err:  # noqa: BLE001  # it is raised again below
            errors.append(err)
        finally:
            has_ended.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    has_ended.wait()
    if errors:
        raise errors.pop()


def end_process_after(seconds: float, exit_code: int) -> None:
    """End the process with ``exit_code`` after this time, if it has not ended before.

    If the process ends earlier while a call still hangs, the exit code is the same. Otherwise C++ libraries could abort
    the process, because they destroy what the call still uses.
    """

    def end() -> None:
        words = "the process ends now, although a load or a request still runs"
        log = threading.Thread(target=_log.error, args=(words,), daemon=True)
        log.start()
        log.join(_LOG_TIMEOUT_S)  # the log may have no reader
        os._exit(exit_code)

    def end_if_a_call_hangs() -> None:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith(_OUR_THREADS)]
        until_s = monotonic() + _END_TIMEOUT_S
        for thread in ours:
            thread.join(max(until_s - monotonic(), 0))
        if any(thread.is_alive() for thread in ours):
            end()

    atexit.register(end_if_a_call_hangs)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
