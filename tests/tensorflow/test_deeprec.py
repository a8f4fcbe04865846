"""DeepRec's document in a session, and its fused lookups against TensorFlow's own operations."""

from itertools import pairwise

import numpy as np
import pytest
import tensorflow

from serving.errors import OutputError
from serving.model.sparse_file import open_sparse
from tests.tensorflow.batches import dense, ragged_ids, weights_like
from training.tf import deeprec
from training.tf.deeprec import v1 as tf  # in place of `import tensorflow as tf`

LOSSES = [30.0, 19.38839, 17.28021]  # those of TensorFlow's FTRL on one vector of ones for each id


def run(emb):
    """The rest of both examples, as it is."""
    fun = tf.multiply(emb, 2.0, name="multiply")
    loss = tf.reduce_sum(fun, name="reduce_sum")
    opt = tf.train.FtrlOptimizer(0.1, l1_regularization_strength=2.0, l2_regularization_strength=0.00001)
    g_v = opt.compute_gradients(loss)
    train_op = opt.apply_gradients(g_v)
    init = tf.global_variables_initializer()

    with tf.Session() as sess:
        sess.run(init)
        return [sess.run([emb, train_op, loss]) for _ in range(3)]


def check(steps):
    np.testing.assert_array_equal(steps[0][0], np.ones((5, 3)))
    np.testing.assert_allclose([loss for *_, loss in steps], LOSSES, rtol=1e-6)


def test_the_first_example_runs_in_a_session():
    with tf.Graph().as_default():
        column = tf.feature_column.categorical_column_with_embedding("col_emb", dtype=tf.dtypes.int64)
        W = tf.feature_column.embedding_column(  # noqa: N806
            categorical_column=column,
            dimension=3,
            initializer=tf.ones_initializer(tf.dtypes.float32),
            do_fusion="v2",
        )

        ids = {}
        ids["col_emb"] = tf.SparseTensor(
            indices=[[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]],
            values=tf.cast([1, 2, 3, 4, 5], tf.dtypes.int64),
            dense_shape=[5, 4],
        )

        emb = tf.feature_column.input_layer(ids, [W])
        check(run(emb))


def test_the_second_example_runs_in_a_session():
    feature_column_ops = feature_column = tf.feature_column  # instead of tensorflow.contrib
    with tf.Graph().as_default():
        columns = feature_column.sparse_column_with_embedding(column_name="col_emb", dtype=tf.dtypes.int64)
        W = feature_column.embedding_column(  # noqa: N806
            sparse_id_column=columns,
            dimension=3,
            initializer=tf.ones_initializer(tf.dtypes.float32),
            do_fusion="v2",
        )
        ids = {}
        ids["col_emb"] = tf.SparseTensor(
            indices=[[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]],
            values=tf.cast([1, 2, 3, 4, 5], tf.dtypes.int64),
            dense_shape=[5, 4],
        )
        emb = feature_column_ops.input_from_feature_columns(columns_to_tensors=ids, feature_columns=[W])
        check(run(emb))


@pytest.mark.parametrize("apply", [lambda step: step, tensorflow.function], ids=["eager", "tf.function"])
def test_columns_train_without_a_session(apply):
    column = deeprec.embedding_column(
        deeprec.categorical_column_with_embedding("col_emb"), 3, initializer=tf.ones_initializer()
    )
    weight = tensorflow.Variable(2.0)
    optimizer = deeprec.FtrlOptimizer(0.1, l1_regularization_strength=2.0, l2_regularization_strength=0.00001)
    ids = tensorflow.RaggedTensor.from_row_lengths(tensorflow.constant([1, 2, 3, 4, 5], tf.int64), [1] * 5)

    @apply
    def step():
        with tensorflow.GradientTape() as tape:
            loss = tf.reduce_sum(tf.multiply(deeprec.input_layer({"col_emb": ids}, [column]), 2.0))
        optimizer.apply_gradients([(tape.gradient(loss, column.variable), column.variable), (None, weight)])
        return loss

    np.testing.assert_allclose([float(step()) for _ in range(3)], LOSSES, rtol=1e-6)


