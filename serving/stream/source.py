"""What an update log must do: ``UpdateSource`` for the server's side, ``UpdateSink`` for the trainer's side."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, NamedTuple

from serving.errors import PositionLostError, SinkError, SourceUnreachableError

__all__ = [
    "MOST_POLL_BYTES",
    "PositionLostError",
    "Record",
    "SinkError",
    "SourceUnreachableError",
    "UpdateSink",
    "UpdateSource",
    "check_sum",
]

#: ``UpdateSource.poll`` stops at the first record that brings it to this many bytes.
MOST_POLL_BYTES: Final = 8 << 20


def check_sum(payload: bytes) -> int:
    """Return the CRC-32 of a payload, by which a position knows the record before it."""
    return zlib.crc32(payload)


class Record(NamedTuple):
    """One message as it lies in the log.

    Attributes:
        partition: the ordered part of the log: ``hotrow.dcn/3`` in Kafka, the stream's key in Redis, ``folder``.
        position: the position after this record. Store it with the rows, and give it to ``start`` to go on.
        payload: the message; empty if the record has none.
        message_key: Kafka's key of the message.
        topic: Kafka's topic, the stream's key in Redis, empty in a folder.
        time_ms: when the log got the record, in milliseconds since 1970.
    """

    partition: str
    position: str
    payload: bytes
    message_key: bytes | None
    topic: str
    time_ms: int


class UpdateSource(ABC):
    """Reads an update log. One thread uses it, but any thread may call ``close``."""

    @abstractmethod
    def start(self, positions: Mapping[str, str], last: Mapping[str, int] | None = None) -> None:
        """Say where ``poll`` goes on; it may be called again.

        A partition without a position begins at the earliest record. So does a partition that appears later. Positions
        of other logs are ignored. The log is not asked yet.

        Args:
            positions: by partition, from ``Record.position`` or ``UpdateSink.flush``.
            last: the ``check_sum`` of the record before a position, by partition. If the log has another record there,
                ``poll`` raises PositionLostError: the log was recreated.

        Raises:
            PositionLostError: a text is no position of this kind of log.
        """

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Record]:
        """Return the next records, about 8 MiB of payload at most, or an empty list if none came in time.

        Records of one partition are in the log's order. After ``close`` the list is empty. Every error leaves the
        positions as they are, so ``poll`` may be called again.

        Raises:
            SourceUnreachableError: the log is away, or refuses.
            PositionLostError: the records after a position are gone, the log is shorter than the position, or it was
                made again.
        """

    @abstractmethod
    def lag(self) -> Mapping[str, int]:
        """Return how many records were not polled yet, by partition, without waiting for the log.

        A partition is absent while nothing is known about it.
        """

    def commit(self, positions: Mapping[str, str]) -> None:  # noqa: B027 - only Kafka has people's lag tools
        """Show positions to tools that watch the log. They are never read back, and errors are ignored."""

    @abstractmethod
    def close(self) -> None:
        """End a waiting ``poll`` and release everything. Closing twice is allowed."""


class UpdateSink(ABC):
    """Writes to an update log. One thread uses it.

    A sink that has raised an error takes no more messages, because a gap would break the order. Open another sink then,
    and send again everything after the last ``flush`` that succeeded.
    """

    @abstractmethod
    def send(self, payload: bytes, key_group: int, topic: str | None = None) -> None:
        """Append a message; it is certain to be in the log only after ``flush``.

        Args:
            payload: the message.
            key_group: 0 to 7, the group of its keys; messages of one group are in one partition, in order.
            topic: Kafka's topic, or the stream's key in Redis; None: that of the URL. A folder has none.

        Raises:
            SinkError: the log did not take this message, or an earlier message.
        """

    @abstractmethod
    def flush(self) -> Mapping[str, str]:
        """Wait until the log has every message.

        Returns:
            The position after the last message that this sink sent, for each partition to which it sent any.

        Raises:
            SinkError: the log did not take a message.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Messages that were not flushed may be lost. Closing twice is allowed."""
