"""A plan as lines of text and as rows of numbers."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from serving.config import HashMapConfig
from serving.planner.budget import Share
from serving.planner.memory import TableSize
from serving.planner.plan import TablePlan
from serving.planner.policies import OVERFLOW_POLICIES

_LEAST_FULL_RATIO = HashMapConfig().overflow_resolution_target
CSV_COLUMNS = ("table", "rows", "rows_ratio", "policy", "hit_rate", "standard_error", "ram_bytes", "gpu_bytes")


def describe_sizes(sizes: Sequence[TableSize]) -> Iterator[str]:
    """Yield the size of each table in each tier."""
    width = max(len("table"), *(len(size.name) for size in sizes))
    yield f"{'table':<{width}} {'rows':>14} {'dim':>5} {'RAM':>12} {'GPU cache':>12} {'disk, about':>12}"
    for size in sizes:
        amounts = (size.ram_bytes, size.gpu_bytes, size.disk_bytes)
        yield f"{size.name:<{width}} {size.rows:>14,} {size.dim:>5} " + " ".join(
            f"{amount(size_bytes):>12}" for size_bytes in amounts
        )
    totals = (
        sum(size.ram_bytes for size in sizes),
        sum(size.gpu_bytes for size in sizes),
        sum(size.disk_bytes for size in sizes),
    )
    yield f"{'total':<{width}} {'':>14} {'':>5} " + " ".join(f"{amount(total):>12}" for total in totals)


def describe_table(plan: TablePlan, rows: NDArray[np.int64], hit_rate: float | None) -> Iterator[str]:
    """Yield the lookups of one table in the trace, and its hit rates.

    Args:
        plan: the table.
        rows: int64[K], the cache sizes to show.
        hit_rate: if given, also show which size reaches this hit rate.
    """
    yield f"table {plan.name}: {plan.rows:,} rows of {plan.dim} floats"
    yield (
        f"  {plan.lookups:,} lookups of {plan.distinct:,} rows; {_percent(plan.distinct, plan.lookups)} of the lookups "
        f"are the first of their row, {_percent(plan.unknown, plan.lookups)} of unknown keys"
    )
    if not plan.lookups:
        return
    yield _aligned("rows", "of table", *plan.curves, "RAM", "GPU cache")
    rates = np.stack([curve.hit_rate(rows) for curve in plan.curves.values()], axis=1)
    for row_count, row in zip(rows.tolist(), rates.tolist(), strict=True):
        memory = amount(plan.ram_bytes(row_count)), amount(plan.gpu_bytes(row_count))
        yield _aligned(f"{row_count:,}", _percent(row_count, plan.rows), *(f"{rate:.4f}" for rate in row), *memory)
    if plan.lru_groups:
        yield f"  lru is estimated from a sample; standard error at most {plan.lru_error(rows).max():.4f}"
    if hit_rate is not None:
        yield from _sizes_for(plan, hit_rate)


def _sizes_for(plan: TablePlan, hit_rate: float) -> Iterator[str]:
    for name, curve in plan.curves.items():
        rows = curve.rows_for(hit_rate)
        if rows is None:
            yield f"  hit rate {hit_rate:g}, {name}: out of reach, at most {curve.best_hit_rate:.4f}"
        else:
            rows = min(rows, plan.rows)  # an estimate may be larger than the table
            yield f"  hit rate {hit_rate:g}, {name}: {rows:,} rows, {rows / plan.rows:.4g} of the table"


def describe_shares(
    shares: Sequence[Share], plans: Sequence[TablePlan], policy: str, has_hot_keys: bool = False
) -> Iterator[str]:
    """Yield the shares of a budget and their hit rates, under ``policy`` and as the RAM tier is first filled.

    With ``has_hot_keys`` the tier is filled with the hottest rows.
    """
    width = max(len(share.table) for share in shares)
    for share, plan in zip(shares, plans, strict=True):
        of_rows = f"{share.rows:>14,} of {plan.rows:>14,} rows {amount(share.ram_bytes):>12}"
        yield f"  {share.table:<{width}} {of_rows}   hit rate {share.hits / max(plan.lookups, 1):.4f}"
    yield from _tables_without_rows(shares, plans, policy)
    lookups = max(sum(plan.lookups for plan in plans), 1)
    hits = sum(share.hits for share in shares)
    yield f"  together {amount(sum(share.ram_bytes for share in shares))}, hit rate {hits / lookups:.4f}"
    if policy in OVERFLOW_POLICIES:
        least = sum(
            float(plan.curves[policy].hits_at(round(_LEAST_FULL_RATIO * share.rows)))
            for share, plan in zip(shares, plans, strict=True)
        )
        yield f"  an eviction leaves {_LEAST_FULL_RATIO:g} of the rows: hit rate at least {least / lookups:.4f}"
    filled = "pinned" if has_hot_keys else "file"
    if policy != filled:
        hits = sum(float(plan.curves[filled].hits_at(share.rows)) for share, plan in zip(shares, plans, strict=True))
        rows = "the hottest rows" if has_hot_keys else "the first rows of the files"
        yield f"  filled with {rows}, as RAM is at startup: hit rate {hits / lookups:.4f}"


def _tables_without_rows(shares: Sequence[Share], plans: Sequence[TablePlan], policy: str) -> Iterator[str]:
    """Explain why a table got no rows, because 0 rows in ps.json look like a choice."""
    for share, plan in zip(shares, plans, strict=True):
        if share.rows:
            continue
        if not plan.curves[policy].hits_at(plan.rows):
            reason = "no row would answer a lookup of the trace"
        else:
            reason = f"too little memory is left: one row takes {amount(plan.ram_bytes(1, policy))}"
        yield f"  {share.table} gets 0 rows: {reason}"


def csv_rows(plan: TablePlan, rows: NDArray[np.int64]) -> Iterator[tuple[str | int | float, ...]]:
    """Yield the hit curves as rows of ``CSV_COLUMNS``, for each policy, each size and some sizes in between."""
    sizes = np.union1d(rows, plan.curve_rows())
    errors = plan.lru_error(sizes)
    for name, curve in plan.curves.items():
        for row_count, rate, error in zip(sizes.tolist(), curve.hit_rate(sizes).tolist(), errors.tolist(), strict=True):
            of_memory = (plan.ram_bytes(row_count), plan.gpu_bytes(row_count))
            yield plan.name, row_count, row_count / plan.rows, name, rate, error if name == "lru" else 0.0, *of_memory


def amount(size_bytes: int) -> str:
    """Return bytes in a readable form: ``1.50 GiB``."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} B" if unit == "B" else f"{size:,.2f} {unit}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.3g} %"


def _aligned(*cells: str) -> str:
    first, second, *others = cells
    return f"  {first:>14} {second:>9}" + "".join(f" {cell:>12}" for cell in others)
