"""One embedding table in Redis: which partition holds a key, and the commands that read and write them all."""

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernels.host import KeyIndex
from serving.config import RedisConfig
from serving.storage.hps_layout import key_list
from serving.storage.redis_commands import (
    Command,
    Partition,
    RedisNodeError,
    encoded_fields,
    encoded_rows,
    header,
    plain,
)
from serving.storage.redis_overflow import Overflow
from serving.storage.redis_partitions import Group, Partitions
from serving.storage.redis_records import evict, insert, is_lost, is_same_load, mark_changed, state, swap
from serving.storage.redis_rows import RedisRows
from serving.storage.store import Keys, Mask, TableSpec, Vectors

if TYPE_CHECKING:
    from serving.storage.redis_nodes import RedisNodes  # which needs redis-py

logger = logging.getLogger(__name__)

SCAN_FIELDS = 1000
SAMPLE_FIELDS = 10
# Rows of a load that was killed are forgotten by Redis after this time.
LOADING_TTL_S = 600


class RedisTable:
    """The rows of one table. Every method may be called from any thread.

    Every method raises RedisNodeError where a node does not answer, and StoreError where Redis holds what is not such a
    table.
    """

    def __init__(self, nodes: "RedisNodes", config: RedisConfig, spec: TableSpec) -> None:
        """Name its partitions; nothing is asked yet."""
        self.spec = spec
        self.partitions = Partitions(spec.name, config.num_partitions)
        self._nodes = nodes
        self._max_batch_size = config.max_batch_size
        self._rows = RedisRows(spec, config.row_dtype, config.max_batch_size)
        self._overflow = Overflow(nodes, config.overflow) if config.overflow else None
        self._lock = threading.Lock()  # guards the next
        self.evicted_rows = 0  # by this process, as partitions overflowed
        # By partition, as last seen; None where the table, or a part of it, has no record of the load that filled it.
        # Replaced as a whole: readers take no lock.
        self._records: list[bytes] | None = None

    @property
    def spread_keys(self) -> list[bytes]:
        """One key of each partition."""
        return [one.values for one in self.partitions]

    def check(self) -> None:
        """Look at some rows of each partition: their widths, and whether they are in the partition of their key."""
        scans = [plain("HSCAN", one.values, 0, "COUNT", SAMPLE_FIELDS) for one in self.partitions]
        records = [plain("GET", one.record) for one in self.partitions]
        replies = self._nodes.run([*scans, *records])
        for number, (_, held) in enumerate(replies[: len(scans)]):
            keys, _ = self._rows.decoded(held)
            places = self.partitions.places(keys)
            if (places != number).any():
                at = int(np.argmax(places != number))
                reason = f"holds key {keys[at]} in partition {number}, of {len(scans)} it belongs in {places[at]}"
                raise self._rows.error(f"{reason}: num_partitions differs from that with which the table was written")
        if self._partitions_beyond():
            raise self._rows.error(f"was written with more than {len(scans)} partitions: num_partitions differs")
        held = replies[len(scans) :]
        self._records = None if None in held else held

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
            filled = self._insert(None, keys[part], rows[part])
            if self._overflow is not None:
                self._trim(self._overflow, keys[part], sorted(filled))

    def evict(self, keys: Keys) -> int:
        """Remove keys, with what HPS's overflow policies know of them; returns how many were held."""
        evicted = 0
        for part in self._rows.rounds(keys.size, self.spec.key_bytes):
            order, groups = self.partitions.groups(keys[part], self._max_batch_size)
            fields = encoded_fields(keys[part][order], self.spec.key_bytes)
            parts = [(self.partitions[group.partition], fields[group.begin : group.end]) for group in groups]
            evicted += sum(self._nodes.run([evict(one, some) for one, some in parts]))
        return evicted

    def drop(self) -> None:
        """Remove every row, and what is known of them."""
        self._nodes.run([_unlink(one) for one in (*self.partitions, *self._partitions_beyond())])
        self._records = None

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
        """The digest of the load that filled the table; None where a partition has none or another, or no rows left."""
        states = self._nodes.run([state(one) for one in self.partitions])
        return self._rows.loaded_from([None if is_lost(record, has_rows) else record for record, has_rows in states])

    def mark_changed(self) -> None:
        """Note in every partition's record that rows come to those it was loaded with."""
        self._nodes.run([mark_changed(one.record) for one in self.partitions])

    def load(self, batches: Iterator[tuple[Keys, Vectors]], digest: str) -> None:
        """Replace the table.

        The rows are gathered under other names and then take the place of the old ones; each partition changes in one
        instant, together with the record of what it was loaded from.
        """
        load = secrets.token_hex(8)
        filled: set[int] = set()
        sizes = np.zeros(len(self.partitions), dtype=np.int64)
        try:
            for keys, rows in batches:
                if self._overflow is not None:
                    fits = self.partitions.fitting(keys, sizes, self._overflow.rule.margin_rows)
                    keys, rows = keys[fits], rows[fits]
                filled |= self._insert(load, keys, rows)
            mark = self._rows.with_form(digest)
            swaps = [swap(one, load, mark, number in filled) for number, one in enumerate(self.partitions)]
            self._nodes.run([*swaps, *(_unlink(one) for one in self._partitions_beyond())])
        except BaseException:
            with suppress(RedisNodeError):
                self._nodes.run([plain("UNLINK", *one.loading(load)) for one in self.partitions])
            raise
        self._records = [f"{mark} {load}".encode()] * len(self.partitions)

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
        known, numbers = self._records, sorted({group.partition for group in groups})
        # Asked for after the rows, on their connection: rows that have changed hands come with the record that says so.
        asked = [plain("GET", self.partitions[number].record) for number in numbers] if known else []
        replies = self._nodes.run([*commands, *asked])
        records = dict(zip(numbers, replies[len(commands) :], strict=False))
        self._check_sources(known or [], records)
        found[...] = True
        for at, values in zip(places, replies, strict=False):
            if values is not None:
                found[at] = self._rows.fill(keys, values, out, at)
        if known and self._overflow is None and not found.all():
            lacking = self._lacking(groups, places, found)
            if not self._are_kept(known, records, lacking):
                self._fetch_round(keys, out, found)

    def _check_sources(self, known: Sequence[bytes], records: Mapping[int, bytes | None]) -> None:
        for number, record in records.items():
            if record is not None and record != known[number]:
                self._rows.check_source(record, known[number])

    def _lacking(self, groups: Sequence[Group], places: Sequence[NDArray[np.intp]], found: Mask) -> dict[int, bool]:
        """The partitions that lack keys of a batch; whether they lack all of them."""
        lacking: dict[int, bool] = {}
        for group, at in zip(groups, places, strict=True):
            if not found[at].all():
                lacking[group.partition] = lacking.get(group.partition, True) and not found[at].any()
        return lacking

    def _are_kept(
        self, known: Sequence[bytes], records: Mapping[int, bytes | None], lacking: Mapping[int, bool]
    ) -> bool:
        """Tell keys that nobody has from keys that were lost: of a partition the rows, the record or both may go.

        Returns:
            Whether the load is the ``known`` one; else what was absent may have come with the other meanwhile.

        Raises:
            StoreError: a partition has lost rows.
        """
        held = dict(records)
        empty = [number for number, lacks_all in lacking.items() if lacks_all]
        for number, (record, has_rows) in zip(
            empty, self._nodes.run([state(self.partitions[at]) for at in empty]), strict=True
        ):
            held[number] = record if not is_lost(record, has_rows) else None
        for number in lacking:
            if held[number] is None:
                values = self.partitions[number].values.decode()
                raise self._rows.error(f"{values} has lost the rows it was loaded with")
        others = {at: record for at in lacking if (record := held[at]) and not is_same_load(record, known[at])}
        if others:
            self._check_sources(known, others)
            self._records = [others.get(number, record) for number, record in enumerate(known)]
        return not others

    def touch(self, keys: Keys) -> None:
        """Tell the overflow policy that these keys were found, where it wants to know."""
        if self._overflow is None:
            return
        for part in self._rows.rounds(keys.size, self.spec.key_bytes):
            order, groups = self.partitions.groups(keys[part], self._max_batch_size)
            fields = encoded_fields(keys[part][order], self.spec.key_bytes)
            times = [self.partitions[group.partition].times for group in groups]
            noted = [
                self._overflow.touches(name, fields[at.begin : at.end]) for name, at in zip(times, groups, strict=True)
            ]
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

    def _insert(self, load: str | None, keys: Keys, rows: Vectors) -> set[int]:
        """Write rows where ``load`` gathers them, None: among the table's; returns which partitions got some."""
        filled: set[int] = set()
        for part in self._rows.rounds(keys.size, self._rows.codec.value_bytes):
            order, groups = self.partitions.groups(keys[part], self._max_batch_size)
            encoded = self._rows.codec.encode(keys[part][order], rows[part][order])
            words = encoded_rows(keys[part][order], encoded, self.spec.key_bytes)
            commands: list[Command] = []
            for number, begin, end in groups:
                one = self.partitions[number]
                values, times = (one.values, one.times) if load is None else one.loading(load)
                if load is None:
                    commands.append(insert(one, self._source(number), words[begin:end]))
                else:
                    payload = header(b"HSET", values, 2 * (end - begin) + 2) + words[begin:end].tobytes()
                    commands.append(Command("HSET", values, payload))
                if self._overflow is not None:
                    commands += self._overflow.touches(times, words[begin:end, : self.spec.key_bytes + 6])
                if load is not None:
                    commands += [plain("EXPIRE", name, LOADING_TTL_S) for name in (values, times)]
                filled.add(number)
            self._nodes.run(commands)
        return filled

    def _source(self, number: int) -> str:
        """What the record of a partition begins with; nothing where that is not known."""
        records = self._records
        return "" if records is None else self._rows.source(records[number])

    def _partitions_beyond(self) -> list[Partition]:
        """Partitions that a larger ``num_partitions`` would have left."""
        beyond: list[Partition] = []
        while True:
            one = Partition(self.spec.name, len(self.partitions) + len(beyond))
            if not self._nodes.run([plain("EXISTS", one.values)])[0]:
                return beyond
            beyond.append(one)


def _unlink(one: Partition) -> Command:
    return plain("UNLINK", one.values, one.times, one.record)
