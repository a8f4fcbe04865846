"""The ``hotrow`` command."""

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from serving.cli.outcome import outcome
from serving.cli.output import outlive_readers

_FAILED_TO_START = 2
#: The output of these commands is their result. Other commands have done their work even if nobody reads the output.
_REPORTS = ("check", "plan", "predict", "stats", "token")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after ``hotrow`` on the command line. None means the words of the process.

    Returns:
        The exit code: 0 done, 1 the answer is an error, 2 the command could not start, 130 interrupted.
    """
    shadowed = _shadowing_package()
    if shadowed:
        print(f"hotrow: {shadowed}", file=sys.stderr)
        return _FAILED_TO_START
    options = _parse(arguments)
    if options.command not in _REPORTS:
        outlive_readers()
    return outcome(options, options.run)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    # Only after the check that `kernels` is ours.
    from serving.cli import (
        check,
        checkpoint,
        dump,
        export_onnx,
        import_model,
        load,
        plan,
        predict,
        serve,
        snapshot,
        stats,
        token,
    )
    from serving.frontend.version import server_version

    parser = argparse.ArgumentParser(
        prog="hotrow", description="Serve CTR models whose embedding tables outgrow the GPU."
    )
    parser.add_argument("--version", action="version", version=f"hotrow {server_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands_in_order = (
        serve,
        stats,
        check,
        predict,
        import_model,
        export_onnx,
        plan,
        dump,
        load,
        checkpoint,
        snapshot,
        token,
    )
    for command in commands_in_order:
        command.add_parser(commands)
    import_module("training.command.cli").add_parser(commands)  # by name, because serving must not depend on training
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen = commands.choices[options.command]
        close = get_close_matches(unknown[0].partition("=")[0], re.findall(r"--[a-z-]+", chosen.format_help()), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options


def _shadowing_package() -> str:
    """Return an error message if the package ``kernels`` is Hugging Face's, not ours, else an empty text."""
    try:
        if hasattr(import_module("kernels.errors"), "HotrowError"):
            return ""
    except ModuleNotFoundError as err:
        if err.name == "kernels":
            return "its package 'kernels' is not installed: pip install --force-reinstall hotrow"
    found = find_spec("kernels")
    where = Path(found.origin).parent if found is not None and found.origin else "an unknown place"
    return (
        f"the package 'kernels' in {where} belongs to another project and hides Hotrow's own; "
        "the two cannot share an environment: pip uninstall kernels && pip install --force-reinstall hotrow"
    )


if __name__ == "__main__":
    from serving.cli.entry import run

    sys.exit(run())
