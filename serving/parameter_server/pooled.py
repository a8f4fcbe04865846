"""One model's tables, looked up and pooled in one native call for all of them.

The native call asks the fastest tier. It finishes each table whose keys the tier all holds, and counts its keys. Every
other table is then looked up on its own. If one of these fails, the counted keys are taken back.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kernels.host import PooledLookup
from serving.batch import Batch
from serving.config import ModelConfig
from serving.errors import UnknownModelError
from serving.parameter_server.arguments import check_weights
from serving.parameter_server.counters import FETCH_BUCKETS_S
from serving.parameter_server.lookup import TierLookup
from serving.parameter_server.models import ServedModels
from serving.storage.store import Keys, Mask, Vectors, Weights

_BOUNDS_NS = [round(bound * 1e9) for bound in FETCH_BUCKETS_S]
_LINE_FLOATS = 16  # each table's vectors begin on a cache line; see ``PooledLookup``


class PooledTables:
    """The tables of one loaded model, for pooled lookups. May be used from any thread."""

    def __init__(self, config: ModelConfig, served: ServedModels, lookup: TierLookup) -> None:
        """See ``ParameterServer.pooled_tables``."""
        self._model = config.name
        self._served, self._lookup = served, lookup
        self._all_tables = served.by_name  # the tables below were among these; another object after a load or unload
        self._tables = [served.table(config.full_name(table)) for table in config.tables]
        self._names = [table.name for table in self._tables]
        self._fastest = [table.tiers[0] for table in self._tables]
        self._combiners = [table.combiner for table in config.tables]
        sizes = [(table.slots, table.dim) for table in config.tables]
        # Neighbours with the same slots and dim: how many, slots, dim. Their vectors are one array.
        self._runs = [(len(list(some)), *size) for size, some in groupby(sizes)]
        slots, dims = zip(*sizes, strict=True)
        counts = [table.counting.pooled for table in self._tables]
        self._native = PooledLookup(dims, slots, self._combiners, counts, _BOUNDS_NS)

    def lookup(
        self, batch: Batch, weights: Sequence[Weights | None] | None = None
    ) -> tuple[tuple[NDArray[np.float32], ...], int, Sequence[tuple[int, Mask]]]:
        """Look up and pool all keys of ``batch``.

        Args:
            batch: the samples, which ``read_batch`` made for this model.
            weights: one entry per table; see ``ParameterServer.lookup_pooled``.

        Returns:
            one float32[B, S, D] per table, in graph order; how many keys got the default value; and the tables in which
            keys may have: the table's index, and found: bool[N].

        Raises:
            UnknownModelError: the model has been unloaded, or another load has taken its name.
            RequestError: an entry of ``weights`` is not float32[N].
            StoreError: a key was not found, and the truth did not answer.
        """
        self._check_loaded()
        if weights is not None:
            weights = self._checked(batch, weights)
        out, embeddings = self._room(batch.samples)
        native = [one.native for one in self._fastest]
        keys, row_ptrs, _ = batch.joined
        rest = self._native.fetch(native, keys, row_ptrs, out, batch.samples, weights)
        incomplete: list[tuple[int, Mask]] = []
        try:
            self._look_up_rest(batch, weights, rest, embeddings, incomplete)
            if self._served.by_name is not self._all_tables:
                for held in self._tables:
                    self._served.check_still_loaded(held)
        except Exception:
            self._take_back(batch, [place for place, _ in rest])
            raise
        return tuple(embeddings), self._count(incomplete), incomplete

    def rows(self, keys: Sequence[Keys]) -> tuple[tuple[Vectors, ...], int, Sequence[tuple[int, Mask]]]:
        """Look up single keys, int64[N] of each table; returns float32[N, D] of each, and the same as ``lookup``.

        Raises:
            UnknownModelError, StoreError: see ``lookup``.
        """
        self._check_loaded()
        answers = [self._lookup.rows(*one) for one in zip(self._tables, map(np.ascontiguousarray, keys), strict=True)]
        self._check_loaded()
        found = [found for _, found in answers]
        defaulted_keys = self._count(list(enumerate(found)))
        incomplete = [(place, mask) for place, mask in enumerate(found) if not mask.all()]
        return tuple(rows for rows, _ in answers), defaulted_keys, incomplete

    def _look_up_rest(
        self,
        batch: Batch,
        weights: Sequence[Weights | None] | None,
        rest: Sequence[tuple[int, Mask | None]],
        embeddings: list[Vectors],
        incomplete: list[tuple[int, Mask]],
    ) -> None:
        """Look up the tables that the native call has not finished; writes ``embeddings`` and ``incomplete``."""
        for place, found in rest:
            held, embedding = self._tables[place], embeddings[place]
            asked = (*batch.tables[place], self._combiners[place], None if weights is None else weights[place])
            if found is None:
                pooled, found = self._lookup.pooled(held, *asked)
                embeddings[place] = pooled.reshape(embedding.shape)
            else:
                found = self._lookup.complete(held, *asked, embedding.reshape(-1, held.dim), found)
            incomplete.append((place, found))

    def _count(self, answered: Sequence[tuple[int, Mask]]) -> int:
        """Count the keys of tables, given by place and found keys; returns how many keys got the default value."""
        defaulted_keys = 0
        for place, found in answered:
            of_table = found.size - int(np.count_nonzero(found))
            self._tables[place].counting.answered(found.size, of_table)
            defaulted_keys += of_table
        return defaulted_keys

    def _take_back(self, batch: Batch, rest: Sequence[int]) -> None:
        for place, of_table in enumerate(batch.tables):
            if place not in rest:
                self._tables[place].counting.take_back(of_table.keys.size)

    def _check_loaded(self) -> None:
        all_tables = self._served.by_name
        if all_tables is self._all_tables:  # the usual case does not look at each table
            return
        if any(self._served.table(held.name) is not held for held in self._tables):
            raise UnknownModelError(f"model {self._model!r} was unloaded, and another load has its name now")
        self._all_tables = all_tables

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
