"""The hot path: one predict request from its bytes to the bytes of its answer, without the web framework."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.batch import Batch
from serving.errors import OverloadedError
from serving.frontend.body import (
    IDENTITY,
    Arriving,
    Limits,
    accepted_encoding,
    compress,
    decompress,
    encoding_of,
    read_body,
)
from serving.frontend.edge import MODEL, Edge, error_response
from serving.frontend.runner import Runner
from serving.metrics import ModelStatistics, RequestMetrics
from serving.protocol.ctr import PROBABILITIES, batch_of, signature_of
from serving.protocol.infer import InferDecoder, encode_infer
from serving.protocol.request import InferRequest
from serving.protocol.samples import decode_samples, encode_predictions
from serving.protocol.shared_memory import SharedMemory
from serving.protocol.tensors import Array, Signature
from serving.repository import ModelRepository
from serving.routes import Prediction
from serving.session import InferenceSession

_T = TypeVar("_T")
Headers = list[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")
_JSON_LENGTH = b"inference-header-content-length"
_LEAST_COMPRESSED_BYTES = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: its body and its headers, except Content-Length."""

    body: bytes
    headers: Headers


@dataclass(slots=True)
class Stopwatch:
    """When a request passed the stages of ``ModelStatistics``.

    Attributes:
        times_ns: when it arrived, and when each stage ended.
        samples: its batch size, once it is known.
    """

    times_ns: list[int] = field(default_factory=list)
    samples: int = 0

    def note(self) -> None:
        """Note that the request has arrived, or that a stage has ended."""
        self.times_ns.append(perf_counter_ns())


class ServedModel:
    """One loaded model as requests see it. Requests may come from any thread."""

    def __init__(self, name: str, session: InferenceSession, metrics: RequestMetrics, regions: SharedMemory) -> None:
        """Serve ``session`` under ``name``; the tensors of its requests may be in ``regions``."""
        self.name = name
        self.session = session
        self.version = str(session.config.version)
        self.signature: Signature = signature_of(session.config)
        self.statistics = ModelStatistics()
        self.regions = regions
        self._decoder = InferDecoder(self.signature, regions)
        self._metrics = metrics

    def outputs(self, request: InferRequest, watch: Stopwatch) -> tuple[dict[str, Array], dict[str, int]]:
        """Answer a decoded KServe v2 request with arrays by output name, and parameters."""
        with request.locating_errors():
            batch = batch_of(self.session.config, request.inputs)
        prediction = self._predict(batch, watch)
        return {PROBABILITIES: prediction.probabilities}, {"defaulted_keys": prediction.defaulted_keys}

    def infer(self, body: bytes, headers: dict[bytes, bytes], watch: Stopwatch) -> Answer:
        """Answer a KServe v2 request over HTTP."""
        json_bytes = headers.get(_JSON_LENGTH)
        request = self._decoder.decode(body, None if json_bytes is None else json_bytes.decode("latin-1"))
        answer = encode_infer(request, self.name, self.version, *self.outputs(request, watch), self.regions)
        if answer.json_bytes is None:
            return Answer(answer.body, [_JSON])
        return Answer(answer.body, [_BINARY, (_JSON_LENGTH, b"%d" % answer.json_bytes)])

    def predict(self, body: bytes, _headers: dict[bytes, bytes], watch: Stopwatch) -> Answer:
        """Answer ``{"samples": [...]}``."""
        prediction = self._predict(decode_samples(body, self.session.config), watch)
        return Answer(encode_predictions(prediction.probabilities, prediction.defaulted_keys, self.version), [_JSON])

    def _predict(self, batch: Batch, watch: Stopwatch) -> Prediction:
        watch.samples = batch.samples
        watch.note()
        prediction = self.session.predict_batch(batch)
        watch.note()
        self._metrics.predicted(self.name, batch.samples)
        return prediction


#: Answers an HTTP request from a model, a decompressed body and the request's headers.
Act = Callable[[ServedModel, bytes, dict[bytes, bytes], Stopwatch], Answer]


