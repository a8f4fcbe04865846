"""Where ``pickle`` finds the tables that earlier versions have written."""

from training.tables.table import EmbeddingTable, _unpickled

__all__ = ["EmbeddingTable", "_unpickled"]
