"""What is said to Redis about a table: HPS's hashes, one per partition, read and written by arrays of keys.

Source of the names and layouts: HPS's Redis back-end, HugeCTR v24.06. Partition n of a table is the hash
``hps_et{<tag>/p<n>}v``; a field is a key's raw bytes, its value the row's float32 bytes. HPS's ``hps_et{<tag>/p<n>}t``
has what its overflow policies need to know of each key. The braces keep both on one node of a cluster.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serving.storage.hps_layout import raw_keys, tag
from serving.storage.store import Keys

SLOTS = 16384  # of a cluster


class Partition:
    """The names of one partition's keys in Redis.

    Attributes:
        values: HPS's hash of rows.
        times: HPS's hash of what its overflow policies know.
        record: Hotrow's own string, see ``redis_records``.
        evicting: Hotrow's own mark of the process that evicts rows.
    """

    __slots__ = ("evicting", "record", "times", "values")

    def __init__(self, table: str, number: int) -> None:
        """Name partition ``number`` of a table's full name."""
        stem = f"hps_et{{{tag(table)}/p{number}}}"
        self.values = f"{stem}v".encode()
        self.times = f"{stem}t".encode()
        self.record = f"{stem}.hotrow.loaded_from".encode()
        self.evicting = f"{stem}.hotrow.evicting".encode()

    def loading(self, load: str) -> tuple[bytes, bytes]:
        """Hotrow's own hashes in which ``load`` gathers what will replace ``values`` and ``times``."""
        suffix = f".hotrow.loading.{load}".encode()
        return self.values + suffix, self.times + suffix


class RedisNodeError(Exception):
    """A node did not answer, or answered with an error; the store makes a StoreError of it. The message names it."""


class RedisUnreachableError(RedisNodeError):
    """A node could not be asked, or gave no answer; the store makes a StoreUnreachableError of it."""


class RedisNodeTimeoutError(RedisUnreachableError):
    """A node was waited for in vain until the deadline; the store makes a StoreTimeoutError of it."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command on one key, or many of one name for one node.

    Attributes:
        name: its first word.
        key: its key, or one of theirs; the node that holds it is asked.
        payload: what is sent.
        take: where rows are asked for: what they are given to if every one is there; the reply is None then.
        count: how many rows are asked for, or how many commands these are.
        value_bytes: the size of a row.
        are_separate: these are ``count`` commands; their reply is the list of replies.
    """

    name: str
    key: bytes
    payload: bytes
    take: Callable[[NDArray[np.void]], None] | None = None
    count: int = 0
    value_bytes: int = 0
    are_separate: bool = False

    def taken_by(self, take: Callable[[NDArray[np.void]], None], count: int, value_bytes: int) -> "Command":
        """The same, asking for ``count`` rows."""
        return replace(self, take=take, count=count, value_bytes=value_bytes)


def plain(name: str, key: bytes, *words: bytes | str | int) -> Command:
    """A command of a few words."""
    return Command(name, key, packed(name, key, *words))


def packed(*words: bytes | str | int) -> bytes:
    """Words as they are sent."""
    return b"*%d\r\n" % len(words) + packed_words(*words)


def packed_words(*words: bytes | str | int) -> bytes:
    """Words of a command as they are sent, without how many there are."""
    raw = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"$%d\r\n%s\r\n" % (len(word), word) for word in raw])


def header(name: bytes, key: bytes, words: int) -> bytes:
    """The beginning of a command of ``words`` words: its name and its key."""
    return b"*%d\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (words, len(name), name, len(key), key)


def hdel(key: bytes, fields: NDArray[np.uint8]) -> Command:
    """Remove fields of a hash: uint8[N, ...], each as one word of a command."""
    return Command("HDEL", key, header(b"HDEL", key, 2 + len(fields)) + fields.tobytes())


def as_words(parts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Each row of uint8[N, ...] as one word of a command."""
    words = np.empty((parts.shape[0], parts.shape[1] + len(str(parts.shape[1])) + 5), dtype=np.uint8)
    _encode(words, parts)
    return words


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
