"""``DynamicVariable``: its rows, the optimizers that move them, and its files."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hotrow
from serving.errors import ModelFileError
from serving.importers import plan_import, write_model
from tests.tensorflow.batches import ragged_ids
from training.tf.sok import experiment as sok
from training.tf.sok import optimizers

KEYS = np.array([7, -3, 10**15])


def rows_of(variable):
    parts = list(variable.own_rows())
    return {int(key): row.tolist() for keys, rows in parts for key, row in zip(keys, rows, strict=True)}


def ids_of(keys):
    return tf.RaggedTensor.from_row_lengths(tf.constant(keys, tf.int64), [1] * len(keys))


def test_training_makes_rows_and_evaluation_makes_none(started):
    variable = sok.DynamicVariable(2, initializer="13")

    unknown = sok.lookup_sparse(variable, ids_of(KEYS), training=False)
    made = sok.lookup_sparse(variable, ids_of(KEYS))
    known = sok.lookup_sparse(variable, ids_of([7, 8]), training=False)

    np.testing.assert_array_equal(unknown, np.zeros((3, 2)))
    np.testing.assert_array_equal(made, np.full((3, 2), 13))
    np.testing.assert_array_equal(known, [[13, 13], [0, 0]])
    assert variable.size.numpy().tolist() == [3, 2]


def test_a_frozen_variable_makes_no_rows(started):
    variable = sok.DynamicVariable(2, trainable=False)

    sok.lookup_sparse(variable, ids_of(KEYS))

    assert variable.row_count == 0


def test_gradients_have_keys_and_their_sums(started):
    variable = sok.DynamicVariable(2, initializer="ones")
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([7, 7, -3], tf.int64), [1, 2])

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(variable, ids, combiners="sum"))
    gradient = tape.gradient(loss, variable)

    sums = dict(zip(gradient.indices.numpy().tolist(), gradient.values.numpy().tolist(), strict=True))
    assert sums == {7: [2, 2], -3: [1, 1]}


def adam(rate, rows, state, key, gradient):
    """Keras's Adam for one row: see keras.optimizers.Adam.update_step."""
    m, v, step = state["m"].get(key, 0), state["v"].get(key, 0), state["step"]
    state["m"][key], state["v"][key] = m + (gradient - m) * 0.1, v + (gradient**2 - v) * 0.001
    alpha = rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    rows[key] = rows[key] - alpha * state["m"][key] / (np.sqrt(state["v"][key]) + 1e-7)


def sgd(rate, rows, state, key, gradient):
    rows[key] = rows[key] - rate * gradient


def momentum(rate, rows, state, key, gradient):
    state["m"][key] = 0.9 * state["m"].get(key, 0) - rate * gradient
    rows[key] = rows[key] + state["m"][key]


