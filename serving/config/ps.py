"""HPS's ``ps.json``: the models one parameter server holds, and its storage tiers."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from kernels.errors import HotrowError
from serving.config.assembly import Place, build_tables, check_key_bits, check_model_name, onnx_beside
from serving.config.idle_keys import idle_lines
from serving.config.ps_clauses import ModelClause, PsClauses, PsDocument, PsDocumentOfTiers
from serving.config.records import (
    ModelConfig,
    ParameterServerConfig,
    PersistentDbConfig,
    TableConfig,
    VolatileDbConfig,
)
from serving.config.row_dtypes import by_path, with_row_dtypes
from serving.config.tiers import check_together
from serving.config.validation import Clause, read_clause
from serving.errors import ConfigError, about
from serving.model.dense_file import statistics_path
from serving.model.graph import Graph, read_model_graph
from serving.model.sparse_rows import KeyType
from serving.model.strict_json import read_json

V = TypeVar("V")


def read_ps_config(file: str | Path, faults: list[HotrowError] | None = None) -> ParameterServerConfig:
    """Read an HPS ``ps.json``.

    Relative paths start from the file's folder. Of the keys that HPS knows, those that no answer depends on here may
    have any value of their type, and are told of (``ParameterServerConfig.idle_lines``); others are refused as unknown.

    Args:
        file: the JSON file.
        faults: empty; what is wrong with the files of single models is added to it in place of being raised, and these
            models are left out.

    Raises:
        ConfigError: the file cannot be accepted; the message has the JSON path.
    """
    file = Path(file)
    source = str(file)
    raw = read_json(file)
    is_list = isinstance(raw, dict) and isinstance(raw.get("volatile_db"), list)
    document: PsClauses = read_clause(PsDocumentOfTiers if is_list else PsDocument, raw, source)
    persistent = document.persistent_db
    check_together(document.volatile_clauses, persistent, source)
    key_type: KeyType = "I64" if document.supportlonglong else "I32"
    models = []
    for index, clause in enumerate(document.models):
        with about(clause.model, faults):
            models.append(_model(clause, Place(source, f"models[{index}]", file.parent), key_type))
    names = [clause.model for clause in document.models]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(source, f"models[{index}].model", f"the name {name!r} is taken by an earlier model")
    records = [clause.record(file.parent) for clause in document.volatile_clauses.values()]
    tiers = tuple(tier for tier in records if tier.type != "disabled")
    disk = PersistentDbConfig(
        **_known(persistent, PersistentDbConfig, "path"),
        path=file.parent / persistent.path if persistent.path else None,
    )
    if models and not faults:  # else a repository's folders, or files put right, say which there are
        check_named_tables(tiers, models, source)
    return ParameterServerConfig(
        models=tuple(with_row_dtypes(model, tiers, disk, source) for model in models),
        volatile_tiers=tiers,
        persistent_db=disk,
        key_type=key_type,
        source=source,
        idle_lines=idle_lines(document),
    )


def check_named_tables(volatile: Sequence[VolatileDbConfig], models: Sequence[ModelConfig], source: str) -> None:
    """Refuse a key of a ``volatile_db`` that names a table which none of ``models`` has.

    Raises:
        ConfigError: there is such a name.
    """
    tables = {model.full_name(table) for model in models for table in model.tables}
    keys = ("capacity_rows_per_table", "row_dtype_per_table")
    for (path, tier), key in product(by_path(volatile).items(), keys):
        unknown = sorted((getattr(tier, key) or {}).keys() - tables)
        if unknown:
            expected = ", ".join(repr(name) for name in sorted(tables))
            reason = f"no model has a table {unknown[0][:64]!r}; expected some of {expected}"
            raise ConfigError(source, f"{path}.{key}", reason)


def _known(clause: Clause, record: type[BaseModel], *besides: str) -> dict[str, Any]:
    """What ``clause`` says of the attributes that ``record`` has, but for ``besides``."""
    return clause.model_dump(include=set(record.model_fields).difference(besides))


def _model(clause: ModelClause, place: Place, key_type: KeyType) -> ModelConfig:
    check_model_name(clause.model, place.source, place.at("model"))
    graph_file = place.file(clause.network_file)
    dense_file = place.file(clause.dense_file)
    graph = read_model_graph(graph_file, dense_file)
    _check_against_graph(clause, graph, place)
    _check_statistics(clause, dense_file, place)
    check_key_bits(clause.embedding_cache_key_bits, key_type, place)
    return ModelConfig(
        name=clause.model,
        graph_file=graph_file,
        dense_file=dense_file,
        onnx_file=onnx_beside(dense_file),
        tables=_tables(clause, build_tables(graph, clause.sparse_files, "sparse_files", place), place),
        key_type=key_type,
        max_batchsize=clause.max_batch_size,
        dense_dim=graph.dense_dim,
        label_dim=graph.label_dim,
        gpu_cache=clause.cache_record(),
        gpu_network=clause.network_record(),
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


def _check_statistics(clause: ModelClause, dense_file: Path, place: Place) -> None:
    """HPS reads the means and variances from the file it is given, Hotrow from the one that HugeCTR writes."""
    given, beside = clause.non_trainable_params_file, statistics_path(dense_file)
    if given and place.file(given) != beside:
        raise place.error("non_trainable_params_file", f"expected {beside}, beside the dense file; got {given!r}")


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
