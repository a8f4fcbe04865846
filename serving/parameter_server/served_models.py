"""The models that a parameter server serves: how they come into its tiers, and go."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from serving.config import ModelConfig
from serving.errors import ConfigError, StoreError, UnknownModelError, about
from serving.parameter_server.durable_load import table_source
from serving.parameter_server.late_tables import LateTable, LateTables, LostTable
from serving.parameter_server.loading import drop_tables, load_tables, share_bounds
from serving.parameter_server.served_table import ServedTable
from serving.parameter_server.tier import Tier


class ServedModels:
    """The loaded models and their tables. Every method may be called from any thread.

    See ``ParameterServer`` for what its methods raise.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """Begin with none; ``tiers`` are fastest first."""
        self._tiers = {tier.name: tier for tier in tiers}
        self._stores = tuple(tier.store for tier in tiers)
        self._late = LateTables()
        self._lock = threading.Lock()  # one load, unload or close at a time; readers do not take it
        # Replaced as wholes, never changed in place, so that readers need no lock.
        self._models: tuple[ModelConfig, ...] = ()
        self._tables: dict[str, ServedTable] = {}
        self._losable: dict[tuple[Tier, ServedTable], LostTable] = {}  # what brings back rows that a tier may lose
        for tier in tiers:
            tier.on_lost = partial(self._bring_back, tier)

    def models(self) -> tuple[ModelConfig, ...]:
        """See ``ParameterServer.models``."""
        return self._models

    def model(self, name: str, version: int | None = None) -> ModelConfig:
        """See ``ParameterServer.model``."""
        held = next((one for one in self._models if one.name == name and version in (None, one.version)), None)
        if held is None:
            raise UnknownModelError(f"no model {name!r}{'' if version is None else f' of version {version}'} is loaded")
        return held

    def tables(self) -> Sequence[ServedTable]:
        """The tables of all models."""
        return tuple(self._tables.values())

    def table(self, name: str) -> ServedTable:
        """The table of this full name.

        Raises:
            UnknownModelError: no loaded model has it.
        """
        table = self._tables.get(name)
        if table is None:
            raise UnknownModelError(f"no loaded model has a table {name!r}")
        return table

    def check_still_loaded(self, held: ServedTable) -> None:
        """Refuse an answer during which the table was unloaded: keys may be unknown for that reason alone."""
        if self._tables.get(held.name) is not held:
            raise UnknownModelError(f"table {held.name!r} was unloaded during the lookup")

    def share_bounds(self, configs: Sequence[ModelConfig]) -> None:
        """See ``ParameterServer.share_bounds``."""
        with self._lock:
            sources = []
            for config in configs:
                with about(config.name):
                    sources += [table_source(config, table) for table in config.tables]
            share_bounds(self._stores, sources)

    def load(self, config: ModelConfig) -> None:
        """See ``ParameterServer.load_model``."""
        with self._lock:
            names = [config.full_name(table) for table in config.tables]
            loaded = next((one for one in self._models if one.name == config.name), None)
            if loaded is not None:
                reason = f"model {config.name!r} is already loaded, in version {loaded.version}; unload it first"
                raise ConfigError(config.source, "", reason)
            sources = [table_source(config, table) for table in config.tables]
            kept = [tier.store for tier in self._tiers.values() if not tier.settings.is_initialized]
            first_rows = {tier.name: tier.settings.first_rows for tier in self._tiers.values()}
            try:
                tried = load_tables(self._stores, sources, kept, first_rows)
            except BaseException:
                with suppress(StoreError):  # what went wrong first says more
                    drop_tables(self._stores, names, drop_durable=False)
                raise
            added = {
                name: ServedTable.of(config, table, list(self._tiers))
                for name, table in zip(names, config.tables, strict=True)
            }
            late = []
            for one in tried:
                name, tier = one.load.source.spec.name, self._tiers[one.load.store.name]
                if one.load.can_refill:
                    self._losable[tier, added[name]] = LostTable(tier, added[name], one.load)
                if one.reason is not None:
                    tier.missed_load(name, one.reason)
                    late.append(LateTable(tier, added[name], one.load))
            self._tables = {**self._tables, **added}
            # A record of its own tells this load from earlier ones of the same record, whose sessions are refused.
            self._models = (*self._models, config.model_copy())
            self._late.add(late)

    def forget(self, name: str, version: int | None, drop_durable: bool, held: ModelConfig | None = None) -> None:
        """See ``ParameterServer.unload_model`` and, for ``drop_durable``, ``erase_model``."""
        with self._lock:
            gone = self.model(name, version)
            if held is not None and gone is not held:
                raise UnknownModelError(f"model {name!r} was loaded anew")
            tables = [self._tables[gone.full_name(table)] for table in gone.tables]
            self._models = tuple(one for one in self._models if one is not gone)
            self._tables = {key: table for key, table in self._tables.items() if table not in tables}
            self._late.forget(tables)
            for table in tables:
                with table.changes.lock:
                    table.changes.end()
                    for tier in self._tiers.values():
                        tier.forget(table.name)
                        self._losable.pop((tier, table), None)
            drop_tables(self._stores, [table.name for table in tables], drop_durable)

    def close(self) -> None:
        """Forget all models; the stores keep what they hold."""
        with self._lock:
            self._models, self._tables = (), {}
            self._late.close()

    def _bring_back(self, tier: Tier, held: ServedTable) -> None:
        """Have rows of a table brought back that a tier has lost; called by every lookup that meets that."""
        lost = self._losable.get((tier, held))
        if lost is not None:
            self._late.add([lost])
