"""Who may do what: the table of all routes and the scopes that they need, and the checks, for HTTP and gRPC.

A route that is not in the table does not exist, so a new route cannot be open by mistake. ``docs/security.md`` has the
table for operators.
"""

import re
import socket
from ipaddress import ip_address

from serving.errors import ForbiddenError, UnauthenticatedError, UnknownRouteError, printable
from serving.frontend.tokens import CONTROL, INFER, METRICS, Tokens

#: What a route needs if it needs no scope: nothing, or any token.
OPEN, ANY = "open", "any"

_MODEL = r"/v2/models/[^/]+(?:/versions/[^/]+)?"
_PATHS = {  # the first that matches decides
    OPEN: r"/|/v2/health/(?:live|ready)|/ping",
    INFER: rf"/predict/[^/]+|{_MODEL}/infer|/invocations",
    METRICS: rf"/metrics|/status|/v2/models/stats|{_MODEL}/stats",
    CONTROL: r"/v2/repository/models/[^/]+/(?:load|unload)|/v2/logging|/v2/(?:models/[^/]+/)?trace/setting"
    r"|/v2/(?:system|cuda)sharedmemory/(?:status|unregister|region/[^/]+/(?:status|register|unregister))",
    ANY: rf"/v2|{_MODEL}(?:/ready|/config)?|/v2/repository/index"
    r"|/openapi\.json|/docs(?:/oauth2-redirect)?|/static-offline-docs/[^/]+",
}
_PATH = re.compile("|".join(f"(?P<{need}>{path})" for need, path in _PATHS.items()))
#: Encoded letters, digits, "-", ".", "_" and "/". A proxy may read such a path differently.
_HIDDEN = re.compile(rb"%(?:2[DEF]|3\d|[46][1-9A-F]|[57][\dA]|5F)", re.IGNORECASE)

_METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "inference.GRPCInferenceService": {
        OPEN: ("ServerLive", "ServerReady"),
        INFER: ("ModelInfer", "ModelStreamInfer"),
        METRICS: ("ModelStatistics",),
        CONTROL: (
            "RepositoryModelLoad",
            "RepositoryModelUnload",
            "LogSettings",
            "TraceSetting",
            "SystemSharedMemoryStatus",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
            "CudaSharedMemoryStatus",
            "CudaSharedMemoryRegister",
            "CudaSharedMemoryUnregister",
        ),
        ANY: ("ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "RepositoryIndex"),
    },
    "grpc.health.v1.Health": {OPEN: ("Check",), ANY: ("Watch",)},
    "grpc.reflection.v1alpha.ServerReflection": {ANY: ("ServerReflectionInfo",)},
}
_NEEDS = {
    f"/{service}/{method}": need
    for service, needs in _METHODS.items()
    for need, methods in needs.items()
    for method in methods
}
_READING = ("GET", "HEAD")
_MOST_SHOWN_BYTES = 128
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_CONTROLS = "loading and unloading, log settings, trace settings and shared memory"


def path_needs(path: str, raw_path: bytes) -> str:
    """Return what an HTTP path needs: a scope, ``OPEN`` or ``ANY``.

    Raises:
        UnknownRouteError: the path is unknown, or it encodes plain characters.
    """
    if b"%" in raw_path and _HIDDEN.search(raw_path):
        reason = "a path must not encode letters, digits, '-', '.', '_' or '/'"
        raise UnknownRouteError(f"{shown_path(raw_path)}: no such path: {reason}")
    match = _PATH.fullmatch(path)
    need = match and match.lastgroup
    if not need:
        raise UnknownRouteError(f"{shown_path(raw_path)}: no such path")
    return need


def shown_path(raw_path: bytes) -> str:
    """Return a request's path for a message; its percent signs are not decoded."""
    return printable(raw_path[:_MOST_SHOWN_BYTES].decode("latin-1"))


def method_needs(method: str) -> str:
    """Return what a gRPC method needs; its name is ``/package.Service/Method``.

    Raises:
        UnknownRouteError: there is no such method.
    """
    need = _NEEDS.get(method)
    if need is None:
        raise UnknownRouteError(f"no such method: {method[:128]!r}")
    return need


