"""The caches of one model's tables on one device: one launch asks all of them, and may pool their rows.

Letters for shapes: B samples, S slots, T tables, N keys, M missing keys, D embedding_vec_size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_cache.arguments import whole_number
from gpu_cache.bag_layout import COMBINERS, BagRows, Combiner
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheClosedError
from gpu_cache.layout import TABLE_BYTES
from gpu_cache.workspace import Workspace
from kernels.device import Array, Device, Kernel

_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_SMALLEST_FLOAT = float(np.finfo(np.float32).smallest_subnormal)  # a smaller number becomes 0, which means no norm

_FILES = {"lookup": "lookup.cu", "lookup_again": "lookup.cu", "claim_missing": "insert.cu", "fill_staged": "insert.cu"}


class CacheGroup:
    """The caches of one model's tables on one device.

    A pooled lookup has the bits of ``ParameterServer.lookup_pooled`` once the missing rows were fetched and completed:
    see ``Workspace``. It counts the rows it finds as used and as hits, as ``query`` does. ``Workspace.insert``
    fills the caches with fetched rows.

    A bag's row is the sum, in key order, of its rows times their weights. ``"mean"`` divides the sum by the sum of the
    weights, ``"sqrtn"`` by the square root of the sum of their squares. Without weights each weight is 1. A row whose
    L2 norm is above ``max_norm`` is scaled by max_norm / |row| before it is weighted (``tf.clip_by_norm``).

    Any thread may use a group. A workspace is used by one thread at a time.

    Args:
        caches: of tables 0 .. T - 1, all on one device, with the same ``Readers``, key type and keys per line. A cache
            may occur more than once.
        slots: S of each table, at least 1.
        combiners: of each table.
        default_values: of each table, the value of every column of a row that was not fetched; 0.0 by default.
        max_norms: of each table, the largest L2 norm, above 0, or None for any norm.

    Raises:
        ValueError: an argument breaks these rules, or a number is too large or too small for a float32.
        TypeError: an element of ``caches`` is not an ``EmbeddingCache``, or ``slots`` has another type than int.
        CacheClosedError: a cache was closed.
    """

    def __init__(
        self,
        caches: Sequence[EmbeddingCache],
        slots: Sequence[int],
        combiners: Sequence[Combiner],
        default_values: Sequence[float] | None = None,
        max_norms: Sequence[float | None] | None = None,
    ) -> None:
        """See the class."""
        _check_caches(caches)
        defaults = [0.0] * len(caches) if default_values is None else list(default_values)
        norms = [None] * len(caches) if max_norms is None else list(max_norms)
        for name, given in (
            ("slots", slots),
            ("combiners", combiners),
            ("default_values", defaults),
            ("max_norms", norms),
        ):
            if len(given) != len(caches):
                raise ValueError(f"{name}: expected one for each of {len(caches)} tables, got {len(given)}")
        self.caches = tuple(caches)
        self.device: Device = caches[0].device
        self.readers = caches[0].readers
        self.tables = tuple(_bag_rows(t, *given) for t, given in enumerate(zip(slots, combiners, norms, strict=True)))
        self.dims = tuple(cache.layout.dim for cache in caches)
        self._forms = list(dict.fromkeys(cache.layout.form for cache in caches))
        self.descriptors = self._describe(defaults)

    def kernel(self, name: str) -> Kernel:
        """Return a kernel of pool.cu, lookup.cu or insert.cu, compiled for the forms of these caches."""
        file = _FILES.get(name, "pool.cu")
        forms = " ".join(f"FORM({number}, {form})" for number, form in enumerate(self._forms))
        return self.device.kernel(file, name, HOTROW_FORMS=forms, **self.caches[0].layout.line_defines())

    def workspace(self, max_samples: int, max_keys: int, dense_dim: int = 0, max_single_keys: int = 0) -> Workspace:
        """Return a new workspace, which serves one request at a time.

        Args:
            max_samples: the most samples of a request.
            max_keys: the most keys of a request, over all tables.
            dense_dim: F, the dense features of a sample.
            max_single_keys: the most keys of a request that are answered one by one (``Workspace.lookup``), over all
                tables. Their rows share the memory of pooled rows.

        Raises:
            TypeError: an argument is not a whole number.
            ValueError: ``max_samples`` is less than 1, ``max_keys`` less than 1 or above 2^30, ``dense_dim`` less than
                0, or ``max_single_keys`` less than 0 or above ``max_keys``.
            MemoryError: the device or the host is out of memory.
        """
        return Workspace(self, max_samples, max_keys, dense_dim, max_single_keys)

    def require_open(self) -> None:
        """Raise CacheClosedError if the memory of a cache was freed."""
        closed = [cache.is_closed for cache in self.caches]  # a list is faster, and each request asks this
        if any(closed):
            raise CacheClosedError(f"table {closed.index(True)}: its cache on {self.device.name} was closed")

    def _describe(self, default_values: Sequence[float]) -> Array:
        """Return Table[T] on the device."""
        descriptors = self.device.empty((len(self.caches), TABLE_BYTES), np.uint8)
        stream = self.device.stream()
        for t, (cache, value) in enumerate(zip(self.caches, default_values, strict=True)):
            if not abs(value) <= _LARGEST_FLOAT:
                raise ValueError(f"table {t}: default_value: expected a finite number of float32, got {value}")
            cache.describe(descriptors, t, self._forms.index(cache.layout.form), value, stream)
        stream.synchronize()
        return descriptors


def _check_caches(caches: Sequence[EmbeddingCache]) -> None:
    if not caches:
        raise ValueError("caches: expected at least one")
    first = caches[0]
    for t, cache in enumerate(caches):
        if not isinstance(cache, EmbeddingCache):
            raise TypeError(f"table {t}: expected an EmbeddingCache, got {cache!r}")
        if cache.device is not first.device:
            raise ValueError(
                f"table {t}: its cache is on {cache.device.name}, the cache of table 0 on {first.device.name}"
            )
        if cache.readers is not first.readers:
            raise ValueError(f"table {t}: its cache has other Readers than the cache of table 0")
        if cache.layout.line_defines() != first.layout.line_defines():
            raise ValueError(f"table {t}: its cache has another key type or other lines than the cache of table 0")


def _bag_rows(table: int, slots: int, combiner: Combiner, max_norm: float | None) -> BagRows:
    slots = whole_number(f"table {table}: slots", slots, 1)
    if combiner not in COMBINERS:
        raise ValueError(f"table {table}: combiner: expected one of {', '.join(COMBINERS)}, got {combiner!r}")
    if max_norm is not None and not (_SMALLEST_FLOAT <= max_norm <= _LARGEST_FLOAT):
        raise ValueError(f"table {table}: max_norm: expected a number above 0 of float32 or None, got {max_norm}")
    return BagRows(slots, combiner, max_norm or 0.0)
