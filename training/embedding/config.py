"""Where ``pickle`` finds the configurations of tables that earlier versions have written."""

from training.tables.config import Constant, EmbeddingBagConfig, Normal, Uniform

__all__ = ["Constant", "EmbeddingBagConfig", "Normal", "Uniform"]
