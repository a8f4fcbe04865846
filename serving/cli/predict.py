"""``hotrow predict``: ask a running server from the shell, or score a file offline."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

from serving.cli.client import DEFAULT_URL, Client, add_client_options, message_in
from serving.cli.numbers import column_names, number
from serving.errors import RequestError, ServingError
from serving.frontend.tokens import INFER
from serving.model.regular_file import read_regular

_STANDARD_INPUT = 0  # even if it is closed, when Python has no sys.stdin
_LONGEST_TIMEOUT_S = 86_400
_MOST_BYTES = 2 << 30  # of any `hotrow serve --max-body-bytes`


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "predict",
        description="Send a JSON file of samples to a server and print its predictions; see docs/serving.md. "
        "With --data, score a file without a server.",
        epilog="Example: hotrow predict models/clicks --data clicks.parquet --output scores.parquet",
    )
    parser.add_argument("model", metavar="MODEL", help="the model's name; with --data, the folder of the model")
    file = parser.add_argument(
        "file", type=_file, metavar="FILE", help="the samples, a JSON file; - reads standard input"
    )

    class ScoreFile(argparse.Action):
        """Makes FILE optional. As FILE may come after options, it cannot be optional from the start."""

        def __call__(self, _: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
            file.required = False
            namespace.data = value

    parser.add_argument(
        "--data",
        action=ScoreFile,
        type=Path,
        metavar="FILE",
        help="score all rows of Parquet or CSV files, or of a folder of them, instead of FILE",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --data, the Parquet file for the predictions, one per row in order",
    )
    parser.add_argument(
        "--keep",
        type=column_names,
        default=(),
        metavar="COLUMNS",
        help="with --output, columns of the data to copy next to the predictions, separated by commas, such as an id",
    )
    parser.add_argument(
        "--outputs",
        type=column_names,
        metavar="NAMES",
        help="with --output, the model's outputs to compute, separated by commas (default: those of a request)",
    )
    parser.add_argument(
        "--without",
        type=column_names,
        default=(),
        metavar="NAMES",
        help="with --output, inputs of the model that are not in the data, such as the user when scoring items",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an output that another program wrote")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument(
        "--timeout",
        type=number(_LONGEST_TIMEOUT_S, "seconds", above_zero=True),
        default=30.0,
        metavar="SECONDS",
        help="maximum time to wait (default: %(default)s)",
    )
    add_client_options(parser)
    parser.set_defaults(run=partial(_run, parser), error_code=1)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if (options.data is None) != (options.output is None) or (options.data is None) == (options.file is None):
        parser.error("expected FILE, the samples for a server, or --data and --output, to score a file offline")
    if options.data is None:
        for name in ("keep", "outputs", "without", "overwrite"):
            if getattr(options, name):
                parser.error(f"--{name} needs --data and --output")
        return predict(options)
    score: Callable[[argparse.Namespace], int] = import_module("hotrow.scoring").score  # reads data as training does
    replaced = ", in place of an earlier file" * options.output.exists()
    print(f"{score(options):,} predictions written to {options.output}{replaced}")
    return 0


def predict(options: argparse.Namespace) -> int:
    """Print a line for each sample: numbers, or outputs by name in JSON; or a line for each of the best candidates.

    Unknown keys are reported on standard error.
    """
    client = Client(options.url, options, options.timeout)
    predictions, defaulted_keys = _parse(_ask(client, options), client.server)
    for line in predictions:
        print(line)
    if defaulted_keys:
        what = "1 key is" if defaulted_keys == 1 else f"{defaulted_keys} keys are"
        print(f"hotrow predict: {what} unknown to the model: default values were used", file=sys.stderr)
    return 0


def _ask(client: Client, options: argparse.Namespace) -> bytes:
    """Send the file and return the server's answer."""
    body = _read(options.file)
    model = quote(os.fsencode(options.model), safe="")  # a name may be bytes that are not text
    code, reason, answer = client.ask(f"/predict/{model}", INFER, body)
    if code != HTTPStatus.OK:
        raise RequestError(f"{client.server}: {message_in(answer, f'{code} {reason}')}")
    return answer


def _parse(answer: bytes, server: str) -> tuple[list[str], int]:
    """Return a line for each sample, and the number of defaulted keys in the server's answer."""
    try:
        document = json.loads(answer)
        if "top" in document:
            lines = [json.dumps(candidate) for candidate in document["top"]]
        elif "outputs" in document:
            rows = zip(*document["outputs"].values(), strict=True)
            lines = [json.dumps(dict(zip(document["outputs"], row, strict=True))) for row in rows]
        else:
            lines = [" ".join(map(str, probabilities)) for probabilities in document["predictions"]]
        return lines, int(document.get("defaulted_keys", 0))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ServingError(f"{server}: the answer is not Hotrow's") from err


def _file(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a path or -, got ''")
    return text


def _read(file: str) -> bytes:
    try:
        if file != "-":
            return read_regular(file, _MOST_BYTES)
        with open(_STANDARD_INPUT, "rb", closefd=False) as opened:
            body = opened.read(_MOST_BYTES + 1)
    except OSError as err:
        raise RequestError(f"{file}: {err.strerror}") from err
    if len(body) > _MOST_BYTES:
        raise RequestError(f"{file}: expected at most {_MOST_BYTES:,} bytes, which is the most that a server accepts")
    return body
