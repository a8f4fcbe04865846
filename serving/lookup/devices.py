"""Which devices a model is served on: what was asked for, and the GPUs that its configuration lists."""

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
    """Return ``name``, or raise ConfigError, as of ``source``, where it names no device."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(source, "", f"expected {DEVICE_NAMES}, got {name!r}")
    return name


class DeviceChoice:
    """Opens the devices that models are served on. What it tells of a choice, it tells once, however many models.

    Args:
        name: ``"cpu"``: none. ``"cuda"``: the GPUs that a model lists; ``"cuda:1"``: this one, whatever it lists.
            ``"auto"``: the GPUs that it lists where there are any, else none. ``"runner"`` and ``"runner:1"``: in place
            of GPUs the CPU, which runs their kernels as they are, thousands of times slower; for tests.

    Raises:
        ConfigError: there is no such name.
    """

    def __init__(self, name: str) -> None:
        """Open none yet."""
        self._name = name
        self._match = _NAME.fullmatch(check_device_name(name, "device"))
        self._told: set[str] = set()

    def open(self, listed: Sequence[int]) -> tuple[Device, ...]:
        """Open the devices of a model.

        Args:
            listed: its ``deployed_device_list``.

        Raises:
            DeviceUnavailableError: a GPU is not there, or what is needed to use it; the message names that.
        """
        if self._match is None or self._name == "cpu":
            return ()
        if self._name == "auto":
            return self._gpus_if_any(listed)
        kind, number = self._match["kind"], self._match["number"]
        if kind == "runner":
            slow = "GPU kernels run on the CPU, which is for tests and thousands of times slower"
            self._tell(logging.WARNING, f"device {self._name}: {slow}")
        return tuple(open_device(f"{kind}:{index}") for index in (listed if number is None else [int(number)]))

    def _gpus_if_any(self, listed: Sequence[int]) -> tuple[Device, ...]:
        """The GPUs ``listed``, none where there is no GPU at all; of several all must be there."""
        try:
            first = open_device("auto")
        except DeviceUnavailableError as err:
            self._tell(logging.INFO, f"no GPU is used: {err}")
            return ()
        names = [f"cuda:{index}" for index in listed]
        return tuple(first if name == first.name else open_device(name) for name in names)

    def _tell(self, level: int, message: str) -> None:
        if message not in self._told:
            logger.log(level, "%s", message)
        self._told.add(message)


def open_devices(name: str, listed: Sequence[int]) -> tuple[Device, ...]:
    """Open the devices that one model is served on; see ``DeviceChoice``."""
    return DeviceChoice(name).open(listed)
