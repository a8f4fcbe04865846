"""The model repository: the models that are served together, their versions, and their sessions.

A version's life::

    absent -> loading -> serving -> draining -> dropped
                 |
              failed: the versions that serve go on serving, and ``index`` has the reason

A swap loads the new version next to the old version, switches all new requests to it at once, waits for the requests
of the old version and drops it. Where several processes serve the same models, one of them leads: the others follow it
before it drops the old version.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from kernels.device import Device
from kernels.errors import HotrowError
from serving.background import PeriodicWorker
from serving.calibration import refuse_shared_calibration
from serving.config import (
    ModelConfig,
    ParameterServerConfig,
    VersionPolicy,
    models_folder,
    read_repository,
    read_versions,
    version_folders,
)
from serving.config.control import EVERY_MODEL, ControlMode
from serving.dense.calibration import DEFAULT_TOLERANCE
from serving.dense.network import Engine
from serving.errors import (
    ConfigError,
    RequestError,
    StoreError,
    UnknownModelError,
    WorkerError,
    about,
    did_you_mean,
    is_about,
    is_about_a_model,
    told,
)
from serving.loaded_model import LoadedModel, warm_up
from serving.lookup import DeviceChoice, check_device_name, open_lookups, warn_of_idle_caches
from serving.lookup_model import LookupModelSession
from serving.metrics import MetricSample
from serving.opening import open_session
from serving.parameter_server import ParameterServer
from serving.parameter_server.counters import table_samples
from serving.parameter_server.preflight import check_hot_keys
from serving.parameter_server.progress import Progress
from serving.session import InferenceSession
from serving.storage import MemoryStore, RedisStore, SharedMemoryStore, SnapshotStore
from serving.storage.store import Store

logger = logging.getLogger("hotrow.repository")


@dataclass(frozen=True, slots=True)
class ModelState:
    """One line of Triton's repository index; all texts but the name are empty for a model that was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


#: The served versions of each model.
Versions = Mapping[str, Sequence[int]]


class Peers(Protocol):
    """The other processes that serve the same models from the same tables.

    Attributes:
        leads: whether this process decides which versions all of them serve. It alone writes the tables.
    """

    leads: bool

    def shared(self, ps: ParameterServerConfig) -> ParameterServerConfig:
        """Return the tiers through which the processes share their tables."""

    def versions(self) -> Versions | None:
        """Return the versions to serve from the start; None: those that the repository has."""

    def follow(self, versions: Versions) -> None:
        """Have every other process serve these versions."""


