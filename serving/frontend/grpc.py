"""The gRPC front end: Triton's ``inference.GRPCInferenceService``, gRPC's health protocol and server reflection.

The messages and the base classes are those of the packages tritonclient, grpcio-health-checking and grpcio-reflection.
The server runs on the event loop of the HTTP server, and shares its limits, its threads and its counters.
"""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from inspect import isawaitable
from time import perf_counter, perf_counter_ns
from typing import Any, NoReturn

import grpc
from google.protobuf.json_format import ParseDict
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from kernels.errors import HotrowError
from serving.errors import ConfigError
from serving.frontend.access import Access
from serving.frontend.access_log import (
    Headers,
    log_request,
    new_id,
    repeated_headers,
    request_id_of,
    sampled_trace_of,
    with_request_id,
)
from serving.frontend.client_texts import message_of
from serving.frontend.codes import ANSWERED, codes_of
from serving.frontend.decoders import Decoders
from serving.frontend.exchange import Exchange
from serving.frontend.front_end import FrontEnd
from serving.frontend.grpc_calls import CLIENT_GONE, Call, OpenCalls, Refusal, refusal_of
from serving.frontend.grpc_entry import Entry
from serving.frontend.grpc_sockets import ServerSockets
from serving.frontend.limits import ENVELOPE_BYTES, Limits
from serving.frontend.tls import Tls
from serving.frontend.tokens import Tokens
from serving.protocol.messages import InferMessage, MessageDecoder, chosen, encode_message
from serving.protocol.request import SHARED_MEMORY_REGION
from serving.protocol.shared_memory import no_cuda_shared_memory
from serving.repository import ServedModel

_log = logging.getLogger("hotrow.grpc")
_HEALTH_INTERVAL_S = 1.0
#: A client that pings an idle connection more often is disconnected.
_PING_INTERVAL_MS = 200
#: If processes share a port, gRPC asks clients to replace connections of this age. So clients spread over the
#: processes, and leave a process that stopped listening.
_CONNECTION_AGE_S = 10.0
_HAND_OVER_S = 1.2 * _CONNECTION_AGE_S  # gRPC varies the age by a tenth
#: The health of a service that is ready, that is not ready, and that is not known.
_STATUSES = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
    None: health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
}
_LOG_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}


