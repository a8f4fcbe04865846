"""The model repository: the models that are served together, and their sessions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Self

from kernels.device import Device
from serving.calibration import refuse_shared_calibration
from serving.config import ModelConfig, read_repository
from serving.dense.calibration import DEFAULT_TOLERANCE
from serving.dense.network import Engine
from serving.errors import UnknownModelError, about, did_you_mean
from serving.lookup import DeviceChoice, check_device_name, warn_of_idle_caches
from serving.metrics import MetricSample
from serving.opening import open_session
from serving.parameter_server import ParameterServer
from serving.parameter_server.counters import table_samples
from serving.parameter_server.preflight import check_hot_keys
from serving.session import InferenceSession
from serving.storage import MemoryStore, SharedMemoryStore, SnapshotStore
from serving.storage.store import Store


class ModelRepository:
    """The models of one folder, ``<repository>/<model>/<version>/``, or of one JSON file, and the tiers of their rows.

    ``serving.config.read_repository`` finds the models; one version of every model is served. Call ``load`` and
    ``close`` from one thread. Between them, any thread may call everything else.
    """

    def __init__(
        self,
        path: str | Path,
        engine: Engine = "auto",
        threads: int = 1,
        calibration: str | Path | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
        device: str = "cpu",
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
        """
        self.path = Path(path)
        self._engine = engine
        self._threads = threads
        self._calibration = calibration
        self._tolerance = tolerance
        self._device = device
        self._server: ParameterServer | None = None
        self._sessions: dict[str, InferenceSession] = {}

    def load(self) -> None:
        """Load every model, or no model if one of them is broken.

        Raises:
            ConfigError: the path does not exist or has no model, or a configuration is invalid.
            ModelFileError: a model's file is missing or damaged.
            StoreError: a tier cannot be opened or cannot take the rows.
            DeviceUnavailableError: a GPU or the software to use it is missing.
            DeviceMemoryError: a GPU has too little free memory for the caches.
        """
        check_device_name(self._device, "device")
        ps = read_repository(self.path)
        for config in ps.models:
            config.network_files()  # raises for a model that is only looked up
        refuse_shared_calibration(self._calibration, len(ps.models))
        # For all models before the first load, because a load may take long.
        check_hot_keys(ps)
        devices = self._open_devices(ps.models)
        warn_of_idle_caches(zip(ps.models, devices, strict=True))
        self._server = ParameterServer.from_config(ps.model_copy(update={"models": ()}))
        try:
            self._server.share_bounds(ps.models)
            for config, of_model in zip(ps.models, devices, strict=True):
                with about(config.name):
                    self._server.load_model(config)
                    self._sessions[config.name] = self._open(self._server, config, of_model)
        except BaseException:
            self.close()
            raise

    def models(self) -> Mapping[str, InferenceSession]:
        """The sessions by model name."""
        return MappingProxyType(self._sessions)

    def session(self, name: str, version: str = "") -> InferenceSession:
        """The session of a model; raises UnknownModelError if this model or this version is not served.

        ``version`` is text that a client wrote, empty for the served version.
        """
        session = self._sessions.get(name)
        if session is None:
            there = ", ".join(repr(known) for known in sorted(self._sessions))
            close = did_you_mean(name, self._sessions)
            raise UnknownModelError(f"no model {name[:64]!r} is served; there is {there or 'none'}{close}")
        if version and version != str(session.config.version):
            raise UnknownModelError(
                f"no version {version[:20]!r} of model {name!r} is served; there is version {session.config.version}"
            )
        return session

    def is_ready(self, name: str) -> bool:
        """Whether requests for a served model can succeed, by what is known of tiers and GPUs; never waits."""
        if self._server is None or not self._server.is_answering(name):
            return False
        session = self._sessions.get(name)  # None while the session is being opened
        return session is not None and session.is_answering

    def readings(self) -> Iterable[MetricSample]:
        """Return the counters of the parameter server and the caches for the metrics page."""
        if self._server is None:
            return
        for name, counters in self._server.counters().items():
            yield from table_samples(name, counters, self._server.stores)
        for session in tuple(self._sessions.values()):
            yield from session.readings()

    def describe(self) -> Iterator[str]:
        """Lines for an operator: each model with its memory and mapped files, and the tiers."""
        if self._server is None:
            return
        for name, session in sorted(self._sessions.items()):
            config = session.config
            tables = ", ".join(f"{table.name} [{table.slots} x {table.dim}]" for table in config.tables)
            yield f"model {name} version {config.version}: {_sizes(config, self._server.stores)}, tables {tables}"
            if session.quantization is not None:
                yield f"  {session.quantization}"
        yield f"tiers {', '.join(store.name for store in self._server.stores)}"

    def close(self) -> None:
        """Close every session and the tiers. Closing twice is allowed."""
        while self._sessions:
            _, session = self._sessions.popitem()
            session.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> Self:
        """Return the repository; leaving the block closes it."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """See ``close``."""
        self.close()

    def _open_devices(self, models: Sequence[ModelConfig]) -> Sequence[Sequence[Device]]:
        choice = DeviceChoice(self._device)
        opened = []
        for config in models:
            with about(config.name):
                opened.append(choice.open(config.gpu_cache.devices))
        return opened

    def _open(self, server: ParameterServer, config: ModelConfig, devices: Sequence[Device]) -> InferenceSession:
        settings = (self._engine, self._threads, self._calibration, self._tolerance)
        return open_session(server, config, devices, *settings)


def _sizes(config: ModelConfig, stores: Sequence[Store]) -> str:
    """A model's memory: in this process's RAM, in shared memory and in mapped files."""
    ram, shared, mapped = config.network_files()[1].stat().st_size, 0, 0
    for name in map(config.full_name, config.tables):
        ram += sum(store.memory_bytes(name) for store in stores if isinstance(store, MemoryStore))
        shared += sum(store.memory_bytes(name) for store in stores if isinstance(store, SharedMemoryStore))
        mapped += sum(store.file_bytes(name) for store in stores if isinstance(store, SnapshotStore))
    others = {" of shared memory": shared, " of mapped files": mapped}
    return " and ".join([_amount(ram), *(_amount(size) + what for what, size in others.items() if size)])


def _amount(size_bytes: int) -> str:
    mebibytes = size_bytes / 2**20
    return f"{mebibytes:,.1f} MiB" if mebibytes >= 0.05 else f"{size_bytes / 2**10:,.1f} KiB"
