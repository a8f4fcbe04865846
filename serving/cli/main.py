"""The ``hotrow`` command."""

import argparse
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

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
from serving.cli.outcome import outcome
from serving.cli.output import outlive_readers
from serving.frontend.version import server_version

#: The output of these commands is their result. Other commands have done their work even if nobody reads the output.
_REPORTS = ("check", "plan", "predict", "stats", "token")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after ``hotrow`` on the command line. None means the words of the process.

    Returns:
        The exit code: 0 done, 1 the answer is an error, 2 the command could not start, 130 interrupted.
    """
    options = _parse(arguments)
    if options.command not in _REPORTS:
        outlive_readers()
    return outcome(options, options.run)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hotrow", description="Serve CTR models whose embedding tables outgrow the GPU."
    )
    parser.add_argument("--version", action="version", version=f"hotrow {server_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
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
        chosen = commands.choices[options.command] if options.command else parser
        close = get_close_matches(unknown[0].partition("=")[0], re.findall(r"--[a-z-]+", chosen.format_help()), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if options.command is None:
        parser.print_help()
        parser.exit()
    return options


if __name__ == "__main__":
    from serving.cli.entry import run

    sys.exit(run())
