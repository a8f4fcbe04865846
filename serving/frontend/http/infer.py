"""Predict requests over HTTP, from the bytes of a body to the bytes of an answer, without the web framework."""

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import OverloadedError, RequestError
from serving.frontend.access import Access
from serving.frontend.access_log import Headers, repeated_headers, sampled_trace_of
from serving.frontend.batcher import Batcher
from serving.frontend.client_texts import message_of
from serving.frontend.codes import ANSWERED
from serving.frontend.decoders import Decoders
from serving.frontend.endpoint import PredictEndpoint
from serving.frontend.exchange import Exchange
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.body import (
    IDENTITY,
    Arriving,
    accepted_encoding,
    compress,
    decompress,
    encoding_of,
    read_body,
)
from serving.frontend.http.connection import Connection, connection_of
from serving.frontend.http.edge import ID, MODEL, TOKEN, TRACE, Edge, admitted, error_messages, wrong_method
from serving.frontend.http.headers import headers_of
from serving.frontend.tokens import INFER
from serving.metrics import RequestMetrics
from serving.protocol.infer import InferDecoder, encode_infer
from serving.protocol.request import JSON_NUMBER_BYTES, SHARED_MEMORY_REGION, InferRequest
from serving.protocol.samples import SamplesRequest, decode_samples, encode_answer
from serving.repository import ServedModel
from serving.repository.served_model import ServedNetwork

_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")
#: The header with the size of the JSON before binary tensors.
JSON_LENGTH = b"inference-header-content-length"
_TIMEOUT_MS = b"x-envoy-expected-rq-timeout-ms"
_LEAST_COMPRESSED_BYTES = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: its body and its headers, except Content-Length."""

    body: bytes
    headers: Headers


class HttpExchange(Exchange):
    """A request body in some form.

    Attributes:
        route: where it is sent.
    """

    route: str
    written: Answer

    def __init__(
        self, body: bytes, headers: dict[bytes, bytes], max_bytes: int, decoders: Decoders[InferDecoder]
    ) -> None:
        """Take a body that may be compressed."""
        super().__init__()
        self._body = body
        self._headers = headers
        self._max_bytes = max_bytes
        self._decoders = decoders

    @property
    def size_bytes(self) -> int | None:
        """The body's size; None if the body is compressed, because the size then says little about the time."""
        return len(self._body) if encoding_of(self._headers) == IDENTITY else None

    def read(self, model: ServedModel) -> Any:
        """See ``Exchange.read``."""
        return self._read(model, decompress(self._body, self._headers, self._max_bytes))

    def write(self, model: ServedModel, answer: Any) -> Answer:
        """See ``Exchange.write``; large answers are compressed if the client accepts it."""
        written = self._write(model, answer)
        if len(written.body) < _LEAST_COMPRESSED_BYTES:
            return written
        encoding = accepted_encoding(self._headers)
        if encoding == IDENTITY:
            return written
        return Answer(compress(written.body, encoding), [*written.headers, (b"content-encoding", encoding)])

    @abstractmethod
    def _read(self, model: ServedModel, body: bytes) -> Any:
        """Read a body, and return the question."""

    @abstractmethod
    def _write(self, model: ServedModel, answer: Any) -> Answer:
        """Write an answer, uncompressed."""