class PredictEndpoint:
    """Admits, reads, runs and counts predict requests. Belongs to one event loop."""

    def __init__(
        self,
        repository: ModelRepository,
        runner: Runner,
        metrics: RequestMetrics,
        limits: Limits,
        regions: SharedMemory,
    ) -> None:
        """Answer for the models of ``repository``; tensors may be in ``regions``."""
        self._repository = repository
        self._regions = regions
        self._runner = runner
        self._metrics = metrics
        self._limits = limits
        self._arriving = Arriving(limits)
        self._in_flight = 0
        self._served: dict[str, ServedModel] = {}

    def model(self, name: str, version: str = "") -> ServedModel:
        """Return the model called ``name``; the UnknownModelError names the models that are served."""
        session = self._repository.session(name, version)
        served = self._served.get(name)
        if served is None or served.session is not session:
            served = self._served[name] = ServedModel(name, session, self._metrics, self._regions)
        return served

    async def answer(self, scope: Scope, receive: Receive, act: Act) -> Answer:
        """Answer one request for the model that ``scope``'s path names.

        Args:
            scope: the request's ASGI scope; its path has a ``model`` and may have a ``version``.
            receive: its ASGI receive function.
            act: ``ServedModel.infer`` or ``ServedModel.predict``.

        Raises:
            OverloadedError: ``max_inflight`` requests are running, or too many bytes of bodies are arriving.
            HotrowError: the request cannot be answered; ``serving.frontend.codes`` has the status code.
        """
        scope[MODEL] = ""
        self._metrics.started()
        path = scope["path_params"]
        model = self.model(path["model"], path.get("version", ""))
        scope[MODEL] = model.name
        headers: dict[bytes, bytes] = dict(scope["headers"])
        body = await read_body(scope, receive, headers, self._limits, self._arriving)
        # Counted from here on, so a client that sends slowly does not use up the limit.
        work = partial(self._answer_body, act, model, body, headers)
        return await self.run(model, None if encoding_of(headers) != IDENTITY else len(body), work)

    async def run(self, model: ServedModel, size_bytes: int | None, work: Callable[[Stopwatch], _T]) -> _T:
        """Admit a request, run ``work`` and count what it took.

        Args:
            model: the model that answers.
            size_bytes: the request's size, which tells how long requests of this size take; None: it tells nothing.
            work: decode, predict and encode.

        Raises:
            OverloadedError: ``max_inflight`` requests are running.
        """
        if self._in_flight >= self._limits.max_inflight:
            raise OverloadedError(f"{self._in_flight} requests are running; the server accepts no more at a time")
        self._in_flight += 1
        watch = Stopwatch()
        watch.note()
        timed = partial(_run, work, watch)
        try:
            if size_bytes is None:
                answer = await self._runner.run_pooled(timed)
            else:
                answer = await self._runner.run(model.name, size_bytes, timed)
        except Exception:
            model.statistics.failed(perf_counter_ns() - watch.times_ns[0])
            raise
        finally:
            self._in_flight -= 1
        model.statistics.answered(watch.samples, watch.times_ns)
        return answer

    def _answer_body(
        self, act: Act, model: ServedModel, body: bytes, headers: dict[bytes, bytes], watch: Stopwatch
    ) -> Answer:
        plain = decompress(body, headers, self._limits.max_body_bytes)
        return compressed(act(model, plain, headers, watch), headers)


def _run(work: Callable[[Stopwatch], _T], watch: Stopwatch) -> _T:
    watch.note()
    answer = work(watch)
    watch.note()
    return answer


def compressed(answer: Answer, headers: dict[bytes, bytes]) -> Answer:
    """Compress an answer if its client accepts that; small answers stay as they are."""
    if len(answer.body) < _LEAST_COMPRESSED_BYTES:
        return answer
    encoding = accepted_encoding(headers)
    if encoding == IDENTITY:
        return answer
    return Answer(compress(answer.body, encoding), [*answer.headers, (b"content-encoding", encoding)])


class InferPath:
    """The whole application: answers KServe's infer path itself and leaves every other path to FastAPI.

    The infer path has no router, no request object and no middleware except the edge: these would cost more than
    decoding the request.
    """

    _PATH = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")

    def __init__(self, app: ASGIApp, endpoint: PredictEndpoint, metrics: RequestMetrics) -> None:
        """Answer through ``endpoint`` and count in ``metrics``, or let ``app`` do it."""
        self._app = app
        self._endpoint = endpoint
        self._infer = Edge(self._answer, metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        match = self._PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if match is None:
            await self._app(scope, receive, send)
        else:
            scope["path_params"] = match.groupdict("")
            await self._infer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            response = error_response("Method Not Allowed", 405)
            response.headers["Allow"] = "POST"
            await response(scope, receive, send)
            return
        answer = await self._endpoint.answer(scope, receive, ServedModel.infer)
        headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
