"""The headers of a request by name."""

from starlette.types import Scope

from serving.errors import RequestError

#: Headers with one value. If a client sends several values, a proxy may choose another value than the server.
_SINGLE = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"host",
        b"inference-header-content-length",
        b"origin",
        b"x-envoy-expected-rq-timeout-ms",
    }
)
#: The key of the ASGI scope under which the headers stay, because several places ask for them.
_HEADERS = "hotrow.headers"


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers of a request; names are in lower case. The values of a repeated header become a list.

    Raises:
        RequestError: a header that has one value was sent with several.
    """
    known: dict[bytes, bytes] | None = scope.get(_HEADERS)
    if known is not None:
        return known
    sent: list[tuple[bytes, bytes]] = scope["headers"]
    headers = dict(sent)
    if len(headers) < len(sent):
        headers = _joined(sent)
    scope[_HEADERS] = headers
    return headers


def _joined(sent: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for name, value in sent:
        before = headers.get(name)
        if before is None:
            headers[name] = value
        elif name not in _SINGLE:
            headers[name] = before + b", " + value
        elif before != value:
            # The values are not shown: one may be a token.
            raise RequestError(f"header {name.decode()}: expected one value, got two different values")
    return headers
