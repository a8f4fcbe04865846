"""Configuration: HugeCTR's own JSON files, read into frozen records."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TableConfig(_Record):
    """One embedding table of one model.

    Attributes:
        name: table name inside the model; its full name is ``"<model>.<name>"``.
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
    combiner: Literal["sum", "mean"]
    default_value: float = 0.0
    file: Path
    row_layout: Literal["distributed", "localized"] = "distributed"
    max_keys_per_sample: int | None = None


class ModelConfig(_Record):
    """One model, ready to be opened.

    Attributes:
        name: the model's name.
        version: 0 where the model has no version folder.
        graph_file: the layer graph (for v3.0 the inference JSON itself).
        dense_file: the dense ``.model`` file.
        onnx_file: the dense network as ONNX, when it lies beside; None otherwise.
        tables: one record per table, in graph order.
        key_type: ``"I64"`` or ``"I32"`` (uint32 keys).
        max_batchsize: most samples one request may bring.
        hit_rate_threshold: when a GPU cache is filled; kept, without effect on the CPU.
        dense_dim: F.
        label_dim: L.
    """

    name: str
    version: int = 0
    graph_file: Path
    dense_file: Path
    onnx_file: Path | None = None
    tables: tuple[TableConfig, ...]
    key_type: Literal["I64", "I32"]
    max_batchsize: int
    hit_rate_threshold: float
    dense_dim: int
    label_dim: int
