"""The one layer between TensorFlow and the tables: look up bags, pass back their gradients, and update rows.

In eager mode, the native code reads the tensors' memory. In a graph, the same functions run in ``tf.numpy_function``,
so both give the same bits. A ``tf.function`` runs these operations in the order of the program.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from kernels.host import (
    ArrayRows,
    array_gradients,
    keys_by_owner,
    look_up_bags,
    sum_row_gradients,
    update_tables,
    weight_gradients,
)
from training.calls.ids import Floats, IdRows, Ints
from training.tables.rules import UpdateRule
from training.tables.table import EmbeddingTable

Array = NDArray[Any]


class InTable(Protocol):
    """A variable whose rows are in a table.

    Attributes:
        table: the rows.
        trainable: whether new ids may get rows.
    """

    table: EmbeddingTable

    @property
    def trainable(self) -> bool:
        """See the class."""

    def source(self) -> tf.Tensor:
        """Return a tensor [0, D], whose gradient is an ``IndexedSlices`` with the sums of the rows by key."""


class InArray(Protocol):
    """A variable whose rows are in TensorFlow's memory.

    Attributes:
        params: the rows, a tensor or a variable [V, D]. ``tf.gather`` reads the rows that a lookup needs.
        max_norm: rows with a larger L2 norm are scaled to it; None: none are.
        has_all_rows: no id is without a row.
    """

    params: Any
    max_norm: float | None
    has_all_rows: bool

    def locate(self, place: str, ids: IdRows, trains: bool) -> Ints:
        """Return the row of each id; -1: it has none, and its vector is zero. Where ``trains``, new ids get rows."""


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

    def then(self, function: Callable[[IdRows], IdRows]) -> "Ids":
        """Return these rows after a function, which checks or changes them."""
        return self._replace(read=lambda *arrays: function(self.read(*arrays)))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def pool(
    variables: Sequence[InTable | InArray], ids: Sequence[Ids], combiners: Sequence[str], trains: bool
) -> list[tf.Tensor]:
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
    sources, ids = _gathered(variables, ids, trains)
    tables: list[EmbeddingTable | None] = [getattr(variable, "table", None) for variable in variables]
    norms: list[float | None] = [getattr(variable, "max_norm", None) for variable in variables]
    makes_rows = [
        trains and getattr(variable, "trainable", False) and hasattr(variable, "table") for variable in variables
    ]
    dims = [int(source.shape[1]) for source in sources]
    weights = [slot_ids.weights for slot_ids in ids if slot_ids.weights is not None]
    place = ", ".join(dict.fromkeys(slot_ids.place for slot_ids in ids))

    def look_up(arrays: Iterator[Array], makes_rows: Sequence[bool]) -> tuple[list[IdRows], Any]:
        of_sources = [next(arrays) for _ in range(count)]
        of_ids = [None if slot_ids.weights is None else next(arrays) for slot_ids in ids]
        rows = [slot_ids.read(*(next(arrays) for _ in slot_ids.tensors)) for slot_ids in ids]
        natives = [
            ArrayRows(array, one.place, norm) if table is None else table.native
            for array, one, norm, table in zip(of_sources, ids, norms, tables, strict=True)
        ]
        ordered = [
            None if floats is None else _in_order(one.place, floats, of_one)
            for one, floats, of_one in zip(ids, of_ids, rows, strict=True)
        ]
        keys, ptrs = [row.ids for row in rows], [row.row_ptrs for row in rows]
        return rows, look_up_bags(natives, keys, ptrs, combiners, ordered, [1] * count, makes_rows)

    def forward(*arrays: Array) -> list[Floats]:
        return [vectors for _, vectors in look_up(iter(arrays), makes_rows)[1]]

    def backward(*arrays: Array) -> list[Array]:
        upstream = [np.ascontiguousarray(array, np.float32) for array in arrays[:count]]
        rows, answers = look_up(iter(arrays[count + 1 :]), [False] * count)
        lookups = [lookup for lookup, _ in answers]
        in_arrays = [place for place, table in enumerate(tables) if table is None]
        in_tables = [place for place, table in enumerate(tables) if table is not None]
        weighted = [place for place, one in enumerate(ids) if one.weights is not None]

        def some(places: list[int]) -> Any:
            return [lookups[place] for place in places], [upstream[place] for place in places]

        of_tables = [array for pair in sum_row_gradients(*some(in_tables)) for array in pair]
        of_weights = zip(weighted, weight_gradients(*some(weighted)), strict=True)
        return [
            *array_gradients(*some(in_arrays)),
            *of_tables,
            *(rows[one].as_given(floats) for one, floats in of_weights),
        ]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def pooled(*tensors: tf.Tensor) -> Any:
        vectors = run(forward, tensors, [tf.float32] * count)
        for dim, one in zip(dims, vectors, strict=True):
            one.set_shape([None, dim])

        def gradients(*upstream: Any) -> list[Any]:
            dense = [tf.convert_to_tensor(gradient) for gradient in upstream]
            in_arrays = tables.count(None)
            dtypes = [tf.float32] * in_arrays + [tf.int64, tf.float32] * (count - in_arrays)
            # a backward pass begins after the forward pass has made rows, so it takes one of its vectors
            answers = run_backward(
                place, backward, [*dense, vectors[0], *tensors], dtypes + [tf.float32] * len(weights)
            )
            of_arrays, of_tables = iter(answers[:in_arrays]), iter(answers[in_arrays:])
            of_sources = [
                next(of_arrays) if table is None else _slices(next(of_tables), next(of_tables), dim)
                for table, dim in zip(tables, dims, strict=True)
            ]
            return [*of_sources, *of_tables, *[None] * (len(tensors) - count - len(weights))]

        return vectors, gradients

    return list(pooled(*sources, *weights, *(tensor for slot_ids in ids for tensor in slot_ids.tensors)))


def _gathered(variables: Sequence[Any], ids: Sequence[Ids], trains: bool) -> tuple[list[tf.Tensor], list[Ids]]:
    """Return the tensor that each lookup reads, and the ids as the rows of this tensor, or as the keys of a table.

    Of a variable in TensorFlow's memory, the tensor has the distinct rows of the lookup. If ids may be without a row,
    it also has a row of zeros.
    """
    in_arrays = [(one, of_one) for one, of_one in zip(variables, ids, strict=True) if not hasattr(one, "table")]

    def locate(*arrays: Array) -> list[Array]:
        given, found = iter(arrays), []
        for variable, one in in_arrays:
            rows = one.read(*(next(given) for _ in one.tensors))
            numbers = variable.locate(one.place, rows, trains)
            is_known = numbers >= 0
            distinct, _, places, _ = keys_by_owner(numbers[is_known], 1)
            own = np.full(len(numbers), len(distinct))
            own[is_known] = places
            found += [distinct, own, rows.row_ptrs, np.arange(len(own)) if rows.places is None else rows.places]
        return found

    tensors = [tensor for _, one in in_arrays for tensor in one.tensors]
    answers = run(locate, tensors, [tf.int64] * 4 * len(in_arrays)) if in_arrays else []
    for answer in answers:
        answer.set_shape([None])
    located = iter(answers)
    sources, own_ids = [], []
    for variable, one in zip(variables, ids, strict=True):
        if hasattr(variable, "table"):
            sources.append(_only_backward(one.place, variable.source()))
            own_ids.append(one)
            continue
        rows = tf.gather(variable.params, next(located))
        sources.append(rows if trains or variable.has_all_rows else tf.pad(rows, [[0, 1], [0, 0]]))
        own_ids.append(Ids(one.place, [next(located) for _ in range(3)], IdRows, one.weights))
    return sources, own_ids


def _in_order(place: str, weights: Floats, rows: IdRows) -> Floats:
    if len(weights) != len(rows.ids):
        raise ValueError(f"{place}: expected a weight for each of {len(rows.ids)} ids, got {len(weights)} weights")
    return rows.in_order(weights)


def _slices(keys: tf.Tensor, sums: tf.Tensor, dim: int) -> tf.IndexedSlices:
    keys.set_shape([None])
    sums.set_shape([None, dim])
    return tf.IndexedSlices(sums, keys)


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
        keys, floats = arrays[::2], [np.ascontiguousarray(array, np.float32) for array in arrays[1::2]]
        count = len(tables)
        ones = look_up_bags(
            [table.native for table in tables],
            [np.ascontiguousarray(key, np.int64) for key in keys],
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

    pairs = [tensor for gradient in gradients for tensor in (gradient.indices, gradient.values)]
    [done] = run(step, [tf.cast(learning_rate, tf.float64), *pairs], [tf.int64])
    return done


def run(function: Callable[..., list[Array]], tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]) -> list[Any]:
    """Call a function of arrays with the values of tensors, now or when the graph runs."""
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(one) for one in function(*(np.asarray(tensor) for tensor in tensors))]
    return list(tf.numpy_function(function, list(tensors), list(dtypes)))


def run_backward(
    place: str, function: Callable[..., list[Array]], tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[Any]:
    """Call a backward pass as ``run`` does. The gradient of what it returns raises LookupError, with ``place``."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def first_order(*tensors: tf.Tensor) -> Any:
        return run(function, tensors, dtypes), lambda *_: _refuse_order(place)

    return list(first_order(*tensors))


def _only_backward(place: str, source: tf.Tensor) -> tf.Tensor:
    """Return the source of a table for backpropagation, which gives it slices. Other gradients raise LookupError."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def same(tensor: tf.Tensor) -> Any:
        def gradient(upstream: Any) -> Any:
            return upstream if isinstance(upstream, tf.IndexedSlices) else _refuse_order(place)

        return tf.identity(tensor), gradient

    return same(source)


def _refuse_order(place: str) -> NoReturn:
    expected = "expected gradients of the first order by backpropagation"
    raise LookupError(f"{place}: {expected}, got a gradient of a gradient or a tf.autodiff.ForwardAccumulator")
