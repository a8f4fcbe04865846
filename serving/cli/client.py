"""The client of ``hotrow predict`` and ``hotrow stats``: HTTP to a running server, over TCP or a Unix socket."""

import argparse
import json
import os
import re
import socket
import ssl
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead, InvalidURL
from os.path import isdir, isfile  # these return False for an impossible path
from pathlib import Path
from urllib.parse import urlsplit

from serving.errors import RequestError, ServingError
from serving.frontend.tls import because

DEFAULT_URL = "http://127.0.0.1:8000"
#: The variable with the client's token. There is no option, because every user of a machine can read command lines.
TOKEN_VARIABLE = "HOTROW_TOKEN"  # the name of a variable
_TOKEN = re.compile(r"[!-~]{1,4096}")
#: OpenSSL's codes for a certificate that no trusted authority signed.
_OF_UNKNOWN_AUTHORITIES = (18, 19, 20, 21)
#: The TLS alerts of a server that does not get the certificate that it wants. Before TLS 1.3 it may not say more.
_ABOUT_CERTIFICATES = re.compile("CERTIFICATE|UNKNOWN_CA|HANDSHAKE_FAILURE")


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
    parser.epilog = f"For a server with --tokens, set the environment variable {TOKEN_VARIABLE} to the token."


class Client:
    """Sends requests to the server of a URL.

    Attributes:
        server: the server's URL or the path of its Unix socket, for messages.
    """

    def __init__(self, url: str, options: argparse.Namespace, timeout_s: float, is_own: bool = False) -> None:
        """Take the options of ``add_client_options``.

        With ``is_own``, the server is this machine's own: its certificate is not verified, and it gets no token.

        Raises:
            RequestError: the URL, an option or the token cannot be used.
        """
        self._url = url
        self.server = url if options.uds is None else str(options.uds)
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"expected http://... or https://..., got {url!r}")
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as err:
            raise RequestError(f"{url!r} is not a URL: {err}") from err
        if "@" in parts.netloc:
            raise RequestError(f"the URL has a user or a password; set {TOKEN_VARIABLE} instead")
        if not self._host:
            raise RequestError(f"{url!r} is not a URL: no host")
        if not parts.path.isascii():
            raise RequestError(f"{url!r} is not a URL: expected ASCII characters after the host")
        self._prefix = parts.path.rstrip("/")
        self._uds: Path | None = options.uds
        self._certificate: Path | None = options.certfile
        self._certificate_option = _certificate_option(is_own)
        self._timeout_s = timeout_s
        self._tls = _context(options, is_own) if parts.scheme == "https" else None
        for option, file in {
            "--ca-certs": options.ca_certs,
            "--certfile": options.certfile,
            "--keyfile": options.keyfile,
        }.items():
            if file is not None and self._tls is None:
                raise RequestError(f"{option} needs https://..., got {url!r}")
        self._headers = {} if is_own else token_header()

    def ask(self, path: str, scope: str, body: bytes | None = None) -> tuple[int, str, bytes]:
        """Send one request, a POST of JSON if it has a body; return the answer's code, reason and body.

        Args:
            path: after the URL's own path.
            scope: the scope that the request's token needs.
            body: JSON.

        Raises:
            ServingError: the server does not answer.
            RequestError: the URL is not valid, or the server wants a token.
        """
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        try:
            with closing(self._connection()) as connection:
                self._connect(connection)
                # A server that refuses the client or the body says so, and closes before the request is sent.
                with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
                    connection.request("GET" if body is None else "POST", self._prefix + path, body, headers)
                answer = connection.getresponse()
                code, reason, content = answer.status, answer.reason, answer.read()
        except (InvalidURL, UnicodeError) as err:
            raise RequestError(f"{self._url!r} is not a URL: {err}") from err
        except (HTTPException, OSError) as err:
            raise ServingError(f"{self.server}: {self._why_unanswered(err)}") from err
        if code == HTTPStatus.UNAUTHORIZED:
            advice = f"set {TOKEN_VARIABLE} to a token with the scope {scope}"
            raise RequestError(f"{self.server}: {message_in(content, reason)}; {advice}")
        return code, reason, content

    def _why_unanswered(self, error: HTTPException | OSError) -> str:
        """Say what went wrong, and what may help."""
        if isinstance(error, TimeoutError):
            return f"no answer within {self._timeout_s:g} s"
        if isinstance(error, IncompleteRead):
            return "the answer ends too early"
        is_closed = isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
        if is_closed or isinstance(error, HTTPException):
            what = "the server closes the connection without an answer" if is_closed else "the answer is not HTTP/1.1"
            if self._tls is None:
                return f"{what}; a server with TLS needs https://, and gRPC has another port"
            return f"{what}; a server with --ssl-ca-certs needs --certfile, and gRPC has another port"
        if isinstance(error, ssl.SSLError):
            return self._why_no_tls(error)
        if self._uds is not None and (isfile(self._uds) or isdir(self._uds)):
            return "expected a Unix socket"
        command = "hotrow serve" if self._uds is None else f"hotrow serve --uds {self._uds}"
        is_absent = isinstance(error, ConnectionRefusedError | FileNotFoundError)
        return f"no server answers{because(error)}" + (f"; `{command}` starts a server" if is_absent else "")

    def _why_no_tls(self, error: ssl.SSLError) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            is_unknown = error.verify_code in _OF_UNKNOWN_AUTHORITIES
            advice = "; --ca-certs FILE names the authorities to trust" if is_unknown else ""
            return f"the server's certificate is refused: {error.verify_message}{advice}"
        alert = (error.reason or "").partition("_ALERT_")[2]
        if _ABOUT_CERTIFICATES.search(alert):
            reason = f"the server ends TLS with the alert {alert.lower().replace('_', ' ')!r}"
            if self._certificate is None:
                return f"{reason}; it may want a client's certificate: {self._certificate_option} FILE"
            return f"{reason}; it does not accept {self._certificate_option} {self._certificate}"
        return f"no TLS connection{because(error)}; a server without TLS needs http://"

    def _connection(self) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)

    def _connect(self, connection: HTTPConnection) -> None:
        if self._uds is None:
            connection.connect()
            return
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(self._timeout_s)
        connection.sock.connect(str(self._uds))
        if self._tls is not None:
            connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=self._host)


