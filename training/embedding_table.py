"""A dynamic embedding table, which creates a row when training first sees its key."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding_bag

from kernels.host import KeyIndex
from serving.model.graph import Embedding
from training.keyed_random import keyed_uniform
from training.samples import Bags
from training.update_rules import AdamRule, Move, UpdateRule, UpdateType, update_rows

_INITIAL_LIMIT = 0.05  # HugeCTR's first weights are uniform in [-0.05, 0.05)
_WEIGHTS = 0  # the other parts are the states of the rule


@dataclass(frozen=True, slots=True)
class TouchedRows:
    """The rows that one training step reads from a table, and the tensor that receives their gradient.

    Attributes:
        rows: int64[U], the unique row numbers.
        vectors: float32[U, D], a leaf. After ``backward`` its ``grad`` is the sum over every place that read a row.
        pooled: float32[B, S, D], made from ``vectors``.
    """

    rows: torch.Tensor
    vectors: torch.Tensor
    pooled: torch.Tensor


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
        self._update_type = update_type
        self._initial = torch.tensor((0.0, *self._rule.initial_states)).reshape(-1, 1, 1)
        self._state = torch.empty(len(self._initial), capacity_rows, embedding.dim)
        self._last_steps = torch.zeros(capacity_rows, dtype=torch.int64)

    def __len__(self) -> int:
        """Return V, the number of keys seen in training."""
        return len(self._index)

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return every key and its vector, int64[V] and float32[V, D], in order of first appearance."""
        return self._index.keys(), self._state[_WEIGHTS, : len(self)].numpy()

    def touch(self, bags: Bags) -> TouchedRows:
        """Pool the bags for a training step, and create rows for new keys."""
        rows = self._find_or_insert(bags.keys)
        unique, places = torch.unique(torch.from_numpy(rows), return_inverse=True)
        vectors = self._state[_WEIGHTS].index_select(0, unique).requires_grad_()
        return TouchedRows(unique, vectors, self._pool(vectors, places, bags))

    def pool(self, bags: Bags) -> torch.Tensor:
        """Pool the bags as serving does, float32[B, S, D]. Unseen keys have the default value."""
        rows = torch.from_numpy(self._index.find(bags.keys))
        vectors = self._state[_WEIGHTS].index_select(0, rows.clamp(min=0))
        vectors[rows < 0] = self._embedding.default_value
        return self._pool(vectors, torch.arange(len(rows)), bags)

    def update(self, touched: TouchedRows, learning_rate: float, step: int) -> None:
        """Take one step; steps are counted from 1 over the whole training, not for each row."""
        gradient = touched.vectors.grad
        if gradient is None or not len(touched.rows):
            return
        weights, *states = self._state[:, : len(self)]
        move = Move(weights, states, gradient, learning_rate, step)
        update_rows(self._rule, self._update_type, move, touched.rows, self._last_steps)

    def _pool(self, vectors: torch.Tensor, places: torch.Tensor, bags: Bags) -> torch.Tensor:
        slots, dim = self._embedding.slots, self._embedding.dim
        offsets = torch.from_numpy(bags.row_ptrs)
        combiner = self._embedding.combiner
        mode = "sum" if combiner == "sqrtn" else combiner
        if not len(vectors):  # every bag is empty, but embedding_bag needs at least one vector
            return vectors.new_zeros((len(offsets) - 1) // slots, slots, dim) + vectors.sum()
        pooled = embedding_bag(places, vectors, offsets, mode=mode, include_last_offset=True)
        if combiner == "sqrtn":
            pooled = pooled / offsets.diff().clamp(min=1).sqrt().unsqueeze(1)
        return pooled.reshape(-1, slots, dim)

    def _find_or_insert(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        old_rows = len(self)
        rows = self._index.find_or_insert(keys)
        new_rows = len(self) - old_rows
        if new_rows:
            self._grow(len(self))
            is_new = rows >= old_rows
            new_keys = np.empty(new_rows, dtype=np.int64)
            new_keys[rows[is_new] - old_rows] = keys[is_new]
            first_weights = (2 * keyed_uniform(new_keys, self._embedding.dim, self._seed) - 1) * _INITIAL_LIMIT
            self._state[:, old_rows : len(self)] = self._initial
            self._state[_WEIGHTS, old_rows : len(self)] = torch.from_numpy(first_weights.astype(np.float32))
        return rows

    def _grow(self, rows: int) -> None:
        capacity_rows = self._state.shape[1]
        if rows <= capacity_rows:
            return
        while capacity_rows < rows:
            capacity_rows *= 2
        grown = torch.empty(len(self._initial), capacity_rows, self._embedding.dim)
        grown[:, : self._state.shape[1]] = self._state
        self._state = grown
        self._last_steps = torch.nn.functional.pad(self._last_steps, (0, capacity_rows - len(self._last_steps)))
