"""Rows of ids: how they are passed, pruned and filled."""

from dataclasses import dataclass, replace
from operator import index
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from training.arguments import shown
from training.embedding.inputs import FeatureBags, without_holes


class SparseTensor(NamedTuple):
    """Values, and the row of each value.

    Only the row of an index matters. Indices may come in any order, and an index may occur more than once. Values of
    one row keep their order.

    Attributes:
        indices: int64[N, 2], the row and the column of each value. Columns are not checked.
        values: [N].
        dense_shape: the number of rows, R, and of columns.
    """

    indices: Any
    values: Any
    dense_shape: Any


@dataclass(frozen=True, slots=True)
class SparseIds:
    """The ids of R rows.

    Attributes:
        rows: int64[N], ascending.
        ids: int64[N].
        weights: float[N] on any device, or None.
        count: R.
        device: of the ids.
    """

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    weights: torch.Tensor | None
    count: int
    device: torch.device

    def select(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> Self:
        """Return the ids at these places."""
        weights = self.weights
        if weights is not None:
            weights = weights[torch.from_numpy(places).to(weights.device)]
        return replace(self, rows=self.rows[places], ids=self.ids[places], weights=weights)

    def without_invalid(self, drops_weights: bool) -> Self:
        """Drop negative ids and, with ``drops_weights``, ids whose weight is 0 or less."""
        is_kept = self.ids >= 0
        if drops_weights and self.weights is not None:
            is_kept &= (self.weights.detach() > 0).cpu().numpy()
        return self if is_kept.all() else self.select(is_kept)

    def bags(self, default_id: int | None) -> FeatureBags:
        """Return one bag per row. A row without an id gets ``default_id``, unless it is None, with the weight 1."""
        counts = np.bincount(self.rows, minlength=self.count)
        ids, weights, is_empty = self.ids, self.weights, counts == 0
        if default_id is not None and is_empty.any():
            counts += is_empty
            places = np.arange(len(ids)) + np.cumsum(is_empty)[self.rows]  # where each id moves
            ids = np.full(counts.sum(), default_id)
            ids[places] = self.ids
            if weights is not None:
                moved = torch.from_numpy(places).to(weights.device)
                weights = weights.new_ones(len(ids)).index_copy(0, moved, weights)
        row_ptrs = np.zeros(self.count + 1, np.int64)
        np.cumsum(counts, out=row_ptrs[1:])
        return FeatureBags(ids, row_ptrs, weights, 1, (self.count,), self.device)


def read_ids(name: str, sp_ids: Any, sparse_weights: Any = None) -> SparseIds:
    """Return the ids of each row. ``name`` is for messages.

    Args:
        name: of the lookup.
        sp_ids: a ``SparseTensor`` or three values like it, or a sparse COO tensor or a nested tensor of PyTorch. The
            ids of a COO tensor are read as they are. PyTorch adds values with the same index when it coalesces, so do
            not coalesce ids.
        sparse_weights: a ``SparseTensor`` with the same indices, a COO or nested tensor like it, or the weights alone,
            float[N].

    Raises:
        TypeError: an argument is of another type.
        ValueError: a tensor has another shape, or a row is not in ``dense_shape``.
    """
    sp_ids = _from_torch(name, sp_ids)
    if not isinstance(sp_ids, tuple) or len(sp_ids) != 3:
        forms = "a SparseTensor, (indices, values, dense_shape), a sparse COO tensor or a nested tensor"
        raise TypeError(f"{name}: expected ids as {forms}, got {shown(sp_ids)}")
    indices, values = _integers(name, "indices", sp_ids[0], 2), _integers(name, "ids", sp_ids[1], 1)
    if indices.shape != (len(values), 2):
        raise ValueError(f"{name}: expected indices [{len(values)}, 2], one per id, got {shown(indices)}")
    weights = None if sparse_weights is None else _read_weights(name, sparse_weights, indices)
    ids = SparseIds(_int64(indices[:, 0]), _int64(values), weights, _read_count(name, sp_ids[2]), device=values.device)
    if (ids.rows[1:] < ids.rows[:-1]).any():
        ids = ids.select(np.argsort(ids.rows, kind="stable"))
    if len(ids.rows) and not 0 <= ids.rows[0] <= ids.rows[-1] < ids.count:
        row = ids.rows[0] if ids.rows[0] < 0 else ids.rows[-1]
        raise ValueError(f"{name}: expected rows from 0 to {ids.count - 1}, as dense_shape says, got row {row}")
    return ids


def _from_torch(name: str, value: Any) -> Any:
    """Return a sparse COO tensor or a nested tensor as a ``SparseTensor``, and any other value as it is."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        values, offsets = without_holes(name, value)
        counts = offsets.diff().to(values.device)
        rows = torch.repeat_interleave(counts)
        columns = torch.arange(len(values), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        return SparseTensor(
            torch.stack([rows, columns], 1), values, (len(counts), int(counts.max()) if len(counts) else 0)
        )
    if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
        return SparseTensor(value._indices().t(), value._values(), value.shape)
    return value


def _integers(name: str, what: str, value: Any, dims: int) -> torch.Tensor:
    """Return indices or ids as a tensor."""
    if isinstance(value, np.ndarray):
        value = np.require(value, requirements="W")  # PyTorch warns of others
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(f"{name}: expected {what} of int64 or int32, got {shown(value)}: {err}") from err
    if tensor.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: expected {what} of int64 or int32, got {shown(tensor)}")
    if tensor.dim() != dims:
        raise ValueError(f"{name}: expected {what} with {dims} dimensions, got {shown(tensor)}")
    return tensor


def _read_count(name: str, dense_shape: Any) -> int:
    """Return R."""
    try:
        sizes = [index(size) for size in dense_shape]
    except TypeError as err:
        raise TypeError(f"{name}: expected dense_shape [rows, columns] of integers, got {dense_shape!r}") from err
    if len(sizes) != 2 or min(sizes) < 0:
        raise ValueError(f"{name}: expected dense_shape [rows, columns], got {sizes}")
    return sizes[0]


def _read_weights(name: str, sparse_weights: Any, indices: torch.Tensor) -> torch.Tensor:
    values = sparse_weights = _from_torch(name, sparse_weights)
    if isinstance(sparse_weights, tuple) and len(sparse_weights) == 3:
        values = torch.as_tensor(sparse_weights[1])
        if not torch.equal(_integers(name, "indices", sparse_weights[0], 2).to(indices), indices):
            raise ValueError(f"{name}: expected sparse_weights with the indices of the ids, got other indices")
    if not isinstance(values, torch.Tensor) or values.layout != torch.strided or not values.is_floating_point():
        raise TypeError(f"{name}: expected sparse_weights as a SparseTensor or float[N], got {shown(values)}")
    if values.shape != (len(indices),):
        raise ValueError(f"{name}: expected a weight for each of {len(indices)} ids, got {shown(values)}")
    return values


def _int64(tensor: torch.Tensor) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = tensor.detach().to("cpu", torch.int64).contiguous().numpy()
    return numbers
