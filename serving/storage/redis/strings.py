"""One embedding table in Redis as plain strings, a row under each key: for those who read it with GET and MGET.

A row lies under ``hps_et.<model>.<table>:`` and its key's raw native-endian bytes. In a cluster each key has a slot of
its own, so that a batch is as many GETs as it has keys, all of a node's in one go: HPS's hashes are faster.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernels.host import KeyIndex
from serving.config import RedisConfig
from serving.storage.hps_layout import keys_of, raw_keys, tag
from serving.storage.redis.commands import Command, RedisNodeError, as_words, plain
from serving.storage.redis.load import CLAIM_TTL_S
from serving.storage.redis.records import CLAIMED, LOST, mark_record, read_record
from serving.storage.redis.rows import RedisRows
from serving.storage.redis.seals import seals_of, without_seals
from serving.storage.redis.slots import slots_of, spread_numbers
from serving.storage.redis.sources import Writer
from serving.storage.redis.string_changes import MOST_ROWS, begin, change, end, records_by_node, writer_of
from serving.storage.store import Keys, Mask, TableSpec, Vectors

if TYPE_CHECKING:
    from serving.storage.redis.nodes import RedisNodes

MOST_KEYS = 10_000  # of one command, or of commands that are answered one after the other
# The record of a load lies under as many keys, evenly spread over the slots: a node that came back empty lacks some.
RECORDS = 64
SAMPLE_KEYS = 10
KEY_WIDTHS = (4, 8)


class StringTable:
    """The rows of one table. Every method may be called from any thread. See ``RedisTable`` for the errors."""

    is_touched_by_fetches = False
    evicted_rows = 0

    def __init__(self, nodes: "RedisNodes", config: RedisConfig, spec: TableSpec) -> None:
        """Name its keys; nothing is asked yet."""
        self.spec = spec
        self._nodes = nodes
        self._rows = RedisRows(spec, config.row_dtype, config.max_batch_size)
        self._prefix = f"{tag(spec.name)}:".encode()
        self._records = [
            f"{tag(spec.name)}.hotrow.loaded_from{{{number}}}".encode() for number in spread_numbers(RECORDS)
        ]
        self.is_slowest = False  # nothing behind Redis has the rows
        self._records_seen: list[bytes | None] | None = None  # as a load wrote them; None where one was absent

    @property
    def spread_keys(self) -> list[bytes]:
        """None: rows are spread over the nodes as slots are."""
        return []

    def check(self) -> None:
        """Look at some rows: their widths."""
        names = [name for page in self._nodes.topology.scan(self._prefix, most_pages=1) for name in page]
        for width in KEY_WIDTHS:
            self._rows.decoded(self._read([name for name in names if self._is_row(name, width)][:SAMPLE_KEYS]))
        records = self._records_held()
        self._records_seen = None if None in records else records

    def count(self) -> int:
        """Rows held; reads all names."""
        seen = KeyIndex()
        for names in self._names_held(self.spec.key_bytes):
            self._rows.are_new(self._keys(names), seen)
        return len(seen)

    def fetch(self, keys: Keys, out: Vectors, found: Mask) -> None:
        """Read rows. See ``RedisTable.fetch``."""
        records = self._records_seen
        self._fetch(keys, out, found)
        while records is not None:
            # Asked for after the rows, which a load replaces where they lie, without a record until it ends.
            held = self._records_held()
            if held == records and None not in records:  # as ever
                return
            for record, known in zip(held, records, strict=True):
                if record is None or known is None:
                    raise self._rows.lost(
                        "a node has lost the rows that it was loaded with, or they are being replaced; lost ones come "
                        "back from a slower tier, or with a reload of the model"
                    )
                self._rows.check_source(record, known)
            if found.all():
                return
            # The table was loaded meanwhile: what was absent may have been on its way.
            records = self._records_seen = held
            self._fetch(keys, out, found)

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """Insert or overwrite int64[N] keys and their float32[N, D] rows."""
        self._insert(keys, rows, self._writer())

    def evict(self, keys: Keys) -> int:
        """Remove keys; returns how many were held."""
        return self._evict(keys, self._writer())

    def drop(self) -> None:
        """Remove every row, and the record of their load."""
        self._nodes.run([plain("UNLINK", name) for name in self._records])
        self._records_seen = None
        self._remove_but(None, Writer(""))

    def items(self, batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """All rows, each key once."""
        return self._rows.batches(map(self._read, self._names_held(self.spec.key_bytes)), batch_rows, KeyIndex())

    def loaded_from(self) -> str | None:
        """The digest of the load that filled the table; None where a node has lost it."""
        return self._rows.loaded_from(self._records_held())

    def mark(self, has_changed: bool, seal: str = "", former: str = "") -> None:
        """Note that rows come to those the table was loaded with, or a seal; see ``mark_record``."""
        writer = self._writer()
        replies = self._nodes.run([mark_record(name, writer, has_changed, seal, former) for name in self._records])
        if writer.is_slowest and 0 in replies:
            raise self._rows.lost(f"a node{LOST}")

    def seals(self) -> set[str]:
        """All seals that the records bear."""
        return set().union(*map(seals_of, self._records_or_claims()))

    def load(self, batches: Iterator[tuple[Keys, Vectors | None]], digest: str, *, unless_loaded: bool = False) -> None:
        """Replace the table, whatever is ``unless_loaded``.

        Meanwhile it has no record: to those who share it, keys that are absent are an outage.
        Old rows go last: another process that loads the same files at the same time misses none of its own.
        """
        self._load(batches, digest, may_replace_others=True)

    def refill(self, batches: Iterator[tuple[Keys, Vectors | None]], digest: str) -> bool:
        """Load the table again, if it has lost rows; returns whether it had. Nobody tells of others' changes meanwhile.

        Raises:
            StoreError: another process does that, or loads the table from other files.
        """
        if None not in self._records_held():
            return False
        claim, load = self._records[0] + b".filling", secrets.token_hex(8)
        if not self._nodes.run([plain("SET", claim, load, "NX", "EX", CLAIM_TTL_S)])[0]:
            raise self._rows.error("another process brings lost rows back")
        try:
            self._load(self._renewing(claim, batches), digest, may_replace_others=False)
        finally:
            with suppress(RedisNodeError):
                self._nodes.run([plain("UNLINK", claim)])
        return True

    def _load(self, batches: Iterator[tuple[Keys, Vectors | None]], digest: str, *, may_replace_others: bool) -> None:
        mark = f"{self._rows.with_form(digest)} {secrets.token_hex(8)}"
        writer = writer_of([mark.encode()], is_slowest=False)
        # From here on another load of other files ends this one, before it writes the next row.
        replaced = "" if may_replace_others else writer.files
        self._nodes.run([begin(name, mark, replaced) for name in self._records])
        loaded = KeyIndex()
        for keys, rows in batches:
            if rows is None:
                self._evict(keys, writer)
                continue
            self._insert(keys, rows, writer)
            self._rows.are_new(keys, loaded)
        self._remove_but(loaded, writer)
        self._nodes.run([end(name, mark, writer.files) for name in self._records])
        self._records_seen = self._records_held()

    def _renewing(
        self, claim: bytes, batches: Iterator[tuple[Keys, Vectors | None]]
    ) -> Iterator[tuple[Keys, Vectors | None]]:
        for batch in batches:
            yield batch
            self._nodes.run([plain("EXPIRE", claim, CLAIM_TTL_S)])

    def touch(self, keys: Keys) -> None:
        """Nothing: no row is evicted here."""

    def _records_held(self) -> list[bytes | None]:
        held = map(read_record, self._records_or_claims())
        return [None if record is None else without_seals(record) for record in held]

    def _records_or_claims(self) -> list[bytes | None]:
        if self._nodes.topology.is_cluster:
            held: list[bytes | None] = self._nodes.run([plain("GET", name) for name in self._records])
        else:
            (held,) = self._nodes.run([plain("MGET", *self._records)])
        return held

    def _remove_but(self, loaded: KeyIndex | None, writer: Writer) -> None:
        """Remove the rows, of whatever key width, but those of the keys of ``loaded``."""
        for page in self._nodes.topology.scan(self._prefix):
            for width in KEY_WIDTHS:
                names = [name for name in page if self._is_row(name, width)]
                if loaded is not None and width == self.spec.key_bytes:
                    is_old = loaded.find(self._keys(names)) < 0
                    names = [name for name, old in zip(names, is_old.tolist(), strict=True) if old]
                if names:
                    array = np.frombuffer(b"".join(names), dtype=np.uint8).reshape(len(names), -1)
                    self._change("UNLINK", writer, array)

    def _fetch(self, keys: Keys, out: Vectors, found: Mask) -> None:
        for part in self._rows.rounds(keys.size, self._rows.codec.value_bytes):
            self._fetch_round(keys[part], out[part], found[part])

    def _fetch_round(self, keys: Keys, out: Vectors, found: Mask) -> None:
        names, value_bytes = self._names(keys), self._rows.codec.value_bytes
        places = list(self._grouped(names))
        commands = []
        for at in places:
            if self._nodes.topology.is_cluster:
                command = _one_by_one("GET", names[at])
            else:
                payload = b"*%d\r\n$4\r\nMGET\r\n" % (at.size + 1) + as_words(names[at]).tobytes()
                command = Command("MGET", names[at[0]].tobytes(), payload)
            commands.append(command.taken_by(self._rows.taker(out, at), at.size, value_bytes))
        found[...] = True
        for at, values in zip(places, self._nodes.run(commands), strict=True):
            if values is not None:
                found[at] = self._rows.fill(keys, values, out, at)

    def _writer(self) -> Writer:
        return writer_of(self._records_seen, self.is_slowest)

    def _insert(self, keys: Keys, rows: Vectors, writer: Writer) -> None:
        for part in self._rows.rounds(keys.size, self._rows.codec.value_bytes):
            self._change("SET", writer, self._names(keys[part]), self._rows.codec.encode(keys[part], rows[part]))

    def _evict(self, keys: Keys, writer: Writer) -> int:
        rounds = self._rows.rounds(keys.size, len(self._prefix) + self.spec.key_bytes)
        return sum(self._change("UNLINK", writer, self._names(keys[part])) for part in rounds)

    def _change(
        self, verb: str, writer: Writer, names: NDArray[np.uint8], values: NDArray[np.uint8] | None = None
    ) -> int:
        """Change the rows of ``names``, where they are those that ``writer`` goes by; returns how many were removed.

        Of rows whose slot moves that is asked before.
        """
        topology = self._nodes.topology
        records = records_by_node(topology, self._records)
        places, commands, left = [], [], []
        for at in self._grouped(names, MOST_ROWS):
            record = records.get(topology.node(names[at[0]].tobytes())[0])
            if record is None:
                left.append(at)
                continue
            places.append(at)
            commands.append(change(verb, record, writer, names[at], None if values is None else values[at]))
        replies = self._nodes.run(commands)
        left += [at[moving] for at, (_, moving) in zip(places, replies, strict=True) if moving]
        changed: int = sum(count for count, _ in replies)
        if not left:
            return changed
        self._check_writer(writer)
        at = np.concatenate(left)
        rest = self._run(verb, names[at], None if values is None else values[at])
        return changed + (sum(rest) if verb == "UNLINK" else 0)

    def _check_writer(self, writer: Writer) -> None:
        held = self._records_or_claims()
        if writer.is_slowest and None in map(read_record, held):
            raise self._rows.lost(f"a node{LOST}")
        for record in held:
            if writer.files and record is not None:
                self._rows.check_source(record.removeprefix(CLAIMED.encode()), f"{writer.files} ".encode())

    def _run(self, name: str, names: NDArray[np.uint8], values: NDArray[np.uint8] | None = None) -> list[int]:
        """Send one command for each of ``names``; returns their replies, by node."""
        places = list(self._grouped(names))
        parts = [None if values is None else values[at] for at in places]
        commands = [_one_by_one(name, names[at], part) for at, part in zip(places, parts, strict=True)]
        return [reply for replies in self._nodes.run(commands) for reply in replies]

    def _read(self, names: list[bytes]) -> Mapping[bytes, bytes]:
        """Raw keys and the values of those of ``names`` that are there."""
        if not names:
            return {}
        values: list[bytes | None] = []
        array = np.frombuffer(b"".join(names), dtype=np.uint8).reshape(len(names), -1)
        places = list(self._grouped(array))
        for replies in self._nodes.run([_one_by_one("GET", array[at]) for at in places]):
            values += replies
        order = np.concatenate(places).tolist()
        found = zip(order, values, strict=True)
        return {names[at][len(self._prefix) :]: value for at, value in found if value is not None}

    def _grouped(self, names: NDArray[np.uint8], most: int = MOST_KEYS) -> Iterator[NDArray[np.intp]]:
        """Places of ``names`` by node, equal names in their order, no more than one command takes."""
        topology = self._nodes.topology
        slots = slots_of(names) if topology.is_cluster else np.zeros(len(names), dtype=np.uint16)
        for at in topology.grouped(slots):
            for start in range(0, at.size, most):
                yield at[start : start + most]

    def _names_held(self, key_bytes: int) -> Iterator[list[bytes]]:
        for page in self._nodes.topology.scan(self._prefix):
            names = [name for name in page if self._is_row(name, key_bytes)]
            if names:
                yield names

    def _is_row(self, name: bytes, key_bytes: int) -> bool:
        return len(name) == len(self._prefix) + key_bytes

    def _names(self, keys: Keys) -> NDArray[np.uint8]:
        """uint8[N, ...], the name of each key's row."""
        width, key_bytes = len(self._prefix), self.spec.key_bytes
        names = np.empty((keys.size, width + key_bytes), dtype=np.uint8)
        names[:, :width] = np.frombuffer(self._prefix, dtype=np.uint8)
        names[:, width:] = raw_keys(keys, key_bytes).view(np.uint8).reshape(-1, key_bytes)
        return names

    def _keys(self, names: list[bytes]) -> Keys:
        return keys_of([name[len(self._prefix) :] for name in names], self.spec.key_bytes)


def _one_by_one(name: str, names: NDArray[np.uint8], values: NDArray[np.uint8] | None = None) -> Command:
    """One command for each of ``names``, and its value; they are answered one by one."""
    words = [as_words(names)] + ([] if values is None else [as_words(values)])
    head = b"*%d\r\n$%d\r\n%s\r\n" % (len(words) + 1, len(name), name.encode())
    start = np.broadcast_to(np.frombuffer(head, dtype=np.uint8), (len(names), len(head)))
    payload = np.concatenate([start, *words], axis=1).tobytes()
    return Command(name, names[0].tobytes(), payload, count=len(names), are_separate=True)