class ModelRepository:
    """The models of one folder, ``<repository>/<model>/<version>/``, or of one JSON file, and the tiers of their rows.

    ``serving.config.read_repository`` finds the models. Any thread may call every method; loads take turns.
    """

    def __init__(
        self,
        path: str | Path,
        engine: Engine = "auto",
        threads: int = 1,
        calibration: str | Path | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
        device: str = "cpu",
        control: ControlMode = "none",
        poll_s: float = 15.0,
        startup: Sequence[str] = (),
        peers: Peers | None = None,
    ) -> None:
        """Describe a repository; nothing is read before ``load``.

        Args:
            path: the repository's folder, a ``ps.json``, a v3.0 inference JSON or the folder of one model.
            engine: what runs dense networks.
            threads: how many threads work on one dense network call.
            calibration: the samples on which the engine int8 is measured, for a repository of one model; None: each
                model has a file of its own.
            tolerance: the largest error of a probability that the engine int8 may have on these samples.
            device: where embeddings are cached; see ``serving.lookup.open_devices``.
            control: ``"none"``: the models of the start are served until the end. ``"poll"``: changes of the folder
                are followed. ``"explicit"``: ``load_model`` and ``unload_model`` decide.
            poll_s: time between two looks at the folder.
            startup: the models that the mode ``"explicit"`` loads at the start; ``"*"`` stands for every model.
            peers: the other processes of the same server, if there are any.
        """
        self.path = Path(path)
        self.control = control
        self._engine = engine
        self._threads = threads
        self._calibration = calibration
        self._tolerance = tolerance
        self._device = device
        self._poll_s = poll_s
        self._startup = startup
        self._peers = peers
        self._folder: Path | None = None
        self._server: ParameterServer | None = None
        self._devices = DeviceChoice(device)
        self._lock = threading.RLock()  # one load, unload, poll or close at a time; requests do not take it
        # Replaced as a whole, never changed in place, so requests need no lock. Versions are newest first.
        self._models: dict[str, dict[int, LoadedModel]] = {}
        self._states: dict[tuple[str, int], ModelState] = {}  # of versions that do not serve
        self._marks: dict[str, tuple[object, ...]] = {}  # of ``version_folders`` at the last look
        self._poller: PeriodicWorker | None = None

    def load(self, progress: Progress | None = None) -> None:
        """Load the models of the start, or no model if one of them is broken.

        Args:
            progress: see ``ParameterServer.load_model``.

        Raises:
            ConfigError: the path does not exist or has no model, or a configuration is invalid.
            UnknownModelError: a model of ``startup`` is not in the repository.
            ModelFileError: a model's file is missing or damaged.
            StoreError: a tier cannot be opened or cannot take the rows.
            DeviceUnavailableError: a GPU or the software to use it is missing.
            DeviceMemoryError: a GPU has too little free memory for the caches.
        """
        check_device_name(self._device, "device")
        if self.control != "none":
            self._folder = models_folder(self.path)
            if self._folder is None:
                reason = f"control mode {self.control!r} needs a folder of models, <model>/<version>/graph.json"
                raise ConfigError(str(self.path), "", reason)
            self._marks = version_folders(self._folder)
        ps, models = self._read()
        refuse_shared_calibration(self._calibration, len(ps.models))
        # For all models before the first load, because a load may take long.
        check_hot_keys(ps)
        devices = self._open_devices(models)
        warn_of_idle_caches(zip(models, devices, strict=True))
        self._server = ParameterServer.from_config(ps.model_copy(update={"models": ()}))
        try:
            self._server.share_bounds(models)
            for config, of_model in zip(models, devices, strict=True):
                with about(config.name):
                    self._switch(config.name, [self._open(self._server, config, of_model, progress)], ())
            try:
                self._lead()
            except WorkerError as err:
                logger.error("%s", told(err))
            for name in self._models:
                self._server.erase_other_versions(name)
        except BaseException:
            self.close()
            raise
        if self.control == "poll" and (self._peers is None or self._peers.leads):
            self._poller = PeriodicWorker("hotrow-repository", self.poll, self._poll_s)

    def load_model(self, name: str, policy: VersionPolicy | None = None) -> None:
        """Serve the versions of a model that its folder has now; versions that serve already go on serving.

        The new versions are loaded next to the old versions. If one of them is broken, nothing changes.

        Args:
            name: a folder of the repository.
            policy: which versions to serve; None: as the model's ``config.pbtxt`` says.

        Raises:
            RequestError: the control mode is not ``"explicit"``.
            UnknownModelError: the repository has no such model.
            ConfigError, ModelFileError, StoreError, DeviceUnavailableError, DeviceMemoryError: see ``load``.
        """
        self._check_explicit()
        with self._lock:
            self._serve(name, policy)

    def unload_model(self, name: str) -> None:
        """Drop all versions of a model, after their requests in flight; stores that outlive the process keep its rows.

        Raises:
            RequestError: the control mode is not ``"explicit"``.
            UnknownModelError: no version of the model is served.
        """
        self._check_explicit()
        with self._lock:
            if name not in self._models:
                raise self._unknown(name)
            self._unload(name)

    def poll(self) -> None:
        """Follow the changes of the folder since the last look: new and removed versions, models and policies.

        A broken version is logged once; it is tried again when its folder changes.
        """
        with self._lock:
            if self._folder is None or self._server is None:
                return
            marks = version_folders(self._folder)
            for name in [name for name, mark in marks.items() if mark != self._marks.get(name)]:
                self._marks[name] = marks[name]
                try:
                    self._serve(name, None)
                except HotrowError as err:
                    logger.error("model %s: %s", name, told(err))
                    if isinstance(err, WorkerError):
                        del self._marks[name]  # the worker may follow at the next look
            for name in self._models.keys() - marks.keys():
                self._marks.pop(name, None)
                self._unload(name)

    def follow(self, versions: Versions) -> None:
        """Serve these versions, which the process that leads has loaded, and no others.

        Raises:
            HotrowError: a version cannot be loaded; see ``load``.
        """
        with self._lock:
            if self._server is None or self._folder is None:
                return
            for store in self._server.stores:
                store.catch_up()
            for name, numbers in versions.items():
                if set(numbers) != set(self._models.get(name, ())):
                    self._serve(name, VersionPolicy.of_versions(numbers))
            for name in self._models.keys() - versions.keys():
                self._unload(name)

    def served(self) -> Versions:
        """The served versions of every model, newest first."""
        return {name: tuple(versions) for name, versions in self._models.items()}

    def models(self) -> Mapping[str, InferenceSession | LookupModelSession]:
        """The sessions by model name: of each model's newest version."""
        return {name: next(iter(versions.values())).session for name, versions in self._models.items()}

    def versions(self, name: str) -> Sequence[int]:
        """The served versions of a model, newest first; raises UnknownModelError if there are none."""
        if name not in self._models:
            raise self._unknown(name)
        return tuple(self._models[name])

    def session(self, name: str, version: str = "") -> InferenceSession:
        """The session of a model with a dense network; see ``loaded``."""
        session = self.loaded(name, version).session
        if isinstance(session, LookupModelSession):
            raise UnknownModelError(f"model {name!r} has no dense network")
        return session

    def loaded(self, name: str, version: str = "") -> LoadedModel:
        """A loaded version; raises UnknownModelError if this model or this version is not served.

        ``version`` is text that a client wrote, empty for the newest version.
        """
        versions = self._models.get(name)
        if versions is None:
            raise self._unknown(name)
        if not version:
            return next(iter(versions.values()))
        for number, model in versions.items():
            if version == str(number):
                return model
        there = ", ".join(map(str, versions))
        raise UnknownModelError(
            f"no version {version[:20]!r} of model {name!r} is served; there is version {there}"
            if len(versions) == 1
            else f"no version {version[:20]!r} of model {name!r} is served; there are versions {there}"
        )

    def begin(self, name: str, version: str = "") -> LoadedModel:
        """Return a version that stays loaded until the caller calls its ``end``; see ``loaded``."""
        while True:
            model = self.loaded(name, version)
            with suppress(UnknownModelError):  # it is being dropped, so another version serves, or none
                model.begin()
                return model

    @contextmanager
    def use(self, name: str, version: str = "") -> Iterator[LoadedModel]:
        """Keep a version loaded while the block runs; see ``loaded``."""
        model = self.begin(name, version)
        try:
            yield model
        finally:
            model.end()

    def is_ready(self, name: str, version: str = "") -> bool:
        """Whether requests for a served model can succeed, by what is known of tiers and GPUs; never waits."""
        if self._server is None:
            return False
        model = self.loaded(name, version)
        with suppress(UnknownModelError):  # it is being dropped
            return self._server.is_answering(name, model.config.version) and model.session.is_answering
        return False

    def index(self) -> list[ModelState]:
        """The models and versions with their states, also those that are not served, by name and version."""
        states = dict(self._states)
        for name, versions in self._models.items():
            for number in versions:
                ready = self.is_ready(name, str(number))
                state = ("READY", "") if ready else ("UNAVAILABLE", "a tier does not answer")
                states[name, number] = ModelState(name, str(number), *state)
        known = {name for name, _ in states}
        absent = [ModelState(name) for name in self._marks if name not in known]
        return sorted([*states.values(), *absent], key=lambda one: (one.name, int(one.version or 0)))

    def readings(self) -> Iterable[MetricSample]:
        """Return the counters of the parameter server and the caches for the metrics page."""
        if self._server is None:
            return
        for name, counters in self._server.counters().items():
            yield from table_samples(name, counters, self._server.stores)
        for model in self._loaded():
            yield from model.session.readings()

    def describe(self) -> Iterator[str]:
        """Lines for an operator: each model with its memory and mapped files, and the tiers."""
        if self._server is None:
            return
        for model in sorted(self._loaded(), key=lambda one: (one.config.name, one.config.version)):
            config, session = model.config, model.session
            tables = ", ".join(f"{table.name} [{table.slots} x {table.dim}]" for table in config.tables)
            sizes = _sizes(config, self._server.stores)
            yield f"model {config.name} version {config.version}: {sizes}, tables {tables}"
            if isinstance(session, InferenceSession) and session.quantization is not None:
                yield f"  {session.quantization}"
        yield f"tiers {', '.join(store.name for store in self._server.stores)}"

    def close(self) -> None:
        """Close every session and the tiers. Closing twice is allowed."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        with self._lock:
            models, self._models = self._loaded(), {}
            for model in models:
                model.close()
            if self._server is not None:
                self._server.close()
                self._server = None

    def __enter__(self) -> Self:
        """Return the repository; leaving the block closes it."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """See ``close``."""
        self.close()

    def _loaded(self) -> list[LoadedModel]:
        return [model for versions in self._models.values() for model in versions.values()]

    def _unknown(self, name: str) -> UnknownModelError:
        there = ", ".join(repr(known) for known in sorted(self._models))
        close = did_you_mean(name, self._models)
        return UnknownModelError(f"no model {name[:64]!r} is served; there is {there or 'none'}{close}")

    def _check_explicit(self) -> None:
        if self.control != "explicit":
            reason = "the server was started with --model-control-mode"
            raise RequestError(f"models cannot be loaded or unloaded: {reason} {self.control}, not explicit")

    def _read(self) -> tuple[ParameterServerConfig, Sequence[ModelConfig]]:
        """Read the repository; return its tiers and the models to load at the start."""
        wanted = None if self._peers is None else self._peers.versions()
        folder = self._folder if wanted is None else models_folder(self.path)
        faults: list[HotrowError] | None = [] if self.control == "explicit" or (wanted and folder) else None
        ps = read_repository(self.path, faults)
        if self._peers is not None:
            ps = self._peers.shared(ps)
        if wanted is not None and folder is not None:
            self._folder = folder
            self._marks = dict.fromkeys(self._marks, ())  # the first look finds what has changed since
            policies = {name: VersionPolicy.of_versions(numbers) for name, numbers in wanted.items()}
            return ps, [one for name, policy in policies.items() for one in read_versions(folder, name, policy)]
        return ps, ps.models if faults is None else self._chosen(ps.models, faults)

    def _lead(self) -> None:
        """Have the other processes serve what this process serves, if it leads."""
        if self._peers is not None and self._peers.leads:
            self._peers.follow(self.served())

    def _chosen(self, models: Sequence[ModelConfig], faults: Sequence[HotrowError]) -> Sequence[ModelConfig]:
        """Return the models of the start in the mode ``"explicit"``; the others may be faulty."""
        names = {config.name for config in models}
        every = EVERY_MODEL in self._startup
        for fault in faults:
            if every or any(is_about(fault, name) for name in self._startup) or not is_about_a_model(fault):
                raise fault
        for name in self._startup:
            if name not in names and name != EVERY_MODEL:
                raise ConfigError(str(self.path), "", f"no model {name[:64]!r} to load{did_you_mean(name, names)}")
        return [config for config in models if every or config.name in self._startup]

    def _serve(self, name: str, policy: VersionPolicy | None) -> None:
        """Load the new versions of a model, switch to them, and drop the versions that are not wanted any more."""
        if self._folder is None or self._server is None:
            raise UnknownModelError("the repository is not open")
        with about(name):
            wanted = read_versions(self._folder, name, policy)
            serving = self._models.get(name, {})
            new = [config for config in wanted if config.version not in serving]
            leaving = [model for number, model in serving.items() if number not in {one.version for one in wanted}]
            opened: list[LoadedModel] = []
            try:
                for config, devices in zip(new, self._open_devices(new), strict=True):
                    self._states[name, config.version] = ModelState(name, str(config.version), "LOADING")
                    try:
                        self._server.share_bounds([config], [model.config for model in leaving])
                        opened.append(self._open(self._server, config, devices))
                    except HotrowError as err:
                        self._failed(config, told(err))
                        raise
            except BaseException:
                for model in opened:
                    self._drop(model)
                    self._states.pop((name, model.config.version), None)
                raise
            self._switch(name, opened, leaving)
            followed = False
            try:
                self._lead()
                followed = True
            finally:  # a process that did not follow still reads the old rows
                for model in leaving:
                    self._drop(model, erase=bool(new) and followed)

    def _switch(self, name: str, opened: Sequence[LoadedModel], leaving: Sequence[LoadedModel]) -> None:
        """Answer new requests from the versions that were opened, and no more from those that leave."""
        versions = {model.config.version: model for model in opened}
        versions |= {number: one for number, one in self._models.get(name, {}).items() if one not in leaving}
        for number in versions:
            self._states.pop((name, number), None)
        newest_first = {number: versions[number] for number in sorted(versions, reverse=True)}
        self._models = {**self._models, name: newest_first}
        for model in opened:
            logger.info("model %s: version %s serves", name, model.config.version)

    def _unload(self, name: str) -> None:
        versions = self._models[name]
        self._models = {other: one for other, one in self._models.items() if other != name}
        try:
            self._lead()
        finally:
            for number, model in versions.items():
                self._states[name, number] = ModelState(name, str(number), "UNLOADING")
                self._drop(model)
                self._states[name, number] = ModelState(name, str(number), "UNAVAILABLE", "unloaded")

    def _failed(self, config: ModelConfig, reason: str) -> None:
        self._states[config.name, config.version] = ModelState(config.name, str(config.version), "UNAVAILABLE", reason)

    def _open_devices(self, models: Sequence[ModelConfig]) -> Sequence[Sequence[Device]]:
        opened = []
        for config in models:
            with about(config.name):
                opened.append(self._devices.open(config.gpu_cache.devices))
        return opened

    def _open(
        self, server: ParameterServer, config: ModelConfig, devices: Sequence[Device], progress: Progress | None = None
    ) -> LoadedModel:
        """Load a version's tables, open its session and warm it up."""
        server.load_model(config, progress)
        held = server.model(config.name, config.version)
        session: InferenceSession | LookupModelSession
        with ExitStack() as opened:
            opened.callback(server.unload_model, held.name, held.version, held)
            if config.dense_file is None:
                session = LookupModelSession(open_lookups(server, config, devices))
            else:
                settings = (self._engine, self._threads, self._calibration, self._tolerance)
                session = open_session(server, config, devices, *settings)
            opened.callback(session.close)
            warm_up(session)
            opened.pop_all()
        return LoadedModel(session)

    def _drop(self, model: LoadedModel, *, erase: bool = False) -> None:
        """Close a version after its requests, and remove its tables from the tiers.

        With ``erase`` its rows also leave the stores that outlive the process, if this process writes them. They stay
        if Redis is the source of truth, because servers on other machines may still serve this version.
        """
        server, config = self._server, model.config
        if server is None:
            return
        truth = server.stores[-1]
        is_own = config.has_versioned_tables and truth.writes and not isinstance(truth, RedisStore)
        is_own = is_own and (self._peers is None or self._peers.leads)
        remove = server.erase_model if erase and is_own else server.unload_model
        model.on_close(partial(_remove, remove, config))
        model.close()