def _certificate_option(is_own: bool) -> str:
    return "--ssl-certfile" if is_own else "--certfile"


def _context(options: argparse.Namespace, is_own: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca_certs)
    except OSError as err:  # an error of OpenSSL too
        raise RequestError(f"--ca-certs {options.ca_certs}: expected certificates in PEM form{because(err)}") from err
    if is_own:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if options.certfile is None:
        if options.keyfile is not None:
            raise RequestError("--keyfile needs --certfile")
        return context
    try:
        # Without a password, OpenSSL would ask for the password of an encrypted key.
        context.load_cert_chain(options.certfile, options.keyfile or options.certfile, password="")
    except OSError as err:
        expected = "expected a certificate and its key, in PEM form and without a password"
        raise RequestError(f"{_certificate_option(is_own)} {options.certfile}: {expected}{because(err)}") from err
    return context


def token_header() -> dict[str, str]:
    """Return the header with the token of ``HOTROW_TOKEN``; nothing without one.

    Raises:
        RequestError: it cannot be a token.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        return {}
    if not _TOKEN.fullmatch(token):
        raise RequestError(f"{TOKEN_VARIABLE}: expected a token of visible ASCII characters")
    return {"authorization": f"Bearer {token}"}


def message_in(answer: bytes, otherwise: str) -> str:
    """Return the message in an error of Hotrow's server; ``otherwise`` describes the answer of another server."""
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return otherwise
