"""HPS's ``ps.json``: the models of one parameter server and its storage tiers."""

import logging
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from kernels.errors import HotrowError
from serving.config import keys_without_effect
from serving.config.clause import (
    Clause,
    Count,
    FilePath,
    Float32,
    Location,
    PathText,
    Switch,
    Whole,
    at_key,
    read_clause,
    unquoted,
)
from serving.config.gpu import ONE_PRECISION, GpuCacheConfig, GpuNetworkConfig, precision_of
from serving.config.models import (
    ModelConfig,
    ParameterServerConfig,
    TableConfig,
    check_key_bits,
    check_model_name,
    manifest_next_to,
    onnx_next_to,
    refuse_shared_tables,
    slot_keys_of,
    stream_of,
    tables_of,
)
from serving.config.row_dtypes import by_path, with_row_dtypes
from serving.config.tiers import (
    DisabledConfig,
    HashMapConfig,
    PersistentDb,
    PersistentDbConfig,
    VolatileDb,
    VolatileDbConfig,
    check_together,
)
from serving.config.update_source import UpdateSource, UpdateSourceConfig
from serving.errors import ConfigError, about, did_you_mean
from serving.model.dense_file import statistics_path
from serving.model.graph import Graph, read_model_graph
from serving.model.names import TABLE_NAME
from serving.model.regular_file import real_path
from serving.model.sparse_rows import KeyType
from serving.model.strict_json import read_json

V = TypeVar("V")

_log = logging.getLogger(__name__)
# The lists with one value for each table, and the fields of TableConfig that they give.
_PER_TABLE = {
    "embedding_table_names": "name",
    "embedding_vecsize_per_table": "dim",
    "default_value_for_each_table": "default_value",
    "maxnum_catfeature_query_per_table_per_sample": "max_keys_per_sample",
}
_TableName = Annotated[str, Field(pattern=rf"^{TABLE_NAME.pattern}$")]


class ModelClause(Clause):
    """One entry of ``models``. ``docs/configuration.md`` describes each key.

    Sources: HPS's configuration, HugeCTR v24.06, and the HugeCTR backend of Triton. A model without ``dense_file`` and
    ``network_file`` is only looked up.
    """

    where: ClassVar[str] = "models"
    parts: ClassVar[dict[str, type[Clause]]] = {"gpu_cache": GpuCacheConfig}

    model: str
    sparse_files: list[FilePath]
    dense_file: FilePath | None = None
    network_file: FilePath | None = None
    max_batch_size: Count = 64
    embedding_table_names: list[_TableName] | None = None
    embedding_vecsize_per_table: list[Count] | None = None
    default_value_for_each_table: list[Float32] | None = None
    maxnum_catfeature_query_per_table_per_sample: list[Count] | None = None
    maxnum_des_feature_per_sample: Whole | None = None
    label_dim: Count | None = None
    slot_num: Count | None = None
    non_trainable_params_file: PathText | None = None
    fuse_embedding_table: Switch = False
    use_static_table: Switch = False
    enable_pagelock: Switch = False
    mixed_precision: Switch = False
    use_mixed_precision: Switch = False
    enable_tf32_compute: Annotated[Switch, ONE_PRECISION] = False
    use_cuda_graph: Switch = True
    gpu_cache: GpuCacheConfig

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Apply HPS's default, rename ``use_static_table`` to its type, and drop empty file names."""
        if unquoted(given.get("use_static_table")) is True:
            kind = given.setdefault("embedding_cache_type", "static")
            if kind != "static":
                raise ValueError(f"use_static_table: true, but embedding_cache_type is {kind!r}")
        is_absent = [key for key in ("dense_file", "network_file") if given.get(key) == ""]  # HPS's default
        return {"gpucache": True} | {key: value for key, value in given.items() if key not in is_absent}

    @property
    def gpu_network(self) -> GpuNetworkConfig:
        """The settings of the dense network on a GPU."""
        return GpuNetworkConfig(
            precision=precision_of(self.use_mixed_precision or self.mixed_precision, self.enable_tf32_compute),
            captures_graphs=self.use_cuda_graph,
        )

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.enable_pagelock and self.gpu_cache.kind == "static":
            raise ValueError(
                "enable_pagelock: the rows of a static cache lie in the GPU's memory; those of the "
                "embedding_cache_type uvm lie in page-locked host memory"
            )
        for key, other in (("network_file", "dense_file"), ("dense_file", "network_file")):
            if getattr(self, key) is None and getattr(self, other) is not None:
                raise at_key(key, f"required next to {other}; leave both out for a model that is only looked up")
        return self


