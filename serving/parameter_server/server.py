"""The parameter server: which stores are asked for a key, and in which order."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from serving.config import ModelConfig, ParameterServerConfig, bringing_tables, read_ps_config
from serving.errors import StoreInUseError
from serving.model.records import Combiner
from serving.parameter_server.arguments import check_keys, check_row_ptrs, check_weights
from serving.parameter_server.copies import Copies, OnChange
from serving.parameter_server.counters import TableCounters
from serving.parameter_server.health import ModelHealth
from serving.parameter_server.lookup import PooledTables, look_up, look_up_pooled
from serving.parameter_server.models import LoadedModels
from serving.parameter_server.opening import asked_tiers, open_stores, open_updates, tier_settings
from serving.parameter_server.preflight import check_hot_keys
from serving.parameter_server.promotion import Promoter
from serving.parameter_server.table import write
from serving.parameter_server.tier_table import Tier, TierSettings
from serving.parameter_server.updates import UpdateStream
from serving.storage import SnapshotStore
from serving.storage.store import Change, Keys, Mask, RowPtrs, Store, Vectors, Weights


class ParameterServer(LoadedModels):
    """A source of truth and the caches in front of it. Every method may be called from any thread.

    The last store is the source of truth of every table, and the stores before it are caches; see ``loading`` for the
    life of a table. A key that one store does not hold is looked up in the next. A key that the truth does not hold
    gets its table's default value, which is never stored. A cache that does not answer is bypassed: its outage is
    counted, and logged when it starts and when it ends.

    Attributes:
        stores: the stores, fastest first.
        hot_keys: a folder of the keys that go into caches first, see ``FirstRows``; None: no such folder.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        promote: bool = False,
        settings: Mapping[str, TierSettings] | None = None,
        updates: UpdateStream | None = None,
    ) -> None:
        """Take the stores; the server closes them when it is closed.

        Args:
            stores: fastest first, at least one.
            promote: copy rows found in slower stores into faster stores that have room, in the background. A default
                is never copied.
            settings: settings of single tiers, by their stores' names.
            updates: where rows of loaded models come from while they are served.

        Raises:
            ValueError: there is no store, two stores have the same name, settings name an unknown store, or a store
                that serves model files is not the last. Such a store has all rows, so a slower store would never be
                asked.
        """
        names = [store.name for store in stores]
        if not stores or len(set(names)) < len(names):
            raise ValueError(f"expected one store or several of different names, got {names}")
        if any(isinstance(store, SnapshotStore) for store in stores[:-1]):
            raise ValueError("a store that serves model files must be the last")
        settings = settings or {}
        strange = settings.keys() - set(names)
        if strange:
            raise ValueError(f"settings for {sorted(strange)}, but the stores are {names}")
        self.stores = tuple(stores)
        by_tier = [settings.get(store.name, TierSettings()) for store in stores]
        hot_keys = [tier.first_rows.hot_keys for tier in by_tier]
        self.hot_keys = next((folder for folder in hot_keys if folder is not None), None)
        tiers = [Tier(store, depth, by_tier[depth]) for depth, store in enumerate(stores)]
        super().__init__(tiers, Promoter() if promote else None, updates)

    def __repr__(self) -> str:
        """Return the tiers and the models."""
        tiers = ", ".join(store.name for store in self.stores)
        return f"ParameterServer({tiers}; {'; '.join(model.summary for model in self.models()) or 'no models'})"

    @classmethod
    def from_config(cls, config: str | Path | ParameterServerConfig) -> Self:
        """Open the stores of a ``ps.json`` and load the models it lists.

        Raises:
            ConfigError: the file cannot be accepted.
            OutputError: the file of rejected updates cannot be written.
            StoreError: a store cannot be opened, or cannot hold a model.
            ModelFileError: a model's file is missing or damaged.
        """
        if not isinstance(config, ParameterServerConfig):
            config = read_ps_config(config)
        check_hot_keys(config)
        config = asked_tiers(config)
        promote = any(tier.cache_missed_embeddings for tier in config.volatile_tiers)
        updates = open_updates(config)
        try:
            stores = open_stores(config, may_be_late=True)
        except StoreInUseError as err:
            reason = f"{err.reason}, or set persistent_db.read_only to serve without writing"
            raise StoreInUseError(err.store, err.table, reason) from err
        server = cls(stores, promote, tier_settings(config), updates)
        try:
            models = bringing_tables(config.models)
            server.share_bounds(models)
            for model in models:
                server.load_model(model)
        except BaseException:
            server.close()
            raise
        return server

    def lookup(self, table: str, keys: Keys) -> tuple[Vectors, Mask]:
        """Look up rows.

        Args:
            table: the table's full name.
            keys: int64[N]; duplicates are allowed, N may be 0.

        Returns:
            float32[N, D], absent keys with the table's default value, and found: bool[N].

        Raises:
            UnknownModelError: no loaded model has this table, or it was unloaded during the lookup.
            RequestError: a key is one of the four reserved int64 values.
            StoreError: a key was not found, and the truth did not answer.
        """
        of_table = self._table(table)
        check_keys(table, keys)
        [rows], found = look_up([of_table], [keys])
        of_table.check_loaded()
        of_table.counting.answered(found.size, found.size - int(np.count_nonzero(found)))
        return rows, found

    def contains(self, table: str, keys: Keys) -> Mask:
        """Return which keys some tier holds; such reads are not counted and do not promote rows.

        Args:
            table: the table's full name.
            keys: int64[N], none of them reserved.

        Returns:
            bool[N].

        Raises:
            UnknownModelError, StoreError: see ``lookup``.
        """
        of_table = self._table(table)
        _, found = look_up([of_table], [keys], is_request=False)
        of_table.check_loaded()
        return found

    def lookup_pooled(
        self, table: str, keys: Keys, row_ptrs: RowPtrs, combiner: Combiner, weights: Weights | None = None
    ) -> tuple[Vectors, Mask]:
        """Look up bags of rows, each pooled into one vector.

        The answer has the same bits wherever the rows lie. The first store pools a bag if it holds every row of it.
        Otherwise the rows are gathered over all stores and pooled in key order by the same code. Every row is rounded
        to the table's row type, even if its store keeps float32.

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
            UnknownModelError: no loaded model has this table, or it was unloaded during the lookup.
            RequestError: ``row_ptrs`` is no array of one dimension, or ``weights`` is not float32[N].
            TypeError: ``keys`` or ``row_ptrs`` is of another type.
            ValueError: ``row_ptrs`` do not go from 0 to N without falling, or there is no such combiner.
            StoreError: a key was not found, and the truth did not answer.
        """
        of_table = self._table(table)
        check_row_ptrs(table, row_ptrs)
        if weights is not None:
            check_weights(table, keys, weights)
            weights = np.ascontiguousarray(weights)
        out, found, missed = look_up_pooled(of_table, np.ascontiguousarray(keys), row_ptrs, combiner, weights)
        of_table.check_loaded()
        of_table.counting.answered(found.size, missed)
        return out, found

    def pooled_tables(self, config: ModelConfig) -> PooledTables:
        """The tables of a loaded model, whose bags are looked up in one call, with the answers of ``lookup_pooled``.

        Args:
            config: the model. Once it is unloaded, lookups raise UnknownModelError, even after it is loaded again.

        Raises:
            UnknownModelError: it is not loaded.
        """
        return PooledTables(config, [self._table(config.full_name(table)) for table in config.tables])

    def write(self, changes: Sequence[Change[str] | tuple[str, Keys, Vectors | None]]) -> None:
        """Make changes of several tables; see ``insert`` and ``evict``, which make one.

        RocksDB as the source of truth makes all changes or none, if they fit into one of its write batches.

        Args:
            changes: tables' full names, keys, and rows, or None to remove the keys. They are made in this order. A
                ``Change`` with ``adds`` adds to rows; see ``accumulate``.

        Raises:
            UnknownModelError, RequestError, StoreError: see ``insert`` and ``evict``; changes before the one that
                failed may have been made.
        """
        write([Change(self._table(table), *change) for table, *change in changes])

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite rows in every tier, the truth first; the last of duplicate keys wins.

        When it returns, every lookup that starts finds the new rows. A cache without room takes the rows whose keys it
        holds. A cache that does not answer is bypassed until it has been refilled in the background. Updates of one
        table wait for each other.

        Args:
            table: the table's full name.
            keys: int64[N], none of them reserved.
            rows: float32[N, D].

        Raises:
            UnknownModelError: no loaded model has this table.
            RequestError: the arrays have other shapes or types, a key is reserved, or a value is NaN or infinite.
            StoreFullError: the truth has no room; nothing was written.
            StoreError: the truth did not take the rows, so call again; or a value does not fit the table's row type,
                and nothing was written.
        """
        self.write([(table, keys, rows)])

    def evict(self, table: str, keys: Keys) -> None:
        """Remove rows from every tier, the truth first; absent keys are no error.

        When it returns, every lookup that starts gets the table's default value for them.

        Args:
            table: the table's full name.
            keys: int64[N], none of them reserved.

        Raises:
            UnknownModelError: no loaded model has this table.
            RequestError: ``keys`` has another shape or type, or a key is reserved.
            StoreError: the truth did not answer: call again.
        """
        self.write([(table, keys, None)])

    def accumulate(self, table: str, keys: Keys, deltas: Vectors) -> None:
        """Add to rows in every tier; an absent key starts at the table's default value. See ``insert``.

        Args:
            table: the table's full name.
            keys: int64[N], none of them reserved. The deltas of duplicate keys are added one after another.
            deltas: float32[N, D].

        Raises:
            UnknownModelError: no loaded model has this table.
            RequestError: the arrays have other shapes or types, a key is reserved, or a value or a sum is NaN or
                infinite; nothing was written.
            AdditionError: the source of truth keeps narrow rows, evicts rows, or is Redis or shared RAM, which other
                processes write too.
            StoreError: see ``insert``.
        """
        self.write([Change(table, keys, deltas, adds=True)])

    def copies(self, table: str, on_change: OnChange) -> Copies:
        """Keep copies of a table's rows outside the tiers.

        Args:
            table: the table's full name.
            on_change: called with keys that ``insert`` or ``evict`` has changed, before the call returns.

        Raises:
            UnknownModelError: no loaded model has this table.
        """
        return Copies([self._table(table)], on_change)

    def health(self, name: str, version: int | None = None) -> ModelHealth:
        """The outages of a loaded model, and how its requests ended. A thread asks a store that does not answer again.

        Raises:
            UnknownModelError: it is not loaded.
        """
        model = self.model(name, version)
        return self._table(model.full_name(model.tables[0])).health

    def wait_for_promotions(self, timeout_s: float | None = None) -> bool:
        """Wait for the promotions of all lookups so far; returns whether they ended within ``timeout_s``."""
        return self._promoter is None or self._promoter.wait(timeout_s)

    def counters(self) -> dict[str, TableCounters]:
        """Counts of every loaded table, by full name."""
        return {table.name: table.read_counters() for table in self._tables.values()}

    def close(self) -> None:
        """Forget the models and close the stores. Closing twice is allowed.

        A clean close notes in the truth which caches took every change, so that the next start need not fill them.
        """
        if self._promoter is not None:
            self._promoter.close()
        super().close()
        for tier in self._tiers:
            tier.close()

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()
