"""The arguments of SparseOperationKit's calls."""

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from serving.model.names import TABLE_NAME
from training.arguments import shown, whole
from training.tables.config import Constant, Initializer, Uniform

Ints = NDArray[np.int64]

#: Of ``DynamicVariable``.
KINDS = (None, "hbm", "hybrid")
#: Of rows, if the caller says nothing else.
RANDOM = Uniform(-0.05, 0.05)
_NAMED: dict[str, Initializer] = {"random": RANDOM, "ones": Constant(1.0), "zeros": Constant(0.0)}


def checked_name(call: str, name: str | None) -> str | None:
    """Return the name of a variable, or raise ValueError if it cannot be the name of a folder and a table."""
    if name is not None and not (isinstance(name, str) and TABLE_NAME.fullmatch(name)):
        raise ValueError(f"{call}: expected a name of letters, digits, '_', '.' and '-', got {name!r}")
    return name


def read_initializer(initializer: Any) -> Initializer:
    """Return the initializer of a ``DynamicVariable``."""
    if isinstance(initializer, Initializer):
        return initializer
    if initializer in (None, "", *_NAMED):
        return _NAMED[initializer or "random"]
    try:
        value = float(initializer)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        expected = "the initializer 'random', 'ones', 'zeros', a number or one of training.embedding"
        raise ValueError(f"DynamicVariable: expected {expected}, got {initializer!r}")
    return Constant(value)


def read_table(initial_value: Any) -> NDArray[Any]:
    """Return the table [V, D] of a ``Variable``."""
    try:
        table = np.asarray(initial_value)
    except ValueError as err:  # rows of several lengths
        raise ValueError(f"Variable: expected a table [V, D], got {shown(initial_value)}: {err}") from err
    if table.dtype.kind not in "fiu":
        raise TypeError(f"Variable: expected a table of numbers, got {table.dtype}")
    if table.ndim != 2 or not table.size:
        raise ValueError(f"Variable: expected a table [V, D] with V and D of at least 1, got {list(table.shape)}")
    return table


def read_layer_combiner(call: str, combiner: Any) -> Literal["sum", "mean"]:
    """Return the combiner of a ``DistributedEmbedding``."""
    if not isinstance(combiner, str) or combiner.lower() not in ("sum", "mean"):
        raise ValueError(f"{call}: expected the combiner 'sum' or 'mean', got {combiner!r}")
    return "sum" if combiner.lower() == "sum" else "mean"


def listed(name: str, value: Any, count: int, is_list: bool) -> list[Any]:
    """Return one item of an argument of ``lookup_sparse`` for each variable."""
    if value is None and name != "sp_ids":
        return [None] * count
    if not is_list:
        return value if isinstance(value, list) and len(value) == 1 else [value]
    if not isinstance(value, list | tuple) or len(value) != count:
        came = f"{len(value)}" if isinstance(value, list | tuple) else type(value).__name__
        raise ValueError(f"lookup_sparse: expected {name} as a list of {count}, one per variable, got {came}")
    return list(value)


def require_hotness(place: str, row_ptrs: Ints, name: str, most: Any) -> None:
    """Refuse rows with more ids than ``most``, which is the argument ``name``. None: any number is allowed."""
    if most is None:
        return
    most = whole(place, name, most, 1)
    counts = np.diff(row_ptrs)
    if counts.max(initial=0) > most:
        row = int(np.argmax(counts > most))
        raise ValueError(f"{place}: expected at most {name} = {most} ids in a row, got {counts[row]} in row {row}")


def require_slots(place: str, row_ptrs: Ints, slot_num: int, max_nnz: int, max_feature_num: int) -> None:
    """Refuse the rows of a ``DistributedEmbedding`` if they are not samples of so many slots, or have too many keys."""
    rows = len(row_ptrs) - 1
    if rows % slot_num:
        raise ValueError(f"{place}: expected {slot_num} rows for each sample, got {rows}")
    require_hotness(place, row_ptrs, "max_nnz", max_nnz)
    of_samples = np.diff(row_ptrs[::slot_num])
    if of_samples.max(initial=0) > max_feature_num:
        sample = int(np.argmax(of_samples > max_feature_num))
        expected = f"at most max_feature_num = {max_feature_num} keys in a sample"
        raise ValueError(f"{place}: expected {expected}, got {of_samples[sample]} in sample {sample}")
