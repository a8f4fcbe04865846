"""``hotrow updates``: how far a running server has read the updates of its models, and what it rejected."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from serving.cli.client import DEFAULT_URL, Client, add_client_options
from serving.cli.stats import TIMEOUT_S, Document, aligned, by_reason, in_text, lag_of, read_status

_COLUMNS = ("partition", "position", "lag")
_COUNTED = ("applied", "skipped", "rejected")


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "updates",
        description="Show how far each worker of a running server has read the update log of each model, by partition: "
        "the messages that wait, and the messages that were rejected and why.",
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="the server (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON list with an object for each reader")
    add_client_options(parser)
    parser.set_defaults(run=updates, error_code=1)


def updates(options: argparse.Namespace) -> int:
    """Print how far every reader of updates has come."""
    client = Client(options.url, options, TIMEOUT_S)
    status = read_status(client)
    print(in_text(client.server, status, _json(status) if options.json else _lines(status)))
    return 0


def _readers(status: Document) -> Iterator[Document]:
    for model in status["models"]:
        for version in model["versions"]:
            for reader in version["updates"]:
                yield {"model": model["name"], "version": version["version"], **reader}


def _json(status: Document) -> Iterator[str]:
    yield json.dumps(list(_readers(status)))


def _lines(status: Document) -> Iterator[str]:
    is_first = True
    for reader in _readers(status):
        if not is_first:
            yield ""
        is_first = False
        state = f"no updates: {reader['fault']}" if reader["fault"] else "up"
        name = f"{reader['model']} version {reader['version']}, worker {reader['worker']}"
        yield f"{name}: {state}; {lag_of(reader)} behind"
        yield f"messages: {', '.join(f'{what} {by_reason(reader[what])}' for what in _COUNTED)}"
        rows = [
            (
                part["name"],
                part["position"] or "-",
                "-" if part["lag_messages"] is None else f"{part['lag_messages']:,}",
            )
            for part in reader["partitions"]
        ]
        yield from aligned(_COLUMNS, rows)
    if is_first:
        yield f"hotrow {status['version']}: no served model reads updates"
