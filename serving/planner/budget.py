"""Divide one budget of RAM among several tables, by hits per byte."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from serving.planner.plan import TablePlan
from serving.planner.policies import OVERFLOW_POLICIES
from serving.storage.memory_budget import rows_within

_MOST_STEPS = 4096  # of one curve; a longer curve is thinned
_GPU_SHARES = 10_000


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a budget that one table gets.

    Attributes:
        table: full name.
        rows: rows to hold.
        ram_bytes: the exact size of these rows in RAM.
        hits: lookups of the trace that these rows answer.
    """

    table: str
    rows: int
    ram_bytes: int
    hits: float


def gpu_share_for(plans: Sequence[TablePlan], policy: str, hit_rate: float) -> float | None:
    """Return the smallest ``gpucacheper`` with which the tables of one model together reach ``hit_rate``.

    A model has one ``gpucacheper``: the part of each table's rows that the table's GPU cache holds.

    Returns:
        a multiple of 0.0001; None if even caches of all rows do not reach ``hit_rate``.
    """
    shares = np.arange(1, _GPU_SHARES + 1)
    hits = np.zeros(shares.size)
    for plan in plans:
        hits += plan.curves[policy].hits_at(-(-shares * plan.rows // _GPU_SHARES))
    reached = hits / max(sum(plan.lookups for plan in plans), 1) >= hit_rate
    return float(shares[np.argmax(reached)] / _GPU_SHARES) if reached[-1] else None


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a curve's hull: table number ``table`` grows to ``rows`` rows."""

    hits_per_byte: float
    table: int
    rows: int


def divide_budget(plans: Sequence[TablePlan], policy: str, budget_bytes: int) -> list[Share]:
    """Divide ``budget_bytes`` of RAM so that the tables together answer the most lookups.

    Greedy on the concave hulls of hits by bytes: each step is the step that gains the most hits per byte. This division
    is optimal, except for the last step, which may fit only in part (Fox, "Discrete optimization via marginal
    analysis", Management Science 13(3), 1966).

    Args:
        plans: the tables, each with another full name.
        policy: the policy of the RAM tier, a key of ``TablePlan.curves``.
        budget_bytes: the budget of all tables together.

    Returns:
        a share per table, in the order of ``plans``. The shares together take at most ``budget_bytes``.
    """
    steps = [step for number, plan in enumerate(plans) for step in _steps(number, plan, policy)]
    steps.sort(key=lambda step: -step.hits_per_byte)  # stable: the steps of a table stay in order
    rows = [0] * len(plans)
    taken = [0] * len(plans)
    for step in steps:
        plan = plans[step.table]
        room = budget_bytes - sum(taken) + taken[step.table]
        fits = plan.ram_bytes(step.rows, policy) <= room
        most_rows = step.rows if fits else rows_within(room, plan.dim, plan.row_dtype, OVERFLOW_POLICIES.get(policy))
        rows[step.table] = most_rows
        taken[step.table] = plan.ram_bytes(most_rows, policy)
    return [
        Share(plan.name, row, size_bytes, float(plan.curves[policy].hits_at(row)))
        for plan, row, size_bytes in zip(plans, rows, taken, strict=True)
    ]


def _steps(number: int, plan: TablePlan, policy: str) -> list[_Step]:
    """Return the steps of the concave hull of a policy's curve over bytes, steepest first."""
    curve = plan.curves[policy]
    rows = _thinned(np.minimum(curve.rows[1:], plan.rows))
    bytes_by_step = [plan.ram_bytes(int(row), policy) for row in rows]
    hull: list[tuple[int, float, int]] = [(0, 0.0, 0)]
    for size_bytes, hits, row_count in zip(bytes_by_step, curve.hits_at(rows).tolist(), rows.tolist(), strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], (size_bytes, hits, row_count)):
            hull.pop()
        hull.append((size_bytes, hits, row_count))
    return [_Step(_slope(low, high), number, high[2]) for low, high in pairwise(hull)]


def _slope(low: tuple[int, float, int], high: tuple[int, float, int]) -> float:
    """Return hits per byte, infinite for a step that needs no more pages of memory."""
    return (high[1] - low[1]) / (high[0] - low[0]) if high[0] > low[0] else float("inf")


def _thinned(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return at most ``_MOST_STEPS`` of ascending row counts, including the last."""
    if rows.size <= _MOST_STEPS:
        return rows
    return rows[np.unique(np.geomspace(1, rows.size, _MOST_STEPS).astype(np.int64)) - 1]
