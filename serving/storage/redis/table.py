"""One table of a ``RedisStore``: the commands that read and change its rows."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.errors import without_frames
from serving.metrics import MetricSample
from serving.storage.hps_layout import key_list, storable
from serving.storage.marker import Marker
from serving.storage.redis import marker as scripts
from serving.storage.redis.commands import Command, Partition, RedisNodeError, hdel, header, plain
from serving.storage.redis.filling import Filling
from serving.storage.redis.logs import Logs
from serving.storage.redis.nodes import value_of
from serving.storage.redis.overflow import Overflow
from serving.storage.redis.rows import RedisRows
from serving.storage.redis.states import PartitionStates, Status
from serving.storage.store import (
    Batches,
    Change,
    Keys,
    LastingTable,
    Mask,
    Reached,
    StoreTable,
    TableSpec,
    Truth,
    Vectors,
)

if TYPE_CHECKING:
    from serving.storage.redis.store import RedisStore

logger = logging.getLogger(__name__)

SCAN_FIELDS = 1000
SAMPLE_FIELDS = 10
# A table that another program wrote is searched for partitions up to this many times the number of partitions.
MOST_TIMES_PARTITIONS = 4


class RedisTable(LastingTable):
    """A table of all partitions of one name. A public method raises the errors of nodes as StoreError.

    Attributes:
        partitions: its partitions.
        rows: how its rows are encoded.
        overflow: the overflow policy, if there is one.
        evicted_rows: rows that this process evicted as partitions overflowed.
        unreleased: commands that release leases of a filling that failed, because its node was silent.
    """

    store: "RedisStore"

    def __init__(self, store: "RedisStore", spec: TableSpec) -> None:
        """Name the partitions; ask no node."""
        super().__init__(store, spec)
        config = store.config
        self.rows = RedisRows(spec, config)
        self.partitions = self.rows.partitions
        self.overflow = Overflow(store.nodes, config.overflow) if config.overflow else None
        self.evicted_rows = 0
        self.unreleased: list[Command] = []
        self._is_open = False
        self._lock = threading.Lock()  # guards changes of ``evicted_rows``
        # What this process knows of the partitions, and how far they have come in logs; both begin again with a load.
        self._states, self._logs = self._unknown()

    @property
    def capacity_rows(self) -> int | None:
        """See ``StoreTable.capacity_rows``; with an overflow policy, the margins of all partitions together."""
        self._require_open()
        return None if self.overflow is None else self.overflow.rule.margin_rows * len(self.partitions)

    def open(self, rows: int) -> None:
        """See ``StoreTable.open``; samples a few rows of each partition.

        Raises:
            StoreError: also if the table was written with another ``num_partitions``.
        """
        self.store.check_name(self)
        with self._translated():
            numbers = range(len(self.partitions))
            self.check(numbers)
            self._states.verify(numbers)
        self._opened()
        self.store.log_opened(self)

    def count(self) -> int:
        """See ``StoreTable.count``."""
        self._require_open()
        with self._translated():
            return sum(self.store.nodes.run([plain("HLEN", partition.values) for partition in self.partitions]))

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``StoreTable.fetch``; a cache does not find keys of invalid partitions."""
        self._require_open()
        self._check_dim(out.shape[1])
        fits, found = storable(keys, self.spec.key_bytes), np.zeros(keys.size, dtype=np.bool_)
        with self._translated():
            if fits is None and out.flags.c_contiguous:
                self._fetch(keys, out, found)
                self._touch(keys[found])
                return found
            wanted = np.flatnonzero(fits) if fits is not None else np.arange(keys.size)
            rows, hits = np.empty((wanted.size, self.spec.dim), dtype=np.float32), np.empty(wanted.size, dtype=np.bool_)
            self._fetch(keys[wanted], rows, hits)
            self._touch(keys[wanted[hits]])
        out[...], out[wanted], found[wanted] = 0.0, rows, hits
        return found

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """See ``StoreTable.insert``; when it fails, some of the rows may have been written."""
        self._check_rows(keys, rows)

        def insert(part: slice) -> None:
            groups = self.rows.words(keys[part], rows[part])
            self._change(groups, "HSET", 2)
            with suppress(RedisNodeError):  # Redis has the rows; the next insert trims
                self._trim(keys[part], sorted({number for number, _ in groups}))

        with self._translated():
            self._in_rounds(self.rows.rounds(keys.size, self.rows.codec.value_bytes), insert)

    def insert_absent(self, keys: Keys, rows: Vectors) -> int:
        """See ``StoreTable.insert_absent``; Redis itself decides which keys are absent, in valid partitions."""
        self._check_rows(keys, rows)
        added = 0
        with self._translated():
            for part in self.rows.rounds(keys.size, self.rows.codec.value_bytes):
                groups = self.rows.words(keys[part], rows[part])
                valid = [(number, words) for number, words in groups if self._states.is_valid(number)]
                commands = [scripts.add(self.partitions[number], words) for number, words in valid]
                touches = [command for number, words in valid for command in self._touches(number, words)]
                added += sum(self.store.nodes.run([*commands, *touches])[: len(commands)])
                self._trim(keys[part], sorted({number for number, _ in valid}))
        return added

    def evict(self, keys: Keys) -> None:
        """See ``StoreTable.evict``; also removes the keys from HPS's hash for overflow policies."""
        self._require_open()
        fits = storable(keys, self.spec.key_bytes)
        keys = keys if fits is None else keys[fits]

        def evict(part: slice) -> None:
            self._change(self.rows.fields(keys[part]), "HDEL", 1)

        with self._translated():
            self._in_rounds(self.rows.rounds(keys.size, self.spec.key_bytes), evict)

    def items(self, batch_rows: int = 65536) -> Batches:
        """See ``StoreTable.items``; while others write, a row may come twice."""
        self._require_open()
        with self._translated():
            for number in range(len(self.partitions)):
                yield from self.partition_items(number, batch_rows)

    def close(self) -> None:
        """See ``StoreTable.close``; asks no node."""
        self._is_open = False
        self.store.remove(self)

    def erase(self) -> None:
        """Remove every row and everything that belongs to it; the table need not be open."""
        with self._translated():
            self._unlink(self.partitions)
            self.drop_beyond()

    def marker(self) -> Marker | None:
        """See ``LastingTable.marker``; None if a partition has lost its marker."""
        with self._translated():
            return self._states.marker()

    def load(self, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """See ``LastingTable.load``; each partition changes in one instant.

        Processes that share the table can still read. Redis needs room for the old and the new rows together. A process
        that loads the same files waits for this load.

        Raises:
            StoreUnreachableError: another process holds the lease too long, or took it.
        """
        self.store.check_name(self)
        states, logs = self._unknown()
        states.wanted = marker
        with self._translated():
            Filling(self, states).load(batches, marker, keep=keep)
        self._states, self._logs = states, logs
        self._opened()
        self.store.log_opened(self)

    def write_flags(self, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None) -> None:
        """See ``LastingTable.write_flags``; Redis does not keep ``current_caches``.

        A partition that cannot be reached has missed the change.
        """
        self._require_open()
        if not changed:
            return
        states = self._states
        with self._translated():
            if states.truth is not None:
                states.note_written()
            written = [number for number in range(len(self.partitions)) if states.takes_writes(number)]
            commands = [scripts.set_changed(self.partitions[at]) for at in written]
            states.settle(written, self.store.nodes.run_identified(commands))

    def serve_as_cache(self, truth: Truth, *, keeps_rows: bool = False) -> None:
        """See ``LastingTable.serve_as_cache``."""
        states, logs = self._unknown()
        states.truth = truth
        if not keeps_rows:
            states.wanted = truth.marker()
            states.mark(range(len(self.partitions)), Status.INVALID, "it has not been filled yet")
        self._states, self._logs = states, logs
        self._opened()

    def fill(self, truth: Truth, *, starting: bool) -> bool:
        """See ``LastingTable.fill``."""
        self._require_open()
        with self._translated():
            self._states.wanted = truth.marker()
            was_written = Filling(self, self._states).fill(truth, starting=starting)
        if starting:
            self.store.log_spread(self)
        return was_written

    def reached(self) -> Mapping[str, str]:
        """See ``LastingTable.reached``."""
        self._require_open()
        with self._translated():
            return self._logs.reached()

    def write(self, change: Change[StoreTable], reached: Reached | None = None) -> None:
        """See ``Store.write``; with ``reached``, each partition gets its rows and the state in one step, or neither."""
        if reached is None:
            return super().write(change)
        self._require_open()
        if change.rows is not None:
            self._check_rows(change.keys, change.rows)
        elif (fits := storable(change.keys, self.spec.key_bytes)) is not None:
            change = change._replace(keys=change.keys[fits])
        with self._translated():
            self._logs.write(change, reached)

    @property
    def is_truth(self) -> bool:
        """Whether no slower tier has the rows."""
        return self._states.truth is None

    @property
    def is_whole(self) -> bool:
        """See ``LastingTable.is_whole``."""
        return self.is_truth or self._states.is_whole

    def samples(self) -> Iterator[MetricSample]:
        """See ``StoreTable.samples``."""
        help_text = "Partitions of a table that a Redis node holds."
        for node, count in self.spread().items():
            yield MetricSample("hotrow_redis_partitions", help_text, (("node", node),), count, is_gauge=True)
        if self.overflow is not None:
            yield MetricSample("hotrow_tier_evicted_rows", "Rows that overflows evicted.", (), self.evicted_rows)

    def spread(self) -> Mapping[str, int]:
        """By node, ``"host:port"``, how many of the partitions it holds, as far as this process knows."""
        with suppress(RedisNodeError):
            return self.store.nodes.topology.spread([partition.values for partition in self.partitions])
        return {}

    def check(self, numbers: Sequence[int]) -> None:
        """Look at some rows of partitions: their widths, and whether each is in the partition of its key."""
        scans = [plain("HSCAN", self.partitions[at].values, 0, "COUNT", SAMPLE_FIELDS) for at in numbers]
        count = len(self.partitions)
        others = [Partition(self.spec.name, at).values for at in range(count, MOST_TIMES_PARTITIONS * count)]
        replies = self.store.nodes.run([*scans, *(plain("EXISTS", values) for values in others)])
        for number, (_, fields) in zip(numbers, replies, strict=False):
            keys, _ = self.rows.decoded(fields)
            places = self.partitions.places(keys)
            if (places != number).any():
                at = int(np.argmax(places != number))
                reason = f"holds key {keys[at]} in partition {number}, but with {count} it belongs in {places[at]}"
                raise self._error(f"{reason}: num_partitions differs from the one that the table was written with")
        if any(replies[len(scans) :]):
            raise self._error(f"was written with more than {count} partitions: num_partitions differs")

    def drop_beyond(self) -> None:
        """Remove the partitions that a load with a larger number of partitions left."""
        count, first = len(self.partitions), len(self.partitions)
        while self._unlink(Partition(self.spec.name, number) for number in range(first, first + count)):
            first += count

    def partition_items(self, number: int, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """All rows of a partition, each key once."""
        yield from self.rows.batches(self._scanned(self.partitions[number], batch_rows), batch_rows)

    def _fetch(self, keys: Keys, out: Vectors, found: Mask) -> None:
        """Read rows of int64[N] keys that fit the table, into contiguous ``out`` and ``found``."""
        for part in self.rows.rounds(keys.size, self.rows.codec.value_bytes):
            again = self._fetch_round(keys[part], out[part], found[part])
            if not again.size:
                continue
            rows, hits = np.empty((again.size, self.spec.dim), np.float32), np.empty(again.size, np.bool_)
            unread = self._fetch_round(keys[part][again], rows, hits)
            if unread.size and self.is_truth:
                raise self._error("its partitions are moving or being loaded; ask again")
            rows[unread], hits[unread] = 0.0, False
            out[part][again], found[part][again] = rows, hits

    def _fetch_round(self, keys: Keys, out: Vectors, found: Mask) -> NDArray[np.intp]:
        """Read rows; returns the places of keys whose partitions another load or node has now: ask again for these."""
        known = self._states
        order, groups = self.rows.groups(keys)
        states = known.verified(sorted({group.partition for group in groups}))
        valid = [at for at, state in states.items() if state.status is Status.VALID]
        if len(valid) < len(states):
            out[...], found[...] = 0.0, False
            groups = [group for group in groups if states[group.partition].status is Status.VALID]
        places = [order[group.begin : group.end] for group in groups]
        generations = [plain("HGET", self.partitions[at].marker, "generation") for at in valid]
        replies = self.store.nodes.run_each([*self.rows.reads(keys, out, order, groups), *generations])
        # Asked for after the rows, on the same connection: newer rows come with the generation that says so.
        stale = {
            at
            for at, reply in zip(valid, replies[len(groups) :], strict=True)
            if (_text(value_of(reply)), reply.run_id) != (states[at].generation, states[at].run_id)
        }
        for group, at, reply in zip(groups, places, replies, strict=False):
            values = value_of(reply)
            found[at] = True if values is None else self.rows.fill(keys, values, out, at)
            if reply.run_id != states[group.partition].run_id:
                stale.add(group.partition)
        known.doubt(stale)
        again = [at for group, at in zip(groups, places, strict=True) if group.partition in stale]
        return np.concatenate(again) if again else np.empty(0, dtype=np.intp)

    def _in_rounds(self, rounds: Iterator[slice], change: Callable[[slice], None]) -> None:
        """Make every round of a change, also after a round failed: a cache must know all partitions that missed it."""
        failures = list[RedisNodeError]()
        for part in rounds:
            try:
                change(part)
            except RedisNodeError as err:
                if self.is_truth:
                    raise
                failures.append(without_frames(err))
        if failures:
            raise without_frames(failures[0])

    def _change(self, groups: Sequence[tuple[int, NDArray[np.uint8]]], name: str, words_per_row: int) -> None:
        """Insert or remove rows."""
        known = self._states
        if known.truth is None:
            return self._change_truth(groups, name, words_per_row)
        groups = [(number, words) for number, words in groups if known.takes_writes(number)]
        commands, notes = [], []
        for number, words in groups:
            partition = self.partitions[number]
            head = header(name.encode(), partition.values, 2 + words_per_row * len(words))
            commands.append(Command(name, partition.values, head + words.tobytes()))
            if name == "HDEL":  # noted before the rows go: a process that fills the partition must not add them again
                notes += [(number, command) for command in scripts.note_removed(partition, words)]
        extras = self._extras(groups, name)
        numbers = [number for number, _ in (*notes, *groups, *extras)]
        replies = self.store.nodes.run_identified(
            [*(command for _, command in notes), *commands, *(command for _, command in extras)]
        )
        known.settle(numbers, replies)

    def _change_truth(self, groups: Sequence[tuple[int, NDArray[np.uint8]]], name: str, words_per_row: int) -> None:
        for _ in range(2):
            states = self._states.verified(sorted({number for number, _ in groups}))
            commands = [
                scripts.change(self.partitions[at], states[at].generation or "", name, words, words_per_row)
                for at, words in groups
            ]
            extras = [command for _, command in self._extras(groups, name)]
            replies = self.store.nodes.run([*commands, *extras])
            groups = [group for group, is_changed in zip(groups, replies, strict=False) if not is_changed]
            if not groups:
                return
            self._states.doubt({number for number, _ in groups})
        raise self._error("another process is loading it; ask again")

    def _extras(self, groups: Sequence[tuple[int, NDArray[np.uint8]]], name: str) -> list[tuple[int, Command]]:
        """What else belongs to a change, by partition: an overflow policy's uses of the keys."""
        if name == "HSET":
            return [(number, command) for number, words in groups for command in self._touches(number, words)]
        return [(number, hdel(self.partitions[number].times, words)) for number, words in groups]

    def _touches(self, number: int, words: NDArray[np.uint8]) -> list[Command]:
        if self.overflow is None:
            return []
        return self.overflow.touches(self.partitions[number].times, words[:, : self.rows.field_bytes])

    def _trim(self, keys: Keys, filled: Sequence[int]) -> None:
        """Let the overflow policy, if there is one, evict rows of partitions; ``keys`` go last."""
        if self.overflow is None:
            return
        places = self.partitions.places(keys)
        inserted = [set(key_list(keys[places == number], self.spec.key_bytes)) for number in filled]
        evicted = self.overflow.trim([self.partitions[number] for number in filled], inserted)
        with self._lock:
            is_first = bool(evicted) and not self.evicted_rows
            self.evicted_rows += evicted
        if is_first:
            logger.warning("%s: redis reached volatile_db.overflow_margin: %s rows evicted", self.spec.name, evicted)

    def _unlink(self, partitions: Iterable[Partition]) -> int:
        names = [
            (partition.values, partition.times, partition.marker, partition.lease, partition.removed)
            for partition in partitions
        ]
        return sum(int(count) for count in self.store.nodes.run([plain("UNLINK", *keys) for keys in names]))

    def _scanned(self, partition: Partition, batch_rows: int) -> Iterator[Mapping[bytes, bytes]]:
        cursor = -1
        while cursor:
            scan = plain("HSCAN", partition.values, max(cursor, 0), "COUNT", min(batch_rows, SCAN_FIELDS))
            ((cursor, page),) = self.store.nodes.run([scan])
            yield page

    def _touch(self, keys: Keys) -> None:
        """Report to the overflow policy, in the background, that these keys were found."""
        if self.overflow is not None and self.overflow.is_touched_by_fetches and keys.size:
            self.store.touches.submit(partial(self._touch_now, keys))

    def _touch_now(self, keys: Keys) -> None:
        with suppress(RedisNodeError):  # a use that is not counted costs no answer
            for part in self.rows.rounds(keys.size, self.spec.key_bytes):
                groups = self.rows.fields(keys[part])
                touches = [command for number, fields in groups for command in self._touches(number, fields)]
                self.store.nodes.run(touches)

    def _unknown(self) -> tuple[PartitionStates, Logs]:
        states = PartitionStates(self.store.nodes, self.rows)
        logs = Logs(self.store.nodes, states, self.rows)
        if self.store.expects_logs:
            states.is_behind = logs.is_behind
        return states, logs

    def _opened(self) -> None:
        self.store.add(self)
        self._is_open = True

    def _require_open(self) -> None:
        if not self._is_open:
            raise self._not_open()

    def _check_rows(self, keys: Keys, rows: Vectors) -> None:
        self._require_open()
        self._check_dim(rows.shape[1])
        if storable(keys, self.spec.key_bytes) is not None:
            raise self._error(f"a key does not fit {self.spec.key_bytes} bytes")

    def _translated(self) -> AbstractContextManager[None]:
        return self.store.translated(self.spec.name)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
