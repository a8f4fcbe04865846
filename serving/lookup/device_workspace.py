"""The buffers that a request through GPU caches borrows."""

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
    """A workspace of the caches, ``pooling``, and a page-locked buffer for answers; ``max_keys`` is over all tables."""

    def __init__(self, group: CacheGroup, max_samples: int, max_keys: int, dense_dim: int) -> None:
        """Allocate all memory that an answer needs, except for missing rows; see ``CacheGroup.workspace``."""
        self.pooling: Workspace = group.workspace(max_samples, max_keys, dense_dim, SINGLE_KEYS)
        self.max_keys = max_keys
        self._device = group.device
        self._host: NDArray[np.float32] = self._device.pinned(self.pooling.most_floats, np.float32)

    @property
    def stream(self) -> Stream:
        """The stream of the request's work."""
        return self.pooling.stream

    def read(self) -> Callable[[], tuple[NDArray[np.float32], ...]]:
        """Queue the loaded request's launch and the download of its rows; return a function that copies the rows out.

        Call the returned function after the stream has run.
        """
        self.pooling.launch()
        whole = self.pooling.whole
        host = self._host[: whole.size]
        self._device.download(whole, host, self.stream)
        return lambda: _parts(host.copy(), self.pooling.shapes)


def _parts(whole: NDArray[np.float32], shapes: Sequence[tuple[int, ...]]) -> tuple[NDArray[np.float32], ...]:
    """Cut a download of one piece into the tables' rows; each table begins at a multiple of 16 bytes."""
    sizes = [prod(shape) for shape in shapes]
    begins = accumulate((aligned(size, 4) for size in sizes), initial=0)
    return tuple(whole[at : at + size].reshape(shape) for at, size, shape in zip(begins, sizes, shapes, strict=False))
