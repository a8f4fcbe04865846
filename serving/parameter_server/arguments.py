"""The arrays that callers of a parameter server give it, checked."""

from typing import Any

import numpy as np

from serving.errors import RequestError
from serving.model.sparse_rows import KeyType, fault_of_values, key_range
from serving.storage.store import Keys, RowPtrs, Vectors, Weights


def check_keys(table: str, keys: Keys, key_type: KeyType = "I64") -> None:
    """Refuse keys that no table of ``key_type`` can hold.

    Raises:
        RequestError: ``keys`` is not int64[N], or a key is reserved or outside the range of a uint32 model.
    """
    if not isinstance(keys, np.ndarray) or keys.ndim != 1 or keys.dtype != np.int64:
        raise RequestError(f"table {table!r}: expected keys of int64[N], got {_form_of(keys)}")
    smallest, largest = key_range(key_type)
    if keys.size and (keys.min() < smallest or keys.max() > largest):
        at = int(np.argmax((keys < smallest) | (keys > largest)))
        fault = "is reserved" if key_type == "I64" else f"is not 0 to {largest}, as the model's uint32 keys are"
        raise RequestError(f"table {table!r}: key {keys[at]} at position {at} {fault}")


def check_weights(table: str, keys: Keys, weights: Weights) -> None:
    """Refuse weights that are not one per key.

    Raises:
        RequestError: ``weights`` is not float32[N].
    """
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float32 or weights.shape != keys.shape:
        raise RequestError(f"table {table!r}: expected weights of float32[{keys.size}], got {_form_of(weights)}")


def check_row_ptrs(table: str, row_ptrs: RowPtrs) -> None:
    """Refuse an array that cannot hold offsets of bags; the pooling kernel checks the values.

    Raises:
        RequestError: ``row_ptrs`` does not have one dimension, or is empty.
    """
    if not isinstance(row_ptrs, np.ndarray) or row_ptrs.ndim != 1 or not row_ptrs.size:
        wanted = "int32[R + 1] or int64[R + 1]"
        raise RequestError(f"table {table!r}: expected row_ptrs of {wanted}, got {_form_of(row_ptrs)}")


def check_rows(table: str, keys: Keys, rows: Vectors, dim: int) -> None:
    """Refuse rows that are not one per key, and values that would spoil the answer to every request with their key.

    Raises:
        RequestError: ``rows`` is not float32[N, D], or a value is NaN or infinite.
    """
    if not isinstance(rows, np.ndarray) or rows.shape != (keys.size, dim) or rows.dtype != np.float32:
        raise RequestError(f"table {table!r}: expected rows of float32[{keys.size}, {dim}], got {_form_of(rows)}")
    if fault := fault_of_values(keys, rows):
        raise RequestError(f"table {table!r}: {fault}")


def _form_of(given: Any) -> str:
    return f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"
