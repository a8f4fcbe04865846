"""What a reader of updates counts, for metrics, the status page, answers and readiness."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from serving.metrics import Histogram, MetricSample
from serving.parameter_server.counters import Labels
from serving.parameter_server.health import Readiness
from serving.stream import Kind, Record, UpdateMessage

#: Upper bounds of the buckets of the time from publishing to visible, in seconds.
VISIBLE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)


class UpdateCounters:
    """What one model's reader counts. May be read from any thread.

    Attributes:
        fault: why the log is not being read now; empty while it is.
    """

    def __init__(self, max_staleness_s: float | None) -> None:
        """Start at zero; see ``UpdateStream``."""
        self.fault = ""
        self._max_staleness_s = max_staleness_s
        self._was_asked = False  # whether the log has said how many records wait
        self._lock = threading.Lock()  # guards the fields below
        self._rows = Counter[tuple[str, str]]()
        self._messages = Counter[str]()
        self._skipped = Counter[str]()
        self._rejected = Counter[str]()
        self._visible = Histogram(VISIBLE_BUCKETS_S)
        self._steps: dict[str, int] = {}
        self._times_ms: dict[str, int] = {}
        self._lags: Mapping[str, int] = {}  # by partition
        # Everything that was published until then is applied: by partition, and of all partitions. These are times of
        # this machine's monotonic clock, so a clock that is wrong or jumps later does not hide old rows.
        self._fresh_s: dict[str, float] = {}
        self._whole_s = time.monotonic()

    def applied(self, record: Record, message: UpdateMessage) -> None:
        """Count a message whose rows every lookup finds now."""
        with self._lock:
            self._messages[message.kind.value] += 1
            if message.kind is Kind.BARRIER:
                return
            self._rows[message.table, message.kind.value] += message.keys.size
            self._visible.observe(max(time.time() - record.time_ms / 1000, 0.0))
            if message.step is not None:
                self._steps[message.table] = max(message.step, self._steps.get(message.table, 0))
            newest_ms = message.time_ms if message.time_ms is not None else record.time_ms
            self._times_ms[message.table] = max(newest_ms, self._times_ms.get(message.table, 0))

    def skipped(self, reason: str) -> None:
        """Count a message that is not for this model, or that was applied before."""
        with self._lock:
            self._skipped[reason] += 1

    def rejected(self, reason: str) -> int:
        """Count a message that no server could take; returns how many there were of the same reason."""
        with self._lock:
            self._rejected[reason] += 1
            return self._rejected[reason]

    def reached(self, record: Record) -> None:
        """Note that everything up to a record of its partition is applied."""
        if not record.time_ms:  # unknown
            return
        fresh_s = time.monotonic() - max(time.time() - record.time_ms / 1000, 0.0)
        with self._lock:
            self._fresh_s[record.partition] = max(fresh_s, self._fresh_s.get(record.partition, fresh_s))

    def lag(self, records: Mapping[str, int]) -> None:
        """Note how many records have not been read, by partition."""
        now_s = time.monotonic()
        with self._lock:
            self._lags, self._was_asked = records, True
            self._fresh_s |= {partition: now_s for partition, count in records.items() if not count}
            if not self._lag:
                self._whole_s = now_s

    @property
    def _lag(self) -> int:
        return sum(self._lags.values())

    @property
    def staleness_s(self) -> float:
        """How old the model's rows may be: messages have been waiting since then, or nothing is known of the log."""
        with self._lock:
            fault, now_s = self.fault, time.monotonic()
            waiting = [partition for partition, count in self._lags.items() if count or fault]
            whole_s = self._whole_s if fault and not waiting else now_s
            return now_s - min((self._fresh_s.get(partition, self._whole_s) for partition in waiting), default=whole_s)

    def freshness(self) -> dict[str, int]:
        """How new the model's rows are, for an answer's parameters. Nothing is known of tables without an update."""
        staleness_s = self.staleness_s
        with self._lock:
            found = {"lag_messages": self._lag, "lag_ms": round(1000 * staleness_s)}
            if self._steps:
                found["newest_step"] = max(self._steps.values())
            if self._times_ms:
                found["newest_time_ms"] = max(self._times_ms.values())
        return found

    def document(self, positions: Mapping[str, str]) -> dict[str, Any]:
        """The counts for the status document; ``positions`` say how far each partition was read."""
        staleness_s = self.staleness_s
        with self._lock:
            names = sorted(self._times_ms)
            return {
                "fault": self.fault,
                "lag_messages": self._lag,
                "lag_s": staleness_s,
                "visible_times": self._visible.document(),
                "applied": dict(self._messages),
                "skipped": dict(self._skipped),
                "rejected": dict(self._rejected),
                "tables": [
                    {"name": name, "step": self._steps.get(name), "time_ms": self._times_ms[name]} for name in names
                ],
                "partitions": [
                    {"name": name, "position": positions.get(name, ""), "lag_messages": self._lags.get(name)}
                    for name in sorted(positions.keys() | self._lags)
                ],
            }

    def readiness(self) -> Readiness:
        """Whether the rows are new enough to answer requests."""
        fault, staleness_s, most_s = self.fault, self.staleness_s, self._max_staleness_s
        if most_s is not None and (staleness_s > most_s or not self._was_asked):
            is_old = f"its rows are {staleness_s:.0f} s old, more than"
            may_be_old = "its update log has not answered yet, so its rows may be older than"
            reason = f"{is_old if self._was_asked else may_be_old} max_staleness_s, {most_s:g}"
            return Readiness("not ready", f"{reason}: {fault}" if fault else reason)
        return Readiness("degraded", f"no updates: {fault}") if fault else Readiness()

    def samples(self, labels: Labels) -> Iterator[MetricSample]:
        """The counts, with the labels of the model."""
        with self._lock:
            rows, skipped, rejected = self._rows.copy(), self._skipped.copy(), self._rejected.copy()
            messages = self._messages.copy()
            steps, times_ms, visible = dict(self._steps), dict(self._times_ms), self._visible.copy()
            lag = self._lag
        yield MetricSample(
            "hotrow_updates_up", "1 while a model's update source is being read.", labels, int(not self.fault), True
        )
        yield MetricSample("hotrow_update_lag_messages", "Update messages not read yet.", labels, lag, True)
        help_text = "How old a model's rows may be: 0 while no update message waits."
        yield MetricSample("hotrow_update_lag_seconds", help_text, labels, self.staleness_s, True)
        help_text = "Time from the publication of an update message until every lookup finds its rows."
        yield MetricSample("hotrow_update_visible_seconds", help_text, labels, visible)
        for kind, count in messages.items():
            help_text = "Update messages that were applied."
            yield MetricSample("hotrow_update_messages", help_text, (*labels, ("kind", kind)), count)
        for (table, kind), count in rows.items():
            where = (*labels, ("table", table), ("kind", kind))
            yield MetricSample("hotrow_update_rows", "Rows that update messages changed.", where, count)
        for reason, count in rejected.items():
            help_text = "Update messages that no server could take."
            yield MetricSample("hotrow_update_rejected", help_text, (*labels, ("reason", reason)), count)
        for reason, count in skipped.items():
            help_text = "Update messages for other models or training runs, or that were applied before."
            yield MetricSample("hotrow_update_skipped", help_text, (*labels, ("reason", reason)), count)
        for table, step in steps.items():
            help_text = "The trainer's newest step whose rows a table has."
            yield MetricSample("hotrow_update_step", help_text, (*labels, ("table", table)), step, True)
        for table, time_ms in times_ms.items():
            help_text = "When the newest rows of a table were trained, as a Unix time."
            where = (*labels, ("table", table))
            yield MetricSample("hotrow_update_time_seconds", help_text, where, time_ms / 1000, True)
