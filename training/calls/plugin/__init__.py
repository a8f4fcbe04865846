"""HugeCTR's embedding plugin, except how the gradients of a framework reach the rows."""

from training.calls.plugin.state import create_embedding, reset, restore, save

__all__ = ["create_embedding", "reset", "restore", "save"]
