"""Changes that an ordered log brings to a table of which Redis is the source of truth."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.errors import RequestError
from serving.storage.hps_layout import keys_of
from serving.storage.redis import marker as scripts
from serving.storage.redis.commands import plain
from serving.storage.redis.nodes import RedisNodes, value_of
from serving.storage.redis.rows import MOST_FIELDS, RedisRows
from serving.storage.redis.states import PartitionStates
from serving.storage.store import Change, Reached, StoreTable
from serving.stream.log_state import LogState

# How often a change is sent again because another process has moved the table on.
MOST_ATTEMPTS = 10
_NO_WORDS = np.empty((0, 0), dtype=np.uint8)


class _Kept(NamedTuple):
    """The state of a log that a partition keeps; the text is empty if it keeps none."""

    text: str = ""
    order: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str) -> "_Kept":
        return cls(text, LogState.read(text).order if text else ())


class Logs:
    """How far each partition of a table has come in each log, as this process last saw it. For one thread at a time.

    Every process that shares the table reads the logs and makes every change. A partition keeps its states in its
    marker, and one script writes rows and state, if the state is the one that this process knows. So each change takes
    effect once, whoever makes it first, and a partition that has lost rows has lost the states that came with them.

    If the process expects logs, and a node was replaced or restarted, rows of a partition that has lost states are not
    read until ``reached`` was called. Otherwise a cache could keep them, while another process makes the lost changes
    again.
    """

    def __init__(self, nodes: RedisNodes, states: PartitionStates, rows: RedisRows) -> None:
        """Know nothing yet; ask no node."""
        self._nodes = nodes
        self._partitions = rows.partitions
        self._states = states
        self._rows = rows
        self._kept: dict[str, list[_Kept]] = {}  # by log, of each partition; replaced as a whole

    def reached(self) -> Mapping[str, str]:
        """See ``LastingTable.reached``; of each log the state of the partition that has come least far."""
        replies = self._nodes.run_identified([plain("HGETALL", partition.marker) for partition in self._partitions])
        found = [scripts.reached_in(value_of(reply)) for reply in replies]
        logs = {log for of_partition in found for log in of_partition}
        self._kept = {log: [_Kept.read(of_partition.get(log, "")) for of_partition in found] for log in logs}
        last = {log: min(kept, key=lambda state: state.order) for log, kept in self._kept.items()}
        return {log: kept.text for log, kept in last.items() if kept.text}

    def write(self, change: Change[StoreTable], reached: Reached) -> None:
        """Make a change in the partitions that do not have it; without keys, bring all partitions to the state.

        Raises:
            RequestError: a sum is not finite; the rows of its partition stay as they are.
            StoreError: a partition has lost changes that this process had seen: read the log again from ``reached``.
        """
        new = _Kept.read(reached.state)
        kept = self._kept.setdefault(reached.partition, [_Kept()] * len(self._partitions))
        waiting = {number: words for number, words in self._words(change).items() if kept[number].order < new.order}
        faulty_key, attempts = b"", 0
        while waiting:
            replies = self._send(change, reached, waiting)
            lost = ""
            for number, reply in replies.items():
                if isinstance(reply, bytes):
                    now = _Kept.read(reply.decode())
                    if now.order < kept[number].order:
                        lost = self._partitions[number].values.decode()
                    else:
                        kept[number] = now
                elif reply:
                    del waiting[number][0]
                    faulty_key = reply[0] if isinstance(reply, list) else faulty_key
                    if not waiting[number]:
                        kept[number] = new
            if lost:
                reason = f"{lost} has lost rows that updates had written: the log is read again from where it is"
                raise self._rows.error(reason)
            self._states.doubt(number for number, reply in replies.items() if reply == 0)
            attempts = attempts + 1 if any(reply == 0 or isinstance(reply, bytes) for reply in replies.values()) else 0
            if attempts == MOST_ATTEMPTS:
                raise self._rows.error("other processes are changing it; ask again")
            waiting = {number: words for number, words in waiting.items() if kept[number].order < new.order}
        if faulty_key:
            (key,) = keys_of([faulty_key], self._rows.spec.key_bytes)
            raise RequestError(f"table {self._rows.spec.name!r}: the sum of key {key} is not finite")

    def is_behind(self, number: int, reached: Mapping[str, str]) -> bool:
        """See ``PartitionStates.is_behind``."""
        return any(_Kept.read(reached.get(log, "")).order < kept[number].order for log, kept in self._kept.items())

    def _send(
        self, change: Change[StoreTable], reached: Reached, waiting: Mapping[int, Sequence[NDArray[np.uint8]]]
    ) -> dict[int, int | bytes | list[bytes]]:
        """Send the first words of each partition; the new state comes with the last."""
        states, kept = self._states.verified(sorted(waiting)), self._kept[reached.partition]
        name = "HDEL" if change.rows is None else "ADD" if change.adds else "HSET"
        default = np.full(self._rows.spec.dim, change.default_value, dtype="<f4").tobytes() if change.adds else b""
        commands = []
        for number, words in waiting.items():
            expected = kept[number].text
            state = reached.state if len(words) == 1 else expected
            fence = scripts.Fence(reached.partition, expected, state, default)
            generation, words_per_row = states[number].generation or "", 1 if change.rows is None else 2
            commands.append(scripts.change(self._partitions[number], generation, name, words[0], words_per_row, fence))
        return dict(zip(waiting, self._nodes.run(commands), strict=True))

    def _words(self, change: Change[StoreTable]) -> dict[int, list[NDArray[np.uint8]]]:
        """The words of each partition's commands, in their order; an addition is one command."""
        _, keys, rows, adds, _ = change
        if not keys.size:
            return {number: [_NO_WORDS] for number in range(len(self._partitions))}
        found: dict[int, list[NDArray[np.uint8]]] = {}
        if rows is None:
            parts = [self._rows.fields(keys)]
        elif adds:
            parts = [self._rows.words(keys, rows, MOST_FIELDS)]
        else:
            rounds = self._rows.rounds(keys.size, self._rows.codec.value_bytes)
            parts = [self._rows.words(keys[part], rows[part]) for part in rounds]
        for part in parts:
            for number, words in part:
                found.setdefault(number, []).append(words)
        return found
