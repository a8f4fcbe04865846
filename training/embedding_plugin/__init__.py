"""HugeCTR's embedding plugin for TensorFlow, in PyTorch. docs/embedding-plugin.md lists the differences."""

from training.calls.plugin import create_embedding, reset, restore, save
from training.embedding_plugin.initialize import init
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
