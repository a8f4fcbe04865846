"""Redis Streams as a log: a stream is one partition. It works with Redis 6.2 and later.

Redis forgets what it trimmed, so each read also asks for the entry at the position, in one transaction. If the entry is
gone and is not the newest, later entries may be gone too, which is an error.
"""

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from serving.errors import MissingExtraError, PositionLostError, SinkError, SourceUnreachableError
from serving.stream.source import Record, UpdateSink, UpdateSource, check_sum

PAYLOAD = b"payload"
_BEFORE_ALL = "0-0"
_POSITION = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_WAIT_S = 0.1
_TIMEOUT_S = 10.0
_READ_ENTRIES = 16  # of each stream at once: with messages of 1 MB, still about MOST_POLL_BYTES
_MOST_BUFFERED_BYTES = 1 << 20


@dataclass
class RedisAddress:
    """Where a Redis server is, and how to connect.

    Attributes:
        host: the server.
        port: its port.
        database: the number of the database.
        tls: whether to speak TLS.
        options: redis-py's ``username``, ``password``, ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``.
        timeout_s: how long the server may take to answer.
    """

    host: str
    port: int
    database: int = 0
    tls: bool = False
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = _TIMEOUT_S

    @property
    def name(self) -> str:
        """The server in messages."""
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.database}"

    def client(self) -> Any:
        """Return a client of redis-py's that connects when it is used, and never repeats a command."""
        try:
            from redis import Redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as err:
            raise MissingExtraError("redis", "redis", "a log in Redis") from err
        options: dict[str, Any] = {
            "socket_timeout": self.timeout_s,
            "socket_connect_timeout": self.timeout_s,
            "retry": Retry(NoBackoff(), 0),  # a repeated XADD would write twice
            "protocol": 2,
            **self.options,
        }
        return Redis(self.host, self.port, self.database, ssl=self.tls, **options)


@dataclass
class _Stream:
    """What is known about one stream.

    Attributes:
        position: the last entry that was read; None: none was.
        check: the checksum of that entry, until it is compared.
        first: the oldest entry.
        last: the newest entry that there ever was.
        length: number of entries; None if the stream was not asked yet.
    """

    position: str | None = None
    check: int | None = None
    first: str = _BEFORE_ALL
    last: str = _BEFORE_ALL
    length: int | None = None

    def lag(self) -> int | None:
        """Estimate how many entries follow the position: Redis 6.2 cannot count them, so their times decide."""
        if not self.length or self.position == self.last:
            return self.length and 0
        if self.position is None or _ordered(self.position) < _ordered(self.first):
            return self.length
        first, last, here = (_ordered(text)[0] for text in (self.first, self.last, self.position))
        ratio = (last - here) / max(last - first, 1)
        return min(max(round(self.length * ratio), 1), self.length)


