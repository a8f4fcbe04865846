"""A model of one table, ``m.t``, for benchmarks of the tiers."""

import json

import numpy as np

from serving.config import ModelConfig, TableConfig, read_ps_config
from serving.model.sparse_writer import write_sparse_batches

TABLE = "m.t"
WRITE_ROWS = 65_536


def table_model(file, dim, slots=1):
    """The model whose table is in the HugeCTR folder ``file``."""
    return ModelConfig(
        name="m",
        graph_file=file.parent / "graph.json",
        dense_file=file.parent / "dense.model",
        tables=(TableConfig(name="t", dim=dim, slots=slots, combiner="sum", file=file),),
        key_type="I64",
        max_batchsize=1024,
        dense_dim=0,
        label_dim=1,
    )


def write_table(file, keys, vectors_of):
    """Write a HugeCTR folder with the rows ``vectors_of(keys)``, batch by batch."""
    batches = (keys[start : start + WRITE_ROWS] for start in range(0, keys.size, WRITE_ROWS))
    write_sparse_batches(file, ((some, vectors_of(some)) for some in batches))


def tiers_file(folder, **tiers):
    """The configuration of a ps.json that has these tiers and no models."""
    (folder / "ps.json").write_text(json.dumps({"supportlonglong": True, "models": [], **tiers}))
    return read_ps_config(folder / "ps.json")


def raw_keys(keys):
    """The bytes of each key."""
    return keys.view("V8").tolist()


def raw_rows(vectors):
    """The bytes of each row."""
    return vectors.view(f"V{4 * vectors.shape[1]}").reshape(-1).tolist()


def vectors_from(keys, dim=32):
    """Rows that differ from key to key."""
    return (keys[:, None] % 9973 * 0.5 + np.arange(dim)).astype(np.float32)
