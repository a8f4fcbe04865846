"""The embedding plugin: the two examples of its documentation, and batches against TensorFlow's own operations."""

import numpy as np
import pytest
import tensorflow as tf

from serving.errors import ModelFileError
from training.errors import SessionError
from training.tf import embedding_plugin as hugectr_tf_ops_v2

vocabulary_size, slot_num, embedding_vector_size = 8, 3, 4
table = np.float32(list(range(1, vocabulary_size * embedding_vector_size + 1))).reshape(
    vocabulary_size, embedding_vector_size
)
keys = np.array(
    [
        [[0, -1], [1, -1], [2, 6]],
        [[0, -1], [1, -1], [-1, -1]],
        [[0, -1], [1, -1], [6, -1]],
        [[0, -1], [1, -1], [2, -1]],
    ],
    dtype=np.int64,
)


@pytest.fixture
def plugin():
    hugectr_tf_ops_v2.reset()
    yield hugectr_tf_ops_v2
    hugectr_tf_ops_v2.reset()


def create(plugin, **named):
    arguments = {
        "init_value": table,
        "opt_hparams": [0.1, 0.9, 0.99, 1e-3],
        "name_": "embedding_verification",
        "max_vocabulary_size_per_gpu": vocabulary_size,
        "slot_num": slot_num,
        "embedding_vec_size": embedding_vector_size,
        "embedding_type": "distributed",
        "max_nnz": 2,
    }
    return plugin.create_embedding(**{**arguments, **named})


def coo(dense_keys):
    reshape_keys = tf.reshape(dense_keys, [-1, dense_keys.shape[-1]])
    indices = tf.where(reshape_keys != -1)
    return tf.transpose(indices, perm=[1, 0]), tf.gather_nd(reshape_keys, indices)


@pytest.mark.parametrize("apply", [lambda step: step, tf.function], ids=["eager", "tf.function"])
@pytest.mark.parametrize(
    "named", [{}, {"embedding_type": "localized", "update_type": "Global"}], ids=["distributed", "localized"]
)
def test_the_first_example_gives_the_numbers_of_the_documentation(plugin, named, apply):
    plugin.init(visible_gpus=[0], seed=0, key_type="int64", value_type="float", batch_size=4, batch_size_eval=4)
    name = create(plugin, **named)
    row_indices, values = coo(keys)
    bp_trigger = tf.Variable(initial_value=1.0, trainable=True, dtype=tf.float32)

    @apply
    def step():
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(bp_trigger)
            each_replica = plugin.broadcast_then_convert_to_csr(name, row_indices, values, T=[tf.int32] * 1)
            forward_result = plugin.fprop(name, 0, each_replica, bp_trigger, is_training=True)
        grads = tape.gradient(forward_result, bp_trigger)
        return forward_result, plugin.fprop(name, 0, each_replica, bp_trigger, is_training=True), grads

    first, second, grads = step()

    np.testing.assert_array_equal(first[:, 2], [[34, 36, 38, 40], [0, 0, 0, 0], [25, 26, 27, 28], [9, 10, 11, 12]])
    np.testing.assert_array_equal(first[:, :2], np.tile(table[:2], (4, 1, 1)))
    assert float(grads) == 0
    printed = {
        (0, 0): [0.90024936, 1.9002494, 2.9002495, 3.9002495],
        (0, 1): [4.9002495, 5.9002495, 6.9002495, 7.9002495],
        (0, 2): [33.800995, 35.800995, 37.800995, 39.800995],
        (1, 2): [0, 0, 0, 0],
        (2, 2): [24.900497, 25.900497, 26.900497, 27.900497],
        (3, 2): [8.900497, 9.900497, 10.900497, 11.900497],
    }
    for (sample, slot), vector in printed.items():
        np.testing.assert_allclose(second[sample, slot], vector, rtol=1e-6)


