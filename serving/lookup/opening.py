"""Opens the lookups of one model: one per device, or one without a device."""

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing

from kernels.device import Device
from serving.config import ModelConfig
from serving.lookup.session import LookupSession
from serving.parameter_server import ParameterServer

logger = logging.getLogger(__name__)


def warn_of_idle_caches(models: Iterable[tuple[ModelConfig, Sequence[Device]]]) -> None:
    """Log one warning about all models whose configuration wants a GPU cache although no GPU is used."""
    idle = [repr(config.name) for config, devices in models if config.gpu_cache.wanted and not devices]
    if idle:
        whose = f"model {idle[0]}" if len(idle) == 1 else f"models {', '.join(idle)}"
        answer = "its tiers answer" if len(idle) == 1 else "their tiers answer"
        logger.warning("%s: gpucache is true, but no GPU is used: %s alone", whose, answer)


def open_lookups(server: ParameterServer, config: ModelConfig, devices: Sequence[Device]) -> tuple[LookupSession, ...]:
    """Open one lookup with caches per device, or none if one of them fails; see ``CachedLookup`` for the errors.

    Without devices, or if the configuration wants no cache, there is one lookup that reads the tiers alone.
    """
    if not devices or config.gpu_cache.wanted is False:
        return (LookupSession(server, config),)
    # Imported here, because only a device needs the kernels.
    from serving.lookup.cache_plan import describe_caches, plan_caches
    from serving.lookup.cached_lookup import CachedLookup

    for line in describe_caches(config.name, plan_caches(config), devices):
        logger.info("%s", line)
    refreshing = threading.Semaphore(config.gpu_cache.refresher_buffers)
    with ExitStack() as opened:
        lookups = [
            opened.enter_context(closing(CachedLookup(server, config, device, refreshing=refreshing)))
            for device in devices
        ]
        opened.pop_all()
    return tuple(lookups)
