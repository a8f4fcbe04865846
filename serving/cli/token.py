"""``hotrow token``: make a token that lets a client use a server."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from serving.frontend.tokens import INFER, SCOPES, add_token


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "token",
        description="Create a random token, print it once, and add its SHA-256 to the file of `hotrow serve --tokens`. "
        "A running server reloads the file. To revoke a token, delete its entry.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file of tokens; created if it does not exist")
    parser.add_argument("name", metavar="NAME", help="a name for the token, such as the client's")
    parser.add_argument(
        "--scopes",
        type=_scopes,
        default=INFER,
        metavar="SCOPES",
        help="what the token allows, separated by commas: infer: predictions; control: loading and unloading, log "
        "settings, shared memory; metrics: metrics, status, statistics (default: %(default)s)",
    )
    parser.set_defaults(run=token, error_code=1)


def token(options: argparse.Namespace) -> int:
    """Print the token on standard output, and everything else on standard error."""
    add_token(options.file, options.name, options.scopes, partial(print, flush=True))
    print(f"hotrow token: {options.file} has its SHA-256; the token itself is not stored", file=sys.stderr)
    return 0


def _scopes(text: str) -> list[str]:
    scopes = text.split(",")
    for scope in scopes:
        if scope not in SCOPES:
            raise argparse.ArgumentTypeError(f"expected {', '.join(SCOPES)} or several of them, got {scope[:32]!r}")
    return scopes
