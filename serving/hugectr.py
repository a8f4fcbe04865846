"""The calls of HugeCTR v3.0's inference API, by their names and in their order of arguments."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from kernels.errors import DeviceUnavailableError
from serving.config import read_inference_config
from serving.errors import ConfigError
from serving.lookup import LookupSession
from serving.parameter_server import ParameterServer
from serving.session import InferenceSession
from serving.storage import MemoryStore

__all__ = ["CreateEmbeddingCache", "CreateParameterServer", "InferenceSession"]

FileName = str | PathLike[str]


def CreateParameterServer(  # noqa: N802 - HugeCTR's name
    model_config_path: Sequence[FileName], model_name: Sequence[str], i64_input_key: bool
) -> ParameterServer:
    """Load the embedding tables of models into RAM.

    Args:
        model_config_path: inference JSON files.
        model_name: what the models are called, in the same order.
        i64_input_key: whether the models' keys are int64; must agree with what a file says.

    Raises:
        ConfigError: the lists differ in length, a name is taken twice, or a file cannot be accepted.
        ModelFileError: a model file is missing or damaged.
        StoreError: the tables do not fit the memory.
    """
    for argument, value in (("model_config_path", model_config_path), ("model_name", model_name)):
        if isinstance(value, str | PathLike) or not isinstance(value, Sequence):
            raise ConfigError("CreateParameterServer", argument, f"expected a list, got {value!r}")
    if len(model_config_path) != len(model_name):
        reason = f"{len(model_name)} names for {len(model_config_path)} configuration files"
        raise ConfigError("CreateParameterServer", "model_name", reason)
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
) -> LookupSession:
    """Open a model's embeddings for lookup.

    Args:
        parameter_server: holds the model.
        cuda_dev_id: the session's ``device_id`` must be the same.
        use_gpu_embedding_cache: True asks for a GPU; with False lookups go to the parameter server directly.
        cache_size_percentage: share of the rows that a GPU cache holds, 0 to 1; no effect without one.
        model_config_path: the model's inference JSON.
        model_name: its name in the parameter server.
        i64_input_key: must agree with the parameter server's.

    Raises:
        DeviceUnavailableError: a GPU cache is asked for, and there is none.
        UnknownModelError: the parameter server does not hold the model.
        ConfigError: an argument cannot be accepted, or contradicts the parameter server.
    """
    source = "CreateEmbeddingCache"
    if not isinstance(parameter_server, ParameterServer):
        reason = f"expected what CreateParameterServer returned, got {type(parameter_server).__name__}"
        raise ConfigError(source, "parameter_server", reason)
    if not isinstance(cache_size_percentage, int | float) or not 0.0 <= cache_size_percentage <= 1.0:
        raise ConfigError(source, "cache_size_percentage", f"expected 0 to 1, got {cache_size_percentage!r}")
    held = parameter_server.model(model_name)
    if i64_input_key != (held.key_type == "I64"):
        reason = f"{i64_input_key}, but the parameter server loaded {model_name!r} with {held.key_type} keys"
        raise ConfigError(source, "i64_input_key", reason)
    config = read_inference_config(Path(model_config_path), model_name, i64_input_key)
    if config.tables != held.tables:
        reason = f"other tables than those that the parameter server loaded as {model_name!r} from {held.graph_file}"
        raise ConfigError(source, "model_config_path", reason)
    if use_gpu_embedding_cache:
        raise DeviceUnavailableError(
            "use_gpu_embedding_cache=True: this version of Hotrow looks embeddings up on the CPU only; pass False"
        )
    return LookupSession(parameter_server, config, cuda_dev_id)
