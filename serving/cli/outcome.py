"""How a command ends: its exit code, and its error on standard error."""

import argparse
import logging
import sys
from collections.abc import Callable

_log = logging.getLogger("hotrow")
_INTERRUPTED = 130


def outcome(options: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Run a command and return its exit code; print an error that it raises on purpose."""
    # Only after the command's check that `kernels` is ours.
    from kernels.errors import HotrowError
    from serving.errors import printable, told

    try:
        return run(options)
    except HotrowError as err:
        _log.debug("the error and its causes", exc_info=err)  # a cause may have a library's own words
        print(f"hotrow {options.command}: {told(err)}", file=sys.stderr)
        return int(options.error_code)
    except OSError as err:
        if err.filename is None:
            raise
        # A path of the command line that no file can have, or in a folder that may not be entered.
        print(f"hotrow {options.command}: {printable(str(err.filename)[:200])}: {err.strerror}", file=sys.stderr)
        return int(options.error_code)
    except KeyboardInterrupt:
        print(f"hotrow {options.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
