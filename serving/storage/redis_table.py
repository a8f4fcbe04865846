"""One embedding table in Redis: which partition holds a key, and the commands that read and write them all."""

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

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
    mark_changed,
    plain,
    swap,
)
from serving.storage.redis_overflow import Overflow
from serving.storage.redis_partitions import Partitions
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
        self._is_recorded = False  # every partition has a record of the load that filled it

    @property
    def spread_keys(self) -> list[bytes]:
        """One key of each partition."""
        return [one.values for one in self.partitions]

    def check(self) -> None:
        """Look at some rows of each partition: their widths, and whether they are in the partition of their key."""
        scans = [plain("HSCAN", one.values, 0, "COUNT", SAMPLE_FIELDS) for one in self.partitions]
        records = [plain("EXISTS", one.record) for one in self.partitions]
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
        self._is_recorded = all(replies[len(scans) :])

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
            filled = self._insert([(one.values, one.times) for one in self.partitions], keys[part], rows[part])
            if self._overflow is not None:
                self._trim(self._overflow, keys[part], sorted(filled))

    def evict(self, keys: Keys) -> int:
        """Remove keys, with what HPS's overflow policies know of them; returns how many were held."""
        evicted = 0
        for part in self._rows.rounds(keys.size, self.spec.key_bytes):
            order, groups = self.partitions.groups(keys[part], self._max_batch_size)
            fields = encoded_fields(keys[part][order], self.spec.key_bytes)
            commands = []
            for group in groups:
                one, payload = self.partitions[group.partition], fields[group.begin : group.end].tobytes()
                words = group.end - group.begin + 2
                commands += [
                    Command("HDEL", name, header(b"HDEL", name, words) + payload) for name in (one.values, one.times)
                ]
            evicted += sum(self._nodes.run(commands)[::2])
        return evicted

    def drop(self) -> None:
        """Remove every row, and what is known of them."""
        self._nodes.run([_unlink(one) for one in (*self.partitions, *self._partitions_beyond())])
        self._is_recorded = False

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
        """The digest of the load that filled the table; None where a partition has none or another."""
        return self._rows.loaded_from(self._nodes.run([plain("GET", one.record) for one in self.partitions]))

    def mark_changed(self) -> None:
        """Note in every partition's record that rows come to those it was loaded with."""
        self._nodes.run([mark_changed(one.record) for one in self.partitions])

    def load(self, batches: Iterator[tuple[Keys, Vectors]], digest: str) -> None:
        """Replace the table.

        The rows are gathered under other names and then take the place of the old ones; each partition changes in one
        instant, together with the record of what it was loaded from.
        """
        load = secrets.token_hex(8)
        names = [one.loading(load) for one in self.partitions]
        filled: set[int] = set()
        sizes = np.zeros(len(self.partitions), dtype=np.int64)
        try:
            for keys, rows in batches:
                if self._overflow is not None:
                    fits = self.partitions.fitting(keys, sizes, self._overflow.rule.margin_rows)
                    keys, rows = keys[fits], rows[fits]
                filled |= self._insert(names, keys, rows, LOADING_TTL_S)
            mark = self._rows.with_form(digest)
            swaps = [swap(one, load, mark, number in filled) for number, one in enumerate(self.partitions)]
            self._nodes.run([*swaps, *(_unlink(one) for one in self._partitions_beyond())])
        except BaseException:
            with suppress(RedisNodeError):
                self._nodes.run([plain("UNLINK", *one.loading(load)) for one in self.partitions])
            raise
        self._is_recorded = True

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
        found[...] = True
        incomplete: dict[int, None] = {}
        for group, at, values in zip(groups, places, self._nodes.run(commands), strict=True):
            if values is None:
                continue
            found[at] = self._rows.fill(keys, values, out, at)
            if not found[at].all():
                incomplete[group.partition] = None
        if incomplete and self._is_recorded and self._overflow is None:
            self._check_kept([self.partitions[number] for number in incomplete])

    def _check_kept(self, partitions: Sequence[Partition]) -> None:
        """Tell keys that nobody has from keys that were lost: a node that came back empty has no records either."""
        kept = self._nodes.run([plain("EXISTS", one.record) for one in partitions])
        if not all(kept):
            lost = partitions[kept.index(0)]
            raise self._rows.error(f"{lost.values.decode()} has lost the rows it was loaded with")

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

    def _insert(
        self, names: Sequence[tuple[bytes, bytes]], keys: Keys, rows: Vectors, ttl_s: int | None = None
    ) -> set[int]:
        """Write rows into the hashes ``names``, two per partition; returns which of them got some."""
        filled: set[int] = set()
        for part in self._rows.rounds(keys.size, self._rows.codec.value_bytes):
            order, groups = self.partitions.groups(keys[part], self._max_batch_size)
            encoded = self._rows.codec.encode(keys[part][order], rows[part][order])
            words = encoded_rows(keys[part][order], encoded, self.spec.key_bytes)
            commands: list[Command] = []
            for number, begin, end in groups:
                name, times = names[number]
                payload = header(b"HSET", name, 2 * (end - begin) + 2) + words[begin:end].tobytes()
                commands.append(Command("HSET", name, payload))
                if self._overflow is not None:
                    commands += self._overflow.touches(times, words[begin:end, : self.spec.key_bytes + 6])
                if ttl_s is not None:
                    commands += [plain("EXPIRE", name, ttl_s), plain("EXPIRE", times, ttl_s)]
                filled.add(number)
            self._nodes.run(commands)
        return filled

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
