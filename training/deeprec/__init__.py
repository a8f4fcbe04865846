"""DeepRec's fused lookups and feature columns, in PyTorch. docs/deeprec.md lists the differences."""

from training.deeprec.export import write_tables
from training.deeprec.feature_column import (
    categorical_column_with_embedding,
    embedding_column,
    input_from_feature_columns,
    input_layer,
    ones_initializer,
    sparse_column_with_embedding,
)
from training.deeprec.ftrl import FtrlOptimizer
from training.deeprec.lookup import (
    fused_embedding_lookup_sparse,
    fused_embedding_lookup_sparse_v2,
    fused_safe_embedding_lookup_sparse,
)
from training.sparse_tensor import SparseTensor

__all__ = [
    "FtrlOptimizer",
    "SparseTensor",
    "categorical_column_with_embedding",
    "embedding_column",
    "fused_embedding_lookup_sparse",
    "fused_embedding_lookup_sparse_v2",
    "fused_safe_embedding_lookup_sparse",
    "input_from_feature_columns",
    "input_layer",
    "ones_initializer",
    "sparse_column_with_embedding",
    "write_tables",
]
