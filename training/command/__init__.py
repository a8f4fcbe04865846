"""The command ``hotrow train``."""
