"""HugeCTR v3.0's inference JSON: an ``inference`` clause next to the ``layers``."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from serving.config.clause import INTEGERS, Clause, FilePath, Location, read_clause
from serving.config.gpu import ONE_PRECISION, GpuCacheConfig, GpuNetworkConfig, precision_of
from serving.config.models import ModelConfig, check_key_bits, check_model_name, onnx_next_to, tables_of
from serving.model.graph import is_network_file, parse_graph
from serving.model.sparse_rows import KeyType
from serving.model.strict_json import read_json


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class InferenceClause(Clause):
    """The ``inference`` clause (source: the HugeCTR v3.0 inference API).

    Attributes:
        mixed_precision: a GPU's dense network computes in half precision; the number scaled gradients.
        algorithm_search: no effect: cuBLAS searches its algorithms itself.
        label: no effect: the graph says how many labels there are.
    """

    max_batchsize: int = Field(default=1024, ge=1)
    hit_rate_threshold: float = Field(default=0.5, ge=0.0, le=1.0)
    embedding_cache_key_bits: Annotated[Literal[32, 64], INTEGERS] = 64
    input_key_type: KeyType | None = None
    dense_model_file: FilePath
    sparse_model_file: Annotated[list[FilePath], BeforeValidator(_as_list)]
    mixed_precision: Annotated[Literal[128, 256, 512, 1024], INTEGERS] | None = None
    enable_tf32_compute: Annotated[bool, ONE_PRECISION] = False
    algorithm_search: bool = True
    cuda_graph: bool = True
    label: int | None = Field(default=None, ge=1)


class InferenceDocument(Clause):
    """The whole file; the graph's own parser checks the layers, and nobody reads the other clauses."""

    inference: InferenceClause
    layers: list[Any]
    solver: Any = None
    optimizer: Any = None
    model_name: Any = None


def read_inference_config(file: str | Path, name: str, i64_input_key: bool | None = None) -> ModelConfig:
    """Read a v3.0 inference JSON.

    Args:
        file: the JSON file.
        name: what the model is called; the file does not say.
        i64_input_key: whether keys are int64. It decides where the file has no ``input_key_type`` (None: uint32 keys,
            HugeCTR's default), and must agree with the file otherwise.

    Raises:
        ConfigError: the file is not such a document; the message has the JSON path.
    """
    return _read(Path(file), check_model_name(name, str(file)), 0, i64_input_key)


def name_after(file: Path) -> str:
    """The name of the model of an inference JSON, which does not say it: the file's stem."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", file.stem)[:120]


def read_version_graph(file: Path, name: str, version: int) -> ModelConfig:
    """Read the ``graph.json`` of version ``version`` of model ``name``; it has the same form."""
    return _read(file, check_model_name(name, str(file)), version, None)


def _read(file: Path, name: str, version: int, i64_input_key: bool | None) -> ModelConfig:
    document = read_json(file)
    clause = read_clause(InferenceDocument, document, file).inference
    graph = parse_graph(document, str(file), inputs_only=is_network_file(clause.dense_model_file))
    at = Location(str(file), "inference")
    dense_file = clause.dense_model_file.resolve()
    key_type = _key_type(clause.input_key_type, i64_input_key, at)
    check_key_bits(clause.embedding_cache_key_bits, key_type, at)
    return ModelConfig(
        name=name,
        version=version,
        graph_file=file,
        dense_file=dense_file,
        onnx_file=onnx_next_to(dense_file),
        tables=tables_of(graph, clause.sparse_model_file, "sparse_model_file", at),
        key_type=key_type,
        max_batchsize=clause.max_batchsize,
        dense_dim=graph.dense_dim,
        label_dim=graph.label_dim,
        gpu_cache=GpuCacheConfig(
            hit_rate_threshold=clause.hit_rate_threshold,
            fill="below_threshold",
            key_bits=clause.embedding_cache_key_bits,
        ),
        gpu_network=GpuNetworkConfig(
            precision=precision_of(clause.mixed_precision is not None, clause.enable_tf32_compute),
            captures_graphs=clause.cuda_graph,
        ),
    )


def _key_type(declared: KeyType | None, i64_input_key: bool | None, at: Location) -> KeyType:
    asked: KeyType | None = None if i64_input_key is None else "I64" if i64_input_key else "I32"
    if declared and asked and declared != asked:
        reason = f"the file says {declared!r}, but the caller gave i64_input_key={i64_input_key}"
        raise at.error("input_key_type", reason)
    return declared or asked or "I32"