def test_columns_are_joined_by_name_and_evaluation_makes_no_rows(tmp_path):
    columns = [
        deeprec.embedding_column(deeprec.categorical_column_with_embedding(name), 2, "sum", initializer=value)
        for name, value in (("b", tf.ones_initializer()), ("a", tf.constant_initializer(3.0)))
    ]
    ids = tensorflow.ragged.constant([[1, -1], []], tf.int64)
    features = {"a": ids, "b": ids.to_sparse()}

    evaluated = deeprec.input_layer(features, columns, trainable=False)
    trained = deeprec.input_layer(features, columns)
    deeprec.write_tables(columns, tmp_path / "tables")

    np.testing.assert_array_equal(evaluated, np.zeros((2, 4)))
    np.testing.assert_array_equal(trained, [[3, 3, 1, 1], [0, 0, 0, 0]])
    model = open_sparse(tmp_path / "tables" / "a_embedding", 2)
    np.testing.assert_array_equal(next(iter(model.batches(10)))[1], [[3, 3]])
    with pytest.raises(OutputError, match="two called 'a_embedding'"):
        deeprec.write_tables([columns[1], columns[1]], tmp_path / "tables")


def plain(table, ids, weights, combiner, default_id, prune, max_norm):
    """The same lookup, one row after the other. A weight of None is 1."""
    vectors = []
    for row, of_row in zip(ids.to_list(), weights, strict=True):
        pairs = list(zip(row, of_row, strict=True))
        if prune:
            pairs = [(key, weight) for key, weight in pairs if key >= 0 and (combiner == "sum" or weight > 0)]
        if not pairs and default_id is not None:
            pairs = [(default_id, 1.0)]
        rows = tensorflow.gather(table, [key for key, _ in pairs]) if pairs else tensorflow.zeros((1, table.shape[1]))
        if max_norm is not None:
            rows = tensorflow.clip_by_norm(rows, max_norm, axes=[1])
        floats = tensorflow.stack([weight for _, weight in pairs]) if pairs else tensorflow.ones(1)
        floats = tensorflow.cast(floats, tf.float32)
        total = tensorflow.reduce_sum(rows * floats[:, None], axis=0)
        divisors = {"sum": 1.0, "mean": tf.reduce_sum(floats), "sqrtn": tf.sqrt(tf.reduce_sum(floats**2))}
        vectors.append(total / divisors[combiner])
    return tensorflow.stack(vectors)


@pytest.mark.parametrize("strategy", [None, "div", "mod"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("has_weights", [False, True], ids=["no weights", "weights"])
def test_fused_lookups_are_those_of_plain_operations(strategy, combiner, has_weights):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(11, 3)).astype(np.float32)
    parts = {None: [rows], "div": [rows[:4], rows[4:8], rows[8:]], "mod": [rows[0::3], rows[1::3], rows[2::3]]}[
        strategy
    ]
    params, whole = [tensorflow.Variable(part) for part in parts], tensorflow.Variable(rows)
    ids = ragged_ids(rng, 9, 3, 11) - 1
    floats = weights_like(rng, ids) if has_weights else None
    target = rng.normal(size=(9, 3)).astype(np.float32)
    max_norm = 1.5 if strategy is None else None

    def ours():
        with tensorflow.GradientTape() as tape:
            given = None if floats is None else floats.flat_values
            tape.watch([] if given is None else [given])
            vectors = deeprec.fused_embedding_lookup_sparse_v2(
                params, ids, given, strategy, combiner=combiner, max_norm=max_norm, default_id=2, prune=True
            )
            loss = tf.reduce_sum(vectors * target)
        return vectors, *tape.gradient(loss, (params, [] if given is None else [given]))

    with tensorflow.GradientTape() as tape:
        given = tensorflow.ones(len(ids.flat_values)) if floats is None else floats.flat_values
        tape.watch(given)
        starts = ids.row_splits.numpy()
        of_rows = [[given[place] for place in range(*one)] for one in pairwise(starts)]
        expected = plain(whole, ids, of_rows, combiner, 2, True, max_norm)
        loss = tf.reduce_sum(expected * target)
    of_whole, of_weights = tape.gradient(loss, (whole, given))

    vectors, of_params, of_given = ours()
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-5)
    came = [dense(one, len(part)) for one, part in zip(of_params, parts, strict=True)]
    joined = np.zeros_like(rows)
    for number, one in enumerate(came):
        joined[number :: 3 if strategy == "mod" else 1][: len(one)] = one if strategy == "mod" else 0
    if strategy != "mod":
        joined = np.concatenate(came)
    np.testing.assert_allclose(joined, dense(of_whole, 11), rtol=1e-4, atol=1e-4)
    if has_weights:
        one, other = map(tensorflow.convert_to_tensor, (of_given[0], of_weights))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    graph = tensorflow.function(ours)()
    np.testing.assert_array_equal(graph[0], vectors)


