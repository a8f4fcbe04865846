"""``sok.lookup_sparse``: look up several variables in one native pass, and pass back their gradients in another."""

from typing import Any, get_args

from training.arguments import one_of
from training.calls.ids import IdRows
from training.calls.sok import listed, require_hotness
from training.tables.config import Combiner
from training.tf.engine import Ids, pool
from training.tf.ids import read_ids
from training.tf.sok.initialize import started
from training.tf.sok.variables import DynamicVariable, Variable


def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    hotness: Any = None,
    combiners: Any = None,
    training: bool = True,
) -> Any:
    """Look up rows of ids in several variables, and combine the vectors of each row into one vector.

    Args:
        params: a list of variables. Or one variable; then every argument is one item instead of a list.
        sp_ids: for each variable, rows of ids: a ``tf.SparseTensor`` or a ``tf.RaggedTensor``.
        sp_weights: for each variable, the weights of the ids, in the same form or float[N]. None: there are none.
        hotness: for each variable, the most ids of a row. More are an error. None: any number.
        combiners: for each variable, "sum", "mean" or "sqrtn". With weights the sum is weighted. "mean" then divides by
            the sum of the weights, and "sqrtn" by the root of the sum of their squares. None: "mean".
        training: a trainable ``DynamicVariable`` makes rows for new ids. Otherwise their vector is zero.

    Returns:
        for each variable float32[R, D]. A row without ids is zero.

    Raises:
        SessionError: ``init`` was not called.
        TypeError: an argument is of another type.
        ValueError: lists have different lengths, an argument is out of range or of another shape, or a row has too many
            ids.
        IndexError: an id is beyond a ``Variable``. In a graph, TensorFlow makes errors of its own from such errors.
        ReservedKeyError: an id is one of the two largest or the two smallest int64.
    """
    started("lookup_sparse")
    is_list = isinstance(params, list | tuple)
    variables = list(params) if is_list else [params]
    if not variables:
        raise ValueError("lookup_sparse: expected at least one variable, got none")
    for variable in variables:
        if not isinstance(variable, Variable | DynamicVariable):
            expected = "sok.Variable or sok.DynamicVariable"
            raise TypeError(f"lookup_sparse: expected {expected}, got {type(variable).__name__}")
    count = len(variables)
    ids, weights = listed("sp_ids", sp_ids, count, is_list), listed("sp_weights", sp_weights, count, is_list)
    most, how = listed("hotness", hotness, count, is_list), listed("combiners", combiners, count, is_list)
    for combiner in how:
        one_of("lookup_sparse", "combiner", combiner, (None, *get_args(Combiner)))
    rows = []
    for number in range(count):
        place = f"lookup_sparse: sp_ids[{number}]" if is_list else "lookup_sparse: sp_ids"
        rows.append(_with_hotness(read_ids(place, ids[number], weights[number]), most[number]))
    vectors = pool(variables, rows, [combiner or "mean" for combiner in how], training)
    return vectors if is_list else vectors[0]


def _with_hotness(ids: Ids, most: Any) -> Ids:
    def check(rows: IdRows) -> IdRows:
        require_hotness(ids.place, rows.row_ptrs, "hotness", most)
        return rows

    return ids if most is None else ids.then(check)
