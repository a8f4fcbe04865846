"""Float32 rows as a table of another row type gives them back, and how far off that is."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kernels.errors import RowValueError
from kernels.host import RowDtype, round_rows
from serving.config.row_dtypes import ROW_WISE
from serving.errors import StoreError
from serving.storage.store import Keys, Store, Vectors


def rounded(store: str, table: str, row_dtype: RowDtype, keys: Keys, rows: Vectors) -> Vectors:
    """``rows`` as a host table of ``row_dtype`` gives them back; for fp32 the very array.

    Args:
        store: the store they come from or are meant for, for messages.
        table: their table's full name.
        row_dtype: the form.
        keys: int64[N].
        rows: float32[N, D], C-contiguous.

    Raises:
        StoreError: the form cannot hold a value; the message names its key.
    """
    if row_dtype == "fp32":
        return rows
    out = np.empty_like(rows)
    try:
        round_rows(rows, row_dtype, out)
    except RowValueError as err:
        of_key = RowValueError(err.row_dtype, err.value, err.position, err.column, int(keys[err.position]))
        raise StoreError(store, table, str(of_key)) from err
    return out


def may_be_copied(store: Store, row_dtype: RowDtype) -> bool:
    """Whether another store may keep the rows of a table as ``store`` gives them: not where both would round them."""
    return row_dtype not in ROW_WISE or not store.keeps_row_dtype


@dataclass(frozen=True, slots=True)
class RoundingError:
    """How far the rows of a table are from what a row type makes of them.

    Attributes:
        largest: the largest absolute difference of two floats; 0 of no rows.
        mean: the mean absolute difference over all floats of all rows.
        magnitude: the mean absolute value, to compare the two with.
    """

    largest: float
    mean: float
    magnitude: float


def rounding_error(
    store: str, table: str, row_dtype: RowDtype, batches: Iterable[tuple[Keys, Vectors]]
) -> RoundingError:
    """Compare all rows of a table, given as batches, with their rounded ones. See ``rounded`` for the errors."""
    largest, differences, magnitudes, floats = 0.0, 0.0, 0.0, 0
    for keys, rows in batches:
        difference = np.abs(rounded(store, table, row_dtype, keys, rows) - rows)
        largest = max(largest, float(difference.max(initial=0.0)))
        differences += float(difference.sum(dtype=np.float64))
        magnitudes += float(np.abs(rows).sum(dtype=np.float64))
        floats += rows.size
    return RoundingError(largest, differences / max(floats, 1), magnitudes / max(floats, 1))
