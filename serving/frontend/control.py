"""What Triton's clients ask for besides inference: metadata, the index, statistics, log and trace settings.

Documents are in the form of KServe v2 or of one of Triton's extensions, for any front end. If the server has several
workers, each of them answers for all: counts are added up, and changes reach every worker.
"""

import asyncio
import logging
from asyncio import wrap_future
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from kernels.errors import DeviceUnavailableError
from serving.config import VersionPolicy, policy_from
from serving.errors import ConfigError, MissingExtraError, ModelFileError, RequestError, UnknownModelError, told
from serving.frontend.client_texts import folders_of, without_folders
from serving.frontend.status import merged_index
from serving.frontend.version import server_version
from serving.frontend.workers import Siblings
from serving.metrics import merged_statistics
from serving.parameter_server.circuit_breaker import CallThreads
from serving.protocol.bounds import Bounds
from serving.protocol.ctr import names_of
from serving.protocol.document import known_only, optional, parse_document
from serving.protocol.samples import example_of
from serving.protocol.shared_memory import SharedMemory
from serving.protocol.tensors import PLATFORM
from serving.repository import ModelRepository, ServedModel

#: The extensions of KServe v2 that the server has, by their names in Triton.
EXTENSIONS = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "statistics",
    "system_shared_memory",
    "logging",
    "parameters",
]
#: Triton's log settings, the most severe last, and their levels in Python's logging.
_LEVELS = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
_FIXED_LOG_SETTINGS = {"log_file": "", "log_format": "default"}
_LOG_SETTINGS = frozenset({*_LEVELS, *_FIXED_LOG_SETTINGS, "log_verbose_level"})
_TRACE_SETTINGS = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}

#: Maximum loads at a time; the repository runs them one after another.
_MOST_LOADS = 4
#: Maximum unloads at a time. They wait for a load that runs. An unload that would end this load must not wait for them.
_MOST_UNLOADS = 64

Document = dict[str, Any]


