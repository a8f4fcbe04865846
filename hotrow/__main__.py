"""The commands ``hotrow`` and ``hotrow-train``."""

import sys

from hotrow.packages import check_packages

_FAILED_TO_START = 2


def run() -> int:
    """Run ``hotrow`` with the words of the process, and return its exit code."""
    return _run(sys.argv[1:])


def run_train() -> int:
    """Run ``hotrow train`` with the words of the process, and return its exit code."""
    return _run(["train", *sys.argv[1:]])


def _run(arguments: list[str]) -> int:
    try:
        check_packages()
    except ImportError as err:
        print(f"hotrow: {err}", file=sys.stderr)
        return _FAILED_TO_START
    from serving.cli.entry import run as run_command

    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(run())
