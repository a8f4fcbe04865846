"""Lookups in tables whose rows are spread over several processes.

Each process sends the distinct keys of its bags to the processes that own them, gets their rows, and pools them. A
backward pass sums the gradients of each row. The sums stay in this process until a step, or a reader of ``grad``, sends
them with their keys to the owners. So processes may have different losses, and a row that many bags read crosses once.
All tables share each message.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.host import (
    ArrayRows,
    BagLookup,
    TrainingTable,
    array_gradients,
    first_outside,
    keys_by_owner,
    look_up_bags,
    weight_gradients,
)
from training.embedding.gradient_rows import GradientRows
from training.embedding.gradients import RowGradient, TableSink, backward_pass, to_floats
from training.embedding.inputs import FeatureBags
from training.embedding.lookups import Floats, Table, need_rows, weights_of
from training.embedding.table_gradient import TableGradient
from training.processes import Processes

Ints = NDArray[np.int64]
Numbers = TypeVar("Numbers", bound=NDArray[Any])
#: Which process owns a row: the process ``key % processes``, or the process of the row's table.
Sharding = Literal["key", "table"]


@dataclass(frozen=True, slots=True)
class OwnedTable:
    """A table, and which of its rows a process owns.

    Attributes:
        table: the rows of this process.
        owner: the process that owns all rows; None: process ``key % processes`` owns a row.
        row_of: finds the rows int64[N] of keys that this process owns in its array; -1: a key has none, and its vector
            is zero. None: the table finds them.
    """

    table: Table
    owner: int | None
    row_of: Callable[[Ints], Ints] | None = None

    @property
    def owner_number(self) -> int:
        """The owner, for ``keys_by_owner``."""
        return -1 if self.owner is None else self.owner

    def bags(self, keys: Ints) -> tuple[Ints, Ints | None]:
        """Return one bag for each key, in the table's own numbers: keys and row_ptrs."""
        if self.row_of is None:
            return keys, None
        rows = self.row_of(keys)
        has_row = rows >= 0
        if has_row.all():
            return rows, None
        return rows[has_row], np.concatenate([[0], has_row.cumsum()])


class _Request:
    """The distinct keys of one lookup, in the order of their owners.

    Attributes:
        keys: int64[U].
        counts: int64[processes], how many each process owns.
        places: int64[N], where each key of the bags is among ``keys``.
        slots: int64[U], the slot in which each key is; empty if the table does not keep them.
    """

    def __init__(self, of: OwnedTable, bags: FeatureBags, processes: int) -> None:
        config = of.table.config
        if config.rows is not None:
            _require_rows(of.table.name, bags.keys, config.rows)
        distinct = config.admit_after == 1  # otherwise every sighting counts
        self.keys, self.counts, self.places, firsts = keys_by_owner(bags.keys, processes, of.owner_number, distinct)
        self.slots = bags.slots_of(firsts) if config.keeps_slots else np.empty(0, np.int64)


def _require_rows(table: str, keys: Ints, rows: int) -> None:
    """Raise IndexError for a key outside fixed rows before it is sent, so the process that has it raises."""
    place = first_outside(keys, 0, rows - 1)
    if place < keys.size:
        raise IndexError(f"table {table!r}: expected keys from 0 to {rows - 1}, got {keys[place]} at position {place}")


@dataclass(frozen=True, slots=True, eq=False)
class OwnedLookup:
    """What the processes looked up in the rows of this process.

    Attributes:
        keys: int64[U], process after process.
        counts: int64[processes], how many each process has sent.
        lookup: of these keys.
    """

    keys: Ints
    counts: Ints
    lookup: BagLookup


@dataclass(frozen=True, slots=True)
class KeyGradients:
    """Gradients of rows that this process has not sent to their owners.

    Attributes:
        keys: int64[U], process after process.
        counts: int64[processes], how many each process owns.
        sums: float32[U, D].
        owned: the other processes' part of the lookup in which ``keys`` are all keys; None: of several lookups.
    """

    keys: Ints
    counts: Ints
    sums: Floats
    owned: OwnedLookup | None = None


