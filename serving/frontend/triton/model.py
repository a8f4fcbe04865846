"""The class that Triton's Python backend loads from ``model.py``."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import numpy as np

from kernels.errors import HotrowError
from serving.config import read_repository, with_shared_ram
from serving.errors import ConfigError, RequestError
from serving.frontend.exchange import Exchange, answer_together
from serving.frontend.triton.metrics import TritonMetrics
from serving.frontend.triton.settings import SOURCE, Settings, read_settings
from serving.lookup import open_devices, warn_of_idle_caches
from serving.metrics import MetricSample
from serving.model.names import TOP_INDEX, TOP_SCORE
from serving.opening import open_model
from serving.outputs import Asked
from serving.parameter_server import ParameterServer
from serving.parameter_server.counters import table_samples
from serving.repository.served_model import ServedModel, served_model


class TritonPythonModel:
    """One model instance. Triton calls every method from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the version that Triton loads, with the tiers of its repository.

        Args:
            args: Triton's; ``model_repository`` is the model's folder, ``model_version`` its version, and
                ``model_config`` its configuration as JSON.

        Raises:
            HotrowError: the model cannot be opened. Triton shows the message and marks the model unavailable.
        """
        self._triton: Any = import_module("triton_python_backend_utils")
        _check_numpy(self._triton)
        settings = read_settings(args)
        with ExitStack() as opened:
            server, self._model = _open(settings, opened)
            self._metrics = TritonMetrics(self._triton, lambda: _readings(server, self._model))
            self._close = opened.pop_all().close

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer the requests in as few lookups as possible. A bad request does not affect the others."""
        exchanges = [_TritonExchange(self._triton, request) for request in requests]
        answer_together(self._model, exchanges, self._model.config.max_batchsize)
        self._metrics.send_if_due()
        return [
            exchange.written if exchange.error is None else self._error(exchange.take_error()) for exchange in exchanges
        ]

    def finalize(self) -> None:
        """Close the model and release its tiers, caches and metrics."""
        try:
            self._metrics.close()
        finally:
            self._close()

    def _error(self, error: Exception) -> Any:
        if not isinstance(error, HotrowError):
            raise error
        kind = self._triton.TritonError
        code = kind.INVALID_ARG if isinstance(error, RequestError) else kind.UNAVAILABLE
        return self._triton.InferenceResponse(error=kind(str(error), code))


class _TritonExchange(Exchange):
    """A request of Triton."""

    def __init__(self, triton: Any, request: Any) -> None:
        super().__init__()
        self._triton = triton
        self._request = request
        self._names: Sequence[str] = request.requested_output_names()

    def read(self, model: ServedModel) -> Any:
        inputs = {}
        for spec in model.signature.inputs:
            tensor = self._triton.get_input_tensor_by_name(self._request, spec.name)
            if tensor is not None:
                inputs[spec.name] = tensor.as_numpy()
            elif not spec.optional:
                raise RequestError(f"inputs: missing {spec.name!r}")
        return model.read(inputs, self._asked())

    def _asked(self) -> Asked:
        """Return what the request asks for. Triton names every output of ``config.pbtxt`` if the request names none."""
        parameters = json.loads(self._request.parameters() or "{}")
        names = [name for name in self._names if name not in (TOP_INDEX, TOP_SCORE)]
        return Asked(names, parameters.get("top_k"), parameters.get("top_output", ""))

    def write(self, model: ServedModel, answer: Any) -> Any:
        outputs, _ = model.outputs(self.question, answer)
        tensors = [self._triton.Tensor(name, outputs[name]) for name in self._names if name in outputs]
        return self._triton.InferenceResponse(output_tensors=tensors)


def _open(settings: Settings, opened: ExitStack) -> tuple[ParameterServer, ServedModel]:
    """Open a model with the tiers of its repository; ``opened`` closes both.

    Raises:
        HotrowError: the model cannot be opened; see ``load_model``.
    """
    if not settings.directory.is_dir():
        raise ConfigError(str(settings.directory), "", "no such version directory")
    ps = read_repository(settings.directory)
    if settings.instances > 1:
        if ps.persistent_db.type == "rocks_db" and not ps.persistent_db.read_only:
            reason = (
                f"{settings.instances} instances, but only one process can write to RocksDB. Use one instance, or fill "
                "the database with `hotrow load` and set read_only in persistent_db of ps.json"
            )
            raise ConfigError(SOURCE, "instance_group", reason)
        ps = with_shared_ram(ps, str(settings.directory.resolve()))
    (config,) = ps.models
    if config.base is not None:
        reason = f"version {config.version} shares the tables of version {config.base.version}, and Triton loads each "
        raise ConfigError(str(settings.directory), "", f"{reason}version alone: give it a version with tables")
    runtime = settings.runtime
    if config.graph_file is None and runtime.engine != "auto":
        reason = f"{runtime.engine}, but the model has no dense network"
        raise ConfigError(SOURCE, "parameters: engine", reason)
    devices = open_devices(runtime.device, config.gpu_cache.devices)  # first, because loading tables may take long
    warn_of_idle_caches([(config, devices)])
    server = opened.enter_context(ParameterServer.from_config(ps))
    loaded = server.model(config.name)  # with the names of its tables
    session = open_model(server, loaded, devices, runtime)
    opened.callback(session.close)
    return server, served_model(session)


def _readings(server: ParameterServer, model: ServedModel) -> Iterator[MetricSample]:
    for name, counters in server.counters().items():
        yield from table_samples(name, counters, server.stores)
    if (updates := server.updates(model.config)) is not None:
        yield from updates.samples()
    yield from model.session.readings()


def _check_numpy(triton: Any) -> None:
    """Refuse a Triton that reads arrays of NumPy 2 wrongly: it repeats a tensor's first value.

    Raises:
        ConfigError: this Triton needs NumPy 1.
    """
    if int(np.__version__.split(".")[0]) < 2:  # and NumPy 1 cannot give this Triton an array of DLPack
        return
    values = np.array([1.5, 2.0], dtype=np.float32)
    if not np.array_equal(triton.Tensor.from_dlpack("probe", values).as_numpy(), values):
        reason = f"this Triton corrupts tensors with NumPy {np.__version__}; install 'numpy<2' in Triton's Python"
        raise ConfigError("Triton", "", reason)
