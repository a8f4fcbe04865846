"""HPS's ``ps.json``: the models one parameter server holds, and its storage tiers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from serving.config.assembly import Place, build_tables, check_model_name, onnx_beside
from serving.config.hps_keys import PERSISTENT_TYPES, UNSUPPORTED, VOLATILE_TYPES
from serving.config.records import (
    ModelConfig,
    ParameterServerConfig,
    PersistentDbConfig,
    TableConfig,
    VolatileDbConfig,
)
from serving.config.validation import Clause, read_clause
from serving.errors import ConfigError
from serving.model.graph import Graph, read_model_graph
from serving.model.json_fields import LARGEST_FLOAT32
from serving.model.names import TABLE_NAME
from serving.model.sparse_rows import KeyType
from serving.model.strict_json import read_json

FileName = Annotated[str, Field(min_length=1)]
TableName = Annotated[str, Field(pattern=rf"^{TABLE_NAME.pattern}$")]
V = TypeVar("V")


def _unquoted(value: Any) -> Any:
    """Return the number or truth value that a string holds: HugeCTR's Triton backend reads ``"64"`` as 64."""
    if not isinstance(value, str) or len(value) > 32:
        return value
    try:
        parsed = json.loads(value.lower())  # it reads "True", too
    except ValueError:
        return value
    return parsed if isinstance(parsed, (bool, int, float)) else value


_Unquoted = BeforeValidator(_unquoted)
Switch = Annotated[bool, _Unquoted]
Float32 = Annotated[float, _Unquoted, Field(ge=-LARGEST_FLOAT32, le=LARGEST_FLOAT32)]
Share = Annotated[float, _Unquoted, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, _Unquoted, Field(ge=1)]
Whole = Annotated[int, _Unquoted, Field(ge=0)]


class ModelClause(Clause):
    """One entry of ``models`` (sources: HPS's configuration, HugeCTR v24.06, and the HugeCTR backend of Triton).

    A number or a truth value may stand in a string.

    Attributes:
        model: the model's name.
        sparse_files: one folder or file per embedding layer, in graph order.
        dense_file: the dense weights, or an ONNX network (``.onnx``) in place of layers and weights.
        network_file: the layer graph; with an ONNX network, its inputs.
        max_batch_size: most samples of one request.
        gpucache: whether a GPU embedding cache is asked for. HPS's default is true, so is this one.
        hit_rate_threshold: when a GPU cache is filled; no effect on the CPU.
        embedding_table_names: names of the tables; the graph's where absent.
        embedding_vecsize_per_table: must agree with the graph.
        default_value_for_each_table: every float of an unknown key's vector; the graph's where absent.
        maxnum_catfeature_query_per_table_per_sample: most keys of one sample; the graph's where absent.
        maxnum_des_feature_per_sample: must not be less than the graph's dense features.
        deployed_device_list: GPUs the model is deployed on; no effect on the CPU.
        label_dim: must agree with the graph.
        slot_num: must agree with the graph, over all tables.

    The attributes behind these shape a GPU cache or a GPU's network; no effect on the CPU.
    """

    model: str
    sparse_files: list[FileName]
    dense_file: FileName
    network_file: FileName
    max_batch_size: Count = 64
    gpucache: Switch = True
    hit_rate_threshold: Share = 0.9
    embedding_table_names: list[TableName] | None = None
    embedding_vecsize_per_table: list[Count] | None = None
    default_value_for_each_table: list[Float32] | None = None
    maxnum_catfeature_query_per_table_per_sample: list[Count] | None = None
    maxnum_des_feature_per_sample: Whole | None = None
    deployed_device_list: list[Whole] | None = None
    label_dim: Count | None = None
    slot_num: Count | None = None

    cache_refresh_percentage_per_iteration: Share | None = None
    gpucacheper: Share | None = None
    init_ec: Switch | None = None
    mixed_precision: Switch | None = None
    num_of_refresher_buffer_in_pool: Whole | None = None
    num_of_worker_buffer_in_pool: Whole | None = None
    scaler: Share | None = None
    thread_pool_size: Whole | None = None
    use_algorithm_search: Switch | None = None
    use_context_stream: Switch | None = None
    use_cuda_graph: Switch | None = None
    use_hctr_cache_implementation: Switch | None = None
    use_mixed_precision: Switch | None = None


def _volatile_type(value: Any) -> str:
    return _spelling(value, VOLATILE_TYPES)


def _persistent_type(value: Any) -> str:
    return _spelling(value, PERSISTENT_TYPES)


def _spelling(value: Any, spellings: dict[str, str | None]) -> str:
    if not isinstance(value, str) or value not in spellings:
        accepted = ", ".join(text for text, meaning in spellings.items() if meaning)
        raise ValueError(f"expected one of {accepted}, got {value!r}")
    meaning = spellings[value]
    if meaning is None:
        raise ValueError(f"HPS knows the type {value!r}, Hotrow does not support it yet")
    return meaning


class VolatileDbClause(Clause):
    """``volatile_db``; ``capacity_rows`` and ``capacity_bytes`` are Hotrow's own keys."""

    type: Annotated[Literal["disabled", "hash_map"], BeforeValidator(_volatile_type)]
    capacity_rows: Count | None = None
    capacity_bytes: Count | None = None

    @model_validator(mode="after")
    def _one_capacity(self) -> Self:
        if self.capacity_rows is not None and self.capacity_bytes is not None:
            raise ValueError("expected capacity_rows or capacity_bytes, got both")
        return self