ONE = tensorflow.SparseTensor([[0, 0]], np.array([1]), [2, 1])


def test_rows_without_ids_are_filled_or_zero():
    table = tensorflow.constant([[5.0], [6.0]])

    np.testing.assert_array_equal(deeprec.fused_embedding_lookup_sparse(table, ONE), [[6], [5]])
    np.testing.assert_array_equal(deeprec.fused_embedding_lookup_sparse(table, ONE, fill_empty_row=False), [[6], [0]])
    np.testing.assert_array_equal(deeprec.fused_safe_embedding_lookup_sparse(table, ONE), [[6], [0]])
    np.testing.assert_array_equal(deeprec.fused_safe_embedding_lookup_sparse(table, ONE, default_id=1), [[6], [6]])


TABLE = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        (lambda: deeprec.fused_embedding_lookup_sparse(TABLE, ONE, [1.0]), ValueError, "version v1 has no weights"),
        (lambda: deeprec.fused_embedding_lookup_sparse(TABLE, ONE, blocknums=[1]), ValueError, "no blocknums"),
        (lambda: deeprec.fused_embedding_lookup_sparse(TABLE, ONE, combiner="max"), ValueError, "combiner as one of"),
        (
            lambda: deeprec.fused_embedding_lookup_sparse(TABLE, ONE, default_id=3),
            IndexError,
            "a default_id from 0 to 2",
        ),
        (lambda: deeprec.fused_embedding_lookup_sparse(TABLE[:1], ONE), IndexError, "ids from 0 to 0, got 1 in row 0"),
        (lambda: deeprec.fused_embedding_lookup_sparse(TABLE.astype(np.float64), ONE), TypeError, "float32 tensors"),
        (lambda: deeprec.fused_embedding_lookup_sparse(TABLE[0], ONE), ValueError, r"vectors \[V, D\]"),
        (
            lambda: deeprec.fused_embedding_lookup_sparse([TABLE, TABLE], ONE),
            ValueError,
            "the partition_strategy 'div'",
        ),
        (
            lambda: deeprec.fused_embedding_lookup_sparse([TABLE, TABLE[:1]], ONE, partition_strategy="mod"),
            ValueError,
            r"partitions of \[2, 2\] rows, got \[3, 1\]",
        ),
        (lambda: deeprec.categorical_column_with_embedding("a", tf.string), ValueError, "tf.int64 or tf.int32"),
        (lambda: deeprec.embedding_column(None, 3), TypeError, "either categorical_column or sparse_id_column"),
        (
            lambda: deeprec.embedding_column(deeprec.categorical_column_with_embedding("a"), 3, initializer="ones"),
            TypeError,
            "an initializer of ones, zeros",
        ),
        (lambda: deeprec.input_layer({}, []), ValueError, "at least one column"),
        (
            lambda: deeprec.input_layer(
                {}, deeprec.embedding_column(deeprec.categorical_column_with_embedding("a"), 3)
            ),
            TypeError,
            "expected a list of columns, got one column",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, error, expected):
    with pytest.raises(error, match=expected):
        call()


def test_a_feature_without_ids_is_refused():
    column = deeprec.embedding_column(deeprec.categorical_column_with_embedding("a"), 3)

    with pytest.raises(KeyError, match="no ids for the feature 'a'"):
        deeprec.input_layer({"b": ONE}, [column])
    with pytest.raises(ValueError, match="two called 'a_embedding'"):
        deeprec.input_layer({"a": ONE}, [column, column])
