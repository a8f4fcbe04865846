"""Opens a model, or the session of a loaded model, with everything it needs; closing the session releases it all."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from os.path import isdir  # False for an impossible path, where Path.is_dir raises
from pathlib import Path
from threading import Lock
from time import sleep
from typing import cast

from kernels.device import Device
from kernels.host import RowDtype
from serving.config import ModelConfig, ParameterServerConfig, read_model, read_tiers, with_row_dtype
from serving.errors import ConfigError, StreamError, UnknownModelError
from serving.lookup import LookupSession, open_devices, open_lookups, warn_of_idle_caches
from serving.option_values import DEFAULT_TOLERANCE, MAX_CANDIDATES, Engine, check_device_name
from serving.parameter_server import ParameterServer
from serving.parameter_server.preflight import check_hot_keys
from serving.session import InferenceSession, LookupOnlySession, check_runtime
from serving.storage import MemoryStore
from serving.stream.log_state import behind

Release = Callable[[], None]
_LOOK_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Runtime:
    """How models run.

    Attributes:
        engine: what runs dense networks; see ``open_network``.
        threads: how many threads work on one dense network call in ONNX Runtime.
        calibration: the samples on which the engine int8 is measured; None: each model has a file of its own.
        tolerance: the largest error of a probability that the engine int8 may have on these samples.
        device: where embeddings are cached; see ``open_devices``.
        max_candidates: the most candidates of a request; see ``InferenceSession``.
        warm_up_from: the folder of a request log; a repository's versions answer its newest requests before they serve.
    """

    engine: Engine = "auto"
    threads: int = 1
    calibration: str | Path | None = None
    tolerance: float = DEFAULT_TOLERANCE
    device: str = "cpu"
    max_candidates: int = MAX_CANDIDATES
    warm_up_from: Path | None = None


def open_model(
    server: ParameterServer, config: ModelConfig, devices: Sequence[Device] = (), runtime: Runtime | None = None
) -> InferenceSession | LookupOnlySession:
    """Open the session of a model that ``server`` holds, with caches on ``devices``; closing it frees the caches.

    Args:
        server: holds the model's embeddings.
        config: the model; ``server`` holds the tables of ``config.of_tables``.
        devices: what ``open_devices`` returned.
        runtime: how the dense network runs; None: the defaults.

    Raises:
        HotrowError: see ``load_model``.
    """
    lookups = open_lookups(server, config.of_tables, devices)
    with ExitStack() as opened:
        for lookup in lookups:
            opened.callback(lookup.close)
        session = open_session(config, lookups, runtime)
        session.on_close(opened.pop_all().close)
    return session


def open_session(
    config: ModelConfig, lookups: Sequence[LookupSession], runtime: Runtime | None = None
) -> InferenceSession | LookupOnlySession:
    """Open the session of a model on ``lookups`` of its tables, which the caller closes; see ``open_model``."""
    if config.graph_file is None:
        return LookupOnlySession(lookups)
    runtime = runtime or Runtime()
    return InferenceSession(
        config,
        0,
        lookups,
        runtime.engine,
        runtime.threads,
        runtime.calibration,
        runtime.tolerance,
        runtime.max_candidates,
    )


def position_to_reach(server: ParameterServer, config: ModelConfig) -> str:
    """What the loaded tables of a version have not reached of the positions that its manifest states; empty if nothing.

    A version with tables of its own has the rows of its positions.

    Raises:
        ConfigError: the tables cannot reach a position, because this process reads no updates for them.
    """
    if config.base is None:
        return ""
    updates = server.updates(config.base)
    if updates is not None:
        return updates.behind(config)
    of_base = () if config.base.stream is None else config.base.stream.positions
    missing = "" if config.stream is None else behind(dict(of_base), dict(config.stream.positions))
    if missing:
        reason = (
            f"needs tables of version {config.base.version} at {missing}, but without update_source they stay there"
        )
        raise ConfigError(config.source, "", f"version {config.version} {reason}")
    return ""


def load_model(
    directory: str | Path,
    parameter_server: ParameterServer | None = None,
    engine: Engine = "auto",
    threads: int = 1,
    calibration: str | Path | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    row_dtype: RowDtype | Mapping[str, RowDtype] | None = None,
    device: str = "cpu",
) -> InferenceSession:
    """Open one model, ready to predict. Closing the session releases everything that was opened for it.

    A version that shares the tables of another version is opened when these have reached the position that it states.
    The model's rows are in the tiers of the repository's ``ps.json``, next to the models. All sessions of a process
    share one parameter server per ``ps.json``. Without a ``ps.json`` the rows are in RAM.

    Args:
        directory: a version directory, a model directory or a v3.0 inference JSON. The newest version of a
            model directory is opened. The inference JSON names the model.
        parameter_server: holds the model's embeddings; ``ps.json`` is then not read.
        engine: see ``open_network``.
        threads: how many threads work on one dense network call in ONNX Runtime.
        calibration: see ``InferenceSession``.
        tolerance: see ``InferenceSession``.
        row_dtype: the form of the rows in RAM (``kernels.host.HostTable``), for all tables or by table name; None: the
            form that ``ps.json`` names, float32 by default.
        device: where embeddings are cached: ``"cpu"``, ``"cuda:0"``, or ``"auto"`` for a GPU if there is one; see
            ``open_devices``. With the engine ``"auto"`` the dense network runs there too.

    Raises:
        ConfigError: the configuration or ``ps.json`` is invalid; the parameter server has the model already, in another
            version or form; the engine int8 has no calibration or exceeds the tolerance; an argument is invalid.
        DeviceUnavailableError: there is no such GPU, or a package that it needs is missing; the message names it.
        DeviceMemoryError: the GPU has too little free memory for the caches.
        ModelFileError: a file is missing or damaged.
        MissingExtraError: the engine, or the model's ONNX network, needs a package that is not installed.
        StoreError: a tier cannot hold the embeddings.
        StreamError: the version waits for a position, and the updates have stopped.
    """
    if not isinstance(parameter_server, ParameterServer | None):
        reason = f"expected a ParameterServer or None, got {type(parameter_server).__name__}"
        raise ConfigError("load_model", "parameter_server", reason)
    check_runtime("load_model", engine, threads)
    check_device_name(device, "load_model: device")
    config = read_model(directory)
    ps = read_tiers(directory, config) if parameter_server is None and isdir(directory) else None
    if ps is not None:
        (config,) = ps.models
    if row_dtype is not None:
        config = with_row_dtype(config, row_dtype, "load_model")
    devices = open_devices(device, config.gpu_cache.devices)  # first, because loading tables may take long
    warn_of_idle_caches([(config, devices)])
    if ps is not None:
        server, config, release = _load_shared(ps, config)
    else:
        server, config, release = _load(config, parameter_server)
    try:
        runtime = Runtime(engine, threads, calibration, tolerance)
        _wait_for_position(server, config)
        session = cast(InferenceSession, open_model(server, config, devices, runtime))  # it has a dense network
    except BaseException:
        release()
        raise
    session.on_close(release)
    return session


def _wait_for_position(server: ParameterServer, config: ModelConfig) -> None:
    """Wait until the loaded tables of a version have reached the positions that its manifest states.

    Raises:
        ConfigError: see ``position_to_reach``.
        StreamError: the updates have stopped.
    """
    while missing := position_to_reach(server, config):
        updates = server.updates(config.of_tables)
        if updates is not None and updates.counters.fault:
            reason = f"version {config.version} needs its tables at {missing}, but gets no updates"
            raise StreamError(f"model {config.name!r}", f"{reason}: {updates.counters.fault}")
        sleep(_LOOK_INTERVAL_S)


def _load(config: ModelConfig, given: ParameterServer | None) -> tuple[ParameterServer, ModelConfig, Release]:
    """Load the model into the given server, or into a new server in RAM."""
    server = ParameterServer([MemoryStore()]) if given is None else given
    held = _held(server, config) if config.base is not None else None
    loaded = server.load_model(config) if held is None else held
    release = server.close if given is None else partial(_unload, server, loaded) if held is None else _nothing
    return server, _on(loaded, config), release


def _held(server: ParameterServer, config: ModelConfig) -> ModelConfig | None:
    """The version that brings a model's tables, if it is loaded from the same files."""
    of_tables = config.of_tables
    tag = {"table_tag": of_tables.table_tag}  # a loaded version may have kept the tables of an earlier release
    return next((model for model in reversed(server.models()) if model.model_copy(update=tag) == of_tables), None)


