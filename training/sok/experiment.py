"""``sok.experiment``: the calls under the name that SparseOperationKit 1.1 gave them."""

from training.sok import DynamicVariable, SparseTensor, Variable, dump, incremental_dump, init, load, lookup_sparse

__all__ = ["DynamicVariable", "SparseTensor", "Variable", "dump", "incremental_dump", "init", "load", "lookup_sparse"]
