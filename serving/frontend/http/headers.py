"""The headers of a request by name."""

from starlette.types import Scope

from serving.errors import RequestError

#: Headers that have one value. If a client sends several, a proxy in front may choose another than the server does.
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


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers of a request; names are in lower case. The values of a repeated header become a list.

    Raises:
        RequestError: a header that has one value was sent with several.
    """
    sent: list[tuple[bytes, bytes]] = scope["headers"]
    headers = dict(sent)
    if len(headers) == len(sent):
        return headers
    headers.clear()
    for name, value in sent:
        before = headers.get(name)
        if before is None:
            headers[name] = value
        elif name not in _SINGLE:
            headers[name] = before + b", " + value
        elif before != value:
            # The values are not shown: one may be a token.
            raise RequestError(f"header {name.decode()}: expected one value, got two that differ")
    return headers