class PersistentDbClause(Clause):
    """``persistent_db``."""

    type: Annotated[Literal["disabled", "rocks_db"], BeforeValidator(_persistent_type)]
    path: FileName | None = None
    read_only: bool = False
    num_threads: Annotated[int, Field(ge=1, le=1024)] = 16
    max_batch_size: Count = 65536

    @model_validator(mode="after")
    def _has_path(self) -> Self:
        if self.type != "disabled" and self.path is None:
            raise ValueError("path is required where the type is rocks_db")
        return self


class PsDocument(Clause):
    """The whole ``ps.json``."""

    supportlonglong: Switch
    models: list[ModelClause] = Field(default_factory=list)
    volatile_db: VolatileDbClause = VolatileDbClause(type="hash_map")
    persistent_db: PersistentDbClause = PersistentDbClause(type="disabled")


def read_ps_config(file: str | Path) -> ParameterServerConfig:
    """Read an HPS ``ps.json``.

    Relative paths start from the file's folder. A key that HPS knows and Hotrow does not support is refused by name, a
    key that neither knows as unknown; nothing is ignored.

    Raises:
        ConfigError: the file cannot be accepted; the message has the JSON path.
    """
    file = Path(file)
    source = str(file)
    document = read_clause(PsDocument, read_json(file), source, UNSUPPORTED)
    volatile, persistent = document.volatile_db, document.persistent_db
    if volatile.type == persistent.type == "disabled":
        raise ConfigError(source, "", "volatile_db and persistent_db are both disabled: no tier would hold a row")
    key_type: KeyType = "I64" if document.supportlonglong else "I32"
    models = tuple(
        _model(clause, Place(source, f"models[{index}]", file.parent), key_type)
        for index, clause in enumerate(document.models)
    )
    names = [model.name for model in models]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(source, f"models[{index}].model", f"the name {name!r} is taken by an earlier model")
    return ParameterServerConfig(
        models=models,
        volatile_db=VolatileDbConfig(**volatile.model_dump()),
        persistent_db=PersistentDbConfig(
            **persistent.model_dump(exclude={"path"}), path=file.parent / persistent.path if persistent.path else None
        ),
        key_type=key_type,
        source=source,
    )


def _model(clause: ModelClause, place: Place, key_type: KeyType) -> ModelConfig:
    check_model_name(clause.model, place.source, place.at("model"))
    graph_file = place.file(clause.network_file)
    dense_file = place.file(clause.dense_file)
    graph = read_model_graph(graph_file, dense_file)
    _check_against_graph(clause, graph, place)
    return ModelConfig(
        name=clause.model,
        graph_file=graph_file,
        dense_file=dense_file,
        onnx_file=onnx_beside(dense_file),
        tables=_tables(clause, build_tables(graph, clause.sparse_files, "sparse_files", place), place),
        key_type=key_type,
        max_batchsize=clause.max_batch_size,
        hit_rate_threshold=float(clause.hit_rate_threshold),
        dense_dim=graph.dense_dim,
        label_dim=graph.label_dim,
        gpu_cache=clause.gpucache,
    )


def _check_against_graph(clause: ModelClause, graph: Graph, place: Place) -> None:
    slots = sum(embedding.slots for embedding in graph.embeddings)
    for key, value, expected in (
        ("label_dim", clause.label_dim, graph.label_dim),
        ("slot_num", clause.slot_num, slots),
    ):
        if value is not None and value != expected:
            raise place.error(key, f"{value}, but the graph has {expected}")
    dense = clause.maxnum_des_feature_per_sample
    if dense is not None and dense < graph.dense_dim:
        raise place.error("maxnum_des_feature_per_sample", f"{dense}, but the graph has {graph.dense_dim}")


def _tables(clause: ModelClause, tables: Sequence[TableConfig], place: Place) -> tuple[TableConfig, ...]:
    count = len(tables)
    names = _per_table(clause.embedding_table_names, "embedding_table_names", count, place)
    dims = _per_table(clause.embedding_vecsize_per_table, "embedding_vecsize_per_table", count, place)
    defaults = _per_table(clause.default_value_for_each_table, "default_value_for_each_table", count, place)
    limits_key = "maxnum_catfeature_query_per_table_per_sample"
    limits = _per_table(clause.maxnum_catfeature_query_per_table_per_sample, limits_key, count, place)
    result = []
    for index, table in enumerate(tables):
        if dims[index] not in (None, table.dim):
            raise place.error(f"embedding_vecsize_per_table[{index}]", f"{dims[index]}, but the graph has {table.dim}")
        if names[index] is not None and names[index] in names[:index]:
            raise place.error(f"embedding_table_names[{index}]", f"the name {names[index]!r} is taken")
        given = {"name": names[index], "default_value": defaults[index], "max_keys_per_sample": limits[index]}
        result.append(table.model_copy(update={key: value for key, value in given.items() if value is not None}))
    return tuple(result)


def _per_table(values: list[V] | None, key: str, count: int, place: Place) -> Sequence[V | None]:
    if values is None:
        return [None] * count
    if len(values) != count:
        raise place.error(key, f"{len(values)} values, but the graph has {count} tables")
    return values