def deepfm(plugin, batch_size, initializer, embedding_vec_size=4, slots=5):
    """The documentation's DeepFM with its embedding, without the layers that are only TensorFlow."""

    class DeepFM(tf.keras.models.Model):
        def __init__(self):
            super().__init__()
            plugin.init(visible_gpus=[0], seed=1, batch_size=batch_size, batch_size_eval=batch_size)
            self.embedding_name = plugin.create_embedding(
                init_value=initializer,
                name_="hugectr_embedding",
                embedding_type="distributed",
                optimizer_type="Adam",
                max_vocabulary_size_per_gpu=1000,
                opt_hparams=[0.1, 0.9, 0.99, 1e-5],
                update_type="Local",
                atomic_update=True,
                scaler=1.0,
                slot_num=slots,
                max_nnz=1,
                max_feature_num=1 * slots,
                embedding_vec_size=embedding_vec_size + 1,
                combiner="sum",
            )
            self.deep = tf.keras.layers.Dense(units=1)
            self.y_act = tf.keras.layers.Activation(activation="sigmoid")
            self.bp_trigger = self.add_weight(name="bp_trigger", shape=(1,), dtype=tf.float32, trainable=True)

        def call(self, dense_feature, each_replica, training=True):  # without @tf.function, see docs/tensorflow.md
            sparse = plugin.fprop(self.embedding_name, 0, each_replica, self.bp_trigger, is_training=training)
            sparse_1 = tf.squeeze(tf.slice(sparse, [0, 0, embedding_vec_size], [-1, slots, 1]), 2)
            hidden = tf.reshape(tf.slice(sparse, [0, 0, 0], [-1, slots, embedding_vec_size]), [batch_size, -1])
            first_out = tf.reduce_sum(tf.concat([dense_feature, sparse_1], 1), axis=-1, keepdims=True)
            return self.y_act(self.deep(hidden) + first_out)

        @property
        def get_embedding_name(self):
            return self.embedding_name

    return DeepFM()


def test_the_training_loop_of_the_documentation_learns(plugin):
    batch_size, rng = 32, np.random.default_rng(0)
    model = deepfm(plugin, batch_size, initializer=False)
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.01)
    loss_fn = tf.keras.losses.BinaryCrossentropy(from_logits=False)

    @tf.function
    def _train_step(dense_batch, sparse_batch, y_batch, model, loss_fn, optimizer):
        with tf.GradientTape() as tape:
            y_batch = tf.cast(y_batch, dtype=tf.float32)
            logits = model(dense_batch, sparse_batch, training=True)
            loss = loss_fn(y_batch, logits)
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        return loss

    losses, traces = [], []
    values = rng.integers(0, 50, batch_size * 5)
    labels = (values.reshape(batch_size, 5)[:, :1] % 2).astype(np.int64)
    for _ in range(12):
        sparse = plugin.broadcast_then_convert_to_csr(
            model.get_embedding_name,
            row_indices=np.arange(batch_size * 5 - len(losses)),  # batches have different numbers of keys
            values=values[: batch_size * 5 - len(losses)],
            T=[tf.int32] * 1,
        )
        dense = tf.zeros((batch_size, 2))
        losses.append(float(_train_step(dense, sparse, tf.constant(labels), model, loss_fn, optimizer)))
        traces += [_train_step.experimental_get_tracing_count()] if len(losses) > 1 else []

    assert losses[-1] < 0.2 < losses[0]
    assert traces == [_train_step.experimental_get_tracing_count()] * 11


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_steps_are_those_of_tensorflow(plugin, combiner, replicas):
    rng = np.random.default_rng(5)
    plugin.init(visible_gpus=list(range(replicas)), batch_size=4, batch_size_eval=4)
    name = create(plugin, optimizer_type="SGD", opt_hparams=[0.1], combiner=combiner)
    plain, bp_trigger = tf.Variable(table), tf.Variable([1.0])

    for _ in range(3):
        batch = rng.integers(-1, vocabulary_size, (4, slot_num, 2))
        target = rng.normal(size=(4, slot_num, embedding_vector_size)).astype(np.float32)
        each_replica = plugin.broadcast_then_convert_to_csr(name, *coo(batch), T=[tf.int32] * replicas)
        with tf.GradientTape() as tape:
            parts = [plugin.fprop(name, replica, each_replica, bp_trigger) for replica in range(replicas)]
            vectors = tf.concat(parts, 0)
            loss = tf.reduce_sum(vectors * target)
        tape.gradient(loss, bp_trigger)
        rows = [[int(key) for key in row if key >= 0] for row in batch.reshape(-1, 2)]
        with tf.GradientTape() as tape:
            sparse = tf.ragged.constant(rows, tf.int64, ragged_rank=1).to_sparse()
            expected = tf.nn.safe_embedding_lookup_sparse(plain, sparse, combiner=combiner)
            expected = tf.reshape(expected, target.shape)
            loss = tf.reduce_sum(expected * target)
        gradient = tape.gradient(loss, plain)
        plain.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-5)


def test_the_experimental_call_takes_offsets(plugin):
    plugin.init(visible_gpus=[0], batch_size=2, batch_size_eval=2)
    name = create(plugin, slot_num=1)

    vectors = plugin.fprop_experimental(name, 0, [0, 2, 3], [1, 2, 3, 99], 3, tf.Variable(1.0))

    np.testing.assert_array_equal(vectors, [[table[1] + table[2]], [table[3]]])


