"""Kafka as a log, through librdkafka (confluent-kafka).

Partitions are assigned here and never by a consumer group: the position is kept with the rows. Topics of a model are
``hotrow.<model>``, and ``hps_et.<model>.<table>`` in HPS's format.
"""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from serving.errors import ConfigError, MissingExtraError, PositionLostError, SinkError, SourceUnreachableError
from serving.stream.source import MOST_POLL_BYTES, Record, UpdateSink, UpdateSource, check_sum

_ABSENT_S = 1.0
_WAIT_S = 0.1  # how long ``close`` waits for a poll at most, unless the brokers are being asked
_ASK_S = 3.0
_SILENT_S = 5.0  # a broker that hangs is no error of librdkafka's, so one that says nothing for so long is asked
_TOPIC_S = 15.0  # how long the brokers may take to make a topic
_MOST_AT_ONCE = 64
_SECRET_WORDS = ("password", "secret", "key.pem", "oauthbearer.config", "client.id.token")

_SHARED = {
    "log_level": 2,  # errors become exceptions, so librdkafka need not print them
    "socket.timeout.ms": 10_000,
    "reconnect.backoff.max.ms": 1000,
}
_CONSUMER = _SHARED | {
    "group.id": "hotrow",  # only for ``commit``
    "fetch.wait.max.ms": 50,
    "fetch.queue.backoff.ms": 10,
    "queued.max.messages.kbytes": 16_384,
}
_CONSUMER_OWN = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # a lost position is never a silent jump
    "enable.partition.eof": False,
    "allow.auto.create.topics": False,
}
_PRODUCER = _SHARED | {"linger.ms": 5, "message.timeout.ms": 60_000}
_PRODUCER_OWN = {
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,  # no message follows a message that was not taken
}
#: The settings of a source that a user cannot choose: the position is stored with the rows, never left to the brokers.
OWN_SETTINGS = frozenset({"bootstrap.servers", *_CONSUMER_OWN})


#: How long the end of a client may take.
_CLOSE_S = 2.0
#: The clients whose brokers hang while they end, by their addresses and topics.
_ENDING: dict[tuple[str, frozenset[str]], threading.Thread] = {}


class _Brokers:
    """The addresses and settings of a Kafka cluster.

    Attributes:
        addresses: ``host:port[,host:port]``.
        name: the cluster in messages.
        ask_s: how long the brokers may take to answer a question.
    """

    def __init__(
        self, brokers: str, settings: Mapping[str, str], own: Mapping[str, Any], secrets: Collection[str] = ()
    ) -> None:
        """Take addresses apart by commas, or by HPS's semicolons. The settings named in ``secrets`` are never shown."""
        self.addresses = brokers.replace(";", ",")
        self.name = f"kafka://{self.addresses}"
        self._settings = settings
        timeout_ms = settings.get("socket.timeout.ms", "")
        self.ask_s = min(int(timeout_ms) / 1000, _ASK_S) if timeout_ms.isdecimal() else _ASK_S
        self._secrets = [
            value
            for name, value in settings.items()
            if value and (name in secrets or any(word in name for word in _SECRET_WORDS))
        ]
        for name in settings:
            if name in own or name == "bootstrap.servers" or name.startswith("test."):
                raise ConfigError(self.name, name, "Hotrow decides about this setting")

    def told(self, error: Exception) -> str:
        """Return an error's text without the values of secrets."""
        text = error.args[0].str() if error.args and hasattr(error.args[0], "str") else str(error)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def open(self, kind: str, defaults: Mapping[str, Any], own: Mapping[str, Any], **callbacks: Any) -> Any:
        """Open librdkafka's ``Consumer`` or ``Producer``.

        Raises:
            ConfigError: librdkafka refuses a setting.
            MissingExtraError: confluent-kafka is not installed.
        """
        library = _library()
        configuration = {**defaults, **self._settings, **own, "bootstrap.servers": self.addresses, **callbacks}
        try:
            return getattr(library, kind)(configuration)
        except (library.KafkaException, TypeError, ValueError) as err:
            raise ConfigError(self.name, "", self.told(err)) from None  # the cause's text may have secrets