class PsDocument(Clause):
    """The whole ``ps.json``. HPS's single ``volatile_db`` becomes a list of one tier."""

    where: ClassVar[str] = ""

    supportlonglong: Switch
    fuse_embedding_table: Switch = False
    models: list[ModelClause] = Field(default_factory=list)
    volatile_db: Annotated[list[VolatileDb], Field(min_length=1)] = [HashMapConfig()]  # noqa: RUF012 - pydantic copies it
    persistent_db: PersistentDb = PersistentDbConfig()
    update_source: UpdateSource = UpdateSourceConfig()

    @property
    def slowest_tier(self) -> Any:
        """The tier that no other tier follows."""
        return self.volatile_db[-1] if self.persistent_db.type == "disabled" else self.persistent_db

    @model_validator(mode="after")
    def _has_every_row(self) -> Self:
        check_together(self.volatile_db, self.persistent_db)
        return self


#: The keys of a whole ``ps.json``; no other kind of file has one of them.
PS_KEYS = tuple(sorted(PsDocument.known_keys()))


def read_ps_config(file: str | Path, faults: list[HotrowError] | None = None) -> ParameterServerConfig:
    """Read an HPS ``ps.json``.

    Relative paths start from the file's folder. A key of HPS that has no effect here is accepted and reported in
    ``ParameterServerConfig.keys_without_effect``. An unknown key is an error.

    Args:
        file: the JSON file.
        faults: an empty list. A model with a fault in its files is left out, and its fault is added to the list
            instead of being raised.

    Raises:
        ConfigError: the file cannot be accepted. The message has the JSON path.
    """
    file = Path(file)
    source = str(file)
    document, without_effect = _read_document(file)
    key_type: KeyType = "I64" if document.supportlonglong else "I32"
    models: list[ModelConfig] = []
    for index, clause in enumerate(document.models):
        with about(clause.model, faults):
            models.append(_model(clause, Location(source, f"models[{index}]"), key_type))
    names = [clause.model for clause in document.models]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(source, f"models[{index}].model", f"the name {name!r} is taken by an earlier model")
    tiers = tuple(tier for tier in document.volatile_db if not isinstance(tier, DisabledConfig))
    if models and not faults:  # otherwise the tables are known later
        check_named_tables(tiers, models, source)
    return ParameterServerConfig(
        models=tuple(with_row_dtypes(model, tiers, document.persistent_db, source) for model in models),
        volatile_tiers=tiers,
        persistent_db=document.persistent_db,
        update_source=document.update_source,
        key_type=key_type,
        source=source,
        keys_without_effect=without_effect,
    )


def _read_document(file: Path) -> tuple[PsDocument, tuple[str, ...]]:
    """Return the document without keys that have no effect, and one line per reason."""
    raw = read_json(file)
    only = "volatile_db[0]"  # the path of a tier that is not in a list
    if isinstance(raw, dict) and not isinstance(raw.get("volatile_db", []), list | None):
        raw, only = {**raw, "volatile_db": [raw["volatile_db"]]}, "volatile_db"
    try:
        document = read_clause(PsDocument, raw, file)
    except ConfigError as err:
        raise ConfigError(err.source, err.path.replace("volatile_db[0]", only, 1), err.reason) from err
    by_reason: dict[str, list[str]] = {}
    for path, where, record, given in _clauses(raw, document):
        lead = f"{path.replace('volatile_db[0]', only)}." if path else ""
        for key, reason in dict(keys_without_effect.found(where, record, document, given)).items():
            by_reason.setdefault(reason, []).append(lead + key)
            del given[key]  # so the records do not differ by it
    lines = tuple(f"{', '.join(keys)}: no effect: {reason}" for reason, keys in by_reason.items())
    return (read_clause(PsDocument, raw, file) if lines else document), lines


def _clauses(raw: Any, document: PsDocument) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Yield each JSON object: its path, the clause's name in ``keys_without_effect``, its record and the object."""
    yield "", "", document, raw
    for where in [key for key in PsDocument.model_fields if key in raw]:
        records = getattr(document, where)
        if isinstance(records, list):
            for index, record in enumerate(records):
                yield f"{where}[{index}]", where, record, raw[where][index]
        elif isinstance(records, Clause):
            yield where, where, records, raw[where]


def check_named_tables(
    volatile: Sequence[VolatileDbConfig],
    models: Sequence[ModelConfig],
    source: str,
    of_these_models_only: bool = False,
) -> None:
    """Refuse a key of a ``volatile_db`` that names an unknown table.

    Args:
        volatile: the tiers.
        models: the models.
        source: the file, for messages.
        of_these_models_only: do not check names of tables of other models.

    Raises:
        ConfigError: none of ``models`` has a table of this name.
    """
    names = {model.name for model in models}
    tables = sorted(model.hps_name(table) for model in models for table in model.tables)
    keys = ("capacity_rows_per_table", "row_dtype_per_table")
    for (path, tier), key in product(by_path(volatile).items(), keys):
        unknown = sorted(
            name
            for name in (getattr(tier, key, None) or {}).keys() - set(tables)
            if not of_these_models_only or name.partition(".")[0] in names
        )
        if unknown:
            expected = ", ".join(map(repr, tables)) + did_you_mean(unknown[0], tables)
            reason = f"no model has a table {unknown[0][:64]!r}; expected some of {expected}"
            raise ConfigError(source, f"{path}.{key}", reason)