class GrpcServer:
    """The server on one port. Belongs to one event loop.

    Attributes:
        address: ``"host:port"``; after ``start``, with the port that it took.
    """

    def __init__(
        self,
        front: FrontEnd,
        host: str,
        port: int,
        tls: Tls | None = None,
        shares_port: bool = False,
        tokens: Tokens | None = None,
    ) -> None:
        """Describe a server; ``start`` binds the port.

        Args:
            front: answers the requests.
            host: the host to listen on.
            port: its port; 0 takes a free port.
            tls: the certificates; None: no TLS.
            shares_port: other processes listen on the port too.
            tokens: the known tokens; None: clients need no token.
        """
        self._front = front
        self._access = Access(tokens, host or "::")
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
        limits = self._front.limits
        limits = replace(limits, max_connections=min(limits.max_connections, _affordable_connections()))
        most_bytes = limits.max_body_bytes + ENVELOPE_BYTES
        calls = self._calls = OpenCalls(limits, most_bytes)
        entry = Entry(calls, self._front.metrics, self._access, self._front.has_access_log)
        server = grpc.aio.server(interceptors=[entry], options=_options(limits, most_bytes, self._shares_port))
        services = _ByName(server)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Inference(self._front), services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)
        name = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
        reflection.enable_server_reflection([name, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        try:
            port = (
                server.add_secure_port(self.address, _credentials(self._tls))
                if self._tls
                else server.add_insecure_port(self.address)
            )
        except RuntimeError as err:
            reason = "cannot listen for gRPC: the port is taken, or the address is not of this machine"
            raise ConfigError(self.address, "", reason) from err
        self.address = f"{self._host}:{port}"
        self._server, self._sockets = server, ServerSockets(port)
        await server.start()
        self._tasks = [asyncio.ensure_future(calls.watch(self._sockets)), asyncio.ensure_future(self._health.follow())]

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, and wait for running requests for at most ``timeout_s``.

        All connections are closed before gRPC's ``stop``. It would cancel the calls that arrive at the same instant,
        and clients do not send cancelled calls again.
        """
        if self._server is None:
            return
        self._health.stop()
        self._sockets.end_listening()
        await self._calls.drain(self._sockets, timeout_s)
        await self._server.stop(0)
        for task in self._tasks:
            task.cancel()

    async def hand_over(self) -> None:
        """Wait until all clients have moved to the other processes that share the port."""
        self._sockets.end_listening()
        await asyncio.sleep(_HAND_OVER_S)


class _ByName:
    """Adds services to a server without registering their methods.

    gRPC finds the handler of every call by its name. For registered methods it would also keep one waiting
    task each, and every call would wake all of these tasks.
    """

    def __init__(self, server: Any) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None:
        """Add nothing."""


def _affordable_connections() -> int:
    """Return how many connections leave enough file descriptors for everything else."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def _options(limits: Limits, most_message_bytes: int, shares_port: bool) -> list[tuple[str, int]]:
    """The settings of gRPC's core."""
    options = {
        "grpc.max_receive_message_length": most_message_bytes,
        "grpc.so_reuseport": int(shares_port),
        "grpc.max_concurrent_streams": limits.max_streams,
        # Above the limit, so that the watch can cut idle connections instead of refusing new connections.
        "grpc.max_allowed_incoming_connections": limits.max_connections + limits.max_connections // 4,
        "grpc.server_handshake_timeout_ms": int(1000 * limits.head_timeout_s),
        "grpc.max_connection_idle_ms": int(1000 * limits.idle_timeout_s),
        # A client that has vanished or does not read does not answer this ping.
        "grpc.keepalive_time_ms": int(1000 * limits.idle_timeout_s),
        "grpc.keepalive_timeout_ms": int(1000 * limits.answer_timeout_s),
        # Clients and load balancers may ping idle connections, but not too often.
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": _PING_INTERVAL_MS,
    }
    if shares_port:
        options["grpc.max_connection_age_ms"] = int(1000 * _CONNECTION_AGE_S)
    return list(options.items())


def _credentials(tls: Tls) -> Any:
    used: Sequence[bytes] = ()

    def configuration() -> Any:
        """Return the certificates for a new connection; None: those of the connection before."""
        nonlocal used
        if used is tls.contents:
            return None
        used = tls.contents
        certificate, key, *authorities = used
        return grpc.ssl_server_certificate_configuration([(key, certificate)], b"".join(authorities) or None)

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration, tls.wants_certificates)


def _call(answer: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Call], Any]:
    """Turn a method that returns an answer into a method of a gRPC service; its errors end the call."""

    @wraps(answer)
    def of_request(self: Any, request: Any, _token: str, _ids: Headers) -> Any:
        return answer(self, request)

    return _call_of_client(of_request)


def _call_of_client(answer: Callable[[Any, Any, str, Headers], Any]) -> Callable[[Any, Any, Call], Any]:
    """See ``_call``; ``answer`` also gets the name of the client's token, and the request's ids."""

    @wraps(answer)
    async def call(self: Any, request: Any, call: Call) -> Any:
        ids = await _repeat_ids(call.context, self.has_ids)
        began, status = perf_counter(), "CANCELLED"
        try:
            found = answer(self, request, call.token, ids)
            found = await found if isawaitable(found) else found
            status = "OK"
            return found
        except ANSWERED as err:
            status = codes_of(err)[1]
            raise refusal_of(err) from None
        except Exception:  # noqa: BLE001  # the top of a call: the traceback goes to the log, never to the client
            status = "INTERNAL"
            _log.exception("%s failed", answer.__name__)
            raise Refusal(grpc.StatusCode.INTERNAL, "internal error; see the server's log") from None
        finally:
            if self.has_access_log:
                log_request("gRPC", answer.__name__, status, began, ids, getattr(request, "model_name", ""))

    return call


async def _repeat_ids(context: Any, has_ids: bool) -> Headers:
    """Send a request's ids back as initial metadata, and return them; with ``has_ids``, every request has one."""
    given = context.invocation_metadata() or ()
    ids = repeated_headers((name.encode(), value.encode()) for name, value in given if isinstance(value, str))
    if has_ids:
        ids = with_request_id(ids)
    if ids:
        await context.send_initial_metadata([(name.decode(), value.decode()) for name, value in ids])
    return ids


