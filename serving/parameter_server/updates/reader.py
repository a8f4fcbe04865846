"""The reader of one model's updates; see the package."""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.errors import HotrowError
from serving.config import ModelConfig
from serving.errors import (
    AdditionError,
    PositionLostError,
    RequestError,
    RowTypeError,
    StoreError,
    StoreFullError,
    UnknownModelError,
    did_you_mean,
    printable,
)
from serving.metrics import MetricSample
from serving.parameter_server.table import Table, show, write
from serving.parameter_server.updates.counters import UpdateCounters
from serving.parameter_server.updates.rejected import RejectedMessages
from serving.storage.hps_layout import tag
from serving.storage.rocksdb.table import RocksDbTable
from serving.storage.store import Change, Keys, LastingStore, Reached
from serving.stream import BadMessageError, Kind, Record, UpdateMessage, UpdateSource, decode, decode_hps
from serving.stream.log_state import LogState, behind, has_reached, publisher_of

logger = logging.getLogger(__name__)

# How often positions without rows are written, and everything is brought to the disk.
SYNC_INTERVAL_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
# From here on, a warning says that the source of truth will be full.
NEARLY_FULL_RATIO = 0.9
# So many changes of a table are shown before the view of a database that another process writes is opened again. An
# opening holds Python's lock for up to half a second, because RocksDB reads its log.
MANY_SHOWN_BYTES = 64 << 20
# How many changes of a table are shown at most, and how long the process that writes may take to apply them.
MOST_SHOWN_BYTES, WRITER_S = 256 << 20, 5.0
_LOG_INTERVAL_S = 10.0
_MAKE_ROOM = "raise update_source.update_headroom_ratio or the bound of the tier, and restart the process"
#: What ends a fault that does not end by itself.
_ADVICE: Mapping[type[Exception], str] = {
    PositionLostError: "serve a version whose manifest states a position that the log has",
    StoreFullError: _MAKE_ROOM,
}
_NO_KEYS: Keys = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class UpdateStream:
    """Where the updates of all models come from.

    Attributes:
        open: opens the log of a model. It is called again after a fault.
        filters: the regular expressions of ``update_filters``.
        rejected: keeps rejected messages; None: they are only counted and logged.
        poll_s: the most time that one read waits.
        max_staleness_s: a model whose rows may be older is not ready; None: no limit.
    """

    open: Callable[[ModelConfig], UpdateSource]
    filters: Sequence[str] = (".",)
    poll_s: float = 0.5
    max_staleness_s: float | None = None
    rejected: RejectedMessages | None = None

    def takes(self, model: str, table: str) -> bool:
        """Whether a filter matches the model's name, or the table's tag after HPS's prefix."""
        tagged = tag(f"{model}.{table}")
        return any(
            re.search(text, model) or re.search(text, tagged) or re.search(rf"^hps_et\.{text}\..+$", tagged)
            for text in self.filters
        )


