"""``sok.experiment``: the same calls, under the module name of SparseOperationKit 1.1."""

from training.sok import DynamicVariable, SparseTensor, Variable, dump, incremental_dump, init, load, lookup_sparse

__all__ = ["DynamicVariable", "SparseTensor", "Variable", "dump", "incremental_dump", "init", "load", "lookup_sparse"]
