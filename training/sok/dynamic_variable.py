"""``sok.DynamicVariable``: a table that makes a row when training first sees a key."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.host import TrainingTable
from training.arguments import one_of, whole
from training.calls.dumps import Floats, Ints
from training.calls.sok import KINDS, checked_name, read_initializer
from training.embedding.inputs import FeatureBags
from training.embedding.parameter import TableParameter
from training.sok.initialize import started
from training.sok.placement import Placement
from training.tables.config import EmbeddingBagConfig, Initializer
from training.tables.table import EmbeddingTable


class DynamicVariable(TableParameter):
    """A table whose keys are any integers. It is a parameter without elements; its rows are in ``table``.

    An optimizer of ``training.optimizers`` must step it, and keeps its states in the rows. Those of ``torch.optim``
    raise an error. A row's gradient is the sum over all processes.

    Attributes:
        placement: which process has which rows.
        table: this process's rows.
    """

    def __init__(
        self,
        dimension: int,
        initializer: str | float | Initializer | None = None,
        var_type: str | None = None,
        name: str | None = None,
        *,
        trainable: bool = True,
        key_type: torch.dtype = torch.int64,
        dtype: torch.dtype = torch.float32,
        mode: str | None = None,
    ) -> None:
        """Make a table without rows.

        Args:
            dimension: D.
            initializer: of a new row: "random", which is the default, "ones", "zeros", a number such as "13", or an
                initializer of ``training.embedding``. Random weights depend on the key and on ``torch.manual_seed``.
            var_type: None, "hbm" or "hybrid". It has no effect: rows are in RAM.
            name: a name for messages and files.
            trainable: whether the table gets gradients and new rows.
            key_type: must be ``torch.int64`` or ``torch.int32``. Keys are int64 inside.
            dtype: must be ``torch.float32``.
            mode: "distributed": process ``key % processes`` has the row of a key. "localized:#": process # has all.

        Raises:
            SessionError: ``init`` was not called.
            TypeError: a type is not supported.
            ValueError: an argument is out of range.
        """
        call, start = "DynamicVariable", started("DynamicVariable")
        dimension = whole(call, "dimension", dimension, 1)
        one_of(call, "var_type", var_type, KINDS)
        if key_type not in (torch.int64, torch.int32) or dtype != torch.float32:
            expected = "the key_type torch.int64 or torch.int32 and the dtype torch.float32"
            raise TypeError(f"{call}: expected {expected}, got {key_type!r} and {dtype!r}")
        self.placement = Placement.read(call, mode, start.processes)
        self.stored_name = checked_name(call, name)
        config = EmbeddingBagConfig(dimension, initializer=read_initializer(initializer))
        table = EmbeddingTable(name or "dynamic variable", config, seed=start.next_seed())
        super().__init__(table, start.processes, self.placement.owner)
        self.requires_grad_(trainable)

    @property
    def name(self) -> str | None:
        """The name, or None."""
        return self.stored_name

    @property
    def dimension(self) -> int:
        """D."""
        return self.table.config.dim

    @property
    def size(self) -> torch.Size:
        """The number of this process's rows, and D."""
        return torch.Size([len(self.table), self.dimension])

    @property
    def row_count(self) -> int:
        """How many rows this process has."""
        return len(self.table)

    @property
    def step(self) -> int:
        """The last step in which a row of this process was updated; 0: none. It marks a moment for dumps."""
        return self.table.step

    @property
    def native(self) -> TrainingTable:
        """This process's rows, for ``kernels.host``."""
        return self.table.native

    def row_of(self, trains: bool) -> Callable[[Ints], Ints] | None:
        """Return None: the table itself finds keys."""
        return None

    def check(self, place: str, bags: FeatureBags) -> None:
        """Accept all keys. The table refuses reserved keys."""

    def own_rows(self, since: int = -1) -> Iterator[tuple[Ints, Floats]]:
        """Yield the keys and the vectors of this process's rows, part by part; see ``EmbeddingTable.dump``."""
        for rows in self.table.dump(since):
            yield rows.keys, rows.vectors

    def owns(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys int64[N] have their row in this process, bool[N]."""
        return self.placement.owns(keys)

    def check_stored(self, path: Any, keys: Ints) -> None:
        """Accept all stored keys."""

    def set_rows(self, keys: Ints, vectors: Floats) -> None:
        """Add or replace rows of this process. The optimizer's states of these rows begin again."""
        self.table.load(self.table.new_rows(keys, vectors))

    def __repr__(self, **named: Any) -> str:
        """Show the rows' number, not the missing elements."""
        return f"DynamicVariable(name={self.stored_name!r}, size={list(self.size)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``pickle`` and ``torch.save``, which would lose the rows."""
        raise TypeError("cannot pickle a DynamicVariable: save its rows with sok.dump")

    def __deepcopy__(self, memo: dict[int, Any]) -> "DynamicVariable":
        """Copy this process's rows with their states. Gradients are not copied."""
        copied = self.__new__(type(self))
        copied.placement, copied.stored_name = self.placement, self.stored_name
        TableParameter.__init__(copied, copy.deepcopy(self.table, memo), self.processes, self.owner)
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied
