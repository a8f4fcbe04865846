"""Embedding tables in training: ``EmbeddingBagCollection`` is a module of PyTorch with many of them."""

from training.embedding.clipping import clip_grad_norm_
from training.embedding.collection import EmbeddingBagCollection
from training.embedding.joining import join_state_dicts
from training.embedding.rows import EmbeddingCollection, JaggedRows
from training.row_file import TableRows
from training.tables.config import Constant, EmbeddingBagConfig, Normal, Uniform
from training.tables.table import EmbeddingTable

__all__ = [
    "Constant",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingTable",
    "JaggedRows",
    "Normal",
    "TableRows",
    "Uniform",
    "clip_grad_norm_",
    "join_state_dicts",
]
