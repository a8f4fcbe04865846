"""The devices of a model, chosen from the option ``device`` and its configuration, and its lookups there."""

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing

from kernels.device import Device, open_device
from kernels.errors import DeviceUnavailableError
from serving.config import ModelConfig
from serving.lookup.session import LookupSession
from serving.option_values import DEVICE_NAME, check_device_name
from serving.parameter_server import ParameterServer

logger = logging.getLogger(__name__)


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
        self._match = DEVICE_NAME.fullmatch(check_device_name(name, "device"))
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


def warn_of_idle_caches(models: Iterable[tuple[ModelConfig, Sequence[Device]]]) -> None:
    """Log one warning about all models whose configuration wants a GPU cache although no GPU is used."""
    idle = [repr(config.name) for config, devices in models if config.gpu_cache.wanted and not devices]
    if idle:
        whose = f"model {idle[0]}" if len(idle) == 1 else f"models {', '.join(idle)}"
        answer = "its tiers answer" if len(idle) == 1 else "their tiers answer"
        logger.warning("%s: gpucache is true, but no GPU is used: %s alone", whose, answer)


def open_lookups(server: ParameterServer, config: ModelConfig, devices: Sequence[Device]) -> tuple[LookupSession, ...]:
    """Open one lookup with caches per device, or none if one of them fails; see ``CachedLookupSession`` for the errors.

    Without devices, or if the configuration wants no cache, there is one lookup that reads the tiers alone.
    """
    if not devices or config.gpu_cache.wanted is False:
        return (LookupSession(server, config),)
    # Imported here, because only a device needs the kernels.
    from serving.lookup.cache_plan import describe_caches, plan_caches
    from serving.lookup.cached_session import CachedLookupSession

    for line in describe_caches(config.name, plan_caches(config), devices):
        logger.info("%s", line)
    refreshing = threading.Semaphore(config.gpu_cache.refresher_buffers)
    with ExitStack() as opened:
        lookups = [
            opened.enter_context(closing(CachedLookupSession(server, config, device, refreshing=refreshing)))
            for device in devices
        ]
        opened.pop_all()
    return tuple(lookups)