class Control:
    """The documents of one server. Belongs to one event loop.

    Attributes:
        regions: the registered shared memory.
    """

    def __init__(self, repository: ModelRepository, regions: SharedMemory, siblings: Siblings | None = None) -> None:
        """Describe the models of ``repository``; ``siblings`` are the other workers of the same server."""
        self._repository = repository
        self._folders = folders_of(repository.path)
        self._siblings = siblings
        # A load may hang. It must not take a thread from other work, from an unload that ends it, or keep the process
        # from ending.
        self._loads = CallThreads("hotrow-load", _MOST_LOADS)
        self._unloads = CallThreads("hotrow-unload", _MOST_UNLOADS)
        self._is_leaving = False
        self.regions = regions

    def close(self) -> None:
        """End the threads of loads and unloads; a load that hangs ends with the process."""
        self._loads.close()
        self._unloads.close()

    def leave(self) -> None:
        """Report from now on that nothing is ready, because the server is about to stop; any thread may call it."""
        self._is_leaving = True

    def is_ready(self) -> bool:
        """Whether every model is ready or degraded, and the server goes on."""
        return not self._is_leaving and self._repository.readiness_of_all().is_ready

    def is_model_ready(self, model: str, version: str = "") -> bool:
        """Whether requests for a model can succeed; raises UnknownModelError if it is not served."""
        return self._is_served_ready(self._repository.loaded(model, version))

    def is_model_ready_if_served(self, model: str, version: str = "") -> bool | None:
        """See ``is_model_ready``; None if the model is not served. Cheap for any name."""
        served = self._repository.find(model, version)
        return None if served is None else self._is_served_ready(served)

    def _is_served_ready(self, served: ServedModel) -> bool:
        return not self._is_leaving and self._repository.readiness(served).is_ready

    def server(self) -> Document:
        """The server's name, version and extensions."""
        return {"name": "hotrow", "version": server_version(), "extensions": EXTENSIONS}

    def metadata(self, model: str, version: str = "") -> Document:
        """A model's tensors, its digest, the names of its slots in the order of keys, and whether keys are shifted."""
        served = self._repository.loaded(model, version)
        keys = {} if served.config.slot_keys == "stored" else {"keys": served.config.slot_keys}
        return {
            "name": model,
            "versions": [str(number) for number in sorted(self._repository.versions(model))],
            **({"digest": served.config.digest} if served.config.digest else {}),
            "platform": PLATFORM,
            "inputs": [spec.metadata() for spec in served.signature.inputs],
            "outputs": [spec.metadata() for spec in served.signature.outputs],
            **names_of(served.config),
            **keys,
        }

    def examples(self) -> dict[str, Document]:
        """A body of ``/predict`` for each served model that takes values by name."""
        names = dict.fromkeys(state.name for state in self._repository.index())
        served = {name: self._repository.find(name) for name in names}
        return {name: example_of(one.features) for name, one in served.items() if one is not None and one.features}

    def config(self, model: str, version: str = "") -> Document:
        """A model's configuration in Triton's form."""
        return self._repository.loaded(model, version).triton_config()

    async def index(self, only_ready: bool = False) -> list[Document]:
        """The models and their states; each state is the worst of all workers."""
        states = self.own_index()
        if self._siblings is not None:
            answers = await asyncio.to_thread(self._siblings.of_all, "index", states)
            states = merged_index(answers.values())
        return [
            {name: value for name, value in state.items() if value or (state["state"] and name != "digest")}
            for state in states
            if state["state"] == "READY" or not only_ready
        ]

    def own_index(self) -> list[Document]:
        """The index of this worker alone."""
        states = [asdict(state) for state in self._repository.index()]
        for entry in states:
            entry["reason"] = without_folders(entry["reason"], self._folders)
        return states

    async def load(self, model: str, parameters: Document) -> None:
        """Load a model, or the versions that its folder has now; returns once they are loaded.

        Args:
            model: the model's name.
            parameters: ``config`` may have a Triton model configuration in JSON; only its ``version_policy`` may differ
                from the model's own.

        Raises:
            RequestError: models are not loaded explicitly, the model is broken, or a parameter is not supported.
            UnknownModelError: the repository has no such model.
            StoreError: a tier does not answer or has too little room.
            DeviceMemoryError: a GPU has too little free memory.
        """
        await wrap_future(self._loads.submit(partial(self._load, model, parameters)))

    def _load(self, model: str, parameters: Document) -> None:
        for name in parameters:
            if name.startswith("file:"):
                raise RequestError(f"parameters.{name[:64]}: files cannot be sent; put the version into the repository")
        known_only(parameters, frozenset({"config"}), "parameters")
        if self._siblings is not None and not self._siblings.leads:
            return self._siblings.lead("load", model, parameters)
        config = optional(parameters, "config", str, "", "parameters")
        try:
            self._repository.load_model(model, self._policy_of(model, config) if config else None)
        except (ConfigError, ModelFileError, MissingExtraError, DeviceUnavailableError) as err:
            raise RequestError(f"failed to load: {without_folders(told(err), self._folders)}") from err

    async def unload(self, model: str, parameters: Document) -> None:
        """Unload a model; returns once its requests in flight are answered. It ends a load that is running.

        Raises:
            RequestError: models are not unloaded explicitly, or a parameter is not supported.
            UnknownModelError: no such model is served.
        """
        known_only(parameters, frozenset({"unload_dependents"}), "parameters")
        await wrap_future(self._unloads.submit(partial(self._unload, model, parameters)))

    def _unload(self, model: str, parameters: Document) -> None:
        if self._siblings is not None and not self._siblings.leads:
            return self._siblings.lead("unload", model, parameters)
        self._repository.unload_model(model)

    def _policy_of(self, model: str, text: str) -> VersionPolicy:
        path = "parameters.config"
        document = parse_document(text.encode(), Bounds(), path)
        with suppress(UnknownModelError):  # a client may change one key of what ``config`` returned
            own = self._repository.loaded(model).triton_config()
            document = {key: value for key, value in document.items() if key not in own or own[key] != value}
        known_only(document, frozenset({"version_policy"}), path)
        return policy_from(document, path)

    async def statistics(self, model: str = "", version: str = "") -> Document:
        """How many requests a model, or each model, has answered, and how long their stages took."""
        own = self.own_statistics(model, version)
        if self._siblings is None:
            return own
        answers = await asyncio.to_thread(self._siblings.of_all, "statistics", own, model, version)
        return merged_statistics(answers.values())

    def own_statistics(self, model: str, version: str) -> Document:
        """The statistics of this worker alone."""
        if model:
            versions = [version] if version else map(str, self._repository.versions(model))
            served = [self._repository.loaded(model, number) for number in versions]
        else:
            served = self._repository.all_loaded()
        return {
            "model_stats": [
                served_model.statistics.document(served_model.name, served_model.version) for served_model in served
            ]
        }

    def log_settings(self) -> Document:
        """The log settings: those of the process's root logger."""
        level = logging.getLogger().getEffectiveLevel()
        enabled = {name: level <= least for name, least in _LEVELS.items()}
        return {**_FIXED_LOG_SETTINGS, **enabled, "log_verbose_level": int(level < logging.INFO)}

    async def change_log_settings(self, changes: Document) -> Document:
        """Change log settings and return all; ``log_verbose_level`` above 0 also logs details.

        Raises:
            RequestError: a setting is unknown, or its value is not supported.
            WorkerError: a worker failed; the others have changed.
        """
        await self._everywhere("log", changes)
        return self.log_settings()

    async def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Register a region of shared memory; see ``SharedMemory.register``.

        Raises:
            WorkerError: a worker failed; the others have registered the region.
        """
        await self._everywhere("register", name, key, offset, size_bytes)

    async def unregister(self, name: str = "") -> None:
        """Unregister a region, or all regions; see ``SharedMemory.unregister``.

        Raises:
            WorkerError: a worker failed; the others have unregistered the region.
        """
        await self._everywhere("unregister", name)

    async def _everywhere(self, change: str, *arguments: Any) -> None:
        self._change(change, *arguments)
        if self._siblings is not None:
            await asyncio.to_thread(self._siblings.adopt, [[change, *arguments]])

    def _change(self, change: str, *arguments: Any) -> None:
        if change == "log":
            self._change_log_settings(*arguments)
        elif change == "register":
            self.regions.register(*arguments)
        else:
            self.regions.unregister(*arguments)

    def changes(self) -> list[list[Any]]:
        """The changes that give a new worker the settings of this worker."""
        regions = [["register", *region.values()] for region in self.regions.status()]
        return [["log", self.log_settings()], *regions]

    def adopt(self, changes: Iterable[list[Any]]) -> None:
        """Make the ``changes`` of other workers; several workers may report the same change."""
        for change in changes:
            with suppress(RequestError):  # the region is registered already, or its memory is gone
                self._change(*change)

    def _change_log_settings(self, changes: Document) -> None:
        known_only(changes, _LOG_SETTINGS, "")
        for name, only in _FIXED_LOG_SETTINGS.items():
            if optional(changes, name, str, only, "") != only:
                raise RequestError(f"{name}: only {only!r} is supported: the log goes to standard error")
        settings = self.log_settings()
        enabled = {name: optional(changes, name, bool, settings[name], "") for name in _LEVELS}
        if not enabled["log_error"]:
            raise RequestError("log_error: expected true: errors are always logged")
        is_verbose = optional(changes, "log_verbose_level", int, settings["log_verbose_level"], "") > 0
        level = logging.DEBUG if is_verbose else next(_LEVELS[name] for name in _LEVELS if enabled[name])
        logging.getLogger().setLevel(level)

    def trace_settings(self, model: str = "") -> Document:
        """Triton's trace settings, which are always off; see `hotrow serve --traces`."""
        if model:
            self._repository.loaded(model)
        return _TRACE_SETTINGS

    def change_trace_settings(self, changes: Document, model: str = "") -> Document:
        """Accept settings that ask for no trace.

        Raises:
            RequestError: a setting is unknown, or asks for a trace.
        """
        known_only(changes, frozenset(_TRACE_SETTINGS), "")
        if changes.get("trace_level") not in (None, ["OFF"], [], "OFF"):
            raise RequestError("trace_level: expected OFF: `hotrow serve --traces` sends traces to OpenTelemetry")
        return self.trace_settings(model)
