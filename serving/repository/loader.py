"""Opens one version of a model in front of the tiers, and drops it."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from kernels.device import Device
from serving.config import ModelConfig, ParameterServerConfig
from serving.errors import StoreError, UnknownModelError, about
from serving.lookup import DeviceChoice
from serving.metrics import MetricSample
from serving.opening import Runtime, open_session, position_to_reach
from serving.parameter_server import ParameterServer
from serving.parameter_server.counters import table_samples
from serving.parameter_server.table_files import Progress
from serving.repository.served_model import ServedModel, served_model
from serving.repository.version_tables import TablesInUse, VersionTables
from serving.repository.warm_up import warm_up
from serving.session import InferenceSession
from serving.storage import RedisStore
from serving.storage.memory import MemoryTable
from serving.storage.shared.store import SharedMemoryTable
from serving.storage.snapshot.store import SnapshotTable
from serving.storage.store import LastingStore, Store

logger = logging.getLogger("hotrow.repository")


class VersionLoader:
    """Opens and drops versions. Not safe for threads, except ``is_answering`` and ``readings``.

    Attributes:
        server: has the tables of all versions.
        tables: the tables that versions use.
    """

    def __init__(self, ps: ParameterServerConfig, runtime: Runtime, *, writes: bool) -> None:
        """Open the tiers of a repository.

        Args:
            ps: the tiers.
            runtime: how models run.
            writes: whether this process may erase rows from stores that other processes read.

        Raises:
            StoreError: a tier cannot be opened.
        """
        self.server = ParameterServer.from_config(ps.model_copy(update={"models": ()}))
        self.tables = TablesInUse(self.server)
        self._runtime = runtime
        self._devices = DeviceChoice(runtime.device)
        self._writes = writes

    def open_devices(self, models: Iterable[ModelConfig]) -> Sequence[Sequence[Device]]:
        """Open the devices of each model.

        Raises:
            DeviceUnavailableError: a GPU or the software to use it is missing; the message names the model.
        """
        opened = []
        for config in models:
            with about(config.name):
                opened.append(self._devices.open(config.gpu_cache.devices))
        return opened

    def open(self, config: ModelConfig, devices: Sequence[Device], progress: Progress | None = None) -> ServedModel:
        """Load a version's tables unless they are loaded, open its session and warm it up.

        Raises:
            HotrowError: see ``ModelRepository.load``; nothing of the version is left in this process.
        """
        tables = self.tables.take(config.of_tables, devices, progress)
        loaded = tables.config
        with ExitStack() as opened:
            opened.callback(self.tables.release, tables, self._unload)
            if config.base is not None:
                loaded = config.on_tables_of(tables.config)
                position_to_reach(self.server, loaded)  # or it raises that they never will
            session = open_session(loaded, tables.lookups, self._runtime)
            opened.callback(session.close)
            model = served_model(session)
            model.tables = tables
            model.updates = self.server.updates(tables.config)
            if config.base is not None and model.updates is not None:
                model.waits_for = partial(model.updates.behind, loaded)
            model.warm_up()
            if self._runtime.warm_up_from is not None and isinstance(session, InferenceSession):
                warm_up(session, self._runtime.warm_up_from, progress)
            opened.pop_all()
        return model

    def drop(self, model: ServedModel, *, erase: bool = False) -> None:
        """Close a version after its requests, and remove its tables from the tiers, unless another version uses them.

        With ``erase`` its rows also leave the stores that outlive the process, if this process writes them. They stay
        if Redis is the source of truth, because servers on other machines may still serve this version.
        """
        truth = self.server.stores[-1]
        is_own = self._writes and bool(model.config.table_tag) and (not isinstance(truth, LastingStore) or truth.writes)
        erase = erase and is_own and not isinstance(truth, RedisStore)
        model.on_close(partial(self.tables.release, model.tables, self._erase if erase else self._unload))
        model.on_close(partial(_was_dropped, model.config))
        model.close()

    def _unload(self, config: ModelConfig) -> None:
        _remove(self.server.unload_model, config)

    def _erase(self, config: ModelConfig) -> None:
        _remove(self.server.erase_model, config)

    def readings(self, models: Iterable[ServedModel]) -> Iterator[MetricSample]:
        """Return the counters of the parameter server and of the models' caches for the metrics page."""
        counters = self.server.counters()
        in_use: dict[tuple[str, int], VersionTables] = {}
        for model in models:  # a version that is being loaded or dropped may have the number of one that serves
            config, tables = model.config, model.tables
            digest = (("model", config.name), ("version", str(config.version)), ("digest", config.short_digest))
            yield MetricSample("hotrow_model_info", "The digest of a served version's files.", digest, 1, is_gauge=True)
            yield from model.statistics.samples(digest[:2])
            yield from model.session.request_readings()
            in_use.setdefault((tables.config.name, tables.config.version), tables)
        for tables in in_use.values():  # with the version that brings the tables, once for all that share them
            config = tables.config
            for name in map(config.full_name, config.tables):
                if name in counters:
                    yield from table_samples(name, counters[name], self.server.stores)
            if (updates := self.server.updates(config)) is not None:
                yield from updates.samples()
            for lookup in tables.lookups:
                yield from lookup.readings()

    def describe(self, models: Iterable[ServedModel]) -> Iterator[str]:
        """Lines for an operator: each model with its memory and mapped files, and the tiers."""
        for model in sorted(models, key=lambda model: (model.config.name, model.config.version)):
            config, session = model.config, model.session
            tables = ", ".join(f"{table.name} [{table.slots} x {table.dim}]" for table in config.tables)
            sizes = _sizes(config, self.server.stores)
            shared = "" if config.base is None else f" of version {config.base.version}"
            yield f"model {config.name} version {config.version}: {sizes}, tables{shared} {tables}"
            if isinstance(session, InferenceSession) and session.quantization is not None:
                yield f"  {session.quantization}"
        yield f"tiers {', '.join(store.name for store in self.server.stores)}"

    def close(self) -> None:
        """Close the caches and the tiers."""
        try:
            self.tables.close()
        finally:
            self.server.close()


def _was_dropped(config: ModelConfig) -> None:
    logger.info("model %s: version %s is dropped", config.name, config.version)


def _remove(remove: Callable[[str, int, ModelConfig], None], config: ModelConfig) -> None:
    try:
        with suppress(UnknownModelError):  # the server is closed
            remove(config.name, config.version, config)
    except StoreError as err:
        logger.warning("model %s: the tables of version %s are dropped, but %s", config.name, config.version, err)


def _sizes(config: ModelConfig, stores: Sequence[Store]) -> str:
    """A model's memory: in this process's RAM, in shared memory and in mapped files."""
    ram = shared = mapped = 0
    with suppress(OSError):  # it may have been removed since the load
        ram = config.dense_file.stat().st_size if config.dense_file else 0
    for name in map(config.full_name, config.tables if config.base is None else ()):
        stored = [store.tables[name] for store in stores if name in store.tables]
        ram += sum(table.size_bytes for table in stored if isinstance(table, MemoryTable))
        shared += sum(table.size_bytes for table in stored if isinstance(table, SharedMemoryTable))
        mapped += sum(table.size_bytes for table in stored if isinstance(table, SnapshotTable))
    others = {" of shared memory": shared, " of mapped files": mapped}
    return " and ".join([_amount(ram), *(_amount(size) + what for what, size in others.items() if size)])


def _amount(size_bytes: int) -> str:
    mebibytes = size_bytes / 2**20
    return f"{mebibytes:,.1f} MiB" if mebibytes >= 0.05 else f"{size_bytes / 2**10:,.1f} KiB"
