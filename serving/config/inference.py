"""HugeCTR v3.0's inference JSON, which has an ``inference`` clause and the ``layers``."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from serving.config.clause import INTEGERS, Clause, FilePath, Location, read_clause
from serving.config.gpu import ONE_PRECISION, GpuCacheConfig, GpuNetworkConfig, precision_of
from serving.config.models import (
    ModelConfig,
    check_key_bits,
    check_model_name,
    manifest_next_to,
    onnx_next_to,
    refuse_shared_tables,
    slot_keys_of,
    stream_of,
    tables_of,
)
from serving.model.graph import is_network_file, parse_graph
from serving.model.regular_file import real_path
from serving.model.sparse_rows import KeyType
from serving.model.strict_json import read_json


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class InferenceClause(Clause):
    """The ``inference`` clause (source: the HugeCTR v3.0 inference API).

    Attributes:
        mixed_precision: the dense network computes in half precision on a GPU. The number scaled gradients.
        algorithm_search: no effect, because cuBLAS searches its algorithms itself.
        label: no effect, because the graph has the number of labels.
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
    """The whole file. The parser of graphs checks the layers, and the other clauses are ignored."""

    inference: InferenceClause
    layers: list[Any]
    solver: Any = None
    optimizer: Any = None
    model_name: Any = None


def read_inference_config(file: str | Path, name: str, i64_input_key: bool | None = None) -> ModelConfig:
    """Read a v3.0 inference JSON.

    Args:
        file: the JSON file.
        name: the model's name, which the file does not have.
        i64_input_key: whether keys are int64. If the file has ``input_key_type``, both must agree. If neither is
            given, keys are uint32, as in HugeCTR.

    Raises:
        ConfigError: the file cannot be accepted. The message has the JSON path.
    """
    config = _read(Path(file), check_model_name(name, str(file)), 0, i64_input_key)
    refuse_shared_tables(Path(file), manifest_next_to(Path(file)))
    return config


def name_after(file: Path) -> str:
    """Return the stem of an inference JSON as its model's name, which the file does not have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", file.stem)[:120]


def read_version_graph(file: Path, name: str, version: int) -> ModelConfig:
    """Read the ``graph.json`` of version ``version`` of model ``name``, which has the same form."""
    return _read(file, check_model_name(name, str(file)), version, None)


def _read(file: Path, name: str, version: int, i64_input_key: bool | None) -> ModelConfig:
    document = read_json(file)
    clause = read_clause(InferenceDocument, document, file).inference
    graph = parse_graph(document, str(file), inputs_only=is_network_file(clause.dense_model_file))
    at = Location(str(file), "inference")
    dense_file = real_path(clause.dense_model_file)
    key_type = _key_type(clause.input_key_type, i64_input_key, at)
    check_key_bits(clause.embedding_cache_key_bits, key_type, at)
    manifest = manifest_next_to(file)
    slot_keys = slot_keys_of(graph, file, key_type, manifest)
    return ModelConfig(
        name=name,
        version=version,
        graph_file=file,
        dense_file=dense_file,
        onnx_file=onnx_next_to(dense_file),
        tables=tables_of(graph, clause.sparse_model_file, "sparse_model_file", at, slot_keys),
        key_type=key_type,
        slot_keys=slot_keys,
        max_batchsize=clause.max_batchsize,
        dense_dim=graph.dense_dim,
        label_dim=graph.label_dim,
        dense_names=graph.dense_names,
        label_names=graph.label_names,
        label_kinds=graph.label_kinds,
        stated_outputs=graph.stated_outputs,
        gpu_cache=GpuCacheConfig(
            hit_rate_threshold=clause.hit_rate_threshold,
            fill="below_threshold",
            key_bits=clause.embedding_cache_key_bits,
        ),
        gpu_network=GpuNetworkConfig(
            precision=precision_of(clause.mixed_precision is not None, clause.enable_tf32_compute),
            captures_graphs=clause.cuda_graph,
        ),
        stream=stream_of(manifest),
    )


def _key_type(declared: KeyType | None, i64_input_key: bool | None, at: Location) -> KeyType:
    asked: KeyType | None = None if i64_input_key is None else "I64" if i64_input_key else "I32"
    if declared and asked and declared != asked:
        reason = f"the file says {declared!r}, but the caller gave i64_input_key={i64_input_key}"
        raise at.error("input_key_type", reason)
    return declared or asked or "I32"
