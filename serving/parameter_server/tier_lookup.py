"""How a lookup goes through the tiers: each is asked for what the faster ones lack."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.host import pool_rows
from serving.errors import StoreError
from serving.model.records import Combiner
from serving.parameter_server.served_table import ServedTable
from serving.parameter_server.tier import Tier
from serving.storage.store import Keys, Mask, RowPtrs, Vectors

NOWHERE = -1
Depths = NDArray[np.int8]  # by key: which tier held it, counted from the fastest, or NOWHERE


class TierLookup:
    """Looks keys up in ordered tiers. Every method may be called from any thread."""

    def __init__(self, tiers: Sequence[Tier], promote: bool) -> None:
        """Take the tiers, fastest first."""
        self._tiers = tuple(tiers)
        self._promote = promote

    def rows(self, held: ServedTable, keys: Keys) -> tuple[Vectors, Mask]:
        """See ``ParameterServer.lookup``."""
        rows, depths = self._gather(held, keys)
        return rows, self._count(held, depths)

    def pool(self, held: ServedTable, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner) -> Mask:
        """See ``ParameterServer.lookup_pooled``; writes ``out``."""
        first = self._tiers[0]
        pooled = first.fetch_pooled(held.name, keys, row_ptrs, out, combiner, held.counting)
        if pooled is None or isinstance(pooled, StoreError):
            rows, depths = self._gather(held, keys, outage=pooled)
            pool_rows(rows, row_ptrs, out, combiner)
            return self._count(held, depths)
        if np.count_nonzero(pooled) == keys.size:
            held.counting.looked_up({first.name: keys.size}, 0)
            return pooled
        depths = np.where(pooled, np.int8(0), np.int8(NOWHERE))
        if len(self._tiers) > 1 or held.default_value:
            self._pool_again(held, keys, row_ptrs, out, combiner, depths)
        return self._count(held, depths)

    def _gather(self, held: ServedTable, keys: Keys, outage: StoreError | None = None) -> tuple[Vectors, Depths]:
        """Fetch rows from the first tier that has them, defaults filled in.

        ``outage``: why the first tier has just not answered; it is not asked again.
        """
        rows = np.full((keys.size, held.dim), held.default_value, dtype=np.float32)
        depths = np.full(keys.size, NOWHERE, dtype=np.int8)
        missing = np.arange(keys.size)
        for depth, tier in enumerate(self._tiers):
            if not missing.size:
                break
            if depth == 0 and outage is not None:
                continue
            wanted = keys[missing]
            part = np.empty((missing.size, held.dim), dtype=np.float32)
            found = tier.fetch(held.name, wanted, part, held.counting)
            if isinstance(found, StoreError):
                outage = found
                continue
            hits = missing[found]
            hit_keys, hit_rows, row_dtype = wanted[found], part[found], held.row_dtype
            rows[hits] = tier.as_served(held.name, row_dtype, hit_keys, hit_rows)
            depths[hits] = depth
            if self._promote and hits.size and not tier.gives_rounded(row_dtype):  # a row must not be rounded twice
                for faster in self._tiers[:depth]:
                    faster.promote(held.name, hit_keys, hit_rows, held.counting)
            missing = missing[~found]
        if missing.size and outage is not None:
            raise outage
        return rows, depths

    def _pool_again(
        self, held: ServedTable, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, depths: Depths
    ) -> None:
        """Pool every bag anew in which a key is NOWHERE by ``depths``; writes ``out`` and ``depths``."""
        bags = np.unique(np.searchsorted(row_ptrs, np.flatnonzero(depths == NOWHERE), side="right") - 1)
        sizes = row_ptrs[bags + 1] - row_ptrs[bags]
        bag_ptrs = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        places = np.repeat(row_ptrs[bags] - bag_ptrs[:-1], sizes) + np.arange(bag_ptrs[-1])
        rows, depths[places] = self._gather(held, keys[places])
        pooled = np.empty((bags.size, held.dim), dtype=np.float32)
        pool_rows(rows, bag_ptrs, pooled, combiner)
        out[bags] = pooled

    def _count(self, held: ServedTable, depths: Depths) -> Mask:
        """Count one lookup; return which keys were found."""
        counts = np.bincount(depths + 1, minlength=len(self._tiers) + 1).tolist()
        hits = {tier.name: count for tier, count in zip(self._tiers, counts[1:], strict=True) if count}
        held.counting.looked_up(hits, counts[0])
        found: Mask = depths != NOWHERE
        return found
