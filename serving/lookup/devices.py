"""Chooses the devices of a model from the option ``device`` and the GPUs in the model's configuration."""

import logging
import re
from collections.abc import Sequence

from kernels.device import Device, open_device
from kernels.errors import DeviceUnavailableError
from serving.errors import ConfigError

logger = logging.getLogger(__name__)

DEVICE_NAMES = "cpu, auto, cuda, cuda:<index>, runner or runner:<number>"
_NAME = re.compile(r"cpu|auto|(?P<kind>cuda|runner)(:(?P<number>\d{1,4}))?")


def check_device_name(name: object, source: str) -> str:
    """Return ``name``, or raise a ConfigError from ``source`` if it names no device."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(source, "", f"expected {DEVICE_NAMES}, got {name!r}")
    return name


class DeviceChoice:
    """Opens the devices that models are served on, and logs each message once for all models.

    Args:
        name: ``"cpu"``: no device. ``"cuda"``: the GPUs that a model lists. ``"cuda:1"``: this GPU, whatever the model
            lists. ``"auto"``: the GPUs that a model lists, or no device if the machine has no GPU. ``"runner"`` and
            ``"runner:1"``: the CPU runs the GPU kernels unchanged, thousands of times slower; for tests.
    """

    def __init__(self, name: str) -> None:
        """Check the name; open no device yet."""
        self._name = name
        self._match = _NAME.fullmatch(check_device_name(name, "device"))
        self._logged: set[str] = set()

    def open(self, listed: Sequence[int]) -> tuple[Device, ...]:
        """Open the devices of a model whose ``deployed_device_list`` is ``listed``.

        Raises:
            DeviceUnavailableError: a GPU or a package that it needs is missing; the message names it.
        """
        if self._match is None or self._name == "cpu":
            return ()
        if self._name == "auto":
            return self._gpus_if_any(listed)
        kind, number = self._match["kind"], self._match["number"]
        if kind == "runner":
            slow = "GPU kernels run on the CPU, thousands of times slower; this is for tests"
            self._log_once(logging.WARNING, f"device {self._name}: {slow}")
        return tuple(open_device(f"{kind}:{index}") for index in (listed if number is None else [int(number)]))

    def _gpus_if_any(self, listed: Sequence[int]) -> tuple[Device, ...]:
        """Open the GPUs ``listed``, or none if the machine has no GPU; with some GPUs, all listed GPUs must exist."""
        try:
            first = open_device("auto")
        except DeviceUnavailableError as err:
            self._log_once(logging.INFO, f"no GPU is used: {err}")
            return ()
        names = [f"cuda:{index}" for index in listed]
        return tuple(first if name == first.name else open_device(name) for name in names)

    def _log_once(self, level: int, message: str) -> None:
        if message not in self._logged:
            logger.log(level, "%s", message)
        self._logged.add(message)


def open_devices(name: str, listed: Sequence[int]) -> tuple[Device, ...]:
    """Open the devices that one model is served on; see ``DeviceChoice``."""
    return DeviceChoice(name).open(listed)
