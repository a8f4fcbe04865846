"""Rows of ids in TensorFlow's tensors."""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from training.arguments import shown
from training.calls.ids import IdRows, Ints
from training.tf.engine import Ids

_KEY_TYPES = (tf.int64, tf.int32)
Array = NDArray[Any]


def read_ids(place: str, value: Any, weights: Any = None) -> Ids:
    """Take a ``tf.SparseTensor`` or a ``tf.RaggedTensor`` of ids, and weights in the same form or float[N].

    Raises:
        TypeError: a tensor is of another type.
        ValueError: a tensor has another shape.
    """
    if not isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        raise TypeError(f"{place}: expected ids as a tf.SparseTensor or a tf.RaggedTensor, got {shown(value)}")
    require_keys(place, value.values)
    if value.shape.rank not in (None, 2):
        raise ValueError(f"{place}: expected ids with 2 dimensions, got {value.shape.rank}")
    is_ragged = isinstance(value, tf.RaggedTensor)
    tensors = [value.values, value.row_splits] if is_ragged else [value.values, value.indices, value.dense_shape]
    if weights is None:
        return Ids(place, tensors, partial(_read, place))
    if isinstance(weights, type(value)):  # its ids' places come last, and are compared
        tensors.append(weights.row_splits if is_ragged else weights.indices)
    floats = weights.values if isinstance(weights, type(value)) else weights
    if not isinstance(floats, tf.Tensor) or not floats.dtype.is_floating or floats.shape.rank != 1:
        expected = f"weights as a {type(value).__name__} or float[N]"
        raise TypeError(f"{place}: expected {expected}, got {shown(weights)}")
    return Ids(place, tensors, partial(_read, place), tf.cast(floats, tf.float32))


def require_keys(place: str, keys: Any) -> None:
    """Refuse ids that are not int64 or int32."""
    if keys.dtype not in _KEY_TYPES:
        raise TypeError(f"{place}: expected ids of int64 or int32, got {shown(keys)}")


def _read(place: str, values: Array, where: Array, *others: Array) -> IdRows:
    """Read a ragged tensor's values and row splits, or a sparse tensor's values, indices and shape."""
    ids, is_ragged = values.astype(np.int64, copy=False), where.ndim == 1
    of_weights = others[0 if is_ragged else 1 :]
    if of_weights and not np.array_equal(of_weights[0], where):
        raise ValueError(f"{place}: expected weights at the positions of the ids, got other positions")
    if is_ragged:
        return IdRows(ids, where.astype(np.int64, copy=False))
    return IdRows.read(place, np.ascontiguousarray(where[:, 0]), ids, int(others[0][0]))


def one_each(place: str, keys: tf.Tensor) -> Ids:
    """Take one id per row, from a tensor of any shape."""
    require_keys(place, keys)
    return Ids(place, [keys], _one_each)


def _one_each(keys: Array) -> IdRows:
    ids: Ints = keys.reshape(-1).astype(np.int64, copy=False)
    return IdRows(ids, np.arange(len(ids) + 1))
