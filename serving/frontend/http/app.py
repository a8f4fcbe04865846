"""The HTTP front end: KServe v2, a JSON form for people, health and metrics, as one FastAPI application."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from serving.frontend.access import Access
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.body import Arriving
from serving.frontend.http.control_routes import add_control_routes, path_parameter
from serving.frontend.http.edge import BROWSER_HEADERS, Edge, http_exception
from serving.frontend.http.infer import Answer, HttpEndpoint, InferExchange, InferPath, SamplesExchange
from serving.frontend.http.sagemaker_routes import add_sagemaker_routes
from serving.frontend.status import merged_status
from serving.frontend.version import server_version
from serving.metrics import Metrics, merged_page
from serving.protocol.infer_schema import INFER_ANSWER_SCHEMA, INFER_SCHEMA
from serving.protocol.samples import PREDICTIONS_SCHEMA, SAMPLES_SCHEMA

_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
#: The groups of routes, in the order of /docs, and the beginnings of their paths. The first that matches counts.
_GROUPS = {
    "Predict": r"/predict|.*/infer$|/invocations",
    "Models": r"/v2/(models|repository)",
    "Settings": r"/v2/(logging|trace|systemsharedmemory|cudasharedmemory)",
    "Server": "",
}
_DESCRIPTION = """\
Recommendation models. KServe v2 inference is at `/v2/models/{model}/infer`.

A model with raw features, or with names of its inputs, takes a tensor for each of them. Every model takes keys.

Its tensors: `DES` has the dense features, sample by sample. `CATCOLUMN` has the keys, sample-major: sample 0's keys of
the first table, slot by slot, then of the second table and so on, then sample 1's keys. `ROWINDEX` says where each
slot's keys begin: one CSR over all slots with samples * slots + 1 offsets. With several tables it may instead be one
CSR per table, each starting at 0; the length decides.
"""
_PREDICT_DOCS: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": SAMPLES_SCHEMA}}},
}
_INFER_DOCS: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": INFER_SCHEMA}}},
}
_ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_ERRORS: dict[int, str] = {
    400: "What is wrong with the request, and where.",
    404: "No such model or version.",
    408: "The body did not arrive in time; the request may succeed later.",
    413: "The body is too large.",
    415: "The body has an unsupported encoding.",
    429: "Too many requests are running, or memory is short; the request may succeed later.",
    503: "A tier or a GPU does not answer; the request may succeed later.",
}


class _Shared:
    """Work in a thread. Requests that come while it runs get its result too, so they never take more than one thread.

    Belongs to one event loop.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._running: asyncio.Task[Any] | None = None

    async def result(self) -> Any:
        if self._running is None:
            self._running = asyncio.create_task(asyncio.to_thread(self._work))
            self._running.add_done_callback(self._forget)
        return await asyncio.shield(self._running)

    def _forget(self, _task: Any) -> None:
        self._running = None


def create_app(front: FrontEnd, access: Access | None = None) -> InferPath:
    """Make the HTTP application; ``access`` says who may do what. Without it, the listener is this machine's only."""
    access = access or Access()
    an_error = {"default": {"content": {"application/json": {"schema": _ERROR_SCHEMA}}, "description": "An error."}}
    app = FastAPIOffline(  # /docs works without the internet
        title="Hotrow",
        responses=an_error,  # of every route, instead of FastAPI's own 422
        version=server_version(),
        description=_DESCRIPTION,
        middleware=[
            Middleware(Edge, front.metrics, front.has_access_log, access, BROWSER_HEADERS, has_ids=front.has_ids)
        ],
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to the Host that the client wrote
        exception_handlers={HTTPException: http_exception},
    )
    arriving = Arriving(front.limits)
    add_control_routes(app, front.control, front.limits, arriving)
    _add_metrics_route(app, front)
    _add_status_routes(app, front)
    endpoint = HttpEndpoint(front, arriving)
    _add_predict_route(app, endpoint)
    _add_infer_routes(app, endpoint)
    add_sagemaker_routes(app, front, endpoint)
    _complete_document(app, front)
    return InferPath(app, endpoint, front, access)


