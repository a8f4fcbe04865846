"""The parameter server: which stores are asked for a key, in which order, and what comes of it."""

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from serving.config import ModelConfig, ParameterServerConfig, read_ps_config
from serving.errors import ConfigError, StoreError, UnknownModelError, about
from serving.model.records import Combiner
from serving.parameter_server import updates
from serving.parameter_server.counters import TableCounters
from serving.parameter_server.loading import drop_tables, load_tables, share_bounds, table_source
from serving.parameter_server.opening import open_stores, tier_settings
from serving.parameter_server.preflight import check_hot_keys
from serving.parameter_server.promotion import Promoter
from serving.parameter_server.served_table import ServedTable
from serving.parameter_server.tier import Tier, TierSettings
from serving.parameter_server.tier_lookup import TierLookup
from serving.parameter_server.updates import check_keys, check_weights
from serving.storage.store import Keys, Mask, RowPtrs, SourceStore, Store, Vectors, Weights

logger = logging.getLogger(__name__)


class ParameterServer:
    """Ordered stores, from the fastest to the slowest. Every method may be called from any thread.

    A key that one store does not hold is looked for in the next; a key that none holds is answered with its table's
    default value, which is never stored. A store that does not answer is passed over: its outage shows in the log and
    the counters. It is raised where a key was not found that the store may hold, which is not so where the slowest
    store answered and has every row by its kind (a durable one, a ``SourceStore``): what that does not hold is unknown.

    Attributes:
        stores: the stores, fastest first.
    """

    def __init__(
        self, stores: Sequence[Store], promote: bool = False, settings: Mapping[str, TierSettings] | None = None
    ) -> None:
        """Take the stores; the server closes them when it is closed.

        Args:
            stores: fastest first, at least one.
            promote: copy rows that a slower store held into the faster ones, as long as those have room, beside the
                lookups; see ``Promoter``. A default is never copied.
            settings: of single tiers, by their stores' names.

        Raises:
            ValueError: there is no store, two have the same name, settings name none of them, or one is slower than a
                ``SourceStore``, which has all rows: it would never be asked, and what was changed in it would be hidden
                after a restart.
        """
        names = [store.name for store in stores]
        if not stores or len(set(names)) < len(names):
            raise ValueError(f"expected one store or several of different names, got {names}")
        if any(isinstance(store, SourceStore) for store in stores[:-1]):
            raise ValueError("a store that has all rows from files must be the slowest")
        settings = settings or {}
        strange = settings.keys() - set(names)
        if strange:
            raise ValueError(f"settings for {sorted(strange)}, but the stores are {names}")
        self.stores = tuple(stores)
        by_tier = [settings.get(store.name, TierSettings()) for store in stores]
        self._kept = [store for store, one in zip(stores, by_tier, strict=True) if not one.is_initialized]
        self._first_rows = {store.name: one.first_rows for store, one in zip(stores, by_tier, strict=True)}
        self._tiers = [Tier(store, depth, by_tier[depth]) for depth, store in enumerate(stores)]
        self._promoter = Promoter() if promote else None
        self._lookup = TierLookup(self._tiers, self._promoter)
        self._lock = threading.Lock()  # one load, unload or close at a time; lookups do not take it
        # Replaced as wholes, never changed in place, so that lookups need no lock.
        self._models: tuple[ModelConfig, ...] = ()
        self._tables: dict[str, ServedTable] = {}

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
        check_hot_keys(config)
        promote = config.volatile_db.cache_missed_embeddings
        server = cls(open_stores(config), promote, tier_settings(config))
        try:
            server.share_bounds(config.models)
            for model in config.models:
                server.load_model(model)
        except BaseException:
            server.close()
            raise
        return server

    def share_bounds(self, configs: Sequence[ModelConfig]) -> None:
        """Say which models are about to be loaded: their tables share what RAM has room for, in proportion.

        A model that was not announced so gets what the others leave.

        Raises:
            ModelFileError: a file is missing or damaged; nothing was announced.
        """
        with self._lock:
            sources = []
            for config in configs:
                with about(config.name):
                    sources += [table_source(config, table) for table in config.tables]
            share_bounds(self.stores, sources)

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
                load_tables(self.stores, sources, self._kept, self._first_rows)
            except BaseException:
                with suppress(StoreError):  # what went wrong first says more
                    drop_tables(self.stores, names, drop_durable=False)
                raise
            tiers = [store.name for store in self.stores]
            tables = [ServedTable.of(config, table, tiers) for table in config.tables]
            added = {table.name: table for table in tables}
            self._tables = {**self._tables, **added}
            self._models = (*self._models, config)
        if config.gpu_cache:
            logger.warning("model %r: gpucache is true, but there is no GPU cache: its tiers answer alone", config.name)

    def unload_model(self, name: str, version: int | None = None) -> None:
        """Forget a model; durable stores keep its rows for the next load.

        Lookups that still run on it fail with UnknownModelError: let them end first.

        Args:
            name: the model's name.
            version: if given, the loaded version must be this one.

        Raises:
            UnknownModelError: it is not loaded.
            StoreError: a store does not answer; the model is forgotten all the same.
        """
        self._forget(name, version, drop_durable=False)

    def erase_model(self, name: str, version: int | None = None) -> None:
        """Forget a model and remove its rows from every tier, durable ones too: HPS's ``erase_model_from_hps``.

        See ``unload_model`` for arguments and errors. Processes that share a tier lose the rows as well.
        """
        self._forget(name, version, drop_durable=True)

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
            StoreError: a store did not answer that may hold a key which was not found.
        """
        held = self._table(table)
        check_keys(table, keys)
        rows, found = self._lookup.rows(held, np.ascontiguousarray(keys))
        self._check_still_loaded(held)
        return rows, found

    def lookup_pooled(
        self, table: str, keys: Keys, row_ptrs: RowPtrs, combiner: Combiner, weights: Weights | None = None
    ) -> tuple[Vectors, Mask]:
        """Look up bags of rows, each pooled into one vector.

        Which store holds a row does not change a bit of the answer: a bag is pooled by the first store if that holds
        every row of it, else from rows gathered over all stores, in key order, by the same code. A row counts as the
        table's row type rounds it, even where it comes from a store that keeps float32.

        Args:
            table: the table's full name.
            keys: int64[N], none of them reserved.
            row_ptrs: int32[R + 1] or int64[R + 1], CSR offsets of the bags into the keys.
            combiner: ``"sum"``; ``"mean"``, which divides by the bag's number of keys, unknown ones included; or
                ``"sqrtn"``, which divides by the square root of that number.
            weights: float32[N], one per key, by which rows are multiplied; the mean then divides by the sum of the
                weights, sqrtn by the square root of the sum of their squares. See ``kernels.host.pool_rows``.

        Returns:
            float32[R, D], an empty bag as zeros, and found: bool[N].

        Raises:
            UnknownModelError: no loaded model has this table, or it was unloaded meanwhile.
            RequestError: ``weights`` is not float32[N].
            StoreError: a store did not answer that may hold a key which was not found.
        """
        held = self._table(table)
        if weights is not None:
            check_weights(table, keys, weights)
            weights = np.ascontiguousarray(weights)
        out, found = self._lookup.pooled(held, np.ascontiguousarray(keys), row_ptrs, combiner, weights)
        self._check_still_loaded(held)
        return out, found

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite rows in every tier, slowest first; of duplicates in one call the last wins.

        When it returns, every lookup that starts finds the new rows. A tier before the slowest that has no room takes
        only those whose keys it holds. Updates of one table wait for each other.

        Args:
            table: the table's full name.
            keys: int64[N], none of them reserved.
            rows: float32[N, D].

        Raises:
            UnknownModelError: no loaded model has this table.
            RequestError: the arrays have other shapes or types, or a key is reserved.
            StoreFullError: the slowest tier has no room; nothing was written.
            StoreError: a tier did not take the rows, and those before it may still have the old ones: call again; or a
                value does not fit the table's row type, and nothing was written.
        """
        updates.insert(self.stores, self._table(table), keys, rows)

    def evict(self, table: str, keys: Keys) -> None:
        """Remove rows from every tier, slowest first; absent keys are no error.

        When it returns, every lookup that starts gets the table's default value for them.

        Args:
            table: the table's full name.
            keys: int64[N], none of them reserved.

        Raises:
            UnknownModelError: no loaded model has this table.
            RequestError: ``keys`` has another shape or type, or a key is reserved.
            StoreError: a tier did not answer, and those before it may still have the rows: call again.
        """
        updates.evict(self.stores, self._table(table), keys)

    def wait_for_promotions(self, timeout_s: float | None = None) -> bool:
        """Wait until the promotions of the lookups so far are done; returns whether they were within ``timeout_s``."""
        return self._promoter is None or self._promoter.wait(timeout_s)

    def counters(self) -> dict[str, TableCounters]:
        """Counts of every loaded table, by full name."""
        return {name: table.counting.read() for name, table in self._tables.items()}

    def close(self) -> None:
        """Forget the models and close the stores. Closing twice is allowed."""
        with self._lock:
            self._models, self._tables = (), {}
            if self._promoter is not None:
                self._promoter.close()
            for tier in self._tiers:
                tier.close()

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _table(self, name: str) -> ServedTable:
        table = self._tables.get(name)
        if table is None:
            raise UnknownModelError(f"no loaded model has a table {name!r}")
        return table

    def _forget(self, name: str, version: int | None, drop_durable: bool) -> None:
        with self._lock:
            gone = self.model(name, version)
            tables = [self._tables[gone.full_name(table)] for table in gone.tables]
            self._models = tuple(one for one in self._models if one is not gone)
            self._tables = {key: table for key, table in self._tables.items() if table not in tables}
            for table in tables:
                with table.changes.lock:
                    table.changes.is_gone = True
            drop_tables(self.stores, [table.name for table in tables], drop_durable)

    def _check_still_loaded(self, held: ServedTable) -> None:
        """Refuse an answer during which the table was unloaded: keys may be unknown for that reason alone."""
        if self._tables.get(held.name) is not held:
            raise UnknownModelError(f"table {held.name!r} was unloaded during the lookup")
