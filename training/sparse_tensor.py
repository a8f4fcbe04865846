"""Rows of ids: how they are passed, pruned and filled."""

from dataclasses import dataclass, replace
from operator import index
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from training.arguments import shown
from training.calls.ids import IdRows
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
        rows: the ids.
        weights: of the caller's ids, float[N] on any device, or None.
        device: of the ids.
    """

    rows: IdRows
    weights: torch.Tensor | None
    device: torch.device

    def without_invalid(self, drops_weights: bool) -> Self:
        """Drop negative ids and, with ``drops_weights``, ids whose weight is 0 or less."""
        is_kept = self.rows.ids >= 0
        if drops_weights and self.weights is not None:
            is_kept &= self.rows.in_order((self.weights.detach() > 0).cpu().numpy())
        return replace(self, rows=self.rows.select(is_kept))

    def bags(self, default_id: int | None) -> FeatureBags:
        """Return one bag per row. A row without an id gets ``default_id``, unless it is None, with the weight 1."""
        rows = self.rows if default_id is None else self.rows.filled(default_id)
        weights = self.weights
        if weights is not None and rows.places is not None:
            own = np.flatnonzero(rows.places >= 0)
            to, of = (torch.from_numpy(places).to(weights.device) for places in (own, rows.places[own]))
            weights = weights.new_ones(len(rows.ids)).index_copy(0, to, weights[of])
        return FeatureBags(rows.ids, rows.row_ptrs, weights, 1, (len(rows.row_ptrs) - 1,), self.device)


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
    rows = IdRows.read(name, _int64(indices[:, 0]), _int64(values), _read_count(name, sp_ids[2]))
    return SparseIds(rows, weights, values.device)


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
