"""``hotrow predict``: ask a running server from the shell."""

import argparse
import json
import os
import sys
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

from serving.cli.numbers import number
from serving.errors import RequestError, ServingError

_DEFAULT_URL = "http://127.0.0.1:8000"
_LONGEST_TIMEOUT_S = 86_400


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "predict",
        help="send samples to a running server",
        description='Send {"samples": [{"dense": [...], "keys": [[...], ...]}]} to a server and print its predictions.',
    )
    parser.add_argument("model", metavar="MODEL", help="the model's name")
    parser.add_argument("file", metavar="FILE", help="the samples, a JSON file; - reads standard input")
    parser.add_argument("--url", default=_DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument(
        "--timeout",
        type=number(_LONGEST_TIMEOUT_S, "seconds", above_zero=True),
        default=30.0,
        metavar="SECONDS",
        help="longest wait (default: %(default)s)",
    )
    parser.set_defaults(run=predict, error_code=1)


def predict(options: argparse.Namespace) -> int:
    """Print one line of L probabilities per sample. Report unknown keys on standard error."""
    predictions, defaulted_keys = _parse(_ask(options), options.url)
    for probabilities in predictions:
        print(*probabilities)
    if defaulted_keys:
        what = "1 key is" if defaulted_keys == 1 else f"{defaulted_keys} keys are"
        print(f"hotrow predict: {what} unknown to the model: default vectors were used", file=sys.stderr)
    return 0


def _ask(options: argparse.Namespace) -> bytes:
    """Send the file and return the server's answer."""
    body = _read(options.file)
    if not options.url.startswith(("http://", "https://")):
        raise RequestError(f"--url: expected http://... or https://..., got {options.url!r}")
    model = quote(os.fsencode(options.model), safe="")  # a name may be bytes that are not text
    try:
        _ = urlsplit(options.url).port  # raises ValueError for a bad port; urlopen would use its last 16 bits
        url = f"{options.url.rstrip('/')}/predict/{model}"
        request = Request(url, data=body, headers={"Content-Type": "application/json"})
        with urlopen(request, timeout=options.timeout) as response:
            answer: bytes = response.read()
            return answer
    except HTTPError as err:
        raise RequestError(_message(err)) from err
    except (URLError, HTTPException, OSError) as err:
        raise ServingError(f"{options.url}: {getattr(err, 'reason', err)}") from err
    except ValueError as err:
        raise RequestError(f"--url: {options.url!r} is not a URL: {err}") from err


def _parse(answer: bytes, url: str) -> tuple[list[list[float]], int]:
    """Return the predictions and the number of defaulted keys in the server's answer."""
    try:
        document = json.loads(answer)
        predictions = [list(probabilities) for probabilities in document["predictions"]]
        return predictions, int(document.get("defaulted_keys", 0))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ServingError(f"{url}: the answer is not Hotrow's") from err


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as err:
        raise RequestError(f"{file}: {err.strerror}") from err


def _message(error: HTTPError) -> str:
    """Return the message of Hotrow's server, or the status of another server."""
    with error:
        try:
            return str(json.load(error)["error"])
        except (ValueError, KeyError, TypeError):
            return f"{error.url}: {error.code} {error.reason}"
