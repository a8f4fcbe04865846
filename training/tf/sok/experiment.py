"""``sok.experiment``: the same calls, under the module name of SparseOperationKit 1.1."""

from training.tf.sok import (
    DynamicVariable,
    OptimizerWrapper,
    Variable,
    dump,
    incremental_dump,
    init,
    load,
    lookup_sparse,
)

__all__ = [
    "DynamicVariable",
    "OptimizerWrapper",
    "Variable",
    "dump",
    "incremental_dump",
    "init",
    "load",
    "lookup_sparse",
]
