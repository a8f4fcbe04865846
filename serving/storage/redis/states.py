"""What this process knows of the partitions of one table in Redis, and how the replies of their nodes are judged."""

import enum
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from serving.errors import without_frames
from serving.storage.marker import Marker
from serving.storage.redis.commands import RedisNodeError, plain
from serving.storage.redis.marker import PartitionMarker
from serving.storage.redis.nodes import RedisNodes, Reply, value_of
from serving.storage.redis.rows import RedisRows
from serving.storage.store import Truth


class Status(enum.Enum):
    """What this process knows of a partition.

    If this process has changed no rows, an invalid partition is valid again once another process has filled it. If this
    process has changed rows, it fills the partition itself: only then does the partition have every change.
    """

    VALID = "it holds the table's rows"
    UNKNOWN = "its marker must be read"
    INVALID = "its rows may be old or missing"
    FILLING = "it is being filled; changes are written to it"
    MISSED = "it missed a write; it takes no writes until it is refilled"
    FOREIGN = "it was loaded from other files"


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition as this process last saw it.

    Attributes:
        status: what is known.
        generation: of the marker when the partition was last valid; None: it had no marker, was never valid, or was
            loaded from other files since.
        run_id: of the node that has every change of this process, if the partition is valid, unknown or being filled.
        reason: why it is not valid.
    """

    status: Status = Status.UNKNOWN
    generation: str | None = None
    run_id: str = ""
    reason: str = ""


class PartitionStates:
    """The states of a table's partitions. Every method may be called from any thread.

    Methods that ask Redis raise RedisNodeError if a node does not answer, and StoreError if a marker is not that
    of such a table.

    Attributes:
        wanted: the marker that a load expects; None: the table was opened without a load, and is taken as it is.
        truth: the source of truth that Redis caches; None: Redis is the source of truth.
        is_written: this process has changed rows, and Redis is a cache.
        is_behind: whether a partition of a source of truth, whose marker has these states of logs, has lost rows that
            this process may have seen.
    """

    def __init__(self, nodes: RedisNodes, rows: RedisRows) -> None:
        """Know nothing of the partitions yet; ask no node."""
        self.wanted: Marker | None = None
        self.truth: Truth | None = None
        self.is_written = False
        self.is_behind: Callable[[int, Mapping[str, str]], bool] = lambda *_: False
        self._nodes = nodes
        self._partitions = rows.partitions
        self._rows = rows
        self._lock = threading.Lock()  # guards changes of the states
        self._states = [PartitionState() for _ in rows.partitions]  # each state is replaced as a whole

    @property
    def is_whole(self) -> bool:
        """Whether every partition is valid, as far as this process knows."""
        return all(state.status is Status.VALID for state in self._states)

    def now(self) -> list[PartitionState]:
        """The states of all partitions."""
        return list(self._states)

    def change(self, number: int, known: PartitionState, state: PartitionState) -> PartitionState:
        """Change a state that was ``known``, unless another thread has changed it since; returns the state now."""
        with self._lock:
            if self._states[number] is known:
                self._states[number] = state
            return self._states[number]

    def mark(self, numbers: Iterable[int], status: Status, reason: str) -> None:
        """Change the status of partitions; the last valid generation stays."""
        with self._lock:
            for number in numbers:
                self._states[number] = replace(self._states[number], status=status, reason=reason)

    def is_valid(self, number: int) -> bool:
        """Whether a partition is valid."""
        return self._states[number].status is Status.VALID

    def takes_writes(self, number: int) -> bool:
        """Whether rows of a partition may be changed."""
        return self._states[number].status not in (Status.MISSED, Status.FOREIGN)

    def note_written(self) -> None:
        """Note that this process changes rows from now on."""
        with self._lock:
            self.is_written = True
            # New objects: ``change`` then ignores what other threads have judged before. A filling goes on.
            self._states = [state if state.status is Status.FILLING else replace(state) for state in self._states]

    def markers(self, numbers: Sequence[int]) -> list[tuple[PartitionMarker | None, str]]:
        """The marker of each partition, and the identity of its node."""
        replies = self._nodes.run_identified([plain("HGETALL", self._partitions[at].marker) for at in numbers])
        return [(self._read(reply), reply.run_id) for reply in replies]

    def marker(self) -> Marker | None:
        """See ``LastingTable.marker``; None if a partition has no marker or another one."""
        found = [marker for marker, _ in self.markers(range(len(self._partitions)))]
        first = found[0]
        others = found[1 : first.partitions] if first else []  # fewer than here, perhaps, which ``judge`` refuses
        if first is None or any(
            other is None or (other.digest, other.row_dtype) != (first.digest, first.row_dtype) for other in others
        ):
            return None
        markers = [marker for marker in found if marker is not None]
        rows, changed = sum(marker.rows for marker in markers), any(marker.changed for marker in markers)
        return Marker(first.digest, rows, first.row_dtype, changed)

    def verify(self, numbers: Sequence[int]) -> None:
        """Read the markers of partitions, and decide whether the partitions are valid."""
        known = [self._states[at] for at in numbers]
        for number, state, (marker, run_id) in zip(numbers, known, self.markers(numbers), strict=True):
            self.judge(number, state, marker, run_id)

    def verified(self, numbers: Sequence[int]) -> Mapping[int, PartitionState]:
        """The states of partitions, whose markers are read if that is necessary.

        Raises:
            StoreError: Redis is the source of truth, and a partition is not valid.
        """
        unknown = [at for at in numbers if self._is_to_be_verified(at)]
        if unknown:
            self.verify(unknown)
        states = {at: self._states[at] for at in numbers}
        for state in states.values():
            if self.truth is None and state.status is not Status.VALID:
                raise self._rows.error(state.reason or state.status.value)
        return states

    def doubt(self, numbers: Iterable[int]) -> None:
        """Have the markers of valid partitions read again, because another load or node answered."""
        with self._lock:
            for number in numbers:
                if self.is_valid(number):
                    self._states[number] = replace(self._states[number], status=Status.UNKNOWN)

    def fill_on(self, run_ids: Mapping[int, str]) -> Mapping[int, PartitionState]:
        """Note that partitions are being filled, on the nodes with these identities; returns their states."""
        with self._lock:
            for number, run_id in run_ids.items():
                known, reason = self._states[number], "it is being filled"
                self._states[number] = replace(known, status=Status.FILLING, run_id=run_id, reason=reason)
            return {number: self._states[number] for number in run_ids}

    def settle(self, numbers: Sequence[int], replies: Sequence[Reply]) -> None:
        """Note which partitions missed a write; raise the first error."""
        errors = []
        for number, reply in zip(numbers, replies, strict=True):
            if isinstance(reply.value, RedisNodeError):
                errors.append(reply.value)
                if self.truth is not None:
                    self.mark([number], Status.MISSED, f"{self._name(number)} missed a write: {reply.value}")
            elif self.truth is not None:  # a source of truth is read with the marker of its node
                self._settle_node(number, "" if reply.is_passed_on else reply.run_id)
        if errors:
            raise without_frames(errors[0])

    def _settle_node(self, number: int, run_id: str) -> None:
        """Note which node took a change; if another node has the earlier changes, the partition is invalid."""
        followed = (Status.VALID, Status.UNKNOWN, Status.FILLING)
        while (known := self._states[number]).status in followed and known.run_id != run_id:
            if known.status is not Status.FILLING and self._nodes.topology.has_every_write({known.run_id, run_id}):
                state = replace(known, status=Status.UNKNOWN, run_id=run_id)
            else:
                reason = f"{self._name(number)}: another node took a change"
                state = replace(known, status=Status.INVALID, reason=reason)
            self.change(number, known, state)

    def judge(self, number: int, known: PartitionState, marker: PartitionMarker | None, run_id: str) -> PartitionState:
        """Set and return the state of a partition whose state was ``known`` before its marker and node were read."""
        return self.change(number, known, self._judged(number, known, marker, run_id))

    def check_number(self, marker: PartitionMarker) -> None:
        """Refuse a partition of a table that was loaded with another number of partitions."""
        if marker.partitions != len(self._partitions):
            reason = f"it was loaded with {marker.partitions}, but this process uses {len(self._partitions)}"
            raise self._rows.error(f"num_partitions differs: {reason}")

    def _judged(
        self, number: int, known: PartitionState, marker: PartitionMarker | None, run_id: str
    ) -> PartitionState:
        wanted, name = self.wanted, self._name(number)
        row_dtype = self._rows.codec.row_dtype  # the truth's may be another
        if marker is not None:
            self.check_number(marker)
        if marker and wanted and (marker.digest, marker.row_dtype) != (wanted.digest, row_dtype):
            reason = f"{name} was loaded from other files ({marker.digest}, {marker.row_dtype}); this process uses "
            reason += f"{wanted.digest}, {row_dtype}: load the model again with the files to serve"
            return replace(known, status=Status.FOREIGN, generation=None, reason=reason)
        if known.status in (Status.FILLING, Status.MISSED) or (self.is_written and known.status is Status.INVALID):
            return known  # its rows may be old, whatever its marker says
        needs_marker = wanted is not None or (self.truth is None and known.generation is not None)
        if marker is None and needs_marker:
            advice = "; load the model again: restart a server of this model" if self.truth is None else ""
            reason = f"{name} has no marker: it has lost its rows{advice}"
            return replace(known, status=Status.INVALID, reason=reason)
        loaded = marker if wanted is not None else None  # None: the rows are taken as they are
        if self.is_written and loaded is not None and loaded.generation != known.generation:
            return replace(known, status=Status.INVALID, reason=f"{name} was filled by another process")
        nodes = {run_id} if loaded is None else {run_id, loaded.run_id}
        if self.is_written:  # another process may have found the new node valid, for its own writes
            nodes.add(known.run_id)
        if self.truth is not None and not self._has_every_write(number, loaded, nodes):
            return replace(known, status=Status.INVALID, reason=f"{name}: its node may have lost writes")
        if self.truth is None and marker is not None and self.is_behind(number, marker.reached):
            reason = f"{name} has lost rows that updates had written: the log is read again from where it is"
            return replace(known, status=Status.UNKNOWN, reason=reason)
        if loaded is not None and loaded.run_id != run_id:
            self._nodes.run([plain("HSET", self._partitions[number].marker, "run_id", run_id)])
        return PartitionState(Status.VALID, marker.generation if marker else None, run_id)

    def _has_every_write(self, number: int, loaded: PartitionMarker | None, nodes: set[str]) -> bool:
        """Whether a partition that was on these nodes has lost no write."""
        if self._nodes.topology.has_every_write(nodes):
            return True
        if self.is_written or loaded is None or loaded.changed or self.truth is None or self.truth.marker().changed:
            return False
        (rows,) = self._nodes.run([plain("HLEN", self._partitions[number].values)])
        return bool(rows == loaded.rows)

    def _is_to_be_verified(self, number: int) -> bool:
        """Whether a partition's marker must be read; a source of truth is valid again after any process loads it."""
        status = self._states[number].status
        return status is Status.UNKNOWN or (self.truth is None and status is not Status.VALID)

    def _name(self, number: int) -> str:
        return self._partitions[number].values.decode()

    def _read(self, reply: Reply) -> PartitionMarker | None:
        try:
            return PartitionMarker.read(value_of(reply))
        except ValueError as err:
            raise self._rows.error(str(err)) from err
