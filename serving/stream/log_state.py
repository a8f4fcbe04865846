"""How far a table has come in an update log, as its source of truth keeps it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from serving.model.strict_json import log_newer
from serving.stream.message import UpdateMessage
from serving.stream.source import Record, check_sum

# Publishers whose last sequence number is remembered, for each partition.
MOST_PUBLISHERS = 256
_MEMBERS = frozenset(("position", "sequences", "last"))


@dataclass(frozen=True, slots=True)
class LogState:
    """How far a table has come in one partition of a log.

    Attributes:
        position: where the log goes on; empty: at its beginning.
        sequences: the last sequence number of each publisher, so that a message that was published twice applies once.
        last: the checksum of the record before the position, which shows whether the log was recreated; None:
            unknown.
    """

    position: str = ""
    sequences: Mapping[str, int] = field(default_factory=dict)
    last: int | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """Compares positions of one partition: numbers, or the two numbers of a Redis stream."""
        # The log refuses other texts, which a manifest may have.
        return tuple(int(part) for part in self.position.split("-") if part.isdecimal())

    def after(self, record: Record) -> Self:
        """The state after a record, without the sequence number of its message."""
        return type(self)(record.position, self.sequences, check_sum(record.payload))

    def with_sequence(self, message: UpdateMessage) -> Self:
        """The state with the sequence number of a message, if it has any."""
        if message.publisher is None or message.sequence is None:
            return self
        name = publisher_of(message)
        others = [pair for pair in self.sequences.items() if pair[0] != name]
        newest = max(message.sequence, self.sequences.get(name, message.sequence))  # a message may come again
        return replace(self, sequences=dict([*others[-MOST_PUBLISHERS + 1 :], (name, newest)]))

    def write(self) -> str:
        """Return the state as text."""
        return json.dumps({"position": self.position, "sequences": self.sequences, "last": self.last})

    @classmethod
    def read(cls, text: str) -> Self:
        """Read what ``write`` returned."""
        document = json.loads(text)
        log_newer("the position of a table in an update log", frozenset(document.keys() - _MEMBERS))
        return cls(document["position"], document["sequences"], document.get("last"))


def publisher_of(message: UpdateMessage) -> str:
    """The name of a message's publisher in ``LogState.sequences``."""
    return f"{message.run or ''}/{message.publisher}"


def behind(at: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Say which position of a log comes after where the log was read to; empty if none does.

    Args:
        at: the positions that were reached, by partition.
        wanted: the positions that are to be reached.
    """
    for partition, position in wanted.items():
        now = at.get(partition, "")
        if LogState(now).order < LogState(position).order:
            return f"position {position} of {partition} (they are at {now or 'its beginning'})"
    return ""


def has_reached(reached: Mapping[str, str], wanted: Mapping[str, LogState]) -> bool:
    """Whether a table's states say that it has come as far as is wanted."""
    return all(
        partition in reached and LogState.read(reached[partition]).order >= state.order
        for partition, state in wanted.items()
    )