class SharedLookups:
    """Lookups in the tables of several processes. See ``Lookups``. Every process makes the same lookups at a time.

    Attributes:
        title: of the messages.
        owned: of each lookup, what this process has to know until it gets the gradients.
    """

    def __init__(
        self,
        processes: Processes,
        tables: Sequence[OwnedTable],
        bags: Sequence[FeatureBags],
        trains: Sequence[bool],
        divisor: int,
    ) -> None:
        """Look up the bags of each table.

        Args:
            processes: that make the lookups.
            tables: of each lookup.
            bags: of each lookup.
            trains: of each lookup: keys get rows.
            divisor: a row's gradient is the sum over the processes, divided by this number.
        """
        self._divisor = divisor
        processes.refuse_join(_shown(tables))
        act = "training lookup" if any(trains) else "lookup" if torch.is_grad_enabled() else "no_grad lookup"
        self.title = f"{processes.numbered(act)} of {_shown(tables)}"
        if any(trains) and not all(trains):
            frozen = [table for table, does in zip(tables, trains, strict=True) if not does]
            self.title += f" without new rows of {_shown(frozen)}"
        requests = [_Request(table, one, processes.size) for table, one in zip(tables, bags, strict=True)]
        self._keys = [request.keys for request in requests]
        self._counts = [request.counts for request in requests]
        sent = np.stack(self._counts, axis=1)  # [processes, lookups]
        count = len(tables)
        keys, received = _exchange(processes, f"keys of {self.title}", self._keys, sent)
        slots: Sequence[int | Ints] = [1] * count
        if any(does and of.table.config.keeps_slots for does, of in zip(trains, tables, strict=True)):
            kept = [of.table.config.keeps_slots for of in tables]
            of_keys = [request.slots for request in requests]
            came, _ = _exchange(processes, f"slots of {self.title}", of_keys, sent * kept, received * kept)
            slots = [numbers if keeps else 1 for numbers, keeps in zip(came, kept, strict=True)]
        own_keys, row_ptrs = zip(*(of.bags(one) for of, one in zip(tables, keys, strict=True)), strict=True)
        owned = look_up_bags(
            [of.table.native for of in tables], own_keys, row_ptrs, ["sum"] * count, [None] * count, slots, trains
        )
        self.owned = [OwnedLookup(*one) for one in zip(keys, received.T, [lookup for lookup, _ in owned], strict=True)]
        answers = [vectors for _, vectors in owned]
        # Only a table that admits keys late has keys without a row. A last column says which have a row.
        admits_late = [of.table.config.admit_after > 1 for of in tables]
        for number, of in enumerate(tables):
            if admits_late[number]:
                assert isinstance(of.table.native, TrainingTable)
                answers[number] = np.column_stack([answers[number], of.table.native.find(keys[number]) >= 0])
        rows, _ = _exchange(processes, f"rows of {self.title}", answers, received, sent)
        self._have_row = [one[:, -1] > 0 if late else None for one, late in zip(rows, admits_late, strict=True)]
        rows = [np.ascontiguousarray(one[:, : of.table.config.dim]) for one, of in zip(rows, tables, strict=True)]
        pooled = look_up_bags(
            [ArrayRows(vectors, of.table.name) for vectors, of in zip(rows, tables, strict=True)],
            [request.places for request in requests],
            [bag.row_ptrs for bag in bags],
            [of.table.config.combiner for of in tables],
            [weights_of(bag) for bag in bags],
            [1] * count,
            [False] * count,
        )
        self._lookups: list[BagLookup] = [lookup for lookup, _ in pooled]
        self.pooled: list[Floats] = [one for _, one in pooled]
        self.gradients_need_rows = need_rows([of.table for of in tables], bags)

    def row_gradients(self, gradients: Sequence[Floats | None]) -> Sequence[KeyGradients | None]:
        """See ``Lookups``."""
        given = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}
        sums = array_gradients([self._lookups[number] for number in given], list(given.values()), self._divisor)
        answers: list[KeyGradients | None] = [None] * len(gradients)
        for number, one in zip(given, sums, strict=True):
            keys, counts, has_row = self._keys[number], self._counts[number], self._have_row[number]
            if has_row is None:
                answers[number] = KeyGradients(keys, counts, one, self.owned[number])
            else:
                of_processes = np.split(has_row, counts.cumsum()[:-1])
                counts = np.array([part.sum() for part in of_processes])
                answers[number] = KeyGradients(keys[has_row], counts, one[has_row])
        return answers

    def weight_gradients(self, number: int, gradient: Floats) -> Floats:
        """See ``Lookups``."""
        return weight_gradients([self._lookups[number]], [gradient])[0]


