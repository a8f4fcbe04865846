"""One model's view of a parameter server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.device import Device
from serving.batch import Batch, check_batch
from serving.config import ModelConfig
from serving.errors import RequestError
from serving.metrics import MetricSample
from serving.parameter_server import ParameterServer
from serving.parameter_server.arguments import check_keys
from serving.storage import MemoryStore, SharedMemoryStore
from serving.storage.store import Keys, Mask


@dataclass(frozen=True, slots=True)
class LookupResult:
    """A request's embeddings.

    Attributes:
        embeddings: one array per table, in graph order: float32[B, S, D] for bags, float32[N, D] for single keys.
        defaulted_keys: how many keys, over all tables, got the default value.
        incomplete: the tables in which keys may have got it because no tier holds them: the table's index, and found:
            bool[N]; None instead if caches on a device only counted the keys.
    """

    embeddings: tuple[NDArray[np.float32], ...]
    defaulted_keys: int
    incomplete: Sequence[tuple[int, Mask | None]] = ()


class LookupSession:
    """One model's view of a parameter server. May be used from any thread.

    Attributes:
        server: the parameter server.
        config: the model.
        device_id: the GPU that ``CreateEmbeddingCache`` named; without effect on the CPU.
        device: where the caches are; None without caches.
        health: the outages of the model, and how its requests ended.
    """

    device: Device | None = None

    def __init__(self, server: ParameterServer, config: ModelConfig, device_id: int = 0) -> None:
        """Check that ``server`` holds the model.

        Raises:
            UnknownModelError: ``server`` does not hold the model.
        """
        self.server = server
        self.health = server.health(config.name, config.version)
        self.config = config
        self.device_id = device_id
        self._pooled = server.pooled_tables(config)
        self._tables = tuple((table, config.full_name(table)) for table in config.tables)

    def __repr__(self) -> str:
        """Return the model."""
        return f"{type(self).__name__}({self.config.summary})"

    def lookup_pooled(self, batch: Batch, weights: Sequence[NDArray[np.float32] | None] | None = None) -> LookupResult:
        """Look up and pool all keys of ``batch``, which ``read_batch`` made for this model.

        Args:
            batch: the samples.
            weights: one entry per table, in graph order: float32[N], one weight per key of ``batch.tables``, or None;
                see ``ParameterServer.lookup_pooled``.

        Raises:
            RequestError: ``batch`` is no Batch, ``weights`` does not have one entry per table, or an entry is not
                float32[N].
            StoreError: a tier did not answer, and no other tier holds one of the keys.
            UnknownModelError: the model has been unloaded, or another load has taken its name.
        """
        check_batch(batch)
        if weights is not None:
            self._check_count("weights", weights)
        return LookupResult(*self._pooled.lookup_pooled(batch, weights))

    def lookup(self, keys: Sequence[Keys]) -> LookupResult:
        """Look up single keys and return the row of each key, as HPS's ``LookupSession.lookup`` does.

        Args:
            keys: one int64[N] per table, in graph order; duplicates are allowed, N may be 0 and may differ per table.

        Raises:
            RequestError: ``keys`` does not have one entry per table, an entry is not int64[N], or no table of the model
                can hold one of the keys.
            StoreError: a tier did not answer, and no other tier holds one of the keys.
            UnknownModelError: the model has been unloaded, or another load has taken its name.
        """
        self._check_keys(keys)
        return LookupResult(*self._pooled.lookup(keys))

    @property
    def never_waits(self) -> bool:
        """Whether a lookup waits for no disk, network, GPU or other process."""
        in_memory = (MemoryStore, SharedMemoryStore)  # a page of a snapshot may have to be read first
        return self.device is None and all(isinstance(store, in_memory) for store in self.server.stores)

    @property
    def is_answering(self) -> bool:
        """Whether the caches can answer, whatever the state of the tiers; always true without caches."""
        return True

    def refresh(self) -> None:
        """Read all cached rows from the tiers again; does nothing without caches."""

    def readings(self) -> Iterator[MetricSample]:
        """Return the caches' counters for the metrics page; none without caches."""
        yield from ()

    def close(self) -> None:
        """Free the caches after the requests in flight; does nothing without caches. Closing twice is allowed."""

    def _check_count(self, what: str, given: Any) -> None:
        """Refuse arguments that do not have one entry per table."""
        came = len(given) if hasattr(given, "__len__") else type(given).__name__
        if came != len(self._tables):
            raise RequestError(f"expected {what} of {len(self._tables)} tables, got {came}")

    def _check_keys(self, keys: Sequence[Keys]) -> None:
        self._check_count("keys", keys)
        for (_, name), of_table in zip(self._tables, keys, strict=True):
            check_keys(name, of_table, self.config.key_type)