class _Inference(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Triton's service."""

    def __init__(self, front: FrontEnd) -> None:
        self._control, self._endpoint, self._metrics = front.control, front.endpoint, front.metrics
        self._decoders = Decoders(MessageDecoder, front.control.regions, front.limits.bounds)
        self._tracing = front.tracing
        self.has_access_log, self.has_ids = front.has_access_log, front.has_ids

    @_call_of_client
    def ModelInfer(self, request: Any, token: str, ids: Headers) -> Any:
        return self._infer(request, token, ids, request_id_of(ids))

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], call: Call) -> AsyncIterator[Any]:
        """Answer the requests of a stream one after another; an error does not end the stream."""
        ids = await _repeat_ids(call.context, self.has_ids)
        async for request in requests:
            began, status = perf_counter(), "CANCELLED"
            try:
                infer = self._infer(request, call.token, ids, new_id() if self.has_ids else "")
                answer = service_pb2.ModelStreamInferResponse(infer_response=await infer)
                status = "OK"
            except ANSWERED as err:
                status = codes_of(err)[1]
                answer = service_pb2.ModelStreamInferResponse(error_message=message_of(err))
                answer.infer_response.id = request.id
            finally:
                if self.has_access_log:
                    log_request("gRPC", "ModelStreamInfer", status, began, ids, request.model_name)
            # Each request has one answer, which is the final one, so no empty final answer follows.
            answer.infer_response.parameters["triton_final_response"].bool_param = True
            yield answer

    async def _infer(self, message: InferMessage, token: str, ids: Headers, request_id: str) -> Any:
        """Answer one request and count it."""
        began, model, code = perf_counter(), "", CLIENT_GONE
        self._metrics.started()
        trace = None if self._tracing is None else self._tracing.begin("ModelInfer", ids, request_id)
        try:
            version = message.model_version
            batcher = self._endpoint.find(message.model_name, version)
            model = batcher.model.name
            exchange = _InferExchange(message, self._decoders)
            exchange.request_id = request_id
            exchange.traced_by(trace)
            try:
                await self._endpoint.run(batcher, version, exchange.size_bytes, exchange, token)
            except BaseException:
                batcher.model.statistics.failed(perf_counter_ns() - exchange.times_ns[0])
                raise
            code = 200
            return exchange.written
        except ANSWERED as err:
            code = codes_of(err)[0]
            raise
        except Exception as err:  # the top of a request: the traceback goes to the log, never to the client
            code = 500
            _log.exception("ModelInfer failed")
            raise HotrowError("internal error; see the server's log") from err
        finally:
            trace_id = sampled_trace_of(ids) if trace is None else trace.id
            self._metrics.finished(model, code, perf_counter() - began, trace_id)
            if trace is not None:
                trace.end(model, code)

    @_call
    def ServerLive(self, _request: Any) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    @_call
    def ServerReady(self, _request: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self._control.is_ready())

    @_call
    def ModelReady(self, request: Any) -> Any:
        is_ready = self._control.is_model_ready_if_served(request.name, request.version)
        return service_pb2.ModelReadyResponse(ready=is_ready or False)  # an unknown model is not ready, as in Triton

    @_call
    def ServerMetadata(self, _request: Any) -> Any:
        return service_pb2.ServerMetadataResponse(**self._control.server())

    @_call
    def ModelMetadata(self, request: Any) -> Any:
        document = self._control.metadata(request.name, request.version)
        return _without_extensions(document, service_pb2.ModelMetadataResponse)

    @_call
    def ModelConfig(self, request: Any) -> Any:
        config = ParseDict(self._control.config(request.name, request.version), model_config_pb2.ModelConfig())
        return service_pb2.ModelConfigResponse(config=config)

    @_call
    async def ModelStatistics(self, request: Any) -> Any:
        document = await self._control.statistics(request.name, request.version)
        return ParseDict(document, service_pb2.ModelStatisticsResponse())

    @_call
    async def RepositoryIndex(self, request: Any) -> Any:
        kind = service_pb2.RepositoryIndexResponse
        models = [_without_extensions(entry, kind.ModelIndex) for entry in await self._control.index(request.ready)]
        return kind(models=models)

    @_call
    async def RepositoryModelLoad(self, request: Any) -> Any:
        await self._control.load(request.model_name, _parameters(request))
        return service_pb2.RepositoryModelLoadResponse()

    @_call
    async def RepositoryModelUnload(self, request: Any) -> Any:
        await self._control.unload(request.model_name, _parameters(request))
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
        regions = {region["name"]: region for region in self._control.regions.status(request.name)}
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


