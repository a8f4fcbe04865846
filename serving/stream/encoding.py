"""Rows and deleted keys as messages for ``UpdateSink.send``, in Hotrow's format or in HPS's."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.errors import BadMessageError
from serving.model.hps_hash import KEY_GROUPS, key_groups
from serving.stream.hps_message import encode_hps, hps_topic
from serving.stream.message import Kind, UpdateMessage, WireDtype, encode

MessageFormat = Literal["hotrow", "hps"]
#: A message has at most this many rows, and about this many bytes of them: Kafka's brokers refuse 1 MB by default.
MOST_ROWS = 8192
MOST_ROW_BYTES = 900_000


class Encoded(NamedTuple):
    """The arguments of ``UpdateSink.send``."""

    payload: bytes
    key_group: int
    topic: str | None


class MessageEncoder:
    """Encodes changes of one model's tables. Each message has keys of one group.

    Attributes:
        sequence: the number of the next message; None: messages have no numbers.
    """

    def __init__(
        self,
        model: str,
        message_format: MessageFormat = "hotrow",
        dtype: WireDtype = "float32",
        key_bytes: int = 8,
        run: str | None = None,
        publisher: str | None = None,
        sequence: int | None = None,
    ) -> None:
        """Take what the messages say, see ``UpdateMessage``.

        Args:
            model: the model's name.
            message_format: HPS's messages have float32 rows and no stamps, and cannot delete.
            dtype: of the rows in Hotrow's format.
            key_bytes: of a key in HPS's format; see ``encode_hps``.
            run: the training run.
            publisher: the process that sends the messages.
            sequence: the number of the first message.
        """
        self.sequence = sequence
        self._model = model
        self._format = message_format
        self._dtype = dtype
        self._key_bytes = key_bytes
        self._run = run
        self._publisher = publisher

    def upserts(
        self,
        table: str,
        keys: NDArray[np.int64],
        rows: NDArray[np.float32],
        step: int | None = None,
        time_ms: int | None = None,
    ) -> Iterator[Encoded]:
        """Yield messages that write rows.

        Args:
            table: the table's name.
            keys: int64[N].
            rows: float32[N, D].
            step: the trainer's step.
            time_ms: the trainer's clock, in milliseconds since 1970.

        Raises:
            BadMessageError: the format cannot hold a key or a row.
        """
        for group, at in _groups(keys, _most_rows(rows, self._dtype)):
            try:
                if self._format == "hps":
                    for payload in encode_hps(keys[at], rows[at], self._key_bytes):
                        yield Encoded(payload, group, hps_topic(self._model, table))
                else:
                    yield self._encoded(Kind.UPSERT, table, keys[at], rows[at], group, step, time_ms)
            except BadMessageError as err:
                raise BadMessageError(err.reason, f"table {table}: {err}") from err

    def deletes(
        self, table: str, keys: NDArray[np.int64], step: int | None = None, time_ms: int | None = None
    ) -> Iterator[Encoded]:
        """Yield messages that delete keys; see ``upserts``. HPS's format has none.

        Raises:
            ValueError: the format is HPS's.
            BadMessageError: the format cannot hold a key.
        """
        if self._format == "hps":
            raise ValueError("HPS's format cannot delete keys")
        for group, at in _groups(keys, MOST_ROWS):
            yield self._encoded(Kind.DELETE, table, keys[at], None, group, step, time_ms)

    def _encoded(
        self,
        kind: Kind,
        table: str,
        keys: NDArray[np.int64],
        rows: NDArray[np.float32] | None,
        group: int,
        step: int | None,
        time_ms: int | None,
    ) -> Encoded:
        message = UpdateMessage(
            kind,
            self._model,
            table,
            keys,
            rows,
            run=self._run,
            publisher=self._publisher,
            sequence=self.sequence,
            step=step,
            time_ms=time_ms,
        )
        payload = encode(message, self._dtype)
        if self.sequence is not None:
            self.sequence += 1
        return Encoded(payload, group, None)


def _groups(keys: NDArray[np.int64], most: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each group and the places of at most so many of its keys, in the order of the keys."""
    groups = key_groups(keys)
    for group in range(KEY_GROUPS):
        places = np.flatnonzero(groups == group)
        for first in range(0, places.size, most):
            yield group, places[first : first + most]


def _most_rows(rows: NDArray[np.float32], dtype: WireDtype) -> int:
    value_bytes = {"float32": 4, "float16": 2, "int8": 1}[dtype]
    row_bytes: int = 12 + value_bytes * rows.shape[1]
    return min(MOST_ROWS, max(1, MOST_ROW_BYTES // row_bytes))