def _on(loaded: ModelConfig, config: ModelConfig) -> ModelConfig:
    """The model on the loaded tables."""
    return loaded if config.base is None else config.on_tables_of(loaded)


def _nothing() -> None:
    """Leave the tables to the session that has loaded them."""


class _SharedServer:
    """The parameter server of one ``ps.json``, which is open while this process has sessions of its models."""

    def __init__(self) -> None:
        self.lock = Lock()  # guards the fields below; held during a load, so each model is loaded once
        self.server: ParameterServer | None = None
        self.sessions: Counter[str] = Counter()  # by the name of the first table, which only one loaded model has

    def load(self, ps: ParameterServerConfig, config: ModelConfig) -> tuple[ParameterServer, ModelConfig, Release]:
        """Load the model, unless another session has loaded it; return also what releases it."""
        with self.lock:
            if self.server is None:
                self.server = ParameterServer.from_config(ps.model_copy(update={"models": ()}))
            server = self.server
            try:
                loaded = _held(server, config) or server.load_model(config)
            except BaseException:
                self._close_unused()
                raise
            self.sessions[loaded.full_name(loaded.tables[0])] += 1
        return server, _on(loaded, config), partial(self._release, server, loaded)

    def _release(self, server: ParameterServer, config: ModelConfig) -> None:
        model = config.full_name(config.tables[0])
        with self.lock:
            self.sessions[model] -= 1
            if not self.sessions[model]:
                _unload(server, config)
            self._close_unused()

    def _close_unused(self) -> None:
        if self.server is not None and not self.sessions.total():
            server, self.server = self.server, None
            server.close()


_shared: dict[str, _SharedServer] = {}  # by ps.json


def _load_shared(ps: ParameterServerConfig, config: ModelConfig) -> tuple[ParameterServer, ModelConfig, Release]:
    """Load the model into the server of its repository, unless another session has loaded it."""
    check_hot_keys(ps)
    # ``setdefault`` is one step, so all threads get the same server.
    return _shared.setdefault(str(Path(ps.source).resolve()), _SharedServer()).load(ps, config)


def _unload(server: ParameterServer, config: ModelConfig) -> None:
    # The model may be unloaded already, the server may be closed, and a later load belongs to another session.
    with suppress(UnknownModelError):
        server.unload_model(config.name, config.version, config)
