"""Layer 1: the embedding cache, a data structure on one device. It never fetches anything."""
