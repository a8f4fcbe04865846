"""The clauses of HPS's ``ps.json``, as HugeCTR v3.3 to v24.06 and its Triton backends read it."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from serving.config.hps_keys import PERSISTENT_TYPES, spelling
from serving.config.scalars import Count, FileName, Float32, Magnitude, Milliseconds, Switch, Whole, only
from serving.config.validation import Clause
from serving.config.volatile_db import VolatileDbClause
from serving.model.names import TABLE_NAME

NoFp8 = Annotated[bool, only(False, "rows are kept in 8 bits where volatile_db.row_dtype says so, as int8 or uint8")]
TableName = Annotated[str, Field(pattern=rf"^{TABLE_NAME.pattern}$")]


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

        non_trainable_params_file: must be the file beside ``dense_file`` that Hotrow reads, ``<dense_file>.ntp.json``.
        fp8_quant: must be false: HPS rounds the rows of a static GPU cache to 8-bit floats.

    The attributes behind these shape a GPU cache or a GPU's network; no effect on the CPU. Fusing tables
    (``fuse_embedding_table``) is how HPS looks several up at a time, which changes no answer.
    """

    model: str
    sparse_files: list[FileName]
    dense_file: FileName
    network_file: FileName
    max_batch_size: Count = 64
    gpucache: Switch = True
    hit_rate_threshold: Magnitude = 0.9
    embedding_table_names: list[TableName] | None = None
    embedding_vecsize_per_table: list[Count] | None = None
    default_value_for_each_table: list[Float32] | None = None
    maxnum_catfeature_query_per_table_per_sample: list[Count] | None = None
    maxnum_des_feature_per_sample: Whole | None = None
    deployed_device_list: list[Whole] | None = None
    label_dim: Count | None = None
    slot_num: Count | None = None
    non_trainable_params_file: str | None = None
    fp8_quant: NoFp8 = False

    cache_refresh_percentage_per_iteration: Magnitude | None = None
    embedding_cache_type: Literal["dynamic", "static", "uvm", "stochastic"] | None = None
    enable_pagelock: Switch | None = None
    fuse_embedding_table: Switch | None = None
    gpucacheper: Magnitude | None = None
    init_ec: Switch | None = None
    mixed_precision: Switch | None = None
    num_of_refresher_buffer_in_pool: Whole | None = None
    num_of_worker_buffer_in_pool: Whole | None = None
    refresh_delay: Magnitude | None = None
    refresh_interval: Magnitude | None = None
    scaler: Magnitude | None = None
    thread_pool_size: Whole | None = None
    use_algorithm_search: Switch | None = None
    use_context_stream: Switch | None = None
    use_cuda_graph: Switch | None = None
    use_hctr_cache_implementation: Switch | None = None
    use_mixed_precision: Switch | None = None
    use_static_table: Switch | None = None


def _persistent_type(value: Any) -> str:
    return spelling(value, PERSISTENT_TYPES)


class PersistentDbClause(Clause):
    """``persistent_db``; ``timeout_ms`` is Hotrow's own; the attributes behind it have no effect."""

    type: Annotated[Literal["disabled", "rocks_db"], BeforeValidator(_persistent_type)]
    path: FileName | None = None
    read_only: bool = False
    num_threads: Annotated[int, Field(ge=1, le=1024)] = 16
    max_batch_size: Count = 65536
    initialize_after_startup: Switch = True
    timeout_ms: Milliseconds | None = None

    max_get_batch_size: Count | None = None
    max_set_batch_size: Count | None = None
    update_filters: list[str] | None = None

    @model_validator(mode="after")
    def _has_path(self) -> Self:
        if self.type != "disabled" and self.path is None:
            raise ValueError("path is required where the type is rocks_db")
        return self


class PsDocument(Clause):
    """The whole ``ps.json``."""

    supportlonglong: Switch
    fuse_embedding_table: Switch = False
    models: list[ModelClause] = Field(default_factory=list)
    volatile_db: VolatileDbClause = VolatileDbClause(type="hash_map")
    persistent_db: PersistentDbClause = PersistentDbClause(type="disabled")
