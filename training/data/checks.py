"""Check labels, dense features and keys. The samples of every data format pass through here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serving.model.slot_sizes import slot_ranges
from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY
from training.errors import DataError
from training.model.losses import LogLoss, Loss
from training.samples import Bags, Samples


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """The columns of L labels, F dense features, S slots and the weights of the samples, by name."""

    labels: tuple[str, ...]
    dense: tuple[str, ...]
    slots: tuple[str, ...]
    weight: str | None = None

    @property
    def names(self) -> list[str]:
        """All columns. A column that is read several times is listed several times."""
        weight = [] if self.weight is None else [self.weight]
        return [*weight, *self.labels, *self.dense, *self.slots]


def checked(
    samples: Samples,
    source: object,
    first_record: int,
    *,
    columns: ColumnMap | None = None,
    slot_sizes: Sequence[int] | None = None,
    losses: Sequence[Loss] | None = None,
) -> Samples:
    """Check samples, and return them with the keys of their tables.

    Args:
        samples: the samples as the file has them.
        source: the file, or another name of the data, for the message.
        first_record: the number of the first sample in the source.
        columns: the names of the columns; None: ``label[0]``, ``dense[0]``, ``slot[0]`` and so on.
        slot_sizes: S numbers, how many keys each slot has. Keys then begin at 0 in each slot, and the sizes of the
            previous slots are added to them. None: keys are used as they are.
        losses: a loss for each label, which says what the label may be; None: each is 0 or 1.

    Raises:
        DataError: a loss does not take its label, a dense feature is NaN or infinite, a weight is negative or not
            finite, or a key is reserved or outside its slot. The message names the source, the column and the record.
        ValueError: there is not one size per slot.
    """
    labels, dense, bags = samples.labels, samples.dense, samples.bags

    def refuse(kind: str, column: int, record: int, reason: str) -> None:
        names = (
            () if columns is None else {"label": columns.labels, "dense": columns.dense, "slot": columns.slots}[kind]
        )
        name = names[column] if names else f"{kind}[{column}]"
        raise DataError(source, reason, column=name, record=first_record + record)

    for column, (loss, values) in enumerate(zip(losses or [LogLoss()] * labels.shape[1], labels.T, strict=False)):
        if (wrong := loss.is_wrong(values)).any():
            record = int(np.argmax(wrong))
            refuse("label", column, record, loss.fault(values[record]))
    if (wrong := ~np.isfinite(dense)).any():
        record, column = np.argwhere(wrong)[0].tolist()
        found = np.format_float_positional(dense[record, column], trim="-")
        refuse("dense", column, record, f"expected a finite number, found {found}")
    weights = np.ones(0, np.float32) if samples.weights is None else samples.weights
    wrong_weights = ~np.isfinite(weights) | (weights < 0)
    if wrong_weights.any():
        record = int(np.argmax(wrong_weights))
        name = None if columns is None else columns.weight
        reason = f"expected a weight of at least 0, found {weights[record]:g}"
        raise DataError(source, reason, column=name, record=first_record + record)
    keys, wrong_keys, sizes = _keys_of(bags, slot_sizes)
    if wrong_keys.any():
        at = int(np.argmax(wrong_keys))
        record, slot = divmod(at if bags.has_one_key_each else _bag_of(bags, at), bags.slots)
        lowest, highest = (SMALLEST_KEY, LARGEST_KEY) if sizes is None else (0, sizes[slot] - 1)
        refuse("slot", slot, record, f"expected a key from {lowest} to {highest}, found {bags.keys[at]}")
    if keys is bags.keys:
        return samples
    bags = Bags(keys, None if bags.has_one_key_each else bags.row_ptrs, bags.slots)
    return Samples(labels, dense, bags, samples.weights)


def _keys_of(
    bags: Bags, slot_sizes: Sequence[int] | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64] | None]:
    """Return the keys of the table, which keys of the bags are wrong, and the size of each slot."""
    if slot_sizes is None:
        keys = bags.keys
        if not keys.size or (keys.min() >= SMALLEST_KEY and keys.max() <= LARGEST_KEY):  # faster than a mask
            return keys, np.empty(0, np.bool_), None
        return keys, (keys < SMALLEST_KEY) | (keys > LARGEST_KEY), None
    offsets, sizes = slot_ranges(slot_sizes, bags.slots)
    keys, offset_of, size_of = bags.keys, offsets, sizes
    if bags.has_one_key_each:
        keys = keys.reshape(-1, bags.slots)
    else:
        counts = bags.sizes.reshape(-1)
        offset_of, size_of = (np.repeat(np.tile(of_slots, len(bags)), counts) for of_slots in (offsets, sizes))
    wrong = keys.view(np.uint64) >= size_of.view(np.uint64)  # a negative key is a large unsigned number
    return (keys + offset_of).reshape(-1), wrong.reshape(-1), sizes


def _bag_of(bags: Bags, key: int) -> int:
    return int(np.searchsorted(bags.row_ptrs, key, "right")) - 1
