"""``hotrow predict``: ask a running server from the shell."""

import argparse
import json
import sys
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from serving.errors import RequestError, ServingError

_DEFAULT_URL = "http://127.0.0.1:8000"
_LONGEST_TIMEOUT_S = 86_400


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "predict",
        help="ask a running server",
        description='Send {"samples": [{"dense": [...], "keys": [[...], ...]}]} to a server, print its predictions.',
    )
    parser.add_argument("model", metavar="MODEL", help="the model's name")
    parser.add_argument("file", metavar="FILE", help="the samples, a JSON file; - reads standard input")
    parser.add_argument("--url", default=_DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument("--timeout", type=_seconds, default=30.0, metavar="SECONDS", help="default: %(default)s")
    parser.set_defaults(run=predict, error_code=1)


def predict(options: argparse.Namespace) -> int:
    """Send the file and print one line per sample: its L probabilities, separated by spaces."""
    body = _read(options.file)
    if not options.url.startswith(("http://", "https://")):
        raise RequestError(f"--url: expected http://... or https://..., but {options.url!r} came")
    url = f"{options.url.rstrip('/')}/predict/{quote(options.model, safe='')}"
    request = Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=options.timeout) as response:
            answer = json.load(response)
            for probabilities in answer["predictions"]:
                print(*probabilities)
    except HTTPError as err:
        raise RequestError(_message(err)) from err
    except (URLError, HTTPException, OSError) as err:
        raise ServingError(f"{options.url}: {getattr(err, 'reason', err)}") from err
    except (ValueError, KeyError, TypeError) as err:
        raise ServingError(f"{url}: the answer is not Hotrow's") from err
    return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _LONGEST_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most {_LONGEST_TIMEOUT_S} seconds")
    return seconds


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as err:
        raise RequestError(f"{file}: {err.strerror}") from err


def _message(error: HTTPError) -> str:
    """The server's own words where it is ours, its status otherwise."""
    with error:
        try:
            return str(json.load(error)["error"])
        except (ValueError, KeyError, TypeError):
            return f"{error.url}: {error.code} {error.reason}"
