"""An embedding server: a shard of the rows, with one table for each D. A lock lets only one call run at a time."""

from collections.abc import Iterator
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import TrainingTable, keys_by_owner, look_up_bags, update_tables
from training.changes import TableChanges
from training.errors import DataError, SessionError
from training.persia.checkpoint import dump_rows, load_rows
from training.persia.config import EmbeddingConfig
from training.persia.signs import Keys
from training.persia.wire import NOTHING, Message
from training.row_file import BLOCK_ROWS

Floats = NDArray[np.float32]
#: What other roles may call.
METHODS = ("configure", "look_up", "update", "dump", "load", "note_changes", "changed", "commit", "present")


class EmbeddingServer:
    """The rows of one shard and their optimizer.

    Attributes:
        number: of the shard, from 0.
        servers: the number of shards.
    """

    def __init__(self, config: EmbeddingConfig, capacity: int, number: int, servers: int) -> None:
        """Prepare a server. ``configure`` makes its tables."""
        self.number = number
        self.servers = servers
        self._config = config
        self._capacity = capacity
        self._lock = Lock()
        self._tables: dict[int, TrainingTable] = {}
        self._settings: dict[str, Any] = {}
        self._changes: dict[int, TableChanges] = {}
        self._parts: Iterator[Message] = iter(())
        self._step = 0
        self._draw = np.random.default_rng(number)

    def configure(self, message: Message) -> Message:
        """Make empty tables.

        Facts: ``optimizer`` as ``Optimizer.facts`` returns it, ``initialization`` [low, high], ``admit_probability``,
        ``weight_bound``.
        """
        with self._lock:
            if self._tables:
                raise SessionError("expected one TrainCtx in a run, got another")
            self._settings = dict(message.facts)
            low, high = self._settings["initialization"]
            self._tables = {
                dim: TrainingTable(
                    f"dim {dim}",
                    dim,
                    rule=self._settings["optimizer"]["rule"],
                    initial_states=self._settings["optimizer"]["initial_states"],
                    initializer=("uniform", low, high),
                    max_rows=self._capacity,
                )
                for dim in self._config.dims
            }
        return NOTHING

    def look_up(self, message: Message) -> Message:
        """Return the rows of distinct keys, float32[U, D] by D. ``message`` has the keys int64[U] by D.

        A key without a row gets one, with ``admit_probability``. Otherwise its vector is zeros.
        """
        with self._lock:
            return Message({dim: self._rows(int(dim), keys) for dim, keys in message.arrays.items()}, {})

    def _rows(self, dim: int, keys: Keys) -> Floats:
        table = self._table(dim)
        probability = self._settings["admit_probability"]
        if len(keys) > self._capacity:
            expected = f"at most {self._capacity:,} distinct rows of dim {dim} in a batch, as many as a server may have"
            raise DataError("capacity", f"expected {expected}, got {len(keys):,}")
        if probability == 1:
            return _vectors(table, keys, trains=True)
        has_row = table.find(keys) >= 0
        has_row |= self._draw.random(len(keys)) < probability
        rows = np.zeros((len(keys), dim), np.float32)
        rows[has_row] = _vectors(table, keys[has_row], trains=True)
        return rows

    def update(self, message: Message) -> Message:
        """Take one step of the optimizer.

        ``message`` has for each D the arrays ``keys <D>``, int64[U], and ``gradients <D>``, float32[U, D]. A key may
        occur more than once. The gradient of a row that was replaced is dropped.
        """
        with self._lock:
            self._step += 1
            optimizer, bound = self._settings["optimizer"], self._settings["weight_bound"]
            for dim in self._config.dims:
                keys = message.arrays[f"keys {dim}"]
                self._move(self._table(dim), keys, message.arrays[f"gradients {dim}"], optimizer)
                if bound > 0:
                    _clip(self._table(dim), keys, bound)
        return NOTHING

    def _move(self, table: TrainingTable, keys: Keys, gradients: Floats, optimizer: dict[str, Any]) -> None:
        lookup, vectors = look_up_bags([table], [keys], [None], ["sum"], [None], [1], [False])[0]
        if optimizer["weight_decay"]:
            firsts = keys_by_owner(keys, 1)[3]
            gradients = gradients.copy()
            gradients[firsts] += np.float32(optimizer["weight_decay"]) * vectors[firsts]
        first, second, epsilon = optimizer["parameters"]
        if optimizer["rule"] == "adam":  # the rule adds epsilon to the uncorrected root, PyTorch to the corrected root
            epsilon *= (1 - second**self._step) ** 0.5
        update_tables(
            [lookup],
            [gradients],
            optimizer["rule"],
            "Local",
            optimizer["learning_rate"],
            self._step,
            (first, second, epsilon),
        )

    def dump(self, message: Message) -> Message:
        """Write all rows into the folder that the fact ``folder`` names. Return the fact ``step``."""
        with self._lock:
            dump_rows(message.facts["folder"], self.number, self._tables)
            return Message({}, {"step": self._step})

    def load(self, message: Message) -> Message:
        """Read the rows of this shard from the checkpoint that the fact ``folder`` names, and take the fact ``step``.

        The checkpoint may be of another number of servers.
        """
        with self._lock:
            self._step = message.facts["step"]
            for dim, rows in load_rows(message.facts["folder"], self.number, self.servers, self._capacity):
                self._table(dim).write(rows.keys, rows.vectors, rows.states, rows.last_steps, rows.slot_ids)
                if self._changes:
                    self._changes[dim].loaded(rows.keys)
        return NOTHING

    def note_changes(self, _message: Message) -> Message:
        """Note changes for a publisher. At first, every row is one."""
        with self._lock:
            self._changes = {dim: TableChanges(table, has_max_rows=True) for dim, table in self._tables.items()}
        return NOTHING

    def changed(self, message: Message) -> Message:
        """Return the next of the changes, or the first if the fact ``begin`` is true, or nothing after the last.

        The answer has ``keys`` int64[N] and ``vectors`` float32[N, D], or no vectors if the keys have no row any more.
        Facts: ``dim`` and ``step``. Until the last, no row may change.
        """
        with self._lock:
            if message.facts["begin"]:
                self._parts = self._changed_parts()
            return next(self._parts, NOTHING)

    def _changed_parts(self) -> Iterator[Message]:
        for dim, changes in self._changes.items():
            facts = {"dim": dim, "step": self._step}
            deleted, parts = changes.collect()
            for first in range(0, len(deleted), BLOCK_ROWS):
                yield Message({"keys": deleted[first : first + BLOCK_ROWS]}, facts)
            for part in parts:
                yield Message({"keys": part.keys, "vectors": part.vectors}, facts)

    def commit(self, message: Message) -> Message:
        """Note that the changes are published, or with the fact ``all``, that all present rows are."""
        with self._lock:
            for changes in self._changes.values():
                if message.facts["all"]:
                    changes.commit_all()
                else:
                    changes.commit()
        return NOTHING

    def present(self, message: Message) -> Message:
        """Return the rows of those ``keys`` that have one; see ``changed``. Fact: ``dim``."""
        with self._lock:
            dim = message.facts["dim"]
            table = self._table(dim)
            rows = table.find(message.arrays["keys"])
            keys, vectors, *_ = table.read(rows[rows >= 0])
            return Message({"keys": keys, "vectors": vectors}, {"dim": dim, "step": self._step})

    def _table(self, dim: int) -> TrainingTable:
        if not self._tables:
            raise SessionError("expected a TrainCtx to configure the embedding servers first")
        return self._tables[dim]


def _vectors(table: TrainingTable, keys: Keys, trains: bool) -> Floats:
    return look_up_bags([table], [keys], [None], ["sum"], [None], [1], [trains])[0][1]


def _clip(table: TrainingTable, keys: Keys, bound: float) -> None:
    """Keep the weights of rows within the bound."""
    weights = _vectors(table, keys, trains=False)
    if weights.max(initial=0) > bound or weights.min(initial=0) < -bound:
        is_beyond = (np.abs(weights) > bound).any(axis=1)
        found, vectors, states, last_steps, slots = table.read(table.find(keys[is_beyond]))
        table.write(found, vectors.clip(-bound, bound), states, last_steps, slots)
