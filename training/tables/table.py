"""One embedding table in training: rows by key, with the states of their optimizer."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernels.host import TrainingTable
from training.changes import TableChanges
from training.row_file import TableRows
from training.tables.config import EmbeddingBagConfig

_PART_ROWS = 65_536
_VECTOR_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # per float


class EmbeddingTable:
    """The rows of one table, in RAM that grows. Every method may be called from any thread.

    Attributes:
        name: the table's name.
        config: what the table is like.
        native: the rows, for the functions of ``kernels.host``.
        changes: what a publisher has not published yet; None: there is no publisher.
    """

    def __init__(
        self,
        name: str,
        config: EmbeddingBagConfig,
        *,
        seed: int = 0,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        """Make a table, without rows unless ``config`` says how many it has.

        Args:
            name: its name.
            config: what it is like.
            seed: of the first weights.
            shard: ``(r, n)``: the table has only the fixed rows with the keys r, r + n, r + 2 n, ....

        Raises:
            ValueError: a value of ``config`` is out of range.
        """
        self.name = name
        self.config = config
        self._seed = seed
        self._shard = shard
        self._has_loaded_states = False
        self._loaded_step = 0
        self.changes: TableChanges | None = None
        self.native = TrainingTable(
            name,
            config.dim,
            row_dtype=config.row_dtype,
            initializer=config.initializer.native,
            seed=seed,
            fixed_rows=config.rows,
            shard=shard,
            max_rows=config.max_rows,
            admit_after=config.admit_after,
            default_value=config.default_value,
            max_norm=config.max_norm,
        )

    def __len__(self) -> int:
        """Return V, the number of rows."""
        return len(self.native)

    @property
    def shown(self) -> str:
        """The number of rows and the bytes of their vectors and states, for people: ``3 rows of 16, 576 bytes``."""
        config = self.config
        row_bytes = config.dim * _VECTOR_BYTES[config.row_dtype] + 4 * len(self.native.first_states)
        return f"{len(self):,} rows of {config.dim}, {len(self) * row_bytes:,} bytes"

    def __repr__(self) -> str:
        """Show the rows."""
        return f"EmbeddingTable({self.name!r}, {self.shown})"

    @property
    def step(self) -> int:
        """The last step in which a row was updated; 0: none. It marks a moment for ``dump``.

        After ``load_state``, it is that of all processes.
        """
        return max(self.native.step, self._loaded_step)

    def use_states(self, rule: str, initial_states: Sequence[float]) -> None:
        """Give rows the states of an optimizer's rule, at their first values, unless they have them already.

        Raises:
            ValueError: the rows were loaded with the states of another rule, or with other first values. Their states
                would be lost.
        """
        own, own_states = self.native.rule, self.native.initial_states
        if rule == own and np.array_equal(np.array(initial_states, np.float32), np.array(own_states, np.float32)):
            return
        if self._has_loaded_states:
            given = rule
            if rule == own:
                own, given = f"{own} with first states {own_states}", f"first states {list(initial_states)}"
            reason = f"expected the optimizer {own}, whose states were loaded, got {given}"
            raise ValueError(f"table {self.name!r}: {reason}; forget_states() drops the states")
        self.native.set_states(rule, initial_states)

    def new_rows(
        self, keys: NDArray[np.int64], vectors: NDArray[np.float32], slot_ids: NDArray[np.uint64] | None = None
    ) -> TableRows:
        """Return rows that no step has updated, with the states of new rows. Without slots, they are in slot 0."""
        states = np.tile(self.native.first_states, (len(keys), 1))
        slots = np.zeros(len(keys), np.uint64) if slot_ids is None else slot_ids
        return TableRows(keys, vectors, states, np.zeros(len(keys), np.int64), slots)

    def forget_states(self) -> None:
        """Drop the states of the optimizer, so that another optimizer may begin."""
        self.native.set_states("sgd", ())
        self._has_loaded_states = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy all rows, part by part."""
        copy = self.empty_copy()
        for rows in self.dump():
            copy.load(rows)
        copy.native.write_sightings(*self.native.sightings())
        copy._has_loaded_states = self._has_loaded_states
        copy._loaded_step = self.step
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all rows."""
        return _unpickled, (type(self), self.name, self.config, self._seed, self._shard, self.state())

    def state(self) -> dict[str, Any]:
        """Return all rows with their states as arrays, for ``load_state``."""
        rows = TableRows(*self.native.read(self.native.changed_rows()))
        keys, counts = self.native.sightings()
        return {
            "rule": self.native.rule,
            "initial_states": self.native.initial_states,
            "step": self.step,
            "keys": rows.keys,
            "parts": np.concatenate([rows.vectors, rows.states], axis=1),
            "last_steps": rows.last_steps,
            "slot_ids": rows.slot_ids.astype(np.int64),
            "sighted_keys": keys,
            "sightings": counts,
        }

    def check_state(self, state: dict[str, Any], owns: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> None:
        """Raise an error if the table cannot load a state of arrays, or of tensors in RAM. The table does not change.

        Raises:
            ValueError: the state has rows of another shape, too many, or with the states of another optimizer.
        """
        parts, most = _parts_of(state), self.config.max_rows
        rule, initial_states = _rule_of(state)
        if initial_states and self.native.initial_states and rule != self.native.rule:
            raise ValueError(f"table {self.name!r}: expected the states of {self.native.rule}, got those of {rule}")
        like = TrainingTable(self.name, self.config.dim, rule=rule, initial_states=initial_states)
        floats = self.config.dim + len(like.first_states)
        if parts.shape[1] != floats:
            raise ValueError(f"table {self.name!r}: expected rows of {floats} floats, got {parts.shape[1]}")
        if most is not None and (rows := int(owns(np.asarray(state["keys"])).sum())) > most:
            raise ValueError(f"table {self.name!r}: expected at most {most} rows in a process, got {rows}")

    def load_state(self, state: dict[str, Any], owns: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> None:
        """Replace all rows by the rows of a state whose keys this process owns.

        Rows without states of an optimizer get the first states of this table's optimizer.
        """
        self.clear()
        rule, initial_states = _rule_of(state)
        self._has_loaded_states = False
        if initial_states:
            self.use_states(rule, initial_states)
            self._has_loaded_states = True
        names = ("keys", "last_steps", "slot_ids", "sighted_keys", "sightings")
        keys, last_steps, slot_ids, sighted, counts = (np.asarray(state[name]) for name in names)
        self._loaded_step = state.get("step", int(last_steps.max(initial=0)))  # an earlier version wrote none
        vectors, states = np.split(_parts_of(state), [self.config.dim], axis=1)
        if not initial_states:
            states = np.tile(self.native.first_states, (len(keys), 1))
        self.load(TableRows(keys, vectors, states, last_steps, slot_ids.astype(np.uint64))[owns(keys)])
        mine = owns(sighted)
        self.native.write_sightings(sighted[mine], counts[mine])

    def empty_copy(self) -> Self:
        """Return a table of the same kind without trained rows."""
        copy = type(self)(self.name, self.config, seed=self._seed, shard=self._shard)
        copy.use_states(self.native.rule, self.native.initial_states)
        return copy

    def rows(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return copies of every key and its vector, int64[V] and float32[V, D], in the order of ``dump``."""
        keys, vectors, *_ = self.native.read(self.native.changed_rows())
        return keys, vectors

    def served_rows(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Return keys and vectors as lookups read them, part by part. A served table has no ``max_norm``."""
        return ((part.keys, self.as_served(part.vectors)) for part in self.dump())

    def as_served(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return float32[V, D] vectors as lookups read them."""
        max_norm = self.config.max_norm
        if max_norm is None:
            return vectors
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        scaled: NDArray[np.float32] = np.where(
            norms > max_norm, vectors * (max_norm / np.maximum(norms, max_norm)), vectors
        )
        return scaled

    def dump(self, since: int = -1) -> Iterator[TableRows]:
        """Yield copies of the rows, part by part. Training must not go on before the last part.

        The rows are in the order of their first appearance. With ``max_rows``, the row that was read least recently is
        the first.

        Args:
            since: only rows whose last update was in a step after this one, or is not known. -1: all rows.
        """
        rows = self.native.changed_rows(since)
        for first in range(0, len(rows), _PART_ROWS):
            yield TableRows(*self.native.read(rows[first : first + _PART_ROWS]))

    def select(self, keys: NDArray[np.int64]) -> TableRows:
        """Return copies of the rows of those keys that have one."""
        rows = self.native.find(keys)
        return TableRows(*self.native.read(rows[rows >= 0]))

    def load(self, rows: TableRows) -> None:
        """Add rows. Rows that the table has are replaced.

        Raises:
            IndexError: the table has fixed rows, and a key is none of them.
            ValueError: the rows have another shape. With ``max_rows``, more rows than that are refused, and rows of
                earlier calls may be replaced.
        """
        self.native.write(
            np.ascontiguousarray(rows.keys),
            np.ascontiguousarray(rows.vectors),
            np.ascontiguousarray(rows.states),
            np.ascontiguousarray(rows.last_steps),
            np.ascontiguousarray(rows.slot_ids),
        )
        if self.changes is not None:
            self.changes.loaded(rows.keys)

    def note_changes(self) -> TableChanges:
        """Note changes for a publisher, until ``forget_changes``.

        Raises:
            ValueError: there is a publisher already.
        """
        if self.changes is not None:
            raise ValueError(f"table {self.name!r}: expected one publisher, got a second one")
        self.changes = TableChanges(self.native, self.config.max_rows is not None)
        return self.changes

    def forget_changes(self) -> None:
        """Note no more changes."""
        self.changes = None

    def clear(self) -> None:
        """Remove all rows. Fixed rows get their first weights again."""
        if self.changes is not None:
            self.changes.clearing()
        self._loaded_step = 0
        self.native.clear()


def _rule_of(state: dict[str, Any]) -> tuple[str, list[float]]:
    """Return the rule of a state, and the first values of its states. Earlier versions wrote "" if there was none."""
    return state["rule"] or "sgd", state["initial_states"]


def _parts_of(state: dict[str, Any]) -> NDArray[np.float32]:
    """Return the vector and the states of each row. Earlier versions wrote each state in a column of its own."""
    parts = np.asarray(state["parts"])
    return parts.reshape(len(parts), math.prod(parts.shape[1:]))


def _unpickled(
    kind: type[EmbeddingTable],
    name: str,
    config: EmbeddingBagConfig,
    seed: int,
    shard: tuple[int, int],
    state: dict[str, Any],
) -> EmbeddingTable:
    table = kind(name, config, seed=seed, shard=shard)
    table.load_state(state, lambda keys: np.ones(keys.size, np.bool_))
    return table
