"""``lookup_sparse`` against TensorFlow's own operations on random ragged batches, with gradients."""

import numpy as np
import pytest
import tensorflow as tf

from tests.tensorflow.batches import dense, plain_lookup, ragged_ids, weights_like
from training.tf.sok import experiment as sok

COMBINERS = ["sum", "mean", "sqrtn"]
SIZES = [(50, 3), (7, 8), (1000, 16)]


def both(seed, is_ragged, has_weights):
    """Vectors and gradients of ``lookup_sparse`` in three tables, eager and in a graph, and those of TensorFlow."""
    rng = np.random.default_rng(seed)
    tables = [rng.normal(size=size).astype(np.float32) for size in SIZES]
    variables = [sok.Variable(table) for table in tables]
    plain = [tf.Variable(table) for table in tables]
    ids = [ragged_ids(rng, rows, 4, size[0]) for rows, size in zip((20, 33, 1), SIZES, strict=True)]
    weights = [weights_like(rng, slot_ids) for slot_ids in ids] if has_weights else [None] * 3
    targets = [rng.normal(size=(one.nrows(), size[1])).astype(np.float32) for one, size in zip(ids, SIZES, strict=True)]
    floats = [weight.flat_values for weight in weights] if has_weights else []

    def given(tensors):
        return tensors if is_ragged else [None if tensor is None else tensor.to_sparse() for tensor in tensors]

    def of_sok():
        with tf.GradientTape() as tape:
            tape.watch(floats)
            of_ids = [one.with_values(values) for one, values in zip(ids, floats, strict=True)] if floats else weights
            vectors = sok.lookup_sparse(variables, given(ids), given(of_ids), combiners=COMBINERS)
            loss = sum(tf.reduce_sum(one * target) for one, target in zip(vectors, targets, strict=True))
        return vectors, *tape.gradient(loss, (variables, floats))

    def of_tensorflow():
        with tf.GradientTape() as tape:
            tape.watch(floats)
            of_ids = [one.with_values(values) for one, values in zip(ids, floats, strict=True)] if floats else weights
            vectors = [plain_lookup(*one) for one in zip(plain, ids, of_ids, COMBINERS, strict=True)]
            loss = sum(tf.reduce_sum(one * target) for one, target in zip(vectors, targets, strict=True))
        return vectors, *tape.gradient(loss, (plain, floats))

    return of_sok(), tf.function(of_sok)(), of_tensorflow()


@pytest.mark.parametrize("has_weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["sparse", "ragged"])
@pytest.mark.parametrize("seed", range(3))
def test_vectors_and_gradients_are_those_of_tensorflow(started, seed, is_ragged, has_weights):
    eager, graph, plain = both(seed, is_ragged, has_weights)

    for number, (rows, _) in enumerate(SIZES):
        np.testing.assert_allclose(eager[0][number], plain[0][number], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(eager[0][number], graph[0][number])
        one, other = (answer[1][number] for answer in (eager, graph))
        np.testing.assert_array_equal(one.indices, other.indices)
        np.testing.assert_array_equal(one.values, other.values)
        assert len(np.unique(one.indices)) == len(one.indices)
        np.testing.assert_allclose(dense(one, rows), dense(plain[1][number], rows), rtol=1e-5, atol=1e-5)
        if has_weights:
            np.testing.assert_allclose(eager[2][number], plain[2][number], rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(eager[2][number], graph[2][number])


def test_a_row_without_ids_is_zero(started):
    ids = tf.RaggedTensor.from_row_lengths([1, 2], [0, 2, 0])
    variable = sok.Variable(np.ones((3, 2)))

    np.testing.assert_array_equal(sok.lookup_sparse(variable, ids, combiners="sum"), [[0, 0], [2, 2], [0, 0]])


def test_indices_may_come_in_any_order(started):
    ids = tf.SparseTensor([[1, 0], [0, 1], [0, 0]], [2, 1, 0], [2, 2])
    weights = tf.SparseTensor([[1, 0], [0, 1], [0, 0]], [1.0, 10.0, 100.0], [2, 2])
    variable = sok.Variable([[1.0], [2.0], [3.0]])

    with tf.GradientTape() as tape:
        tape.watch(weights.values)
        vectors = sok.lookup_sparse(variable, ids, weights, combiners="sum")

    np.testing.assert_array_equal(vectors, [[120], [3]])
    np.testing.assert_array_equal(tape.gradient(vectors, weights.values), [3, 2, 1])


def test_one_trace_takes_batches_of_every_size(started):
    variable = sok.Variable(np.eye(4))
    look_up = tf.function(
        lambda ids: sok.lookup_sparse(variable, ids, combiners="sum"),
        input_signature=[tf.RaggedTensorSpec([None, None], tf.int32)],
    )

    for rows in ([[0], [1, 2]], [[3]], [[], [], [1]]):
        ids = tf.ragged.constant(rows, tf.int32)
        expected = [sum((np.eye(4)[one] for one in row), np.zeros(4)) for row in rows]
        np.testing.assert_array_equal(look_up(ids), expected)


ONE = tf.SparseTensor([[0, 0], [1, 0]], [1, 2], [2, 1])


@pytest.mark.parametrize(
    ("ids", "named", "error", "expected"),
    [
        pytest.param(
            tf.SparseTensor([[0, 0]], [5], [1, 1]),
            {},
            IndexError,
            r"sp_ids: expected ids from 0 to 2, got 5 in row 0",
            id="an id beyond the table",
        ),
        pytest.param(
            tf.ragged.constant([[], [0, -1]]), {}, IndexError, r"from 0 to 2, got -1 in row 1", id="a negative id"
        ),
        pytest.param(
            tf.SparseTensor([[0, 0]], [1.0], [1, 1]),
            {},
            TypeError,
            r"sp_ids: expected ids of int64 or int32, got float32\[1\]",
            id="ids that are floats",
        ),
        pytest.param(
            tf.constant([[1]]), {}, TypeError, r"a tf.SparseTensor or a tf.RaggedTensor, got int32\[1, 1\]", id="dense"
        ),
        pytest.param(
            tf.SparseTensor([[3, 0]], [1], [2, 1]),
            {},
            ValueError,
            r"rows from 0 to 1, .* got row 3",
            id="a row outside",
        ),
        pytest.param(ONE, {"hotness": 0}, ValueError, r"hotness of at least 1, got 0", id="no hotness"),
        pytest.param(
            tf.ragged.constant([[0, 1], [1]]),
            {"hotness": 1},
            ValueError,
            r"sp_ids: expected at most hotness = 1 ids in a row, got 2 in row 0",
            id="too many ids",
        ),
        pytest.param(ONE, {"combiners": "max"}, ValueError, r"combiner as one of .*, got 'max'", id="combiner"),
        pytest.param(
            ONE, {"sp_weights": tf.constant([1.0])}, ValueError, r"a weight for each of 2 ids, got 1", id="few weights"
        ),
        pytest.param(
            ONE, {"sp_weights": tf.constant([1, 2])}, TypeError, r"SparseTensor or float\[N\], got int32", id="ints"
        ),
        pytest.param(
            ONE,
            {"sp_weights": tf.SparseTensor([[0, 0], [0, 1]], [1.0, 2.0], [2, 2])},
            ValueError,
            r"weights at the positions of the ids",
            id="weights of other ids",
        ),
    ],
)
def test_wrong_ids_and_weights_are_refused(started, ids, named, error, expected):
    variable = sok.Variable(np.ones((3, 2)))

    with pytest.raises(error, match=expected):
        sok.lookup_sparse(variable, ids, **named)
    if error is IndexError:
        with pytest.raises(tf.errors.OpError, match=expected):
            tf.function(lambda: sok.lookup_sparse(variable, ids))()


@pytest.mark.parametrize(
    ("make", "error", "expected"),
    [
        (lambda: sok.Variable(np.ones((2, 2)), dtype=tf.float64), TypeError, "expected the dtype tf.float32"),
        (lambda: sok.Variable([["a"]]), TypeError, "a table of numbers"),
        (lambda: sok.Variable([1.0, 2.0]), ValueError, r"a table \[V, D\]"),
        (lambda: sok.Variable([[1.0], [2.0, 3.0]]), ValueError, r"a table \[V, D\]"),
        (lambda: sok.Variable([[1.0]], mode="localized:1"), ValueError, "mode as one of"),
        (lambda: sok.Variable([[1.0]], name="a/b"), ValueError, "a name of letters"),
        (lambda: sok.DynamicVariable(0), ValueError, "dimension of at least 1"),
        (lambda: sok.DynamicVariable(4, "twos"), ValueError, "the initializer 'random'"),
        (lambda: sok.DynamicVariable(4, var_type="ssd"), ValueError, "var_type as one of"),
        (lambda: sok.DynamicVariable(4, key_type=tf.string), TypeError, "the key_type tf.int64 or tf.int32"),
        (lambda: sok.lookup_sparse([], []), ValueError, "at least one variable"),
        (lambda: sok.lookup_sparse(tf.Variable([[1.0]]), ONE), TypeError, "sok.Variable or sok.DynamicVariable"),
        (lambda: sok.lookup_sparse([sok.Variable([[1.0]])], [ONE, ONE]), ValueError, "sp_ids as a list of 1"),
    ],
)
def test_wrong_variables_are_refused(started, make, error, expected):
    with pytest.raises(error, match=expected):
        make()


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["Variable", "DynamicVariable"])
def test_a_gradient_of_a_gradient_and_forward_mode_are_refused(started, is_dynamic, in_graph):
    variable = sok.DynamicVariable(2, initializer="ones") if is_dynamic else sok.Variable(np.ones((4, 2)))
    scale, ids = tf.Variable([1.0, 2.0]), tf.ragged.constant([[1]], dtype=tf.int64)

    def loss():
        return tf.reduce_sum(sok.lookup_sparse(variable, ids, combiners="sum") ** 2 * scale)

    def penalty():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                vectors = loss()
            norm = tf.reduce_sum(inner.gradient(vectors, variable.value).values ** 2)
        return outer.gradient(norm, scale)

    def forward():
        with tf.autodiff.ForwardAccumulator(variable.value, tf.ones_like(variable.value)) as accumulator:
            vectors = loss()
        return accumulator.jvp(vectors)

    def twice():
        with tf.GradientTape(persistent=True) as tape:
            vectors = loss()
            of_rows = tape.gradient(vectors, variable.value).values
        return of_rows, tape.gradient(vectors, scale)

    run = tf.function if in_graph else (lambda function: function)
    for derive in (penalty, forward):
        with pytest.raises(Exception, match="lookup_sparse: sp_ids: expected gradients of the first order by back"):
            run(derive)()
    np.testing.assert_array_equal(np.concatenate([*run(twice)()[0], run(twice)()[1]]), [2, 4, 1, 1])
