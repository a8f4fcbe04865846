"""Divide the ids of a lookup between the partitions of a table."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from training.arguments import one_of
from training.embedding.inputs import FeatureBags

PartitionStrategy = Literal["div", "mod"]


class Part(NamedTuple):
    """The ids of one partition.

    Attributes:
        keys: their rows in the partition.
        row_ptrs: of the same bags.
        places: where they are among all ids.
    """

    keys: NDArray[np.int64]
    row_ptrs: NDArray[np.int64]
    places: NDArray[np.int64] | slice


def split(name: str, bags: FeatureBags, sizes: Sequence[int], strategy: PartitionStrategy | None) -> list[Part]:
    """Divide ids between partitions.

    Args:
        name: of the lookup, for messages.
        bags: of ids that the partitions have.
        sizes: the rows of each of the n partitions.
        strategy: "div": ranges of ids. "mod": id k is row k // n of partition k % n. None: there is one partition.

    Raises:
        ValueError: the strategy is unknown, or the sizes are none that it makes.
    """
    assert bags.row_ptrs is not None
    one_of(name, "partition_strategy", strategy, (None, *get_args(PartitionStrategy)))
    if len(sizes) == 1:
        return [Part(bags.keys, bags.row_ptrs, slice(None))]
    if strategy is None:
        raise ValueError(f"{name}: expected the partition_strategy 'div' or 'mod' of {len(sizes)} partitions, got None")
    rows, more = divmod(sum(sizes), len(sizes))
    expected = [rows + (number < more) for number in range(len(sizes))]
    if list(sizes) != expected:
        raise ValueError(f"{name}: expected partitions of {expected} rows, got {list(sizes)}")
    if strategy == "mod":
        keys, part_of = np.divmod(bags.keys, len(sizes))
    else:
        ends = np.cumsum(sizes)
        part_of = np.searchsorted(ends, bags.keys, side="right")
        keys = bags.keys - (ends - sizes)[part_of]
    places = [np.flatnonzero(part_of == number) for number in range(len(sizes))]
    return [Part(keys[some], np.searchsorted(some, bags.row_ptrs), some) for some in places]


def shares(bags: FeatureBags, combiner: Literal["mean", "sqrtn"]) -> torch.Tensor:
    """Return weights float32[N] whose weighted sum is the combined vector. They differentiate to those of ``bags``."""
    assert bags.row_ptrs is not None
    count = len(bags.row_ptrs) - 1
    bag_of = torch.from_numpy(np.repeat(np.arange(count), np.diff(bags.row_ptrs)))
    weights = torch.ones(len(bag_of)) if bags.weights is None else bags.weights.to("cpu", torch.float32)
    sums = torch.zeros(count).index_add(0, bag_of, weights if combiner == "mean" else weights.square())
    divisors = sums.where(sums != 0, torch.inf)  # so that a bag without weight becomes 0
    return weights / (divisors if combiner == "mean" else divisors.sqrt())[bag_of]
