"""The examples of SOK's documentation. Their import lines, and what TensorFlow 2.16 has removed, are changed."""

import numpy as np
import pytest
import tensorflow as tf

from training.tf import sok as legacy
from training.tf.sok import experiment as sok


def example(optimizer, apply):
    v1 = sok.Variable(np.arange(17 * 3).reshape(17, 3), dtype=tf.float32)
    v2 = sok.Variable(np.arange(7 * 5).reshape(7, 5), dtype=tf.float32)
    indices1 = tf.SparseTensor(
        indices=[[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]], values=[1, 1, 3, 4, 5], dense_shape=[2, 3]
    )
    indices2 = tf.SparseTensor(indices=[[0, 0], [1, 0], [1, 1]], values=[1, 2, 3], dense_shape=[2, 2])

    def step():
        with tf.GradientTape() as tape:
            embeddings = sok.lookup_sparse([v1, v2], [indices1, indices2], hotness=[3, 2], combiners=["sum", "sum"])
            loss = 0.0
            for embedding in embeddings:
                loss += tf.reduce_sum(embedding)
        grads = tape.gradient(loss, [v1, v2])
        optimizer.apply_gradients(zip(grads, [v1, v2], strict=True))
        return embeddings, grads

    embeddings, grads = apply(step)()
    return v1, v2, embeddings, grads


@pytest.mark.parametrize(
    "apply", [pytest.param(lambda step: step, id="eager"), pytest.param(tf.function, id="tf.function")]
)
def test_the_experimental_example_gives_the_numbers_of_the_documentation(started, apply):
    v1, v2, embeddings, grads = example(tf.keras.optimizers.SGD(learning_rate=1.0), apply)

    np.testing.assert_array_equal(embeddings[0], [[6, 8, 10], [36, 39, 42]])
    np.testing.assert_array_equal(embeddings[1], [[5, 6, 7, 8, 9], [25, 27, 29, 31, 33]])
    assert [grad.values.shape.as_list() for grad in grads] == [[4, 3], [3, 5]]  # as in one process of SOK
    table = np.arange(17 * 3, dtype=np.float32).reshape(17, 3)
    table[[1, 3, 4, 5]] -= [[2], [1], [1], [1]]
    np.testing.assert_array_equal(v1.numpy(), table)
    table = np.arange(7 * 5, dtype=np.float32).reshape(7, 5)
    table[1:4] -= 1
    np.testing.assert_array_equal(v2.numpy(), table)


class DemoModel(tf.keras.models.Model):
    def __init__(
        self,
        max_vocabulary_size_per_gpu,
        slot_num,
        nnz_per_slot,
        embedding_vector_size,
        num_of_dense_layers,
        **kwargs,
    ):
        super(DemoModel, self).__init__(**kwargs)  # noqa: UP008

        self.max_vocabulary_size_per_gpu = max_vocabulary_size_per_gpu
        self.slot_num = slot_num
        self.nnz_per_slot = nnz_per_slot
        self.embedding_vector_size = embedding_vector_size
        self.num_of_dense_layers = num_of_dense_layers

        self.embedding_layer = legacy.All2AllDenseEmbedding(
            max_vocabulary_size_per_gpu=self.max_vocabulary_size_per_gpu,
            embedding_vec_size=self.embedding_vector_size,
            slot_num=self.slot_num,
            nnz_per_slot=self.nnz_per_slot,
        )

        self.dense_layers = list()
        for _ in range(self.num_of_dense_layers):
            self.layer = tf.keras.layers.Dense(units=16, activation="relu")
            self.dense_layers.append(self.layer)

        self.out_layer = tf.keras.layers.Dense(units=1, activation=None)

    def call(self, inputs, training=True):
        emb_vector = self.embedding_layer(inputs, training=training)
        emb_vector = tf.reshape(emb_vector, shape=[-1, self.slot_num * self.nnz_per_slot * self.embedding_vector_size])
        hidden = emb_vector
        for layer in self.dense_layers:
            hidden = layer(hidden)
        logit = self.out_layer(hidden)
        return logit


def functional_model(max_vocabulary_size_per_gpu, slot_num, nnz_per_slot, embedding_vector_size, num_of_dense_layers):
    input_tensor = tf.keras.Input(shape=(slot_num, nnz_per_slot), dtype=tf.int64)  # Keras 3 has no type_spec
    embedding_layer = legacy.All2AllDenseEmbedding(
        max_vocabulary_size_per_gpu=max_vocabulary_size_per_gpu,
        embedding_vec_size=embedding_vector_size,
        slot_num=slot_num,
        nnz_per_slot=nnz_per_slot,
    )
    embedding = embedding_layer(input_tensor)
    embedding = tf.keras.layers.Reshape(target_shape=(slot_num * nnz_per_slot * embedding_vector_size,))(embedding)
    hidden = embedding
    for _ in range(num_of_dense_layers):
        hidden = tf.keras.layers.Dense(units=16, activation="relu")(hidden)
    logit = tf.keras.layers.Dense(units=1, activation=None)(hidden)  # the document does not call the layer
    return tf.keras.Model(inputs=input_tensor, outputs=logit)


@pytest.mark.parametrize(
    ("make_model", "use_tf_opt"),
    [
        pytest.param(DemoModel, True, id="subclassing, with an optimizer of Keras"),
        pytest.param(functional_model, False, id="functional, with SOK's optimizer"),
    ],
)
def test_the_demo_model_trains_with_one_mirrored_replica(fresh, make_model, use_tf_opt):
    global_batch_size = 32
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    tf.keras.utils.set_random_seed(5)

    with strategy.scope():
        legacy.Init(global_batch_size=global_batch_size)
        model = make_model(
            max_vocabulary_size_per_gpu=1024,
            slot_num=10,
            nnz_per_slot=5,
            embedding_vector_size=16,
            num_of_dense_layers=2,
        )
        if not use_tf_opt:
            emb_opt = legacy.optimizers.Adam(learning_rate=0.1)
        else:
            emb_opt = tf.keras.optimizers.Adam(learning_rate=0.1)
        dense_opt = tf.keras.optimizers.Adam(learning_rate=0.01)

    loss_fn = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")  # Keras 3 has no Reduction

    def _replica_loss(labels, logits):
        loss = loss_fn(labels, logits)
        return tf.nn.compute_average_loss(loss, global_batch_size=global_batch_size)

    @tf.function
    def _train_step(inputs, labels):
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            loss = _replica_loss(labels, logits)
        emb_var, other_var = legacy.split_embedding_variable_from_others(model.trainable_variables)
        grads, emb_grads = tape.gradient(loss, [other_var, emb_var])
        if use_tf_opt:
            with legacy.OptimizerScope(emb_var):
                # Keras 3 has no experimental_aggregate_gradients
                emb_opt.apply_gradients(zip(emb_grads, emb_var, strict=True))
        else:
            emb_opt.apply_gradients(zip(emb_grads, emb_var, strict=True), experimental_aggregate_gradients=False)
        dense_opt.apply_gradients(zip(grads, other_var, strict=True))
        return loss

    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 1000, (global_batch_size, 10, 5))
    labels = (inputs[:, 0, :1] % 2).astype(np.float32)
    losses = []
    for _ in range(10):
        replica_loss = strategy.run(_train_step, args=(tf.constant(inputs), tf.constant(labels)))
        losses.append(float(strategy.reduce(tf.distribute.ReduceOp.SUM, replica_loss, axis=None)))

    assert losses[-1] < 0.1 < losses[0]
    assert len(legacy.split_embedding_variable_from_others(model.trainable_variables)[0]) == 1
