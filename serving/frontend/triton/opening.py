"""Opens the model of one Triton instance, as ``config.pbtxt`` and the repository's ``ps.json`` say."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from serving.config import read_repository, with_shared_ram
from serving.dense.network import Engine
from serving.errors import ConfigError, did_you_mean
from serving.frontend.served_model import ServedModel, served_model
from serving.lookup import check_device_name, open_devices, open_lookups, warn_of_idle_caches
from serving.lookup_model import LookupModelSession
from serving.metrics import MetricSample
from serving.opening import open_session
from serving.parameter_server import ParameterServer
from serving.parameter_server.counters import table_samples
from serving.session import InferenceSession, check_runtime

_SOURCE = "config.pbtxt"
_OWN_PARAMETERS = ("device", "engine", "threads")
_PARAMETERS_OF_TRITON = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")
_DEVICES = {"CPU": "cpu", "GPU": "cuda:{number}"}


@dataclass(frozen=True)
class Settings:
    """What Triton says about one instance.

    Attributes:
        directory: the version's folder.
        instance: the instance's name.
        instances: how many instances of this version Triton starts.
        engine: see ``open_network``.
        threads: how many threads work on one dense network call.
        device: see ``open_devices``.
    """

    directory: Path
    instance: str
    instances: int
    engine: Engine
    threads: int
    device: str


@dataclass(frozen=True)
class OpenedModel:
    """An open model.

    Attributes:
        model: answers its requests.
        readings: returns the counters of its tiers and caches.
        close: releases everything that was opened for it.
    """

    model: ServedModel
    readings: Callable[[], Iterator[MetricSample]]
    close: Callable[[], None]


def read_settings(args: Mapping[str, str]) -> Settings:
    """Read the arguments of Triton's ``initialize``.

    Raises:
        ConfigError: a parameter in ``config.pbtxt`` is unknown or has a wrong value.
    """
    document = json.loads(args["model_config"])
    given = {name: entry["string_value"] for name, entry in document["parameters"].items()}
    for name in given.keys() - {*_OWN_PARAMETERS, *_PARAMETERS_OF_TRITON}:
        raise ConfigError(_SOURCE, f"parameters: {name}", f"unknown{did_you_mean(name, _OWN_PARAMETERS)}")
    kind = _DEVICES.get(args["model_instance_kind"], "auto")
    device = given.get("device", kind.format(number=args["model_instance_device_id"]))
    engine, threads = given.get("engine", "auto"), given.get("threads", "1")
    number = int(threads) if threads.isascii() and threads.isdecimal() else threads
    check_runtime(f"{_SOURCE}: parameters", engine, number)
    check_device_name(device, f"{_SOURCE}: parameters: device")
    return Settings(
        directory=Path(args["model_repository"]) / args["model_version"],
        instance=args["model_instance_name"],
        instances=sum(group["count"] * max(1, len(group["gpus"])) for group in document["instance_group"]),
        engine=engine,
        threads=number,
        device=device,
    )


def open_model(settings: Settings) -> OpenedModel:
    """Open a model with the tiers of its repository.

    Raises:
        HotrowError: the model cannot be opened; see ``load_model``.
    """
    if not settings.directory.is_dir():
        raise ConfigError(str(settings.directory), "", "no such version directory")
    ps = read_repository(settings.directory)
    if settings.instances > 1:
        if ps.persistent_db.type == "rocks_db" and not ps.persistent_db.read_only:
            reason = (
                f"{settings.instances} instances, but one process writes to RocksDB. Use one instance, or fill the "
                "database with `hotrow load` and set read_only in persistent_db of ps.json"
            )
            raise ConfigError(_SOURCE, "instance_group", reason)
        ps = with_shared_ram(ps, str(settings.directory.resolve()))
    (config,) = ps.models
    if config.graph_file is None and settings.engine != "auto":
        reason = f"{settings.engine}, but the model has no dense network"
        raise ConfigError(_SOURCE, "parameters: engine", reason)
    devices = open_devices(settings.device, config.gpu_cache.devices)  # first, because loading tables may take long
    warn_of_idle_caches([(config, devices)])
    with ExitStack() as opened:
        server = opened.enter_context(ParameterServer.from_config(ps))
        config = server.model(config.name)  # with the names of its tables
        session: InferenceSession | LookupModelSession
        if config.graph_file is None:
            session = opened.enter_context(closing(LookupModelSession(open_lookups(server, config, devices))))
        else:
            session = open_session(server, config, devices, settings.engine, settings.threads)
            opened.enter_context(session)
        close = opened.pop_all().close
    return OpenedModel(served_model(session), lambda: _readings(server, session.readings), close)


def _readings(server: ParameterServer, caches: Callable[[], Iterator[MetricSample]]) -> Iterator[MetricSample]:
    for name, counters in server.counters().items():
        yield from table_samples(name, counters, server.stores)
    yield from caches()
