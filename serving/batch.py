"""One request's samples, checked once: nothing behind this file checks them again."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TableKeys:
    """The keys of one table for all samples of a batch.

    Attributes:
        keys: int64[N], sample-major: sample 0's slot 0, slot 1, ..., then sample 1's.
        row_ptrs: int32[B * S + 1], CSR offsets of the bags; starts at 0, ends at N.
    """

    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """B samples.

    Attributes:
        dense: float32[B, F], all finite.
        tables: one entry per embedding table, in graph order.
    """

    dense: NDArray[np.float32]
    tables: tuple[TableKeys, ...]

    @property
    def samples(self) -> int:
        """B."""
        return int(self.dense.shape[0])
