"""The legacy layers in Keras models: numbers, fit, summary, files, refusals."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tensorflow.batches import plain_lookup, ragged_ids
from training.tf import sok
from training.tf.sok import initialize


def two_towers(**named):
    inputs = keras.Input((3, 2), dtype="int64")
    vectors = sok.All2AllDenseEmbedding(64, 4, slot_num=3, nnz_per_slot=2, name="items", **named)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(vectors)))


def data(rows=64):
    rng = np.random.default_rng(2)
    keys = rng.integers(0, 20, (rows, 3, 2)) * 10**6
    return keys, (keys[:, 0, :1] > 10**7).astype(np.float32)


@pytest.fixture(scope="module")
def trained():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialize, "_start", None)
        sok.init()
        yield fitted()


def fitted():
    keras.utils.set_random_seed(7)
    model = two_towers()
    model.compile(keras.optimizers.Adam(0.05), keras.losses.BinaryCrossentropy(from_logits=True))
    keys, labels = data()
    history = model.fit(keys, labels, epochs=6, batch_size=16, verbose=0)
    assert history.history["loss"][-1] < 0.3 < history.history["loss"][0]
    return model


def test_fit_trains_the_rows_of_all_keys(trained):
    variable = trained.get_layer("items").embedding_variable

    assert sorted(variable.keys) == sorted(np.unique(data()[0]))
    assert [variable.path] == [
        split_embedding_variable_from_other.path
        for split_embedding_variable_from_other in sok.split_embedding_variable_from_others(trained.weights)[0]
    ]


def test_fit_gives_the_numbers_of_an_embedding_of_keras(started):
    keys = np.arange(12).reshape(4, 3, 1)
    labels = np.arange(4, dtype=np.float32)[:, None]
    ours = keras.Sequential(
        [
            keras.Input((3, 1), dtype="int64"),
            sok.All2AllDenseEmbedding(12, 4, 3, 1, use_hashtable=False),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    plain = keras.Sequential(
        [
            keras.Input((3, 1), dtype="int64"),
            keras.layers.Embedding(12, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    plain.set_weights(ours.get_weights())
    for model in (ours, plain):
        model.compile(keras.optimizers.Adam(0.05), "mse")
        model.fit(keys, labels, epochs=5, batch_size=2, shuffle=False, verbose=0)

    np.testing.assert_allclose(ours.get_weights()[0], plain.get_weights()[0], rtol=1e-4, atol=1e-6)


def test_a_summary_shows_the_rows(trained, capsys):
    trained.summary()

    assert "256" in capsys.readouterr().out  # 64 rows of 4


@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5"])
def test_a_saved_model_has_the_rows_and_the_keys(trained, tmp_path, file):
    keys = data()[0]
    keys[0, 0, 0] = 77  # which training has not seen

    if file == "model.keras":
        trained.save(tmp_path / file)
        loaded = keras.models.load_model(tmp_path / file)
    else:
        trained.save_weights(tmp_path / file)
        loaded = two_towers()
        loaded.load_weights(tmp_path / file)

    np.testing.assert_array_equal(loaded.predict(keys, verbose=0), trained.predict(keys, verbose=0))


def test_a_checkpoint_has_the_rows_and_the_keys(trained, tmp_path):
    keys = data()[0]
    path = tf.train.Checkpoint(model=trained).write(str(tmp_path / "checkpoint"))
    loaded = two_towers()

    tf.train.Checkpoint(model=loaded).read(path).expect_partial()

    np.testing.assert_array_equal(loaded.predict(keys, verbose=0), trained.predict(keys, verbose=0))


def test_a_file_without_the_rows_is_refused(started, tmp_path):
    plain = keras.Sequential([keras.Input((3, 2), dtype="int64"), keras.layers.Embedding(64, 4, name="items")])
    plain.save_weights(tmp_path / "plain.weights.h5")
    ours = keras.Sequential([keras.Input((3, 2), dtype="int64"), sok.All2AllDenseEmbedding(64, 4, 3, 2, name="items")])

    with pytest.raises(ValueError, match=r"'items': expected a file with its keys and rows"):
        ours.load_weights(tmp_path / "plain.weights.h5")


@pytest.mark.filterwarnings("ignore:Skipping nested container")  # by Keras, for layers without variables
def test_a_file_with_more_rows_is_refused(trained, tmp_path):
    trained.save_weights(tmp_path / "large.weights.h5")
    inputs = keras.Input((3, 2), dtype="int64")
    vectors = sok.All2AllDenseEmbedding(8, 4, slot_num=3, nnz_per_slot=2, name="items")(inputs)
    small = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(vectors)))

    with pytest.raises(ValueError, match=r"expected at most 8 rows of 4, got keys int64\[20\]"):
        small.load_weights(tmp_path / "large.weights.h5")


def test_a_saved_model_for_another_process_is_refused(trained, tmp_path):
    for save in (trained.export, lambda path: tf.saved_model.save(trained, path)):
        with pytest.raises(NotImplementedError, match=r"a SavedModel cannot hold its rows .*from_keras"):
            save(str(tmp_path / "saved"))


def test_evaluation_gives_unknown_keys_vectors_of_zeros(started):
    layer = sok.All2AllDenseEmbedding(4, 2, 1, 1, embedding_initializer="ones")

    np.testing.assert_array_equal(layer(tf.constant([[5], [6]]), training=True), np.ones((2, 1, 1, 2)))
    np.testing.assert_array_equal(layer(tf.constant([[5], [7]]), training=False), [[[[1, 1]]], [[[0, 0]]]])
    assert layer.embedding_variable.row_count == 2


@pytest.mark.parametrize("combiner", ["sum", "Mean"])
def test_slots_are_combined(started, combiner):
    rng = np.random.default_rng(5)
    ids = ragged_ids(rng, 4 * 3, 2, 30)
    layer = sok.DistributedEmbedding(combiner, 30, 4, slot_num=3, max_nnz=2, use_hashtable=False)

    vectors = layer(ids.to_sparse(), training=True)

    expected = plain_lookup(layer.embedding_variable.value, ids, combiner=combiner.lower())
    np.testing.assert_allclose(vectors, tf.reshape(expected, (4, 3, 4)), rtol=1e-6)
    np.testing.assert_array_equal(layer(ids, training=True), vectors)


def test_a_mean_counts_unknown_keys_as_the_server_does(started):
    layer = sok.DistributedEmbedding("mean", 4, 2, slot_num=1, max_nnz=3, embedding_initializer="ones")
    layer(tf.ragged.constant([[1, 2]], tf.int64), training=True)

    np.testing.assert_array_equal(layer(tf.ragged.constant([[1, 9]], tf.int64), training=False), [[[0.5, 0.5]]])


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        pytest.param(
            lambda layer: layer(tf.constant([[1.5, 2.5]])), TypeError, "ids of int64 or int32, got float32", id="floats"
        ),
        pytest.param(
            lambda layer: layer(tf.constant([[1, 2], [3, 4], [5, 6]]), training=True),
            ValueError,
            "at most max_vocabulary_size_per_gpu = 4 distinct keys, got 6",
            id="too many keys",
        ),
        pytest.param(
            lambda layer: layer(tf.constant([[1]])),
            ValueError,
            "expected 1 slots of 2 keys for each sample, got 1 keys",
            id="part of a sample",
        ),
    ],
)
def test_wrong_inputs_are_refused(started, call, error, expected):
    layer = sok.All2AllDenseEmbedding(4, 2, slot_num=1, nnz_per_slot=2)

    with pytest.raises(error, match=expected):
        call(layer)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1], [2], [3]], "expected 2 rows for each sample, got 3"),
        ([[1, 2, 3], [2]], "at most max_nnz = 2 ids in a row, got 3 in row 0"),
        ([[1, 2], [3, 4]], "at most max_feature_num = 3 keys in a sample, got 4 in sample 0"),
    ],
)
def test_wrong_slots_are_refused(started, rows, expected):
    layer = sok.DistributedEmbedding("sum", 8, 2, slot_num=2, max_nnz=2, max_feature_num=3)

    with pytest.raises(ValueError, match=expected):
        layer(tf.ragged.constant(rows, tf.int64))


def test_a_key_beyond_a_layer_without_a_hash_table_is_refused(started):
    layer = sok.All2AllDenseEmbedding(4, 2, 1, 1, use_hashtable=False)

    with pytest.raises(IndexError, match="expected ids from 0 to 3, got 4"):
        layer(tf.constant([[4]]))


@pytest.mark.parametrize(
    ("named", "error", "expected"),
    [
        ({"max_vocabulary_size_per_gpu": 0}, ValueError, "max_vocabulary_size_per_gpu of at least 1"),
        ({"slot_num": 1.5}, TypeError, "slot_num as an int"),
        ({"key_dtype": tf.string}, TypeError, "the key_dtype tf.int64 or tf.int32"),
        ({"embedding_initializer": "twos"}, TypeError, "an initializer of Keras"),
    ],
)
def test_wrong_arguments_are_refused(started, named, error, expected):
    arguments = {"max_vocabulary_size_per_gpu": 4, "embedding_vec_size": 2, "slot_num": 1, "nnz_per_slot": 1, **named}

    with pytest.raises(error, match=expected):
        sok.All2AllDenseEmbedding(**arguments)


def test_the_rows_of_a_layer_are_dumped_and_loaded(trained, tmp_path):
    sok.dump(tmp_path / "tables", trained.get_layer("items").embedding_variable)
    other = two_towers()
    other.layers[-1].set_weights(trained.layers[-1].get_weights())

    sok.load(tmp_path / "tables", other.get_layer("items").embedding_variable)

    keys = data()[0]
    np.testing.assert_array_equal(other.predict(keys, verbose=0), trained.predict(keys, verbose=0))
