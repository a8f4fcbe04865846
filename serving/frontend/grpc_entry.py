"""Where gRPC calls begin: who may make them, their messages, their answers and their errors."""

from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kernels.errors import HotrowError
from serving.frontend.access import Access
from serving.frontend.grpc_calls import Call, OpenCalls, Refusal, refusal_of
from serving.frontend.grpc_guard import MethodGuard
from serving.metrics import RequestMetrics
from serving.protocol.messages import read_message

_Status = tuple[grpc.StatusCode, str]


class Entry(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Reads and parses the requests of all calls, and sends their answers. Belongs to one event loop.

    The methods of the services get the ``Call`` instead of gRPC's context.

    A request that is not a message gets INVALID_ARGUMENT instead of gRPC's UNKNOWN.
    """

    def __init__(self, calls: OpenCalls, metrics: RequestMetrics, access: Access, has_access_log: bool = False) -> None:
        """Let clients make the calls that they may make.

        Args:
            calls: keeps the calls within bounds.
            metrics: count predict requests that do not arrive.
            access: who may do what.
            has_access_log: whether calls that ``access`` refuses are logged.
        """
        self._calls = calls
        self._metrics = metrics
        self._access = access
        self._has_access_log = has_access_log
        self._handlers: dict[str, Any] = {}  # of known methods

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        known = self._handlers.get(details.method)
        if known is not None:
            return known
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        guard = MethodGuard(self._access, details.method, self._has_access_log)
        known = self._handlers[details.method] = self._bounded(handler, guard)
        return known

    def _bounded(self, handler: Any, guard: MethodGuard) -> Any:
        """Return a handler that reads and parses its requests itself. On the wire all kinds of calls are the same."""
        is_unary = handler.unary_unary is not None

        async def call(stream: Any, context: Any) -> bytes | None:
            answer, status = await (self._answer if is_unary else self._answer_all)(handler, guard, context)
            if status is None:
                return answer
            # gRPC stores the error that this raises, so its traceback must not lead back to the call.
            aborted = context.abort(*status)
            del stream, context
            return await aborted  # type: ignore[no-any-return]

        kind = grpc.stream_unary_rpc_method_handler if is_unary else grpc.stream_stream_rpc_method_handler
        return kind(call)

    async def _answer(self, handler: Any, guard: MethodGuard, context: Any) -> tuple[bytes | None, _Status | None]:
        """Answer a call with one request and one answer."""
        try:
            call = self._calls.begin(context, guard)
            message = await self._read_only(call, handler)
            data = handler.response_serializer(await handler.unary_unary(message, call))
        except (Refusal, MemoryError) as err:
            return None, _status_of(err)
        except grpc.aio.AbortError as err:  # the watch has ended the call; gRPC raises this again
            err.with_traceback(None)
            return None, None
        self._calls.sends(call, len(data))  # until the task ends
        return data, None

    async def _answer_all(self, handler: Any, guard: MethodGuard, context: Any) -> tuple[None, _Status | None]:
        """Answer a call with many answers."""
        try:
            call = self._calls.begin(context, guard)
            if handler.unary_stream is not None:
                message = await self._read_only(call, handler)
                call.is_watch = True
                answers = handler.unary_stream(message, call)
            else:
                call.is_stream = True
                answers = handler.stream_stream(self._messages(call, handler), call)
            await self._send_all(call, answers, handler.response_serializer)
        except (Refusal, MemoryError) as err:
            return None, _status_of(err)
        except grpc.aio.AbortError as err:
            err.with_traceback(None)
        return None, None

    async def _send_all(self, call: Call, answers: AsyncIterator[Any], serialized: Callable[[Any], bytes]) -> None:
        async for answer in answers:
            self._calls.goes_on(call)
            data = serialized(answer)
            self._calls.sends(call, len(data))
            await call.context.write(data)
            self._calls.has_sent(call)
            if call.is_watch:
                self._calls.waits(call)

    async def _read_only(self, call: Call, handler: Any) -> Any:
        """Read the only request of a call."""
        began_s, data = monotonic(), None
        try:
            data = await self._calls.read(call)
        finally:
            if data is None and call.guard.name == "ModelInfer":
                self._metrics.started()
                self._metrics.finished("", call.http_code, monotonic() - began_s)
        if data is None:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
        return _parsed(handler, call, data)

    async def _messages(self, call: Call, handler: Any) -> AsyncIterator[Any]:
        while (data := await self._calls.read(call)) is not None:
            yield _parsed(handler, call, data)


def _status_of(error: Refusal | MemoryError) -> _Status:
    refusal = error if isinstance(error, Refusal) else refusal_of(error)
    return refusal.code, str(refusal)


def _parsed(handler: Any, call: Call, data: bytes) -> Any:
    try:
        call.guard.check_size(data)
        message = read_message(data) if call.guard.predicts else handler.request_deserializer(data)
        call.guard.check(message, call.context)
    except DecodeError as err:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(err)) from err
    except HotrowError as err:
        raise refusal_of(err) from None
    return message
