"""The loaded models of a parameter server: how they come into its tiers, and how they go."""

import logging
import threading
from collections.abc import Sequence, Set
from contextlib import suppress

from serving.background import PeriodicWorker
from serving.config import ModelConfig
from serving.errors import ConfigError, StoreError, UnknownModelError, about, did_you_mean
from serving.parameter_server.loading import (
    erase_tables,
    load_tables,
    note_current_caches,
    share_bounds,
    with_kept_tables,
)
from serving.parameter_server.promotion import Promoter
from serving.parameter_server.table import Table, for_all
from serving.parameter_server.table_files import Progress, table_source
from serving.parameter_server.tier_table import Tier
from serving.parameter_server.updates import ModelUpdates, UpdateStream
from serving.storage import MemoryStore
from serving.storage.store import LastingStore

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25
END_S = 5.0  # for the end of one write of updates; a write that takes longer finds the model gone
# Silent tiers are asked again at each of these intervals, and the other tiers at each fifth.
WATCH_INTERVAL_S, INTERVALS_OF_A_BEAT = 1.0, 5


class LoadedModels:
    """The part of a ``ParameterServer`` that loads and unloads models. Every method may be called from any thread."""

    def __init__(self, tiers: Sequence[Tier], promoter: Promoter | None, stream: UpdateStream | None) -> None:
        """Start without models; ``tiers`` are fastest first."""
        self._tiers = tuple(tiers)
        self._stream = stream
        self._updates: dict[str, ModelUpdates] = {}  # by the name of the model's first table; replaced as a whole
        self._promoter = promoter
        self._lock = threading.Lock()  # one load, unload or close at a time; readers do not take it
        # Replaced as wholes, never changed in place, so readers need no lock.
        self._models: tuple[ModelConfig, ...] = ()
        self._tables: dict[str, Table] = {}
        self._to_erase: list[Table] = []  # tables of erased models whose rows stay because a tier did not answer
        self._filling = threading.Lock()  # held while a cache is refilled
        self._refill_worker: PeriodicWorker | None = None  # started with the first cache that may become invalid
        self._watcher: PeriodicWorker | None = None  # started with the first model, if a tier may not answer
        self._looks = 0

    def models(self) -> tuple[ModelConfig, ...]:
        """The loaded models, in the order in which they were loaded."""
        return self._models

    def model(self, name: str, version: int | None = None) -> ModelConfig:
        """The loaded model of this name: a copy, made at each load, of the record that ``load_model`` took.

        Args:
            name: the model's name.
            version: the loaded version; None: the version that was loaded last.

        Raises:
            UnknownModelError: it is not loaded.
        """
        matching = (
            model for model in reversed(self._models) if model.name == name and version in (None, model.version)
        )
        newest = next(matching, None)
        if newest is None:
            raise UnknownModelError(f"no model {name!r}{'' if version is None else f' of version {version}'} is loaded")
        return newest

    def _table(self, name: str) -> Table:
        """The table of this full name.

        Raises:
            UnknownModelError: no loaded model has it.
        """
        table = self._tables.get(name) or self._of_version(name)
        if table is None:
            raise UnknownModelError(f"no loaded model has a table {name!r}{did_you_mean(name, self._tables)}")
        return table

    def _of_version(self, name: str) -> Table | None:
        """The table ``"<model>@<version>.<table>"`` of the latest load of this version."""
        for model in reversed(self._models):
            for table in model.tables:
                if model.table_tag and name == f"{model.name}@{model.version}.{table.name}":
                    return self._tables.get(model.full_name(table))
        return None

    def share_bounds(self, configs: Sequence[ModelConfig], leaving: Sequence[ModelConfig] = ()) -> None:
        """Share the room in RAM between the tables of models that will be loaded, in proportion to their rows.

        A model without a share gets the room that the others leave.

        Args:
            configs: the models.
            leaving: loaded models that ``configs`` replace. The new models get their room, so RAM may exceed its bound
                until these models are unloaded.

        Raises:
            StoreError: the system does not have the memory; no table got a share.
            ModelFileError: a file is missing or damaged; no table got a share.
        """
        with self._lock:
            sources = []
            for config in configs:
                named = config
                with suppress(StoreError):  # the load reports it
                    named = self._named(config)
                with about(config.name):
                    sources += [table_source(named, table) for table in named.tables]
            share_bounds(self._tiers, sources, _names(leaving))

    def load_model(self, config: ModelConfig, progress: Progress | None = None) -> ModelConfig:
        """Load every table of a model, or none if a table fails.

        A truth that has the tables already, from the same files, is not loaded again. Rows that another program wrote
        stay: the files' rows are inserted over them. A cache that cannot be reached is filled in the background as soon
        as it can be.

        Args:
            config: the model. For a version that shares the tables of another version, that version is loaded.
            progress: called after each batch of rows with the table and its tier, the rows so far, and all rows.

        Returns:
            What ``model`` returns: a copy of ``config`` that has the names of its tables.

        Raises:
            ConfigError: the model is already loaded, in this version or, unless its tables have names of their own in
                each version, in another.
            StoreFullError: memory is the only tier and has too little room; nothing has been loaded.
            StoreError: a store cannot take the rows, or the truth cannot be reached.
            ModelFileError: a file is missing or damaged.
        """
        with self._lock:
            named = config = config.of_tables
            try:
                named = self._named(config)
                return self._load(named, progress)
            finally:  # a load that failed has not taken all of its shares
                for tier in self._tiers:
                    if isinstance(tier.store, MemoryStore):
                        tier.store.give_back(_names([config, named]))

    def _named(self, config: ModelConfig) -> ModelConfig:
        """The model with the names that its tables have in the stores."""
        truth = self._tiers[-1]
        return with_kept_tables(truth.store, config, is_filled=truth.settings.fills_at_start)

    def _load(self, config: ModelConfig, progress: Progress | None) -> ModelConfig:
        loaded = next((model for model in self._models if _exclude_each_other(model, config)), None)
        if loaded is not None:
            reason = f"model {config.name!r} is already loaded, in version {loaded.version}; unload it first"
            raise ConfigError(config.source, "", reason)
        again = [table for table in self._to_erase if table.name in _names([config])]
        self._to_erase = [table for table in self._to_erase if table not in again]
        for_all(table.close for table in again)
        served = Table.all_of(config, [tier.name for tier in self._tiers], self._promoter)
        try:
            if self._stream is not None and isinstance(truth := self._tiers[-1].store, LastingStore):
                truth.expect_logs()
            load_tables(self._tiers, served, progress)
        except BaseException:
            for table in served:
                table.end()
            with suppress(StoreError):  # the first error says more
                for_all(table.close for table in served)
            raise
        self._tables = {**self._tables, **{table.name: table for table in served}}
        if len(self._tiers) > 1 and self._refill_worker is None:
            self._refill_worker = PeriodicWorker("hotrow-refill", self._refill, LOOK_INTERVAL_S)
        if self._watcher is None and not all(tier.is_in_process for tier in self._tiers):
            self._watcher = PeriodicWorker("hotrow-outages", self._watch, WATCH_INTERVAL_S)
        # A copy of the record tells this load from earlier loads, whose sessions are refused.
        self._models = (*self._models, config.model_copy())
        if self._stream is not None:
            self._updates = {**self._updates, served[0].name: ModelUpdates(config, served, self._stream)}
        return self._models[-1]

    def unload_model(self, name: str, version: int | None = None, held: ModelConfig | None = None) -> None:
        """Forget a model; stores that outlive the process keep its rows for the next load.

        Running lookups of the model fail with UnknownModelError: let them end first. Later lookups of sessions that
        were opened on it fail too, even after it is loaded again: open new sessions then.

        Args:
            name: the model's name.
            version: the loaded version; None: the version that was loaded last.
            held: what ``model`` returned; if given, the model must not have been loaded again since.

        Raises:
            UnknownModelError: it is not loaded.
            StoreError: a store does not answer; the model is forgotten anyway.
        """
        self._forget(name, version, held, erase=False)

    def erase_model(self, name: str, version: int | None = None, held: ModelConfig | None = None) -> None:
        """Forget a model and remove its rows from every tier: HPS's ``erase_model_from_hps``.

        See ``unload_model`` for arguments and errors. Processes that share a tier lose the rows as well. If a cache
        does not answer, the truth keeps its rows too, and the error says so. A later erasure of any model removes
        these rows, unless the model was loaded again. A RocksDB database that is open read-only keeps its rows: erase
        them in the process that writes.
        """
        self._forget(name, version, held, erase=True)

    def _forget(self, name: str, version: int | None, loaded: ModelConfig | None, *, erase: bool) -> None:
        with self._lock:
            gone = next((model for model in self._models if model is loaded), None) or self.model(name, version)
            if loaded is not None and gone is not loaded:
                raise UnknownModelError(f"model {name!r} was loaded again")
            tables = [self._tables[gone.full_name(table)] for table in gone.tables]
            self._models = tuple(model for model in self._models if model is not gone)
            self._tables = {key: table for key, table in self._tables.items() if table not in tables}
            self._end(tables)
            if not erase:
                for_all(table.close for table in tables)
                return
            try:
                erase_tables(tables)
            except StoreError:
                self._to_erase += tables
                raise
            self._to_erase = [table for table in self._to_erase if not _is_erased(table)]

    def erase_other_versions(self, name: str) -> None:
        """Remove rows of versions of a repository's model that are not loaded from the database on this machine.

        A server that is stopped during a swap leaves such rows, and so does a new version that comes while no server
        runs.

        Raises:
            StoreError: the database does not answer.
        """
        truth = self._tiers[-1].store
        with self._lock:
            for table in truth.kept_tables() if isinstance(truth, LastingStore) and truth.writes else ():
                if table.startswith(f"{name}@") and table not in self._tables:
                    truth.erase(table)
                    logger.info("table %r: %s: dropped, because its version is not served", table, truth.name)

    def updates(self, config: ModelConfig) -> ModelUpdates | None:
        """The reader of a loaded model's updates; None if this process reads none for it."""
        return self._updates.get(config.full_name(config.tables[0]))

    def close(self) -> None:
        """Forget all models; the stores keep what they hold."""
        with self._lock:
            tables = list(self._tables.values())
            self._models, self._tables = (), {}
            self._end(tables)
            if self._refill_worker is not None:
                self._refill_worker.close()
            if self._watcher is not None:
                self._watcher.close(timeout_s=1.0)  # closing must not wait for a tier that hangs

    def _end(self, tables: Sequence[Table]) -> None:
        """Stop serving tables, and tell the truth whether their caches took every change."""
        names = {table.name for table in tables}
        ended = [updates for name, updates in self._updates.items() if name in names]
        self._updates = {name: updates for name, updates in self._updates.items() if name not in names}
        for updates in ended:
            updates.close(END_S)
        for table in tables:
            with table.clock.lock:
                table.clock.end()
        with self._filling:  # a cache that is being filled ends before its next batch
            pass
        for table in tables:
            with suppress(StoreError):  # the caches are refilled at the next start
                note_current_caches(table)
            table.end()

    def _watch(self) -> None:
        """Ask tiers that do not answer, and end the outages that are over."""
        self._looks += 1
        tables = self._tables.values()
        for tier in self._tiers:
            if not tier.is_in_process:
                is_beat = self._looks % INTERVALS_OF_A_BEAT == 0
                tier.watch([table.tiers[tier.depth] for table in tables], is_beat=is_beat)
        for table in tables:
            table.health.end_outages()

    def _refill(self) -> None:
        """Fill caches that have become invalid."""
        for table in self._tables.values():
            for cache in table.caches:
                with self._filling:
                    cache.refill_if_due()


def _names(configs: Sequence[ModelConfig]) -> Set[str]:
    return {config.full_name(table) for config in configs for table in config.tables}


def _is_erased(table: Table) -> bool:
    """Erase a table that a tier could not erase before; return whether it could now."""
    try:
        erase_tables([table])
    except StoreError:
        return False
    return True


def _exclude_each_other(config: ModelConfig, other: ModelConfig) -> bool:
    """Return whether only one of two models can be loaded: two versions can if their tables have names of their own."""
    have_own_tables = config.table_tag and other.table_tag and config.table_tag != other.table_tag
    return config.name == other.name and not have_own_tables
