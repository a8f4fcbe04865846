"""The buffers that a request through GPU caches borrows."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray

from gpu_cache.bag_layout import aligned
from gpu_cache.cache_group import CacheGroup
from gpu_cache.workspace import Workspace
from kernels.device import Stream
from serving.lookup.cache_plan import SINGLE_KEYS


class DeviceWorkspace:
    """All buffers of a request.

    Attributes:
        pooling: the workspace of the caches.
        max_keys: the most keys of a request, over all tables.
    """

    def __init__(self, group: CacheGroup, max_samples: int, max_keys: int, dense_dim: int) -> None:
        """Allocate all memory that an answer needs, except for missing rows; see ``CacheGroup.workspace``."""
        self.pooling: Workspace = group.workspace(max_samples, max_keys, dense_dim, SINGLE_KEYS)
        self.max_keys = max_keys
        self._device = group.device
        self._shapes: Sequence[tuple[int, ...]] = ()
        self._spans: list[tuple[int, int]] = []
        self._host: NDArray[np.float32] = self._device.pinned(self.pooling.most_floats, np.float32)

    @property
    def stream(self) -> Stream:
        """The stream of the request's work."""
        return self.pooling.stream

    def queue_rows(self) -> None:
        """Queue the download of the request's rows."""
        whole = self.pooling.whole
        self._device.download(whole, self._host[: whole.size], self.stream)

    def rows(self) -> tuple[NDArray[np.float32], ...]:
        """Wait for the stream, and return a copy of the downloaded rows.

        Raises:
            DeviceFaultError: work on the stream failed.
        """
        self.stream.synchronize()
        shapes, whole = self.pooling.shapes, self._host[: self.pooling.whole.size].copy()
        if shapes is not self._shapes:  # successive requests of as many samples have the same
            self._shapes, self._spans = shapes, _spans(shapes)
        return tuple([whole[begin:end].reshape(shape) for (begin, end), shape in zip(self._spans, shapes, strict=True)])


def _spans(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Return where each table's rows are in one piece; each table begins at a multiple of 16 bytes."""
    sizes = [prod(shape) for shape in shapes]
    begins = accumulate((aligned(size, 4) for size in sizes), initial=0)
    return [(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]
