"""``from_keras`` with the backends of Keras other than TensorFlow, which ``tests/tensorflow`` has."""

import os

import numpy as np
import pytest

import hotrow
from serving.errors import ConfigError
from serving.importers import from_keras

os.environ["KERAS_BACKEND"] = "torch"
pytestmark = pytest.mark.usefixtures("exporter")


@pytest.fixture
def model():
    """A model with a sequence and a number."""
    import keras

    keras.utils.set_random_seed(1)
    seen, price = keras.Input((4,), dtype="int64", name="seen"), keras.Input((1,), name="price")
    rows = keras.layers.GRU(3)(keras.layers.Embedding(9, 3, mask_zero=True, name="films")(seen))
    joined = keras.layers.Concatenate()([rows, keras.layers.Normalization(mean=3.0, variance=4.0)(price)])
    outputs = {"rows": rows, "click": keras.layers.Dense(1, activation="sigmoid")(joined)}
    return keras.Model({"seen": seen, "price": price}, outputs)


@pytest.mark.filterwarnings("ignore")  # of the exporter, about its own code
def test_a_model_of_the_backend_torch_is_served(model, tmp_path):
    example = {"seen": np.array([[1, 2, 0, 0], [3, 0, 0, 0]]), "price": np.array([[1.0], [5.0]], np.float32)}

    imported = from_keras(model, example, tmp_path, "films", outputs={"click": "probability", "rows": "vector"})

    with hotrow.load_model(imported.path.parent) as session:
        answers = session.predict({"seen": [[1, 2, 0], [3]], "price": [1.0, 5.0]})
    for name, expected in model(example).items():
        np.testing.assert_allclose(answers[name], expected.detach().numpy(), atol=1e-6)


def test_a_model_of_the_backend_jax_needs_its_exporter(model, tmp_path, monkeypatch):
    import keras

    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")

    expected = "Keras exports models of the backend jax with jax2onnx.*; or load the saved model with another backend"
    with pytest.raises(ConfigError, match=expected):
        from_keras(model, {}, tmp_path, "films")
