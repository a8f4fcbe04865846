"""``from_keras``: versions answer as the model does, also to raw features; refusals name the layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hotrow
from serving.errors import ConfigError
from serving.importers import from_keras
from training.tf import sok


def films():
    """A model of raw features: strings, a hash, a number and ids."""
    user = keras.Input((1,), dtype="string", name="user")
    genre = keras.Input((1,), dtype="string", name="genre")
    price = keras.Input((1,), name="price")
    film = keras.Input((1,), dtype="int64", name="film")
    vectors = [
        keras.layers.Embedding(4, 8, name="users")(keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])(user)),
        keras.layers.Embedding(16, 4, name="genres")(keras.layers.Hashing(16)(genre)),
        keras.layers.Embedding(50, 6, name="films")(film),
    ]
    numbers = keras.layers.Normalization(mean=3.0, variance=4.0)(price)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(one) for one in vectors] + [numbers])
    hidden = keras.layers.Dense(16, activation="relu")(joined)
    inputs = {"user": user, "genre": genre, "price": price, "film": film}
    return keras.Model(inputs, keras.layers.Dense(1)(hidden), name="films_model")


def example(rows):
    return {name: tf.constant([[row[name]] for row in rows]) for name in ("user", "genre", "price", "film")}


@pytest.mark.filterwarnings("ignore")  # of tf2onnx, about its own code
def test_a_version_answers_raw_features_as_the_model_does(tmp_path):
    keras.utils.set_random_seed(1)
    model = films()
    rows = [
        {"user": "ann", "genre": "drama", "price": 1.5, "film": 7},
        {"user": "unknown", "genre": "comedy", "price": -2.0, "film": 49},
        {"user": "eve", "genre": "日本", "price": 0.0, "film": 0},
    ]

    imported = from_keras(model, example(rows), tmp_path, "films", logits=True)

    expected = tf.sigmoid(model(example(rows))).numpy()
    with hotrow.load_model(imported.path.parent) as session:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        np.testing.assert_allclose(session.predict(columns), expected, atol=1e-6)
    assert (imported.comparison.samples, imported.comparison.defaulted_keys) == (64, 0)
    assert set(imported.names) == {"user", "genre", "price", "film"}


@pytest.mark.filterwarnings("ignore")
def test_the_rows_of_our_layer_are_served(started, tmp_path):
    inputs = keras.Input((2,), dtype="int64", name="items")
    vectors = sok.All2AllDenseEmbedding(100, 8, slot_num=2, nnz_per_slot=1, name="items_table")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(vectors)))
    model.compile("adam", "binary_crossentropy")
    keys = np.random.default_rng(0).integers(0, 40, (64, 2)) * 10**6
    model.fit(keys, keys[:, :1] % 3 == 0, verbose=0)
    keys[0] = 5  # an unknown key has a vector of zeros in both

    imported = from_keras(model, keys, tmp_path, "items")

    columns = {"items[0]": keys[:, 0], "items[1]": keys[:, 1]}
    with hotrow.load_model(imported.path.parent) as session:
        np.testing.assert_allclose(session.predict(columns), model.predict(keys, verbose=0), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_one_layer_may_read_several_inputs(tmp_path):
    left, right = (keras.Input((), dtype="int32", name=name) for name in ("left", "right"))
    numbers = keras.Input((3,), name="numbers")
    shared = keras.layers.Embedding(20, 4, name="words")
    joined = keras.layers.Concatenate()([shared(left) - shared(right), numbers])
    model = keras.Model([left, right, numbers], keras.layers.Dense(2, activation="softmax")(joined))

    given = [np.array([1, 2]), np.array([3, 4]), np.zeros((2, 3))]
    imported = from_keras(model, given, tmp_path, "words")

    assert imported.slots == (("words", "left"), ("words", "right"))
    assert imported.names[:3] == ("numbers[0]", "numbers[1]", "numbers[2]")


def behind(vectors):
    return keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(vectors))


def model_of(make, shape=(2,), dtype="int64"):
    inputs = keras.Input(shape, dtype=dtype, name="items")
    return keras.Model(inputs, make(inputs))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(
            lambda: model_of(lambda x: behind(keras.layers.Embedding(9, 2, mask_zero=True, name="e")(x))),
            r"layer 'e' \(Embedding\): mask_zero=True",
            id="a mask",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(keras.layers.Embedding(9, 2, name="e")(x + 1))),
            r"layer 'e' \(Embedding\): expected keys of an input or of StringLookup.*got those of 'add'",
            id="keys that are computed",
        ),
        pytest.param(
            lambda: model_of(
                lambda x: keras.layers.Dense(1)(
                    keras.layers.GlobalMaxPooling1D()(keras.layers.Embedding(9, 2, name="e")(x))
                ),
                shape=(None,),
            ),
            r"layer 'e' \(Embedding\): expected a fixed number of values in a sample",
            id="any number of keys",
        ),
        pytest.param(
            lambda: model_of(
                lambda x: keras.layers.Concatenate()(
                    [behind(keras.layers.Embedding(9, 2)(x)), keras.layers.CategoryEncoding(9, name="c")(x)]
                )
            ),
            r"layer 'c' \(CategoryEncoding\): it reads 'items', which only Embedding",
            id="another reader of keys",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(keras.layers.Dense(2)(x)), dtype="float32"),
            "expected a layer of the kinds Embedding, All2AllDenseEmbedding, found none",
            id="no embedding",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(sok.All2AllDenseEmbedding(9, 2, 2, 1, name="ours")(x))),
            r"layer 'ours' \(All2AllDenseEmbedding\): it has no rows yet",
            id="no rows",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_be_imported_is_refused(started, tmp_path, make, expected):
    keras.utils.clear_session()
    model = make()

    with pytest.raises(ConfigError, match=expected):
        from_keras(model, np.zeros((2, 2)), tmp_path, "model")


def test_other_models_are_refused(tmp_path):
    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    for model, expected in (
        (Own(), "expected a functional or a sequential model"),
        (keras.layers.Dense(1), r"expected a keras\.Model, got Dense"),
    ):
        with pytest.raises(ConfigError, match=expected):
            from_keras(model, np.zeros((2, 2)), tmp_path, "model")
