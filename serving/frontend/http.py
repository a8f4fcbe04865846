"""The HTTP front end: KServe v2, a JSON form for people, health and metrics, as one FastAPI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from serving.frontend.body import Limits
from serving.frontend.edge import Edge, http_exception, validation_error
from serving.frontend.endpoint import InferPath, PredictEndpoint, ServedModel
from serving.frontend.runner import Runner
from serving.frontend.version import server_version
from serving.metrics import Metrics, RequestMetrics
from serving.protocol.ctr import PLATFORM, triton_config
from serving.protocol.samples import PREDICTIONS_SCHEMA, SAMPLES_SCHEMA
from serving.repository import ModelRepository

_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_DESCRIPTION = """\
CTR model serving. KServe v2 inference is at `/v2/models/{model}/infer`.

Its tensors: `DES` has the dense features, sample by sample. `CATCOLUMN` has the keys, sample-major: sample 0's keys of
the first table, slot by slot, then of the second table and so on, then sample 1's keys. `ROWINDEX` says where each
slot's keys begin: one CSR over all slots with samples * slots + 1 offsets. With several tables it may instead be one
CSR per table, each starting at 0; the length decides.
"""
_PREDICT_DOCS: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": SAMPLES_SCHEMA}}},
}
_ERROR_SCHEMA = {"type": "object", "properties": {"error": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the front end.

    Attributes:
        threads: largest number of predict requests that run at the same time, except short requests.
        limits: limits of requests.
    """

    threads: int = 1
    limits: Limits = field(default_factory=Limits)


def create_app(repository: ModelRepository, settings: Settings | None = None) -> ASGIApp:
    """Make the application that serves ``repository``, whose models must be loaded already.

    The caller closes the repository after the application has shut down.
    """
    settings = settings or Settings()
    counters = RequestMetrics()
    runner = Runner(settings.threads)
    endpoint = PredictEndpoint(repository, runner, counters, settings.limits)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        runner.close()

    app = FastAPI(
        title="Hotrow",
        version=server_version(),
        description=_DESCRIPTION,
        lifespan=lifespan,
        middleware=[Middleware(Edge, metrics=counters)],
        exception_handlers={HTTPException: http_exception, RequestValidationError: validation_error},
    )
    _add_server_routes(app, repository, Metrics(counters, repository.readings))
    _add_model_routes(app, repository, endpoint)
    _add_predict_route(app, endpoint)
    return InferPath(app, endpoint, counters)


def _add_server_routes(app: FastAPI, repository: ModelRepository, metrics: Metrics) -> None:
    @app.get("/v2")
    async def server_metadata() -> dict[str, Any]:
        """The server's name, version and KServe extensions."""
        return {
            "name": "hotrow",
            "version": server_version(),
            "extensions": ["binary_tensor_data", "model_configuration"],
        }

    @app.get("/v2/health/live", response_class=Response)
    async def live() -> Response:
        """200 while the process answers."""
        return Response()

    @app.get("/v2/health/ready", response_class=Response)
    async def ready() -> Response:
        """200 while every model is ready, otherwise 503."""
        are_ready = [repository.is_ready(name) for name in repository.models()]
        return Response(status_code=200 if are_ready and all(are_ready) else 503)

    @app.get("/metrics", response_class=Response)
    def prometheus() -> Response:  # not a coroutine: it waits for GPUs, so it runs in a thread
        """Counters in Prometheus's text format."""
        return Response(metrics.page(), media_type=_PROMETHEUS_TEXT)


def _add_model_routes(app: FastAPI, repository: ModelRepository, endpoint: PredictEndpoint) -> None:
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):

        @app.get(prefix)
        async def metadata(model: str, version: str = "") -> dict[str, Any]:
            """The model's tensors."""
            served = endpoint.model(model, version)
            return {
                "name": model,
                "versions": [served.version],
                "platform": PLATFORM,
                "inputs": [spec.metadata() for spec in served.signature.inputs],
                "outputs": [spec.metadata() for spec in served.signature.outputs],
            }

        @app.get(f"{prefix}/ready", response_class=Response)
        async def model_ready(model: str, version: str = "") -> Response:
            """200 while requests for the model can succeed, 503 while no tier answers for one of its tables."""
            endpoint.model(model, version)
            return Response(status_code=200 if repository.is_ready(model) else 503)

        @app.get(f"{prefix}/config")
        async def model_config(model: str, version: str = "") -> dict[str, Any]:
            """The model's configuration in Triton's format."""
            return triton_config(model, endpoint.model(model, version).session.config)


def _add_predict_route(app: FastAPI, endpoint: PredictEndpoint) -> None:
    @app.post(
        "/predict/{model}",
        response_class=Response,
        openapi_extra=_PREDICT_DOCS,
        responses={
            200: {"content": {"application/json": {"schema": PREDICTIONS_SCHEMA}}, "description": "Probabilities."},
            400: {
                "content": {"application/json": {"schema": _ERROR_SCHEMA}},
                "description": "What is wrong, and where.",
            },
        },
    )
    async def predict(model: str, request: Request) -> Response:
        """Predict samples given as JSON: per sample its dense features and one list of keys per slot."""
        answer = await endpoint.answer(request.scope, request.receive, ServedModel.predict)
        return Response(answer.body, headers={name.decode(): value.decode() for name, value in answer.headers})
