"""What a configuration says, as frozen records: one per model, one per table, one per storage tier."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from serving.model.records import Combiner
from serving.model.sparse_rows import KeyType, RowLayout


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TableConfig(_Record):
    """One embedding table of one model.

    Attributes:
        name: table name inside the model; ``ModelConfig.full_name`` is what stores know it by.
        dim: D.
        slots: S.
        combiner: how the rows of one slot are pooled.
        default_value: every float of an unknown key's vector.
        file: the sparse model, a directory (``key`` + ``emb_vector``) or a single file.
        row_layout: form of a single file's rows.
        max_keys_per_sample: over all slots of this table; None means no limit.
    """

    name: str
    dim: int
    slots: int
    combiner: Combiner
    default_value: float = 0.0
    file: Path
    row_layout: RowLayout = "distributed"
    max_keys_per_sample: int | None = None


class ModelConfig(_Record):
    """One model, ready to be opened.

    Attributes:
        name: the model's name.
        version: 0 where the model has no version folder.
        graph_file: the layer graph (for v3.0 the inference JSON itself).
        dense_file: the dense ``.model`` file, or the ``.onnx`` file of a network of its own.
        onnx_file: the ``.model`` file's network as ONNX, when it lies beside; None otherwise.
        tables: one record per table, in graph order.
        key_type: ``"I64"`` or ``"I32"`` (uint32 keys).
        max_batchsize: most samples one request may bring.
        hit_rate_threshold: when a GPU cache is filled; kept, without effect on the CPU.
        dense_dim: F.
        label_dim: L.
        gpu_cache: the configuration asks for a GPU embedding cache (``gpucache`` of ps.json).
    """

    name: str
    version: int = 0
    graph_file: Path
    dense_file: Path
    onnx_file: Path | None = None
    tables: tuple[TableConfig, ...]
    key_type: KeyType
    max_batchsize: int
    hit_rate_threshold: float
    dense_dim: int
    label_dim: int
    gpu_cache: bool = False

    def full_name(self, table: TableConfig) -> str:
        """The name under which stores and counters know ``table``: ``"<model>.<table>"``, as in HPS, of any version."""
        return f"{self.name}.{table.name}"


class VolatileDbConfig(_Record):
    """The memory tier.

    Attributes:
        type: ``"hash_map"`` or ``"disabled"``.
        capacity_rows: most rows over all tables; None means as many as the models need.
        capacity_bytes: most bytes over all tables, instead of ``capacity_rows``.
    """

    type: Literal["disabled", "hash_map"] = "hash_map"
    capacity_rows: int | None = None
    capacity_bytes: int | None = None


class PersistentDbConfig(_Record):
    """The durable tier.

    Attributes:
        type: ``"rocks_db"`` or ``"disabled"``.
        path: the database's folder; None only where disabled.
        read_only: open beside another process; the tables must already be there.
        num_threads: background threads of the database.
        max_batch_size: most keys one database call carries.
    """

    type: Literal["disabled", "rocks_db"] = "disabled"
    path: Path | None = None
    read_only: bool = False
    num_threads: int = 16
    max_batch_size: int = 65536


class ParameterServerConfig(_Record):
    """A whole ps.json.

    Attributes:
        models: the models it lists; empty where a model repository's folders say which models there are.
        volatile_db: the memory tier.
        persistent_db: the durable tier.
        key_type: ``supportlonglong``: ``"I64"`` or ``"I32"`` for all models.
        source: the file it was read from, for messages.
    """

    models: tuple[ModelConfig, ...]
    volatile_db: VolatileDbConfig
    persistent_db: PersistentDbConfig
    key_type: KeyType
    source: str