def _remove(remove: Callable[[str, int], None], config: ModelConfig) -> None:
    try:
        with suppress(UnknownModelError):  # the server is closed
            remove(config.name, config.version)
    except StoreError as err:
        logger.warning("model %s: version %s is dropped, but %s", config.name, config.version, err)
    else:
        logger.info("model %s: version %s is dropped", config.name, config.version)


def _sizes(config: ModelConfig, stores: Sequence[Store]) -> str:
    """A model's memory: in this process's RAM, in shared memory and in mapped files."""
    ram, shared, mapped = config.dense_file.stat().st_size if config.dense_file else 0, 0, 0
    for name in map(config.full_name, config.tables):
        ram += sum(store.memory_bytes(name) for store in stores if isinstance(store, MemoryStore))
        shared += sum(store.memory_bytes(name) for store in stores if isinstance(store, SharedMemoryStore))
        mapped += sum(store.file_bytes(name) for store in stores if isinstance(store, SnapshotStore))
    others = {" of shared memory": shared, " of mapped files": mapped}
    return " and ".join([_amount(ram), *(_amount(size) + what for what, size in others.items() if size)])


def _amount(size_bytes: int) -> str:
    mebibytes = size_bytes / 2**20
    return f"{mebibytes:,.1f} MiB" if mebibytes >= 0.05 else f"{size_bytes / 2**10:,.1f} KiB"
