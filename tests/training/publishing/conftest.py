"""Tables that learn, and a log that takes messages or is away."""

import numpy as np
import pytest
import torch

from training import EmbeddingBagCollection, EmbeddingBagConfig
from training.optimizers import Adam

CONFIGS = {
    "user": EmbeddingBagConfig(4, max_rows=50),
    "tags": EmbeddingBagConfig(3),
    "day": EmbeddingBagConfig(2, rows=20),
}


class Learner:
    """Tables of three kinds and their optimizer: with evictions, growing, and with fixed rows."""

    def __init__(self, configs=CONFIGS, seed=1):
        self.collection = EmbeddingBagCollection(configs, seed=seed)
        self.optimizer = Adam(self.collection.parameters(), lr=0.1)
        self.rng = np.random.default_rng(seed)

    @property
    def tables(self):
        return self.collection.tables

    def learn(self, **keys):
        """Take one step with these keys, or with random ones."""
        if not keys:
            keys = {name: self.rng.integers(0, high, 20) for name, high in (("user", 300), ("tags", 900), ("day", 20))}
        vectors = self.collection({name: torch.as_tensor(np.asarray(some)) for name, some in keys.items()})
        sum(vector.sum() for vector in vectors.values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def learner():
    return Learner()