class InferExchange(HttpExchange):
    """KServe v2's ``infer``."""

    route = "/v2/models/{model}/infer"
    _request: InferRequest

    @property
    def timeout_us(self) -> int:
        """See ``Exchange``."""
        return self._request.timeout_us

    @property
    def size_bytes(self) -> int | None:
        """See ``HttpExchange.size_bytes``; None for tensors in shared memory, which may be large, too."""
        json_bytes = self._headers.get(JSON_LENGTH, b"")
        end = int(json_bytes) if json_bytes.isdigit() and len(json_bytes) < 19 else len(self._body)
        if self._body.find(SHARED_MEMORY_REGION, 0, end) >= 0 or self._body.find(b"\\", 0, end) >= 0:
            return None  # an escape may hide a letter of a shared memory region's parameter
        return super().size_bytes

    def _read(self, model: ServedModel, body: bytes) -> Any:
        json_bytes = self._headers.get(JSON_LENGTH)
        header_bytes = None if json_bytes is None else json_bytes.decode("latin-1")
        self._request = self.with_id(self._decoders.of(model).decode(body, header_bytes))
        with self._request.locating_errors():
            question = model.read(self._request.inputs, self._request.asked)
        self._request.check_answer(partial(model.answer_floats, question), self._decoders.bounds)
        return question

    def _write(self, model: ServedModel, answer: Any) -> Answer:
        outputs, parameters = model.outputs(self.question, answer)
        if self._request.wants_freshness:
            parameters |= model.freshness()
        written = encode_infer(self._request, model.name, model.version, outputs, parameters, self._decoders.regions)
        if written.json_bytes is None:
            return Answer(written.body, [_JSON])
        return Answer(written.body, [_BINARY, (JSON_LENGTH, b"%d" % written.json_bytes)])


class SamplesExchange(HttpExchange):
    """``{"samples": [...]}`` or ``{"context": {...}, "candidates": [...]}``."""

    route = "/predict/{model}"
    _request: SamplesRequest

    def _read(self, model: ServedModel, body: bytes) -> Any:
        if not isinstance(model, ServedNetwork):
            path = f"/v2/models/{model.name}/infer"
            raise RequestError(f"model {model.name!r} has no dense network; ask {path} for rows")
        bounds = self._decoders.bounds
        session = model.session
        self._request = decode_samples(body, model.config, bounds, session.features_for, session.max_candidates)
        question = self._request.batch
        floats = sum(model.answer_floats(question, output.name) for output in session.wanted(question))
        bounds.check_answer("samples", floats, floats * JSON_NUMBER_BYTES)
        return question

    def _write(self, model: ServedModel, answer: Any) -> Answer:
        outputs, parameters = model.outputs(self.question, answer)
        facts: dict[str, Any] = {**parameters, "model_version": model.version}
        if self._request.wants_freshness:
            facts["freshness"] = model.freshness()
        return Answer(encode_answer(self._request, outputs, facts), [_JSON])


