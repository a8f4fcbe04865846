"""Whether the requests of a model can succeed: its outages, and how its requests of the last minute ended.

A model is ``ready`` while all its tiers answer. It is ``degraded`` while a tier is away and most requests succeed. It
is ``not ready`` if no tier answers for one of its tables, or if over half of the requests of the last minute failed.

A load balancer sends no requests to a model that is not ready, so no request could show the end of an outage. The
parameter server asks the tier again, and the end of an outage forgets how the requests before it ended. While the
last tier does not answer for one of the tables, requests would continue to fail. So the last minute ends at the last
request, and the model stays not ready.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic as now_s
from typing import TYPE_CHECKING, Literal, get_args

from kernels.errors import DeviceFaultError, HotrowError
from serving.errors import StoreError, StoreUnreachableError

if TYPE_CHECKING:
    from serving.parameter_server.tier_table import TierTable

logger = logging.getLogger(__name__)

# A tier whose calls fail and succeed in turn has one outage, which ends when no call has failed for this time.
QUIET_S = 2.0
_BUCKET_S, _BUCKETS = 5.0, 12  # together the last minute

State = Literal["ready", "degraded", "not ready"]  # the best first


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can succeed.

    Attributes:
        state: see the module.
        reason: why the state is not ``ready``.
    """

    state: State = "ready"
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether a load balancer should send requests."""
        return self.state != "not ready"


def worst(of_models: Iterable[Readiness]) -> Readiness:
    """The worst of several models; ``Readiness()`` of none."""
    order = get_args(State)
    return max(of_models, key=lambda readiness: order.index(readiness.state), default=Readiness())


@dataclass(slots=True)
class Outage:
    """One tier that does not answer for some tables of a model.

    Attributes:
        tier: the tier's name.
        failed_before: how many requests of the model had failed before.
        began_s: when the first call failed.
        failed_s: when the last call failed.
        answered_s: when the last of the tables was answered again.
        failing: the tables of failed calls whose keys were not answered since.
        fault: what the tier does instead of answering, by the last call that failed.
        logged: the faults that were logged.
    """

    tier: str
    failed_before: int
    began_s: float
    failed_s: float = 0.0
    answered_s: float = 0.0
    failing: "set[TierTable]" = field(default_factory=set)
    fault: str = ""
    logged: set[str] = field(default_factory=set)

    def silent(self) -> set[str]:
        """The names of tables whose last call failed."""
        return {in_tier.table.name for in_tier in self.failing if in_tier.is_silent}

    def is_over(self) -> bool:
        """Whether all keys of failed calls were answered, and no call has failed for a while."""
        return not self.failing and now_s() - self.failed_s >= QUIET_S


class ModelHealth:
    """The outages and the requests of one loaded model. Methods may be called from any thread.

    An outage is logged when it starts, with its effect on requests, and when it ends. It is logged again if a tier that
    could not be reached is reached but fails, or the reverse, because these are two different faults.

    Attributes:
        copies: the GPU caches in front of the tiers.
        updates: whether the updates of the model's rows arrive; None: it gets none.
    """

    def __init__(self, model: str, tiers: Sequence[str], answers_early: bool = False) -> None:
        """Start without an outage.

        Args:
            model: the model, for messages.
            tiers: the names of its tiers, fastest first.
            answers_early: its GPU caches answer with defaults and insert the rows later.
        """
        self.copies: set[object] = set()
        self.updates: Callable[[], Readiness] | None = None
        self._model, self._tiers, self._answers_early = model, tuple(tiers), answers_early
        self._lock = threading.Lock()  # guards the fields below; held for a few additions only
        self._outages: dict[int, Outage] = {}  # by the tier's place
        self._failed_requests = 0
        self._ended: deque[list[int]] = deque(maxlen=_BUCKETS)  # requests, oldest first: time, succeeded, failed

    def succeeded(self, requests: int = 1) -> None:
        """Count requests that were answered."""
        with self._lock:
            self._count(requests, 0)

    def request_failed(self, error: Exception) -> None:
        """Count a request that was not answered, unless the request itself is the reason."""
        if isinstance(error, HotrowError) and not isinstance(error, StoreError | DeviceFaultError):
            return
        with self._lock:
            self._failed_requests += 1
            self._count(0, 1)

    def tier_failed(self, in_tier: "TierTable", error: StoreError) -> None:
        """Note that a tier did not answer a call for a table."""
        # A tier that has lost its rows, or whose disk is damaged, was reached.
        fault = "does not answer" if isinstance(error, StoreUnreachableError) else "answers with errors"
        failed_s, depth, table = now_s(), in_tier.tier.depth, in_tier.table.name
        with self._lock:
            outage = self._outages.get(depth)
            if outage is None:
                outage = self._outages[depth] = Outage(self._tiers[depth], self._failed_requests, failed_s)
            outage.failed_s = failed_s
            outage.failing.add(in_tier)
            is_new = fault not in outage.logged
            outage.fault = fault
            outage.logged.add(fault)
        if is_new:
            about = outage.tier, fault, self._model, error.reason, table, self._consequence(depth)
            logger.error("tier %s %s, model %s: %s (table %r): %s", *about)

    def tier_recovered(self, in_tier: "TierTable") -> None:
        """Note that a tier has answered the keys of a failed call for a table."""
        with self._lock:
            outage = self._outages.get(in_tier.tier.depth)
            if outage is None:
                return
            outage.failing.discard(in_tier)
            outage.answered_s = now_s()
        self.end_outages()

    def end_outages(self) -> None:
        """End the outages that are over."""
        with self._lock:
            over = {depth: outage for depth, outage in self._outages.items() if outage.is_over()}
            self._outages = {depth: outage for depth, outage in self._outages.items() if depth not in over}
            failed = self._failed_requests
            if over:
                self._ended.clear()
        for outage in over.values():
            took_s, failures = outage.answered_s - outage.began_s, failed - outage.failed_before
            requests = "1 failed request" if failures == 1 else f"{failures:,} failed requests"
            logger.warning(
                "tier %s answers again, model %s: after %.1f s and %s", outage.tier, self._model, took_s, requests
            )

    def readiness(self) -> Readiness:
        """Whether requests can succeed, by what is known now, and with rows that are new enough."""
        return worst([self._of_tiers(), Readiness() if self.updates is None else self.updates()])

    def _of_tiers(self) -> Readiness:
        with self._lock:
            outages = list(self._outages.values())
            silent = [outage.silent() for outage in outages]
            slowest = self._outages.get(len(self._tiers) - 1)
            is_cut_off = slowest is not None and bool(slowest.silent())
            last = self._ended[-1][0] if is_cut_off and self._ended else int(now_s() / _BUCKET_S)
            minute = [bucket for bucket in self._ended if bucket[0] > last - _BUCKETS]
            succeeded, failed = (sum(bucket[place] for bucket in minute) for place in (1, 2))
        away = " and ".join(f"tier {outage.tier} {outage.fault}" for outage in outages)
        dead = set.intersection(*silent) if len(silent) == len(self._tiers) else set()
        if dead and not self.copies:
            return Readiness("not ready", f"{away}, table {min(dead)!r}")
        if failed > succeeded:
            reason = f"{failed:,} of {failed + succeeded:,} requests in a minute failed"
            return Readiness("not ready", f"{reason}: {away}" if away else reason)
        return Readiness("degraded", away) if outages else Readiness()

    def _count(self, succeeded: int, failed: int) -> None:
        """Count requests that have ended now; the lock is held."""
        time = int(now_s() / _BUCKET_S)
        if not self._ended or self._ended[-1][0] != time:
            self._ended.append([time, 0, 0])
        self._ended[-1][1] += succeeded
        self._ended[-1][2] += failed

    def _consequence(self, depth: int) -> str:
        """Return the effect on the model's requests while a tier does not answer."""
        slower, front = self._tiers[depth + 1 :], [*(["a GPU cache"] if self.copies else []), *self._tiers[:depth]]
        if slower:
            return f"requests succeed with the rows of {' and '.join(slower)}"
        if self.copies and self._answers_early:
            return "requests get default values for rows that the GPU caches miss, or fail with 503"
        if front:
            return f"requests fail with 503, unless {' or '.join(front)} has all of their rows"
        return "every request fails with 503"
