"""``from_keras``: versions answer as the model does, also to raw features; refusals name the layer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hotrow
from serving.errors import ConfigError, ModelFileError, RequestError
from serving.importers import from_keras
from training.tf import sok

LEFT = {"counts": [0.5, 2.0, -1.0], "place": [52.1, 4.9]}
RIGHT = {"counts": [7.0, 0.0, 3.5], "place": [-33.9, 18.4]}


def films():
    """A model of raw features: strings, a hash, a number and ids."""
    user = keras.Input((1,), dtype="string", name="user")
    genre = keras.Input((1,), dtype="string", name="genre")
    price, hour = keras.Input((1,), name="price"), keras.Input((1,), name="hour")
    film = keras.Input((1,), dtype="int64", name="film")
    seen = keras.Input((2,), dtype="int64", name="seen")
    of_films = keras.layers.Embedding(50, 6, name="films")
    vectors = [
        keras.layers.Embedding(4, 8, name="users")(keras.layers.StringLookup(vocabulary=["ann", "bob", "eve"])(user)),
        keras.layers.Embedding(16, 4, name="genres")(keras.layers.Hashing(16)(genre)),
        keras.layers.Embedding(3, 2, name="hours")(keras.layers.Discretization([8.0, 18.0])(hour)),
        of_films(film),
        of_films(seen),
    ]
    counts, place = keras.Input((3,), name="counts"), keras.Input((2,), name="place")
    numbers = [
        keras.layers.Normalization(mean=3.0, variance=4.0)(price),
        keras.layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[4.0, 1.0, 0.25])(counts),
        place,
    ]
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(vector) for vector in vectors] + numbers)
    hidden = keras.layers.Dense(16, activation="relu")(joined)
    inputs = {"user": user, "genre": genre, "price": price, "hour": hour, "film": film, "seen": seen}
    inputs |= {"counts": counts, "place": place}
    return keras.Model(inputs, keras.layers.Dense(1)(hidden), name="films_model")


def example(rows):
    one = {name: tf.constant([[row[name]] for row in rows]) for name in ("user", "genre", "price", "hour", "film")}
    return {**one, **{name: tf.constant([row[name] for row in rows]) for name in ("seen", "counts", "place")}}


def test_a_version_answers_raw_features_as_the_model_does(tmp_path):
    keras.utils.set_random_seed(1)
    model = films()
    rows = [
        {"user": "ann", "genre": "drama", "price": 1.5, "hour": 8.0, "film": 7, "seen": [1, 2]} | LEFT,
        {"user": "unknown", "genre": "comedy", "price": -2.0, "hour": 3.5, "film": 49, "seen": [3, 3]} | LEFT,
        {"user": "eve", "genre": "日本", "price": 0.0, "hour": 23.0, "film": 0, "seen": [0, 9]} | RIGHT,
    ]

    imported = from_keras(model, example(rows), tmp_path, "films", logits=True)

    expected = tf.sigmoid(model(example(rows))).numpy()
    with hotrow.load_model(imported.path.parent) as session:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        for name, count in (("counts", 3), ("place", 2)):  # each number is a feature
            numbers = zip(*columns.pop(name), strict=True)
            columns |= dict(zip([f"{name}[{place}]" for place in range(count)], map(list, numbers), strict=True))
        np.testing.assert_allclose(session.predict(columns), expected, atol=1e-6)
    assert (imported.comparison.samples, imported.comparison.defaulted_keys) == (64, 0)
    assert set(imported.names) == set(columns)


def test_an_embedding_without_a_mask_needs_all_its_keys(tmp_path):
    words = keras.Input((3,), dtype="string", name="words")
    keys = keras.layers.StringLookup(vocabulary=["a", "b"])(words)
    model = keras.Model(words, behind(keras.layers.Embedding(3, 2)(keys)))
    given = tf.constant([["a", "b", "other"], ["a", "", "a"]])

    version = from_keras(model, given, tmp_path, "words").path

    with hotrow.load_model(version) as session:
        answers = session.predict({"words": [["a", "b", "other"], ["a", "", "a"]]})
        for few, came in ((["a", "b"], "2 keys"), ([], "1 key")):  # a list without values has that of a missing value
            with pytest.raises(RequestError, match=f"sample 1 has {came} in 'words', but the network needs exactly 3"):
                session.predict({"words": [["a", "b", "a"], few]})
    np.testing.assert_allclose(answers, model(given), atol=1e-6)


def test_the_rows_of_our_layer_are_served(started, tmp_path):
    inputs = keras.Input((2,), dtype="int64", name="items")
    vectors = sok.All2AllDenseEmbedding(100, 8, slot_num=2, nnz_per_slot=1, name="items_table")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(vectors)))
    model.compile("adam", "binary_crossentropy")
    keys = np.random.default_rng(0).integers(0, 40, (64, 2)) * 10**6
    model.fit(keys, keys[:, :1] % 3 == 0, verbose=0)
    keys[0] = 5  # an unknown key has a vector of zeros in both

    imported = from_keras(model, keys, tmp_path, "items")

    with hotrow.load_model(imported.path.parent) as session:
        np.testing.assert_allclose(session.predict({"items": keys.tolist()}), model.predict(keys, verbose=0), atol=1e-6)


def test_one_layer_may_read_several_inputs(tmp_path):
    left, right = (keras.Input((), dtype="int32", name=name) for name in ("left", "right"))
    numbers = keras.Input((3,), name="numbers")
    shared = keras.layers.Embedding(20, 4, name="words")
    joined = keras.layers.Concatenate()([shared(left) - shared(right), numbers])
    answer = keras.layers.Dense(2, activation="softmax")(joined)
    model = keras.Model([left, right, numbers], {"answer": answer})

    given = [np.array([1, 2]), np.array([3, 4]), np.zeros((2, 3))]
    imported = from_keras(model, given, tmp_path, "words")

    assert imported.slots == (("words", "left"), ("words", "right"))
    assert imported.names == ("left", "right", "numbers[0]", "numbers[1]", "numbers[2]")


def genres_of_films():
    """Lists of strings that end with empty texts; an average and attention leave them out."""
    genres, film = keras.Input((4,), dtype="string", name="genres"), keras.Input((), dtype="int64", name="film")
    keys = keras.layers.StringLookup(vocabulary=["drama", "comedy", "war"], mask_token="")(genres)
    rows = keras.layers.Embedding(5, 4, mask_zero=True, name="genre")(keys)
    target = keras.ops.expand_dims(keras.layers.Embedding(9, 4, name="films")(film), 1)
    read = [
        keras.layers.GlobalAveragePooling1D()(rows),
        keras.layers.Flatten()(keras.layers.Attention()([target, rows])),
    ]
    inputs = {"genres": genres, "film": film}
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(read)))


def clicks():
    """Ids behind the padding; a GRU leaves it out."""
    seen = keras.Input((4,), dtype="int64", name="seen")
    rows = keras.layers.Embedding(9, 3, mask_zero=True, name="films")(seen)
    return keras.Model(seen, keras.layers.Dense(1, activation="sigmoid")(keras.layers.GRU(2, unroll=True)(rows)))


@pytest.mark.parametrize(
    ("make", "padded", "columns"),
    [
        pytest.param(
            genres_of_films,
            {"genres": tf.constant([["war", "drama", "", ""], ["other", "", "", ""]]), "film": tf.constant([3, 4])},
            {"genres": [["war", "drama"], ["other"]], "film": [3, 4]},
            id="strings",
        ),
        pytest.param(clicks, np.array([[0, 0, 5, 1], [2, 3, 2, 8]]), {"seen": [[0, 5, 1], [2, 3, 2, 8]]}, id="ids"),
    ],
)
def test_requests_need_no_padding_of_masked_sequences(tmp_path, make, padded, columns):
    keras.utils.set_random_seed(1)
    model = make()

    imported = from_keras(model, padded, tmp_path, "sequences")

    assert set(imported.names) == set(columns)
    with hotrow.load_model(imported.path.parent) as session:
        np.testing.assert_allclose(session.predict(columns), model(padded), atol=1e-6)


def test_the_layers_of_inner_models_are_found(tmp_path):
    user, film = (keras.Input((1,), dtype="int64", name=name) for name in ("user", "film"))
    inner = keras.Sequential([keras.layers.Dense(4, activation="relu")], name="inner")
    layers = [keras.layers.Embedding(9, 3, name="users"), keras.layers.Flatten(), inner]
    users = keras.Sequential(layers, name="user_tower")
    films = keras.Model(
        film, keras.layers.Flatten()(keras.layers.Embedding(7, 4, name="films")(film)), name="films_tower"
    )
    model = keras.Model([user, film], keras.layers.Dense(1, activation="sigmoid")(users(user) * films(film)))

    given = [np.array([[1], [8]]), np.array([[2], [6]])]
    imported = from_keras(model, given, tmp_path, "towers")

    with hotrow.load_model(imported.path.parent) as session:
        np.testing.assert_allclose(session.predict({"user": [1, 8], "film": [2, 6]}), model(given), atol=1e-6)


def test_a_sequential_model_whose_inputs_keras_made_floats_has_ids(tmp_path):
    layers = [keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])
    ids = np.array([[1, 8, 0], [3, 0, 0]])
    model.compile("adam", "binary_crossentropy")
    model.fit(ids, np.ones((2, 1)), verbose=0)

    imported = from_keras(model, ids, tmp_path, "ids")

    [name] = imported.names
    with hotrow.load_model(imported.path.parent) as session:
        np.testing.assert_allclose(session.predict({name: [[1, 8], [3]]}), model(ids), atol=1e-6)


def test_two_tables_may_read_one_list_of_ids(tmp_path):
    ids = keras.Input((2,), dtype="int64", name="ids")
    model = keras.Model(ids, behind(keras.layers.Embedding(9, 1)(ids) * keras.layers.Embedding(9, 4)(ids)))
    given = np.array([[1, 2], [8, 0]])

    imported = from_keras(model, given, tmp_path, "two")

    with hotrow.load_model(imported.path.parent) as session:
        answers = session.predict({"ids[0]": given[:, 0], "ids[1]": given[:, 1]})
    np.testing.assert_allclose(answers, model(given), atol=1e-6)


def test_two_tables_may_mask_one_list_and_share_smaller_tables(tmp_path):
    seen, item = keras.Input((3,), dtype="int64", name="seen"), keras.Input((1,), dtype="int64", name="item")
    items, pool = keras.layers.Embedding(9, 3, mask_zero=True), keras.layers.GlobalAveragePooling1D()
    others = keras.layers.Embedding(6, 2, mask_zero=True)
    parts = [pool(items(seen)), pool(others(seen)), pool(items(item))]
    for is_key in (keras.ops.equal(seen, 0), seen > 0):
        parts.append(keras.ops.sum(keras.ops.cast(is_key, "float32") * np.float32([1, 2, 3]), axis=1, keepdims=True))
    model = keras.Model([seen, item], behind(keras.layers.Concatenate()(parts)))
    given = [np.array([[1, 5, 0], [2, 0, 0]]), np.array([[8], [3]])]

    version = from_keras(model, given, tmp_path, "masks").path

    with hotrow.load_model(version) as session:
        answers = session.predict({"seen": [[1, 5], [2]], "item": [8, 3]})
        with pytest.raises(RequestError, match="seen of sample 0: value 0: expected a key from 0 to 5, got 8"):
            session.predict({"seen": [[8]], "item": [8]})
    np.testing.assert_allclose(answers, model(given), atol=1e-6)


def test_outputs_have_names_and_kinds(tmp_path):
    film = keras.Input((), dtype="int64", name="film")
    rows = keras.layers.Embedding(9, 4)(film)
    rating = keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(3.5))(rows)
    outputs = {"vector": rows, "click": keras.layers.Dense(1)(rows), "rating": rating, "other": rating}
    kinds = {"rating": "score", "vector": "vector", "click": "probability"}  # without a kind, an output is one
    model, ids = keras.Model(film, outputs), np.array([1, 8])

    stated = {"rating": "score", "vector": "vector", "other": "omit"}
    imported = from_keras(model, ids, tmp_path, "several", logits=True, outputs=stated)

    answers = model(ids)
    answers["click"] = tf.sigmoid(answers["click"])
    with hotrow.load_model(imported.path.parent) as session:
        found = session.predict({"film": ids})
    assert list(found) == list(kinds)
    for name in kinds:
        np.testing.assert_allclose(found[name], answers[name], atol=1e-6)


def test_outputs_in_a_list_have_the_names_of_their_layers_in_any_order(tmp_path):
    film = keras.Input((), dtype="int64", name="film")
    rows = keras.layers.Embedding(9, 4)(film)
    model = keras.Model(film, [keras.layers.Dense(1, name=name)(rows) for name in ("rating", "price")])

    kinds = {"price": "score", "rating": "score"}
    imported = from_keras(model, np.array([1, 8]), tmp_path, "list", outputs=kinds)
    with pytest.raises(ConfigError, match="it has no output 'prices'; did you mean 'price'"):
        from_keras(model, np.array([1, 8]), tmp_path, "other", outputs={"prices": "score", "rating": "score"})

    rating, price = model(np.array([1, 8]))
    with hotrow.load_model(imported.path.parent) as session:
        found = session.predict({"film": [1, 8]})
    np.testing.assert_allclose(found["rating"], rating, atol=1e-6)
    np.testing.assert_allclose(found["price"], price, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of Keras, about the model
def test_a_dictionary_of_inputs_with_other_names_is_refused(tmp_path):
    left, right = (keras.Input((), dtype="int64", name=name) for name in ("left", "right"))
    rows = [keras.layers.Embedding(9, 2)(one) for one in (left, right)]
    model = keras.Model({"right": left, "left": right}, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))

    with pytest.raises(ConfigError, match=r"has the input '(left|right)' under the key '(left|right)'; give"):
        from_keras(model, {"left": np.array([1]), "right": np.array([2])}, tmp_path, "model")


def behind(vectors):
    return keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(vectors))


def masked(keys):
    return keras.layers.Embedding(9, 2, mask_zero=True, name="e")(keys)


class StringLookup(keras.layers.StringLookup):
    """Computes something else, under the name of Keras's layer."""

    def call(self, inputs):
        return super().call(tf.strings.lower(inputs))


