"""Values of options. The command line needs them before anything else, so this module imports nothing that is slow."""

import re
from pathlib import Path
from typing import Literal, get_args

from serving.errors import ConfigError

#: What runs a dense network.
Engine = Literal["auto", "numpy", "onnx", "int8"]
#: The largest error of a probability that the engine int8 may have.
DEFAULT_TOLERANCE = 0.01
#: How many candidates a request may have, unless a model or an option says more or less.
MAX_CANDIDATES = 4096
#: How the models of a repository are chosen while it is served: Triton's ``--model-control-mode``.
ControlMode = Literal["none", "poll", "explicit"]
CONTROL_MODES: tuple[str, ...] = get_args(ControlMode)
#: At the start in the mode ``"explicit"``, this name stands for every model.
EVERY_MODEL = "*"
DEVICE_NAMES = "cpu, auto, cuda, cuda:<index>, runner or runner:<number>"
#: The form of a device's name.
DEVICE_NAME = re.compile(r"cpu|auto|(?P<kind>cuda|runner)(:(?P<number>\d{1,4}))?")


def check_device_name(name: object, source: str) -> str:
    """Return ``name``, or raise a ConfigError from ``source`` if it names no device."""
    if not isinstance(name, str) or not DEVICE_NAME.fullmatch(name):
        raise ConfigError(source, "", f"expected {DEVICE_NAMES}, got {name!r}")
    return name


def refuse_idle_calibration(file: str | Path | None, engine: str | None) -> None:
    """Raise ConfigError if a calibration file is given for an engine that measures nothing."""
    if file is not None and engine != "int8":
        chosen = f"the engine is {engine}" if engine else "no engine was chosen"
        raise ConfigError(str(file), "", f"is a calibration for the engine int8, but {chosen}")