class ShardSink(TableSink):
    """The gradients of a table whose rows are spread over processes.

    A backward pass leaves the gradients of this process's bags, and hooks see those. A step sends the gradients of all
    its tables to the owners of the rows. If somebody reads ``grad`` before, that sends those of all tables that were
    looked up together.

    Attributes:
        processes: have the rows.
        looked_up: the tables of the last lookup whose gradients were not sent.
        owned: of this lookup.
    """

    _is_shard = True

    def __init__(self, processes: Processes, table: OwnedTable) -> None:
        """Begin without gradients of the rows of a table, which processes have."""
        super().__init__()
        self.processes = processes
        self.looked_up: Sequence[ShardSink] = ()
        self.owned: OwnedLookup | None = None
        self._table = table
        self._unsent: list[KeyGradients] = []
        self._is_finite = True

    def keep(self) -> None:
        """See ``TableSink``."""
        arrived = self._arrived.pop(backward_pass(), [])
        if arrived and self.hooks:
            merged = self._merged(arrived)
            assert isinstance(self._table.table.native, TrainingTable)
            rows = GradientRows(self._table.table.native, len(merged.sums), None)
            hooked = self._hooked(TableGradient.of(torch.from_numpy(merged.sums), rows))
            arrived = [replace(merged, sums=to_floats(hooked.plain()))]
        self._unsent += arrived

    def rows(self) -> TableGradient | None:
        """See ``TableSink``. Every process calls this, unless a step has sent all gradients."""
        if self.looked_up or self._unsent:
            self.send("reading of grad", self.looked_up or [self])
        rows = super().rows()
        if rows is None or self._is_finite or len(rows):
            return rows
        # so that this process's GradScaler skips the step too
        notice = replace(rows.rows[0], count=1, is_notice=True)
        return TableGradient.of(torch.full((1, rows.shape[1]), torch.nan), notice)

    def replace(self, gradient: TableGradient) -> None:
        """See ``TableSink``. Every process calls this."""
        self.rows()
        [rows] = gradient.rows
        self._unsent, self._is_finite = [], not rows.is_notice or bool(gradient.plain().isfinite().all())
        if rows.is_notice:
            gradient = TableGradient.of(gradient.plain()[:0], replace(rows, count=0, is_notice=False))
        super().replace(gradient)

    def clear(self) -> None:
        """See ``TableSink``."""
        super().clear()
        self._unsent, self._is_finite = [], True

    @staticmethod
    def send(act: str, sinks: Sequence["ShardSink"]) -> None:
        """Send the gradients of tables of the same processes to the owners of their rows. Every process calls this."""
        processes, tables = sinks[0].processes, [sink._table for sink in sinks]
        title = f"{processes.numbered(act)} of {_shown(tables)}"
        if earlier := [sink._table for sink in sinks if sink]:
            title += f", added to the gradients of {_shown(earlier)}"
        unsent = [sink._merged(sink._unsent) if sink._unsent else None for sink in sinks]
        of_rows, is_finite = to_owners(processes, title, tables, [sink.owned for sink in sinks], unsent)
        for sink, gradient in zip(sinks, of_rows, strict=True):
            sink.looked_up, sink.owned, sink._unsent = (), None, []
            if gradient is not None:
                sink._keep_all([gradient])
                sink._is_finite &= is_finite

    def _merged(self, parts: Sequence[KeyGradients]) -> KeyGradients:
        if len(parts) == 1:
            return parts[0]
        of, keys = self._table, np.concatenate([part.keys for part in parts])
        keys, counts, places, _ = keys_by_owner(keys, self.processes.size, of.owner_number)
        zeros = ArrayRows(np.zeros((len(keys), of.table.config.dim), np.float32), of.table.name)
        [(lookup, _)] = look_up_bags([zeros], [places], [None], ["sum"], [None], [1], [False])
        [sums] = array_gradients([lookup], [np.concatenate([part.sums for part in parts])])
        return KeyGradients(keys, counts, sums)