def model_of(make, shape=(2,), dtype="int64"):
    inputs = keras.Input(shape, dtype=dtype, name="items")
    return keras.Model(inputs, make(inputs))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(
            lambda: model_of(lambda x: behind(masked(x)), shape=(2, 3)),
            r"layer 'e' \(Embedding\): expected keys \[B, L\], because key 0 is masked, got the shape \(None, 2, 3\)",
            id="a mask of many sequences",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(masked(keras.layers.Hashing(9, name="h")(x)))),
            r"layer 'e' \(Embedding\): it masks key 0, which 'h' gives to values",
            id="a mask of a value",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(masked(x)), shape=(3,)),
            r"layer 'e' \(Embedding\): expected an example whose key 0, which is masked, is only padding at one side",
            id="a key 0 between others",
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
            r"layer 'e' \(Embedding\): expected a fixed number of values.* keras.Model\(inputs, model\(inputs\)\)",
            id="any number of keys",
        ),
        pytest.param(
            lambda: model_of(
                lambda x: keras.layers.Concatenate()(
                    [behind(keras.layers.Embedding(9, 2)(x)), keras.layers.CategoryEncoding(9, name="c")(x)]
                )
            ),
            r"layer 'c' \(CategoryEncoding\): it reads 'items', which only Embedding.*; Embedding\(n, 1\) and Flatten",
            id="another reader of keys",
        ),
        pytest.param(
            lambda: model_of(
                lambda x: keras.layers.Concatenate()(
                    [
                        behind(keras.layers.Embedding(9, 2)(x)),
                        keras.layers.IntegerLookup(vocabulary=[1], output_mode="multi_hot", name="m")(x),
                    ]
                )
            ),
            r"layer 'm' \(IntegerLookup\): output_mode='multi_hot': expected 'int', and an Embedding behind it",
            id="a multi-hot encoding",
        ),
        pytest.param(
            lambda: keras.Model(
                [keras.Input((2,), name="unread"), items := keras.Input((2,), dtype="int64")],
                behind(keras.layers.Embedding(9, 2)(items)),
            ),
            r"layer 'unread' \(InputLayer\): no layer reads it",
            id="an input without readers",
        ),
        pytest.param(
            lambda: model_of(
                lambda x: behind(keras.layers.Embedding(9, 2)(keras.layers.Discretization([1.0], name="d")(x))) + x,
                dtype="float32",
            ),
            r"layer 'd' \(Discretization\): 'add' \(Add\) also reads its input 'items'; give each layer an",
            id="a number that is also a key",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(masked(keras.layers.IntegerLookup(vocabulary=[5], mask_token=0)(x)))),
            r"layer 'e' \(Embedding\): it masks key 0.*expected a StringLookup with mask_token='', which",
            id="an integer that is masked",
        ),
        pytest.param(
            lambda: model_of(
                lambda x: behind(
                    keras.layers.Embedding(9, 2)(keras.layers.IntegerLookup(vocabulary=[5], num_oov_indices=2)(x))
                )
            ),
            "num_oov_indices=2: expected 0 or 1; a StringLookup allows other values, and also reads integers as texts",
            id="two keys of unknown integers",
        ),
        pytest.param(
            lambda: model_of(
                lambda x: behind(
                    keras.layers.Embedding(9, 2)(keras.layers.StringLookup(vocabulary=["a"], invert=True)(x))
                )
            ),
            "invert=True: expected a layer that makes keys of values",
            id="texts of keys",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(keras.ops.erfinv(keras.ops.tanh(keras.layers.Embedding(9, 2)(x))))),
            "ONNX has no operation Erfinv, which a layer behind the embeddings needs: .*; use other operations there",
            id="an operation that ONNX does not have",
        ),
        pytest.param(
            lambda: model_of(
                lambda x: behind(
                    keras.layers.Embedding(9, 2, name="e")(StringLookup(vocabulary=["1.0"], name="own")(x))
                ),
                dtype="string",
            ),
            r"layer 'e' \(Embedding\): expected keys of an input or of.*, got those of 'own'",
            id="a subclass of a lookup",
        ),
        pytest.param(
            lambda: keras.Model(
                items := keras.Input((2,), dtype="int64", name="keys"), behind(keras.layers.Embedding(9, 2)(items))
            ),
            r"layer 'keys' \(InputLayer\): requests use this name for something else; give the input another name",
            id="a name that requests use",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(masked(x)) + behind(keras.layers.Embedding(9, 3, name="other")(x))),
            r"layer 'e' \(Embedding\): it masks key 0, but 'other' reads the same keys and does not; set mask_zero",
            id="a mask for one of two tables",
        ),
        pytest.param(
            lambda: model_of(lambda x: {"a": {"b": behind(keras.layers.Embedding(9, 2)(x))}}),
            "outputs: 'a' is a dict, expected a tensor; return one flat dictionary or list",
            id="nested outputs",
        ),
        pytest.param(
            lambda: model_of(keras.layers.Embedding(9, 2)),
            r"outputs: 'OUTPUT0' has the shape \(None, 2, 2\), expected \[B\] or \[B, L\]; add a Flatten, or omit it",
            id="an output of matrices",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(keras.layers.Dense(2)(x)), dtype="float32"),
            "expected a layer of the kinds Embedding, All2AllDenseEmbedding, found none",
            id="no embedding",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(keras.layers.Embedding(9, 2, dtype="mixed_bfloat16", name="e")(x))),
            r"layer 'e' \(Embedding\): it computes in bfloat16, which ONNX Runtime does not; load the model with",
            id="bfloat16",
        ),
        pytest.param(
            lambda: model_of(lambda x: behind(sok.All2AllDenseEmbedding(9, 2, 2, 1, name="ours")(x))),
            r"layer 'ours' \(All2AllDenseEmbedding\): it has no rows yet",
            id="no rows",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Keras, about the model
def test_a_model_that_cannot_be_imported_is_refused(started, tmp_path, make, expected):
    keras.utils.clear_session()
    model = make()
    example = np.ones((2, *model.inputs[0].shape[1:]) if None not in model.inputs[0].shape[1:] else (2, 2))
    example[0, 1] = 0

    with pytest.raises(ConfigError, match=expected):
        from_keras(model, [example] * len(model.inputs), tmp_path, "model")


def test_a_table_has_the_keys_of_one_layer(tmp_path):
    left, right = (keras.Input((1,), dtype="string", name=name) for name in ("left", "right"))
    shared = keras.layers.Embedding(4, 2, name="e")
    keys = [keras.layers.StringLookup(vocabulary=[word], name=word)(x) for word, x in (("a", left), ("b", right))]
    model = keras.Model([left, right], behind(shared(keys[0]) + shared(keys[1])))

    expected = "it reads keys of 'a' and of 'b', which stand for different values; let one layer make all of its keys"
    with pytest.raises(ConfigError, match=expected):
        from_keras(model, [[["a"]], [["b"]]], tmp_path, "model")


def test_answers_to_the_example_are_compared_with_its_preprocessing(tmp_path):
    item, price = keras.Input((), dtype="int64", name="item"), keras.Input((1,), name="price")
    normalization = keras.layers.Normalization()
    normalization.adapt(np.array([[1.0], [2.0]]))
    rows = keras.layers.Embedding(9, 2)(item)
    model = keras.Model([item, price], behind(keras.layers.Concatenate()([rows, normalization(price)])))
    normalization.adapt_mean.assign([7.0])  # is saved, but has no effect before the model is loaded

    with pytest.raises(ModelFileError, match="the example: sample 0: expected"):
        from_keras(model, [[1], [[5.0]]], tmp_path, "model")


@pytest.mark.filterwarnings("ignore")  # of Keras, about the model
def test_full_sequences_have_the_padding_of_the_others(tmp_path):
    seen, item = keras.Input((4,), dtype="int64", name="seen"), keras.Input((1,), dtype="int64", name="item")
    table = keras.layers.Embedding(9, 3, mask_zero=True)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(table(seen)), keras.layers.Flatten()(table(item))])
    model = keras.Model([seen, item], behind(joined))
    given = [np.array([[0, 0, 5, 1]]), np.array([[3]])]

    version = from_keras(model, given, tmp_path, "shared").path

    with hotrow.load_model(version) as session:
        np.testing.assert_allclose(session.predict({"seen": [[5, 1]], "item": [3]}), model(given), atol=1e-6)