def _add_metrics_route(app: FastAPI, front: FrontEnd) -> None:
    metrics, siblings = Metrics(front.metrics, front.readings), front.siblings

    def page(is_open: bool) -> bytes:  # waits for GPUs and for the other workers
        if siblings is None:
            return metrics.page(is_open)
        return merged_page(siblings.of_all("metrics", metrics.record()), is_open)

    shared = [_Shared(partial(page, is_open)) for is_open in (False, True)]

    @app.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """Counters in Prometheus's text format or, if the client accepts it, in OpenMetrics' with exemplars."""
        is_open = _OPEN_METRICS.partition(";")[0] in request.headers.get("accept", "")
        return Response(await shared[is_open].result(), media_type=_OPEN_METRICS if is_open else _PROMETHEUS_TEXT)


def _add_status_routes(app: FastAPI, front: FrontEnd) -> None:
    page = Path(__file__).with_name("status.html").read_bytes()
    headers = {"Cache-Control": "no-cache", "Content-Security-Policy": _content_security_policy(page)}

    @app.get("/", include_in_schema=False)
    async def status_page() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    def document() -> dict[str, Any]:  # waits for GPUs and for the other workers
        own, siblings = front.status.document(), front.siblings
        return own if siblings is None else merged_status(siblings.of_all("status", own).values())

    shared = _Shared(document)

    @app.get("/status")
    async def status_document() -> dict[str, Any]:
        """What the status page shows: models, tables, tiers, and what they counted since the start."""
        found: dict[str, Any] = await shared.result()
        return found


def _content_security_policy(page: bytes) -> str:
    """Return what a browser enforces: the page runs its own script and style only, and asks its own server only."""
    own = {}
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        own[tag] = f"'sha256-{b64encode(sha256(content).digest()).decode()}'"
    return (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _add_infer_routes(app: FastAPI, endpoint: HttpEndpoint) -> None:
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        in_path = path_parameter(prefix, "version")

        @app.post(
            f"{prefix}/infer",
            response_class=Response,
            openapi_extra=_INFER_DOCS,
            responses=_responses(INFER_ANSWER_SCHEMA, "The outputs."),
        )
        async def infer(model: str, request: Request, version: str = in_path) -> Response:
            """Predict samples given as tensors; ``InferPath`` answers before the router does."""
            return _response(await endpoint.answer(request.scope, request.receive, InferExchange))


def _responses(schema: dict[str, Any], what: str) -> dict[int | str, dict[str, Any]]:
    described = {200: (schema, what), **{code: (_ERROR_SCHEMA, text) for code, text in _ERRORS.items()}}
    return {
        code: {"content": {"application/json": {"schema": of_code}}, "description": text}
        for code, (of_code, text) in described.items()
    }


def _add_predict_route(app: FastAPI, endpoint: HttpEndpoint) -> None:
    @app.post(
        "/predict/{model}",
        response_class=Response,
        openapi_extra=_PREDICT_DOCS,
        responses=_responses(PREDICTIONS_SCHEMA, "Probabilities."),
    )
    async def predict(model: str, request: Request) -> Response:
        """Predict JSON samples: each has values by name, or dense features and keys by slot or by table name."""
        return _response(await endpoint.answer(request.scope, request.receive, SamplesExchange))


def _group_of(path: str) -> str:
    """Return the group of a path in the page of all routes."""
    return next(group for group, pattern in _GROUPS.items() if re.match(pattern, path))


def _complete_document(app: FastAPI, front: FrontEnd) -> None:
    """Have the OpenAPI document show groups of routes, and what the models that are served now take."""
    without = app.openapi

    def openapi() -> dict[str, Any]:
        document = deepcopy(without())
        paths = document["paths"]
        document["tags"] = [{"name": group} for group in _GROUPS]
        document["paths"] = {path: paths[path] for group in _GROUPS for path in paths if _group_of(path) == group}
        for path, methods in paths.items():
            for operation in methods.values():
                operation["tags"] = [_group_of(path)]
        examples = {model: {"value": body} for model, body in front.control.examples().items()}
        if examples:
            body = document["paths"]["/predict/{model}"]["post"]["requestBody"]["content"]["application/json"]
            body["examples"] = examples
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's way to extend it


def _response(answer: Answer) -> Response:
    return Response(answer.body, headers={name.decode(): value.decode() for name, value in answer.headers})
