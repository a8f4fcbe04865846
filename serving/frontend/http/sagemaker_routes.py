"""The routes of a container in Amazon SageMaker, which serves one model: ``/ping`` and ``/invocations``."""

import re

from fastapi import FastAPI, Request
from fastapi.responses import Response

from serving.errors import RequestError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.headers import headers_of
from serving.frontend.http.infer import JSON_LENGTH, Answer, HttpEndpoint, HttpExchange, InferExchange, SamplesExchange

#: The content type that SageMaker's clients of Triton send with binary tensors.
_BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="
_BINARY_TYPE = re.compile(re.escape(_BINARY).replace(";", r"\s*;\s*") + r"(\d{1,18})", re.IGNORECASE)


def add_sagemaker_routes(app: FastAPI, front: FrontEnd, endpoint: HttpEndpoint) -> None:
    """Add the routes to ``app``."""

    @app.get("/ping", response_class=Response)
    async def ping() -> Response:
        """SageMaker: 200 while every model is ready or degraded, otherwise 503."""
        return Response(status_code=200 if front.control.is_ready() else 503)

    @app.post("/invocations", response_class=Response)
    async def invocations(request: Request) -> Response:
        """SageMaker: predict with the server's only model, from the JSON of /predict or Triton's binary tensors."""
        scope = request.scope
        scope["path_params"] = {"model": _only_model(front)}
        binary = _BINARY_TYPE.fullmatch(request.headers.get("content-type", ""))
        form: type[HttpExchange] = SamplesExchange
        if binary:
            form = InferExchange
            headers_of(scope)[JSON_LENGTH] = binary[1].encode()
        return _response(await endpoint.answer(scope, request.receive, form))


def _only_model(front: FrontEnd) -> str:
    names = sorted({state.name for state in front.repository.index()})
    if len(names) != 1:
        raise RequestError(f"expected a server with one model, this server has {len(names)}: {', '.join(names)[:256]}")
    return names[0]


def _response(answer: Answer) -> Response:
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    if size := headers.pop(JSON_LENGTH.decode(), ""):
        headers["content-type"] = f"{_BINARY}{size}"
    return Response(answer.body, headers=headers)
