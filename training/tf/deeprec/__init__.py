"""DeepRec's fused lookups and feature columns, in TensorFlow. docs/tensorflow.md lists the differences."""

from training.tf.deeprec.feature_column import (
    categorical_column_with_embedding,
    embedding_column,
    input_from_feature_columns,
    input_layer,
    sparse_column_with_embedding,
    write_tables,
)
from training.tf.deeprec.ftrl import FtrlOptimizer
from training.tf.deeprec.lookup import (
    fused_embedding_lookup_sparse,
    fused_embedding_lookup_sparse_v2,
    fused_safe_embedding_lookup_sparse,
)

__all__ = [
    "FtrlOptimizer",
    "categorical_column_with_embedding",
    "embedding_column",
    "fused_embedding_lookup_sparse",
    "fused_embedding_lookup_sparse_v2",
    "fused_safe_embedding_lookup_sparse",
    "input_from_feature_columns",
    "input_layer",
    "sparse_column_with_embedding",
    "write_tables",
]
