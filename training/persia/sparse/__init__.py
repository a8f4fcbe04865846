"""Persia's package of optimizers for embeddings."""
