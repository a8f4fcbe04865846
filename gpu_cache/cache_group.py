"""The caches of one model's tables on one device, asked in one launch, and pooled on the way where that is wanted.

Letters for shapes: B samples, S slots, T tables, N keys, M missing keys, D embedding_vec_size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_cache.bag_layout import COMBINERS, BagRows, Combiner
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheClosedError
from gpu_cache.layout import TABLE_BYTES
from gpu_cache.numbers import whole_number
from gpu_cache.workspace import Workspace
from kernels.device import Array, Device, Kernel

_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_SMALLEST_FLOAT = float(np.finfo(np.float32).smallest_subnormal)  # what is less is 0, which means no norm


class CacheGroup:
    """The caches of one model's tables on one device.

    A pooled lookup answers what ``ParameterServer.lookup_pooled`` does, to the bit, once the rows its caches lack were
    fetched and pooled in: see ``Workspace``. It counts the rows it finds as used and as hits, as ``query`` does; the
    caller passes what it fetched to ``EmbeddingCache.replace``, so that pooled lookups fill the caches.

    A bag's row is the sum, in key order, of its rows times their weights; ``"mean"`` divides it by the sum of the
    weights, ``"sqrtn"`` by the square root of the sum of their squares. Without weights each is 1. A row longer than
    ``max_norm`` is scaled by max_norm / |row| before it is weighted (``tf.clip_by_norm``).

    May be used from any thread; each of its workspaces by one at a time.

    Args:
        caches: of tables 0 .. T - 1, all of one device, with the same ``Readers``, key type and keys per line. A cache
            may occur more than once.
        slots: S of each table, at least 1.
        combiners: of each table.
        default_values: what each column of a row is that nobody has fetched; 0.0 unless given.
        max_norms: in the L2 norm, above 0; None: any length.

    Raises:
        ValueError: one of these is not so, or a number is too large or too small for a float32.
        TypeError: ``caches`` are none, or the slots are no whole number.
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
        """Return a kernel of pool.cu or lookup.cu, compiled for the forms of these caches."""
        file = "lookup.cu" if name.startswith("lookup") else "pool.cu"
        forms = " ".join(f"FORM({number}, {form})" for number, form in enumerate(self._forms))
        return self.device.kernel(file, name, HOTROW_FORMS=forms, **self.caches[0].layout.line_defines())

    def workspace(self, max_samples: int, max_keys: int, dense_dim: int = 0, max_single_keys: int = 0) -> Workspace:
        """Return a new place for one request at a time.

        Args:
            max_samples: the most B of a request.
            max_keys: the most keys of a request, over all tables.
            dense_dim: F, the dense features that a sample may bring along.
            max_single_keys: the most keys of a request that are answered one by one (``Workspace.lookup``), over all
                tables. Their rows go where pooled ones do, and take more memory where they are more.

        Raises:
            TypeError: one of these is no whole number.
            ValueError: ``max_samples`` is less than 1, ``max_keys`` less than 1 or above 2^30, ``dense_dim`` less than
                0, or ``max_single_keys`` less than 0 or above ``max_keys``.
            MemoryError: the device or the host has not the memory.
        """
        return Workspace(self, max_samples, max_keys, dense_dim, max_single_keys)

    def require_open(self) -> None:
        """Refuse to go on with memory that was given back.

        Raises:
            CacheClosedError: a cache was closed.
        """
        closed = [cache.is_closed for cache in self.caches]  # a list: this is asked of each request
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
            raise ValueError(f"table {t}: its cache is on {cache.device.name}, that of table 0 on {first.device.name}")
        if cache.readers is not first.readers:
            raise ValueError(f"table {t}: its cache has other Readers than that of table 0")
        if cache.layout.line_defines() != first.layout.line_defines():
            raise ValueError(f"table {t}: its cache has another key type or other lines than that of table 0")


def _bag_rows(table: int, slots: int, combiner: Combiner, max_norm: float | None) -> BagRows:
    slots = whole_number(f"table {table}: slots", slots, 1)
    if combiner not in COMBINERS:
        raise ValueError(f"table {table}: combiner: expected one of {', '.join(COMBINERS)}, got {combiner!r}")
    if max_norm is not None and not (_SMALLEST_FLOAT <= max_norm <= _LARGEST_FLOAT):
        raise ValueError(f"table {table}: max_norm: expected a number above 0 of float32 or None, got {max_norm}")
    return BagRows(slots, combiner, max_norm or 0.0)
