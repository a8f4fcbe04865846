"""The variable of a legacy layer: rows in an array, and a hash table that finds them by key."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from kernels.host import KeyIndex, TrainingTable, first_outside, look_up_bags
from serving.errors import ModelFileError
from training.arguments import shown
from training.calls.dumps import PART_ROWS, Floats, Ints
from training.calls.sok import checked_name
from training.embedding.inputs import FeatureBags
from training.embedding.table_gradient import tensors_in
from training.errors import SessionError
from training.sok.initialize import started
from training.sok.placement import Placement
from training.sok.variable import Variable
from training.tables.config import Initializer

# The functions by which optimizers move weights.
_MOVES = {"add_", "addcdiv_", "addcmul_", "index_add_", "index_copy_", "lerp_", "mul_", "sub_"}


class EmbeddingVariable(Variable):
    """The rows [max_vocabulary_size_per_gpu, D] of a legacy layer in this process.

    An optimizer may step it inside ``OptimizerScope`` only.

    Attributes:
        scopes: how many scopes with this variable are open.
    """

    scopes: int
    _place: str
    _initializer: Initializer
    _seed: int
    _index: KeyIndex | None

    @classmethod
    def make(
        cls, call: str, rows: int, dim: int, initializer: Initializer, use_hashtable: bool, name: str | None
    ) -> "EmbeddingVariable":
        """Make a variable with room for so many rows in each process. ``call`` is for messages.

        With ``use_hashtable``, training gives a key the next row when it first sees it. Otherwise key k is row
        ``k // processes`` of its process. First weights depend on the key and the seed.
        """
        start = started(call)
        seed, placement, most = start.next_seed(), Placement(start.processes, None), rows * start.processes.size
        shard = np.zeros((rows, dim), np.float32)
        if not use_hashtable:
            own = np.arange(start.processes.rank, most, start.processes.size)
            shard[:] = _first_weights(own, dim, initializer, seed)
        variable = cls._make(shard, (most, dim), placement, checked_name(call, name))
        assert isinstance(variable, cls)
        variable.scopes, variable._place = 0, f"{call} {name!r}" if name else call
        variable._initializer, variable._seed = initializer, seed
        variable._index = KeyIndex() if use_hashtable else None
        return variable

    @property
    def keys(self) -> Ints | None:
        """The keys of the first rows, in their order. None: key k is row ``k // processes``."""
        return None if self._index is None else self._index.keys()

    @keys.setter
    def keys(self, keys: Ints) -> None:
        self._index = KeyIndex()
        self._index.find_or_insert(keys)

    @property
    def row_count(self) -> int:
        """See ``Variable.row_count``."""
        return len(self) if self._index is None else len(self._index)

    def row_of(self, trains: bool) -> Callable[[Ints], Ints] | None:
        """See ``Variable.row_of``. With ``trains``, new keys get rows; otherwise they have row -1."""
        index = self._index
        if index is None:
            return super().row_of(trains)

        def find(keys: Ints) -> Ints:
            rows = index.find(keys)
            if trains and (rows < 0).any():
                self._add(np.unique(keys[rows < 0]))
                rows = index.find(keys)
            return rows

        return find

    def check(self, place: str, bags: FeatureBags) -> None:
        """See ``Variable.check``. A hash table takes every key."""
        if self._index is None:
            super().check(place, bags)

    def own_rows(self) -> Iterator[tuple[Ints, Floats]]:
        """See ``Variable.own_rows``."""
        keys = self.keys
        if keys is None:
            yield from super().own_rows()
            return
        vectors = self.detach().numpy()
        for first in range(0, len(keys), PART_ROWS):
            some = slice(first, min(first + PART_ROWS, len(keys)))
            yield keys[some], vectors[some]

    def check_stored(self, path: Any, keys: Ints) -> None:
        """See ``Variable.check_stored``. Fewer rows are enough, because room depends on the number of processes."""
        if self._index is None:
            rows = self.global_shape[0]
            if first_outside(keys, 0, rows - 1) < len(keys):
                came = f"keys from {keys.min()} to {keys.max()}"
                raise ModelFileError(path, f"expected keys from 0 to {rows - 1}, found {came}")
            return
        mine = keys[self.placement.owns(keys)]
        rows = len(self._index) + int((self._index.find(mine) < 0).sum())
        if rows > len(self):
            raise ModelFileError(path, self._too_many(rows))

    def check_state(self, call: str, rows: Any, keys: Any) -> None:
        """Refuse the state of another layer. ``keys`` of ``state_dict`` are a tensor, or None without a hash table.

        Raises:
            ValueError: it has other rows, it has keys and this variable has none, or its keys are wrong.
        """
        if not isinstance(rows, torch.Tensor) or rows.shape != self.shape:
            raise ValueError(f"{call}: expected a state with rows {shown(self)}, got {shown(rows)}")
        if (keys is None) != (self._index is None):
            expected = "without keys" if self._index is None else "with keys"
            raise ValueError(f"{call}: expected a state {expected}, because use_hashtable={self._index is not None}")
        if keys is None:
            return
        if not isinstance(keys, torch.Tensor) or keys.dtype != torch.int64 or keys.ndim != 1 or len(keys) > len(self):
            raise ValueError(f"{call}: expected a state with int64 keys of at most {len(self)} rows, got {shown(keys)}")
        index, array = KeyIndex(), keys.cpu().numpy()
        index.find_or_insert(array)  # raises an error for a reserved key
        if len(index) < len(array) or not self.placement.owns(array).all():
            raise ValueError(f"{call}: expected a state with distinct keys of this process, got others")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to move rows outside of a scope."""
        name = function.__name__
        if name in _MOVES or name.startswith(("_foreach_", "_fused_")):
            for value in tensors_in([*args, *(kwargs or {}).values()]):
                if isinstance(value, EmbeddingVariable) and not value.scopes:
                    advice = "step it inside sok.OptimizerScope, or use sok.optimizers.Adam"
                    raise SessionError(f"{value._place}: the variable of a layer has no open scope; {advice}")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmbeddingVariable":
        """See ``Variable``."""
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, EmbeddingVariable)
        copied.scopes, copied._place = 0, self._place
        copied._initializer, copied._seed = self._initializer, self._seed
        copied._index = None
        if (keys := self.keys) is not None:
            copied.keys = keys
        return copied

    def _add(self, keys: Ints) -> None:
        """Give new keys rows with first weights."""
        assert self._index is not None
        first, last = len(self._index), len(self._index) + len(keys)
        if last > len(self):
            raise ValueError(f"{self._place}: {self._too_many(last)}")
        weights = _first_weights(keys, self.dimension, self._initializer, self._seed)
        self._index.find_or_insert(keys)
        with torch.no_grad():
            self[first:last] = torch.from_numpy(weights)

    def _too_many(self, rows: int) -> str:
        expected = f"at most max_vocabulary_size_per_gpu = {len(self):,} distinct keys in each process"
        return f"expected {expected}, got {rows:,}"


def _first_weights(keys: Ints, dim: int, initializer: Initializer, seed: int) -> Floats:
    table = TrainingTable("first weights", dim, initializer=initializer.native, seed=seed)
    [(_, vectors)] = look_up_bags([table], [keys], [None], ["sum"], [None], [1], [True])
    return vectors
