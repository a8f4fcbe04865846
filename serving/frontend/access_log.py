"""The ids of requests, which answers repeat, and the access log: one line per request."""

import logging
import re
from collections.abc import Iterable
from time import perf_counter
from uuid import uuid4

from serving.model.names import MODEL_NAME

Headers = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"
_TRACE = b"traceparent"  # of W3C Trace Context
#: The headers that an answer repeats, and their forms. Other values are ignored: they could forge headers or log lines.
_REPEATED = {
    REQUEST_ID: re.compile(rb"[!-~]{1,128}"),
    _TRACE: re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
}
_MOST_PATH_CHARACTERS = 512

_log = logging.getLogger("hotrow.access")


def repeated_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a request that its answer repeats; names are in lower case."""
    found = [header for header in headers if header[0] in _REPEATED]
    if not found:  # on the path of every request
        return found
    several = len(dict(found)) < len(set(found))  # which of several values is right is unknown
    return [] if several else [header for header in dict(found).items() if _REPEATED[header[0]].fullmatch(header[1])]


def with_request_id(headers: Headers) -> Headers:
    """Return the repeated headers, with a new request id if the client sent none."""
    return headers if any(name == REQUEST_ID for name, _ in headers) else [*headers, (REQUEST_ID, new_id().encode())]


def request_id_of(headers: Headers) -> str:
    """Return the id in what ``repeated_headers`` or ``with_request_id`` returned; "" if there is none."""
    return dict(headers).get(REQUEST_ID, b"").decode()


def sampled_trace_of(headers: Headers) -> str:
    """Return the id of the caller's trace in what ``repeated_headers`` returned; "" if the caller does not keep it."""
    parent = dict(headers).get(_TRACE, b"").decode() if headers else ""
    return parent[3:35] if parent and int(parent[-2:], 16) & 1 else ""


def log_request(method: str, path: str, status: int | str, began_s: float, headers: Headers, model: str) -> None:
    """Write the line of one request.

    Args:
        method: HTTP's method, or ``"gRPC"``.
        path: HTTP's path as sent, or the name of the gRPC method.
        status: HTTP's status code, or the name of gRPC's status.
        began_s: when the request began, by ``perf_counter``.
        headers: what ``with_request_id`` returned.
        model: the model of a predict request, as the client wrote it.
    """
    fields = {
        "method": method,
        "path": path[:_MOST_PATH_CHARACTERS],
        "status": status,
        "milliseconds": round(1000 * (perf_counter() - began_s), 3),
        "request_id": request_id_of(headers),
        "model": model if MODEL_NAME.fullmatch(model) else "",
    }
    form = "%(method)s %(path)s %(status)s %(milliseconds).3f ms request_id=%(request_id)s model=%(model)s"
    _log.info(form, fields, extra=fields)


def switch_on() -> None:
    """Let the lines through, whatever the level of the other log lines is."""
    _log.setLevel(logging.INFO)


def new_id() -> str:
    """Return an id that no other request has."""
    return uuid4().hex