class KafkaSource(UpdateSource):
    """See ``UpdateSource``. A position is the offset of the next message."""

    def __init__(
        self,
        brokers: str,
        topics: Collection[str],
        settings: Mapping[str, str] | None = None,
        *,
        refresh_s: float = 30.0,
        secrets: Collection[str] = (),
    ) -> None:
        """Make a client; it connects in the background.

        Args:
            brokers: ``host:port[,host:port]``.
            topics: the topics to read; those that are absent are read when they appear.
            settings: librdkafka's, by name. ``group.id`` is the group that ``commit`` writes to.
            refresh_s: how often the brokers are asked for new partitions; at least once a second while there are none.
            secrets: the names of settings that no error shows, besides those that are secrets by their names.

        Raises:
            ConfigError: librdkafka refuses a setting.
            MissingExtraError: confluent-kafka is not installed.
        """
        self._brokers = _Brokers(brokers, settings or {}, _CONSUMER_OWN, secrets)
        self._topics = frozenset(topics)
        self._key = self._brokers.addresses, self._topics
        self._client: Any = None
        self._refresh_s = refresh_s
        self._closed = threading.Event()
        self._lock = threading.Lock()  # held by whoever uses the client, so ``close`` frees no client in use
        self._positions: dict[str, int] = {}
        self._assigned: set[str] = set()
        self._ends: dict[str, tuple[int, int]] = {}  # the first and the next offset, by partition, when asked last
        self._last: dict[str, int] = {}  # checksums of the records before the positions, until compared
        self._made_again: set[str] = set()
        self._refresh_at_s = 0.0
        self._heard_s = 0.0  # when the brokers answered last
        self._outage: str | None = None
        self._fault: str | None = None
        self._client = self._brokers.open("Consumer", _CONSUMER, _CONSUMER_OWN, error_cb=self._note_error)

    def start(self, positions: Mapping[str, str], last: Mapping[str, int] | None = None) -> None:
        """See ``UpdateSource``."""
        ending = _ENDING.get(self._key)
        if ending is not None and ending.is_alive():  # so at most one client of a log is left behind
            raise SourceUnreachableError(self._brokers.name, "its brokers hang, and do not let an earlier client end")
        _ENDING.pop(self._key, None)
        chosen = {}
        for name, text in positions.items():
            if name.rpartition("/")[0] not in self._topics:
                continue
            if not (text.isascii() and text.isdigit()):
                raise PositionLostError(self._brokers.name, name, repr(text), "whole numbers", "whole numbers")
            chosen[name] = int(text)
        with self._lock:
            if not self._closed.is_set():
                self._client.unassign()
            self._positions, self._assigned = chosen, set()
            self._last, self._made_again = dict(last or {}), set()
            self._refresh_at_s = 0.0
            self._fault = None

    def poll(self, timeout_s: float) -> list[Record]:
        """See ``UpdateSource``."""
        deadline = monotonic() + timeout_s
        while not self._closed.is_set():
            with self._lock:
                if self._closed.is_set():
                    break
                records = self._poll(max(min(_WAIT_S, deadline - monotonic()), 0))
            if records or monotonic() >= deadline:
                return records
        return []

    def lag(self) -> dict[str, int]:
        """See ``UpdateSource``."""
        lags = {}
        with self._lock:
            for name in () if self._closed.is_set() else self._assigned:
                low, high = self._client.get_watermark_offsets(_partition(name), cached=True)
                if high < 0:  # nothing was fetched yet
                    low, high = self._ends[name]
                lags[name] = max(high - self._positions.get(name, low), 0)
        return lags

    def commit(self, positions: Mapping[str, str]) -> None:
        """See ``UpdateSource``."""
        offsets = [
            _partition(name, int(text)) for name, text in positions.items() if name.rpartition("/")[0] in self._topics
        ]
        with self._lock, suppress(_library().KafkaException):
            if offsets and not self._closed.is_set():
                self._client.commit(offsets=offsets, asynchronous=True)

    def close(self) -> None:
        """See ``UpdateSource``.

        A client waits for the answer to its last commit. If the brokers hang, it ends later, in a thread.
        """
        self._closed.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            ending = threading.Thread(target=client.close, name="hotrow-kafka-close", daemon=True)
            ending.start()
            ending.join(_CLOSE_S)
            if ending.is_alive():
                _ENDING[self._key] = ending

    def _poll(self, wait_s: float) -> list[Record]:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise SourceUnreachableError(self._brokers.name, fault)
        if monotonic() >= self._refresh_at_s:
            self._assign_new()
            self._refresh_at_s = monotonic() + (self._refresh_s if self._assigned else min(self._refresh_s, _ABSENT_S))
        records = self._take(wait_s)
        if records:
            self._outage = None
        elif self._outage is not None:
            self._found_partitions()  # raises while the brokers are away
        if records:
            self._heard_s = monotonic()
        elif monotonic() >= self._heard_s + _SILENT_S:
            self._ends = {name: self._ask_ends(name) for name in self._assigned}
            self._heard_s = monotonic()
        return records

    def _ask_ends(self, name: str) -> tuple[int, int]:
        """Ask for the first and the next offset of a partition.

        Raises:
            SourceUnreachableError: its broker does not answer in time.
        """
        with self._translated():
            low, high = self._client.get_watermark_offsets(_partition(name), timeout=self._brokers.ask_s)
        return low, high

    def _take(self, wait_s: float) -> list[Record]:
        records: list[Record] = []
        size_bytes = 0
        first = self._client.poll(wait_s)
        messages = [] if first is None else [first]
        while messages:
            for message in messages:
                if message.error() is not None:
                    self._note_message_error(message)
                    continue
                record = _record(message)
                if record.partition not in self._assigned or self._is_before_position(record):
                    continue
                self._positions[record.partition] = int(record.position)
                records.append(record)
                size_bytes += len(record.payload)
            messages = self._client.consume(_MOST_AT_ONCE, 0.0) if size_bytes < MOST_POLL_BYTES else []
        return records

    def _is_before_position(self, record: Record) -> bool:
        """Whether a record is the one before the position, which was read only to compare it."""
        name, last = record.partition, self._last.pop(record.partition, None)
        if last is None or int(record.position) > self._positions[name]:
            return False
        if check_sum(record.payload) != last:
            self._made_again.add(name)
            self._unassign(name)
        return True

    def _unassign(self, name: str) -> None:
        """Have the next poll compare the position of a partition with the log's."""
        self._client.incremental_unassign([_partition(name)])
        self._assigned.remove(name)
        self._refresh_at_s = 0.0

    def _assign_new(self) -> None:
        """Assign the partitions that are not assigned yet. The position of each is checked first."""
        found = self._found_partitions()
        for name in self._positions.keys() - found:
            raise PositionLostError(self._brokers.name, name, str(self._positions[name]), "", "")
        for name in sorted(found - self._assigned):
            low, high = self._ends[name] = self._ask_ends(name)
            position = self._positions.get(name, low)
            is_another = name in self._made_again
            if is_another or not low <= position <= high:
                where = self._brokers.name, name, str(position)
                raise PositionLostError(*where, str(low), str(high), is_another=is_another)
            if low == position:
                self._last.pop(name, None)
            with self._translated():
                self._client.incremental_assign([_partition(name, position - (name in self._last))])
            self._assigned.add(name)

    def _found_partitions(self) -> set[str]:
        with self._translated():
            # All topics: asking for a topic by name could make it.
            topics = self._client.list_topics(timeout=self._brokers.ask_s).topics
        self._outage = None
        return {f"{topic}/{number}" for topic in self._topics & topics.keys() for number in topics[topic].partitions}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except _library().KafkaException as err:
            raise SourceUnreachableError(self._brokers.name, self._brokers.told(err)) from None

    def _note_error(self, error: Any) -> None:
        """Librdkafka calls this from ``poll``: an outage, or brokers that refuse."""
        self._outage = self._brokers.told(Exception(error))

    def _note_message_error(self, message: Any) -> None:
        error, codes = message.error(), _library().KafkaError
        if error.code() not in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
            self._fault = f"{message.topic()}: {self._brokers.told(Exception(error))}"
            return
        name = f"{message.topic()}/{message.partition()}"
        if name in self._assigned:
            self._unassign(name)


