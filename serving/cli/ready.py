"""``hotrow ready``: a health check for containers, Kubernetes and systemd.

It reads the options and the variables of `hotrow serve`, so it finds a server with another port, with TLS, or on a Unix
socket.
"""

import argparse
import time
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any

from serving.cli.address_options import ADDRESS_OPTIONS, DEFAULT_HOST, DEFAULT_PORT, add_address_options
from serving.cli.client import Client
from serving.cli.numbers import number
from serving.cli.variables import from_environment, warn_of_misspelt_variables
from serving.errors import RequestError, ServingError

_TIMEOUT_S = 5
_INTERVAL_S = 0.25
_LONGEST_WAIT_S = 86_400
#: A server that does not listen for this long is not waited for any longer: it has ended, or it never started.
_ABSENT_S = 30


def add_parser(commands: Any) -> None:
    """Add the command to the ``hotrow`` parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "ready",
        description="Exit with 0 if the server on this machine is ready, otherwise with 1. Give the server's own "
        "address options or HOTROW_* variables. With TLS, the command presents the server's own certificate.",
    )
    add_address_options(parser)
    parser.add_argument("--live", action="store_true", help="only ask whether the server answers, ready or not")
    parser.add_argument(
        "--wait-s",
        type=number(_LONGEST_WAIT_S, "seconds"),
        default=0,
        metavar="S",
        help=f"wait this long for a server that is loading models, but at most {_ABSENT_S} s for a server that does "
        "not listen (default: %(default)s)",
    )
    parser.set_defaults(run=ready, error_code=1, **from_environment(ADDRESS_OPTIONS))


def ready(options: argparse.Namespace) -> int:
    """Ask until the server is ready or the time is over.

    Raises:
        ServingError: it is not ready.
        RequestError: a certificate cannot be read.
    """
    if options.ssl_keyfile is not None and options.ssl_certfile is None:
        raise RequestError("--ssl-keyfile needs --ssl-certfile")
    warn_of_misspelt_variables()
    client = _client(options)
    path = "/v2/health/live" if options.live else "/v2/health/ready"
    began_s = listened_s = time.monotonic()
    while True:
        error = _error(client, path)
        if error is None:
            return 0
        now_s = time.monotonic()
        if not isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
            listened_s = now_s
        if now_s - began_s >= options.wait_s or now_s - listened_s >= _ABSENT_S:
            raise error
        time.sleep(_INTERVAL_S)


def _client(options: argparse.Namespace) -> Client:
    host, port = options.host or DEFAULT_HOST, options.http_port or DEFAULT_PORT
    scheme = "http" if options.ssl_certfile is None else "https"
    files = {"ca_certs": None, "certfile": options.ssl_certfile, "keyfile": options.ssl_keyfile}
    url = f"{scheme}://{_within_reach(host)}:{port}"
    return Client(url, argparse.Namespace(uds=options.uds, **files), _TIMEOUT_S, is_own=True)


def _within_reach(host: str) -> str:
    """Return an address for clients of a server that listens on ``host``, which may mean every address."""
    try:
        address = ip_address(host)
    except ValueError:  # a name
        return host
    if address.is_unspecified:
        return "[::1]" if address.version == 6 else "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host


def _error(client: Client, path: str) -> ServingError | None:
    """Ask once; return why the server is not ready, or None if it is."""
    try:
        code, reason, _ = client.ask(path, "")
    except ServingError as err:
        return err
    if code == HTTPStatus.OK:
        return None
    state = "not ready" if code == HTTPStatus.SERVICE_UNAVAILABLE else f"{code} {reason}"
    return ServingError(f"{client.server}: {state}")
