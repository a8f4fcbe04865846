"""``hotrow pull``: copy a model repository from a bucket into a local folder, which a server then serves."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from serving.cli.numbers import memory_size, whole_number
from serving.errors import ServingError, told

_LONGEST_INTERVAL_S = 86_400


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "pull",
        description="Copy the versions of a remote model repository that have a manifest into a local folder. A "
        "version appears there complete, with every SHA-256 checked. `hotrow serve DIR --model-control-mode poll` "
        "serves them.",
        epilog="Credentials come from the environment, as the protocol's own tools read them.",
    )
    parser.add_argument("url", metavar="URL", help="such as s3://bucket/models or gs://bucket/models")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the local repository; created if it does not exist")
    parser.add_argument(
        "--watch-s",
        type=whole_number(1, _LONGEST_INTERVAL_S),
        metavar="S",
        help="copy again every S seconds, and go on after errors",
    )
    parser.add_argument(
        "--max-bytes",
        type=memory_size,
        metavar="SIZE",
        help="copy no version beyond this size of all copies (default: what the disk has)",
    )
    parser.set_defaults(run=pull, error_code=1)


def pull(options: argparse.Namespace) -> int:
    """Copy once, or again and again.

    Raises:
        ServingError: the repository does not answer, or the folder cannot be written.
    """
    from serving.repository.remote import RemoteRepository  # slow to import

    remote = RemoteRepository(options.url)
    if options.watch_s is None:
        return int(_pull_once(remote, options))
    while True:
        try:
            _pull_once(remote, options)
        except ServingError as err:  # what is there goes on serving
            _print_error(err)
        time.sleep(options.watch_s)


def _pull_once(remote: Any, options: argparse.Namespace) -> bool:
    """Return whether a version could not be copied."""
    from serving.repository.remote import pull as pull_all

    errors = pull_all(remote, options.folder, options.max_bytes, lambda line: print(line, flush=True))
    for err in errors:
        _print_error(err)
    return bool(errors)


def _print_error(error: ServingError) -> None:
    print(f"hotrow pull: {told(error)}", file=sys.stderr)