class KafkaSink(UpdateSink):
    """See ``UpdateSink``. The producer is idempotent, and leaves no gap."""

    def __init__(self, brokers: str, topic: str | None = None, settings: Mapping[str, str] | None = None) -> None:
        """Make a client; it connects in the background.

        Args:
            brokers: ``host:port[,host:port]``.
            topic: where messages without a topic go.
            settings: librdkafka's, by name.

        Raises:
            ConfigError: librdkafka refuses a setting.
            MissingExtraError: confluent-kafka is not installed.
        """
        self._brokers = _Brokers(brokers, settings or {}, _PRODUCER_OWN)
        self._topic = topic
        self._counts: dict[str, int] = {}  # partitions by topic, as they were when the sink first wrote
        self._ends: dict[str, int] = {}
        self._failure: str | None = None
        self._client = self._brokers.open("Producer", _PRODUCER, _PRODUCER_OWN)

    def send(self, payload: bytes, key_group: int, topic: str | None = None) -> None:
        """See ``UpdateSink``."""
        where = topic or self._topic
        if where is None:
            raise SinkError(self._brokers.name, "neither the URL nor the call names a topic")
        self._check()
        partition = (key_group & 0x7FFFFFFF) % self._partition_count(where)
        while True:
            try:
                self._client.produce(where, payload, partition=partition, on_delivery=self._note_delivery)
            except BufferError:
                self._client.poll(_WAIT_S)
                self._check()
            except _library().KafkaException as err:
                self._failure = f"{where}: {self._brokers.told(err)}"
                self._check()
            else:
                break
        self._client.poll(0)

    def flush(self) -> dict[str, str]:
        """See ``UpdateSink``."""
        while self._failure is None and self._client.flush(_WAIT_S):
            pass
        self._check()
        return {name: str(end) for name, end in self._ends.items()}

    def close(self) -> None:
        """See ``UpdateSink``."""
        self._client.purge()
        self._client.flush(_WAIT_S)

    def _partition_count(self, topic: str) -> int:
        deadline = monotonic() + _TOPIC_S
        while topic not in self._counts:
            try:
                found = self._client.list_topics(topic, timeout=self._brokers.ask_s).topics[topic]
                reason = "the topic has no partitions" if found.error is None else found.error.str()
                if found.error is None and found.partitions:
                    self._counts[topic] = len(found.partitions)
                    break
            except _library().KafkaException as err:
                reason = self._brokers.told(err)
            if monotonic() >= deadline:
                self._failure = f"{topic}: {reason}"
                self._check()
            self._client.poll(_WAIT_S)
        return self._counts[topic]

    def _note_delivery(self, error: Any, message: Any) -> None:
        """Librdkafka calls this from ``poll`` and ``flush``."""
        if error is not None:
            self._failure = self._failure or f"{message.topic()}: {self._brokers.told(Exception(error))}"
            return
        name = f"{message.topic()}/{message.partition()}"
        self._ends[name] = max(self._ends.get(name, 0), message.offset() + 1)

    def _check(self) -> None:
        if self._failure is not None:
            raise SinkError(self._brokers.name, self._failure)


def _record(message: Any) -> Record:
    topic, offset = message.topic(), message.offset()
    name = f"{topic}/{message.partition()}"
    time_ms = max(message.timestamp()[1], 0)
    return Record(name, str(offset + 1), message.value() or b"", message.key() or None, topic, time_ms)


def _partition(name: str, offset: int | None = None) -> Any:
    topic, _, number = name.rpartition("/")
    options = {} if offset is None else {"offset": offset}
    return _library().TopicPartition(topic, int(number), **options)


def _library() -> Any:
    try:
        import confluent_kafka
    except ImportError as err:
        raise MissingExtraError("confluent-kafka", "kafka", "a log in Kafka") from err
    return confluent_kafka