class _Watched:
    """A service whose status clients watch.

    Attributes:
        status: its status when it was last asked.
        changed: is set once there is another status.
        clients: how many calls watch it.
    """

    def __init__(self, status: Any) -> None:
        self.status = status
        self.changed = asyncio.Event()
        self.clients = 0

    def set(self, status: Any) -> None:
        """Take a status, and wake the calls if it is another."""
        if status != self.status:
            self.status = status
            self.changed.set()
            self.changed = asyncio.Event()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """gRPC's health protocol: the service "" is the whole server, every other service is a model."""

    def __init__(self, front: FrontEnd) -> None:
        self._control = front.control
        self._watched: dict[str, _Watched] = {}
        self._is_stopping = False
        self.has_access_log, self.has_ids = front.has_access_log, front.has_ids

    @_call
    def Check(self, request: Any) -> Any:
        service = request.service
        is_ready = self._control.is_model_ready(service) if service else self._control.is_ready()
        return health_pb2.HealthCheckResponse(status=_STATUSES[is_ready])

    async def Watch(self, request: Any, _call: Call) -> AsyncIterator[Any]:
        """Send the status now and whenever it changes. The calls share the look-ups, because there may be many."""
        watched = self._watched.get(request.service)
        if watched is None:
            watched = self._watched[request.service] = _Watched(self._watched_status(request.service))
        watched.clients += 1
        try:
            last = None
            while True:
                status, changed = watched.status, watched.changed
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                if self._is_stopping:
                    return
                last = status
                await changed.wait()
        finally:
            watched.clients -= 1
            if not watched.clients:
                del self._watched[request.service]

    async def follow(self) -> NoReturn:
        """Look up the status of all watched services, until cancelled."""
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            for service, watched in list(self._watched.items()):
                watched.set(self._watched_status(service))

    def stop(self) -> None:
        """Tell watching clients that the server does not serve, and end their calls."""
        self._is_stopping = True
        for watched in self._watched.values():
            watched.set(health_pb2.HealthCheckResponse.NOT_SERVING)
            watched.changed.set()

    def _watched_status(self, service: str) -> Any:
        if self._is_stopping:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return _STATUSES[self._control.is_model_ready_if_served(service) if service else self._control.is_ready()]


class _InferExchange(Exchange):
    """A message."""

    def __init__(self, message: InferMessage, decoders: Decoders[MessageDecoder]) -> None:
        super().__init__()
        self._message = message
        self._decoders = decoders

    @property
    def size_bytes(self) -> int | None:
        """The message's size; None if a tensor is in shared memory, because the size then says little."""
        return None if SHARED_MEMORY_REGION in self._message.head else len(self._message.data)

    @property
    def timeout_us(self) -> int:
        return int(self._request.timeout_us)

    def read(self, model: ServedModel) -> Any:
        self._request = self.with_id(self._decoders.of(model).decode(self._message))
        with self._request.locating_errors():
            question = model.read(self._request.inputs, self._request.asked)
        self._request.check_answer(partial(model.answer_floats, question), self._decoders.bounds)
        return question

    def write(self, model: ServedModel, answer: Any) -> Any:
        outputs, parameters = model.outputs(self.question, answer)
        if self._request.wants_freshness:
            parameters |= model.freshness()
        return encode_message(self._request, model.name, model.version, outputs, parameters, self._decoders.regions)


def _parameters(request: Any) -> dict[str, Any]:
    return {name: chosen(value, f"parameters.{name}") for name, value in request.parameters.items()}


def _without_extensions(document: dict[str, Any], kind: Any) -> Any:
    """Return a document as a message, which has no fields for our extensions of Triton's documents."""
    return kind(**{name: value for name, value in document.items() if name in kind.DESCRIPTOR.fields_by_name})
