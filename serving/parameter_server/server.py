"""The parameter server: which stores are asked for a key, in which order, and what comes of it."""

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kernels.host import RowDtype, pool_rows
from serving.config import ModelConfig, ParameterServerConfig, TableConfig, read_ps_config
from serving.errors import ConfigError, RequestError, StoreError, UnknownModelError
from serving.model.records import Combiner
from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY
from serving.parameter_server.counters import TableCounters, TableCounting
from serving.parameter_server.loading import drop_tables, load_tables, table_source
from serving.parameter_server.tier import Tier
from serving.storage import MemoryStore, RedisStore, RocksDbStore
from serving.storage.store import Keys, Mask, RowPtrs, Store, Vectors

logger = logging.getLogger(__name__)

NOWHERE = -1
Depths = NDArray[np.int8]  # by key: which tier held it, counted from the fastest, or NOWHERE


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    dim: int
    row_dtype: RowDtype
    default_value: float
    counting: TableCounting


class ParameterServer:
    """Ordered stores, from the fastest to the slowest. Every method may be called from any thread.

    A key that one store does not hold is looked for in the next; a key that none holds is answered with its table's
    default value, which is never stored. A store that does not answer is passed over: if a slower one has the key, the
    outage shows in the log and the counters only; if none has it, the outage is raised, for the store that is down
    may hold it.

    Attributes:
        stores: the stores, fastest first.
    """

    def __init__(self, stores: Sequence[Store], promote: bool = False) -> None:
        """Take the stores; the server closes them when it is closed.

        Args:
            stores: fastest first, at least one.
            promote: copy rows that a slower store held into the faster ones, as long as those have room.

        Raises:
            ValueError: there is no store.
        """
        if not stores:
            raise ValueError("expected at least one store, got none")
        self.stores = tuple(stores)
        self._tiers = tuple(Tier(store) for store in stores)
        self._promote = promote
        self._lock = threading.Lock()  # one load, unload or close at a time; lookups do not take it
        # Replaced as wholes, never changed in place, so that lookups need no lock.
        self._models: tuple[ModelConfig, ...] = ()
        self._tables: dict[str, _Table] = {}

    @classmethod
    def from_config(cls, config: str | Path | ParameterServerConfig) -> Self:
        """Open the stores of a ``ps.json`` and load the models it lists.

        Raises:
            ConfigError: the file cannot be accepted.
            StoreError: a store cannot be opened, or cannot hold a model.
            ModelFileError: a model's file is missing or damaged.
        """
        if not isinstance(config, ParameterServerConfig):
            config = read_ps_config(config)
        server = cls(_open_stores(config))
        try:
            for model in config.models:
                server.load_model(model)
        except BaseException:
            server.close()
            raise
        return server

    def load_model(self, config: ModelConfig) -> None:
        """Load every table of a model: all of it, or, where that fails, nothing.

        Raises:
            ConfigError: the model is already loaded, in this version or another.
            StoreFullError: memory is the only tier and has too little room; nothing has been loaded.
            StoreError: a store cannot take the rows.
            ModelFileError: a file is missing or damaged.
        """
        with self._lock:
            names = [config.full_name(table) for table in config.tables]
            taken = next((name for name in names if name in self._tables), None)
            if taken is not None:
                raise ConfigError(
                    str(config.graph_file), "", f"table {taken!r} is already loaded; unload its model first"
                )
            sources = [table_source(config, table) for table in config.tables]
            try:
                load_tables(self.stores, sources)
            except BaseException:
                drop_tables(self.stores, names, drop_durable=False)
                raise
            added = {name: _table(config, table) for name, table in zip(names, config.tables, strict=True)}
            self._tables = {**self._tables, **added}
            self._models = (*self._models, config)
        if config.gpu_cache:
            logger.warning("model %r: gpucache is true, but there is no GPU cache: its tiers answer alone", config.name)

    def unload_model(self, name: str, version: int | None = None, *, drop_durable: bool = False) -> None:
        """Forget a model. Lookups that still run on it fail with UnknownModelError: let them end first.

        Args:
            name: the model's name.
            version: if given, the loaded version must be this one.
            drop_durable: also remove its rows from durable stores, which otherwise keep them for the next start.

        Raises:
            UnknownModelError: it is not loaded.
            StoreError: a store does not answer; the model is forgotten all the same.
        """
        with self._lock:
            gone = self.model(name, version)
            names = [gone.full_name(table) for table in gone.tables]
            self._models = tuple(one for one in self._models if one is not gone)
            self._tables = {key: table for key, table in self._tables.items() if key not in names}
            drop_tables(self.stores, names, drop_durable)

    def models(self) -> tuple[ModelConfig, ...]:
        """The loaded models, in the order in which they were loaded."""
        return self._models

    def model(self, name: str, version: int | None = None) -> ModelConfig:
        """The loaded model of this name.

        Args:
            name: the model's name.
            version: if given, the loaded version must be this one.

        Raises:
            UnknownModelError: it is not loaded.
        """
        held = next((one for one in self._models if one.name == name and version in (None, one.version)), None)
        if held is None:
            raise UnknownModelError(f"no model {name!r}{'' if version is None else f' of version {version}'} is loaded")
        return held

    def lookup(self, table: str, keys: Keys) -> tuple[Vectors, Mask]:
        """Look up rows.

        Args:
            table: the table's full name.
            keys: int64[N]; duplicates are allowed, N may be 0.

        Returns:
            float32[N, D], absent keys with the table's default value, and found: bool[N].

        Raises:
            UnknownModelError: no loaded model has this table, or it was unloaded meanwhile.
            RequestError: a key is one of the four reserved int64 values.
            StoreError: a store did not answer, and no other holds one of the keys.
        """
        held = self._table(table)
        if keys.size and (keys.min() < SMALLEST_KEY or keys.max() > LARGEST_KEY):
            at = int(np.argmax((keys < SMALLEST_KEY) | (keys > LARGEST_KEY)))
            raise RequestError(f"table {table!r}: key {keys[at]} at position {at} is reserved")
        rows, depths = self._gather(held, np.ascontiguousarray(keys))
        found = self._count(held, depths)
        self._check_still_loaded(held)
        return rows, found

    def lookup_pooled(self, table: str, keys: Keys, row_ptrs: RowPtrs, combiner: Combiner) -> tuple[Vectors, Mask]:
        """Look up bags of rows, each pooled into one vector.

        Which store holds a row does not change a bit of the answer: a bag is pooled by the first store if that holds
        every row of it, else from rows gathered over all stores, in key order, by the same code. A row counts as the
        table's row type rounds it, even where it comes from a store that keeps float32.

        Args:
            table: the table's full name.
            keys: int64[N], none of them reserved.
            row_ptrs: int32[R + 1] or int64[R + 1], CSR offsets of the bags into the keys.
            combiner: ``"sum"``, or ``"mean"``, which divides by the bag's number of keys, unknown ones included.

        Returns:
            float32[R, D], an empty bag as zeros, and found: bool[N].

        Raises:
            UnknownModelError: no loaded model has this table, or it was unloaded meanwhile.
            StoreError: a store did not answer, and no other holds one of the keys.
        """
        held = self._table(table)
        out = np.empty((row_ptrs.size - 1, held.dim), dtype=np.float32)
        found = self._pool(held, keys, row_ptrs, out, combiner)
        self._check_still_loaded(held)
        return out, found

    def counters(self) -> dict[str, TableCounters]:
        """Counts of every loaded table, by full name."""
        return {name: table.counting.read() for name, table in self._tables.items()}

    def close(self) -> None:
        """Forget the models and close the stores. Closing twice is allowed."""
        with self._lock:
            self._models, self._tables = (), {}
            for store in self.stores:
                store.close()

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _table(self, name: str) -> _Table:
        table = self._tables.get(name)
        if table is None:
            raise UnknownModelError(f"no loaded model has a table {name!r}")
        return table

    def _check_still_loaded(self, held: _Table) -> None:
        """Refuse an answer during which the table was unloaded: keys may be unknown for that reason alone."""
        if self._tables.get(held.name) is not held:
            raise UnknownModelError(f"table {held.name!r} was unloaded during the lookup")

    def _pool(self, held: _Table, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner) -> Mask:
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

    def _gather(self, held: _Table, keys: Keys, outage: StoreError | None = None) -> tuple[Vectors, Depths]:
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
        self, held: _Table, keys: Keys, row_ptrs: RowPtrs, out: Vectors, combiner: Combiner, depths: Depths
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

    def _count(self, held: _Table, depths: Depths) -> Mask:
        """Count one lookup; return which keys were found."""
        counts = np.bincount(depths + 1, minlength=len(self._tiers) + 1).tolist()
        hits = {tier.name: count for tier, count in zip(self._tiers, counts[1:], strict=True) if count}
        held.counting.looked_up(hits, counts[0])
        found: Mask = depths != NOWHERE
        return found


def _table(config: ModelConfig, table: TableConfig) -> _Table:
    counting = TableCounting(config.name, config.version, table.name)
    return _Table(config.full_name(table), table.dim, table.row_dtype, table.default_value, counting)


def _open_stores(config: ParameterServerConfig) -> list[Store]:
    stores: list[Store] = []
    volatile, persistent = config.volatile_db, config.persistent_db
    with ExitStack() as opened:
        if volatile.type == "hash_map":
            per_table = volatile.capacity_rows_per_table
            stores.append(MemoryStore(volatile.capacity_rows, volatile.capacity_bytes, per_table))
        if volatile.redis is not None:
            stores.append(opened.enter_context(closing(RedisStore(volatile.redis))))
        if persistent.type == "rocks_db" and persistent.path is not None:
            threads, keys = persistent.num_threads, persistent.max_batch_size
            stores.append(RocksDbStore(persistent.path, persistent.read_only, threads, keys))
        opened.pop_all()
    return stores
