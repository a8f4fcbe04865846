"""The whole of one model: from a request's tensors to probabilities."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from kernels.host import RowDtype
from serving.batch import Batch, read_batch
from serving.calibration import look_up_calibration, refuse_idle_calibration
from serving.config import ModelConfig, read_inference_config, read_model, read_model_directory, with_row_dtype
from serving.dense.calibration import DEFAULT_TOLERANCE
from serving.dense.files import open_dense
from serving.dense.network import Engine
from serving.errors import ConfigError, RequestError, UnknownModelError
from serving.lookup import LookupSession
from serving.parameter_server import ParameterServer
from serving.storage import MemoryStore

_MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer to one batch.

    Attributes:
        probabilities: float32[B, L].
        defaulted_keys: keys that no tier holds, answered with their table's default value.
    """

    probabilities: NDArray[np.float32]
    defaulted_keys: int


class InferenceSession:
    """A model that answers requests. May be used from any thread, by several at once.

    Attributes:
        config: the model.
        graph: its layer graph; of a network that is an ONNX file, its inputs.
        engine: what runs the dense network, ``"numpy"``, ``"onnx"`` or ``"int8"``.
        quantization: of the engine int8, what was measured when it was opened; else None.
        embedding_cache: where its embeddings are looked up.
    """

    def __init__(
        self,
        config: str | Path | ModelConfig,
        device_id: int,
        embedding_cache: LookupSession,
        engine: Engine = "auto",
        threads: int = 1,
        calibration: str | Path | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
    ) -> None:
        """Open the dense network beside the embeddings.

        Args:
            config: the model's v3.0 inference JSON, its version directory, or its configuration.
            device_id: the same as the embedding cache's.
            embedding_cache: what ``CreateEmbeddingCache`` returned, of the same model.
            engine: see ``open_network``.
            threads: of one dense network call in ONNX Runtime.
            calibration: of the engine int8, the samples to measure it on; see ``look_up_calibration``.
            tolerance: of the engine int8, the largest difference of a probability on these samples.

        Raises:
            ConfigError: the configuration cannot be accepted, or is not the embedding cache's; the engine int8 has no
                calibration or errs beyond the tolerance; another engine has one; ``engine`` or ``threads`` is none.
            ModelFileError: the dense weights or the ONNX network are missing, damaged, or not the graph's.
            MissingExtraError: the engine, or the model's ONNX network, needs a package that is not installed.
        """
        if not isinstance(embedding_cache, LookupSession):
            reason = f"expected what CreateEmbeddingCache returned, got {type(embedding_cache).__name__}"
            raise ConfigError("InferenceSession", "embedding_cache", reason)
        _check_runtime("InferenceSession", engine, threads)
        config = _read_config(config, embedding_cache.config)
        _check_cache(config, device_id, embedding_cache)
        self.config = config
        self.embedding_cache = embedding_cache
        files = (config.graph_file, config.dense_file, config.onnx_file)
        refuse_idle_calibration(calibration, engine)
        measure = look_up_calibration(embedding_cache, calibration, tolerance) if engine == "int8" else None
        self.graph, self._network = open_dense(*files, engine, threads, measure)
        self.quantization = self._network.quantization
        self.engine = self._network.engine
        self._release: Callable[[], None] | None = None  # set by load_model

    def predict(
        self, dense_feature: Any, embeddingcolumns: Any, row_ptrs: Any, i64_input_key: bool | None = None
    ) -> NDArray[np.float32]:
        """Predict from lists or arrays; ``read_batch`` tells their forms.

        Args:
            dense_feature: dense features, sample by sample.
            embeddingcolumns: keys.
            row_ptrs: CSR offsets of the slots into the keys.
            i64_input_key: if given, must agree with the model's key type.

        Returns:
            probabilities, float32[B, L].

        Raises:
            RequestError: the tensors are not a request for this model.
            StoreError: a tier did not answer, and no other holds one of the keys.
        """
        if i64_input_key is not None and i64_input_key != (self.config.key_type == "I64"):
            raise RequestError(f"i64_input_key={i64_input_key}, but the model's keys are {self.config.key_type}")
        return self.predict_batch(read_batch(self.config, dense_feature, embeddingcolumns, row_ptrs)).probabilities

    def predict_batch(self, batch: Batch) -> Prediction:
        """Predict from a checked batch.

        Raises:
            RequestError: the batch has fewer samples than the graph can work on, or the answer to a sample is no
                finite number.
            StoreError: a tier did not answer, and no other holds one of the keys.
        """
        if too_few := self.graph.too_few(batch.samples):
            raise RequestError(too_few)
        looked_up = self.embedding_cache.lookup_pooled(batch)
        probabilities = self._network(batch.dense, looked_up.embeddings)
        if not isfinite(probabilities.sum()):  # one pass; what is not finite makes the sum so
            raise _not_finite(probabilities)
        return Prediction(probabilities, looked_up.defaulted_keys)

    def close(self) -> None:
        """Give back what ``load_model`` opened for this session; requests in hand should have ended.

        Closing twice is allowed.
        """
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def load_model(
    directory: str | Path,
    parameter_server: ParameterServer | None = None,
    engine: Engine = "auto",
    threads: int = 1,
    calibration: str | Path | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    row_dtype: RowDtype | Mapping[str, RowDtype] | None = None,
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

    Raises:
        ConfigError: the configuration cannot be accepted, the model is already loaded in ``parameter_server``, or the
            engine int8 has no calibration or errs beyond the tolerance; ``engine``, ``threads`` or ``row_dtype`` is
            none.
        ModelFileError: a file is missing or damaged.
        MissingExtraError: the engine, or the model's ONNX network, needs a package that is not installed.
        StoreError: the embeddings cannot be held.
    """
    if not isinstance(parameter_server, ParameterServer | None):
        reason = f"expected a ParameterServer or None, got {type(parameter_server).__name__}"
        raise ConfigError("load_model", "parameter_server", reason)
    _check_runtime("load_model", engine, threads)
    config = read_model(directory)
    if row_dtype is not None:
        config = with_row_dtype(config, row_dtype, "load_model")
    server = ParameterServer([MemoryStore()]) if parameter_server is None else parameter_server
    release = server.close if parameter_server is None else partial(_unload, server, config)
    server.load_model(config)
    try:
        lookup = LookupSession(server, config)
        session = InferenceSession(config, 0, lookup, engine, threads, calibration, tolerance)
    except BaseException:
        release()
        raise
    session._release = release
    return session


def _unload(server: ParameterServer, config: ModelConfig) -> None:
    # Whoever unloaded it before, or closed the server, has done all there is to do.
    with suppress(UnknownModelError):
        server.unload_model(config.name, config.version)


def _not_finite(probabilities: NDArray[np.float32]) -> RequestError:
    sample = int(np.argmax(~np.isfinite(probabilities).all(axis=1)))
    return RequestError(
        f"sample {sample}: the network's answer is {probabilities[sample].tolist()}, no finite number: "
        "its dense features are too large, or a row or a weight of the model is not finite"
    )


def _read_config(config: str | Path | ModelConfig, of_cache: ModelConfig) -> ModelConfig:
    if isinstance(config, ModelConfig):
        return config
    path = Path(config)
    if path.is_dir():
        return read_model_directory(path)
    return read_inference_config(path, of_cache.name, of_cache.key_type == "I64")


def _check_runtime(source: str, engine: Any, threads: Any) -> None:
    """Check the arguments of ``source`` that say how the dense network is run, before anything is loaded."""
    if engine not in get_args(Engine):
        raise ConfigError(source, "engine", f"expected auto, numpy, onnx or int8, got {engine!r}")
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS:
        raise ConfigError(source, "threads", f"expected a whole number from 1 to {_MOST_THREADS}, got {threads!r}")


def _check_cache(config: ModelConfig, device_id: int, cache: LookupSession) -> None:
    if device_id != cache.device_id:
        reason = f"device_id {device_id}, but the embedding cache was created for device {cache.device_id}"
        raise ConfigError(str(config.graph_file), "", reason)
    if (config.tables, config.key_type) != (cache.config.tables, cache.config.key_type):
        reason = f"not the model of the embedding cache, {cache.config.name!r} from {cache.config.graph_file}"
        raise ConfigError(str(config.graph_file), "", reason)
