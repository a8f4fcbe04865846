"""The cores that this process can use."""

import os
from collections.abc import Iterator

from kernels.cgroups import groups_of, number_in, words_in


def usable_cores() -> int:
    """Return how many cores the process's affinity and its container's CPU quota allow; at least 1.

    If more threads than that are busy, the system stops all of them until the quota's next period.
    """
    return max(int(min((_affinity(), *_quotas()))), 1)


def _affinity() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(os.getpid()))  # of the process: the calling thread may be bound to one core


def _quotas() -> Iterator[float]:
    """Yield the CPU quotas of the process's groups, in cores."""
    for group in groups_of("cpu"):
        words = words_in(group / "cpu.max")
        if words and words[0] != "max":
            yield int(words[0]) / int(words[1])
        quota_us, period_us = number_in(group / "cpu.cfs_quota_us"), number_in(group / "cpu.cfs_period_us")
        if quota_us and period_us:  # no quota is written as -1
            yield quota_us / period_us
