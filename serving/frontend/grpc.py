"""The gRPC front end: Triton's ``inference.GRPCInferenceService``, gRPC's health protocol and server reflection.

The messages and the base classes are those of the packages tritonclient, grpcio-health-checking and grpcio-reflection.
The server runs on the event loop of the HTTP server, and shares its limits, its threads and its counters.
"""

import asyncio
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import wraps
from inspect import isawaitable
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from kernels.errors import HotrowError
from serving.errors import ConfigError, UnknownModelError
from serving.frontend.access_log import Headers, log_request, repeated_headers, with_request_id
from serving.frontend.codes import codes_of
from serving.frontend.front_end import FrontEnd
from serving.frontend.served_model import ServedModel
from serving.frontend.tls import Tls
from serving.protocol.messages import chosen, decode_message, encode_message
from serving.protocol.shared_memory import SharedMemory, no_cuda_shared_memory

_log = logging.getLogger("hotrow.grpc")
_HEALTH_INTERVAL_S = 1.0
#: If processes share a port, gRPC asks clients to replace connections of this age. So clients spread over the
#: processes, and leave a process that stopped listening.
_CONNECTION_AGE_S = 10.0
_HAND_OVER_S = 1.2 * _CONNECTION_AGE_S  # gRPC varies the age by a tenth
#: Room for the bytes around a message's tensors.
_ENVELOPE_BYTES = 64 << 10
_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
#: The code in the metrics of a request whose client has gone: nginx's.
_CANCELLED = 499