TEXTS, IDS = [["a"], ["b"]], [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"text": TEXTS, "ids": np.zeros((2, 3))}, r"'ids': expected the shape \[B, 2\], got \[2, 3\]"),
        ({"text": IDS, "ids": IDS}, "'text': expected strings, got integers"),
        ({"text": TEXTS, "ids": [["1", "2"]] * 2}, "'ids': expected integers, got strings"),
        ({"text": TEXTS, "ids": [[1, 2], [0.5, 1]]}, "'ids': expected integers of int64, got 0.5"),
        ({"text": TEXTS, "ids": [[1, 2], [3]]}, "'ids': expected integers in lists of equal length, got list"),
        ({"text": TEXTS, "ids": IDS[:1]}, "expected as many samples for each input, got 'ids' 1, 'text' 2"),
        ({"text": np.zeros((0, 1), "U1"), "ids": np.zeros((0, 2))}, "expected a sample, got none"),
        ({"text": TEXTS}, "expected a value for the input 'ids', got 'text'"),
        ({"text": TEXTS, "id": IDS}, "the model has no input 'id'; did you mean 'ids'?"),
        ([TEXTS, IDS], "expected a dictionary of the inputs 'ids', 'text', got 2 values"),
        (
            {"text": TEXTS, "ids": [[1, 2], [3, 99]]},
            r"the model does not accept it: indices\[1,1\] = 99 is not in \[0, 9\)",
        ),
    ],
)
def test_an_example_that_the_model_does_not_take_is_refused(tmp_path, example, expected):
    text, ids = keras.Input((1,), dtype="string", name="text"), keras.Input((2,), dtype="int64", name="ids")
    rows = [
        keras.layers.Embedding(3, 2)(keras.layers.StringLookup(vocabulary=["a"])(text)),
        keras.layers.Embedding(9, 2)(ids),
    ]
    model = keras.Model({"text": text, "ids": ids}, behind(keras.layers.Concatenate(axis=1)(rows)))

    with pytest.raises(ConfigError, match=f"example: {expected}"):
        from_keras(model, example, tmp_path, "model")


