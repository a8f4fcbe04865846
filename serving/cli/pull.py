"""``hotrow pull``: copy a model repository from a bucket into a local folder, which a server then serves."""

import argparse
import sys
from pathlib import Path
from typing import Any

from serving.cli.numbers import memory_size
from serving.errors import told


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "pull",
        description="Copy a remote model repository into a local folder: every version that has a manifest. A version "
        "appears only when it is complete and every SHA-256 is checked. `hotrow serve URL --copy-to DIR` copies and "
        "serves in one command.",
        epilog="Credentials come from the environment, such as AWS_ACCESS_KEY_ID.",
    )
    parser.add_argument("url", metavar="URL", help="such as s3://bucket/models or gs://bucket/models")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the local repository; created if it does not exist")
    parser.add_argument(
        "--max-bytes",
        type=memory_size,
        metavar="SIZE",
        help="maximum size of all copies (default: what the disk has)",
    )
    parser.set_defaults(run=pull, error_code=1)


def pull(options: argparse.Namespace) -> int:
    """Copy what is new.

    Raises:
        ServingError: the repository does not answer, or the folder cannot be written.
    """
    from serving.repository.remote import RemoteRepository  # slow to import
    from serving.repository.remote import pull as pull_all

    remote = RemoteRepository(options.url)
    errors = pull_all(remote, options.folder, options.max_bytes, lambda line: print(line, flush=True))
    for err in errors:
        print(f"hotrow pull: {told(err)}", file=sys.stderr)
    return int(bool(errors))
