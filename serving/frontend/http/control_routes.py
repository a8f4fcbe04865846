"""The HTTP routes of ``Control`` and of Triton's shared memory extensions."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request
from fastapi.responses import Response

from serving.errors import RequestError
from serving.frontend.control import Control
from serving.frontend.http.body import Arriving, decompress, read_body
from serving.frontend.http.headers import headers_of
from serving.frontend.limits import Limits
from serving.frontend.runner import MOST_INLINE_BYTES
from serving.protocol.document import known_only, optional, parse_document, required
from serving.protocol.shared_memory import no_cuda_shared_memory


def add_control_routes(app: FastAPI, control: Control, limits: Limits, arriving: Arriving) -> None:
    """Add the routes to ``app``; bodies are read within ``limits``, and ``arriving`` counts the bytes of all bodies."""
    bodies = _Bodies(limits, arriving)
    _add_server_routes(app, control, bodies)
    _add_log_and_trace_routes(app, control, bodies)
    _add_shared_memory_routes(app, control, bodies)
    _add_cuda_shared_memory_routes(app)
    _add_model_routes(app, control)  # after the statistics of all models, whose path has the same form


def path_parameter(path: str, name: str) -> Any:
    """Return a dependency of FastAPI: the value of ``{name}`` in ``path``, or "" if the path has no such part."""

    async def given(value: Annotated[str, Path(alias=name)]) -> str:
        return value

    async def absent() -> str:
        return ""

    return Depends(given if f"{{{name}}}" in path else absent)


def _add_server_routes(app: FastAPI, control: Control, bodies: "_Bodies") -> None:
    @app.get("/v2")
    async def server_metadata() -> dict[str, Any]:
        """The server's name, version and KServe extensions."""
        return control.server()

    @app.head("/v2/health/live", include_in_schema=False)
    @app.get("/v2/health/live", response_class=Response)
    async def live() -> Response:
        """200 while the process answers."""
        return Response()

    @app.head("/v2/health/ready", include_in_schema=False)
    @app.get("/v2/health/ready", response_class=Response)
    async def ready() -> Response:
        """200 while every model is ready or degraded, otherwise 503."""
        return Response(status_code=200 if control.is_ready() else 503)

    @app.post("/v2/repository/index")
    async def index(request: Request) -> list[dict[str, Any]]:
        """The models and their states; ``{"ready": true}`` asks for those that are ready."""
        document = await bodies.document(request)
        known_only(document, frozenset({"ready"}), "")
        return await control.index(optional(document, "ready", bool, False, ""))

    @app.post("/v2/repository/models/{model}/load", response_class=Response)
    async def load(model: str, request: Request) -> Response:
        """Load a model, or the new versions in its folder; needs --model-control-mode explicit."""
        await control.load(model, await bodies.parameters(request))
        return Response()

    @app.post("/v2/repository/models/{model}/unload", response_class=Response)
    async def unload(model: str, request: Request) -> Response:
        """Unload a model; needs --model-control-mode explicit."""
        await control.unload(model, await bodies.parameters(request))
        return Response()

    @app.get("/v2/models/stats")
    async def all_statistics() -> dict[str, Any]:
        """How many requests each model has answered, and how long their stages took."""
        return await control.statistics()


def _add_model_routes(app: FastAPI, control: Control) -> None:
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        in_path = path_parameter(prefix, "version")

        @app.get(prefix)
        async def metadata(model: str, version: str = in_path) -> dict[str, Any]:
            """The model's tensors and slots."""
            return control.metadata(model, version)

        @app.head(f"{prefix}/ready", include_in_schema=False)
        @app.get(f"{prefix}/ready", response_class=Response)
        async def model_ready(model: str, version: str = in_path) -> Response:
            """200 while the model is ready or degraded, 503 while its requests fail."""
            return Response(status_code=200 if control.is_model_ready(model, version) else 503)

        @app.get(f"{prefix}/config")
        async def model_config(model: str, version: str = in_path) -> dict[str, Any]:
            """The model's configuration in Triton's format."""
            return control.config(model, version)

        @app.get(f"{prefix}/stats")
        async def statistics(model: str, version: str = in_path) -> dict[str, Any]:
            """How many requests the model has answered, and how long their stages took."""
            return await control.statistics(model, version)


