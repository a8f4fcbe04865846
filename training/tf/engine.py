"""The one layer between TensorFlow and the tables: look up bags, pass back their gradients, and move rows.

In eager mode, the native code reads the tensors' memory. In a graph, the same functions run in ``tf.numpy_function``,
so both give the same bits. A ``tf.function`` runs these operations in the order of the program.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kernels.host import (
    ArrayRows,
    BagLookup,
    TrainingTable,
    look_up_bags,
    sum_row_gradients,
    update_tables,
    weight_gradients,
)
from training.calls.ids import Floats, IdRows
from training.tables.rules import UpdateRule
from training.tables.table import EmbeddingTable

Array = NDArray[Any]


class Bags(NamedTuple):
    """Rows of ids that were found.

    Attributes:
        native: the table, or the rows in an array.
        rows: the ids; keys of a table, or places in the array.
        combiner: how the vectors of a row of ids become one vector.
        weights: float32[N], or None.
    """

    native: TrainingTable | ArrayRows
    rows: IdRows
    combiner: str
    weights: Floats | None


class Rows(Protocol):
    """A variable that lookups read."""

    @property
    def dimension(self) -> int:
        """D."""

    @property
    def trainable(self) -> bool:
        """Whether new ids may get rows."""

    @property
    def gradient_shape(self) -> Any:
        """The shape of the gradient, int64[2]; None: it is unknown."""

    def source(self) -> tf.Tensor:
        """Return the tensor that ``find`` gets as an array, and that gets the gradient."""

    def find(self, array: Floats, place: str, ids: IdRows, weights: Floats | None, combiner: str, trains: bool) -> Bags:
        """Find the rows of ids. Where ``trains``, new ids may get rows."""


class Ids(NamedTuple):
    """Rows of ids in tensors.

    Attributes:
        place: names them in messages.
        tensors: their tensors.
        read: makes the rows from the tensors' arrays, or raises an error.
        weights: float32[N] of the ids, or None.
    """

    place: str
    tensors: Sequence[tf.Tensor]
    read: Callable[..., IdRows]
    weights: tf.Tensor | None = None


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def pool(variables: Sequence[Rows], ids: Sequence[Ids], combiners: Sequence[str], trains: bool) -> list[tf.Tensor]:
    """Look up the ids of each variable, and combine the vectors of each row of ids, in one native call.

    The gradient of a variable is an ``IndexedSlices`` with one entry for each distinct row.

    Args:
        variables: have the rows.
        ids: of each variable.
        combiners: "sum", "mean" or "sqrtn" for each variable.
        trains: new ids may get rows. Otherwise their vector is zero.

    Returns:
        float32[R, D] for each variable.
    """
    count = len(variables)
    makes_rows = [trains and variable.trainable for variable in variables]
    weights = [one.weights for one in ids if one.weights is not None]

    def found(arrays: Iterator[Array], trains: Sequence[bool]) -> list[Bags]:
        rows = [next(arrays) for _ in range(count)]
        of_ids = [None if one.weights is None else next(arrays) for one in ids]
        bags = []
        for variable, array, one, of_one, *how in zip(variables, rows, ids, of_ids, combiners, trains, strict=True):
            read = one.read(*(next(arrays) for _ in one.tensors))
            if of_one is not None and len(of_one) != len(read.ids):
                expected = f"a weight for each of {len(read.ids)} ids"
                raise ValueError(f"{one.place}: expected {expected}, got {len(of_one)} weights")
            ordered = None if of_one is None else read.in_order(of_one)
            bags.append(variable.find(array, one.place, read, ordered, *how))
        return bags

    def forward(*arrays: Array) -> list[Floats]:
        return [vectors for _, vectors in _look_up(found(iter(arrays), makes_rows), makes_rows)]

    def backward(*arrays: Array) -> list[Array]:
        upstream = [np.ascontiguousarray(one, np.float32) for one in arrays[:count]]
        bags = found(iter(arrays[count + 1 :]), [False] * count)
        lookups = [lookup for lookup, _ in _look_up(bags, [False] * count)]
        of_rows = [array for pair in sum_row_gradients(lookups, upstream) for array in pair]
        weighted = [place for place, one in enumerate(ids) if one.weights is not None]
        of_weights = weight_gradients([lookups[one] for one in weighted], [upstream[one] for one in weighted])
        return of_rows + [bags[one].rows.as_given(array) for one, array in zip(weighted, of_weights, strict=True)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def pooled(*tensors: tf.Tensor) -> Any:
        vectors = run(forward, tensors, [tf.float32] * count)
        for variable, one in zip(variables, vectors, strict=True):
            one.set_shape([None, variable.dimension])

        def gradients(*upstream: Any) -> list[Any]:
            dense = [tf.convert_to_tensor(one) for one in upstream]
            dtypes = [tf.int64, tf.float32] * count + [tf.float32] * len(weights)
            # a backward pass begins after the forward pass has made rows, so it takes one of its vectors
            answers = iter(run(backward, [*dense, vectors[0], *tensors], dtypes))
            slices = []
            for variable in variables:
                rows, values = next(answers), next(answers)
                rows.set_shape([None])
                values.set_shape([None, variable.dimension])
                slices.append(tf.IndexedSlices(values, rows, variable.gradient_shape))
            return [*slices, *answers, *[None] * (len(tensors) - count - len(weights))]

        return vectors, gradients

    tensors = [tensor for one in ids for tensor in one.tensors]
    return list(pooled(*(one.source() for one in variables), *weights, *tensors))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def move_rows(
    tables: Sequence[EmbeddingTable], gradients: Sequence[tf.IndexedSlices], rule: UpdateRule, learning_rate: Any
) -> Any:
    """Move the rows of tables by their gradients, in one native call. Rows without a gradient do not move.

    Args:
        tables: of the rows. They must have the rule's states.
        gradients: the gradient of each table.
        rule: the formula.
        learning_rate: of this step, a number or a tensor.

    Returns:
        a tensor or an operation of which the step is done when it has run.
    """

    def step(rate: Array, *arrays: Array) -> list[Array]:
        keys, floats = arrays[::2], [np.ascontiguousarray(one, np.float32) for one in arrays[1::2]]
        count = len(tables)
        ones = look_up_bags(
            [table.native for table in tables],
            [np.ascontiguousarray(one, np.int64) for one in keys],
            [None] * count,
            ["sum"] * count,
            [None] * count,
            [1] * count,
            [False] * count,
        )
        steps = [table.step + 1 for table in tables]
        for number in sorted(set(steps)):
            some = [place for place, one in enumerate(steps) if one == number]
            lookups = [ones[place][0] for place in some]
            update_tables(
                lookups, [floats[place] for place in some], rule.name, "Local", float(rate), number, rule.parameters
            )
        return [np.zeros((), np.int64)]

    pairs = [tensor for one in gradients for tensor in (one.indices, one.values)]
    [done] = run(step, [tf.cast(learning_rate, tf.float64), *pairs], [tf.int64])
    return done


def run(function: Callable[..., list[Array]], tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[Any]:
    """Call a function of arrays with the values of tensors, now or when the graph runs."""
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(one) for one in function(*(np.asarray(tensor) for tensor in tensors))]
    return list(tf.numpy_function(function, list(tensors), list(dtypes)))


def _look_up(bags: Sequence[Bags], trains: Sequence[bool]) -> list[tuple[BagLookup, Floats]]:
    return look_up_bags(
        [one.native for one in bags],
        [one.rows.ids for one in bags],
        [one.rows.row_ptrs for one in bags],
        [one.combiner for one in bags],
        [one.weights for one in bags],
        [1] * len(bags),
        [does and isinstance(one.native, TrainingTable) for one, does in zip(bags, trains, strict=True)],
    )
