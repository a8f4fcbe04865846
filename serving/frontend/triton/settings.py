"""What Triton says about one instance of a model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ConfigError, did_you_mean
from serving.opening import Runtime
from serving.option_values import check_device_name
from serving.session import check_runtime

#: Whose parameters name the engine and the device, for messages.
SOURCE = "config.pbtxt"
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
        runtime: how the model runs.
    """

    directory: Path
    instance: str
    instances: int
    runtime: Runtime


def read_settings(args: Mapping[str, str]) -> Settings:
    """Read the arguments of Triton's ``initialize``.

    Raises:
        ConfigError: a parameter in ``config.pbtxt`` is unknown or has a wrong value.
    """
    document = json.loads(args["model_config"])
    given = {name: entry["string_value"] for name, entry in document["parameters"].items()}
    for name in given.keys() - {*_OWN_PARAMETERS, *_PARAMETERS_OF_TRITON}:
        raise ConfigError(SOURCE, f"parameters: {name}", f"unknown{did_you_mean(name, _OWN_PARAMETERS)}")
    kind = _DEVICES.get(args["model_instance_kind"], "auto")
    device = given.get("device", kind.format(number=args["model_instance_device_id"]))
    engine, threads = given.get("engine", "auto"), given.get("threads", "1")
    number = int(threads) if threads.isascii() and threads.isdecimal() else threads
    check_runtime(f"{SOURCE}: parameters", engine, number)
    check_device_name(device, f"{SOURCE}: parameters: device")
    return Settings(
        directory=Path(args["model_repository"]) / args["model_version"],
        instance=args["model_instance_name"],
        instances=sum(group["count"] * max(1, len(group["gpus"])) for group in document["instance_group"]),
        runtime=Runtime(engine, number, device=device),
    )
