"""SparseOperationKit's calls, for TensorFlow and Keras. docs/tensorflow.md lists the differences."""

from training.tf.sok import optimizers
from training.tf.sok.dump_load import dump, incremental_dump, load
from training.tf.sok.initialize import Init, init
from training.tf.sok.layers import All2AllDenseEmbedding, DistributedEmbedding
from training.tf.sok.lookup import lookup_sparse
from training.tf.sok.optimizers import OptimizerWrapper
from training.tf.sok.scope import OptimizerScope, split_embedding_variable_from_others
from training.tf.sok.variables import DynamicVariable, Variable

__all__ = [
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "DynamicVariable",
    "Init",
    "OptimizerScope",
    "OptimizerWrapper",
    "Variable",
    "dump",
    "incremental_dump",
    "init",
    "load",
    "lookup_sparse",
    "optimizers",
    "split_embedding_variable_from_others",
]
