"""One embedding table in Redis: the state of its partitions, and the commands that read and change its rows."""

import enum
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernels.host import KeyIndex
from serving.config import RedisConfig
from serving.storage.hps_layout import key_list
from serving.storage.redis import marker as scripts
from serving.storage.redis.commands import Command, Partition, RedisNodeError, encoded_fields, hdel, header, plain
from serving.storage.redis.marker import PartitionMarker
from serving.storage.redis.nodes import Reply, value_of
from serving.storage.redis.overflow import Overflow
from serving.storage.redis.partitions import Group, Partitions
from serving.storage.redis.rows import RedisRows
from serving.storage.store import Keys, Marker, Mask, TableSpec, Truth, Vectors

if TYPE_CHECKING:
    from serving.storage.redis.nodes import RedisNodes  # needs redis-py

logger = logging.getLogger(__name__)

SCAN_FIELDS = 1000
SAMPLE_FIELDS = 10


class Status(enum.Enum):
    """What this process knows of a partition."""

    VALID = "it holds the table's rows"
    UNKNOWN = "its marker must be read"
    INVALID = "its rows may be old or missing"
    FILLING = "it is being filled; changes are written to it"
    MISSED = "it missed a write; it takes no writes until it is filled again"
    FOREIGN = "it was loaded from other files"


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition as this process last saw it.

    Attributes:
        status: what is known.
        generation: of the marker when the partition was last valid; None: it had no marker, or was never valid.
        run_id: of the node when the partition was last valid.
        reason: why it is not valid.
    """

    status: Status = Status.UNKNOWN
    generation: str | None = None
    run_id: str = ""
    reason: str = ""


class RedisTable:
    """The rows of one table. Every method may be called from any thread.

    Every method raises RedisNodeError where a node does not answer, and StoreError where Redis does not hold such a
    table.

    Attributes:
        spec: the table.
        partitions: its partitions.
        rows: how its rows are encoded.
        overflow: the overflow policy, if there is one.
        wanted: the marker that a load expects; None: the table was opened without a load, and is taken as it is.
        truth: the source of truth that Redis caches; None: Redis is the source of truth.
        unreleased: commands that release leases of a filling that failed, because its node was silent.
    """

    def __init__(self, nodes: "RedisNodes", config: RedisConfig, spec: TableSpec) -> None:
        """Name the partitions; asks nobody."""
        self.spec = spec
        self.partitions = Partitions(spec.name, config.num_partitions)
        self.rows = RedisRows(spec, config.row_dtype, config.max_batch_size)
        self.overflow = Overflow(nodes, config.overflow) if config.overflow else None
        self.wanted: Marker | None = None
        self.truth: Truth | None = None
        self.unreleased: list[Command] = []
        self.evicted_rows = 0  # by this process, as partitions overflowed; guarded by the lock
        self._nodes = nodes
        self._max_batch_size = config.max_batch_size
        self._is_written = False  # by this process
        self._lock = threading.Lock()  # guards changes of the states
        self._states = [PartitionState() for _ in self.partitions]  # each state is replaced as a whole

    @property
    def is_whole(self) -> bool:
        """Whether every partition is valid, as far as this process knows."""
        return all(state.status is Status.VALID for state in self._states)

    def state(self, number: int) -> PartitionState:
        """The state of a partition."""
        return self._states[number]

    def set_state(self, number: int, known: PartitionState, state: PartitionState) -> PartitionState:
        """Change a state that was ``known``, unless another thread has changed it since; returns the state now."""
        with self._lock:
            if self._states[number] is known:
                self._states[number] = state
            return self._states[number]

    def mark(self, numbers: Iterable[int], status: Status, reason: str) -> None:
        """Change the status of partitions; the last valid generation stays."""
        with self._lock:
            for number in numbers:
                self._states[number] = replace(self._states[number], status=status, reason=reason)

    def check(self, numbers: Sequence[int]) -> None:
        """Look at some rows of partitions: their widths, and whether each is in the partition of its key."""
        scans = [plain("HSCAN", self.partitions[at].values, 0, "COUNT", SAMPLE_FIELDS) for at in numbers]
        count = len(self.partitions)
        *replies, is_beyond = self._nodes.run([*scans, plain("EXISTS", Partition(self.spec.name, count).values)])
        for number, (_, held) in zip(numbers, replies, strict=True):
            keys, _ = self.rows.decoded(held)
            places = self.partitions.places(keys)
            if (places != number).any():
                at = int(np.argmax(places != number))
                reason = f"holds key {keys[at]} in partition {number}, of {count} it belongs in {places[at]}"
                raise self.rows.error(f"{reason}: num_partitions differs from the one that the table was written with")
        if is_beyond:
            raise self.rows.error(f"was written with more than {count} partitions: num_partitions differs")

    def markers(self) -> list[tuple[PartitionMarker | None, str]]:
        """The marker of each partition, and the identity of its node."""
        replies = self._nodes.run_each([scripts.read_marker(one) for one in self.partitions])
        return [(self._read(reply), reply.run_id) for reply in replies]

    def marker(self) -> Marker | None:
        """See ``Store.marker``; None where a partition has no marker or another one."""
        held = [marker for marker, _ in self.markers()]
        first = held[0]
        others = held[1 : first.partitions] if first else []  # fewer than here, perhaps, which ``judge`` refuses
        if first is None or any(
            one is None or (one.digest, one.row_dtype) != (first.digest, first.row_dtype) for one in others
        ):
            return None
        markers = [one for one in held if one is not None]
        rows, changed = sum(one.rows for one in markers), any(one.changed for one in markers)
        return Marker(first.digest, rows, first.row_dtype, changed)

    def count(self) -> int:
        """Rows held."""
        return sum(self._nodes.run([plain("HLEN", one.values) for one in self.partitions]))

    def fetch(self, keys: Keys, out: Vectors, found: Mask) -> None:
        """Read rows.

        Args:
            keys: int64[N], all of which the table's key width can hold.
            out: float32[N, D], contiguous; overwritten.
            found: bool[N]; overwritten.
        """
        for part in self.rows.rounds(keys.size, self.rows.codec.value_bytes):
            self._fetch_round(keys[part], out[part], found[part])

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite int64[N] keys and their float32[N, D] rows."""

        def insert(part: slice) -> int:
            groups = self.rows.words(self.partitions, keys[part], rows[part])
            count = self._change(groups, "HSET", 2)
            if self.overflow is not None:
                with suppress(RedisNodeError):  # Redis has the rows; the next insert trims
                    self._trim(self.overflow, keys[part], sorted({number for number, _ in groups}))
            return count

        self._in_rounds(self.rows.rounds(keys.size, self.rows.codec.value_bytes), insert)

    def add(self, keys: Keys, rows: Vectors) -> int:
        """Add rows whose keys are absent, to valid partitions; returns how many."""
        added = 0
        for part in self.rows.rounds(keys.size, self.rows.codec.value_bytes):
            groups = self.rows.words(self.partitions, keys[part], rows[part])
            valid = [(number, words) for number, words in groups if self._states[number].status is Status.VALID]
            commands = [scripts.add(self.partitions[number], words) for number, words in valid]
            touches = [command for number, words in valid for command in self._touches(number, words)]
            added += sum(self._nodes.run([*commands, *touches])[: len(commands)])
            if self.overflow is not None:
                self._trim(self.overflow, keys[part], sorted({number for number, _ in valid}))
        return added

    def evict(self, keys: Keys) -> int:
        """Remove keys, also from HPS's hash for overflow policies; returns how many were held."""

        def evict(part: slice) -> int:
            return self._change(self.rows.fields(self.partitions, keys[part]), "HDEL", 1)

        return self._in_rounds(self.rows.rounds(keys.size, self.spec.key_bytes), evict)

    def set_changed(self) -> None:
        """Note in every marker that rows change; a partition that cannot be reached has missed the change."""
        self._is_written = True
        written = [number for number in range(len(self.partitions)) if self._takes_changes(number)]
        self._settle(written, self._nodes.run_each([scripts.set_changed(self.partitions[at]) for at in written]))

    def drop(self) -> None:
        """Remove every row and everything that belongs to it."""
        self._unlink(self.partitions)
        self.drop_beyond()

    def drop_beyond(self) -> None:
        """Remove the partitions that a load with a larger number of partitions left."""
        count, first = len(self.partitions), len(self.partitions)
        while self._unlink(Partition(self.spec.name, number) for number in range(first, first + count)):
            first += count

    def items(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """All rows by partition, each key once, although Redis may return a key twice."""
        for number in range(len(self.partitions)):
            yield from self.partition_items(number, batch_rows)

    def partition_items(self, number: int, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """All rows of a partition, each key once."""
        yield from self.rows.batches(self._scanned(self.partitions[number], batch_rows), batch_rows, KeyIndex())

    def touch(self, keys: Keys) -> None:
        """Report to the overflow policy that these keys were found."""
        for part in self.rows.rounds(keys.size, self.spec.key_bytes):
            groups = self.rows.fields(self.partitions, keys[part])
            self._nodes.run([command for number, fields in groups for command in self._touches(number, fields)])

    @property
    def is_touched_by_fetches(self) -> bool:
        """Whether ``touch`` has an effect."""
        return self.overflow is not None and self.overflow.is_touched_by_fetches

    def verify(self, numbers: Sequence[int]) -> None:
        """Read the markers of partitions, and decide whether the partitions are valid."""
        for _ in range(2):  # after the first time, the nodes of slots that have moved are known
            if not numbers:
                return
            seen = [self._states[at] for at in numbers]
            replies = self._nodes.run_each([scripts.read_marker(self.partitions[at]) for at in numbers])
            for number, known, reply in zip(numbers, seen, replies, strict=True):
                marker = self._read(reply)
                if reply.run_id:
                    self.judge(number, known, marker, reply.run_id)
            numbers = [number for number, reply in zip(numbers, replies, strict=True) if not reply.run_id]

    def judge(self, number: int, known: PartitionState, marker: PartitionMarker | None, run_id: str) -> PartitionState:
        """Set and return the state of a partition whose state was ``known`` before its marker and node were read."""
        return self.set_state(number, known, self._judged(number, known, marker, run_id))

    def _judged(
        self, number: int, known: PartitionState, marker: PartitionMarker | None, run_id: str
    ) -> PartitionState:
        wanted, values = self.wanted, self.partitions[number].values.decode()
        row_dtype = self.rows.codec.row_dtype  # the truth's may be another
        if marker is not None:
            self.check_number(marker)
        if marker and wanted and (marker.digest, marker.row_dtype) != (wanted.digest, row_dtype):
            reason = f"{values} was loaded from other files ({marker.digest}, {marker.row_dtype}); this process uses "
            reason += f"{wanted.digest}, {row_dtype}: load the model again with the files that are to be served"
            return replace(known, status=Status.FOREIGN, reason=reason)
        if known.status in (Status.MISSED, Status.FILLING):  # its rows may be old, whatever its marker says
            return known
        if wanted is None and self.truth is not None:
            return self._judge_kept(number, known, marker, run_id)
        if marker is None:
            if wanted is None and known.generation is None:
                return PartitionState(Status.VALID, None, run_id)
            advice = "; load the model again: restart a server of this model" if self.truth is None else ""
            lost = f"{values} has no marker: it has lost its rows{advice}"
            return replace(known, status=Status.INVALID, reason=lost)
        if self.truth is not None and self._is_written and known.generation not in (None, marker.generation):
            return replace(known, status=Status.INVALID, reason=f"{values} was filled by another process")
        valid = PartitionState(Status.VALID, marker.generation, run_id)
        return valid if wanted is None else self._judge_node(number, known, marker, valid)

    def check_number(self, marker: PartitionMarker) -> None:
        """Refuse a partition of a table that was loaded with another number of partitions."""
        if marker.partitions != len(self.partitions):
            reason = f"it was loaded with {marker.partitions}, this process uses {len(self.partitions)}"
            raise self.rows.error(f"num_partitions differs: {reason}")

    def _judge_kept(
        self, number: int, known: PartitionState, marker: PartitionMarker | None, run_id: str
    ) -> PartitionState:
        """The state of a partition of a cache that keeps what it has: valid, unless its node may have lost writes."""
        has_moved = self._is_written and known.run_id not in ("", run_id)
        if has_moved and known.run_id not in self._nodes.topology.master_run_ids():
            reason = f"{self.partitions[number].values.decode()}: its node may have lost writes"
            return replace(known, status=Status.INVALID, reason=reason)
        return PartitionState(Status.VALID, marker.generation if marker else None, run_id)

    def _judge_node(
        self, number: int, known: PartitionState, marker: PartitionMarker, valid: PartitionState
    ) -> PartitionState:
        """``valid``, unless the partition was on another node, and this node may have lost writes."""
        former = {marker.run_id}
        if self._is_written and known.run_id:  # another process may have found the new node valid, for its own writes
            former.add(known.run_id)
        former.discard(valid.run_id)
        if former and self.truth is not None and not self._has_every_write(number, marker, former):
            reason = f"{self.partitions[number].values.decode()}: its node may have lost writes"
            return replace(known, status=Status.INVALID, reason=reason)
        if marker.run_id != valid.run_id:
            self._nodes.run([scripts.set_run_id(self.partitions[number], valid.run_id)])
        return valid

    def _has_every_write(self, number: int, marker: PartitionMarker, former: set[str]) -> bool:
        """Whether a partition that was on ``former`` nodes has lost no write."""
        if former <= self._nodes.topology.master_run_ids():  # those nodes live: the slot was moved
            return True
        if self._is_written or marker.changed or self.truth is None or self.truth.marker().changed:
            return False
        (rows,) = self._nodes.run([plain("HLEN", self.partitions[number].values)])
        return bool(rows == marker.rows)

    def _fetch_round(self, keys: Keys, out: Vectors, found: Mask, *, is_second: bool = False) -> None:
        order, groups = self.partitions.groups(keys, self._max_batch_size)
        touched = sorted({group.partition for group in groups})
        self.verify([at for at in touched if self._is_to_be_verified(at)])
        states = {at: self._states[at] for at in touched}
        self._refuse_lost_rows(states)
        valid = [at for at in touched if states[at].status is Status.VALID]
        if len(valid) < len(touched):
            out[...], found[...] = 0.0, False
            groups = [group for group in groups if states[group.partition].status is Status.VALID]
        places = [order[group.begin : group.end] for group in groups]
        replies = self._nodes.run_each(
            [*self._reads(keys, out, order, groups), *(scripts.read_generation(self.partitions[at]) for at in valid)]
        )
        # Asked for after the rows, on the same connection: newer rows come with the generation that says so.
        stale = {
            at
            for at, reply in zip(valid, replies[len(groups) :], strict=True)
            if (_text(value_of(reply)), reply.run_id) != (states[at].generation, states[at].run_id)
        }
        for group, at, reply in zip(groups, places, replies, strict=False):
            values = value_of(reply)
            if values is None:
                found[at] = True
            else:
                found[at] = self.rows.fill(keys, values, out, at)
            if reply.run_id != states[group.partition].run_id:
                stale.add(group.partition)
        if stale:
            self._doubt(stale)
            again = [at for group, at in zip(groups, places, strict=True) if group.partition in stale]
            self._fetch_again(np.concatenate(again), keys, out, found, is_second)

    def _fetch_again(self, at: NDArray[np.intp], keys: Keys, out: Vectors, found: Mask, is_second: bool) -> None:
        """Read rows of partitions that were not as expected; after a second time they count as not found."""
        rows, hits = np.zeros((at.size, out.shape[1]), dtype=np.float32), np.zeros(at.size, dtype=np.bool_)
        if not is_second:
            self._fetch_round(keys[at], rows, hits, is_second=True)
        elif self.truth is None:
            raise self.rows.error("its partitions are moving or being loaded; ask again")
        out[at], found[at] = rows, hits

    def _reads(self, keys: Keys, out: Vectors, order: NDArray[np.intp], groups: Sequence[Group]) -> list[Command]:
        fields = encoded_fields(keys[order], self.spec.key_bytes)
        commands = []
        for group in groups:
            one, at = self.partitions[group.partition], order[group.begin : group.end]
            payload = header(b"HMGET", one.values, at.size + 2) + fields[group.begin : group.end].tobytes()
            take, value_bytes = self.rows.taker(out, at), self.rows.codec.value_bytes
            commands.append(Command("HMGET", one.values, payload, take, at.size, value_bytes))
        return commands

    def _refuse_lost_rows(self, states: Mapping[int, PartitionState]) -> None:
        """Raise where Redis is the source of truth and a partition is not valid."""
        if self.truth is not None:
            return
        for state in states.values():
            if state.status is not Status.VALID:
                raise self.rows.error(state.reason or state.status.value)

    def _in_rounds(self, rounds: Iterator[slice], change: Callable[[slice], int]) -> int:
        """Make every round of a change, also after a round failed: a cache must know all partitions that missed it."""
        total, failures = 0, list[RedisNodeError]()
        for part in rounds:
            try:
                total += change(part)
            except RedisNodeError as err:
                if self.truth is None:
                    raise
                failures.append(err)
        if failures:
            raise failures[0]
        return total

    def _doubt(self, numbers: Iterable[int]) -> None:
        """Have the markers of valid partitions read again, because another load or node answered."""
        with self._lock:
            for number in numbers:
                if self._states[number].status is Status.VALID:
                    self._states[number] = replace(self._states[number], status=Status.UNKNOWN)

    def _is_to_be_verified(self, number: int) -> bool:
        """Whether a partition's marker must be read; a source of truth is valid again after any process loads it."""
        status = self._states[number].status
        return status is Status.UNKNOWN or (self.truth is None and status is not Status.VALID)

    def _takes_changes(self, number: int) -> bool:
        return self._states[number].status not in (Status.MISSED, Status.FOREIGN)

    def _change(self, groups: Sequence[tuple[int, NDArray[np.uint8]]], name: str, words_per_row: int) -> int:
        """Insert or remove rows; returns the sum of the replies."""
        if self.truth is None:
            return self._change_truth(groups, name, words_per_row)
        groups = [(number, words) for number, words in groups if self._takes_changes(number)]
        commands, notes = [], []
        for number, words in groups:
            one = self.partitions[number]
            head = header(name.encode(), one.values, 2 + words_per_row * len(words))
            commands.append(Command(name, one.values, head + words.tobytes()))
            if name == "HDEL":  # noted before the rows go: a process that fills the partition must not add them again
                notes += [(number, command) for command in scripts.note_removed(one, words)]
        extras = self._extras(groups, name)
        numbers = [number for number, _ in (*notes, *groups, *extras)]
        replies = self._nodes.run_each([*(one for _, one in notes), *commands, *(one for _, one in extras)])
        self._settle(numbers, replies)
        counts: list[int] = [reply.value for reply in replies[len(notes) : len(notes) + len(commands)]]
        return sum(counts)

    def _change_truth(self, groups: Sequence[tuple[int, NDArray[np.uint8]]], name: str, words_per_row: int) -> int:
        self._is_written, total = True, 0
        for _ in range(2):
            touched = sorted({number for number, _ in groups})
            self.verify([at for at in touched if self._is_to_be_verified(at)])
            self._refuse_lost_rows({at: self._states[at] for at in touched})
            commands = [
                scripts.change(
                    self.partitions[at], self._states[at].generation or "", name, words, words_per_row * len(words)
                )
                for at, words in groups
            ]
            extras = [command for _, command in self._extras(groups, name)]
            counts: list[int] = self._nodes.run([*commands, *extras])[: len(commands)]
            total += sum(max(count, 0) for count in counts)
            groups = [group for group, count in zip(groups, counts, strict=True) if count < 0]
            if not groups:
                return total
            self._doubt({number for number, _ in groups})
        raise self.rows.error("another process is loading it; ask again")

    def _settle(self, numbers: Sequence[int], replies: Sequence[Reply]) -> None:
        """Note which partitions missed a change; raise the first error."""
        failed = {
            at: reply.value
            for at, reply in zip(numbers, replies, strict=True)
            if isinstance(reply.value, RedisNodeError)
        }
        for number, error in failed.items():
            if self.truth is not None:
                self.mark(
                    [number], Status.MISSED, f"{self.partitions[number].values.decode()} missed a change: {error}"
                )
        moved = {
            at
            for at, reply in zip(numbers, replies, strict=True)
            if at not in failed and self._states[at].status is Status.VALID and reply.run_id != self._states[at].run_id
        }
        self._doubt(moved)
        for error in failed.values():
            raise error

    def _extras(self, groups: Sequence[tuple[int, NDArray[np.uint8]]], name: str) -> list[tuple[int, Command]]:
        """What else belongs to a change, by partition: an overflow policy's uses of the keys."""
        if name == "HSET":
            return [(number, command) for number, words in groups for command in self._touches(number, words)]
        return [(number, hdel(self.partitions[number].times, words)) for number, words in groups]

    def _touches(self, number: int, words: NDArray[np.uint8]) -> list[Command]:
        if self.overflow is None:
            return []
        return self.overflow.touches(self.partitions[number].times, words[:, : self.rows.field_bytes])

    def _trim(self, overflow: Overflow, keys: Keys, filled: Sequence[int]) -> None:
        places = self.partitions.places(keys)
        inserted = [set(key_list(keys[places == number], self.spec.key_bytes)) for number in filled]
        evicted = overflow.trim([self.partitions[number] for number in filled], inserted)
        with self._lock:
            is_first = bool(evicted) and not self.evicted_rows
            self.evicted_rows += evicted
        if is_first:
            logger.warning("%s: redis is full, volatile_db.overflow_margin: %s rows evicted", self.spec.name, evicted)

    def _unlink(self, partitions: Iterable[Partition]) -> int:
        names = [(one.values, one.times, one.marker, one.lease, one.removed) for one in partitions]
        return sum(int(count) for count in self._nodes.run([plain("UNLINK", *some) for some in names]))

    def _scanned(self, one: Partition, batch_rows: int) -> Iterator[Mapping[bytes, bytes]]:
        cursor = -1
        while cursor:
            scan = plain("HSCAN", one.values, max(cursor, 0), "COUNT", min(batch_rows, SCAN_FIELDS))
            ((cursor, some),) = self._nodes.run([scan])
            yield some

    def _read(self, reply: Reply) -> PartitionMarker | None:
        try:
            return PartitionMarker.read(value_of(reply))
        except ValueError as err:
            raise self.rows.error(str(err)) from err


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
