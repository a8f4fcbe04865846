"""The parameter server: which stores are asked for a key, in which order, and what comes of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from serving.config import ModelConfig, ParameterServerConfig, read_ps_config
from serving.model.records import Combiner
from serving.parameter_server import updates
from serving.parameter_server.copies import OnChange, TableCopies
from serving.parameter_server.counters import TableCounters
from serving.parameter_server.opening import open_stores, tier_settings
from serving.parameter_server.preflight import check_hot_keys
from serving.parameter_server.promotion import Promoter
from serving.parameter_server.readiness import Readiness
from serving.parameter_server.served_models import ServedModels
from serving.parameter_server.tier import Tier, TierSettings
from serving.parameter_server.tier_lookup import TierLookup
from serving.parameter_server.updates import check_keys, check_row_ptrs, check_weights
from serving.storage.store import ForgetfulStore, Keys, Mask, RowPtrs, SourceStore, Store, Vectors, Weights


class ParameterServer:
    """Ordered stores, from the fastest to the slowest. Every method may be called from any thread.

    A key that one store does not hold is looked for in the next; a key that none holds is answered with its table's
    default value, which is never stored. A store that does not answer is passed over: its outage shows in the log and
    the counters. It is raised where a key was not found that the store may hold, which is not so where the slowest
    store answered and has every row by its kind (a durable one, a ``SourceStore``): what that does not hold is unknown.

    Attributes:
        stores: the stores, fastest first.
        hot_keys: a folder of the keys that go first, see ``FirstRows``; None: nobody said.
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
        self.hot_keys = next((one.first_rows.hot_keys for one in by_tier if one.first_rows.hot_keys is not None), None)
        if stores and isinstance(stores[-1], ForgetfulStore):
            stores[-1].be_slowest()
        self._tiers = [Tier(store, depth, by_tier[depth]) for depth, store in enumerate(stores)]
        self._promoter = Promoter() if promote else None
        self._lookup = TierLookup(self._tiers, self._promoter)
        self._served = ServedModels(self._tiers)
        self._readiness = Readiness(self._tiers)

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
        promote = any(tier.cache_missed_embeddings for tier in config.volatile_tiers)
        server = cls(open_stores(config, may_be_late=True), promote, tier_settings(config))
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
        self._served.share_bounds(configs)

    def load_model(self, config: ModelConfig) -> None:
        """Load every table of a model: all of it, or, where that fails, nothing.

        A store before the slowest that cannot be reached is passed over like any that does not answer, and is given the
        tables by a thread of the server as soon as it can be.

        Raises:
            ConfigError: the model is already loaded, in this version or another.
            StoreFullError: memory is the only tier and has too little room; nothing has been loaded.
            StoreError: a store cannot take the rows, or the slowest cannot be reached.
            ModelFileError: a file is missing or damaged.
        """
        self._served.load(config)

    def unload_model(self, name: str, version: int | None = None, held: ModelConfig | None = None) -> None:
        """Forget a model; durable stores keep its rows for the next load.

        Lookups that still run on it fail with UnknownModelError: let them end first. So do later ones of sessions that
        were opened on it, even when it is loaded again: open new ones then.

        Args:
            name: the model's name.
            version: if given, the loaded version must be this one.
            held: what ``model`` returned; if given, the model must not have been loaded anew since.

        Raises:
            UnknownModelError: it is not loaded.
            StoreError: a store does not answer; the model is forgotten all the same.
        """
        self._served.forget(name, version, held=held, drop_durable=False)

    def erase_model(self, name: str, version: int | None = None) -> None:
        """Forget a model and remove its rows from every tier, durable ones too: HPS's ``erase_model_from_hps``.

        See ``unload_model`` for arguments and errors. Processes that share a tier lose the rows as well. A tier that
        does not answer keeps its rows, and the error says so: load the model when it does, and erase it again. So does
        a RocksDB database that is open read-only: erase it in the process that writes.
        """
        self._served.forget(name, version, drop_durable=True)

    def models(self) -> tuple[ModelConfig, ...]:
        """The loaded models, in the order in which they were loaded."""
        return self._served.models()

    def model(self, name: str, version: int | None = None) -> ModelConfig:
        """The loaded model of this name: what ``load_model`` was given, as a record of its own for each load.

        Args:
            name: the model's name.
            version: if given, the loaded version must be this one.

        Raises:
            UnknownModelError: it is not loaded.
        """
        return self._served.model(name, version)

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
        held = self._served.table(table)
        check_keys(table, keys)
        rows, found = self._lookup.rows(held, np.ascontiguousarray(keys))
        self._served.check_still_loaded(held)
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
            RequestError: ``row_ptrs`` is no array of one dimension, or ``weights`` is not float32[N].
            TypeError: ``keys`` or ``row_ptrs`` is of another type.
            ValueError: ``row_ptrs`` do not go from 0 to N without falling, or there is no such combiner.
            StoreError: a store did not answer that may hold a key which was not found.
        """
        held = self._served.table(table)
        check_row_ptrs(table, row_ptrs)
        if weights is not None:
            check_weights(table, keys, weights)
            weights = np.ascontiguousarray(weights)
        out, found = self._lookup.pooled(held, np.ascontiguousarray(keys), row_ptrs, combiner, weights)
        self._served.check_still_loaded(held)
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
            RequestError: the arrays have other shapes or types, a key is reserved, or a value is NaN or infinite.
            StoreFullError: the slowest tier has no room; nothing was written.
            StoreError: a tier did not take the rows, and those before it may still have the old ones: call again; or a
                value does not fit the table's row type, and nothing was written.
        """
        updates.insert(self._tiers, self._served.table(table), keys, rows)

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
        updates.evict(self._tiers, self._served.table(table), keys)

    def copies(self, table: str, on_change: OnChange) -> TableCopies:
        """Keep copies of a table's rows outside the tiers.

        Args:
            table: the table's full name.
            on_change: called with keys that ``insert`` or ``evict`` has changed, before the call returns.

        Raises:
            UnknownModelError: no loaded model has this table.
        """
        return TableCopies(self._served.table(table), self._lookup, on_change)

    def is_answering(self, name: str) -> bool:
        """Whether lookups of a model can succeed: of each of its tables some store answered when it was asked last.

        Waits for nobody. Where none answered, one is asked again beside, so that a later call tells when one does.

        Raises:
            UnknownModelError: it is not loaded.
        """
        model = self.model(name)
        return self._readiness.is_answering([self._served.table(model.full_name(table)) for table in model.tables])

    def wait_for_promotions(self, timeout_s: float | None = None) -> bool:
        """Wait until the promotions of the lookups so far are done; returns whether they were within ``timeout_s``."""
        return self._promoter is None or self._promoter.wait(timeout_s)

    def counters(self) -> dict[str, TableCounters]:
        """Counts of every loaded table, by full name."""
        return {table.name: table.counting.read() for table in self._served.tables()}

    def close(self) -> None:
        """Forget the models and close the stores. Closing twice is allowed."""
        self._served.close()
        self._readiness.close()
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