class RedisStreamSource(UpdateSource):
    """See ``UpdateSource``. A position is the identifier of the last entry that was read."""

    def __init__(self, address: RedisAddress, keys: Collection[str]) -> None:
        """Connect nowhere yet.

        Args:
            address: the server.
            keys: the streams to read; those that are absent are read when they appear.

        Raises:
            MissingExtraError: redis-py is not installed.
        """
        self._address = address
        self._streams = {key: _Stream() for key in keys}
        self._closed = threading.Event()
        self._lock = threading.Lock()  # held by whoever uses the client
        self._client = address.client()

    def start(self, positions: Mapping[str, str], last: Mapping[str, int] | None = None) -> None:
        """See ``UpdateSource``."""
        for key in self._streams.keys() & positions.keys():
            if not _POSITION.fullmatch(positions[key]):
                raise PositionLostError(self._address.name, key, repr(positions[key]), "identifiers", "identifiers")
        self._streams = {key: _Stream(positions.get(key), (last or {}).get(key)) for key in self._streams}

    def poll(self, timeout_s: float) -> list[Record]:
        """See ``UpdateSource``."""
        deadline = monotonic() + timeout_s
        while not self._closed.is_set():
            with self._lock:
                if self._closed.is_set():
                    break
                with self._translated():
                    records = self._read()
                    left_s = deadline - monotonic()
                    if records or left_s <= 0:
                        return records
                    self._wait(min(left_s, _WAIT_S))
        return []

    def lag(self) -> dict[str, int]:
        """See ``UpdateSource``. While entries wait, the number is an estimate."""
        lags = {key: stream.lag() for key, stream in self._streams.items()}
        return {key: lag for key, lag in lags.items() if lag is not None}

    def close(self) -> None:
        """See ``UpdateSource``."""
        self._closed.set()
        self._client.connection_pool.disconnect()  # ends a command that Redis does not answer
        with self._lock:
            self._client.close()

    def _wait(self, wait_s: float) -> None:
        """Wait for an entry; ``_read`` reads it again, with its checks."""
        after = {key: stream.position or _BEFORE_ALL for key, stream in self._streams.items()}
        self._client.xread(after, count=1, block=max(int(wait_s * 1000), 1))

    def _read(self) -> list[Record]:
        with self._client.pipeline(transaction=True) as transaction:
            for key, stream in self._streams.items():
                at = stream.position or _BEFORE_ALL
                transaction.xrange(key, at, at, count=1)
                transaction.execute_command("XINFO STREAM", key)
                transaction.xread({key: at}, count=_READ_ENTRIES)
            replies = transaction.execute(raise_on_error=False)
        records: list[Record] = []
        for number, (key, stream) in enumerate(self._streams.items()):
            here, about, read = replies[3 * number : 3 * number + 3]
            self._check(key, stream, here, about)
            if isinstance(read, Exception):
                raise read
            records += [_record(key, *entry) for _, entries in read for entry in entries]
        for record in records:
            self._streams[record.partition].position = record.position
        return records

    def _check(self, key: str, stream: _Stream, here: Any, about: Any) -> None:
        """Learn about a stream, and raise PositionLostError if entries after the position may be gone."""
        if isinstance(here, Exception):
            raise here
        if isinstance(about, Exception):
            if "no such key" not in str(about):
                raise about
            stream.length, stream.first, stream.last = 0, _BEFORE_ALL, _BEFORE_ALL
        else:
            stream.length, stream.last = about["length"], about["last-generated-id"].decode()
            stream.first = about["first-entry"][0].decode() if about["first-entry"] else stream.last
        is_another = bool(here) and stream.check not in (None, check_sum(_record(key, *here[0]).payload))
        if not is_another and (stream.position in (None, _BEFORE_ALL) or here or stream.position == stream.last):
            stream.check = None
            return
        first, last = (stream.first, stream.last) if stream.length else ("", "")
        where = self._address.name, key, str(stream.position)
        raise PositionLostError(*where, first, last, is_another=is_another)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError) as err:
            with suppress(RedisError, OSError):
                self._client.connection_pool.disconnect()  # an answer may still come over the connection
            if not self._closed.is_set():
                raise SourceUnreachableError(self._address.name, str(err)) from err


class RedisStreamSink(UpdateSink):
    """See ``UpdateSink``. Entries are added in transactions, so no message follows a message that was not taken."""

    def __init__(self, address: RedisAddress, key: str | None = None) -> None:
        """Connect nowhere yet.

        Args:
            address: the server.
            key: the stream of messages without a topic.

        Raises:
            MissingExtraError: redis-py is not installed.
        """
        self._address = address
        self._key = key
        self._waiting: list[tuple[str, bytes]] = []
        self._waiting_bytes = 0
        self._ends: dict[str, str] = {}
        self._failure: str | None = None
        self._client = address.client()

    def send(self, payload: bytes, key_group: int, topic: str | None = None) -> None:
        """See ``UpdateSink``."""
        where = topic or self._key
        if where is None:
            raise SinkError(self._address.name, "neither the URL nor the call names a stream")
        self._check()
        self._waiting.append((where, payload))
        self._waiting_bytes += len(payload)
        if self._waiting_bytes >= _MOST_BUFFERED_BYTES:
            self._add()

    def flush(self) -> dict[str, str]:
        """See ``UpdateSink``."""
        self._check()
        self._add()
        return dict(self._ends)

    def close(self) -> None:
        """See ``UpdateSink``."""
        self._client.close()

    def _add(self) -> None:
        from redis.exceptions import RedisError

        if not self._waiting:
            return
        try:
            with self._client.pipeline(transaction=True) as transaction:
                for key, payload in self._waiting:
                    transaction.xadd(key, {PAYLOAD: payload})
                added = transaction.execute()
        except (RedisError, OSError) as err:
            self._failure = str(err)
            raise SinkError(self._address.name, self._failure) from err
        for (key, _), identifier in zip(self._waiting, added, strict=True):
            self._ends[key] = identifier.decode()
        self._waiting, self._waiting_bytes = [], 0

    def _check(self) -> None:
        if self._failure is not None:
            raise SinkError(self._address.name, self._failure)


def _record(key: str, identifier: bytes, fields: Mapping[bytes, bytes] | None) -> Record:
    position = identifier.decode()
    return Record(key, position, (fields or {}).get(PAYLOAD, b""), None, key, _ordered(position)[0])


def _ordered(position: str) -> tuple[int, int]:
    before, _, after = position.partition("-")
    return int(before), int(after)