class ModelUpdates:
    """Reads the update messages of one loaded model, in a thread of its own.

    Attributes:
        counters: what it has counted.
    """

    def __init__(self, config: ModelConfig, tables: Sequence[Table], stream: UpdateStream) -> None:
        """Begin to read.

        Args:
            config: the model.
            tables: its tables, loaded.
            stream: the log.
        """
        self.counters = UpdateCounters(stream.max_staleness_s)
        tables[0].health.updates = self.counters.readiness
        self._config = config
        self._stream = stream
        self._tables = {served.name: table for served, table in zip(config.tables, tables, strict=True)}
        self._truth = tables[0].truth
        positions = () if config.stream is None else config.stream.positions
        self._started = {partition: LogState(position) for partition, position in positions}
        # By table and partition. Of a truth that keeps them, what it keeps.
        self._reached = {name: self._with_kept(table.truth.reached) for name, table in self._tables.items()}
        # By partition: where the reader is. It begins where the first of the tables is.
        self._logs = {
            partition: min((states.get(partition, LogState()) for states in self._reached.values()), key=_order)
            for partition in {partition for states in self._reached.values() for partition in states}
        }
        self._source: UpdateSource | None = None
        self._closing = threading.Event()
        self._logged_s: dict[str, float] = {}
        self._logged_faults: set[type[Exception]] = set()
        self._failed: dict[str, str] = {}  # the position of the record that failed last, by partition
        self._nearly_full: set[str] = set()
        self._answered_keys: list[int] = []  # of each table, when the last message was applied
        self._rotated: Mapping[str, LogState] = {}  # where the log was when the old shown changes ended
        name = f"hotrow-updates-{config.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def positions(self) -> dict[str, str]:
        """How far the log has been applied, by partition."""
        return {partition: state.position for partition, state in list(self._logs.items())}

    def behind(self, config: ModelConfig) -> str:
        """What the tables of a version have not reached of the positions that its manifest states; empty if nothing."""
        return "" if config.stream is None else behind(self.positions, dict(config.stream.positions))

    def samples(self) -> Iterator[MetricSample]:
        """The counts as metric samples."""
        yield from self.counters.samples((("model", self._config.name), ("version", str(self._config.version))))

    def document(self) -> dict[str, Any]:
        """What people see of the updates, see ``docs/updates.md``."""
        return self.counters.document(self.positions)

    def close(self, timeout_s: float | None = None) -> None:
        """End the reader after the message that it is applying. Closing twice is allowed."""
        self._closing.set()
        source = self._source
        if source is not None:
            source.close()  # ends a read that waits
        self._thread.join(timeout_s)

    def _run(self) -> None:
        # The thread has the priority of requests. With a lower one, other work would take the processor while this
        # thread holds Python's global lock, and requests would wait for both.
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                self._follow()
            except Exception as err:  # noqa: BLE001 - it is logged, and the reader must not end
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if self.counters.fault else FIRST_PAUSE_S
                self._interrupted(err)
            self._closing.wait(pause_s)

    def _follow(self) -> None:
        """Read and apply until the reader is closed, or until something does not answer."""
        lasting = self._truth.lasting
        if lasting is not None and self._truth.writes:
            self._look_at_truth(lasting.store)
        with closing(self._stream.open(self._config)) as source:
            self._source = source
            logs = {partition: state for partition, state in self._logs.items() if state.position}
            last = {partition: state.last for partition, state in logs.items() if state.last is not None}
            source.start({partition: state.position for partition, state in logs.items()}, last)
            looked_s = float("-inf")
            while not self._closing.is_set():
                records = source.poll(self._stream.poll_s)
                for number, record in enumerate(records, 1):
                    try:
                        self._take(record)
                    except Exception:
                        self._failed = {record.partition: record.position}
                        self._count_waiting(source, records[number - 1 :])
                        raise
                    if self._closing.is_set():
                        return
                    if self._must_look(looked_s):  # small messages of one read may take long
                        self._look(source, records[number:])
                        looked_s = time.monotonic()
                if not records:
                    self._count_waiting(source, records)
                    if self._must_look(looked_s):
                        self._look(source, records)
                        looked_s = time.monotonic()

    def _look_at_truth(self, store: LastingStore) -> None:
        """Ask how far the tables are: a write that failed may be there.

        A store that other processes write too may be ahead of the caches here, which still miss the records in between.
        Or it has lost rows, and the records that brought them are read again.
        """
        for name, table in self._tables.items():
            kept = self._with_kept({} if table.truth.lasting is None else table.truth.lasting.reached())
            if store.has_one_writer:
                self._reached[name] = kept
                continue
            self._reached[name] = {
                partition: min(state, self._logs.get(partition, LogState()), key=_order)
                for partition, state in kept.items()
            }
            for partition, log in self._logs.items():
                self._logs[partition] = min(log, self._reached[name].get(partition, LogState()), key=_order)

    def _must_look(self, looked_s: float) -> bool:
        return time.monotonic() >= looked_s + SYNC_INTERVAL_S or (bool(self.counters.fault) and self._is_past_failure)

    @property
    def _is_past_failure(self) -> bool:
        """Whether the record that failed is applied now: records before it may be read again and succeed."""
        return not behind(self.positions, self._failed)

    def _look(self, source: UpdateSource, waiting: Sequence[Record]) -> None:
        """Count what waits, and bring everything that was applied to the disk."""
        self._count_waiting(source, waiting)
        self._warn_of_room()
        self._sync()
        source.commit(self.positions)
        self._resumed()

    def _count_waiting(self, source: UpdateSource, waiting: Sequence[Record]) -> None:
        """Count the records in the log and those that were read and not applied."""
        lags = Counter(source.lag())
        lags.update(record.partition for record in waiting)
        self.counters.lag(lags)

    def _with_kept(self, kept: Mapping[str, str]) -> dict[str, LogState]:
        """Where a table is in each partition: what its truth keeps, otherwise where the model's files are."""
        return {**self._started, **{partition: LogState.read(text) for partition, text in kept.items()}}

    def _take(self, record: Record) -> None:
        """Apply one record, or skip it, or reject it."""
        log = self._logs.get(record.partition, LogState())
        state = log.after(record)
        try:
            message = self._message(record)
            if message is not None:
                state = state.with_sequence(message)
                self._apply(record, message, log, state)
        except BadMessageError as err:
            self._reject(record, err.reason, str(err))
        self._logs[record.partition] = state
        self.counters.reached(record)

    def _message(self, record: Record) -> UpdateMessage | None:
        """Decode a record; None if it changes nothing.

        Raises:
            BadMessageError: it is not an update message.
        """
        if record.topic.startswith(tag("")):
            key_bytes = next(iter(self._tables.values())).spec.key_bytes
            return decode_hps(record.payload, record.topic, key_bytes, record.message_key)
        return decode(record.payload)

    def _apply(self, record: Record, message: UpdateMessage, log: LogState, state: LogState) -> None:
        """Write the rows of a message, if it is for this model and was not applied before.

        ``log`` is the log's state before the record, and ``state`` after it.

        Raises:
            BadMessageError: no server could take it.
            StoreError: the source of truth does not take it now.
        """
        if reason := self._why_skipped(record, message, log, state):
            return self.counters.skipped(reason)
        if message.kind is Kind.BARRIER:
            return self.counters.applied(record, message)
        table = self._tables[message.table]
        change = Change(table, message.keys, message.rows, adds=message.kind is Kind.ACCUMULATE)
        try:
            view = table.truth.view
            if view is None:
                gives_way = self._has_requests()
                write([change], Reached(record.partition, state.write(), not change.adds, gives_way))
            else:
                self._wait_for_writer(view)
                show(change, view, lambda reached: has_reached(reached, {record.partition: state}))
        except UnknownModelError:
            raise  # it was unloaded
        except (RequestError, AdditionError, RowTypeError) as err:
            raise BadMessageError("row", str(err)) from err
        self.counters.applied(record, message)
        return None

    def _has_requests(self) -> bool:
        """Whether lookups were answered since the last message."""
        before = self._answered_keys
        counts = (table.counting for table in self._tables.values())
        self._answered_keys = [count.requests.read(count.place)[0] for count in counts]
        return before != self._answered_keys

    def _why_skipped(self, record: Record, message: UpdateMessage, log: LogState, state: LogState) -> str:
        """Why a message does not change the model's rows; empty if it does.

        Raises:
            BadMessageError: the model has no such table.
        """
        stream, reached = self._config.stream, self._reached.get(message.table)
        if message.model != self._config.name:
            return "model"
        if message.run is not None and (stream is None or message.run != stream.run):
            return "run"
        if message.sequence is not None and message.sequence <= log.sequences.get(publisher_of(message), -1):
            return "repeated"
        if message.kind is Kind.BARRIER:
            return ""
        if reached is None:
            known = did_you_mean(message.table, self._tables)
            raise BadMessageError("table", f"model {message.model!r} has no table {message.table!r}{known}")
        if not self._stream.takes(message.model, message.table):
            return "filter"
        if state.order <= reached.get(record.partition, LogState()).order:
            return "repeated"
        return ""

    def _warn_of_room(self) -> None:
        """Log once that the source of truth of a table will be full."""
        for name, table in self._tables.items():
            used_ratio = table.truth.stored.used_ratio
            if used_ratio is not None and used_ratio >= NEARLY_FULL_RATIO and name not in self._nearly_full:
                self._nearly_full.add(name)
                logger.warning(
                    "table %r: the room for updates in tier %s is %.0f %% full; when it is full, updates stop: %s",
                    *(table.name, table.truth.tier.name, 100 * used_ratio, _MAKE_ROOM),
                )

    def _sync(self) -> None:
        """Write positions to tables that got no rows of late, and bring everything to the disk."""
        lasting = self._truth.lasting
        if lasting is None:
            return
        if not self._truth.writes:
            return self._renew_view(lasting.store)
        for partition, log in self._logs.items():
            # Not the tables that are ahead, after a crash: they would take the same records again.
            behind = [
                name for name, states in self._reached.items() if states.get(partition, LogState()).order < log.order
            ]
            changes = [Change(self._tables[name].truth.stored, _NO_KEYS, None) for name in behind]
            if changes:
                lasting.store.write(changes, Reached(partition, log.write()))
            for name in behind:
                self._reached[name][partition] = log
        lasting.store.sync()
        if lasting.store.has_one_writer:
            return
        logs = dict(self._logs)
        self._look_at_truth(lasting.store)
        if self._logs != logs:
            reason = "it has lost rows that updates had written: the log is read again from where it is"
            raise StoreError(lasting.store.name, "", reason)

    def _wait_for_writer(self, view: RocksDbTable) -> None:
        """Wait while too many changes are shown: a reader of the database is faster than the process that writes.

        Raises:
            StoreError: the process that writes does not apply them in time.
        """
        end_s = time.monotonic() + WRITER_S
        while view.shown_bytes >= MOST_SHOWN_BYTES and not self._closing.is_set():
            self._renew_view(view.store)
            if time.monotonic() >= end_s:
                reason = f"the process that writes is {view.shown_bytes:,} bytes of rows behind the update log"
                raise StoreError(view.store.name, view.spec.name, reason)
            self._closing.wait(0.1)

    def _renew_view(self, store: LastingStore) -> None:
        """Have this process's view of the database take over what is shown, before that becomes much."""
        views = [table.truth.view for table in self._tables.values()]
        shown = [view for view in views if view is not None and view.shown_bytes]
        if all(table.drop_shown(lambda reached: has_reached(reached, self._rotated)) for table in shown):
            if max((table.shown_bytes for table in shown), default=0) < MANY_SHOWN_BYTES:
                return
            for table in shown:
                table.rotate_shown()
            self._rotated = dict(self._logs)
        store.catch_up()
        for table in shown:
            table.drop_shown(lambda reached: has_reached(reached, self._rotated))

    def _reject(self, record: Record, reason: str, text: str) -> None:
        count = self.counters.rejected(reason)
        if self._stream.rejected is not None:
            self._stream.rejected.append(self._config.name, record, reason, text)
        if self._may_log(reason):
            where = f"{record.partition} before position {record.position}"
            logger.warning(
                "an update message of %s is skipped (%s, %s of this reason): %s",
                *(where, reason, f"{count:,}", printable(text)),
            )

    def _may_log(self, reason: str) -> bool:
        """Whether a line about ``reason`` is due: a stream of bad messages must not fill the log."""
        now_s = time.monotonic()
        if now_s < self._logged_s.get(reason, -_LOG_INTERVAL_S) + _LOG_INTERVAL_S:
            return False
        self._logged_s[reason] = now_s
        return True

    def _interrupted(self, err: Exception) -> None:
        if self._closing.is_set():
            return
        is_expected = isinstance(err, HotrowError)
        text = str(err) if is_expected else f"{type(err).__name__}: {err}"
        if advice := _ADVICE.get(type(err)):
            text += f"; {advice}"
        if type(err) not in self._logged_faults:  # a log that is back may have lost its records
            self._logged_faults.add(type(err))
            logger.error(
                "model %r gets no updates: %s; the rows that are there go on answering",
                *(self._config.name, text),
                exc_info=None if is_expected else err,
            )
        self.counters.fault = text

    def _resumed(self) -> None:
        if self.counters.fault and self._is_past_failure:
            logger.warning("model %r gets updates again", self._config.name)
            self.counters.fault = ""
            self._logged_faults.clear()
            self._failed = {}


def _order(state: LogState) -> tuple[int, ...]:
    return state.order