def _model(clause: ModelClause, at: Location, key_type: KeyType) -> ModelConfig:
    check_model_name(clause.model, at.source, f"{at.path}.model")
    check_key_bits(clause.gpu_cache.key_bits, key_type, at)
    shared: dict[str, Any] = {
        "name": clause.model,
        "key_type": key_type,
        "max_batchsize": clause.max_batch_size,
        "gpu_cache": clause.gpu_cache,
    }
    if clause.dense_file is None or clause.network_file is None:
        tables = _with_lists(clause, _lookup_tables(clause, at), at)
        return ModelConfig(graph_file=None, dense_file=None, tables=tables, dense_dim=0, label_dim=0, **shared)
    graph_file, dense_file = real_path(clause.network_file), real_path(clause.dense_file)
    graph = read_model_graph(graph_file, dense_file)
    _check_against_graph(clause, graph, dense_file, at)
    manifest = manifest_next_to(graph_file)
    refuse_shared_tables(graph_file, manifest)
    slot_keys = slot_keys_of(graph, graph_file, key_type, manifest)
    return ModelConfig(
        graph_file=graph_file,
        dense_file=dense_file,
        onnx_file=onnx_next_to(dense_file),
        tables=_with_lists(clause, tables_of(graph, clause.sparse_files, "sparse_files", at, slot_keys), at),
        slot_keys=slot_keys,
        dense_dim=graph.dense_dim,
        label_dim=graph.label_dim,
        dense_names=graph.dense_names,
        label_names=graph.label_names,
        label_kinds=graph.label_kinds,
        stated_outputs=graph.stated_outputs,
        gpu_network=clause.gpu_network,
        stream=stream_of(manifest),
        **shared,
    )


def _lookup_tables(clause: ModelClause, at: Location) -> tuple[TableConfig, ...]:
    """Return the tables of a model that is only looked up. HPS has default names, and the file has the sizes."""
    if not clause.sparse_files:
        raise at.error("sparse_files", "expected a list that is not empty")
    if clause.embedding_vecsize_per_table is None:
        raise at.error("embedding_vecsize_per_table", "required without a network_file")
    dims = _per_table(clause.embedding_vecsize_per_table, "embedding_vecsize_per_table", len(clause.sparse_files), at)
    return tuple(
        TableConfig(name=f"sparse_embedding{index}", dim=dim or 0, slots=1, combiner="sum", file=real_path(file))
        for index, (file, dim) in enumerate(zip(clause.sparse_files, dims, strict=True))
    )


def _check_against_graph(clause: ModelClause, graph: Graph, dense_file: Path, at: Location) -> None:
    inputs = {entry.top: entry for entry in graph.sparse}
    slots = sum(inputs[embedding.bottom].slots for embedding in graph.embeddings)
    for key, value, expected in (
        ("label_dim", clause.label_dim, graph.label_dim),
        ("slot_num", clause.slot_num, slots),
    ):
        if value is not None and value != expected:
            raise at.error(key, f"{value}, but the graph has {expected}")
    dense = clause.maxnum_des_feature_per_sample
    if dense is not None and dense < graph.dense_dim:
        raise at.error("maxnum_des_feature_per_sample", f"{dense}, but the graph has {graph.dense_dim}")
    # HPS reads means and variances from the file in this key. Hotrow reads the file that HugeCTR writes.
    given, read = clause.non_trainable_params_file, statistics_path(dense_file)
    if given and real_path(Path(at.source).parent / given) != read:
        raise at.error("non_trainable_params_file", f"expected {read}, next to the dense file; got {given!r}")


def _with_lists(clause: ModelClause, tables: Sequence[TableConfig], at: Location) -> tuple[TableConfig, ...]:
    """Return the tables with the values that the lists of the clause have for each table."""
    lists = {field: _per_table(getattr(clause, key), key, len(tables), at) for key, field in _PER_TABLE.items()}
    result: list[TableConfig] = []
    taken: set[Any] = set()
    for index, table in enumerate(tables):
        given = {field: values[index] for field, values in lists.items() if values[index] is not None}
        if given.get("dim", table.dim) != table.dim:
            raise at.error(f"embedding_vecsize_per_table[{index}]", f"{given['dim']}, but the graph has {table.dim}")
        if "name" in given and given["name"] in taken:
            raise at.error(f"embedding_table_names[{index}]", f"the name {given['name']!r} is taken")
        taken.add(given.get("name"))
        result.append(table.model_copy(update=given))
    return tuple(result)


def _per_table(values: list[V] | None, key: str, count: int, at: Location) -> Sequence[V | None]:
    if values is None:
        return [None] * count
    if key == "default_value_for_each_table" and len(values) == 1 < count:
        place = f"{at.source}: {at.path}.{key}"
        _log.warning("%s: the single value applies to all %d tables, as in HPS", place, count)
        return values * count
    if len(values) != count:
        raise at.error(key, f"expected {count}, one per table; got {len(values)}")
    return values
