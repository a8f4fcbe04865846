"""Turn a model and a trace into one record per table: counts of lookups, and the hit curve of every policy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpu_cache.layout import Kind, Layout
from kernels.host import KeyIndex, RowDtype
from serving.config import ModelConfig, TableConfig
from serving.errors import TraceError
from serving.lookup.cache_plan import cache_layout
from serving.parameter_server.table_files import open_table_file
from serving.planner.curve import HitCurve
from serving.planner.memory import gpu_bytes, ram_bytes
from serving.planner.policies import OVERFLOW_POLICIES, POLICIES, Places, sampled_lru_curves, standard_error
from serving.planner.reuse import MOST_LOOKUPS
from serving.planner.trace import Keys, Trace

_READ_ROWS = 1 << 20
_CURVE_POINTS = 100


@dataclass(frozen=True, slots=True)
class TablePlan:
    """One table and its lookups in a trace.

    Attributes:
        name: full name.
        dim: D.
        rows: V.
        lookups: N.
        unknown: lookups of keys that the table does not have. These lookups always miss.
        distinct: rows that were looked up at least once.
        curves: by policy name, see ``serving.planner.policies``.
        cache_layout: the layout of its cache on a GPU.
        cache_kind: the type of its cache on a GPU.
        lru_groups: the estimates that give the error of a sampled LRU curve; empty if the curve is exact.
        row_dtype: the form in which RAM keeps the rows.
        hottest: int64[distinct], the keys of the rows that were looked up, hottest first.
    """

    name: str
    dim: int
    rows: int
    lookups: int
    unknown: int
    distinct: int
    curves: dict[str, HitCurve]
    cache_layout: Layout
    cache_kind: Kind = "dynamic"
    lru_groups: tuple[HitCurve, ...] = ()
    row_dtype: RowDtype = "fp32"
    hottest: Keys = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def ram_bytes(self, rows: int, policy: str = "file") -> int:
        """Return the exact RAM of a host table for ``rows`` of the rows under ``policy``; 0 for no rows."""
        return ram_bytes(self.dim, rows, self.row_dtype, OVERFLOW_POLICIES.get(policy))

    def gpu_bytes(self, rows: int) -> int:
        """Return the exact GPU memory of a cache for ``rows`` of the rows."""
        return gpu_bytes(self.cache_layout, self.cache_kind, rows)

    def lru_error(self, rows: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the standard error of LRU's hit rate at each of ``rows``; zeros if the curve is exact."""
        return standard_error(self.lru_groups, rows) if self.lru_groups else np.zeros(rows.shape)

    def curve_rows(self) -> NDArray[np.int64]:
        """Return sizes from one row to the whole table, equally spaced on a logarithmic scale."""
        return np.unique(np.geomspace(1, self.rows, _CURVE_POINTS).round().astype(np.int64))


def plan_tables(models: Sequence[ModelConfig], trace: Trace, sample_ratio: float | None = None) -> Iterator[TablePlan]:
    """Plan every table of ``models``, in order.

    Args:
        models: the models.
        trace: the keys that were looked up, by full table name. A table without keys counts as never looked up.
        sample_ratio: estimate LRU's curve from this part of the rows; None computes the exact curve.

    Raises:
        ModelFileError: a table's file is missing or is not what the configuration says.
        TraceError: there are too many lookups for the exact curve, or too few rows for the sample.
    """
    for config in models:
        for table in config.tables:
            name = config.hps_name(table)
            yield _plan_table(config, table, trace.get(name, np.empty(0, dtype=np.int64)), sample_ratio)


def _plan_table(config: ModelConfig, table: TableConfig, keys: Keys, sample_ratio: float | None) -> TablePlan:
    index = _file_order(config, table)
    found = index.find(keys)
    known: Places = found[found >= 0]
    if len(index) <= np.iinfo(np.int32).max:
        known = known.astype(np.int32)  # sorts sooner
    name = config.hps_name(table)
    if known.size > MOST_LOOKUPS:
        raise TraceError(name, f"{known.size:,} lookups, but a curve takes at most {MOST_LOOKUPS:,}")
    counts = np.bincount(known, minlength=1)
    hottest = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    curves, groups = _curves(name, known, keys.size, sample_ratio)
    return TablePlan(
        name=name,
        dim=table.dim,
        rows=len(index),
        lookups=keys.size,
        unknown=keys.size - known.size,
        distinct=hottest.size,
        curves=curves,
        cache_layout=cache_layout(config, table),
        cache_kind=config.gpu_cache.kind,
        lru_groups=groups,
        row_dtype=table.row_dtype,
        hottest=index.keys()[hottest],
    )


def _curves(
    name: str, known: Places, lookups: int, sample_ratio: float | None
) -> tuple[dict[str, HitCurve], tuple[HitCurve, ...]]:
    if sample_ratio is None or not known.size:
        return {policy: curve_of(known, lookups) for policy, curve_of in POLICIES.items()}, ()
    try:
        lru, groups = sampled_lru_curves(known, lookups, sample_ratio)
    except ValueError as err:
        raise TraceError(name, f"--sample: {err}") from err
    exact = {policy: curve_of(known, lookups) for policy, curve_of in POLICIES.items() if policy != "lru"}
    return {"lru": lru, **exact}, groups


def _file_order(config: ModelConfig, table: TableConfig) -> KeyIndex:
    """Map each key to the place of its row in the table's file."""
    model = open_table_file(config, table)
    index = KeyIndex(model.rows)
    for keys in model.key_batches(_READ_ROWS):
        index.find_or_insert(keys)
    return index
