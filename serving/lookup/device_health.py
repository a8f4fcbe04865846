"""Whether a device can be used: after a fault it stays unused until the process restarts."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kernels.errors import DeviceFaultError

logger = logging.getLogger(__name__)


class DeviceHealth:
    """Remembers the first fault of a device under one model's caches. May be used from any thread.

    CUDA refuses all work in a process whose kernel has failed. A device that still works may have missed an erasure,
    and its cache would answer with an outdated row. So nothing uses the device after its first fault.
    """

    def __init__(self, about: str) -> None:
        """Begin without a fault; ``about`` names the model and the device in messages."""
        self._about = about
        self._fault: str | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no work has failed so far."""
        return self._fault is None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Use the device in this block.

        Raises:
            DeviceFaultError: work failed, in this block or in an earlier block.
        """
        if self._fault is not None:
            raise DeviceFaultError(f"{self._about}: not used after a fault: {self._fault}")
        try:
            yield
        except DeviceFaultError as err:
            self._fault = str(err)
            logger.error("%s: not used anymore, restart the process: %s", self._about, err)
            raise
