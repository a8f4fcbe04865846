"""``sok.Variable`` and ``sok.DynamicVariable``, and the variable of a legacy layer. All are variables of Keras."""

from collections.abc import Iterator
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kernels.host import KeyIndex
from serving.errors import ModelFileError
from training.arguments import one_of, whole
from training.calls.dumps import PART_ROWS, Floats, Ints, require_all_keys
from training.calls.ids import IdRows, require_ids
from training.calls.sok import KINDS, checked_name, read_initializer, read_table
from training.tables.config import EmbeddingBagConfig, Initializer
from training.tables.table import EmbeddingTable
from training.tf.sok.initialize import started

_MODES = ("distributed", "localized:0")


class _ArrayVariable(keras.Variable):  # type: ignore[misc]
    """Rows float32[V, D] in a tensor. Every optimizer of Keras may move them.

    Attributes:
        stored_name: the name that the caller gave, or None.
    """

    stored_name: str | None
    max_norm = None
    has_all_rows = True

    @property
    def dimension(self) -> int:
        """D."""
        return int(self.shape[1])

    @property
    def params(self) -> tf.Variable:
        """See ``engine.InArray``."""
        return self.value

    def owns(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys have their row in this process: all."""
        return np.ones(len(keys), np.bool_)

    def _write(self, rows: Ints, vectors: Floats) -> None:
        self.value.scatter_update(tf.IndexedSlices(tf.constant(vectors), tf.constant(rows)))


class Variable(_ArrayVariable):
    """A table [V, D] whose keys are 0 to V - 1. Its gradient is an ``IndexedSlices`` with an entry for each row used.

    Any optimizer may move it. ``sok.optimizers.Adam`` moves only the rows that have a gradient.
    """

    def __init__(
        self,
        initial_value: Any,
        dtype: tf.DType = tf.float32,
        mode: str | None = "distributed",
        *,
        name: str | None = None,
        trainable: bool = True,
    ) -> None:
        """Take a table.

        Args:
            initial_value: the table [V, D], as an array, a tensor or nested lists.
            dtype: must be ``tf.float32``.
            mode: "distributed" or "localized:0". One process has all rows.
            name: a name for messages and files.
            trainable: whether gradients move it.

        Raises:
            SessionError: ``init`` was not called.
            TypeError: the table has no numbers, or the dtype is another.
            ValueError: the table has another shape, or another argument is out of range.
        """
        started("Variable")
        one_of("Variable", "mode", mode, (None, *_MODES))
        if tf.as_dtype(dtype or tf.float32) != tf.float32:
            raise TypeError(f"Variable: expected the dtype tf.float32, got {dtype!r}")
        self.stored_name = checked_name("Variable", name)
        rows = read_table(initial_value).astype(np.float32)
        super().__init__(rows, dtype="float32", trainable=trainable, autocast=False, name=name)

    @property
    def row_count(self) -> int:
        """V."""
        return int(self.shape[0])

    def locate(self, place: str, ids: IdRows, trains: bool) -> Ints:
        """See ``engine.InArray``."""
        require_ids(place, ids.ids, ids.row_ptrs, self.row_count)
        return ids.ids

    def own_rows(self) -> Iterator[tuple[Ints, Floats]]:
        """Yield keys and vectors, part by part."""
        yield from _parts(np.arange(self.row_count), np.asarray(self.value))

    def check_stored(self, path: Any, keys: Ints) -> None:
        """Refuse stored keys, which are distinct, if they are not those of this table."""
        require_all_keys(path, keys, self.row_count)

    def set_rows(self, keys: Ints, vectors: Floats) -> None:
        """Replace rows."""
        self._write(keys, vectors)


class LayerVariable(_ArrayVariable):
    """The rows [max_vocabulary_size_per_gpu, D] of a legacy layer.

    With a hash table, training gives a key the next row when it first sees the key.

    Attributes:
        index: finds the row of a key; None: key k is row k.
    """

    def __init__(self, place: str, rows: int, dim: int, initializer: Any, use_hashtable: bool) -> None:
        """Make the rows. ``place`` is for messages."""
        self.stored_name: str | None = None
        self.index = KeyIndex() if use_hashtable else None
        self.has_all_rows = not use_hashtable
        self._place = place
        super().__init__(initializer, shape=(rows, dim), dtype="float32", autocast=False, name="rows")

    @property
    def row_count(self) -> int:
        """How many rows have a key."""
        return int(self.shape[0]) if self.index is None else len(self.index)

    def locate(self, place: str, ids: IdRows, trains: bool) -> Ints:
        """See ``engine.InArray``."""
        if self.index is None:
            require_ids(place, ids.ids, ids.row_ptrs, self.row_count)
            return ids.ids
        rows = self.index.find(ids.ids)
        if trains and (rows < 0).any():
            self._add(np.unique(ids.ids[rows < 0]))
            rows = self.index.find(ids.ids)
        return rows

    @property
    def keys(self) -> Ints:
        """The keys of the first rows, in the order of the rows."""
        return np.arange(self.row_count) if self.index is None else self.index.keys()

    @keys.setter
    def keys(self, keys: Ints) -> None:
        self.index = KeyIndex()
        self._add(keys)

    def own_rows(self) -> Iterator[tuple[Ints, Floats]]:
        """Yield keys and vectors, part by part."""
        yield from _parts(self.keys, np.asarray(self.value))

    def check_stored(self, path: Any, keys: Ints) -> None:
        """Refuse stored rows for which there is no room."""
        rows = int(self.shape[0])
        if self.index is None:
            if keys.min() < 0 or keys.max() >= rows:
                came = f"keys from {keys.min()} to {keys.max()}"
                raise ModelFileError(path, f"expected keys from 0 to {rows - 1}, found {came}")
            return
        most = len(self.index) + int((self.index.find(keys) < 0).sum())
        if most > rows:
            raise ModelFileError(path, self._too_many(most))

    def set_rows(self, keys: Ints, vectors: Floats) -> None:
        """Add or replace rows."""
        self._write(keys if self.index is None else self.index.find_or_insert(keys), vectors)

    def _serialize_to_tensors(self) -> Any:
        """Return the rows and the keys, for ``tf.train.Checkpoint``."""
        return {**super()._serialize_to_tensors(), "keys": tf.constant(self.keys)}

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        """Undo ``_serialize_to_tensors``."""
        keys = restored_tensors.pop("keys")
        if self.index is not None:
            self.keys = keys.numpy()
        return super()._restore_from_tensors(restored_tensors)

    def _add(self, keys: Ints) -> None:
        assert self.index is not None
        rows = len(self.index) + len(keys)
        if rows > self.shape[0]:
            raise ValueError(f"{self._place}: {self._too_many(rows)}")
        self.index.find_or_insert(keys)

    def _too_many(self, rows: int) -> str:
        expected = f"at most max_vocabulary_size_per_gpu = {int(self.shape[0]):,} distinct keys"
        return f"expected {expected}, got {rows:,}"


class DynamicVariable(keras.Variable):  # type: ignore[misc]
    """A table whose keys are any integers. It is a variable [0, D]; its rows are in ``table``.

    Its gradient is an ``IndexedSlices`` whose indices are keys. ``sok.OptimizerWrapper`` or ``sok.optimizers.Adam``
    must move the rows. They keep their states in the rows. An optimizer of Keras raises a TypeError.

    Attributes:
        table: the rows.
        stored_name: the name that the caller gave, or None.
    """

    def __init__(
        self,
        dimension: int,
        initializer: str | float | Initializer | None = None,
        var_type: str | None = None,
        name: str | None = None,
        *,
        trainable: bool = True,
        key_type: tf.DType = tf.int64,
        dtype: tf.DType = tf.float32,
        mode: str | None = None,
    ) -> None:
        """Make a table without rows.

        Args:
            dimension: D.
            initializer: of a new row: "random", which is the default, "ones", "zeros", a number such as "13", or an
                initializer of ``training.tables.config``. Random weights depend on the key and on
                ``tf.random.set_seed``.
            var_type: None, "hbm" or "hybrid". It has no effect: rows are in RAM.
            name: a name for messages and files.
            trainable: whether the table gets gradients and new rows.
            key_type: must be ``tf.int64`` or ``tf.int32``. Keys are int64 inside.
            dtype: must be ``tf.float32``.
            mode: "distributed" or "localized:0". One process has all rows.

        Raises:
            SessionError: ``init`` was not called.
            TypeError: a type is not supported.
            ValueError: an argument is out of range.
        """
        call, start = "DynamicVariable", started("DynamicVariable")
        dimension = whole(call, "dimension", dimension, 1)
        one_of(call, "var_type", var_type, KINDS)
        one_of(call, "mode", mode, (None, *_MODES))
        if tf.as_dtype(key_type) not in (tf.int64, tf.int32) or tf.as_dtype(dtype) != tf.float32:
            expected = "the key_type tf.int64 or tf.int32 and the dtype tf.float32"
            raise TypeError(f"{call}: expected {expected}, got {key_type!r} and {dtype!r}")
        self.stored_name = checked_name(call, name)
        config = EmbeddingBagConfig(dimension, initializer=read_initializer(initializer))
        self.table = EmbeddingTable(name or "dynamic variable", config, seed=start.next_seed())
        nothing = np.zeros((0, dimension), np.float32)
        super().__init__(nothing, dtype="float32", trainable=trainable, autocast=False, name=name)

    @property
    def dimension(self) -> int:
        """D."""
        return self.table.config.dim

    @property
    def size(self) -> tf.Tensor:
        """The number of rows, and D."""
        return tf.constant([len(self.table), self.dimension], tf.int64)

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return len(self.table)

    @property
    def step(self) -> int:
        """The last step in which a row was updated; 0: none. It marks a moment for dumps."""
        return self.table.step

    def source(self) -> tf.Tensor:
        """See ``engine.InTable``."""
        return tf.convert_to_tensor(self.value)

    def own_rows(self, since: int = -1) -> Iterator[tuple[Ints, Floats]]:
        """Yield keys and vectors, part by part; see ``EmbeddingTable.dump``."""
        return ((rows.keys, rows.vectors) for rows in self.table.dump(since))

    def owns(self, keys: Ints) -> NDArray[np.bool_]:
        """Return which keys have their row in this process: all."""
        return np.ones(len(keys), np.bool_)

    def check_stored(self, path: Any, keys: Ints) -> None:
        """Accept all stored keys."""

    def set_rows(self, keys: Ints, vectors: Floats) -> None:
        """Add or replace rows. The optimizer's states of these rows begin again."""
        self.table.load(self.table.new_rows(keys, vectors))

    def __repr__(self) -> str:
        """Show the rows' number, not the missing elements."""
        return f"<DynamicVariable name={self.stored_name}, size=[{self.row_count}, {self.dimension}]>"

    @property
    def overwrite_with_gradient(self) -> NoReturn:
        """Every optimizer of Keras asks this first, so it is where all of them are refused."""
        raise TypeError(
            f"{self!r}: a Keras optimizer does not update its rows; expected sok.OptimizerWrapper(optimizer)"
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        """Refuse to save a model without the rows."""
        raise TypeError(f"{self!r}: its rows are not part of a saved model; save them with sok.dump")

    def numpy(self) -> NoReturn:
        """See ``__array__``."""
        self.__array__()

    def _serialize_to_tensors(self) -> NoReturn:
        """See ``__array__``."""
        self.__array__()


def _parts(keys: Ints, vectors: Floats) -> Iterator[tuple[Ints, Floats]]:
    for first in range(0, len(keys), PART_ROWS):
        some = slice(first, min(first + PART_ROWS, len(keys)))
        yield keys[some], vectors[some]
