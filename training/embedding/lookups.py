"""The lookups of one forward pass, and how their gradients find their rows again."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.host import ArrayRows, BagLookup, TrainingTable, look_up_bags, weight_gradients
from training.embedding.inputs import FeatureBags
from training.tables.config import EmbeddingBagConfig

Floats = NDArray[np.float32]


class Table(Protocol):
    """Rows that can be looked up. ``EmbeddingTable`` is one."""

    @property
    def name(self) -> str:
        """The table's name."""

    @property
    def config(self) -> EmbeddingBagConfig:
        """What the table is like."""

    @property
    def native(self) -> TrainingTable | ArrayRows:
        """The rows, for the functions of ``kernels.host``."""


class LookedUpRows(NamedTuple):
    """Rows of a front end, as a ``Table``."""

    name: str
    config: EmbeddingBagConfig
    native: TrainingTable | ArrayRows


class Lookups(Protocol):
    """Lookups that a backward pass follows.

    Attributes:
        pooled: float32[R, D] of each lookup.
        gradients_need_rows: gradients depend on the rows that were read, because weights have a gradient or rows were
            scaled to ``max_norm``.
    """

    pooled: list[Floats]
    gradients_need_rows: bool

    def row_gradients(self, gradients: Sequence[Floats | None]) -> Sequence[Any]:
        """Turn the gradients of ``pooled`` into what the receiver of ``PooledBags`` takes for each lookup.

        None: the loss does not depend on a lookup.
        """

    def weight_gradients(self, number: int, gradient: Floats) -> Floats:
        """Return the gradient float32[N] of the weights of a lookup that has weights."""


class LocalLookups:
    """Lookups in the tables of this process. See ``Lookups``."""

    def __init__(self, tables: Sequence[Table], bags: Sequence[FeatureBags], trains: Sequence[bool]) -> None:
        """Look up the bags of each table. Where ``trains``, keys get rows."""
        answers = look_up_bags(
            [table.native for table in tables],
            [bag.keys for bag in bags],
            [bag.row_ptrs for bag in bags],
            [table.config.combiner for table in tables],
            [weights_of(bag) for bag in bags],
            [one.slots if table.config.keeps_slots else 1 for table, one in zip(tables, bags, strict=True)],
            trains,
        )
        self._lookups: list[BagLookup] = [lookup for lookup, _ in answers]
        self.pooled: list[Floats] = [pooled for _, pooled in answers]
        self.gradients_need_rows = need_rows(tables, bags)

    def row_gradients(self, gradients: Sequence[Floats | None]) -> Sequence[tuple[BagLookup, Floats] | None]:
        """See ``Lookups``."""
        pairs = zip(self._lookups, gradients, strict=True)
        return [None if gradient is None else (lookup, gradient) for lookup, gradient in pairs]

    def weight_gradients(self, number: int, gradient: Floats) -> Floats:
        """See ``Lookups``."""
        return weight_gradients([self._lookups[number]], [gradient])[0]


def need_rows(tables: Sequence[Table], bags: Sequence[FeatureBags]) -> bool:
    """Return ``Lookups.gradients_need_rows``."""
    return any(table.config.max_norm is not None for table in tables) or any(
        bag.weights is not None and bag.weights.requires_grad for bag in bags
    )


def weights_of(bags: FeatureBags) -> Floats | None:
    """Return the weights as an array."""
    if bags.weights is None:
        return None
    floats: Floats = bags.weights.detach().to("cpu", torch.float32).contiguous().numpy()
    return floats
