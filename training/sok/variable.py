"""``sok.Variable``: a table in an array, whose rows are spread over processes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.host import ArrayRows
from training.arguments import shown
from training.calls.dumps import PART_ROWS, Floats, Ints, require_all_keys
from training.calls.ids import require_ids
from training.calls.sok import checked_name, read_table
from training.embedding.inputs import FeatureBags
from training.sok.initialize import started
from training.sok.placement import Placement


class Variable(torch.nn.Parameter):  # type: ignore[misc]
    """A table [V, D] as a parameter with the rows that this process has. Its keys are 0 to V - 1.

    A backward pass through ``lookup_sparse`` gives it a sparse gradient: the sum over all processes, with one entry for
    each distinct row. A process without rows has no gradient. Any optimizer that takes sparse gradients may step it.

    Attributes:
        name: for messages and files, or None.
        global_shape: V and D.
        placement: which process has which rows.
    """

    global_shape: tuple[int, int]
    placement: Placement
    stored_name: str | None

    def __new__(
        cls,
        initial_value: Any,
        dtype: torch.dtype = torch.float32,
        mode: str | None = "distributed",
        *,
        name: str | None = None,
    ) -> "Variable":
        """Take this process's rows of a table.

        Args:
            initial_value: the whole table [V, D], as an array, a tensor or nested lists. Every process passes it.
            dtype: must be ``torch.float32``.
            mode: "distributed": process r of n has the rows r, r + n, r + 2 n, .... "localized:#": process # has all.
            name: a name for messages and files.

        Raises:
            SessionError: ``init`` was not called.
            TypeError: the table has no numbers, or the dtype is another.
            ValueError: the table has another shape, or another argument is out of range.
        """
        placement = Placement.read("Variable", mode, started("Variable").processes)
        table = _read_table(initial_value, dtype)
        own = placement.keys(len(table))
        return cls._make(table[own.start : own.stop : own.step], table.shape, placement, checked_name("Variable", name))

    @classmethod
    def _make(cls, shard: NDArray[Any], shape: tuple[int, ...], placement: Placement, name: str | None) -> "Variable":
        # PyTorch aligns rows to cache lines, which NumPy does not
        rows = torch.empty(shard.shape, dtype=torch.float32)
        rows.numpy()[:] = shard
        variable: Variable = super().__new__(cls, rows)
        variable.global_shape = (shape[0], shape[1])
        variable.placement = placement
        variable.stored_name = name
        variable.register_post_accumulate_grad_hook(_mark_coalesced)
        return variable

    @property
    def name(self) -> str | None:
        """The name, or None."""
        return self.stored_name

    @property
    def dimension(self) -> int:
        """D."""
        return self.global_shape[1]

    @property
    def row_count(self) -> int:
        """How many rows this process has."""
        return len(self)

    @property
    def native(self) -> ArrayRows:
        """This process's rows, for ``kernels.host``."""
        if self.device.type != "cpu" or self.dtype != torch.float32 or not self.is_contiguous():
            expected = "rows in RAM, float32 and contiguous, as they were made"
            raise ValueError(f"variable {self.name!r}: expected {expected}, got {shown(self)} on {self.device}")
        return ArrayRows(self.detach().numpy(), self.name or "variable")

    def row_of(self, trains: bool) -> Callable[[Ints], Ints] | None:
        """Return what finds the rows of keys that this process owns; None: key k is row k."""
        size = self.placement.processes.size
        return (lambda keys: keys // size) if self.placement.owner is None and size > 1 else None

    def check(self, place: str, bags: FeatureBags) -> None:
        """Refuse keys beyond the table."""
        require_ids(place, bags.keys, bags.row_ptrs, self.global_shape[0])

    def own_rows(self) -> Iterator[tuple[Ints, Floats]]:
        """Yield the keys and the vectors of this process's rows, part by part."""
        own, vectors = self.placement.keys(self.global_shape[0]), self.detach().numpy()
        keys = np.arange(own.start, own.stop, own.step)
        for first in range(0, len(keys), PART_ROWS):
            yield keys[first : first + PART_ROWS], vectors[first : first + PART_ROWS]

    def owns(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys int64[N] have their row in this process, bool[N]."""
        return self.placement.owns(keys)

    def check_stored(self, path: Any, keys: Ints) -> None:
        """Refuse stored keys, which are distinct, if they are not those of this table."""
        require_all_keys(path, keys, self.global_shape[0])

    def set_rows(self, keys: Ints, vectors: Floats) -> None:
        """Replace rows of this process."""
        find = self.row_of(trains=True)
        rows = keys if find is None else find(keys)
        with torch.no_grad():
            self.detach().index_copy_(0, torch.from_numpy(rows), torch.from_numpy(vectors))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``pickle`` and ``torch.save``, which would lose what a variable knows of its rows."""
        raise TypeError("cannot pickle a variable of sok: save its rows with sok.dump or state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Variable":
        """Copy this process's rows."""
        copied = self._make(self.detach().numpy(), self.global_shape, self.placement, self.stored_name)
        copied.requires_grad_(self.requires_grad)
        return copied


def _mark_coalesced(variable: torch.Tensor) -> None:
    """Mark a gradient with ascending rows as coalesced, because PyTorch drops the mark when it keeps a gradient."""
    gradient = variable.grad
    if gradient is not None and gradient.layout == torch.sparse_coo and not gradient.is_coalesced():
        rows = gradient._indices()[0]
        if bool((rows[1:] > rows[:-1]).all()):
            gradient._coalesced_(True)


def _read_table(initial_value: Any, dtype: torch.dtype | None) -> NDArray[Any]:
    if dtype not in (None, torch.float32):
        raise TypeError(f"Variable: expected the dtype torch.float32, got {dtype!r}")
    if isinstance(initial_value, torch.Tensor) and (initial_value.is_nested or initial_value.layout != torch.strided):
        raise TypeError(f"Variable: expected a table [V, D], got {shown(initial_value)}")
    if isinstance(initial_value, torch.Tensor):
        initial_value = initial_value.detach().cpu().numpy()
    return read_table(initial_value)
