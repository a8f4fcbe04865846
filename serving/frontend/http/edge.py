"""The edge of the application: who may do what, and every error as an answer in Triton's form, ``{"error": "..."}``."""

import asyncio
import logging
from collections.abc import Iterable
from time import perf_counter

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.frontend.access import Access, path_needs, shown_path
from serving.frontend.access_log import (
    Headers,
    log_request,
    repeated_headers,
    request_id_of,
    sampled_trace_of,
    with_request_id,
)
from serving.frontend.client_texts import message_of
from serving.frontend.codes import ANSWERED, RETRY_AFTER_S, codes_of
from serving.frontend.http.body import ClientDisconnectedError
from serving.frontend.http.headers import headers_of
from serving.metrics import RequestMetrics

#: Key of the ASGI scope under which a predict route names its model; requests without it are not counted.
MODEL = "hotrow.model"
#: Key of the ASGI scope for the name of the client's token; "" if it needs none.
TOKEN = "hotrow.token"
#: Key of the ASGI scope for the request's id, if the answer has one.
ID = "hotrow.request_id"
#: Key of the ASGI scope for the request's trace, if it has one.
TRACE = "hotrow.trace"

#: For browsers: other sites may not frame an answer, and an answer is only read as its own type.
BROWSER_HEADERS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
]

_log = logging.getLogger("hotrow.http")
_JSON = "application/json"


def error_response(message: str, code: int) -> Response:
    """Return ``{"error": message}``; a 429 or a 503 says when to try again."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if code in (429, 503) else None
    return Response(orjson.dumps({"error": message}), code, headers, _JSON)


def wrong_method(scope: Scope, allowed: Iterable[str]) -> Response:
    """Return the answer to a request whose path takes other methods only."""
    methods = sorted(allowed)
    reason = f"expected {' or '.join(methods)}, got {scope['method']}"
    response = error_response(f"{shown_path(scope['raw_path'])}: {reason}", 405)
    response.headers["Allow"] = ", ".join(methods)
    return response


async def http_exception(request: Request, error: Exception) -> Response:
    """Answer the router's own errors: unknown path, method not allowed."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        partial = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
        # The files of /docs are behind no route of their own.
        allowed = {method for route in partial for method in route.methods or ()} or {"GET", "HEAD"}
        return wrong_method(request.scope, allowed)
    message = f"{shown_path(request.scope['raw_path'])}: no such path" if error.status_code == 404 else error.detail
    return error_response(message, error.status_code)


class Edge:
    """ASGI middleware around the whole application.

    Requests are checked and logged, and predict requests are counted. Errors become answers. Answers repeat the
    request's id.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: RequestMetrics,
        has_access_log: bool = False,
        access: Access | None = None,
        headers: Headers | None = None,
        need: str = "",
        has_ids: bool = False,
    ) -> None:
        """Guard ``app`` with ``access``, count its predict requests, and add ``headers`` to all answers.

        ``need`` is what all paths of ``app`` need; "": see ``path_needs``. With ``has_ids``, every request has an id.
        """
        self._app = app
        self._metrics = metrics
        self._has_access_log = has_access_log
        self._access = access
        self._headers = headers or []
        self._need = need
        self._has_ids = has_ids or has_access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = perf_counter()
        repeated = repeated_headers(scope["headers"])
        if self._has_ids:
            repeated = with_request_id(repeated)
            scope[ID] = request_id_of(repeated)
        watched = _WatchedSend(send, [*self._headers, *repeated])
        try:
            await self._answer(scope, receive, watched)
        finally:
            if MODEL in scope:
                trace = scope.get(TRACE)
                trace_id = sampled_trace_of(repeated) if trace is None else trace.id
                self._metrics.finished(scope[MODEL], watched.code, perf_counter() - began, trace_id)
                if trace is not None:
                    trace.end(scope[MODEL], watched.code)
            if self._has_access_log:
                # Not scope["path"], which may have line ends: its percent signs are decoded.
                path = scope["raw_path"].decode("latin-1").encode("unicode_escape").decode()
                log_request(scope["method"], path, watched.code, began, repeated, scope.get(MODEL, ""))

    async def _answer(self, scope: Scope, receive: Receive, send: "_WatchedSend") -> None:
        refusal, counted = ("", 0), 0
        try:
            if self._access is not None:
                scope[TOKEN] = admitted(self._access, scope, self._need)
            await self._app(scope, receive, send)
        except ClientDisconnectedError as err:
            refusal = str(err), 400  # the client may have closed only its sending side
            counted = 499  # nginx's code for a client that closed the request
        except ANSWERED as err:
            refusal = message_of(err), codes_of(err)[0]
        except asyncio.CancelledError:  # the stop timeout is over
            if not send.code:
                await error_response("the server stops", 503)(scope, receive, send)
        except Exception:  # the top of a request: the traceback goes to the log, never to the client
            _log.exception("%s %s failed", scope["method"], scope["path"])
            if send.code:
                raise  # the answer has begun; the server can only cut the connection
            refusal = "internal error; see the server's log", 500
        if refusal[1]:  # sent here, because the client may be slow, and the error holds the request
            for message in error_messages(*refusal):
                await send(message)
            send.code = counted or send.code


def admitted(access: Access, scope: Scope, need: str) -> str:
    """Check that a client may make a request, and return the name of its token."""
    headers = headers_of(scope)
    if not need or b"%" in scope["raw_path"]:
        need = path_needs(scope["path"], scope["raw_path"])
    access.check_browser(scope["method"], headers.get(b"host"), headers.get(b"origin"))
    authorization = headers.get(b"authorization")
    return access.check(need, None if authorization is None else authorization.decode("latin-1"))


def error_messages(message: str, code: int, repeated: Headers | None = None) -> tuple[Message, Message]:
    """Return what ``error_response`` sends, but fast: under overload most answers are refusals."""
    body = orjson.dumps({"error": message})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *(repeated or ())]
    if code in (429, 503):
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    elif code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif code == 408:
        headers.append((b"connection", b"close"))  # the rest of the body may still arrive
    return (
        {"type": "http.response.start", "status": code, "headers": headers},
        {"type": "http.response.body", "body": body},
    )


class _WatchedSend:
    """ASGI's send function with the answer's status code; the code is 0 before the answer begins.

    It adds ``headers`` to the answer.
    """

    def __init__(self, send: Send, headers: Headers) -> None:
        self.code = 0
        self._send = send
        self._headers = headers

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.code = message["status"]
            if self._headers:
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)
