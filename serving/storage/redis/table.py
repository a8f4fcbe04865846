"""One embedding table in Redis: which partition holds a key, and the commands that read and write them all."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernels.host import KeyIndex
from serving.config import RedisConfig
from serving.storage.hps_layout import key_list
from serving.storage.redis.changes import ChangeNumbers, number_of
from serving.storage.redis.commands import Command, Partition, encoded_fields, hdel, header, plain
from serving.storage.redis.load import TableLoad
from serving.storage.redis.overflow import Overflow
from serving.storage.redis.partitions import Group, Partitions, lacking
from serving.storage.redis.records import (
    LOST,
    evict,
    insert,
    is_lost,
    is_same_load,
    mark_record,
    read_record,
    state,
    unlink,
)
from serving.storage.redis.rows import RedisRows
from serving.storage.redis.seals import seals_of
from serving.storage.redis.sources import files_and_form
from serving.storage.redis.watch import Watch, records_of_load
from serving.storage.store import Keys, Mask, TableSpec, Vectors, has_rows_of

if TYPE_CHECKING:
    from serving.storage.redis.nodes import RedisNodes  # which needs redis-py

logger = logging.getLogger(__name__)

SCAN_FIELDS = 1000
SAMPLE_FIELDS = 10


class RedisTable:
    """The rows of one table. Every method may be called from any thread.

    Every method raises RedisNodeError where a node does not answer, and StoreError where Redis holds what is not such a
    table.
    """

    def __init__(self, nodes: "RedisNodes", config: RedisConfig, spec: TableSpec, numbers: ChangeNumbers) -> None:
        """Name its partitions, of whose changes ``numbers`` knows; nothing is asked yet."""
        self.spec = spec
        self.partitions = Partitions(spec.name, config.num_partitions)
        self._nodes = nodes
        self._numbers = numbers
        self._max_batch_size = config.max_batch_size
        self._rows = RedisRows(spec, config.row_dtype, config.max_batch_size)
        self._overflow = Overflow(nodes, config.overflow) if config.overflow else None
        self._lock = threading.Lock()  # guards the next
        self.evicted_rows = 0  # by this process, as partitions overflowed
        self._watch = Watch(self._rows, config.num_partitions)

    @property
    def is_slowest(self) -> bool:
        """Whether nothing behind Redis has the rows: where some are lost, no change is taken that a load would undo."""
        return self._watch.is_slowest

    @is_slowest.setter
    def is_slowest(self, is_slowest: bool) -> None:
        self._watch.is_slowest = is_slowest

    @property
    def spread_keys(self) -> list[bytes]:
        """One key of each partition."""
        return [one.values for one in self.partitions]

    def check(self) -> None:
        """Look at some rows of each partition: their widths, and whether they are in the partition of their key."""
        scans = [plain("HSCAN", one.values, 0, "COUNT", SAMPLE_FIELDS) for one in self.partitions]
        replies = self._nodes.run([*scans, *(plain("GET", one.record) for one in self.partitions)])
        for number, (_, held) in enumerate(replies[: len(scans)]):
            keys, _ = self._rows.decoded(held)
            places = self.partitions.places(keys)
            if (places != number).any():
                at = int(np.argmax(places != number))
                reason = f"holds key {keys[at]} in partition {number}, of {len(scans)} it belongs in {places[at]}"
                raise self._rows.error(f"{reason}: num_partitions differs from that with which the table was written")
        records = [read_record(reply) for reply in replies[len(scans) :]]
        # Rows beyond the partitions of a load came from somebody who did not know of it: nobody looks there.
        if not self._watch.check_opened(records) and self._partitions_beyond():
            raise self._rows.error(f"was written with more than {len(scans)} partitions: num_partitions differs")
        seen = {number: number_of(record) for number, record in enumerate(records) if record is not None}
        self._numbers.were_seen(seen)
        self._watch.see(records)

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
        for part in self._rows.rounds(keys.size, self._rows.codec.value_bytes):
            self._fetch_round(keys[part], out[part], found[part])

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite int64[N] keys and their float32[N, D] rows."""
        for part in self._rows.rounds(keys.size, self._rows.codec.value_bytes):
            filled = self._insert(keys[part], rows[part])
            if self._overflow is not None:
                self._trim(self._overflow, keys[part], sorted(filled))

    def evict(self, keys: Keys) -> int:
        """Remove keys, with what HPS's overflow policies know of them; returns how many were held."""
        evicted = 0
        for part in self._rows.rounds(keys.size, self.spec.key_bytes):
            fields_of = self._rows.fields(self.partitions, keys[part])
            parts = [(self.partitions[at], self._watch.writer(at), fields) for at, fields in fields_of]
            evictions = [evict(one, writer, fields) for one, writer, fields in parts]
            # What overflow policies know of keys without a row does no harm.
            replies = self._nodes.run([*evictions, *(hdel(one.times, fields) for one, _, fields in parts)])
            evicted += sum(replies[: len(evictions)])
        return evicted

    def note_change(self, keys: Keys) -> None:
        """Raise the numbers of the partitions of int64[N] keys, whose rows have changed."""
        records = self._watch.records
        if records is not None:
            changed = np.unique(self.partitions.places(keys)).tolist()
            self._numbers.note(self._nodes, self.partitions, changed, files_and_form(records[0]))

    def drop(self) -> None:
        """Remove every row, and what is known of them."""
        self._nodes.run([unlink(one) for one in (*self.partitions, *self._partitions_beyond())])
        self._watch.records = None

    def items(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """All rows, by partition, each key once, though Redis may give one twice."""
        for one in self.partitions:
            yield from self._rows.batches(self._scanned(one, batch_rows), batch_rows, KeyIndex())

    def _scanned(self, one: Partition, batch_rows: int) -> Iterator[Mapping[bytes, bytes]]:
        cursor = -1
        while cursor:
            scan = plain("HSCAN", one.values, max(cursor, 0), "COUNT", min(batch_rows, SCAN_FIELDS))
            ((cursor, some),) = self._nodes.run([scan])
            yield some

    def loaded_from(self) -> str | None:
        """The digest of the load that filled the table; None where a partition has none or another, or lacks rows."""
        return self._held()[1]

    def mark(self, has_changed: bool, seal: str = "", former: str = "") -> None:
        """Note in every partition's record that rows come to those that were loaded, or a seal; see ``mark_record``."""
        writers = map(self._watch.writer, range(len(self.partitions)))
        marks = [
            mark_record(one.record, writer, has_changed, seal, former)
            for one, writer in zip(self.partitions, writers, strict=True)
        ]
        if 0 in self._nodes.run(marks) and self._watch.is_slowest and self._watch.records is not None:
            raise self._rows.lost(f"a partition{LOST}")

    def seals(self) -> set[str]:
        """All seals that the records bear."""
        held = self._nodes.run([plain("GET", one.record) for one in self.partitions])
        return set().union(*map(seals_of, held))

    def load(self, batches: Iterator[tuple[Keys, Vectors]], digest: str, *, unless_loaded: bool = False) -> None:
        """Replace the table. See ``DurableStore.bulk_load``.

        Each partition changes in one instant, together with the record of what it was loaded from.
        """
        load, (records, held) = self._new_load(), self._held()
        if unless_loaded and has_rows_of(held, digest):
            self.check()
            return
        beyond = self._partitions_beyond()
        self._watch.see(load.replace(batches, self._rows.with_form(digest), records, unless_loaded))
        self._nodes.run([unlink(one) for one in beyond])

    def refill(self, batches: Iterator[tuple[Keys, Vectors | None]], digest: str) -> bool:
        """Bring back what partitions have lost; returns whether any had. See ``TableLoad.refill``."""
        held = self._nodes.run([plain("GET", one.record) for one in self.partitions])
        self._watch.check(self._watch.records, dict(enumerate(map(read_record, held))))
        load, mark = self._new_load(), self._rows.with_form(digest)
        self._watch.refilling = load.name
        try:
            filled = load.refill(batches, mark)
        finally:
            self._watch.refilling = ""
        self._watch.see_some(dict.fromkeys(filled, f"{mark} {load.name}".encode()))
        return bool(filled)

    def _fetch_round(self, keys: Keys, out: Vectors, found: Mask) -> None:
        order, groups = self.partitions.groups(keys, self._max_batch_size)
        fields = encoded_fields(keys[order], self.spec.key_bytes)
        places = [order[group.begin : group.end] for group in groups]
        commands = []
        for group, at in zip(groups, places, strict=True):
            one = self.partitions[group.partition]
            payload = header(b"HMGET", one.values, at.size + 2) + fields[group.begin : group.end].tobytes()
            take, value_bytes = self._rows.taker(out, at), self._rows.codec.value_bytes
            commands.append(Command("HMGET", one.values, payload, take, at.size, value_bytes))
        known, numbers = self._watch.records, sorted({group.partition for group in groups})
        changes = self._numbers.known
        # Asked for after the rows, on their connection: rows that have changed hands come with the record that says so.
        asked = [plain("GET", self.partitions[number].record) for number in numbers]
        replies = self._nodes.run([*commands, *asked])
        records = dict(zip(numbers, map(read_record, replies[len(commands) :]), strict=True))
        self._watch.check(known, records)
        self._check_changes(changes, records if known else {})
        found[...] = True
        for at, values in zip(places, replies, strict=False):
            if values is not None:
                found[at] = self._rows.fill(keys, values, out, at)
        absent = {} if found.all() else self._unexplained(groups, places, found, records)
        if known and absent and not self._are_kept(known, records, absent):
            self._fetch_round(keys, out, found)

    def _check_changes(self, known: Mapping[int, int], records: Mapping[int, bytes | None]) -> None:
        behind = self._numbers.behind(records.items(), known)
        if behind:
            self._numbers.forget(self._nodes, self.partitions, [at for at in behind if records[at] is not None])
            values = self.partitions[behind[0]].values.decode()
            raise self._rows.lost(f"{values} has come back without rows that have changed")

    def _unexplained(
        self,
        groups: Sequence[Group],
        places: Sequence[NDArray[np.intp]],
        found: Mask,
        records: Mapping[int, bytes | None],
    ) -> dict[int, bool]:
        """See ``lacking``; of a table that evicts rows only the partitions without a record, for these hold none."""
        lacks_all = lacking(groups, places, found)
        if self._overflow is None:
            return lacks_all
        return {at: is_empty for at, is_empty in lacks_all.items() if records.get(at) is None}

    def _are_kept(
        self, known: Sequence[bytes], records: Mapping[int, bytes | None], lacks_all: Mapping[int, bool]
    ) -> bool:
        """Tell keys that nobody has from keys that were lost: of a partition the rows, the record or both may go.

        Returns:
            Whether the load is the ``known`` one; else what was absent may have come with the other meanwhile.

        Raises:
            StoreError: a partition has lost rows.
        """
        held = dict(records)
        empty = [number for number, is_empty in lacks_all.items() if is_empty and is_lost(held[number], False)]
        for number, (record, has_rows) in zip(
            empty, self._nodes.run([state(self.partitions[at]) for at in empty]), strict=True
        ):
            held[number] = record if not is_lost(record, has_rows) else None
        for number in lacks_all:
            if held[number] is None:
                values = self.partitions[number].values.decode()
                reason = "a slower tier, or a reload of the model, fills it again"
                raise self._rows.lost(f"{values} has lost the rows it was loaded with: {reason}")
        others = {at: record for at in lacks_all if (record := held[at]) and not is_same_load(record, known[at])}
        if others:
            self._watch.check(known, others)
            self._watch.see_some(others)
        return not others

    def touch(self, keys: Keys) -> None:
        """Tell the overflow policy that these keys were found, where it wants to know."""
        if self._overflow is None:
            return
        for part in self._rows.rounds(keys.size, self.spec.key_bytes):
            parts = self._rows.fields(self.partitions, keys[part])
            noted = [self._overflow.touches(self.partitions[at].times, fields) for at, fields in parts]
            self._nodes.run([command for commands in noted for command in commands])

    @property
    def is_touched_by_fetches(self) -> bool:
        """Whether ``touch`` has an effect."""
        return self._overflow is not None and self._overflow.is_touched_by_fetches

    def _trim(self, overflow: Overflow, keys: Keys, filled: Sequence[int]) -> None:
        places = self.partitions.places(keys)
        inserted = [set(key_list(keys[places == number], self.spec.key_bytes)) for number in filled]
        evicted = overflow.trim([self.partitions[number] for number in filled], inserted)
        with self._lock:
            is_first = bool(evicted) and not self.evicted_rows
            self.evicted_rows += evicted
        if is_first:
            logger.warning("%s: redis is full, volatile_db.overflow_margin: %s rows evicted", self.spec.name, evicted)

    def _insert(self, keys: Keys, rows: Vectors) -> set[int]:
        """Write rows, as many as one round of commands takes; returns which partitions got some."""
        filled: set[int] = set()
        commands: list[Command] = []
        for number, words in self._rows.words(self.partitions, keys, rows):
            one = self.partitions[number]
            commands.append(insert(one, self._watch.writer(number), words))
            if self._overflow is not None:
                commands += self._overflow.touches(one.times, words[:, : self._rows.field_bytes])
            filled.add(number)
        self._nodes.run(commands)
        return filled

    def _held(self) -> tuple[list[bytes | None], str | None]:
        """The partitions' records, and ``loaded_from``."""
        known = self._numbers.known
        states = self._nodes.run([state(one) for one in self.partitions])
        whole = [None if is_lost(record, has_rows) else record for record, has_rows in states]
        is_behind = bool(self._numbers.behind(enumerate(whole), known))
        digest = None if is_behind else self._rows.loaded_from(records_of_load(whole))
        return [record for record, _ in states], digest

    def _new_load(self) -> TableLoad:
        return TableLoad(self._nodes, self.partitions, self._rows, self._overflow, self._numbers)

    def _partitions_beyond(self) -> list[Partition]:
        """Partitions that a larger ``num_partitions`` would have left."""
        beyond: list[Partition] = []
        while True:
            one = Partition(self.spec.name, len(self.partitions) + len(beyond))
            if not self._nodes.run([plain("EXISTS", one.values)])[0]:
                return beyond
            beyond.append(one)
