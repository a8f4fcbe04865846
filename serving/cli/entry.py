"""The console script ``hotrow``: Ctrl-C ends it quietly, whatever is being imported just then."""

import signal
import sys
from types import FrameType

_INTERRUPTED = 130


class _Interrupts:
    """SIGINT as KeyboardInterrupt, as ever, and a memory that it came."""

    came = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def run() -> int:
    """Run the process's own command line; see ``serving.cli.main.main``.

    Returns:
        The exit code.
    """
    interrupts = _Interrupts()
    signal.signal(signal.SIGINT, interrupts)
    try:
        from serving.cli.main import main  # it takes its time, and its imports more

        code = main()
    except BaseException:
        # Some packages, when their import is interrupted, fail later and otherwise.
        if not interrupts.came:
            raise
        code = _INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would be told as a traceback of Python's own end
    return code


if __name__ == "__main__":
    sys.exit(run())