def test_an_example_without_finite_answers_and_a_wrong_tolerance_are_refused(tmp_path):
    item, price = keras.Input((), dtype="int64", name="item"), keras.Input((1,), name="price")
    model = keras.Model([item, price], behind(keras.layers.Concatenate()([keras.layers.Embedding(9, 2)(item), price])))

    with pytest.raises(
        ConfigError, match="a sample whose answers are finite, got none; these inputs have NaN: 'price'"
    ):
        from_keras(model, [[1, 2], [[np.nan], [np.nan]]], tmp_path, "model")
    for tolerance in (-1, np.nan, "1"):
        with pytest.raises(ConfigError, match="tolerance: expected 0 to 1, got "):
            from_keras(model, [[1], [[5.0]]], tmp_path, "model", tolerance=tolerance)


def test_the_network_has_constants_and_numbers_that_a_normalization_and_others_read(tmp_path):
    item, price = keras.Input((), dtype="int64", name="item"), keras.Input((), name="price")
    numbers = keras.ops.expand_dims(price, -1)
    scale = tf.constant([[3.0]])
    parts = [
        keras.layers.Normalization(mean=2.0, variance=9.0)(price[:, None]),
        keras.layers.Lambda(lambda x: x * scale)(numbers),
        keras.ops.log1p(keras.ops.abs(numbers)) + keras.ops.expm1(-keras.ops.abs(numbers)),
        keras.layers.Embedding(9, 2)(item),
    ]
    model = keras.Model([item, price], behind(keras.layers.Concatenate()(parts)))
    given = [np.array([1, 8]), np.array([0.5, -2.0])]

    version = from_keras(model, given, tmp_path, "constants").path

    with hotrow.load_model(version) as session:
        answers = session.predict({"item": [1, 8], "price": [0.5, -2.0]})
        with pytest.raises(RequestError, match="item of sample 0: expected a key from 0 to 8, got 9"):
            session.predict({"item": [9], "price": [0.5]})
    np.testing.assert_allclose(answers, model(list(map(tf.constant, given))), atol=1e-6)