@pytest.mark.parametrize("apply", [lambda step: step, tf.function], ids=["eager", "tf.function"])
@pytest.mark.parametrize(
    ("make", "move"),
    [
        pytest.param(lambda: sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), adam, id="Adam of Keras"),
        pytest.param(lambda: optimizers.Adam(0.1), adam, id="Adam of SOK"),
        pytest.param(lambda: sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), sgd, id="SGD"),
        pytest.param(lambda: sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1, 0.9)), momentum, id="momentum"),
    ],
)
def test_rows_with_a_gradient_move_as_the_formula_says(started, make, move, apply):
    rng = np.random.default_rng(3)
    tables = [sok.DynamicVariable(4, initializer="ones") for _ in range(2)]
    optimizer = make()

    @apply
    def step(ids, other_ids, targets):
        with tf.GradientTape() as tape:
            vectors = sok.lookup_sparse(tables, [ids, other_ids], combiners=["sum", "sum"])
            loss = sum(tf.reduce_sum(one * target) for one, target in zip(vectors, targets, strict=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    expected = [({}, {"m": {}, "v": {}}) for _ in tables]
    for number in range(5):
        ids = [ragged_ids(rng, 12, 3, 9) for _ in tables]
        targets = [rng.normal(size=(12, 4)).astype(np.float32) for _ in tables]
        step(*ids, [tf.constant(one) for one in targets])
        for (rows, state), one, target in zip(expected, ids, targets, strict=True):
            state["step"] = number + 1
            sums = {}
            for row, keys in enumerate(one.to_list()):
                for key in keys:
                    sums[key] = sums.get(key, 0) + target[row].astype(np.float64)
            for key, gradient in sums.items():
                rows.setdefault(key, np.ones(4))
                move(0.1, rows, state, key, gradient)

    for variable, (rows, _) in zip(tables, expected, strict=True):
        came = rows_of(variable)
        assert came.keys() == rows.keys()
        for key, row in rows.items():
            np.testing.assert_allclose(came[key], row, rtol=2e-5, atol=2e-5)


def test_ftrl_is_that_of_keras_in_a_table_where_every_row_has_a_gradient(started):
    options = {"l1_regularization_strength": 0.1, "l2_regularization_strength": 0.02}
    rng = np.random.default_rng(4)
    variable, plain = sok.DynamicVariable(4, initializer="ones"), tf.Variable(tf.ones([3, 4]))
    wrapped = sok.OptimizerWrapper(tf.keras.optimizers.Ftrl(0.3, **options))
    of_keras = tf.keras.optimizers.Ftrl(0.3, **options)

    for _ in range(4):
        target = tf.constant(rng.normal(size=(3, 4)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(variable, ids_of([0, 1, 2])) * target)
        wrapped.apply_gradients([(tape.gradient(loss, variable), variable)])
        of_keras.apply_gradients([(target, plain)])

    came = rows_of(variable)
    np.testing.assert_allclose([came[0], came[1], came[2]], plain, rtol=1e-4, atol=1e-5)


def test_the_wrapper_moves_other_variables_as_the_optimizer_does(started):
    variable, dense = sok.DynamicVariable(2, initializer="ones"), tf.Variable([1.0, 2.0])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(variable, ids_of([5])) * dense)
    optimizer.apply_gradients(zip(tape.gradient(loss, [variable, dense]), [variable, dense], strict=True))

    assert rows_of(variable) == {5: [0.5, 0]}
    np.testing.assert_array_equal(dense, [0.5, 1.5])
    optimizer.learning_rate.assign(0.25)
    assert int(optimizer.iterations) == 1


def test_the_gradients_of_two_lookups_are_added_before_the_step(started):
    dynamic, array = sok.DynamicVariable(2, initializer="ones"), sok.Variable(np.ones((9, 2)))
    for variable in (dynamic, array):
        optimizer = optimizers.Adam(0.1)
        with tf.GradientTape() as tape:
            once = sok.lookup_sparse(variable, ids_of([5, 6]), combiners="sum")
            again = sok.lookup_sparse(variable, ids_of([5]), combiners="sum")
            loss = tf.reduce_sum(once) + 3 * tf.reduce_sum(again)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    np.testing.assert_allclose(rows_of(dynamic)[5], array.numpy()[5], rtol=1e-6)
    np.testing.assert_allclose(rows_of(dynamic)[5], [0.9, 0.9], rtol=1e-4)


def test_optimizers_that_do_not_reach_the_rows_are_refused(started):
    variable = sok.DynamicVariable(2)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.lookup_sparse(variable, ids_of([5])))
    gradient = tape.gradient(loss, variable)

    for optimizer in (tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.Adam(0.1), tf.keras.optimizers.RMSprop(0.1)):
        with pytest.raises(TypeError, match=r"expected sok\.OptimizerWrapper"):
            optimizer.apply_gradients([(gradient, variable)])
    with pytest.raises(TypeError, match=r"SGD, Adam or Ftrl of Keras, got RMSprop"):
        sok.OptimizerWrapper(tf.keras.optimizers.RMSprop(0.1))
    with pytest.raises(ValueError, match=r"clipnorm=None, got clipnorm=1\.0"):
        sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1, clipnorm=1.0))
    with pytest.raises(ValueError, match="amsgrad=False, got amsgrad=True"):
        sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1, amsgrad=True))
    with pytest.raises(TypeError, match=r"a gradient of lookup_sparse, got float32\[2\]"):
        optimizers.Adam(0.1).apply_gradients([(tf.ones(2), variable)])
    with pytest.raises(ValueError, match="each variable once"):
        optimizers.Adam(0.1).apply_gradients([(gradient, variable), (gradient, variable)])


def test_a_reserved_id_is_refused(started):
    variable = sok.DynamicVariable(2)

    with pytest.raises(Exception, match="reserved"):
        sok.lookup_sparse(variable, ids_of([2**63 - 1]))


