"""The client of ``hotrow predict`` and ``hotrow stats``: HTTP to a running server, over TCP or a Unix socket."""

import argparse
import json
import os
import re
import socket
import ssl
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from serving.errors import RequestError, ServingError

DEFAULT_URL = "http://127.0.0.1:8000"
#: The variable with the client's token. There is no option, because every user of a machine can read command lines.
_TOKEN_VARIABLE = "HOTROW_TOKEN"  # the name of a variable
_TOKEN = re.compile(r"[!-~]{1,4096}")


class NoAnswerError(ServingError):
    """The server does not answer."""


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``Client``, except the URL."""
    parser.add_argument(
        "--uds", type=Path, metavar="PATH", help="connect to this Unix socket; the URL gives the protocol and the Host"
    )
    parser.add_argument(
        "--ca-certs",
        type=Path,
        metavar="FILE",
        help="https: trust these authorities instead of the system's (PEM)",
    )
    parser.add_argument("--certfile", type=Path, metavar="FILE", help="https: the client's certificate (PEM)")
    parser.add_argument(
        "--keyfile", type=Path, metavar="FILE", help="its private key (PEM), if it is not in the certificate's file"
    )
    parser.epilog = f"For a server with --tokens, set the environment variable {_TOKEN_VARIABLE} to the token."


class Client:
    """Sends requests to the server of a URL."""

    def __init__(self, url: str, options: argparse.Namespace, timeout_s: float) -> None:
        """Take the options of ``add_client_options``.

        Raises:
            RequestError: the URL, an option or the token cannot be used.
        """
        self._url = url
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"expected http://... or https://..., got {url!r}")
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as err:
            raise RequestError(f"{url!r} is not a URL: {err}") from err
        if "@" in parts.netloc:
            raise RequestError(f"the URL has a user or a password; set {_TOKEN_VARIABLE} instead")
        if not self._host:
            raise RequestError(f"{url!r} is not a URL: no host")
        self._prefix = parts.path.rstrip("/")
        self._uds: Path | None = options.uds
        self._timeout_s = timeout_s
        self._tls = _context(options) if parts.scheme == "https" else None
        for option, file in {"--ca-certs": options.ca_certs, "--certfile": options.certfile}.items():
            if file is not None and self._tls is None:
                raise RequestError(f"{option} needs https://..., got {url!r}")
        self._headers = token_header()

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, str, bytes]:
        """Send one request, a POST of JSON if it has a body; return the answer's code, reason and body.

        Raises:
            NoAnswerError: the server does not answer.
            RequestError: the URL is not valid.
        """
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        try:
            with closing(self._connection()) as connection:
                if self._uds is not None:
                    self._connect_to(self._uds, connection)
                connection.request("GET" if body is None else "POST", self._prefix + path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.reason, answer.read()
        except (HTTPException, OSError) as err:
            raise NoAnswerError(str(err) or type(err).__name__) from err
        except ValueError as err:
            raise RequestError(f"{self._url!r} is not a URL: {err}") from err

    def _connection(self) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)

    def _connect_to(self, uds: Path, connection: HTTPConnection) -> None:
        """Connect to a Unix socket; otherwise the request itself connects."""
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(self._timeout_s)
        connection.sock.connect(str(uds))
        if self._tls is not None:
            connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=self._host)


def _context(options: argparse.Namespace) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca_certs)
    except OSError as err:  # an error of OpenSSL too
        raise RequestError(f"--ca-certs {options.ca_certs}: expected certificates in PEM form: {_reason(err)}") from err
    if options.certfile is None:
        if options.keyfile is not None:
            raise RequestError("--keyfile needs --certfile")
        return context
    try:
        # Without a password, OpenSSL would ask for the password of an encrypted key.
        context.load_cert_chain(options.certfile, options.keyfile or options.certfile, password="")
    except OSError as err:
        expected = "expected a certificate and its key, in PEM form and without a password"
        raise RequestError(f"--certfile {options.certfile}: {expected}: {_reason(err)}") from err
    return context


def _reason(error: OSError) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or str(error)


def token_header() -> dict[str, str]:
    """Return the header with the token of ``HOTROW_TOKEN``; nothing without one.

    Raises:
        RequestError: it cannot be a token.
    """
    token = os.environ.get(_TOKEN_VARIABLE, "").strip()
    if not token:
        return {}
    if not _TOKEN.fullmatch(token):
        raise RequestError(f"{_TOKEN_VARIABLE}: expected a token of visible ASCII characters")
    return {"authorization": f"Bearer {token}"}


def message_in(answer: bytes, otherwise: str) -> str:
    """Return the message in an error of Hotrow's server; ``otherwise`` describes the answer of another server."""
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return otherwise
