"""Keys and rows of one table: which partition holds them, and how they are bytes in Redis."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.errors import ReservedKeyError
from kernels.host import KeyIndex
from serving.config import RedisConfig
from serving.errors import StoreError
from serving.model.hps_hash import mix
from serving.storage.hps_layout import keys_of
from serving.storage.redis.commands import Command, Partition, encoded_fields, encoded_rows, header
from serving.storage.row_codec import RowCodec
from serving.storage.store import Keys, Mask, TableSpec, Vectors

STORE_NAME = "redis"
# Bytes sent or received in one round; each round has the full timeout.
MOST_ROUND_BYTES = 4 * 2**20
# Redis does nothing else while it works on one command.
MOST_FIELDS = 10_000


class Group(NamedTuple):
    """Keys of one partition, as many as one command takes: ``order[begin:end]`` of a batch's keys."""

    partition: int
    begin: int
    end: int


class Partitions(tuple[Partition, ...]):
    """The partitions of one table, in their order. HPS's hash says which of them holds a key."""

    __slots__ = ()

    def __new__(cls, table: str, count: int) -> "Partitions":
        """Name the partitions of a table's full name."""
        return super().__new__(cls, (Partition(table, number) for number in range(count)))

    def places(self, keys: Keys) -> NDArray[np.intp]:
        """The partition of each key: intp[N]."""
        return (mix(keys) % np.uint64(len(self))).astype(np.intp)

    def groups(self, keys: Keys, most_fields: int) -> tuple[NDArray[np.intp], list[Group]]:
        """The order of ``keys`` by partition, equal keys in their order, and commands of at most ``most_fields``."""
        places = self.places(keys).astype(np.uint16)
        order = np.argsort(places, kind="stable")
        ends = np.cumsum(np.bincount(places, minlength=len(self))).tolist()
        most_fields = min(MOST_FIELDS, most_fields)
        groups = [
            Group(number, begin, min(begin + most_fields, end))
            for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
            for begin in range(start, end, most_fields)
        ]
        return order, groups

    def fitting(self, keys: Keys, sizes: NDArray[np.int64], margin: int) -> Mask:
        """Which of ``keys`` their partitions still have room for; ``sizes``, int64[partitions], grows by them."""
        places = self.places(keys)
        order = np.argsort(places, kind="stable")
        starts = np.searchsorted(places[order], np.arange(len(self)))
        ranks = np.empty(keys.size, dtype=np.int64)
        ranks[order] = np.arange(keys.size) - starts[places[order]]
        fits: Mask = sizes[places] + ranks < margin
        sizes += np.bincount(places[fits], minlength=sizes.size)
        return fits


