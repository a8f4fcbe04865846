"""Opens a model, or the session of one that is loaded, with what it needs; closing the session gives it back."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from kernels.device import Device
from kernels.host import RowDtype
from serving.config import ModelConfig, read_model, with_row_dtype
from serving.dense.calibration import DEFAULT_TOLERANCE
from serving.dense.network import Engine
from serving.errors import ConfigError, UnknownModelError
from serving.lookup import check_device_name, open_devices, open_lookups, warn_of_idle_caches
from serving.parameter_server import ParameterServer
from serving.session import InferenceSession, check_runtime
from serving.storage import MemoryStore


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
    """Open one model, ready to predict. Closing the session gives back all that was opened for it.

    Args:
        directory: a version directory, a model directory, of which the newest complete version is taken, or a v3.0
            inference JSON, after which the model is then called.
        parameter_server: what is to hold the model's embeddings; None: RAM, as much as the model needs.
        engine: see ``open_network``.
        threads: of one dense network call in ONNX Runtime.
        calibration: see ``InferenceSession``.
        tolerance: see ``InferenceSession``.
        row_dtype: the form in which RAM keeps the rows (``kernels.host.HostTable``), of all tables, or by the names of
            some; None: float32.
        device: where embeddings are cached, and with the engine ``"auto"`` the dense network runs: ``"cpu"``;
            ``"cuda:0"``; ``"auto"``: a GPU, where there is one; see ``open_devices``.

    Raises:
        ConfigError: the configuration cannot be accepted, the model is already loaded in ``parameter_server``, or the
            engine int8 has no calibration or errs beyond the tolerance; ``engine``, ``threads`` or ``row_dtype`` is
            none.
        DeviceUnavailableError: the GPU is not there, or what is needed to use it; the message names that.
        DeviceMemoryError: the GPU has too little free memory for the caches.
        ModelFileError: a file is missing or damaged.
        MissingExtraError: the engine, or the model's ONNX network, needs a package that is not installed.
        StoreError: the embeddings cannot be held.
    """
    if not isinstance(parameter_server, ParameterServer | None):
        reason = f"expected a ParameterServer or None, got {type(parameter_server).__name__}"
        raise ConfigError("load_model", "parameter_server", reason)
    check_runtime("load_model", engine, threads)
    check_device_name(device, "load_model: device")
    config = read_model(directory)
    if row_dtype is not None:
        config = with_row_dtype(config, row_dtype, "load_model")
    devices = open_devices(device, config.gpu_cache.devices)  # before the tables are loaded, which may take long
    warn_of_idle_caches([(config, devices)])
    server = ParameterServer([MemoryStore()]) if parameter_server is None else parameter_server
    server.load_model(config)
    held = server.model(config.name, config.version)
    release = server.close if parameter_server is None else partial(_unload, server, held)
    try:
        session = open_session(server, config, devices, engine, threads, calibration, tolerance)
    except BaseException:
        release()
        raise
    session.on_close(release)
    return session


def open_session(
    server: ParameterServer,
    config: ModelConfig,
    devices: Sequence[Device] = (),
    engine: Engine = "auto",
    threads: int = 1,
    calibration: str | Path | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
) -> InferenceSession:
    """Open the session of a loaded model, with its caches. Closing the session gives these back.

    Args:
        server: holds the model.
        config: the model.
        devices: see ``open_lookups``.
        engine: see ``open_network``.
        threads: of one dense network call in ONNX Runtime.
        calibration: see ``InferenceSession``.
        tolerance: see ``InferenceSession``.

    Raises:
        ConfigError: see ``InferenceSession`` and ``open_lookups``, and for other errors.
    """
    lookups = open_lookups(server, config, devices)
    with ExitStack() as opened:
        for lookup in lookups:
            opened.callback(lookup.close)
        session = InferenceSession(config, 0, lookups, engine, threads, calibration, tolerance)
        session.on_close(opened.pop_all().close)
    return session


def _unload(server: ParameterServer, held: ModelConfig) -> None:
    # Whoever unloaded it before, or closed the server, has done all there is to do; a later load is another session's.
    with suppress(UnknownModelError):
        server.unload_model(held.name, held.version, held)
