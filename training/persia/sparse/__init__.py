"""Persia's package for the optimizers of embeddings."""