def to_owners(
    processes: Processes,
    title: str,
    tables: Sequence[OwnedTable],
    owned: Sequence[OwnedLookup | None],
    gradients: Sequence[KeyGradients | None],
) -> tuple[list[RowGradient | None], bool]:
    """Send gradients to the owners of their rows, in one message.

    Args:
        processes: all call this.
        title: of the message.
        tables: of each gradient.
        owned: the last lookup in each table. Its keys are not sent again.
        gradients: of this process. None: its losses do not depend on the table.

    Returns:
        the gradients of this process's rows, None if no process has one; and whether all numbers of all processes are
        finite. If not, no returned number is.
    """
    size, count = processes.size, len(tables)
    flags = np.zeros(1 + 2 * count, np.float32)  # all is finite; there is a gradient; its keys are those of ``owned``
    flags[0] = all(gradient is None or np.isfinite(gradient.sums.sum()) for gradient in gradients)
    to_processes: list[list[NDArray[Any]]] = [[] for _ in range(size)]
    for number, (one, of_table) in enumerate(zip(gradients, owned, strict=True)):
        key_parts, sum_parts = [_NOTHING] * size, [_NOTHING] * size
        if one is not None:
            is_known = one.owned is not None and one.owned is of_table
            flags[1 + 2 * number :][:2] = True, is_known
            ends = one.counts.cumsum()[:-1]
            sum_parts = [part.reshape(-1) for part in np.split(one.sums, ends)]
            if not is_known:
                key_parts = [part.view(np.float32) for part in np.split(one.keys, ends)]
        for parts, *of_process in zip(to_processes, key_parts, sum_parts, strict=True):
            parts += of_process
    of_processes = processes.exchange(title, [[*parts, flags] for parts in to_processes])
    all_flags = np.stack([sums[-1] for sums in of_processes])
    answers: list[RowGradient | None] = []
    for number, (of, of_table) in enumerate(zip(tables, owned, strict=True)):
        are_given, are_known = all_flags[:, 1 + 2 * number : 3 + 2 * number].T
        if not are_given.any():
            answers.append(None)
            continue
        sums_of_rows = np.concatenate([sums[2 * number + 1] for sums in of_processes]).reshape(-1, of.table.config.dim)
        if of_table is not None and are_known.all():
            answers.append((of_table.lookup, sums_of_rows))
            continue
        keys = [sums[2 * number].view(np.int64) for sums in of_processes]
        if of_table is not None:
            known = np.split(of_table.keys, of_table.counts.cumsum()[:-1])
            keys = [known[rank] if is_known else keys[rank] for rank, is_known in enumerate(are_known)]
        own_keys, row_ptrs = of.bags(np.concatenate(keys))
        [(lookup, _)] = look_up_bags([of.table.native], [own_keys], [row_ptrs], ["sum"], [None], [1], [False])
        answers.append((lookup, sums_of_rows))
    are_finite = bool(all_flags[:, 0].all())
    if not are_finite:
        answers = [answer and (answer[0], np.full_like(answer[1], np.nan)) for answer in answers]
    return answers, are_finite


_NOTHING = np.empty(0, np.float32)


def _shown(tables: Sequence[OwnedTable]) -> str:
    return "tables " + ", ".join(dict.fromkeys(f"{of.table.name}[{of.table.config.dim}]" for of in tables))


def _exchange(
    processes: Processes, title: str, of_tables: Sequence[Numbers], sent: Ints, received: Ints | None = None
) -> tuple[list[Numbers], Ints]:
    """Send arrays [N, ...] of each table, cut by process, and join what came for each table.

    Args:
        processes: all call this.
        title: of the message.
        of_tables: one array per table, all of one dtype.
        sent: int64[processes, tables], how many rows of each array each process gets.
        received: the same of what comes; None: unknown, and each array has one dimension.

    Returns:
        an array of each table, and ``received``.
    """
    if processes.size == 1:
        return list(of_tables), sent
    widths = np.array([math.prod(array.shape[1:]) for array in of_tables])
    cuts = [np.split(array, ends[:-1]) for array, ends in zip(of_tables, sent.cumsum(axis=0).T, strict=True)]
    to_processes = [[part.reshape(-1) for part in of_process] for of_process in zip(*cuts, strict=True)]
    came = processes.exchange(title, to_processes, None if received is None else received * widths)
    joined = [np.concatenate(parts) for parts in zip(*came, strict=True)]
    arrays = [one.reshape(-1, *array.shape[1:]) for one, array in zip(joined, of_tables, strict=True)]
    return arrays, np.array([[part.size for part in parts] for parts in came])  # type: ignore[return-value]
