"""Plan a model before it is loaded: the memory that it takes in each storage tier, and the hit rate of each tier.

``trace`` reads the keys that were looked up. ``reuse`` and ``policies`` turn these keys into a ``HitCurve`` per table
and policy. ``memory`` computes the size of rows, and ``budget`` divides RAM among tables. ``report`` and ``chart`` show
the results. ``hot_keys`` writes the rows that are looked up most.
"""

from serving.planner.budget import Share, divide_budget, gpu_share_for
from serving.planner.curve import HitCurve
from serving.planner.hot_keys import write_hot_keys
from serving.planner.memory import TableSize, disk_bytes, gpu_bytes, ram_bytes, table_sizes
from serving.planner.plan import TablePlan, plan_tables
from serving.planner.policies import OVERFLOW_POLICIES, POLICIES
from serving.planner.trace import Trace, read_trace

__all__ = [
    "OVERFLOW_POLICIES",
    "POLICIES",
    "HitCurve",
    "Share",
    "TablePlan",
    "TableSize",
    "Trace",
    "disk_bytes",
    "divide_budget",
    "gpu_bytes",
    "gpu_share_for",
    "plan_tables",
    "ram_bytes",
    "read_trace",
    "table_sizes",
    "write_hot_keys",
]