class Access:
    """Who may do what through one listener. Any thread may use it."""

    def __init__(self, tokens: Tokens | None = None, address: str = "", name: str = "") -> None:
        """Describe the listener.

        Args:
            tokens: the known tokens; None: clients need no token.
            address: the host that it listens on; "" for a Unix socket.
            name: the host's name, if the operator gave one.
        """
        self._tokens = tokens
        self._address = address
        self._is_local = not address or _is_loopback(address)
        #: A web page can give its own name a loopback address (DNS rebinding). It then reaches loopback listeners, but
        #: it has no token.
        self._checks_host = tokens is None and address != "" and self._is_local
        self._last_host = b""
        self._hosts = {"localhost", _as_host(address), _as_host(name).lower()}

    @property
    def needs_tokens(self) -> bool:
        """Whether clients need tokens."""
        return self._tokens is not None

    def check(self, need: str, authorization: str | None) -> str:
        """Check that a client may use a route that needs ``need``.

        Args:
            need: what ``path_needs`` or ``method_needs`` returned.
            authorization: the value of the request's header or metadata ``authorization``; None: it has none.

        Returns:
            the name of its token; "" if it needs none.

        Raises:
            UnauthenticatedError: the token is missing or unknown.
            ForbiddenError: the token does not have the scope, or control is closed.
        """
        if self._tokens is None:
            if need == CONTROL and not self._is_local:
                raise ForbiddenError(
                    f"{_CONTROLS} are closed, because the server listens on {self._address}: start it with --tokens "
                    "FILE, which `hotrow token` writes, or with --host 127.0.0.1 or --uds"
                )
            return ""
        if need == OPEN:
            return ""
        token = self._tokens.find(_bearer(authorization))
        if token is None:
            raise UnauthenticatedError("the token is unknown")
        if need != ANY and need not in token.scopes:
            scopes = ", ".join(sorted(token.scopes))
            raise ForbiddenError(f"the request needs the scope {need}; the token {token.name!r} has {scopes}")
        return token.name

    def check_browser(self, method: str, host: bytes | None, origin: bytes | None) -> None:
        """Refuse requests that a page of another site makes a browser send.

        Args:
            method: the HTTP method.
            host: the value of the header Host; None: it is missing.
            origin: the value of the header Origin, which browsers send with each POST; None: it is missing.

        Raises:
            ForbiddenError: the Host is not one of the listener's, or the Origin is not the Host.
        """
        if self._checks_host and host and host != self._last_host:
            self._check_host(host.decode("latin-1"))
            self._last_host = host  # most clients send the same host
        if origin is not None and method not in _READING and not _is_same(origin, host):
            shown = origin[:64].decode("latin-1")
            raise ForbiddenError(f"Origin: pages of {shown!r} may not send requests to this server")

    def _check_host(self, host: str) -> None:
        name = _without_port(host).lower()
        # Public DNS has no names without a dot: they come from this machine or its network.
        is_public = "." in name or ":" in name
        if is_public and name not in self._hosts and not _is_loopback_literal(name):
            raise ForbiddenError(
                f"Host: expected localhost or {self._address}, where the server listens, got {host[:64]!r}; "
                "a server with --tokens accepts any Host"
            )


def _bearer(authorization: str | None) -> bytes:
    """Return the token of ``Bearer TOKEN``."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError("a token is needed: Authorization: Bearer TOKEN")
    return token.strip().encode()


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False  # to be safe
    return all(_is_loopback_literal(str(address[0])) for *_, address in found)


def _is_loopback_literal(text: str) -> bool:
    try:
        address = ip_address(text.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _as_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _without_port(host: str) -> str:
    if not host.startswith("["):
        return host.partition(":")[0]
    address, _, port = host.rpartition("]")
    return f"{address}]" if not port or port.startswith(":") else host


def _is_same(origin: bytes, host: bytes | None) -> bool:
    """Whether a page of ``origin`` came from ``host``. A proxy may end TLS, so the schemes are not compared."""
    scheme, _, authority = origin.lower().partition(b"://")
    port = _DEFAULT_PORTS.get(scheme)
    if port is None or not authority or host is None:
        return False
    return authority.removesuffix(port) == host.lower().removesuffix(port)