def test_evaluation_changes_nothing_and_half_is_float16(plugin):
    plugin.init(visible_gpus=[0], value_type="half", batch_size=1, batch_size_eval=1)
    name = create(plugin, init_value=True, slot_num=1)
    each = plugin.broadcast_then_convert_to_csr(name, [0], [5], T=[tf.int32], is_training=False)

    with tf.GradientTape() as tape:
        bp_trigger = tf.Variable(1.0)
        vectors = plugin.fprop(name, 0, each, bp_trigger, is_training=False)

    assert (vectors.dtype, vectors.numpy().any()) == (tf.float16, False)
    assert tape.gradient(vectors, bp_trigger) is None


def test_rows_are_saved_and_restored(plugin, tmp_path):
    plugin.init(visible_gpus=[0], batch_size=4, batch_size_eval=4)
    name, other = create(plugin), create(plugin, init_value=True)

    plugin.save(name, tmp_path / "rows")
    plugin.restore(other, tmp_path / "rows")

    assert other == "embedding_verification_1"
    each = plugin.broadcast_then_convert_to_csr(other, *coo(keys), T=[tf.int32])
    np.testing.assert_array_equal(plugin.fprop(other, 0, each, tf.Variable(1.0))[0, 0], table[0])
    with pytest.raises(ModelFileError, match="absent"):
        plugin.restore(other, tmp_path / "absent")


def test_a_gradient_that_is_not_finite_is_skipped(plugin):
    plugin.init(visible_gpus=[0], batch_size=4, batch_size_eval=4)
    name, bp_trigger = create(plugin), tf.Variable(1.0)
    each = plugin.broadcast_then_convert_to_csr(name, *coo(keys), T=[tf.int32])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(plugin.fprop(name, 0, each, bp_trigger)) * np.inf

    with pytest.warns(UserWarning, match="a gradient is not finite, so this step is skipped"):
        tape.gradient(loss, bp_trigger)
    np.testing.assert_array_equal(plugin.fprop(name, 0, each, bp_trigger)[0, 0], table[0])


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        pytest.param(
            lambda plugin, name, each: plugin.fprop(name, 0, [np.zeros(3)], tf.Variable(1.0)),
            TypeError,
            r"to_each_replica as broadcast_then_convert_to_csr returns it, got float64\[3\]",
            id="other keys",
        ),
        pytest.param(
            lambda plugin, name, each: plugin.fprop(create(plugin), 0, each, tf.Variable(1.0)),
            ValueError,
            "got that of another embedding",
            id="keys of another embedding",
        ),
        pytest.param(
            lambda plugin, name, each: plugin.fprop(name, 0, each, tf.Variable(1.0), is_training=False),
            ValueError,
            "for replica 0 with is_training=False, got replica 0 with True",
            id="keys of the training",
        ),
        pytest.param(
            lambda plugin, name, each: plugin.fprop(name, 1, each, tf.Variable(1.0)),
            ValueError,
            "replica_id as one of 0, got 1",
            id="another replica",
        ),
        pytest.param(
            lambda plugin, name, each: plugin.fprop(name, 0, each, tf.Variable([1.0, 2.0])),
            TypeError,
            "bp_trigger as a float32 variable with one element",
            id="a trigger with two elements",
        ),
        pytest.param(
            lambda plugin, name, each: plugin.fprop("users", 0, each, tf.Variable(1.0)),
            KeyError,
            "there is no embedding 'users'",
            id="an unknown embedding",
        ),
        pytest.param(
            lambda plugin, name, each: plugin.broadcast_then_convert_to_csr(name, [12], [1], T=[tf.int32]),
            IndexError,
            "row_indices from 0 to 11, 4 samples of 3 slots, got 12",
            id="a row outside of the batch",
        ),
        pytest.param(
            lambda plugin, name, each: plugin.broadcast_then_convert_to_csr(name, [0], [1.0], T=[tf.int32]),
            TypeError,
            r"values as a tensor or an array of int64, got float32\[1\]",
            id="keys that are floats",
        ),
        pytest.param(
            lambda plugin, name, each: plugin.init(visible_gpus=[0]),
            SessionError,
            "call reset first",
            id="a second init",
        ),
    ],
)
def test_wrong_calls_are_refused(plugin, call, error, expected):
    plugin.init(visible_gpus=[0], batch_size=4, batch_size_eval=4)
    name = create(plugin)
    each = plugin.broadcast_then_convert_to_csr(name, *coo(keys), T=[tf.int32])

    with pytest.raises(error, match=expected):
        call(plugin, name, each)