def test_a_model_is_not_saved_without_the_rows_of_its_table(started, tmp_path):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.table = sok.DynamicVariable(2, name="users")
            self.dense = tf.keras.layers.Dense(1)

        def call(self, keys):
            ids = tf.RaggedTensor.from_tensor(tf.expand_dims(keys, 1))
            return self.dense(sok.lookup_sparse(self.table, ids))

    model = Model()
    model(tf.constant([1, 2]))

    saves = [
        lambda: model.save(tmp_path / "model.keras"),
        lambda: model.save_weights(tmp_path / "model.weights.h5"),
        lambda: tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint")),
    ]
    for save in saves:
        with pytest.raises(TypeError, match=r"users.*its rows are not part of a saved model; save them with sok\.dump"):
            save()


def test_dumps_are_read_again(started, tmp_path):
    tags, users = sok.DynamicVariable(2, name="tags"), sok.Variable(np.eye(3), name="users")
    sok.lookup_sparse([tags, users], [ids_of(KEYS), ids_of([0])])
    sok.dump(tmp_path / "all", [tags, users])

    tags_again, users_again = sok.DynamicVariable(2, name="tags"), sok.Variable(np.zeros((3, 3)), name="users")
    sok.load(tmp_path / "all", [users_again, tags_again])

    assert rows_of(tags_again) == rows_of(tags)
    np.testing.assert_array_equal(users_again.numpy(), np.eye(3))
    with pytest.raises(ModelFileError, match=r"expected 2 rows with keys from 0 to 1, found 3 rows"):
        sok.load(tmp_path / "all", [sok.Variable(np.zeros((2, 3)), name="users")])
    with pytest.raises(ModelFileError, match="expected a folder 'items', found tags, users"):
        sok.load(tmp_path / "all", [sok.DynamicVariable(2, name="items")])


def test_an_incremental_dump_has_the_rows_of_later_steps(started, tmp_path):
    variable = sok.DynamicVariable(2, initializer="ones", name="tags")
    optimizer = optimizers.Adam(0.1)

    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(variable, ids_of(keys)))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    step([1, 2])
    since = variable.step
    step([2, 3])

    assert sok.incremental_dump(tmp_path / "later", variable, since) == {"tags": 2}
    later = sok.DynamicVariable(2, name="tags")
    sok.load(tmp_path / "later", later)
    assert rows_of(later).keys() == {2, 3}
    with pytest.raises(ValueError, match="since from 0 to 2"):
        sok.incremental_dump(tmp_path / "later", variable, 3)
    with pytest.raises(TypeError, match="of the type DynamicVariable"):
        sok.incremental_dump(tmp_path / "later", sok.Variable(np.eye(2)), 0)
    with pytest.raises(ValueError, match="has no rows yet"):
        sok.dump(tmp_path / "none", sok.DynamicVariable(2))


@pytest.mark.filterwarnings("ignore")  # of tf2onnx, about its own code
def test_what_was_trained_is_served_with_the_trainers_predictions(started, tmp_path):
    rng, inputs = np.random.default_rng(0), {name: keras.Input((4,), name=name) for name in ("tags", "users")}
    tags, users = (sok.DynamicVariable(4, name=name) for name in inputs)
    joined = keras.layers.Concatenate()(list(inputs.values()))
    net = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(joined))
    of_tables, of_layers = optimizers.Adam(0.1), keras.optimizers.Adam(0.1)
    batch = [ragged_ids(rng, 8, 3, 10), ids_of(rng.integers(0, 5, 8) * 10**12)]

    def predict(training):
        of_tags, of_users = sok.lookup_sparse([tags, users], batch, combiners=["mean", "sum"], training=training)
        return net({"tags": of_tags, "users": of_users})

    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.binary_crossentropy(np.arange(8)[:, None] % 2, predict(training=True)))
        of_rows, of_weights = tape.gradient(loss, ([tags, users], net.trainable_variables))
        of_tables.apply_gradients(zip(of_rows, [tags, users], strict=True))
        of_layers.apply_gradients(zip(of_weights, net.trainable_variables, strict=True))
    sok.dump(tmp_path / "tables", [tags, users])
    net.export(tmp_path / "net.onnx", format="onnx", verbose=False)
    plan = plan_import(tmp_path / "net.onnx", "sum", checkpoint=tmp_path / "tables", combiners={"tags": "mean"})
    version = write_model(plan, tmp_path / "models", "ctr")

    with hotrow.load_model(version.parent) as session:
        found = session.predict({"tags": batch[0].to_list(), "users": batch[1].values.numpy().tolist()})
    np.testing.assert_allclose(found, predict(training=False), atol=1e-6)
