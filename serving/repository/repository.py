"""The model repository: the models that are served together, their versions, and their sessions.

A version's life::

    absent -> loading -> serving -> draining -> dropped
                 |
              failed: the versions that serve keep serving, and ``index`` has the reason

A version that shares the tables of another version is loaded when its network is. It serves when the tables have
reached the position that it states; until then the versions before it serve, or if there are none, the version that
brings the tables.

A swap loads the new version next to the old version, switches all new requests to it at once, waits for the requests
of the old version and drops it. New files of a version are a new version, with the same number: a version is known by
its number and its digest, and so are its tables. Where several processes serve the same models, one of them leads: the
others follow it before it drops the old version.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Self

from kernels.device import Device
from kernels.errors import HotrowError
from serving.background import PeriodicWorker, next_to_requests
from serving.calibration import refuse_shared_calibration
from serving.config import ModelConfig, ModelFolder, ParameterServerConfig, VersionPolicy
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
    told,
    without_frames,
)
from serving.lookup import warn_of_idle_caches
from serving.metrics import MetricSample
from serving.model.manifest import Stamp, stamp_of
from serving.opening import Runtime
from serving.option_values import ControlMode, check_device_name
from serving.parameter_server.health import Readiness, worst
from serving.parameter_server.preflight import check_hot_keys
from serving.parameter_server.table_files import Progress
from serving.repository.loader import VersionLoader
from serving.repository.peers import Peers, check_same
from serving.repository.served_model import ServedModel
from serving.repository.served_versions import ServedVersions
from serving.repository.source import ModelSource, Versions, base_stamp, with_digest
from serving.repository.states import UNLOADED, ModelState
from serving.storage.store import LastingStore

logger = logging.getLogger("hotrow.repository")

#: Time between two looks at the positions of tables for which versions wait.
_LOOK_INTERVAL_S = 0.05
#: How long a process that leads waits for the tables of a process that follows, so that it can erase older tables.
_FOLLOW_TIMEOUT_S = 5.0
#: How long ``close`` waits for a look at the folder or a load that hangs, as on a file system that does not answer.
_CLOSE_TIMEOUT_S = 3.0


class ModelRepository(ServedVersions):
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
        super().__init__()
        self.control = control
        self._source = ModelSource(path, control, startup)
        self._runtime = runtime or Runtime()
        self._poll_s = poll_s
        self._peers = peers
        self._update_settings = update_settings or {}
        self._loader: VersionLoader | None = None
        self._lock = threading.RLock()  # one load, unload, poll or close at a time; requests do not take it
        self._watcher: PeriodicWorker | None = None  # of the versions that wait; started with the first
        self._is_ending = threading.Event()
        # The models of the loads that run or wait for the lock. The event says that a later unload ends the load.
        self._loads: dict[threading.Event, str] = {}
        self._is_unloaded: threading.Event | None = None  # the event of the load that runs
        self._lag: WorkerError | None = None  # why another process does not serve what this process serves
        self._late: Collection[str] = ()  # the models of which another process still serves older versions
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
            loader.tables.share_bounds(models, ())
            for config, of_model in sorted(zip(models, devices, strict=True), key=_has_base):
                with self._isolated(config), about(config.name):
                    opened = self._open(loader, config, of_model, self._source.start_stamp, progress)
                    if not self._source.can_change:  # so no other version can serve before
                        self._wait_for_positions(opened)
                    wanted = [other.version for other in models if other.name == config.name]
                    for model in self._switch(config.name, {config.version: opened}, wanted):
                        loader.drop(model)
            if self.control == "poll" and self._leads:
                self._poll()  # loads what the start has left out
            if not any(map(self._waits, self._waiting)):  # the other processes may serve the versions that wait here
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
        serve. If one of them is broken, nothing changes. A version whose shared tables have not reached its position
        serves later: ``index`` has the reason.

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
                self._serve(name, VersionPolicy.of_versions(self._loaded_versions(name)))

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
            if self._loaded_versions(name):
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

        Raises:
            ConfigError: the folder cannot be listed, or all models have left it.
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
        removed = (self._models.keys() | self._waiting.keys()).difference(self._source.names)
        if removed and not self._source.names:  # such as a file system that is not mounted any more
            raise ConfigError(str(self._source.path), "", "no model is in it any more; the models go on serving")
        for name in removed:
            self._unload(name)
        self._states.keep_models(self._source.names)

    def follow(self, versions: Versions) -> list[str]:
        """Serve these versions, which the process that leads has loaded, and no others.

        Returns:
            the models whose older versions go on serving here until the tables of this process, which reads the log of
            updates on its own, have reached the position of the newer version.

        Raises:
            HotrowError: the versions of a model cannot be loaded, see ``load``; the other models are followed.
        """
        faults: list[HotrowError] = []
        with self._lock, next_to_requests():
            if self._loader is None or not self._source.can_change:
                return []
            for store in self._loader.server.stores:
                if isinstance(store, LastingStore):
                    store.catch_up()
            served = self.served()
            for name, digests in versions.items():
                try:
                    if digests != served.get(name):
                        before = self._waiting.get(name, ())
                        self._serve(name, VersionPolicy.of_versions(map(int, digests)), digests=digests)
                        self._go_live_soon(name, before)
                except HotrowError as err:
                    faults.append(without_frames(err))
                else:
                    self._states.keep_versions(name, ())  # an older fault is none any more
            for name in (self._models.keys() | self._waiting.keys()) - versions.keys():
                self._unload(name)
            self._states.keep_models(versions)
            late = [name for name in self._waiting if self._waits(name)]
        if faults:
            raise without_frames(faults[0])
        return late

    def readiness_of_all(self) -> Readiness:
        """The worst readiness of the newest versions.

        A server without models is ready to load them. But if it has found models and none of them can be loaded, a
        rollout of such servers must not go on.
        """
        if self._loader is None:
            return Readiness("not ready", "the repository is closed")
        if self.control == "poll" and self._source.names and not self._models:
            return Readiness("not ready", "no model of the repository can be loaded")
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
        for model in (model for models in self._waiting.values() for model in models):
            place = model.name, model.config.version
            if model.config.version not in self._models.get(model.name, {}):
                reason = f"waits until its tables reach {model.waits_for()}"
                states[place] = ModelState.of(place, "LOADING", reason, model.config.digest)
        known = {name for name, _ in states}
        absent = [ModelState.of((name, 0), "") for name in names if name not in known]
        return sorted([*states.values(), *absent], key=lambda state: (state.name, int(state.version or 0)))

    def readings(self) -> Iterable[MetricSample]:
        """Return the states of versions, and the counters of the parameter server and the caches."""
        states = [state.sample() for state in self.index() if state.state]  # a model that was never loaded has none
        return states if self._loader is None else chain(states, self._loader.readings(self.all_loaded()))

    def describe(self) -> Iterable[str]:
        """Lines for an operator: each model with its memory and mapped files, and the tiers."""
        return () if self._loader is None else self._loader.describe(self.all_loaded())

    def close(self) -> None:
        """Close every session and the tiers. Closing twice is allowed."""
        self._is_ending.set()
        if self._poller is not None:
            self._poller.close(_CLOSE_TIMEOUT_S)
            self._poller = None
        if self._watcher is not None:
            self._watcher.close(_CLOSE_TIMEOUT_S)
            self._watcher = None
        if not self._lock.acquire(timeout=_CLOSE_TIMEOUT_S):
            return logger.warning("a model is still being loaded: the process ends without it")
        try:
            models = [*self.all_loaded(), *chain.from_iterable(self._waiting.values())]
            self._models, self._waiting = {}, {}
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
            self._late = frozenset(self._peers.follow(self.served()))
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
        loader = self._loader
        if loader is None:
            raise UnknownModelError("the repository is closed")
        with about(name):
            self._go_on()
            folder = self._opened_folder(name, policy)
            opened, wanted, is_whole = self._open_chosen(loader, folder, each_alone, digests)
            leaving = self._switch(name, opened, wanted)
            if opened or leaving or self._lag is not None:
                self._drop(leaving, erase=bool(opened))
            self._states.keep_versions(name, folder.versions)
            return is_whole

    def _open_chosen(
        self, loader: VersionLoader, folder: ModelFolder, each_alone: bool, digests: Mapping[str, str] | None
    ) -> tuple[dict[int, ServedModel], Sequence[int], bool]:
        """Open the files of the versions to serve that do not serve yet; see ``_serve``.

        Returns:
            what was opened, the versions to serve, and whether none is broken.
        """
        loaded = self._loaded_versions(folder.name)
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
                    self._states.note_fault(folder.name, number, err, serves=number in loaded)
                    if not each_alone:
                        raise
                    if number not in loaded:  # otherwise the files that were loaded before keep serving
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
        others = self._loaded_versions(folder.name)
        path, loaded = folder.versions.get(number), others.get(number)
        if loaded is None:
            self._states.show(folder.name, number, "LOADING")
        stamp = None if path is None else stamp_of(path)
        is_same = loaded is not None and (stamp is None or loaded.stamp == stamp)
        stamps = {} if is_same else {**base_stamp(folder, number), number: stamp}
        config = (
            loaded.config
            if loaded is not None and is_same
            else folder.read_to_serve(number, self._go_on, loader.tables.configs(folder.name))
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
        leaving = [model.tables for other, model in others.items() if other == number or other not in wanted]
        loader.tables.share_bounds([config], leaving)
        return self._open(loader, config, devices, lambda version: stamps.get(version.version))

    def _open(
        self,
        loader: VersionLoader,
        config: ModelConfig,
        devices: Sequence[Device],
        stamp: Callable[[ModelConfig], Stamp | None],
        progress: Progress | None = None,
    ) -> ServedModel:
        """Open a version whose files had this stamp before they were read, and so had those of its tables.

        Other processes may serve this version from the same stores, and must not get rows of other files. All files are
        open when the first batch of rows is reported.

        Raises:
            ModelFileError: they have changed since, so they may be those of two versions.
            DeviceMemoryError: there is too little free memory.
        """
        is_checked = False
        read = [config]
        if config.base is not None and not loader.tables.has(config):
            read.append(config.base)

        def check_unchanged() -> None:
            for version in read:
                if (before := stamp(version)) is not None and self._source.stamp(version) != before:
                    reason = "a file was changed while the version was loaded"
                    raise ModelFileError(Path(version.source).parent, reason)

        def report(task: str, rows: int, all_rows: int) -> None:
            nonlocal is_checked
            self._go_on()
            if not is_checked:  # once, because a version may have a thousand files; a table checks its own after that
                check_unchanged()
                is_checked = True
            if progress is not None:
                progress(task, rows, all_rows)

        try:
            model = loader.open(config, devices, report)
        except MemoryError:
            raise DeviceMemoryError("cpu", f"too little free memory to load version {config.version}") from None
        model.stamp = stamp(config)
        try:
            check_unchanged()
        except ModelFileError:
            loader.drop(model)  # other processes may serve its rows; the next start erases rows that nobody serves
            raise
        return model

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

    def _switch(self, name: str, opened: Mapping[int, ServedModel], wanted: Collection[int]) -> Sequence[ServedModel]:
        """Serve the opened versions of a model, those that wait as soon as their tables have reached their positions.

        Args:
            name: the model.
            opened: versions that are new, or have new files.
            wanted: the versions that are to serve; none: those that serve stay.

        Returns:
            the versions that leave, for which there are no new requests.
        """
        self._wanted[name] = wanted
        late = [model for model in opened.values() if model.waits_for()]
        live = {number: model for number, model in opened.items() if model not in late}
        if late and not live and not self._models.get(name):
            live = self._stand_in(late[0].config.of_tables)
        if late and self._watcher is None:
            self._watcher = PeriodicWorker("hotrow-positions", self._watch_positions, _LOOK_INTERVAL_S)
        replaced = [model for model in self._waiting.get(name, ()) if model.config.version in opened]
        older = [model for model in self._waiting.get(name, ()) if model not in replaced]
        return [*replaced, *self._settle(name, live, older, late)]

    def _stand_in(self, base: ModelConfig) -> dict[int, ServedModel]:
        """Open the version that brings the tables of a version that waits, because no other version serves."""
        assert self._loader is not None
        try:
            (devices,) = self._loader.open_devices([base])
            return {base.version: self._loader.open(base, devices)}
        except HotrowError as err:
            self._states.note_fault(base.name, base.version, err)
            return {}

    def _watch_positions(self) -> None:
        """Serve the versions that wait when their tables have reached their positions."""
        if any(not model.waits_for() for models in self._waiting.values() for model in models):
            with self._lock, next_to_requests():
                for name in list(self._waiting):
                    self._go_live(name)

    def _go_live(self, name: str) -> None:
        """Serve the versions of a model that need not wait any more, the oldest first."""
        for model in self._waiting.get(name, ()):
            waiting = self._waiting[name]
            if model in waiting and not model.waits_for():
                place = waiting.index(model)
                live = {model.config.version: model}
                self._drop(self._settle(name, live, waiting[:place], waiting[place + 1 :]), erase=True)

    def _go_live_soon(self, name: str, before: Sequence[ServedModel]) -> None:
        """Give the tables of this process a moment to reach the positions of versions that did not wait ``before``."""
        end_s = monotonic() + _FOLLOW_TIMEOUT_S
        while monotonic() < end_s and any(model not in before for model in self._waiting.get(name, ())):
            self._go_live(name)
            self._go_on()
            self._is_ending.wait(_LOOK_INTERVAL_S)

    def _drop(self, leaving: Sequence[ServedModel], *, erase: bool) -> None:
        """Have the other processes follow, and drop versions that no longer serve in this process."""
        assert self._loader is not None
        self._lead()
        for model in leaving:  # a process that did not follow still reads the old rows
            self._loader.drop(model, erase=erase and self._lag is None and model.name not in self._late)

    def _wait_for_positions(self, model: ServedModel) -> None:
        """Wait until a version may answer."""
        if waits_for := model.waits_for():
            logger.info("model %s: version %s waits until its tables reach %s", model.name, model.version, waits_for)
        while model.waits_for():
            self._go_on()
            self._is_ending.wait(_LOOK_INTERVAL_S)

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
                check_same(models, wanted)
            elif wanted is not None:
                # The versions of such a model share its tables.
                listed = [config for config in models if not config.table_tag]
                check_same(listed, {config.name: wanted[config.name] for config in listed})
            changed = [
                model.name for model in models if wanted and model.digest != wanted[model.name][str(model.version)]
            ]
            if peers is None or peers.leads or not changed:  # the others follow the process that leads
                return ps, models
            wanted = peers.renew(changed[0])

    def _unload(self, name: str) -> None:
        loader = self._loader
        if loader is None:
            return
        leaving = [*self._models.get(name, {}).values(), *self._waiting.get(name, ())]
        self._models = {other: models for other, models in self._models.items() if other != name}
        self._waiting = {other: models for other, models in self._waiting.items() if other != name}
        self._lead()
        for model in leaving:
            number = model.config.version
            self._states.show(name, number, "UNLOADING")
            loader.drop(model)
            self._states.show(name, number, "UNAVAILABLE", UNLOADED)


def _has_base(pair: tuple[ModelConfig, Any]) -> bool:
    return pair[0].base is not None
