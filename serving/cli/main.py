"""The ``hotrow`` command."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from serving.cli.numbers import names_variable
from serving.cli.outcome import outcome
from serving.cli.output import outlive_readers

#: The commands: their modules and what they do. A module is imported when its command is called, because some of them
#: take long.
_COMMANDS = {
    "serve": (
        "serving.cli.serve",
        "serve a model repository over HTTP and gRPC",
    ),
    "ready": (
        "serving.cli.ready",
        "check whether the server on this machine is ready",
    ),
    "stats": (
        "serving.cli.stats",
        "show the models, tiers and latencies of a running server",
    ),
    "updates": (
        "serving.cli.updates",
        "show how far a running server has read its update log",
    ),
    "check": (
        "serving.cli.check",
        "check a configuration, a model or a repository without serving it",
    ),
    "predict": (
        "serving.cli.predict",
        "send samples to a running server, or score a file offline",
    ),
    "import": (
        "serving.cli.import_model",
        "import an ONNX network and tables from PyTorch, TorchRec, NumPy or DynamicEmb",
    ),
    "export-onnx": (
        "serving.cli.export_onnx",
        "write a model's dense network as an ONNX file",
    ),
    "replay": (
        "hotrow.replay.command",
        "replay logged requests with other versions and compare the answers",
    ),
    "plan": (
        "serving.cli.plan",
        "show the memory of each tier and choose cache sizes from recorded traffic",
    ),
    "dump": (
        "serving.cli.dump",
        "write all rows of a table to a file",
    ),
    "load": (
        "serving.cli.load",
        "insert the rows of a file into a table",
    ),
    "publish": (
        "serving.cli.publish",
        "publish the rows of a folder to an update log",
    ),
    "checkpoint": (
        "serving.cli.checkpoint",
        "copy a RocksDB database",
    ),
    "snapshot": (
        "serving.cli.snapshot",
        "write a table as a file that opens in milliseconds",
    ),
    "pull": (
        "serving.cli.pull",
        "copy a model repository from a bucket into a local folder",
    ),
    "token": (
        "serving.cli.token",
        "create a token for a client of a server",
    ),
    "train": (
        "training.command.cli",
        "train a model and write it into a model repository",
    ),
    "compare": (
        "training.command.compare",
        "compare how two versions were trained",
    ),
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


class _Version(argparse.Action):
    """Prints the version, which takes a while to look up."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show program's version number and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from serving.frontend.version import server_version

        print(f"hotrow {server_version()}")
        parser.exit()


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="hotrow", description="Serve recommendation models whose embedding tables outgrow the GPU, and train them."
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    words = sys.argv[1:] if arguments is None else arguments
    for name, (module, does) in _COMMANDS.items():
        if words and words[0] == name:
            import_module(module).add_parser(commands)
        else:
            commands.add_parser(name, help=does)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        called = commands.choices[options.command] if options.command else parser
        from difflib import get_close_matches

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
