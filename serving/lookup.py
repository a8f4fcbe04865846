"""The embedding half of a prediction: from a batch's keys to pooled vectors, one tensor per table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch
from serving.config import ModelConfig
from serving.errors import RequestError, UnknownModelError
from serving.parameter_server import ParameterServer


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What a batch's keys stand for.

    Attributes:
        embeddings: float32[B, S, D] per table, in graph order.
        defaulted_keys: keys, over all tables, that no tier holds and the default value stands for.
    """

    embeddings: tuple[NDArray[np.float32], ...]
    defaulted_keys: int


class LookupSession:
    """One model's view of a parameter server. May be used from any thread.

    Attributes:
        server: the parameter server.
        config: the model.
        device_id: the GPU that ``CreateEmbeddingCache`` named; without effect on the CPU.
    """

    def __init__(self, server: ParameterServer, config: ModelConfig, device_id: int = 0) -> None:
        """Check that ``server`` holds the model.

        Raises:
            UnknownModelError: it does not.
        """
        self._held = server.model(config.name, config.version)
        self.server = server
        self.config = config
        self.device_id = device_id
        self._tables = tuple((table, config.full_name(table)) for table in config.tables)

    def lookup_pooled(self, batch: Batch, weights: Sequence[NDArray[np.float32] | None] | None = None) -> LookupResult:
        """Look up and pool all keys of ``batch``, which ``read_batch`` made for this model.

        Args:
            batch: the samples.
            weights: one entry per table, in graph order: float32[N], one weight per key of ``batch.tables``, or None;
                see ``ParameterServer.lookup_pooled``.

        Raises:
            RequestError: ``weights`` has not one entry per table, or one that is not float32[N].
            StoreError: a tier did not answer, and no other holds one of the keys.
            UnknownModelError: the model has been unloaded, or another load has taken its name.
        """
        by_table = (None,) * len(self._tables) if weights is None else weights
        if len(by_table) != len(self._tables):
            raise RequestError(f"expected weights of {len(self._tables)} tables, got {len(by_table)}")
        answers = [
            self.server.lookup_pooled(name, of_table.keys, of_table.row_ptrs, table.combiner, of_keys)
            for (table, name), of_table, of_keys in zip(self._tables, batch.tables, by_table, strict=True)
        ]
        # Rows of a model that took this one's name do not go with this one's dense network.
        if not any(model is self._held for model in self.server.models()):
            raise UnknownModelError(f"model {self.config.name!r} was unloaded, and another load has its name now")
        embeddings = []
        defaulted_keys = 0
        for (table, _), (pooled, found) in zip(self._tables, answers, strict=True):
            embeddings.append(pooled.reshape(batch.samples, table.slots, table.dim))
            defaulted_keys += found.size - int(np.count_nonzero(found))
        return LookupResult(tuple(embeddings), defaulted_keys)