class GrpcServer:
    """The server on one port. Belongs to one event loop.

    Attributes:
        address: ``"host:port"``; after ``start``, with the port that it took.
    """

    def __init__(
        self, front: FrontEnd, host: str, port: int, tls: Tls | None = None, shares_port: bool = False
    ) -> None:
        """Describe a server; ``start`` binds the port.

        Args:
            front: answers the requests.
            host: the host to listen on.
            port: its port; 0 takes a free port.
            tls: the files of TLS; None: no TLS.
            shares_port: other processes listen on the port too.
        """
        self._front = front
        self._tls = tls
        self._shares_port = shares_port
        self._host = f"[{host}]" if ":" in host else host
        self.address = f"{self._host}:{port}"
        self._health = _Health(front)
        self._server: Any = None

    async def start(self) -> None:
        """Bind the port and answer.

        Raises:
            ConfigError: the address cannot be bound.
        """
        most_bytes = self._front.limits.max_body_bytes + _ENVELOPE_BYTES
        options = [("grpc.max_receive_message_length", most_bytes), ("grpc.so_reuseport", int(self._shares_port))]
        if self._shares_port:
            options.append(("grpc.max_connection_age_ms", int(1000 * _CONNECTION_AGE_S)))
        server = grpc.aio.server(interceptors=[_Parsing()], options=options)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Inference(self._front), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        name = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
        reflection.enable_server_reflection([name, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        try:
            port = (
                server.add_secure_port(self.address, _credentials(self._tls))
                if self._tls
                else server.add_insecure_port(self.address)
            )
        except RuntimeError as err:
            raise ConfigError(self.address, "", f"cannot listen for gRPC: {err}") from err
        self.address = f"{self._host}:{port}"
        self._server = server
        await server.start()

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, and wait for running requests for at most ``timeout_s``."""
        if self._server is not None:
            self._health.stopping.set()
            await self._server.stop(timeout_s)

    async def hand_over(self) -> None:
        """Wait until all clients have moved to the other processes that share the port.

        gRPC's ``stop`` alone would end requests that arrive at the same instant.
        """
        _end_listening(int(self.address.rpartition(":")[2]))
        await asyncio.sleep(_HAND_OVER_S)


def _end_listening(port: int) -> None:
    """Stop this process's sockets from listening on ``port``; gRPC itself can only stop everything."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if not _is_socket(descriptor):
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as held:
            is_listening = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_listening and held.family != socket.AF_UNIX and held.getsockname()[1] == port:
                held.shutdown(socket.SHUT_RD)


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # it was closed meanwhile
        return False


def _credentials(tls: Tls) -> Any:
    authorities = tls.authorities.read_bytes() if tls.authorities else None
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)


class _Parsing(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Parses requests, so that bytes that are not a message get INVALID_ARGUMENT instead of gRPC's UNKNOWN."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}  # of known methods

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        known = self._handlers.get(details.method)
        if known is not None:
            return known
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        known = self._handlers[details.method] = _of_bytes(handler)
        return known


def _of_bytes(handler: Any) -> Any:
    """Return a handler that takes its requests as bytes."""

    async def unary_unary(data: bytes, context: Any) -> Any:
        return await handler.unary_unary(await _parsed(handler, data, context), context)

    async def unary_stream(data: bytes, context: Any) -> AsyncIterator[Any]:
        async for answer in handler.unary_stream(await _parsed(handler, data, context), context):
            yield answer

    async def messages(stream: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for data in stream:
            yield await _parsed(handler, data, context)

    async def stream_stream(stream: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for answer in handler.stream_stream(messages(stream, context), context):
            yield answer

    serializer = {"response_serializer": handler.response_serializer}
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(unary_unary, **serializer)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(unary_stream, **serializer)
    return grpc.stream_stream_rpc_method_handler(stream_stream, **serializer)


async def _parsed(handler: Any, data: bytes, context: Any) -> Any:
    try:
        return handler.request_deserializer(data)
    except DecodeError as err:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(err))


def _call(answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Turn a method that returns an answer into a method of a gRPC service; its errors end the call."""

    @wraps(answer)
    async def call(self: Any, request: Any, context: Any) -> Any:
        ids = await _repeat_ids(context, self.has_access_log)
        began, status = perf_counter(), "CANCELLED"
        try:
            found = answer(self, request)
            found = await found if isawaitable(found) else found
            status = "OK"
            return found
        except HotrowError as err:
            status = codes_of(err)[1]
            await context.abort(grpc.StatusCode[status], str(err))
        except Exception:  # noqa: BLE001  # the top of a call: the traceback goes to the log, never to the client
            status = "INTERNAL"
            _log.exception("%s failed", answer.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the server's log")
        finally:
            if self.has_access_log:
                log_request("gRPC", answer.__name__, status, began, ids, getattr(request, "model_name", ""))

    return call


async def _repeat_ids(context: Any, has_access_log: bool) -> Headers:
    """Send a request's ids back as initial metadata, and return them."""
    given = context.invocation_metadata() or ()
    ids = repeated_headers((name.encode(), value.encode()) for name, value in given if isinstance(value, str))
    if has_access_log:
        ids = with_request_id(ids)
    if ids:
        await context.send_initial_metadata([(name.decode(), value.decode()) for name, value in ids])
    return ids


class _Inference(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Triton's service."""

    def __init__(self, front: FrontEnd) -> None:
        self._control, self._endpoint, self._metrics = front.control, front.endpoint, front.metrics
        self.has_access_log = front.has_access_log

    @_call
    def ModelInfer(self, request: Any) -> Any:
        return self._infer(request)

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answer the requests of a stream one after another; an error does not end the stream."""
        ids = await _repeat_ids(context, self.has_access_log)
        async for request in requests:
            began, status = perf_counter(), "CANCELLED"
            try:
                answer = service_pb2.ModelStreamInferResponse(infer_response=await self._infer(request))
                status = "OK"
            except HotrowError as err:
                status = codes_of(err)[1]
                answer = service_pb2.ModelStreamInferResponse(error_message=str(err))
                answer.infer_response.id = request.id
            finally:
                if self.has_access_log:
                    log_request("gRPC", "ModelStreamInfer", status, began, ids, request.model_name)
            yield answer

    async def _infer(self, message: Any) -> Any:
        """Answer one request and count it."""
        began, model, code = perf_counter(), "", _CANCELLED
        self._metrics.started()
        try:
            name, version = message.model_name, message.model_version
            model = self._endpoint.model(name, version).name
            exchange = _InferExchange(message, self._control.regions)
            answer: Any = await self._endpoint.run(name, version, message.ByteSize(), exchange)
            code = 200
            return answer
        except HotrowError as err:
            code = codes_of(err)[0]
            raise
        except Exception as err:  # the top of a request: the traceback goes to the log, never to the client
            code = 500
            _log.exception("ModelInfer failed")
            raise HotrowError("internal error; see the server's log") from err
        finally:
            self._metrics.finished(model, code, perf_counter() - began)

    @_call
    def ServerLive(self, _request: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    @_call
    def ServerReady(self, _request: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self._control.is_ready())

    @_call
    def ModelReady(self, request: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self._control.is_model_ready(request.name, request.version))

    @_call
    def ServerMetadata(self, _request: Any) -> Any:
        return service_pb2.ServerMetadataResponse(**self._control.server())

    @_call
    def ModelMetadata(self, request: Any) -> Any:
        document = self._control.metadata(request.name, request.version)
        del document["slots"]  # the message has no field for them
        return service_pb2.ModelMetadataResponse(**document)

    @_call
    def ModelConfig(self, request: Any) -> Any:
        config = ParseDict(self._control.config(request.name, request.version), model_config_pb2.ModelConfig())
        return service_pb2.ModelConfigResponse(config=config)

    @_call
    async def ModelStatistics(self, request: Any) -> Any:
        document = await self._control.statistics(request.name, request.version)
        return ParseDict(document, service_pb2.ModelStatisticsResponse())

    @_call
    def RepositoryIndex(self, request: Any) -> Any:
        return service_pb2.RepositoryIndexResponse(models=self._control.index(request.ready))

    @_call
    async def RepositoryModelLoad(self, request: Any) -> Any:
        await asyncio.to_thread(self._control.load, request.model_name, _parameters(request))
        return service_pb2.RepositoryModelLoadResponse()

    @_call
    async def RepositoryModelUnload(self, request: Any) -> Any:
        await asyncio.to_thread(self._control.unload, request.model_name, _parameters(request))
        return service_pb2.RepositoryModelUnloadResponse()

    @_call
    async def LogSettings(self, request: Any) -> Any:
        changes = {name: chosen(value, name) for name, value in request.settings.items()}
        answer = service_pb2.LogSettingsResponse()
        for name, value in (await self._control.change_log_settings(changes)).items():
            setattr(answer.settings[name], _LOG_FIELDS[type(value)], value)
        return answer

    @_call
    def TraceSetting(self, request: Any) -> Any:
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        answer = service_pb2.TraceSettingResponse()
        for name, value in self._control.change_trace_settings(changes, request.model_name).items():
            answer.settings[name].value.extend([value] if isinstance(value, str) else value)
        return answer

    @_call
    async def SystemSharedMemoryRegister(self, request: Any) -> Any:
        await self._control.register(request.name, request.key, request.offset, request.byte_size)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    @_call
    def SystemSharedMemoryStatus(self, request: Any) -> Any:
        regions = {one["name"]: one for one in self._control.regions.status(request.name)}
        return ParseDict({"regions": regions}, service_pb2.SystemSharedMemoryStatusResponse())

    @_call
    async def SystemSharedMemoryUnregister(self, request: Any) -> Any:
        await self._control.unregister(request.name)
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    @_call
    def CudaSharedMemoryRegister(self, request: Any) -> Any:
        raise no_cuda_shared_memory(request.name)

    @_call
    def CudaSharedMemoryStatus(self, _request: Any) -> Any:
        return service_pb2.CudaSharedMemoryStatusResponse()

    @_call
    def CudaSharedMemoryUnregister(self, _request: Any) -> Any:
        return service_pb2.CudaSharedMemoryUnregisterResponse()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """gRPC's health protocol: the service "" is the whole server, every other service is a model.

    Attributes:
        stopping: once it is set, watching clients hear that the server does not serve, and their calls end.
    """

    def __init__(self, front: FrontEnd) -> None:
        self.stopping = asyncio.Event()
        self._control = front.control
        self.has_access_log = front.has_access_log

    @_call
    def Check(self, request: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=self._status_of(request.service))

    async def Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:
        """Send the status now and whenever it changes."""
        last = None
        while not self.stopping.is_set():
            try:
                status = self._status_of(request.service)
            except UnknownModelError:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
            last = status
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), _HEALTH_INTERVAL_S)
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)

    def _status_of(self, service: str) -> Any:
        is_ready = self._control.is_model_ready(service) if service else self._control.is_ready()
        return health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING


class _InferExchange:
    """See ``Exchange``."""

    def __init__(self, message: Any, regions: SharedMemory) -> None:
        self._message = message
        self._regions = regions

    @property
    def timeout_us(self) -> int:
        return int(self._request.timeout_us)

    def read(self, model: ServedModel) -> Any:
        self._request = decode_message(self._message, model.signature, self._regions)
        with self._request.locating_errors():
            return model.read(self._request.inputs)

    def write(self, model: ServedModel, answer: Any) -> Any:
        outputs, parameters = model.outputs(answer)
        return encode_message(self._request, model.name, model.version, outputs, parameters, self._regions)


def _parameters(request: Any) -> dict[str, Any]:
    return {name: chosen(value, f"parameters.{name}") for name, value in request.parameters.items()}
