"""One model's tables, looked up and pooled in one native call for all of them.

The native call asks the fastest tier. It finishes each table whose keys the tier all holds, and counts it. Every other
table goes on like a lookup of one table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kernels.host import PooledLookup
from serving.batch import Batch
from serving.config import ModelConfig
from serving.parameter_server.arguments import check_weights
from serving.parameter_server.counters import FETCH_BUCKETS_S
from serving.parameter_server.lookup import TierLookup
from serving.parameter_server.models import ServedModels
from serving.parameter_server.table import ServedTable
from serving.storage.store import Vectors, Weights

_BOUNDS_NS = [round(bound * 1e9) for bound in FETCH_BUCKETS_S]
_LINE_FLOATS = 16  # each table's vectors begin on a cache line; see ``PooledLookup``


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The model's tables as they are loaded now.

    Attributes:
        all_tables: ``ServedModels.by_name``, which is another object after each load and unload.
        tables: in graph order.
        native: pools them.
    """

    all_tables: object
    tables: tuple[ServedTable, ...]
    native: PooledLookup


class PooledTables:
    """The tables of one model, for pooled lookups. May be used from any thread."""

    def __init__(self, config: ModelConfig, served: ServedModels, lookup: TierLookup) -> None:
        """Look up nothing yet."""
        self._served, self._lookup = served, lookup
        self._names = [config.full_name(table) for table in config.tables]
        self._combiners = [table.combiner for table in config.tables]
        self._slots = [table.slots for table in config.tables]
        self._dims = [table.dim for table in config.tables]
        # Neighbours with the same slots and dim: how many, slots, dim. Their vectors are one array.
        sizes = zip(self._slots, self._dims, strict=True)
        self._runs = [(len(list(some)), *size) for size, some in groupby(sizes)]
        self._loaded: _Loaded | None = None

    def lookup(
        self, batch: Batch, weights: Sequence[Weights | None] | None = None
    ) -> tuple[tuple[NDArray[np.float32], ...], int]:
        """Look up and pool all keys of ``batch``.

        Args:
            batch: the samples; its keys are checked.
            weights: one entry per table; see ``ParameterServer.lookup_pooled``.

        Returns:
            one float32[B, S, D] per table, in graph order, and how many keys got the default value.

        Raises:
            See ``ParameterServer.lookup_pooled``.
        """
        loaded = self._loaded
        if loaded is None or loaded.all_tables is not self._served.by_name:
            loaded = self._loaded = self._load()
        if weights is not None:
            weights = self._checked(batch, weights)
        out, embeddings = self._room(batch.samples)
        native = self._lookup.native_tables(self._names)
        rest = loaded.native.fetch(native, batch.keys, batch.row_ptrs, out, batch.samples, weights)
        defaulted_keys = 0
        for place, found in rest:
            held = loaded.tables[place]
            asked = (*batch.tables[place], self._combiners[place], None if weights is None else weights[place])
            if found is None:
                pooled, found = self._lookup.pooled(held, *asked)
                embeddings[place] = pooled.reshape(embeddings[place].shape)
            else:
                found = self._lookup.complete(held, *asked, embeddings[place].reshape(-1, held.dim), found)
            defaulted_keys += found.size - int(np.count_nonzero(found))
        if loaded.all_tables is not self._served.by_name:
            for held in loaded.tables:
                self._served.check_still_loaded(held)
        return tuple(embeddings), defaulted_keys

    def _load(self) -> _Loaded:
        all_tables = self._served.by_name
        tables = tuple(self._served.table(name) for name in self._names)
        counts = [table.counting.pooled for table in tables]
        native = PooledLookup(self._dims, self._slots, self._combiners, counts, _BOUNDS_NS)
        return _Loaded(all_tables, tables, native)

    def _room(self, samples: int) -> tuple[NDArray[np.float32], list[Vectors]]:
        """Return memory for the vectors of all tables, and each table's part of it."""
        runs = []
        last = 0
        for count, slots, dim in self._runs:
            used = samples * slots * dim
            size = -(-used // _LINE_FLOATS) * _LINE_FLOATS
            first, last = last, last + count * size
            runs.append((first, last, size, used, (count, samples, slots, dim)))
        out = np.empty(last, np.float32)
        parts: list[Vectors] = []
        for first, last, size, used, shape in runs:
            run = out[first:last]
            parts.extend((run if size == used else run.reshape(-1, size)[:, :used]).reshape(shape))
        return out, parts

    def _checked(self, batch: Batch, weights: Sequence[Weights | None]) -> list[Weights | None]:
        for name, table, given in zip(self._names, batch.tables, weights, strict=True):
            if given is not None:
                check_weights(name, table.keys, given)
        return [None if given is None else np.ascontiguousarray(given) for given in weights]
