"""Slots in which each sample needs exactly one key, because the network would take a row of zeros for a key's row."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving.batch import Batch
from serving.errors import RequestError
from serving.features import FeatureReader, SlotOfTable, is_spread
from serving.model.records import Needs, Output


class _Slots(NamedTuple):
    """Slots of a table that have exactly one key: their numbers, and their positions among the rows of a sample."""

    table: int
    width: int
    numbers: NDArray[np.int64]
    positions: NDArray[np.int64]


class RequiredKeys:
    """Refuses samples of one model that have no key, or several, where the network needs one."""

    def __init__(
        self, slots: Sequence[SlotOfTable], needs: Mapping[str, Needs], features: FeatureReader | None
    ) -> None:
        """Find the slots.

        Args:
            slots: of the model, table by table.
            needs: what each output depends on; see ``Graph``.
            features: what reads the raw features or the inputs by name; None: the model has neither.
        """
        self._needs = needs
        self._names = [slot.name for slot in slots] if features is None else features.of_slots
        spread = [] if features is None else [slot.name for slot in features.definition.slots if is_spread(slot)]
        self._lists = frozenset(spread)
        self._slots: list[_Slots] = []
        first = 0
        for table, (_, group) in enumerate(groupby(slots, lambda slot: slot.table)):
            of_table = list(group)
            widths = np.array([max(slot.most, 1) for slot in of_table])
            numbers = np.flatnonzero([slot.needs_key for slot in of_table])
            if numbers.size:
                positions = (np.cumsum(widths) - widths)[numbers]
                self._slots.append(_Slots(table, int(widths.sum()), first + numbers, positions))
            first += len(of_table)

    def names(self, wanted: Sequence[Output] | None) -> frozenset[str]:
        """Return the names of the slots in which each sample of a request for outputs needs keys; see ``check``."""
        return frozenset(
            self._names[number]
            for slots in self._slots
            for number in slots.numbers[self._is_needed(slots, wanted)].tolist()
        )

    def check(self, batch: Batch, wanted: Sequence[Output] | None) -> None:
        """Raise RequestError if a sample has no key, or several, where it needs one.

        Args:
            batch: the samples.
            wanted: the outputs that the request asks for; None: those of a request that names none.
        """
        for slots in self._slots:
            table, width, numbers, positions = slots
            row_ptrs, bags = batch.tables[table].row_ptrs, None if batch.bags is None else batch.bags[table]
            sizes = np.diff(row_ptrs)
            if not np.count_nonzero(sizes != 1):
                continue  # most requests
            counts = (sizes if bags is None else sizes[bags]).reshape(-1, width)[:, positions]
            is_wrong = (counts != 1) & self._is_needed(slots, wanted)
            if np.count_nonzero(is_wrong):
                sample, at = (int(place) for place in np.argwhere(is_wrong)[0])
                name = self._names[numbers[at]]
                own = [self._names[number] == name for number in numbers] if name in self._lists else [at]
                raise _wrong_count(sample, name, counts[sample, own])

    def _is_needed(self, slots: _Slots, wanted: Sequence[Output] | None) -> NDArray[np.bool_]:
        """Return which of the slots one of the outputs depends on."""
        if wanted is None or any(output.name not in self._needs for output in wanted):
            return np.ones(slots.positions.size, np.bool_)
        rows = {row for output in wanted for row in self._needs[output.name].rows}
        return np.array([(slots.table, at) in rows for at in slots.positions.tolist()], np.bool_)


def _wrong_count(sample: int, name: str, counts: NDArray[np.int32]) -> RequestError:
    found, needed = int(counts.sum()), counts.size
    if found == needed:
        came = ", ".join(map(str, counts.tolist()))
        return RequestError(
            f"sample {sample} has {came} keys in the slots of {name!r}, but the network needs one in each"
        )
    came = f"{found or 'no'} key{'s' * (found > 1)}"
    reason = "; a missing value has no key" * (found < needed)
    expected = f"the network needs exactly {needed if needed > 1 else 'one'}"
    return RequestError(f"sample {sample} has {came} in {name!r}, but {expected}{reason}")
