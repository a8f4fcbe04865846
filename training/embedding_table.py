"""A dynamic embedding table, which creates a row when training first sees its key."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.host import KeyIndex, gather_pooled, move_rows, sum_gradients
from serving.model.graph import Embedding
from training.keyed_random import keyed_uniform
from training.samples import Bags
from training.update_rules import AdamRule, Move, UpdateRule, UpdateType, update_rows

_INITIAL_LIMIT = 0.05  # HugeCTR's first weights are uniform in [-0.05, 0.05)


@dataclass(frozen=True, slots=True)
class TouchedRows:
    """The rows that one training step reads from a table.

    Attributes:
        rows: int64[N], the row numbers of the keys of ``bags``.
        bags: the keys.
        pooled: float32[B, S, D], a leaf. ``backward`` gives it the gradient that ``EmbeddingTable.update`` needs.
    """

    rows: NDArray[np.int64]
    bags: Bags
    pooled: torch.Tensor


@dataclass(frozen=True, slots=True)
class TableRows:
    """Everything that a table knows of V of its rows.

    Attributes:
        keys: int64[V].
        parts: float32[V, P, D]. Part 0 is the vector; the other parts are the states of the table's rule.
        last_steps: int64[V], the step of each row's last update; 0: none is known.
        slot_ids: uint64[V], the slot in which each key was first seen.
    """

    keys: NDArray[np.int64]
    parts: NDArray[np.float32]
    last_steps: NDArray[np.int64]
    slot_ids: NDArray[np.uint64]

    def __len__(self) -> int:
        """Return V."""
        return len(self.keys)

    def __getitem__(self, some: slice | NDArray[np.int64]) -> Self:
        """Select rows by slice or by int64 positions."""
        return type(self)(self.keys[some], self.parts[some], self.last_steps[some], self.slot_ids[some])


class EmbeddingTable:
    """The rows of one embedding layer with their optimizer's states, in RAM that grows by doubling. Not thread-safe."""

    def __init__(
        self,
        embedding: Embedding,
        *,
        seed: int,
        rule: UpdateRule | None = None,
        update_type: UpdateType = "Local",
        capacity_rows: int = 1024,
    ) -> None:
        """Make an empty table. First weights depend only on the key and ``seed``; ``rule`` is Adam by default."""
        self._embedding = embedding
        self._seed = seed
        self._index = KeyIndex()
        self._rule = rule or AdamRule()
        self._update_type: UpdateType = update_type
        # Each row's weights, then the states of the rule.
        self._parts = np.empty((capacity_rows, 1 + len(self._rule.initial_states), embedding.dim), np.float32)
        self._heads = np.full(capacity_rows, -1, np.int32)  # scratch, see ``sum_gradients``
        self._last_steps = torch.zeros(capacity_rows, dtype=torch.int64)
        self._slot_ids = np.zeros(capacity_rows, np.uint64)

    def __len__(self) -> int:
        """Return V, the number of keys seen in training."""
        return len(self._index)

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return every key and its vector, int64[V] and float32[V, D], in order of first appearance."""
        return self._index.keys(), self._parts[: len(self), 0]

    @property
    def initial_states(self) -> tuple[float, ...]:
        """The value of each state of a new row."""
        return self._rule.initial_states

    @property
    def parts_shape(self) -> tuple[int, int]:
        """(P, D): a row's vector and its states, and their floats."""
        return self._parts.shape[1:]

    def empty_copy(self) -> Self:
        """Return a table of the same kind without rows."""
        return type(self)(self._embedding, seed=self._seed, rule=self._rule, update_type=self._update_type)

    def dump(self) -> TableRows:
        """Return all rows, in order of first appearance. Apart from the keys, the arrays are views of the table."""
        used = slice(len(self))
        return TableRows(self._index.keys(), self._parts[used], self._last_steps[used].numpy(), self._slot_ids[used])

    def changed_since(self, step: int) -> TableRows:
        """Return copies of the rows that were updated after a step, and of those whose last update is not known."""
        last_steps = self._last_steps[: len(self)].numpy()
        return self.dump()[np.flatnonzero((last_steps > step) | (last_steps == 0))]

    def select(self, keys: NDArray[np.int64]) -> TableRows:
        """Return copies of the rows of those keys that have one."""
        places = self._index.find(keys)
        keys, places = keys[places >= 0], places[places >= 0]
        return TableRows(keys, self._parts[places], self._last_steps.numpy()[places], self._slot_ids[places])

    def load(self, rows: TableRows) -> None:
        """Add rows with distinct keys. Rows that the table has are replaced."""
        places = self._index.find_or_insert(rows.keys)
        self._grow(len(self))
        self._parts[places] = rows.parts
        self._last_steps[torch.from_numpy(places)] = torch.from_numpy(rows.last_steps)
        self._slot_ids[places] = rows.slot_ids

    def clear(self) -> None:
        """Remove all rows."""
        self._index = KeyIndex()

    def touch(self, bags: Bags) -> TouchedRows:
        """Pool the bags for a training step, and create rows for new keys."""
        rows = self._find_or_insert(bags)
        return TouchedRows(rows, bags, self._pool(rows, bags).requires_grad_())

    def pool(self, bags: Bags) -> torch.Tensor:
        """Pool the bags as serving does, float32[B, S, D]. Unseen keys have the default value."""
        return self._pool(self._index.find(bags.keys), bags)

    def update(self, touched: TouchedRows, learning_rate: float, step: int) -> None:
        """Take one step; steps are counted from 1 over the whole training, not for each row."""
        gradient = touched.pooled.grad
        if gradient is None or not len(touched.rows):
            return
        of_bags = gradient.reshape(-1, self._embedding.dim).contiguous().numpy()
        combiner = self._embedding.combiner
        rows, sums = sum_gradients(touched.rows, touched.bags.row_ptrs, combiner, of_bags, self._heads)
        if self._update_type == "Local" or not self._rule.moves_always:
            move_rows(self._parts, *self._rule.factors(learning_rate, step), rows, sums)
            self._last_steps.numpy()[rows] = step
            return
        weights, *states = torch.from_numpy(self._parts[: len(self)]).unbind(dim=1)
        move = Move(weights, states, torch.from_numpy(sums), learning_rate, step)
        update_rows(self._rule, self._update_type, move, torch.from_numpy(rows), self._last_steps)

    def _pool(self, rows: NDArray[np.int64], bags: Bags) -> torch.Tensor:
        embedding, row_ptrs = self._embedding, bags.row_ptrs
        pooled = np.empty((len(row_ptrs) - 1, embedding.dim), np.float32)
        gather_pooled(self._parts, rows, row_ptrs, embedding.combiner, embedding.default_value, pooled)
        return torch.from_numpy(pooled).reshape(-1, embedding.slots, embedding.dim)

    def _find_or_insert(self, bags: Bags) -> NDArray[np.int64]:
        keys, old_rows = bags.keys, len(self)
        rows = self._index.find_or_insert(keys)
        new_rows = len(self) - old_rows
        if new_rows:
            self._grow(len(self))
            is_new = rows >= old_rows
            new_keys = np.empty(new_rows, dtype=np.int64)
            new_keys[rows[is_new] - old_rows] = keys[is_new]
            new = slice(old_rows, len(self))
            self._slot_ids[rows[is_new]] = np.searchsorted(bags.row_ptrs, np.flatnonzero(is_new), "right") - 1
            self._slot_ids[new] %= bags.slots
            self._last_steps[new] = 0
            self._parts[new, 0] = (2 * keyed_uniform(new_keys, self._embedding.dim, self._seed) - 1) * _INITIAL_LIMIT
            self._parts[new, 1:] = np.array(self._rule.initial_states, np.float32)[:, None]
        return rows

    def _grow(self, rows: int) -> None:
        capacity_rows, parts, dim = self._parts.shape
        if rows <= capacity_rows:
            return
        grown_rows = capacity_rows
        while grown_rows < rows:
            grown_rows *= 2
        grown = np.empty((grown_rows, parts, dim), np.float32)
        grown[:capacity_rows] = self._parts
        self._parts = grown
        self._heads = np.full(grown_rows, -1, np.int32)
        self._last_steps = torch.nn.functional.pad(self._last_steps, (0, grown_rows - capacity_rows))
        self._slot_ids = np.pad(self._slot_ids, (0, grown_rows - capacity_rows))
