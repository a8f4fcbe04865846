"""The model repository: the models that are served together, their versions, and their sessions.

A version's life::

    absent -> loading -> serving -> draining -> dropped
                 |
              failed: the versions that serve keep serving, and ``index`` has the reason

A swap loads the new version next to the old version, switches all new requests to it at once, waits for the requests
of the old version and drops it. New files of a version are a new version, with the same number: a version is known by
its number and its digest, and so are its tables. Where several processes serve the same models, one of them leads: the
others follow it before it drops the old version.
"""

import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from kernels.device import Device
from kernels.errors import HotrowError
from serving.background import PeriodicWorker, giving_way, next_to_requests
from serving.calibration import refuse_shared_calibration
from serving.config import ModelConfig, ModelFolder, ParameterServerConfig, VersionPolicy
from serving.config.control import ControlMode
from serving.errors import (
    ConfigError,
    DeviceMemoryError,
    LoadEndedError,
    ModelFileError,
    RequestError,
    UnknownModelError,
    VersionConflictError,
    WorkerError,
    about,
    did_you_mean,
    told,
    without_frames,
)
from serving.lookup import check_device_name, warn_of_idle_caches
from serving.metrics import MetricSample
from serving.model.manifest import Stamp, stamp_of
from serving.opening import Runtime
from serving.parameter_server.health import Readiness, worst
from serving.parameter_server.preflight import check_hot_keys
from serving.parameter_server.table_files import Progress
from serving.repository.loader import VersionLoader
from serving.repository.served_model import ServedModel
from serving.repository.source import ModelSource, Versions, with_digest
from serving.repository.states import ModelState, VersionStates
from serving.session import InferenceSession, ModelSession
from serving.storage.store import LastingStore

logger = logging.getLogger("hotrow.repository")

#: How long ``close`` waits for a look at the folder or a load that hangs, as on a file system that does not answer.
_CLOSE_TIMEOUT_S = 3.0


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
        """Have every other process serve these versions; raise WorkerError if a process could not follow."""

    def renew(self, model: str) -> Versions | None:
        """Make the leading process load the files that a model's folder has now, and return ``versions``."""


