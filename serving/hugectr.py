"""The calls of HugeCTR v3.0's inference API, with HugeCTR's names and order of arguments."""

import logging
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from kernels.device import open_device
from kernels.errors import DeviceUnavailableError
from serving.config import read_inference_config
from serving.config.clause import MOST_GPUS
from serving.errors import ConfigError
from serving.lookup import LookupSession, open_devices
from serving.parameter_server import ParameterServer
from serving.session import InferenceSession
from serving.storage import MemoryStore

__all__ = ["CreateEmbeddingCache", "CreateParameterServer", "InferenceSession"]

FileName = str | PathLike[str]

_log = logging.getLogger(__name__)


def CreateParameterServer(  # noqa: N802 - HugeCTR's name
    model_config_path: Sequence[FileName], model_name: Sequence[str], i64_input_key: bool
) -> ParameterServer:
    """Load the embedding tables of models into RAM.

    Args:
        model_config_path: inference JSON files.
        model_name: the models' names, in the same order.
        i64_input_key: whether the models' keys are int64; must agree with the configuration files.

    Raises:
        ConfigError: the lists differ in length, a name is given twice, or an argument or a file is invalid.
        ModelFileError: a model file is missing or damaged.
        StoreError: the tables do not fit into memory.
    """
    for argument, value in (("model_config_path", model_config_path), ("model_name", model_name)):
        if isinstance(value, str | PathLike) or not isinstance(value, Sequence):
            raise ConfigError("CreateParameterServer", argument, f"expected a list, got {value!r}")
    if len(model_config_path) != len(model_name):
        reason = f"{len(model_name)} names for {len(model_config_path)} configuration files"
        raise ConfigError("CreateParameterServer", "model_name", reason)
    for index, name in enumerate(model_name):
        if name in model_name[:index]:
            raise ConfigError("CreateParameterServer", "model_name", f"the name {name!r} is given twice")
    _check_switch("CreateParameterServer", "i64_input_key", i64_input_key)
    files = zip(model_config_path, model_name, strict=True)
    configs = [read_inference_config(Path(file), name, i64_input_key) for file, name in files]
    server = ParameterServer([MemoryStore()])
    try:
        for config in configs:
            server.load_model(config)
    except BaseException:
        server.close()
        raise
    return server


def CreateEmbeddingCache(  # noqa: N802 - HugeCTR's name
    parameter_server: ParameterServer,
    cuda_dev_id: int,
    use_gpu_embedding_cache: bool,
    cache_size_percentage: float,
    model_config_path: FileName,
    model_name: str,
    i64_input_key: bool,
    *,
    device: str = "cuda",
) -> LookupSession:
    """Open a model's embeddings for lookup.

    A GPU cache does not change the answers: rows that it misses are read from the parameter server before the request
    is answered. The missed rows of a table are inserted if the request's hit rate was below ``hit_rate_threshold``.
    Without a usable GPU, a warning is logged, and lookups go to the parameter server.

    Args:
        parameter_server: holds the model.
        cuda_dev_id: the session's ``device_id`` must be the same.
        use_gpu_embedding_cache: whether there is a cache on the GPU ``cuda_dev_id``; with False lookups go to the
            parameter server directly.
        cache_size_percentage: part of the rows that a GPU cache holds, above 0 and at most 1; no effect without a GPU
            cache.
        model_config_path: the model's inference JSON.
        model_name: its name in the parameter server.
        i64_input_key: must agree with the parameter server's.
        device: Hotrow's own argument: ``"runner"`` runs the GPU's kernels on the CPU, for tests.

    Raises:
        DeviceUnavailableError: the machine has GPUs, but not the GPU ``cuda_dev_id``.
        DeviceMemoryError: the GPU has too little free memory.
        UnknownModelError: the parameter server does not hold the model.
        ConfigError: an argument is invalid or contradicts the parameter server.
    """
    source = "CreateEmbeddingCache"
    if not isinstance(parameter_server, ParameterServer):
        reason = f"expected what CreateParameterServer returned, got {type(parameter_server).__name__}"
        raise ConfigError(source, "parameter_server", reason)
    if isinstance(cuda_dev_id, bool) or not isinstance(cuda_dev_id, int) or not 0 <= cuda_dev_id < MOST_GPUS:
        reason = f"expected the index of a GPU, 0 to {MOST_GPUS - 1}, got {cuda_dev_id!r}"
        raise ConfigError(source, "cuda_dev_id", reason)
    _check_switch(source, "use_gpu_embedding_cache", use_gpu_embedding_cache)
    _check_switch(source, "i64_input_key", i64_input_key)
    share = cache_size_percentage
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
        raise ConfigError(source, "cache_size_percentage", f"expected 0 to 1, got {share!r}")
    loaded = parameter_server.model(model_name)
    if i64_input_key != (loaded.key_type == "I64"):
        reason = f"{i64_input_key}, but the parameter server loaded {model_name!r} with {loaded.key_type} keys"
        raise ConfigError(source, "i64_input_key", reason)
    config = read_inference_config(Path(model_config_path), model_name, i64_input_key)
    if config.tables != loaded.tables:
        reason = f"has other tables than the parameter server loaded as {model_name!r} from {loaded.source}"
        raise ConfigError(source, "model_config_path", reason)
    if not use_gpu_embedding_cache:
        return LookupSession(parameter_server, config, cuda_dev_id)
    if device not in ("cuda", "runner"):
        raise ConfigError(source, "device", f"expected cuda or runner, got {device!r}")
    if device == "cuda":
        try:
            open_device("auto")
        except DeviceUnavailableError as err:
            _log.warning("%s: model %s has no GPU cache, and the tiers answer: %s", source, model_name, err)
            return LookupSession(parameter_server, config, cuda_dev_id)
    from serving.lookup.cached_session import CachedLookupSession  # only a device needs it

    (opened,) = open_devices(f"{device}:{cuda_dev_id}", ())
    settings = config.gpu_cache.model_copy(update={"wanted": True, "size_ratio": float(cache_size_percentage)})
    return CachedLookupSession(parameter_server, config.model_copy(update={"gpu_cache": settings}), opened, cuda_dev_id)


def _check_switch(source: str, argument: str, value: object) -> None:
    """Refuse everything except a bool: ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(source, argument, f"expected True or False, got {value!r}")