class HttpEndpoint:
    """Reads predict requests over HTTP and answers them. Belongs to one event loop."""

    def __init__(self, front: FrontEnd, arriving: Arriving) -> None:
        """Answer through ``front``; ``arriving`` counts the bytes of all bodies."""
        self._endpoint: PredictEndpoint = front.endpoint
        self._metrics: RequestMetrics = front.metrics
        self._limits = front.limits
        self._decoders = Decoders(InferDecoder, front.control.regions, front.limits.bounds)
        self._arriving = arriving
        self._tracing = front.tracing

    async def answer(self, scope: Scope, receive: Receive, form: type[HttpExchange]) -> Answer:
        """Answer one request for the model that ``scope``'s path names.

        Args:
            scope: the request's ASGI scope; its path has a ``model`` and may have a ``version``.
            receive: its ASGI receive function.
            form: the form of its body.

        Raises:
            OverloadedError: too many requests are running, or too many bytes of bodies are arriving.
            HotrowError: the request cannot be answered; ``serving.frontend.codes`` has the status code.
        """
        scope[MODEL] = ""
        self._metrics.started()
        if self._tracing is not None:
            context = repeated_headers(scope["headers"])
            scope[TRACE] = self._tracing.begin(f"POST {form.route}", context, scope.get(ID, ""))
        path = scope["path_params"]
        name, version = path["model"], path.get("version", "")
        batcher = self._endpoint.find(name, version)
        scope[MODEL] = batcher.model.name
        began_ns = perf_counter_ns()
        try:
            headers = headers_of(scope)
            token = scope.get(TOKEN, "")
            connection = connection_of(scope)
            self._check_load(connection, headers, batcher, token)
            has_arrived = connection is not None and connection.has_whole_request
            body = await read_body(receive, headers, self._limits, self._arriving, has_arrived)
            # Counted from here on, so a client that sends slowly does not use up the limit.
            exchange = form(body, headers, self._limits.max_body_bytes, self._decoders)
            exchange.deadline_s = _deadline_of(headers)
            exchange.request_id = scope.get(ID, "")
            exchange.traced_by(scope.get(TRACE))
            await self._endpoint.run(batcher, version, exchange.size_bytes, exchange, token)
        except BaseException:
            batcher.model.statistics.failed(perf_counter_ns() - began_ns)
            raise
        return exchange.written

    def refusal(self, scope: Scope, name: str, version: str, access: Access) -> str:
        """Return why the server has no time for a request, and count the refusal; "": ``answer`` answers it.

        Raises:
            HotrowError: the request cannot be answered, or ``access`` refuses it. It is not counted.
        """
        began_ns = perf_counter_ns()
        batcher = self._endpoint.find(name, version)
        try:
            self._check_load(connection_of(scope), headers_of(scope), batcher, "")
        except OverloadedError as err:
            admitted(access, scope, INFER)
            took_ns = perf_counter_ns() - began_ns
            batcher.model.statistics.failed(took_ns)
            self._metrics.started()
            trace_id = sampled_trace_of(repeated_headers(scope["headers"]))
            self._metrics.finished(batcher.model.name, 429, took_ns / 1e9, trace_id)
            return message_of(err)
        return ""

    def _check_load(
        self, connection: Connection | None, headers: dict[bytes, bytes], batcher: Batcher, token: str
    ) -> None:
        """Refuse a request at once, because a refusal need not wait for the body."""
        declared = headers.get(b"content-length", b"")
        is_known = declared.isdigit() and len(declared) < 19 and encoding_of(headers) == IDENTITY
        backlog = connection.open_connections.backlog if connection else 0
        self._endpoint.check_load(batcher, backlog, int(declared) if is_known else None, token)


def _deadline_of(headers: dict[bytes, bytes]) -> float | None:
    """Return until when a proxy, such as KServe's Envoy, waits for the answer; None if it does not say."""
    value = headers.get(_TIMEOUT_MS)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 10:
        raise RequestError(f"{_TIMEOUT_MS.decode()}: expected whole milliseconds, got {value[:32].decode('latin-1')!r}")
    return perf_counter() + int(value) / 1000


class InferPath:
    """The whole application: answers KServe's infer path itself and leaves every other path to FastAPI.

    The infer path has no router, no request object and no middleware except the edge: these would cost more than
    decoding the request.
    """

    _PATH = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")

    def __init__(self, app: ASGIApp, endpoint: HttpEndpoint, front: FrontEnd, access: Access) -> None:
        """Answer infer requests through ``endpoint``, and pass all others to ``app``."""
        self._app = app
        self._endpoint = endpoint
        self._access = access
        self._is_followed = front.tracing is not None or front.has_ids
        self._infer = Edge(self._answer, front.metrics, front.has_access_log, access, need=INFER, has_ids=front.has_ids)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        match = self._PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if match is None:
            await self._app(scope, receive, send)
        else:
            scope["path_params"] = match.groupdict("")
            await self._infer(scope, receive, send)

    def refusal(self, scope: Scope) -> tuple[Message, Message] | None:
        """Return the answer to an infer request for which the server has no time; see ``Refusal``.

        Requests with a trace or a line in a log are refused as they are answered.
        """
        match = self._PATH.fullmatch(scope["path"])
        if match is None or scope["method"] != "POST" or self._is_followed:
            return None
        try:
            message = self._endpoint.refusal(scope, match["model"], match["version"] or "", self._access)
        except ANSWERED:  # such as an unknown model or token: ``__call__`` has the answer
            return None
        return error_messages(message, 429, repeated_headers(scope["headers"])) if message else None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await wrong_method(scope, ["POST"])(scope, receive, send)
            return
        answer = await self._endpoint.answer(scope, receive, InferExchange)
        headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