class RedisRows:
    """Encodes and decodes a table's keys and rows. Every method may be called from any thread.

    Attributes:
        spec: the table.
        partitions: its partitions.
        codec: the form of its rows.
    """

    def __init__(self, spec: TableSpec, config: RedisConfig) -> None:
        """Take the table, and the number of partitions, the row type and the maximum keys of one round of commands."""
        self.spec = spec
        self.partitions = Partitions(spec.name, config.num_partitions)
        self.codec = RowCodec(STORE_NAME, spec, config.row_dtype)
        self._max_batch_size = config.max_batch_size

    def rounds(self, count: int, bytes_per_key: int) -> Iterator[slice]:
        """The parts of ``count`` keys that are sent at once."""
        rows = max(min(self._max_batch_size, MOST_ROUND_BYTES // bytes_per_key), 1)
        return (slice(start, start + rows) for start in range(0, count, rows))

    @property
    def field_bytes(self) -> int:
        """The size of a key as a word of a command."""
        return self.spec.key_bytes + 6

    def groups(self, keys: Keys, most_fields: int | None = None) -> tuple[NDArray[np.intp], list[Group]]:
        """See ``Partitions.groups``."""
        return self.partitions.groups(keys, most_fields or self._max_batch_size)

    def words(self, keys: Keys, rows: Vectors, most_fields: int | None = None) -> list[tuple[int, NDArray[np.uint8]]]:
        """Rows as words of commands: for each its partition, and uint8[N, ...], each a key and its row's value."""
        order, groups = self.groups(keys, most_fields)
        words = encoded_rows(keys[order], self.codec.encode(keys[order], rows[order]), self.spec.key_bytes)
        return [(group.partition, words[group.begin : group.end]) for group in groups]

    def fields(self, keys: Keys) -> list[tuple[int, NDArray[np.uint8]]]:
        """Keys as words of commands: for each its partition, and uint8[N, ...]."""
        order, groups = self.groups(keys)
        words = encoded_fields(keys[order], self.spec.key_bytes)
        return [(group.partition, words[group.begin : group.end]) for group in groups]

    def reads(self, keys: Keys, out: Vectors, order: NDArray[np.intp], groups: Sequence[Group]) -> list[Command]:
        """Commands that read keys in groups, see ``groups``, and write the rows to ``out``."""
        fields = encoded_fields(keys[order], self.spec.key_bytes)
        commands = []
        for group in groups:
            partition, at = self.partitions[group.partition], order[group.begin : group.end]
            payload = header(b"HMGET", partition.values, at.size + 2) + fields[group.begin : group.end].tobytes()
            take, value_bytes = self._taker(out, at), self.codec.value_bytes
            commands.append(Command("HMGET", partition.values, payload, take, at.size, value_bytes))
        return commands

    def _taker(self, out: Vectors, at: NDArray[np.intp]) -> Callable[[NDArray[np.void]], None]:
        """A function that takes values without gaps, void[N], and writes them to rows ``at`` of ``out``."""
        if self.codec.row_dtype == "fp32":
            return partial(_put, out.view(f"V{self.codec.value_bytes}").reshape(-1), at)
        return lambda values: _put(out, at, self.codec.decode(values.tobytes()))

    def fill(self, keys: Keys, values: Sequence[bytes | None], out: Vectors, at: NDArray[np.intp]) -> Mask:
        """Write ``values`` to rows ``at`` of ``out``, zeros if a value is None; returns which are present.

        Raises:
            StoreError: a value is of another size; the message names its key.
        """
        present = np.fromiter((value is not None for value in values), dtype=np.bool_, count=at.size)
        present_values = [value for value in values if value is not None]
        self._check_values(keys[at[present]], present_values)
        out[at] = 0.0
        out[at[present]] = self.codec.decode(b"".join(present_values))
        return present

    def decoded(self, values_by_key: Mapping[bytes, bytes]) -> tuple[Keys, Vectors]:
        """Raw keys and values as keys and rows. See ``fill`` for the errors."""
        raw_keys, values = list(values_by_key), list(values_by_key.values())
        strange = next((key for key in raw_keys if len(key) != self.spec.key_bytes), None)
        if strange is not None:
            raise self.error(f"holds a key of {len(strange)} bytes, expected {self.spec.key_bytes}")
        keys = keys_of(raw_keys, self.spec.key_bytes)
        self._check_values(keys, values)
        return keys, self.codec.decode(b"".join(values))

    def batches(self, scanned: Iterator[Mapping[bytes, bytes]], batch_rows: int) -> Iterator[tuple[Keys, Vectors]]:
        """Scanned rows in batches, each key once, although Redis may return a key twice."""
        seen, rows = KeyIndex(), dict[bytes, bytes]()
        for page in scanned:
            rows |= self._unseen(page, seen)
            while len(rows) >= batch_rows:
                listed = list(rows.items())
                yield self.decoded(dict(listed[:batch_rows]))
                rows = dict(listed[batch_rows:])
        if rows:
            yield self.decoded(rows)

    def error(self, reason: str) -> StoreError:
        """An error that names the table."""
        return StoreError(STORE_NAME, self.spec.name, reason)

    def _unseen(self, rows: Mapping[bytes, bytes], seen: KeyIndex) -> Mapping[bytes, bytes]:
        keys, before = self.decoded(rows)[0], len(seen)
        try:
            is_new = seen.find_or_insert(keys) >= before
        except ReservedKeyError as err:
            raise self.error(str(err)) from err
        if is_new.all():
            return rows
        return {key: row for (key, row), new in zip(rows.items(), is_new, strict=True) if new}

    def _check_values(self, keys: Keys, values: Sequence[bytes]) -> None:
        value_bytes = self.codec.value_bytes
        if set(map(len, values)) - {value_bytes}:
            at = next(place for place, value in enumerate(values) if len(value) != value_bytes)
            reason = f"the value of key {keys[at]} has {len(values[at])} bytes, {self.codec.expectation()}"
            raise self.error(reason)


def _put(out: NDArray[np.generic], at: NDArray[np.intp], values: NDArray[np.generic]) -> None:
    out[at] = values