def test_other_models_are_refused(tmp_path):
    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    class Twice(keras.Model):
        def call(self, inputs):
            return 2 * super().call(inputs)

    one = keras.Input((2,), dtype="int64")
    for model, expected in (
        (Twice(one, behind(keras.layers.Embedding(9, 2)(one))), "a model overrides call"),
        (
            Own(),
            r"got Own, whose inputs.*; for a subclass, keras.Model\(inputs, model.call\(inputs\)\) is a functional",
        ),
        (keras.Model(one, Own()(one)), r"layer 'own.*' \(Own\): it reads .*; for a subclass, keras.Model\(inputs"),
        (keras.Model(one, [one, one + 1]), "returns 2 values without names; name them in order: outputs="),
        (keras.layers.Dense(1), r"expected a keras\.Model, got Dense"),
    ):
        with pytest.raises(ConfigError, match=expected):
            from_keras(model, np.zeros((2, 2)), tmp_path, "model")


@pytest.mark.filterwarnings("ignore")  # of Keras, about the model
def test_a_layer_may_use_the_masks_of_a_list_and_needs_no_configuration(tmp_path):
    class Attention(keras.layers.Layer):
        def call(self, tensors, mask=None):
            target, rows = tensors
            scores = keras.ops.where(mask[1], keras.ops.sum(target * rows, axis=-1), -1e9)
            return keras.ops.sum(keras.ops.softmax(scores)[..., None] * rows, axis=1)

        def compute_output_shape(self, shapes):
            return (shapes[0][0], shapes[0][2])

        def get_config(self):
            return {}

    item, seen = keras.Input((1,), dtype="string", name="item"), keras.Input((3,), dtype="int64", name="seen")
    target = keras.layers.Embedding(3, 4)(keras.layers.StringLookup(vocabulary=["a", "b"])(item))
    rows = keras.layers.Embedding(9, 4, mask_zero=True, embeddings_initializer="normal")(seen)
    model = keras.Model([item, seen], behind(Attention()([target, rows])))
    given = [tf.constant([["a"], ["b"]]), tf.constant([[1, 2, 0], [5, 0, 0]])]

    version = from_keras(model, given, tmp_path, "attention").path

    with hotrow.load_model(version) as session:
        answers = session.predict({"item": ["a", "b"], "seen": [[1, 2], [5]]})
    np.testing.assert_allclose(answers, model(given), atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_the_global_dtype_does_not_change_a_float32_model(tmp_path, policy):
    model = model_of(lambda x: behind(keras.layers.Embedding(9, 2)(x)))
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx(policy if policy == "float64" else "float32")
    try:
        version = from_keras(model, [[1, 2], [3, 4]], tmp_path, "model").path
    finally:
        keras.config.set_dtype_policy(before)
        keras.config.set_floatx("float32")

    with hotrow.load_model(version) as session:
        np.testing.assert_allclose(session.predict({"items": [[1, 2]]}), model(tf.constant([[1, 2]])), atol=1e-6)


def test_an_error_of_an_export_is_that_of_the_layer(tmp_path):
    class OnlyEager(keras.layers.Layer):
        def call(self, vectors):
            if not tf.executing_eagerly():
                raise RuntimeError("no graph, please")
            return vectors

        def compute_output_shape(self, shape):
            return shape

    model = model_of(lambda x: behind(OnlyEager()(keras.layers.Embedding(9, 2)(x))))

    with pytest.raises(ConfigError, match=r"behind the embeddings to ONNX: (RuntimeError: )?no graph, please$"):
        from_keras(model, [[1, 2], [3, 4]], tmp_path, "model")
