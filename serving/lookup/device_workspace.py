"""What a request through GPU caches borrows."""

from collections.abc import Callable, Sequence
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
    """A workspace of the caches, and a page-locked buffer to read answers in.

    Attributes:
        pooling: of the caches.
        max_keys: most keys of a request, over all tables.
    """

    def __init__(self, group: CacheGroup, max_samples: int, max_keys: int, dense_dim: int) -> None:
        """Take all the memory that an answer needs, but for missing rows; see ``CacheGroup.workspace``."""
        self.pooling: Workspace = group.workspace(max_samples, max_keys, dense_dim, SINGLE_KEYS)
        self.max_keys = max_keys
        self._device = group.device
        self._host: NDArray[np.float32] = self._device.pinned(self.pooling.most_floats, np.float32)

    @property
    def stream(self) -> Stream:
        """Where the request's work is queued."""
        return self.pooling.stream

    def read(self) -> Callable[[], tuple[NDArray[np.float32], ...]]:
        """Queue the launch of what was loaded, and the download of its rows, which lie in one piece.

        Returns:
            what gives them, in arrays of their own, once the stream has run.
        """
        self.pooling.launch()
        whole = self.pooling.whole
        host = self._host[: whole.size]
        self._device.download(whole, host, self.stream)
        return lambda: _parts(host.copy(), self.pooling.shapes)


def _parts(whole: NDArray[np.float32], shapes: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.float32], ...]:
    """The tables' rows in an answer of one piece; each begins at a multiple of 16 bytes."""
    sizes = [prod(shape) for shape in shapes]
    begins = accumulate((aligned(size, 4) for size in sizes), initial=0)
    return tuple(whole[at : at + size].reshape(shape) for at, size, shape in zip(begins, sizes, shapes, strict=False))
