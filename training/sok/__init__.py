"""SparseOperationKit's calls, for PyTorch. docs/sok.md lists the differences."""

from training.sok import optimizers
from training.sok.dump_load import dump, incremental_dump, load
from training.sok.dynamic_variable import DynamicVariable
from training.sok.initialize import Init, init
from training.sok.layers import All2AllDenseEmbedding, DistributedEmbedding
from training.sok.lookup import lookup_sparse
from training.sok.optimizer_scope import OptimizerScope, split_embedding_variable_from_others
from training.sok.variable import Variable
from training.sparse_tensor import SparseTensor

__all__ = [
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "DynamicVariable",
    "Init",
    "OptimizerScope",
    "SparseTensor",
    "Variable",
    "dump",
    "incremental_dump",
    "init",
    "load",
    "lookup_sparse",
    "optimizers",
    "split_embedding_variable_from_others",
]