class ModelRepository:
    """The models of one folder, ``<repository>/<model>/<version>/``, or of one JSON file, and the tiers of their rows.

    ``serving.config.read_repository`` finds the models. Any thread may call every method; loads take turns.
    """

    def __init__(
        self,
        path: str | Path,
        runtime: Runtime | None = None,
        control: ControlMode = "none",
        poll_s: float = 15.0,
        startup: Sequence[str] = (),
        peers: Peers | None = None,
        update_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Describe a repository; nothing is read before ``load``.

        Args:
            path: the repository's folder, a ``ps.json``, a v3.0 inference JSON or the folder of one model.
            runtime: how its models run; None: the defaults. Only a repository of one model may have a ``calibration``.
            control: ``"none"``: the models of the start are served until the end. ``"poll"``: changes of the folder
                are followed. ``"explicit"``: ``load_model`` and ``unload_model`` decide.
            poll_s: time between two looks at the folder.
            startup: the models that the mode ``"explicit"`` loads at the start; ``"*"`` stands for every model.
            peers: the other processes of the same server, if there are any.
            update_settings: values of keys of the ``update_source``, which replace those of the ``ps.json``.
        """
        self.control = control
        self._source = ModelSource(path, control, startup)
        self._runtime = runtime or Runtime()
        self._poll_s = poll_s
        self._peers = peers
        self._update_settings = update_settings or {}
        self._loader: VersionLoader | None = None
        self._lock = threading.RLock()  # one load, unload, poll or close at a time; requests do not take it
        # Replaced as a whole, never changed in place, so requests need no lock. Versions are newest first.
        self._models: dict[str, dict[int, ServedModel]] = {}
        self._states = VersionStates()
        self._is_ending = threading.Event()
        # The models of the loads that run or wait for the lock. The event says that a later unload ends the load.
        self._loads: dict[threading.Event, str] = {}
        self._is_unloaded: threading.Event | None = None  # the event of the load that runs
        self._lag: WorkerError | None = None  # why another process does not serve what this process serves
        self._poller: PeriodicWorker | None = None

    @property
    def path(self) -> Path:
        """The repository's folder or file."""
        return self._source.path

    def load(self, progress: Progress | None = None) -> None:
        """Load the models of the start, or none if one is broken. The mode ``"poll"`` leaves out broken models.

        Args:
            progress: see ``ParameterServer.load_model``.

        Raises:
            ConfigError: the path does not exist, or a configuration is invalid.
            UnknownModelError: a model of ``startup`` is not in the repository.
            ModelFileError: a model's file is missing or damaged.
            StoreError: a tier cannot be opened or cannot take the rows.
            DeviceUnavailableError: a GPU or the software to use it is missing.
            DeviceMemoryError: a GPU has too little free memory for the caches.
        """
        self._is_ending.clear()
        with self._lock:
            self._load(progress)
        if self.control == "poll" and self._leads:
            self._poller = PeriodicWorker("hotrow-repository", self.poll, self._poll_s)

    def _load(self, progress: Progress | None) -> None:
        check_device_name(self._runtime.device, "device")
        ps, models = self._read_start()
        ps = ps.with_update_settings(self._update_settings)
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
                with self._isolated(config), about(config.name):
                    stamp = self._source.start_stamp(config)
                    self._switch(config.name, [self._open(loader, config, of_model, stamp, progress)], ())
            if self.control == "poll" and self._leads:
                self._poll()  # loads what the start has left out
            self._lead()
            if self._lag is None:  # otherwise another process may still read the old rows
                for name in self._models:
                    loader.server.erase_other_versions(name)
        except BaseException:
            self.close()
            raise

    def load_model(self, name: str, policy: VersionPolicy | None = None) -> None:
        """Serve the versions of a model that its folder has now.

        A version whose files have not changed keeps serving. Other versions are loaded next to those that
        serve. If one of them is broken, nothing changes.

        Args:
            name: a folder of the repository.
            policy: which versions to serve; None: as the model's ``config.pbtxt`` says.

        Raises:
            RequestError: the control mode is not ``"explicit"``.
            VersionConflictError: a version serves other files, and ``ps.json`` lists the model.
            UnknownModelError: the repository has no such model.
            ConfigError, ModelFileError, StoreError, DeviceUnavailableError, DeviceMemoryError: see ``load``.
            LoadEndedError: an unload of the model was asked for after this load.
            WorkerError: another process does not serve what this process serves. A repeated load asks it again.
        """
        self._check_explicit()
        with self._turn_to_load(name):
            # Each call logs its failure.
            self._states.log_again(name)
            self._source.look()
            self._states.keep_models(self._source.names)
            self._serve(name, policy)
            self._check_followed()

    def renew(self, name: str) -> None:
        """In every process, serve the same versions of a model from the files that its folder has now.

        A process that starts needs the files of the versions that the others serve. It calls this in the process that
        leads if other files have taken their place.

        Raises:
            HotrowError: see ``load_model``; nothing has changed.
        """
        with self._turn_to_load(name):
            if name in self._models and self._source.can_change:
                logger.warning("model %s: its files have changed, so all workers swap to them", name)
                self._serve(name, VersionPolicy.of_versions(self._models[name]))

    def unload_model(self, name: str) -> None:
        """Drop all versions of a model, after their requests in flight; stores that outlive the process keep its rows.

        Earlier loads of the model end, also those that wait for another load.

        Raises:
            RequestError: the control mode is not ``"explicit"``.
            UnknownModelError: no version of the model is served or was being loaded.
            WorkerError: another process does not serve what this process serves. A repeated unload asks it again.
        """
        self._check_explicit()
        loads = [is_unloaded for is_unloaded, model in self._loads.copy().items() if model == name]
        for is_unloaded in loads:
            is_unloaded.set()
        with self._lock:
            if name in self._models:
                self._unload(name)
            elif self._lag is not None:  # an earlier unload may be what the other process did not follow
                self._lead()
            elif not loads:
                raise self._unknown(name)
            self._check_followed()

    def poll(self) -> None:
        """Follow the changes of the folder: new, removed and replaced versions, models and policies.

        A version that fails does not affect other versions. Its first failure is logged. It is tried again when its
        files change, and from time to time if they do not. A process that did not follow a change is asked again.
        """
        with self._lock, next_to_requests():
            self._poll()

    def _poll(self) -> None:
        if self._loader is None or not self._source.can_change:
            return
        if self._lag is not None:
            self._lead()
        for name in self._source.due():
            if self._is_ending.is_set():
                return
            try:
                is_served = self._serve(name, None, each_alone=True)
            except HotrowError:
                self._source.tried(name, failed=True)
            else:
                self._source.tried(name, failed=not is_served)
        for name in self._models.keys() - self._source.names:
            self._unload(name)
        self._states.keep_models(self._source.names)

    def follow(self, versions: Versions) -> None:
        """Serve these versions, which the process that leads has loaded, and no others.

        Raises:
            HotrowError: the versions of a model cannot be loaded, see ``load``; the other models are followed.
        """
        faults: list[HotrowError] = []
        with self._lock, next_to_requests():
            if self._loader is None or not self._source.can_change:
                return
            for store in self._loader.server.stores:
                if isinstance(store, LastingStore):
                    store.catch_up()
            served = self.served()
            for name, digests in versions.items():
                try:
                    if digests != served.get(name):
                        self._serve(name, VersionPolicy.of_versions(map(int, digests)), digests=digests)
                except HotrowError as err:
                    faults.append(without_frames(err))
                else:
                    self._states.keep_versions(name, ())  # an older fault is none any more
            for name in self._models.keys() - versions.keys():
                self._unload(name)
            self._states.keep_models(versions)
        if faults:
            raise without_frames(faults[0])

    def served(self) -> Versions:
        """The served versions of every model, newest first, and their digests."""
        return {
            name: {str(number): model.config.digest for number, model in versions.items()}
            for name, versions in self._models.items()
        }

    def models(self) -> Mapping[str, ModelSession]:
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
        if not isinstance(session, InferenceSession):
            raise UnknownModelError(f"model {name!r} has no dense network")
        return session

    def loaded(self, name: str, version: str = "") -> ServedModel:
        """A loaded version; raises UnknownModelError if this model or this version is not served.

        ``version`` is text that a client wrote, empty for the newest version.
        """
        model = self.find(name, version)
        if model is not None:
            return model
        versions = self._models.get(name)
        if versions is None:
            raise self._unknown(name)
        known = ", ".join(map(str, versions))
        raise UnknownModelError(
            f"no version {version[:20]!r} of model {name!r} is served; there is version {known}"
            if len(versions) == 1
            else f"no version {version[:20]!r} of model {name!r} is served; there are versions {known}"
        )

    def find(self, name: str, version: str = "") -> ServedModel | None:
        """See ``loaded``; None if this model or this version is not served, without a search for similar names."""
        versions = self._models.get(name, {})
        if not version:
            return next(iter(versions.values()), None)
        return next((model for number, model in versions.items() if version == str(number)), None)

    def begin(self, model: ServedModel, version: str) -> ServedModel:
        """Return a version that stays loaded until the caller calls its ``end``.

        Args:
            model: what ``loaded`` returned. If it has been dropped since then, another version may serve.
            version: what ``loaded`` got.

        Raises:
            UnknownModelError: this model or this version is not served any more.
        """
        while True:
            with suppress(UnknownModelError):
                model.begin()
                return model
            model = self.loaded(model.name, version)

    @contextmanager
    def use(self, name: str, version: str = "") -> Iterator[ServedModel]:
        """Keep a version loaded while the block runs; see ``loaded``."""
        model = self.begin(self.loaded(name, version), version)
        try:
            yield model
        finally:
            model.end()

    def readiness(self, model: ServedModel) -> Readiness:
        """Whether requests for a served model can succeed, by what is known of tiers and GPUs; never waits."""
        failed = f"{' and '.join(model.session.failed_devices)} failed"
        if not model.session.is_answering:
            return Readiness("not ready", failed)
        readiness = model.session.health.readiness()
        is_degraded = bool(model.session.failed_devices) and readiness.state == "ready"
        return Readiness("degraded", failed) if is_degraded else readiness

    def readiness_of_all(self) -> Readiness:
        """The worst readiness of the newest versions; a server without models is ready to load them."""
        if self._loader is None:
            return Readiness("not ready", "the repository is closed")
        newest = [next(iter(versions.values())) for versions in self._models.values()]
        return worst(self.readiness(model) for model in newest)

    def index(self) -> list[ModelState]:
        """The models and versions with their states, also those that are not served, by name and version.

        A process that follows looks at the folder only when it starts. So it leaves out what it need not serve.
        """
        incomplete, names = (self._source.incomplete, self._source.names) if self._leads else ({}, ())
        states = {place: ModelState.of(place, "UNAVAILABLE", reason) for place, reason in incomplete.items()}
        states |= self._states.now()
        for name, versions in self._models.items():
            for number, model in versions.items():
                readiness = self.readiness(model)
                state = "READY" if readiness.is_ready else "UNAVAILABLE"
                reason = readiness.reason or self._states.fault(name, number)
                states[name, number] = ModelState.of((name, number), state, reason, model.config.digest)
        known = {name for name, _ in states}
        absent = [ModelState.of((name, 0), "") for name in names if name not in known]
        return sorted([*states.values(), *absent], key=lambda state: (state.name, int(state.version or 0)))

    def readings(self) -> Iterable[MetricSample]:
        """Return the counters of the parameter server and the caches for the metrics page."""
        return () if self._loader is None else self._loader.readings(self.all_loaded())

    def describe(self) -> Iterable[str]:
        """Lines for an operator: each model with its memory and mapped files, and the tiers."""
        return () if self._loader is None else self._loader.describe(self.all_loaded())

    def close(self) -> None:
        """Close every session and the tiers. Closing twice is allowed."""
        self._is_ending.set()
        if self._poller is not None:
            self._poller.close(_CLOSE_TIMEOUT_S)
            self._poller = None
        if not self._lock.acquire(timeout=_CLOSE_TIMEOUT_S):
            return logger.warning("a model is still being loaded: the process ends without it")
        try:
            models, self._models = self.all_loaded(), {}
            for model in models:
                model.close()
            if self._loader is not None:
                self._loader.close()
                self._loader = None
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        """Return the repository; leaving the block closes it."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """See ``close``."""
        self.close()

    def all_loaded(self) -> list[ServedModel]:
        """The served versions of all models, newest first."""
        return [model for versions in self._models.values() for model in versions.values()]

    def _unknown(self, name: str) -> UnknownModelError:
        known_models = ", ".join(repr(known) for known in sorted(self._models))
        close = did_you_mean(name, self._models)
        return UnknownModelError(f"no model {name[:64]!r} is served; there is {known_models or 'none'}{close}")

    def _check_explicit(self) -> None:
        if self.control != "explicit":
            reason = "the server was started with --model-control-mode"
            raise RequestError(f"models cannot be loaded or unloaded: {reason} {self.control}, not explicit")

    @property
    def _leads(self) -> bool:
        return self._peers is None or self._peers.leads

    def _lead(self) -> None:
        """Have the other processes serve what this process serves, if it leads; ``_lag`` says whether they do."""
        if self._peers is None or not self._peers.leads:
            return
        try:
            self._peers.follow(self.served())
        except WorkerError as err:
            if self._lag is None:
                logger.error("%s", told(err))
            self._lag = without_frames(err)
        else:
            if self._lag is not None:
                logger.warning("all workers follow again")
            self._lag = None

    def _check_followed(self) -> None:
        if self._lag is not None:
            raise without_frames(self._lag)

    def _serve(
        self,
        name: str,
        policy: VersionPolicy | None,
        *,
        each_alone: bool = False,
        digests: Mapping[str, str] | None = None,
    ) -> bool:
        """Load the versions of a model that are new, switch to them, and drop those that are not wanted any more.

        Args:
            name: the model.
            policy: see ``load_model``.
            each_alone: a broken version does not keep others from being served; the policy chooses among the others.
            digests: the files that the versions must have; None: any.

        Returns:
            whether no version is broken.
        """
        loader, serving = self._loader, self._models.get(name, {})
        if loader is None:
            raise UnknownModelError("the repository is closed")
        with about(name):
            self._go_on()
            folder = self._opened_folder(name, policy)
            opened, wanted, is_whole = self._open_chosen(loader, folder, each_alone, digests)
            leaving = [model for number, model in serving.items() if number not in wanted or number in opened]
            if not wanted:  # all are broken: what serves keeps serving
                leaving = []
            if opened or leaving:
                self._switch(name, list(opened.values()), leaving)
            if opened or leaving or self._lag is not None:
                self._lead()
            for model in leaving:  # a process that did not follow still reads the old rows
                loader.drop(model, erase=bool(opened) and self._lag is None)
            self._states.keep_versions(name, folder.versions)
            return is_whole

    def _open_chosen(
        self, loader: VersionLoader, folder: ModelFolder, each_alone: bool, digests: Mapping[str, str] | None
    ) -> tuple[dict[int, ServedModel], Sequence[int], bool]:
        """Open the files of the versions to serve that do not serve yet; see ``_serve``.

        Returns:
            what was opened, the versions to serve, and whether none is broken.
        """
        serving = self._models.get(folder.name, {})
        opened: dict[int, ServedModel] = {}
        tried: set[int] = set()
        broken: set[int] = set()  # the policy chooses among the others
        is_whole = True
        try:
            while untried := [number for number in folder.chosen(broken) if number not in tried]:
                number = untried[0]
                tried.add(number)
                try:
                    model = self._newly_opened(loader, folder, number, broken, digests)
                except HotrowError as err:
                    is_whole = False
                    self._states.note_fault(folder.name, number, err, serves=number in serving)
                    if not each_alone:
                        raise
                    if number not in serving:  # otherwise the files that were loaded before keep serving
                        broken.add(number)
                else:
                    self._states.clear(folder.name, number)
                    opened |= {} if model is None else {number: model}
        except BaseException:
            for model in opened.values():
                loader.drop(model)
            raise
        return opened, folder.chosen(broken), is_whole

    def _opened_folder(self, name: str, policy: VersionPolicy | None) -> ModelFolder:
        try:
            folder = self._source.open(name, policy)
            folder.chosen()
        except UnknownModelError:
            raise
        except HotrowError as err:
            self._states.note_fault(name, 0, err)
            raise
        self._states.clear(name, 0)
        return folder

    def _newly_opened(
        self,
        loader: VersionLoader,
        folder: ModelFolder,
        number: int,
        broken: Collection[int],
        digests: Mapping[str, str] | None,
    ) -> ServedModel | None:
        """Open the files that a version's folder has now; None if they are those that serve."""
        serving = self._models.get(folder.name, {})
        path, loaded = folder.versions.get(number), serving.get(number)
        if loaded is None:
            self._states.show(folder.name, number, "LOADING")
        stamp = None if path is None else stamp_of(path)
        is_same = loaded is not None and (stamp is None or loaded.stamp == stamp)
        config = (
            loaded.config
            if loaded is not None and is_same
            else giving_way(partial(folder.read_to_serve, number, self._go_on))
        )
        if digests is not None and config.digest != digests[str(number)]:
            raise ModelFileError(config.source, f"expected the files of {digests[str(number)]}, found {config.digest}")
        if loaded is not None and loaded.config.digest == config.digest:
            loaded.stamp = stamp
            return None
        if loaded is not None and not config.table_tag:
            reason = (
                f"version {number} serves the files of digest {loaded.config.digest}, but its folder has "
                f"{config.digest}; the model is listed in ps.json, so both have the same tables: unload it first"
            )
            raise VersionConflictError(reason)
        (devices,) = loader.open_devices([config])
        wanted = folder.chosen(broken)
        leaving = [model.config for other, model in serving.items() if other == number or other not in wanted]
        loader.server.share_bounds([config], leaving)
        return self._open(loader, config, devices, stamp)

    def _open(
        self,
        loader: VersionLoader,
        config: ModelConfig,
        devices: Sequence[Device],
        stamp: Stamp | None,
        progress: Progress | None = None,
    ) -> ServedModel:
        """Open a version whose files had this stamp before they were read.

        Other processes may serve this version from the same stores, and must not get rows of other files. All files are
        open when the first batch of rows is reported.

        Raises:
            ModelFileError: they have changed since, so they may be those of two versions.
            DeviceMemoryError: there is too little free memory.
        """
        is_checked = False

        def report(task: str, rows: int, all_rows: int) -> None:
            nonlocal is_checked
            self._go_on()
            if not is_checked:  # once, because a version may have a thousand files; a table checks its own after that
                self._check_unchanged(config, stamp)
                is_checked = True
            if progress is not None:
                progress(task, rows, all_rows)

        try:
            model = loader.open(config, devices, report)
        except MemoryError:
            raise DeviceMemoryError("cpu", f"too little free memory to load version {config.version}") from None
        model.stamp = stamp
        try:
            self._check_unchanged(config, stamp)
        except ModelFileError:
            loader.drop(model)  # other processes may serve its rows; the next start erases rows that nobody serves
            raise
        return model

    def _check_unchanged(self, config: ModelConfig, stamp: Stamp | None) -> None:
        if stamp is not None and self._source.stamp(config) != stamp:
            raise ModelFileError(Path(config.source).parent, "a file was changed while the version was loaded")

    def _go_on(self) -> None:
        """End the load that runs if its model was unloaded meanwhile, or if the repository is being closed."""
        if self._is_ending.is_set():
            raise LoadEndedError("the server is stopping")
        if self._is_unloaded is not None and self._is_unloaded.is_set():
            raise LoadEndedError("the load was ended by an unload")

    @contextmanager
    def _turn_to_load(self, name: str) -> Iterator[None]:
        """Wait for the lock, and load a model in the block; an unload ends the load even before its turn."""
        is_unloaded = threading.Event()
        self._loads[is_unloaded] = name
        try:
            with self._lock, next_to_requests():
                self._is_unloaded = is_unloaded
                try:
                    yield
                finally:
                    self._is_unloaded = None
        finally:
            del self._loads[is_unloaded]

    @contextmanager
    def _isolated(self, config: ModelConfig) -> Iterator[None]:
        """Only where a start leaves out faulty versions, a version that is broken does not end it."""
        try:
            yield
        except (ConfigError, ModelFileError) as err:
            if not self._source.leaves_out_faults:
                raise
            self._states.note_fault(config.name, config.version, err)
            self._source.tried(config.name, failed=True)

    def _switch(self, name: str, opened: Sequence[ServedModel], leaving: Sequence[ServedModel]) -> None:
        """Answer new requests from the opened versions, and no longer from the versions that leave."""
        versions = {model.config.version: model for model in opened}
        versions |= {
            number: version for number, version in self._models.get(name, {}).items() if version not in leaving
        }
        for model in opened:
            self._states.clear(name, model.config.version)
        newest_first = {number: versions[number] for number in sorted(versions, reverse=True)}
        self._models = {**self._models, name: newest_first}
        for model in opened:
            logger.info("model %s: version %s serves%s", name, model.config.version, _of_files(model.config))

    def _read_start(self) -> tuple[ParameterServerConfig, Sequence[ModelConfig]]:
        """Read the models of the start; if other processes serve them already, the files that they serve.

        Raises:
            VersionConflictError: those files were replaced, and the other processes cannot swap to the new files.
        """
        peers, wanted = self._peers, None if self._peers is None else self._peers.versions()
        while True:
            ps, models = self._source.read_start(wanted)
            if peers is not None and not self._source.can_change:
                models = [with_digest(config) for config in models]
                _check_same(models, wanted)
            elif wanted is not None:
                # The versions of such a model share its tables.
                listed = [config for config in models if not config.table_tag]
                _check_same(listed, {config.name: wanted[config.name] for config in listed})
            changed = [
                model.name for model in models if wanted and model.digest != wanted[model.name][str(model.version)]
            ]
            if peers is None or peers.leads or not changed:  # the others follow the process that leads
                return ps, models
            wanted = peers.renew(changed[0])

    def _unload(self, name: str) -> None:
        loader, versions = self._loader, self._models[name]
        if loader is None:
            return
        self._models = {other: models for other, models in self._models.items() if other != name}
        self._lead()
        for number, model in versions.items():
            self._states.show(name, number, "UNLOADING")
            loader.drop(model)
            self._states.show(name, number, "UNAVAILABLE", "unloaded")


def _check_same(models: Sequence[ModelConfig], served: Versions | None) -> None:
    """Check that other processes serve these models from the same files, if they serve any."""
    ours = {(model.name, str(model.version), model.digest) for model in models}
    theirs = {(name, *item) for name, versions in (served or {}).items() for item in versions.items()}
    if served is not None and ours != theirs:
        now, before = (
            " and ".join(
                f"version {version} of {name!r} with digest {digest}" for name, version, digest in sorted(keys)
            )
            for keys in (ours - theirs, theirs - ours)
        )
        reason = f"the other processes serve {before or 'the other models'}, but the files are {now or 'gone'} now"
        raise VersionConflictError(f"{reason}; restart the server, or in the control mode none send it SIGHUP")


def _of_files(config: ModelConfig) -> str:
    return f", digest {config.short_digest}" if config.digest else ""
