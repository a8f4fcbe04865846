"""The clauses of HPS's ``ps.json``, as HugeCTR v3.3 to v24.06 and its Triton backends read it."""

from abc import abstractmethod
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from kernels.host import RowDtype
from serving.config.gpu_clause import GpuClause
from serving.config.hps_keys import PERSISTENT_TYPES, UPDATE_SOURCES, spelling
from serving.config.scalars import Count, FileName, Float32, Milliseconds, PathText, Switch, Whole
from serving.config.validation import Clause
from serving.config.volatile_db import VolatileDbClause
from serving.model.names import TABLE_NAME

TableName = Annotated[str, Field(pattern=rf"^{TABLE_NAME.pattern}$")]


class ModelClause(GpuClause):
    """One entry of ``models`` (sources: HPS's configuration, HugeCTR v24.06, and the HugeCTR backend of Triton).

    Attributes:
        model: the model's name.
        sparse_files: one folder or file per embedding layer, in graph order.
        dense_file: the dense weights, or an ONNX network (``.onnx``) in place of layers and weights.
        network_file: the layer graph; with an ONNX network, its inputs.
        max_batch_size: most samples of one request.
        embedding_table_names: names of the tables; the graph's where absent.
        embedding_vecsize_per_table: must agree with the graph.
        default_value_for_each_table: every float of an unknown key's vector; the graph's where absent.
        maxnum_catfeature_query_per_table_per_sample: most keys of one sample; the graph's where absent.
        maxnum_des_feature_per_sample: must not be less than the graph's dense features.
        label_dim: must agree with the graph.
        slot_num: must agree with the graph, over all tables.

        non_trainable_params_file: must be the file beside ``dense_file`` that Hotrow reads, ``<dense_file>.ntp.json``.

    Fusing tables (``fuse_embedding_table``) is how HPS looks several up at a time, which changes no answer.
    ``GpuClause`` has the keys of GPUs.
    """

    model: str
    sparse_files: list[FileName]
    dense_file: FileName
    network_file: FileName
    max_batch_size: Count = 64
    embedding_table_names: list[TableName] | None = None
    embedding_vecsize_per_table: list[Count] | None = None
    default_value_for_each_table: list[Float32] | None = None
    maxnum_catfeature_query_per_table_per_sample: list[Count] | None = None
    maxnum_des_feature_per_sample: Whole | None = None
    label_dim: Count | None = None
    slot_num: Count | None = None
    non_trainable_params_file: PathText | None = None
    fuse_embedding_table: Switch | None = None


# Hotrow's own keys of ``persistent_db``.
OWN_PERSISTENT_KEYS = frozenset({"catch_up_interval_ms", "row_dtype", "timeout_ms", "warm_up"})


def _persistent_type(value: Any) -> str:
    return spelling(value, PERSISTENT_TYPES)


class PersistentDbClause(Clause):
    """``persistent_db`` (source: HPS's configuration, HugeCTR v24.06).

    Attributes:
        type: RocksDB, or none.
        path: the database's folder.
        read_only: open beside the process that writes.
        num_threads: background threads of the database.
        max_batch_size: most keys of one call of the database's; see ``RocksDbStore``.
        initialize_after_startup: whether the models' files are loaded into it; else it must have the tables.
        timeout_ms: Hotrow's own: see ``PersistentDbConfig``.
        catch_up_interval_ms: Hotrow's own: with ``read_only``, see the writes of the other process.
        row_dtype: Hotrow's own: the form in which rows are kept, which must be the tables'.
        warm_up: Hotrow's own: whether the files are read ahead when they are opened or loaded.

    The attributes behind these shape older versions of HPS, or its updates from Kafka; no effect here.
    """

    type: Annotated[Literal["disabled", "rocks_db"], BeforeValidator(_persistent_type)]
    path: FileName | None = None
    read_only: Switch = False
    num_threads: Annotated[Count, Field(le=1024)] = 16
    max_batch_size: Count = 65536
    initialize_after_startup: Switch = True
    timeout_ms: Milliseconds | None = None
    catch_up_interval_ms: Milliseconds | None = None
    row_dtype: RowDtype | None = None
    warm_up: Switch = True

    max_get_batch_size: Count | None = None
    max_set_batch_size: Count | None = None
    update_filters: list[str] | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        own = sorted(self.model_fields_set & OWN_PERSISTENT_KEYS)
        if own and self.type == "disabled":
            raise ValueError(f"{own[0]}: only a rocks_db has it, the type is disabled")
        if self.type != "disabled" and self.path is None:
            raise ValueError("path is required where the type is rocks_db")
        if self.catch_up_interval_ms is not None and not self.read_only:
            raise ValueError("catch_up_interval_ms: only with read_only is there another process to catch up with")
        return self


def _update_source(value: Any) -> str:
    if isinstance(value, str) and UPDATE_SOURCES.get(value, "") is None:
        raise ValueError(f"{value!r}: updates are not read from Kafka yet; ParameterServer.insert takes them")
    return spelling(value, UPDATE_SOURCES)


class UpdateSourceClause(Clause):
    """``update_source`` (source: HPS's configuration, HugeCTR v24.06): none, so that its other keys have no effect."""

    type: Annotated[Literal["null"], BeforeValidator(_update_source)]

    brokers: str | None = None
    failure_backoff_ms: Whole | None = None
    max_batch_size: Count | None = None
    max_commit_interval: Count | None = None
    metadata_refresh_interval_ms: Whole | None = None
    poll_timeout_ms: Whole | None = None
    receive_buffer_size: Count | None = None


class PsClauses(Clause):
    """The whole ``ps.json`` but for ``volatile_db``, which has two forms."""

    supportlonglong: Switch
    fuse_embedding_table: Switch = False
    models: list[ModelClause] = Field(default_factory=list)
    persistent_db: PersistentDbClause = PersistentDbClause(type="disabled")
    update_source: UpdateSourceClause = UpdateSourceClause(type="null")

    @property
    @abstractmethod
    def volatile_clauses(self) -> dict[str, VolatileDbClause]:
        """The clauses of ``volatile_db`` by their JSON paths, fastest first."""


class PsDocument(PsClauses):
    """The whole ``ps.json``, in HPS's form."""

    volatile_db: VolatileDbClause = VolatileDbClause(type="hash_map")

    @property
    def volatile_clauses(self) -> dict[str, VolatileDbClause]:
        """See ``PsClauses``."""
        return {"volatile_db": self.volatile_db}


class PsDocumentOfTiers(PsClauses):
    """Hotrow's own form of it: ``volatile_db`` is a list of tiers, fastest first."""

    volatile_db: Annotated[list[VolatileDbClause], Field(min_length=1)]

    @property
    def volatile_clauses(self) -> dict[str, VolatileDbClause]:
        """See ``PsClauses``."""
        return {f"volatile_db[{place}]": clause for place, clause in enumerate(self.volatile_db)}
