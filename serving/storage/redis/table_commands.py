"""One embedding table in Redis: the commands that read and change its rows."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from serving.config import RedisConfig
from serving.errors import without_frames
from serving.storage.hps_layout import key_list
from serving.storage.redis import marker as scripts
from serving.storage.redis.commands import Command, Partition, RedisNodeError, encoded_fields, hdel, header, plain
from serving.storage.redis.logs import Logs
from serving.storage.redis.nodes import RedisNodes, value_of
from serving.storage.redis.overflow import Overflow
from serving.storage.redis.rows import Group, Partitions, RedisRows, identity_of
from serving.storage.redis.states import PartitionStates, Status
from serving.storage.store import Keys, Mask, TableSpec, Vectors

logger = logging.getLogger(__name__)

SCAN_FIELDS = 1000
SAMPLE_FIELDS = 10
# A table that another program wrote is searched for partitions up to this many times the number of partitions.
MOST_TIMES_PARTITIONS = 4


class TableCommands:
    """The rows of one table. Every method may be called from any thread.

    Every method raises RedisNodeError if a node does not answer, and StoreError if Redis does not hold such a
    table.

    Attributes:
        spec: the table.
        partitions: its partitions.
        states: what this process knows of them.
        logs: how far they have come in logs of changes.
        rows: how its rows are encoded.
        overflow: the overflow policy, if there is one.
        identity: see ``LastingStore.identity``.
        evicted_rows: rows that this process evicted as partitions overflowed.
        unreleased: commands that release leases of a filling that failed, because its node was silent.
    """

    def __init__(self, nodes: RedisNodes, config: RedisConfig, spec: TableSpec, *, expects_logs: bool = False) -> None:
        """Name the partitions; ask no node."""
        self.spec = spec
        self.partitions = Partitions(spec.name, config.num_partitions)
        self.rows = RedisRows(spec, config.row_dtype, config.max_batch_size)
        self.states = PartitionStates(nodes, self.partitions, self.rows)
        self.logs = Logs(nodes, self.partitions, self.states, self.rows)
        if expects_logs:
            self.states.is_behind = self.logs.is_behind
        self.overflow = Overflow(nodes, config.overflow) if config.overflow else None
        self.evicted_rows = 0
        self.unreleased: list[Command] = []
        self.identity = identity_of(config)
        self._nodes = nodes
        self._max_batch_size = config.max_batch_size
        self._lock = threading.Lock()  # guards changes of ``evicted_rows``

    def check(self, numbers: Sequence[int]) -> None:
        """Look at some rows of partitions: their widths, and whether each is in the partition of its key."""
        scans = [plain("HSCAN", self.partitions[at].values, 0, "COUNT", SAMPLE_FIELDS) for at in numbers]
        count = len(self.partitions)
        others = [Partition(self.spec.name, at).values for at in range(count, MOST_TIMES_PARTITIONS * count)]
        replies = self._nodes.run([*scans, *(plain("EXISTS", values) for values in others)])
        for number, (_, fields) in zip(numbers, replies, strict=False):
            keys, _ = self.rows.decoded(fields)
            places = self.partitions.places(keys)
            if (places != number).any():
                at = int(np.argmax(places != number))
                reason = f"holds key {keys[at]} in partition {number}, but of {count} it belongs in {places[at]}"
                raise self.rows.error(f"{reason}: num_partitions differs from the one that the table was written with")
        if any(replies[len(scans) :]):
            raise self.rows.error(f"was written with more than {count} partitions: num_partitions differs")

    def count(self) -> int:
        """Rows held."""
        return sum(self._nodes.run([plain("HLEN", partition.values) for partition in self.partitions]))

    def fetch(self, keys: Keys, out: Vectors, found: Mask) -> None:
        """Read rows.

        Args:
            keys: int64[N]; the table's key width can hold each key.
            out: float32[N, D], contiguous; overwritten.
            found: bool[N]; overwritten.
        """
        for part in self.rows.rounds(keys.size, self.rows.codec.value_bytes):
            again = self._fetch_round(keys[part], out[part], found[part])
            if not again.size:
                continue
            rows, hits = np.empty((again.size, self.spec.dim), np.float32), np.empty(again.size, np.bool_)
            unread = self._fetch_round(keys[part][again], rows, hits)
            if unread.size and self.states.truth is None:
                raise self.rows.error("its partitions are moving or being loaded; ask again")
            rows[unread], hits[unread] = 0.0, False
            out[part][again], found[part][again] = rows, hits

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite int64[N] keys and their float32[N, D] rows."""

        def insert(part: slice) -> None:
            groups = self.rows.words(self.partitions, keys[part], rows[part])
            self._change(groups, "HSET", 2)
            if self.overflow is not None:
                with suppress(RedisNodeError):  # Redis has the rows; the next insert trims
                    self._trim(self.overflow, keys[part], sorted({number for number, _ in groups}))

        self._in_rounds(self.rows.rounds(keys.size, self.rows.codec.value_bytes), insert)

    def insert_absent(self, keys: Keys, rows: Vectors) -> int:
        """Add rows whose keys are absent, to valid partitions; returns how many."""
        added = 0
        for part in self.rows.rounds(keys.size, self.rows.codec.value_bytes):
            groups = self.rows.words(self.partitions, keys[part], rows[part])
            valid = [(number, words) for number, words in groups if self.states.is_valid(number)]
            commands = [scripts.add(self.partitions[number], words) for number, words in valid]
            touches = [command for number, words in valid for command in self._touches(number, words)]
            added += sum(self._nodes.run([*commands, *touches])[: len(commands)])
            if self.overflow is not None:
                self._trim(self.overflow, keys[part], sorted({number for number, _ in valid}))
        return added

    def evict(self, keys: Keys) -> None:
        """Remove keys, also from HPS's hash for overflow policies."""

        def evict(part: slice) -> None:
            self._change(self.rows.fields(self.partitions, keys[part]), "HDEL", 1)

        self._in_rounds(self.rows.rounds(keys.size, self.spec.key_bytes), evict)

    def set_changed(self) -> None:
        """Note in every marker that rows change; a partition that cannot be reached has missed the change."""
        if self.states.truth is not None:
            self.states.note_written()
        written = [number for number in range(len(self.partitions)) if self.states.takes_writes(number)]
        commands = [scripts.set_changed(self.partitions[at]) for at in written]
        self.states.settle(written, self._nodes.run_identified(commands))

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
        """All rows by partition, each key once."""
        for number in range(len(self.partitions)):
            yield from self.partition_items(number, batch_rows)

    def partition_items(self, number: int, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """All rows of a partition, each key once."""
        yield from self.rows.batches(self._scanned(self.partitions[number], batch_rows), batch_rows)

    def touch(self, keys: Keys) -> None:
        """Report to the overflow policy that these keys were found."""
        for part in self.rows.rounds(keys.size, self.spec.key_bytes):
            groups = self.rows.fields(self.partitions, keys[part])
            self._nodes.run([command for number, fields in groups for command in self._touches(number, fields)])

    @property
    def is_touched_by_fetches(self) -> bool:
        """Whether ``touch`` has an effect."""
        return self.overflow is not None and self.overflow.is_touched_by_fetches

    def _fetch_round(self, keys: Keys, out: Vectors, found: Mask) -> NDArray[np.intp]:
        """Read rows; returns the places of keys whose partitions another load or node has now: ask again for these."""
        order, groups = self.partitions.groups(keys, self._max_batch_size)
        states = self.states.verified(sorted({group.partition for group in groups}))
        valid = [at for at, state in states.items() if state.status is Status.VALID]
        if len(valid) < len(states):
            out[...], found[...] = 0.0, False
            groups = [group for group in groups if states[group.partition].status is Status.VALID]
        places = [order[group.begin : group.end] for group in groups]
        generations = [plain("HGET", self.partitions[at].marker, "generation") for at in valid]
        replies = self._nodes.run_each([*self._reads(keys, out, order, groups), *generations])
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
        self.states.doubt(stale)
        again = [at for group, at in zip(groups, places, strict=True) if group.partition in stale]
        return np.concatenate(again) if again else np.empty(0, dtype=np.intp)

    def _reads(self, keys: Keys, out: Vectors, order: NDArray[np.intp], groups: Sequence[Group]) -> list[Command]:
        fields = encoded_fields(keys[order], self.spec.key_bytes)
        commands = []
        for group in groups:
            partition, at = self.partitions[group.partition], order[group.begin : group.end]
            payload = header(b"HMGET", partition.values, at.size + 2) + fields[group.begin : group.end].tobytes()
            take, value_bytes = self.rows.taker(out, at), self.rows.codec.value_bytes
            commands.append(Command("HMGET", partition.values, payload, take, at.size, value_bytes))
        return commands

    def _in_rounds(self, rounds: Iterator[slice], change: Callable[[slice], None]) -> None:
        """Make every round of a change, also after a round failed: a cache must know all partitions that missed it."""
        failures = list[RedisNodeError]()
        for part in rounds:
            try:
                change(part)
            except RedisNodeError as err:
                if self.states.truth is None:
                    raise
                failures.append(without_frames(err))
        if failures:
            raise without_frames(failures[0])

    def _change(self, groups: Sequence[tuple[int, NDArray[np.uint8]]], name: str, words_per_row: int) -> None:
        """Insert or remove rows."""
        if self.states.truth is None:
            return self._change_truth(groups, name, words_per_row)
        groups = [(number, words) for number, words in groups if self.states.takes_writes(number)]
        commands, notes = [], []
        for number, words in groups:
            partition = self.partitions[number]
            head = header(name.encode(), partition.values, 2 + words_per_row * len(words))
            commands.append(Command(name, partition.values, head + words.tobytes()))
            if name == "HDEL":  # noted before the rows go: a process that fills the partition must not add them again
                notes += [(number, command) for command in scripts.note_removed(partition, words)]
        extras = self._extras(groups, name)
        numbers = [number for number, _ in (*notes, *groups, *extras)]
        replies = self._nodes.run_identified(
            [*(command for _, command in notes), *commands, *(command for _, command in extras)]
        )
        self.states.settle(numbers, replies)

    def _change_truth(self, groups: Sequence[tuple[int, NDArray[np.uint8]]], name: str, words_per_row: int) -> None:
        for _ in range(2):
            states = self.states.verified(sorted({number for number, _ in groups}))
            commands = [
                scripts.change(self.partitions[at], states[at].generation or "", name, words, words_per_row)
                for at, words in groups
            ]
            extras = [command for _, command in self._extras(groups, name)]
            replies = self._nodes.run([*commands, *extras])
            groups = [group for group, is_changed in zip(groups, replies, strict=False) if not is_changed]
            if not groups:
                return
            self.states.doubt({number for number, _ in groups})
        raise self.rows.error("another process is loading it; ask again")

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
            logger.warning("%s: redis reached volatile_db.overflow_margin: %s rows evicted", self.spec.name, evicted)

    def _unlink(self, partitions: Iterable[Partition]) -> int:
        names = [
            (partition.values, partition.times, partition.marker, partition.lease, partition.removed)
            for partition in partitions
        ]
        return sum(int(count) for count in self._nodes.run([plain("UNLINK", *some) for some in names]))

    def _scanned(self, partition: Partition, batch_rows: int) -> Iterator[Mapping[bytes, bytes]]:
        cursor = -1
        while cursor:
            scan = plain("HSCAN", partition.values, max(cursor, 0), "COUNT", min(batch_rows, SCAN_FIELDS))
            ((cursor, some),) = self._nodes.run([scan])
            yield some


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
