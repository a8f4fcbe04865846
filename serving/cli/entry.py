"""The process of a command line. Ctrl-C ends it quietly, even during an import. A reader of its output may leave."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from serving.cli.output import finish_output, watch_streams

_INTERRUPTED = 130


class _Interrupts:
    """Turns SIGINT into KeyboardInterrupt, and records that SIGINT came."""

    came = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. See ``serving.cli.main.main``."""
    interrupts = _Interrupts()
    signal.signal(signal.SIGINT, interrupts)
    watch_streams()
    try:
        from serving.cli.main import main  # slow to import

        try:
            code = main(arguments)
        finally:
            lost = finish_output()
        code = code or lost
    except BaseException:
        # An interrupted import may raise another error later.
        if not interrupts.came:
            raise
        code = _INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would print a traceback while Python ends
    return code


if __name__ == "__main__":
    sys.exit(run())
