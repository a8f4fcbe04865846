"""The ``hotrow`` command."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from serving.cli.numbers import names_variable
from serving.cli.outcome import outcome
from serving.cli.output import outlive_readers
from serving.frontend.version import server_version

#: The modules of the commands. A module is imported when its command is called, because some of them take long.
_COMMANDS = {
    "serve": "serving.cli.serve",
    "ready": "serving.cli.ready",
    "stats": "serving.cli.stats",
    "updates": "serving.cli.updates",
    "check": "serving.cli.check",
    "predict": "serving.cli.predict",
    "import": "serving.cli.import_model",
    "export-onnx": "serving.cli.export_onnx",
    "replay": "hotrow.replay.command",
    "plan": "serving.cli.plan",
    "dump": "serving.cli.dump",
    "load": "serving.cli.load",
    "publish": "serving.cli.publish",
    "checkpoint": "serving.cli.checkpoint",
    "snapshot": "serving.cli.snapshot",
    "token": "serving.cli.token",
    "train": "training.command.cli",
    "compare": "training.command.compare",
}
#: The output of these commands is their result. Other commands have done their work even if nobody reads the output.
_REPORTS = ("check", "compare", "plan", "predict", "replay", "stats", "token", "updates")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after ``hotrow`` on the command line. None means the words of the process.

    Returns:
        The exit code: 0 done, 1 an error, 2 a wrong command line or a server that could not start, 130 interrupted.
    """
    with _log_of_errors(sys.argv[1:] if arguments is None else arguments):
        options = _parse(arguments)
    if options.command not in _REPORTS:
        outlive_readers()
    return outcome(options, options.run)


@contextmanager
def _log_of_errors(words: Sequence[str]) -> Iterator[None]:
    """Write errors of the command line as `hotrow serve` writes its log."""
    if words[:1] != ["serve"]:
        yield
        return
    from serving.cli.log import asks_for_json, process_log

    with process_log("info", "json") if asks_for_json(words) else nullcontext():
        yield


class _Parser(argparse.ArgumentParser):
    """The parser of the command line and of each command. An empty path is refused: ``Path("")`` is the folder here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", Path, _path)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Add an argument whose errors name the variable that its value came from."""
        if parse := settings.get("type"):
            settings["type"] = names_variable(_path if parse is Path else parse)
        return super().add_argument(*names, **settings)


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="hotrow", description="Serve CTR models whose embedding tables outgrow the GPU.")
    parser.add_argument("--version", action="version", version=f"hotrow {server_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    words = sys.argv[1:] if arguments is None else arguments
    chosen = words[0] if words else ""
    for name, module in _COMMANDS.items():
        if chosen == name or chosen not in (*_COMMANDS, "--version"):
            import_module(module).add_parser(commands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        called = commands.choices[options.command] if options.command else parser
        close = get_close_matches(unknown[0].partition("=")[0], re.findall(r"--[a-z-]+", called.format_help()), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        called.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if options.command is None:
        parser.print_help()
        parser.exit()
    return options


if __name__ == "__main__":
    from serving.cli.entry import run

    sys.exit(run())
