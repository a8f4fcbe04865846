"""The console script ``hotrow``: Ctrl-C ends it quietly, even during an import."""

import signal
import sys
from types import FrameType

_INTERRUPTED = 130


class _Interrupts:
    """Turns SIGINT into KeyboardInterrupt, and remembers that it came."""

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
        from serving.cli.main import main  # slow to import

        code = main()
    except BaseException:
        # A package whose import was interrupted may fail later, with another error.
        if not interrupts.came:
            raise
        code = _INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would print a traceback while Python ends
    return code


if __name__ == "__main__":
    sys.exit(run())
