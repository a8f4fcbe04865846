"""``PyPersiaBatchData``: what a data loader sends."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.arguments import shown


class PyPersiaBatchData:
    """One batch of B samples. Every method may be called more than once, and keeps the order.

    Attributes:
        dense: arrays [B, F].
        sparse: for each feature its signs uint64[N] and the offsets int64[B + 1] of the samples.
        targets: arrays float32[B, L].
    """

    def __init__(self) -> None:
        """Make an empty batch."""
        self.dense: list[NDArray[Any]] = []
        self.sparse: dict[str, tuple[NDArray[np.uint64], NDArray[np.int64]]] = {}
        self.targets: list[NDArray[np.float32]] = []
        self._samples: int | None = None

    def add_dense(self, dense_list: Sequence[NDArray[np.float32]]) -> None:
        """Add float32 arrays [B, F].

        Raises:
            TypeError: it is no list of arrays of this type.
            ValueError: an array has another shape.
        """
        if not isinstance(dense_list, list | tuple):
            raise TypeError(f"add_dense: expected a list of arrays, got {shown(dense_list)}")
        for array in dense_list:
            self._add_matrix("add_dense", self.dense, array, np.float32)

    def add_dense_f32(self, dense: NDArray[np.float32]) -> None:
        """Add a float32 array [B, F]; see ``add_dense``."""
        self._add_matrix("add_dense_f32", self.dense, dense, np.float32)

    def add_dense_f64(self, dense: NDArray[np.float64]) -> None:
        """Add a float64 array [B, F]; see ``add_dense``."""
        self._add_matrix("add_dense_f64", self.dense, dense, np.float64)

    def add_dense_i32(self, dense: NDArray[np.int32]) -> None:
        """Add an int32 array [B, F]; see ``add_dense``."""
        self._add_matrix("add_dense_i32", self.dense, dense, np.int32)

    def add_dense_i64(self, dense: NDArray[np.int64]) -> None:
        """Add an int64 array [B, F]; see ``add_dense``."""
        self._add_matrix("add_dense_i64", self.dense, dense, np.int64)

    def add_target(self, target: NDArray[np.float32]) -> None:
        """Add a float32 array [B, L], the ground truth of one task; see ``add_dense``."""
        self._add_matrix("add_target", self.targets, target, np.float32)

    def add_sparse(self, sparse: Iterable[tuple[str, Sequence[NDArray[np.uint64]]]]) -> None:
        """Add features.

        Args:
            sparse: for each feature its name, and an array uint64[n] of signs for each sample. n may be 0, and a sign
                may occur more than once.

        Raises:
            TypeError: the signs of a sample are no array of uint64.
            ValueError: an array has another shape, the number of samples differs, or the feature is there already.
        """
        for name, samples in sparse:
            if name in self.sparse:
                raise ValueError(f"add_sparse: expected each feature once, got {name!r} again")
            for number, signs in enumerate(samples):
                if not isinstance(signs, np.ndarray) or signs.dtype != np.uint64 or signs.ndim != 1:
                    raise _wrong(f"add_sparse: feature {name!r}, sample {number}", signs, "uint64[n]", np.uint64)
            self._count(f"add_sparse: feature {name!r}", len(samples))
            row_ptrs = np.zeros(len(samples) + 1, np.int64)
            np.cumsum([len(signs) for signs in samples], out=row_ptrs[1:])
            self.sparse[name] = np.concatenate(samples), row_ptrs

    def _add_matrix(self, call: str, matrices: list[Any], array: Any, dtype: type[np.generic]) -> None:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 2:
            raise _wrong(call, array, f"{np.dtype(dtype)}[B, n]", dtype)
        self._count(call, len(array))
        matrices.append(array)

    def _count(self, place: str, samples: int) -> None:
        """Refuse another number of samples than the batch has."""
        if samples < 1:
            raise ValueError(f"{place}: expected at least one sample, got none")
        if self._samples not in (None, samples):
            raise ValueError(f"{place}: expected {self._samples} samples, as the batch has, got {samples}")
        self._samples = samples


def _wrong(place: str, value: Any, expected: str, dtype: type[np.generic]) -> Exception:
    kind = ValueError if isinstance(value, np.ndarray) and value.dtype == dtype else TypeError
    return kind(f"{place}: expected an array {expected}, got {shown(value)}")
