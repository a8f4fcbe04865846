"""HugeCTR's embedding plugin for TensorFlow, in PyTorch. docs/embedding-plugin.md lists the differences."""

from training.embedding_plugin.plugin import create_embedding, init, reset, restore, save
from training.embedding_plugin.propagation import broadcast_then_convert_to_csr, fprop, fprop_experimental

__all__ = [
    "broadcast_then_convert_to_csr",
    "create_embedding",
    "fprop",
    "fprop_experimental",
    "init",
    "reset",
    "restore",
    "save",
]