def _add_log_and_trace_routes(app: FastAPI, control: Control, bodies: "_Bodies") -> None:
    @app.get("/v2/logging")
    async def log_settings() -> dict[str, Any]:
        """The log settings."""
        return control.log_settings()

    @app.post("/v2/logging")
    async def change_log_settings(request: Request) -> dict[str, Any]:
        """Change log settings; ``log_verbose_level`` above 0 also logs details."""
        return await control.change_log_settings(await bodies.document(request))

    for path in ("/v2/trace/setting", "/v2/models/{model}/trace/setting"):
        in_path = path_parameter(path, "model")

        @app.get(path)
        async def trace_settings(model: str = in_path) -> dict[str, Any]:
            """Triton's trace settings, which are always off; see `hotrow serve --traces`."""
            return control.trace_settings(model)

        @app.post(path)
        async def change_trace_settings(request: Request, model: str = in_path) -> dict[str, Any]:
            """Accept settings that ask for no trace, and refuse others."""
            return control.change_trace_settings(await bodies.document(request), model)


def _add_shared_memory_routes(app: FastAPI, control: Control, bodies: "_Bodies") -> None:
    prefix = "/v2/systemsharedmemory"

    @app.get(f"{prefix}/status")
    async def all_regions() -> list[dict[str, Any]]:
        """The registered regions of system shared memory."""
        return control.regions.status()

    @app.get(f"{prefix}/region/{{name}}/status")
    async def region(name: str) -> list[dict[str, Any]]:
        """One registered region."""
        return control.regions.status(name)

    @app.post(f"{prefix}/region/{{name}}/register", response_class=Response)
    async def register(name: str, request: Request) -> Response:
        """Register a region: ``key`` names POSIX shared memory, ``offset`` and ``byte_size`` a part of it."""
        document = await bodies.document(request)
        known_only(document, frozenset({"key", "offset", "byte_size"}), "")
        key, size_bytes = required(document, "key", str, ""), required(document, "byte_size", int, "")
        await control.register(name, key, optional(document, "offset", int, 0, ""), size_bytes)
        return Response()

    for path in (f"{prefix}/unregister", f"{prefix}/region/{{name}}/unregister"):
        in_path = path_parameter(path, "name")

        @app.post(path, response_class=Response)
        async def unregister(name: str = in_path) -> Response:
            """Unregister one region, or all."""
            await control.unregister(name)
            return Response()


def _add_cuda_shared_memory_routes(app: FastAPI) -> None:
    for path in ("/v2/cudasharedmemory/status", "/v2/cudasharedmemory/region/{name}/status"):
        in_path = path_parameter(path, "name")

        @app.get(path)
        async def no_cuda_regions(name: str = in_path) -> list[dict[str, Any]]:
            """The registered regions of CUDA shared memory: none."""
            if name:
                raise RequestError(f"shared memory region {name[:64]!r}: not registered")
            return []

    @app.post("/v2/cudasharedmemory/region/{name}/register")
    async def refuse_cuda_region(name: str) -> None:
        """Refuse CUDA shared memory."""
        raise no_cuda_shared_memory(name)

    for path in ("/v2/cudasharedmemory/unregister", "/v2/cudasharedmemory/region/{name}/unregister"):

        @app.post(path, response_class=Response, dependencies=[path_parameter(path, "name")])
        async def unregister_cuda_regions() -> Response:
            """Do nothing, because there are no regions."""
            return Response()


class _Bodies:
    """Reads the bodies of requests. They are short enough for the event loop, so none waits for a thread."""

    def __init__(self, limits: Limits, arriving: Arriving) -> None:
        self._limits = replace(limits, max_body_bytes=min(limits.max_body_bytes, MOST_INLINE_BYTES))
        self._arriving = arriving

    async def document(self, request: Request) -> dict[str, Any]:
        """Read a body, which may be empty, as an object."""
        headers = headers_of(request.scope)
        body = await read_body(request.receive, headers, self._limits, self._arriving)
        body = decompress(body, headers, self._limits.max_body_bytes)
        return parse_document(body, self._limits.bounds) if body else {}

    async def parameters(self, request: Request) -> dict[str, Any]:
        """Read the parameters in a body."""
        document = await self.document(request)
        known_only(document, frozenset({"parameters"}), "")
        return optional(document, "parameters", dict, {}, "")
