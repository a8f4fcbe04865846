"""The commands that Hotrow sends to Redis, encoded for arrays of keys and rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.storage.hps_layout import raw_keys, tag
from serving.storage.store import Keys


class Partition:
    """The names of one partition's keys in Redis; see the package.

    Attributes:
        values: HPS's hash of rows.
        times: HPS's hash for its overflow policies.
        marker: Hotrow's marker.
        lease: the lease of the process that fills the partition.
        removed: the keys that were removed while the partition was filled.
        evicting: the mark of the process that evicts rows.
    """

    __slots__ = ("evicting", "lease", "marker", "removed", "times", "values")

    def __init__(self, table: str, number: int) -> None:
        """Name partition ``number`` of a table's full name."""
        stem = f"hps_et{{{tag(table)}/p{number}}}".encode()
        self.values = stem + b"v"
        self.times = stem + b"t"
        self.marker = stem + b".hotrow"
        self.lease = stem + b".hotrow.lease"
        self.removed = stem + b".hotrow.removed"
        self.evicting = stem + b".hotrow.evicting"

    def loading(self, token: str) -> tuple[bytes, bytes]:
        """Where a load gathers rows that will replace ``values`` and ``times``."""
        suffix = f".hotrow.loading.{token}".encode()
        return self.values + suffix, self.times + suffix


class RedisNodeError(Exception):
    """A node answered with an error; the store turns it into a StoreError. The message names the node."""


class RedisUnreachableError(RedisNodeError):
    """A node could not be asked, or did not answer; the store turns it into a StoreUnreachableError."""


class RedisNodeTimeoutError(RedisUnreachableError):
    """A node did not answer before the deadline; the store turns it into a StoreTimeoutError."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: its first word.
        key: one of its keys, which decides the node.
        payload: the encoded command.
        take: for HMGET, gets the rows if every row is there; the reply is None then.
        count: for HMGET, how many rows are asked for.
        value_bytes: for HMGET, the size of a row.
    """

    name: str
    key: bytes
    payload: bytes
    take: Callable[[NDArray[np.void]], None] | None = None
    count: int = 0
    value_bytes: int = 0


def plain(name: str, key: bytes, *words: bytes | str | int) -> Command:
    """A command of a few words."""
    return Command(name, key, packed(name, key, *words))


def packed(*words: bytes | str | int) -> bytes:
    """Encode a command."""
    return b"*%d\r\n" % len(words) + packed_words(*words)


def packed_words(*words: bytes | str | int) -> bytes:
    """Encode words of a command, without their count."""
    raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"$%d\r\n%s\r\n" % (len(word), word) for word in raw])


def header(name: bytes, key: bytes, words: int) -> bytes:
    """The beginning of a command of ``words`` words: its name and its key."""
    return b"*%d\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (words, len(name), name, len(key), key)


def hdel(key: bytes, fields: NDArray[np.uint8]) -> Command:
    """Remove fields of a hash: uint8[N, ...], each as one word of a command."""
    return Command("HDEL", key, header(b"HDEL", key, 2 + len(fields)) + fields.tobytes())


def encoded_fields(keys: Keys, key_bytes: int) -> NDArray[np.uint8]:
    """Each key as one word of a command: uint8[N, key_bytes + 6]."""
    encoded = np.empty((keys.size, key_bytes + 6), dtype=np.uint8)
    _encode(encoded, raw_keys(keys, key_bytes).view(np.uint8).reshape(-1, key_bytes))
    return encoded


def encoded_rows(keys: Keys, values: NDArray[np.uint8], key_bytes: int) -> NDArray[np.uint8]:
    """Each key and its row's value, uint8[N, ...], as two words of a command: uint8[N, ...]."""
    field_bytes, row_bytes = key_bytes + 6, values.shape[1]
    encoded = np.empty((keys.size, field_bytes + row_bytes + len(str(row_bytes)) + 5), dtype=np.uint8)
    _encode(encoded[:, :field_bytes], raw_keys(keys, key_bytes).view(np.uint8).reshape(-1, key_bytes))
    _encode(encoded[:, field_bytes:], values)
    return encoded


def _encode(out: NDArray[np.uint8], words: NDArray[np.uint8]) -> None:
    r"""Write ``$<length>\r\n<word>\r\n`` into each row of ``out``."""
    head = np.frombuffer(b"$%d\r\n" % words.shape[1], dtype=np.uint8)
    out[:, : head.size] = head
    out[:, head.size : -2] = words
    out[:, -2:] = np.frombuffer(b"\r\n", dtype=np.uint8)
