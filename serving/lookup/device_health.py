"""Whether a device can still be trusted: after a fault it cannot, until the process is started anew."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kernels.errors import DeviceFaultError

logger = logging.getLogger(__name__)


class DeviceHealth:
    """What one model's caches on one device have met. May be used from any thread.

    CUDA does nothing more in a process whose kernel has failed. And where a device would go on, an erasure that it did
    not do leaves a row in a cache that the tiers have no more: so nothing is asked of it after its first fault.
    """

    def __init__(self, about: str) -> None:
        """Begin without a fault; ``about`` names the model and the device, for messages."""
        self._about = about
        self._fault: DeviceFaultError | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no work has failed so far."""
        return self._fault is None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Use the device in this block.

        Raises:
            DeviceFaultError: work failed, in this block or in an earlier one.
        """
        if self._fault is not None:
            raise DeviceFaultError(f"{self._about}: not used since a fault: {self._fault}")
        try:
            yield
        except DeviceFaultError as err:
            self._fault = err
            logger.error("%s: not used any more, the process should be started anew: %s", self._about, err)
            raise
