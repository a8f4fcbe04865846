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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from kernels.errors import HotrowError
from serving.background import PeriodicWorker
from serving.calibration import refuse_shared_calibration
from serving.config import ModelConfig, ParameterServerConfig, VersionPolicy
from serving.config.control import ControlMode
from serving.dense.calibration import DEFAULT_TOLERANCE
from serving.dense.network import Engine
from serving.errors import RequestError, UnknownModelError, WorkerError, about, did_you_mean, told
from serving.lookup import check_device_name, warn_of_idle_caches
from serving.lookup_model import LookupModelSession
from serving.metrics import MetricSample
from serving.parameter_server.health import Readiness, worst
from serving.parameter_server.preflight import check_hot_keys
from serving.parameter_server.progress import Progress
from serving.repository.loaded_model import LoadedModel
from serving.repository.loader import Runtime, VersionLoader
from serving.repository.source import ModelSource, Versions
from serving.session import InferenceSession

logger = logging.getLogger("hotrow.repository")


@dataclass(frozen=True, slots=True)
class ModelState:
    """One line of Triton's repository index; all texts but the name are empty for a model that was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


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
        self.control = control
        self._source = ModelSource(path, control, startup)
        self._runtime = Runtime(engine, threads, calibration, tolerance, device)
        self._poll_s = poll_s
        self._peers = peers
        self._loader: VersionLoader | None = None
        self._lock = threading.RLock()  # one load, unload, poll or close at a time; requests do not take it
        # Replaced as a whole, never changed in place, so requests need no lock. Versions are newest first.
        self._models: dict[str, dict[int, LoadedModel]] = {}
        self._states: dict[tuple[str, int], ModelState] = {}  # of versions that do not serve
        self._poller: PeriodicWorker | None = None

    @property
    def path(self) -> Path:
        """The repository's folder or file."""
        return self._source.path

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
        check_device_name(self._runtime.device, "device")
        ps, models = self._source.read_start(None if self._peers is None else self._peers.versions())
        if self._peers is not None:
            ps = self._peers.shared(ps)
        refuse_shared_calibration(self._runtime.calibration, len(ps.models))
        check_hot_keys(ps)  # for all models before the first load, because a load may take long
        loader = self._loader = VersionLoader(ps, self._runtime, writes=self._leads)
        try:
            devices = loader.open_devices(models)
            warn_of_idle_caches(zip(models, devices, strict=True))
            loader.server.share_bounds(models)
            for config, of_model in zip(models, devices, strict=True):
                with about(config.name):
                    self._switch(config.name, [loader.open(config, of_model, progress)], ())
            try:
                self._lead()
            except WorkerError as err:  # the other processes may still read the old rows
                logger.error("%s", told(err))
            else:
                for name in self._models:
                    loader.server.erase_other_versions(name)
        except BaseException:
            self.close()
            raise
        if self.control == "poll" and self._leads:
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
            if self._loader is None or not self._source.can_change:
                return
            for name in self._source.changed():
                try:
                    self._serve(name, None)
                except HotrowError as err:
                    logger.error("model %s: %s", name, told(err))
                    if isinstance(err, WorkerError):
                        self._source.forget(name)  # the worker may follow at the next look
            for name in self._models.keys() - self._source.names:
                self._unload(name)

    def follow(self, versions: Versions) -> None:
        """Serve these versions, which the process that leads has loaded, and no others.

        Raises:
            HotrowError: a version cannot be loaded; see ``load``.
        """
        with self._lock:
            if self._loader is None or not self._source.can_change:
                return
            for store in self._loader.server.stores:
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

    def readiness(self, name: str, version: str = "") -> Readiness:
        """Whether requests for a served model can succeed, by what is known of tiers and GPUs; never waits."""
        return self._readiness(self.loaded(name, version))

    def readiness_of_all(self) -> Readiness:
        """The worst readiness of the newest versions; a server without models is ready to load them."""
        if self._loader is None:
            return Readiness("not ready", "the repository is closed")
        newest = [next(iter(versions.values())) for versions in self._models.values()]
        return worst(self._readiness(model) for model in newest)

    def index(self) -> list[ModelState]:
        """The models and versions with their states, also those that are not served, by name and version."""
        states = dict(self._states)
        for name, versions in self._models.items():
            for number, model in versions.items():
                readiness = self._readiness(model)
                state = "READY" if readiness.is_ready else "UNAVAILABLE"
                states[name, number] = ModelState(name, str(number), state, readiness.reason)
        known = {name for name, _ in states}
        absent = [ModelState(name) for name in self._source.names if name not in known]
        return sorted([*states.values(), *absent], key=lambda one: (one.name, int(one.version or 0)))

    def readings(self) -> Iterable[MetricSample]:
        """Return the counters of the parameter server and the caches for the metrics page."""
        return () if self._loader is None else self._loader.readings(self.all_loaded())

    def describe(self) -> Iterable[str]:
        """Lines for an operator: each model with its memory and mapped files, and the tiers."""
        return () if self._loader is None else self._loader.describe(self.all_loaded())

    def close(self) -> None:
        """Close every session and the tiers. Closing twice is allowed."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        with self._lock:
            models, self._models = self.all_loaded(), {}
            for model in models:
                model.close()
            if self._loader is not None:
                self._loader.close()
                self._loader = None

    def __enter__(self) -> Self:
        """Return the repository; leaving the block closes it."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """See ``close``."""
        self.close()

    def _readiness(self, model: LoadedModel) -> Readiness:
        failed = f"{' and '.join(model.session.failed_devices)} failed"
        if not model.session.is_answering:
            return Readiness("not ready", failed)
        readiness = model.session.health.readiness()
        is_degraded = bool(model.session.failed_devices) and readiness.state == "ready"
        return Readiness("degraded", failed) if is_degraded else readiness

    def all_loaded(self) -> list[LoadedModel]:
        """The served versions of all models, newest first."""
        return [model for versions in self._models.values() for model in versions.values()]

    def _unknown(self, name: str) -> UnknownModelError:
        there = ", ".join(repr(known) for known in sorted(self._models))
        close = did_you_mean(name, self._models)
        return UnknownModelError(f"no model {name[:64]!r} is served; there is {there or 'none'}{close}")

    def _check_explicit(self) -> None:
        if self.control != "explicit":
            reason = "the server was started with --model-control-mode"
            raise RequestError(f"models cannot be loaded or unloaded: {reason} {self.control}, not explicit")

    @property
    def _leads(self) -> bool:
        return self._peers is None or self._peers.leads

    def _lead(self) -> None:
        """Have the other processes serve what this process serves, if it leads."""
        if self._peers is not None and self._peers.leads:
            self._peers.follow(self.served())

    def _serve(self, name: str, policy: VersionPolicy | None) -> None:
        """Load the new versions of a model, switch to them, and drop the versions that are not wanted any more."""
        loader = self._loader
        if loader is None:
            raise UnknownModelError("the repository is closed")
        with about(name):
            wanted = self._source.read_model(name, policy)
            serving = self._models.get(name, {})
            new = [config for config in wanted if config.version not in serving]
            leaving = [model for number, model in serving.items() if number not in {one.version for one in wanted}]
            opened = self._open(loader, new, leaving)
            self._switch(name, opened, leaving)
            followed = False
            try:
                self._lead()
                followed = True
            finally:  # a process that did not follow still reads the old rows
                for model in leaving:
                    loader.drop(model, erase=bool(new) and followed)

    def _open(
        self, loader: VersionLoader, new: Sequence[ModelConfig], leaving: Sequence[LoadedModel]
    ) -> list[LoadedModel]:
        """Open all new versions of a model, or none of them if one is broken; ``_states`` has the reason."""
        opened: list[LoadedModel] = []
        try:
            for config, devices in zip(new, loader.open_devices(new), strict=True):
                place = config.name, config.version
                self._states[place] = ModelState(config.name, str(config.version), "LOADING")
                try:
                    loader.server.share_bounds([config], [model.config for model in leaving])
                    opened.append(loader.open(config, devices))
                except HotrowError as err:
                    self._states[place] = ModelState(config.name, str(config.version), "UNAVAILABLE", told(err))
                    raise
        except BaseException:
            for model in opened:
                loader.drop(model)
                self._states.pop((model.config.name, model.config.version), None)
            raise
        return opened

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
        loader, versions = self._loader, self._models[name]
        if loader is None:
            return
        self._models = {other: one for other, one in self._models.items() if other != name}
        try:
            self._lead()
        finally:
            for number, model in versions.items():
                self._states[name, number] = ModelState(name, str(number), "UNLOADING")
                loader.drop(model)
                self._states[name, number] = ModelState(name, str(number), "UNAVAILABLE", "unloaded")
