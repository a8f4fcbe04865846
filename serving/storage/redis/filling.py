"""How partitions of a table in Redis are filled, under leases, while other processes read and change them."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.background import PeriodicWorker
from serving.errors import StoreUnreachableError
from serving.storage.marker import Marker, kept_rows
from serving.storage.redis import marker as scripts
from serving.storage.redis.commands import Command, Partition, RedisNodeError, header, plain
from serving.storage.redis.marker import PartitionMarker, new_token
from serving.storage.redis.nodes import value_of
from serving.storage.redis.rows import STORE_NAME
from serving.storage.redis.states import PartitionState, PartitionStates, Status
from serving.storage.store import Batches, Keys, Truth, Vectors

if TYPE_CHECKING:
    from serving.storage.redis.table import RedisTable

logger = logging.getLogger(__name__)

# Redis forgets the gathered rows of a load that was killed after this time.
LOADING_TTL_S = 600
# How long a load waits for the lease of another process, and how often it looks.
LEASE_WAIT_S, LEASE_LOOK_S = 600.0, 0.05
RENEWALS_PER_LEASE = 3
SCAN_ROWS = 10_000


@dataclass(slots=True)
class _Plan:
    """How partitions are to be filled.

    Attributes:
        absent: rows are added whose keys are absent, after the old rows were dropped.
        over: rows are inserted over those that are there.
        swap: rows are gathered elsewhere, and then take the place of the partition.
        changed: partitions whose markers will have ``changed``.
        foreign: why a partition is left alone, because it was loaded from other files; "" where there is none.
        reason: why partitions are refilled; "" where there is none.
    """

    absent: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    swap: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    foreign: str = ""
    reason: str = ""

    @property
    def numbers(self) -> list[int]:
        return sorted(self.absent | self.over | self.swap)

    def leave_out(self, numbers: set[int]) -> None:
        for kind in (self.absent, self.over, self.swap):
            kind -= numbers


class Filling:
    """One filling of a table's partitions; see the package. Not for several threads."""

    def __init__(self, table: "RedisTable", states: PartitionStates) -> None:
        """Draw the name of the leases, which is also the new generation."""
        self._nodes = table.store.nodes
        self._table = table
        self._states = states
        self._partitions = table.partitions
        self._token = new_token()
        self._run_ids: dict[int, str] = {}  # by partition, of the node that gave the lease
        self._lost: set[int] = set()  # partitions whose lease or node was lost
        self._gathered = [0] * len(self._partitions)  # by partition that is swapped, rows that will take its place
        self._known: Mapping[int, PartitionState] = {}  # when the filling began: a write that is missed later counts

    def load(self, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """Fill the table as the source of truth: see ``LastingTable.load``.

        With ``keep``, a partition of the same files stays as it is. Other processes that load the same files wait for
        this load, and then find nothing to do.
        """
        everywhere = range(len(self._partitions))
        self._known = dict(enumerate(self._states.now()))
        with self._leases(everywhere, wait_s=LEASE_WAIT_S):
            plan, found, was_changed = _Plan(), set[int](), False
            wanted = (marker.digest, self._table.rows.codec.row_dtype)
            for number, (old_marker, _) in enumerate(self._states.markers(everywhere)):
                if keep and old_marker is not None:
                    self._states.check_number(old_marker)
                    was_changed |= old_marker.changed
                if keep and old_marker is None:
                    plan.over.add(number)
                elif not keep or old_marker is None or (old_marker.digest, old_marker.row_dtype) != wanted:
                    plan.swap.add(number)
            if plan.over:
                self._table.check(sorted(plan.over))
                found = self._with_rows(plan.over)
            if found:
                logger.warning(kept_rows(STORE_NAME, self._table.spec.name))
            if was_changed and (lost := plan.over - found):
                reason = f"{len(lost)} of {len(everywhere)} partitions have lost their rows and get the files' rows"
                reason += ": rows that were written to them since the last load are lost"
                logger.warning("table %r: %s: %s", self._table.spec.name, STORE_NAME, reason)
            if plan.numbers:
                self._write(batches, plan)
                self._finish(plan, marker, changed=set(everywhere) if marker.changed else found)
                if not keep:
                    self._table.drop_beyond()
        self._refuse_lost_leases()

    def fill(self, truth: Truth, *, starting: bool) -> bool:
        """Fill the table as a cache: see ``LastingTable.fill``."""
        plan, was_written = self._planned(truth, starting), False
        if plan.over and not truth.writes:
            reason = "holds rows that Hotrow did not load: the process that writes the source of truth fills it"
            raise StoreUnreachableError(STORE_NAME, self._table.spec.name, reason)
        foreign = plan.foreign
        if numbers := plan.numbers:
            with self._leases(numbers):
                plan = self._planned(truth, starting)  # another process may have filled some until now
                plan.leave_out(set(range(len(self._partitions))) - set(numbers))
                was_written = bool(plan.numbers)
                self._known = self._states.fill_on({at: self._run_ids[at] for at in plan.numbers})
                self._take_unknown_rows(truth, plan)
                self._write(truth.batches(), plan)
                wanted = truth.marker()
                self._finish(plan, wanted, changed=set(numbers) if wanted.changed else plan.changed)
        self._refuse_lost_leases()
        if plan.reason:
            logger.warning("tier %s was refilled, table %r: %s", STORE_NAME, self._table.spec.name, plan.reason)
        if foreign:
            raise self._table.rows.error(foreign)
        return was_written

    def _planned(self, truth: Truth, starting: bool) -> _Plan:
        """Check every partition, and return how the invalid partitions are to be filled."""
        plan, unmarked = _Plan(), set[int]()
        is_behind = starting and not truth.marker().is_current(self._table.store.identity)
        known = self._states.now()
        for number, (marker, run_id) in enumerate(self._states.markers(range(len(known)))):
            state = self._states.judge(number, known[number], marker, run_id)
            if marker is None and starting:
                unmarked.add(number)
            elif state.status is Status.FOREIGN and not starting:
                plan.foreign = state.reason
            elif state.status is not Status.VALID or is_behind:
                plan.absent.add(number)
                # A start fills it with the new files, so the advice in the state's reason does not apply.
                reason = state.status.value if state.status is Status.FOREIGN else state.reason
                plan.reason = plan.reason or reason or "it may have missed a write"
                if marker is not None and marker.changed:
                    plan.changed.add(number)
        if unmarked:
            self._table.check(sorted(unmarked))
            # A filling that was cut short has left Hotrow's own rows.
            begun = self._where(unmarked, lambda partition: plain("HEXISTS", partition.marker, "filling"))
            plan.over = self._with_rows(unmarked) - begun
            plan.absent |= unmarked - plan.over
        return plan

    def _take_unknown_rows(self, truth: Truth, plan: _Plan) -> None:
        """Have the truth take the rows that only Redis has, which Hotrow did not load.

        Then the partitions can be dropped and filled like others. So a row that a process writes then is never
        overwritten by an older row.
        """
        if not plan.over:
            return
        taken, line = 0, kept_rows(STORE_NAME, self._table.spec.name)
        for number in sorted(plan.over):
            for keys, rows in self._table.partition_items(number, SCAN_ROWS):
                taken += truth.insert_absent(keys, rows)
        logger.warning("%s; the source of truth took %s of them", line, taken)
        plan.changed |= plan.over
        plan.absent |= plan.over
        plan.over = set()

    def _with_rows(self, numbers: set[int]) -> set[int]:
        return self._where(numbers, lambda partition: plain("EXISTS", partition.values))

    def _where(self, numbers: set[int], question: Callable[[Partition], Command]) -> set[int]:
        """Those of the partitions for which Redis answers yes."""
        asked = sorted(numbers)
        replies = self._nodes.run([question(self._partitions[at]) for at in asked])
        return {at for at, is_so in zip(asked, replies, strict=True) if is_so}

    def _write(self, batches: Batches, plan: _Plan) -> None:
        """Write the rows of the planned partitions. Partitions whose leases have ended take none."""
        self._nodes.run([scripts.begin(self._partitions[at], self._token) for at in sorted(plan.absent)])
        sizes = np.zeros(len(self._partitions), dtype=np.int64)
        for keys, rows in batches:
            keys, rows = self._fitting(*self._wanted(keys, rows, plan), sizes)
            for part in self._table.rows.rounds(keys.size, self._table.rows.codec.value_bytes):
                groups = self._table.rows.words(keys[part], rows[part])
                commands = [self._rows_command(at, words, plan) for at, words in groups]
                extras = [command for at, words in groups for command in self._extras(at, words, plan)]
                replies = self._nodes.run([*commands, *extras])
                for (at, _), added in zip(groups, replies, strict=False):
                    self._gathered[at] += added
            self._check_leases(plan)

    def _check_leases(self, plan: _Plan) -> None:
        """Leave out partitions whose lease has ended, or whose node may have lost rows."""
        numbers = plan.numbers
        replies = self._nodes.run_identified(self._renewals(numbers))
        kept = [
            value_of(reply) and self._has_all_rows(at, reply.run_id) for at, reply in zip(numbers, replies, strict=True)
        ]
        self._leave_out_lost(plan, numbers, kept)

    def _keep_leases(self) -> None:
        self._nodes.run_each(self._renewals(list(self._run_ids)))  # ``_check_leases`` finds a lease that was not kept

    def _renewals(self, numbers: Sequence[int]) -> list[Command]:
        return [scripts.renew_lease(self._partitions[at], self._token) for at in numbers]

    def _has_all_rows(self, at: int, run_id: str) -> bool:
        """Whether a partition is on the node of its lease, or was moved from that node with all its rows."""
        if not self._nodes.topology.has_every_write({run_id, self._run_ids[at]}):
            return False
        self._run_ids[at] = run_id
        return True

    def _wanted(self, keys: Keys, rows: Vectors, plan: _Plan) -> tuple[Keys, Vectors]:
        if len(plan.numbers) == len(self._partitions):
            return keys, rows
        is_wanted = np.isin(self._partitions.places(keys), plan.numbers)
        return keys[is_wanted], rows[is_wanted]

    def _fitting(self, keys: Keys, rows: Vectors, sizes: NDArray[np.int64]) -> tuple[Keys, Vectors]:
        """Rows that fit within the overflow margin; ``sizes`` grows by them."""
        if self._table.overflow is None:
            return keys, rows
        fits = self._partitions.fitting(keys, sizes, self._table.overflow.rule.margin_rows)
        return keys[fits], rows[fits]

    def _rows_command(self, at: int, words: NDArray[np.uint8], plan: _Plan) -> Command:
        partition = self._partitions[at]
        if at not in plan.swap:
            return scripts.fill(partition, self._token, words, over=at in plan.over)
        name, _ = partition.loading(self._token)
        return Command("HSET", name, header(b"HSET", name, 2 * len(words) + 2) + words.tobytes())

    def _extras(self, at: int, words: NDArray[np.uint8], plan: _Plan) -> list[Command]:
        """Uses for the overflow policy, and the time after which gathered rows are forgotten."""
        partition, overflow = self._partitions[at], self._table.overflow
        values, times = partition.loading(self._token) if at in plan.swap else (partition.values, partition.times)
        commands = overflow.touches(times, words[:, : self._table.rows.field_bytes]) if overflow else []
        if at in plan.swap:
            commands += [plain("EXPIRE", name, LOADING_TTL_S) for name in (values, times)]
        return commands

    def _finish(self, plan: _Plan, marker: Marker, changed: set[int]) -> None:
        """Write the markers; the partitions are valid then."""
        numbers = plan.numbers
        made = [
            PartitionMarker(
                marker.digest,
                self._table.rows.codec.row_dtype,
                len(self._partitions),
                at in changed,
                self._run_ids[at],
                self._token,
            )
            for at in numbers
        ]
        commands = [
            scripts.finish(
                self._partitions[at], self._token, made_marker, swap=at in plan.swap, gathered=self._gathered[at]
            )
            for at, made_marker in zip(numbers, made, strict=True)
        ]
        self._leave_out_lost(plan, numbers, self._nodes.run(commands))
        for at in plan.numbers:
            state = PartitionState(Status.VALID, self._token, self._run_ids[at])
            self._states.change(at, self._known[at], state)

    def _leave_out_lost(self, plan: _Plan, numbers: Sequence[int], replies: Sequence[object]) -> None:
        """Leave out partitions for which the reply is no."""
        lost = {at for at, reply in zip(numbers, replies, strict=True) if not reply}
        plan.leave_out(lost)
        self._lost |= lost

    def _refuse_lost_leases(self) -> None:
        if self._lost:
            values = self._partitions[min(self._lost)].values.decode()
            reason = f"{values}: its lease or its node was lost while it was filled"
            raise StoreUnreachableError(STORE_NAME, self._table.spec.name, reason)

    @contextmanager
    def _leases(self, numbers: Sequence[int], wait_s: float = 0.0) -> Iterator[None]:
        """Hold the leases of partitions; other holders are waited for up to ``wait_s``.

        A thread renews the leases: one batch of rows may take longer than a lease.

        Raises:
            StoreUnreachableError: another process has one.
        """
        deadline = time.monotonic() + wait_s
        self._nodes.run(self._table.unreleased)
        self._table.unreleased = []
        keeper = PeriodicWorker("hotrow-redis-lease", self._keep_leases, scripts.LEASE_MS / 1000 / RENEWALS_PER_LEASE)
        try:
            while missing := [at for at in numbers if at not in self._run_ids]:
                # One after the other where loads wait for each other, so that one of them gets all.
                asked = missing[:1] if wait_s and not self._run_ids else missing
                takes = [scripts.take_lease(self._partitions[at], self._token) for at in asked]
                replies = self._nodes.run_identified(takes)
                self._run_ids |= {
                    at: reply.run_id for at, reply in zip(asked, replies, strict=True) if reply.value == 1
                }
                if all([value_of(taken) for taken in replies]):  # a list: one of the last replies may be an error
                    continue
                if time.monotonic() >= deadline:
                    reason = "another process is filling it"
                    raise StoreUnreachableError(STORE_NAME, self._table.spec.name, reason)
                time.sleep(LEASE_LOOK_S)
            self._nodes.run([plain("UNLINK", self._partitions[at].removed) for at in numbers])  # of an earlier filling
            yield
        finally:
            keeper.close(timeout_s=0)  # a renewal that comes after the release does nothing
            leased = list(self._run_ids)
            loading = [plain("UNLINK", *self._partitions[at].loading(self._token)) for at in leased] if wait_s else []
            releases = [scripts.release_lease(self._partitions[at], self._token) for at in leased]
            try:
                self._nodes.run([*loading, *releases])
            except RedisNodeError:  # the next filling of this process must not wait until the leases end
                self._table.unreleased = releases
