"""Write Keras archives with preprocessing layers, and what Keras makes of values.

Run it in an environment of its own, with ``tensorflow-cpu``:

    python tests/tools/keras_archives.py tests/serving/features/keras
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

TEXTS = ["de", "fr", "Zürich", "日本", "xx", "[UNK]", "a", "b", "🙂", "a longer text than the others"]
NUMBERS = [-3.5, -1.5, 0.0, 0.1, 17.99, 18.0, 25.5, 1e9, 3.4e38, -0.0]
INTEGERS = [10, -3, 7, 0, 2**62, -(2**62), 1, 2, 3, 18]
LISTS = [["de", "xx"], [], ["日本"] * 3]


def given():
    """A model whose layers know everything from the beginning."""
    text, integer = ({"shape": (1,), "dtype": dtype} for dtype in ("string", "int64"))
    countries = layers.StringLookup(vocabulary=["de", "fr", "日本"], name="countries")
    several = layers.StringLookup(vocabulary=["[UNK]", "[UNK]", "de", "Zürich"], num_oov_indices=2)
    return {
        "country": (countries, keras.Input(**text, name="country"), TEXTS),
        "visited": (countries, keras.Input((None,), dtype="string", name="visited"), LISTS),
        "city": (several, keras.Input(**text, name="city"), TEXTS),
        "masked": (
            layers.StringLookup(vocabulary=["", "[UNK]", "de", "fr"], mask_token=""),
            keras.Input(**text, name="masked"),
            TEXTS,
        ),
        "zip": (layers.IntegerLookup(vocabulary=[10, -3, 7]), keras.Input(**integer, name="zip"), INTEGERS),
        "user": (layers.Hashing(1000, salt=[133, 137]), keras.Input(**text, name="user"), TEXTS),
        "item": (layers.Hashing(77), keras.Input(**integer, name="item"), INTEGERS),
        "age": (
            layers.Discretization(bin_boundaries=[-1.5, 0.0, 18.0, 25.5]),
            keras.Input((1,), name="age"),
            NUMBERS,
        ),
        "price": (layers.Normalization(mean=3.3, variance=4.1), keras.Input((1,), name="price"), NUMBERS),
        "plain": (None, keras.Input((1,), name="plain"), NUMBERS),
        "key": (None, keras.Input(**integer, name="key"), INTEGERS),
    }


def adapted():
    """A model whose layers have learned from data. Names and depths differ from the order of the layers' folders."""
    rng = np.random.default_rng(0)
    made = {}
    for number, name in enumerate("cab"):
        norm = layers.Normalization(axis=None, name=f"norm_{9 - number}")
        lookup = layers.StringLookup(name=f"look_{name}")
        norm.adapt(rng.gamma(2, number + 1, (50, 1)).astype(np.float32))
        lookup.adapt(np.array(TEXTS[number : number + 4] * 2 + TEXTS[number : number + 2]))
        made[f"number_{name}"] = (norm, keras.Input((1,), name=f"number_{name}"), NUMBERS)
        made[f"text_{name}"] = (lookup, keras.Input((1,), dtype="string", name=f"text_{name}"), TEXTS)
    bins = layers.Discretization(num_bins=5)
    bins.adapt(rng.normal(5, 9, 200).astype(np.float32))
    made["bins"] = (bins, keras.Input((1,), name="bins"), NUMBERS)
    return made


def answers(layer, values, source):
    if layer is None:
        return values
    if source.shape[1] is None:
        return [np.asarray(layer(tf.constant(value))).tolist() if value else [] for value in values]
    return np.asarray(layer(tf.constant([[value] for value in values], source.dtype))).reshape(-1).tolist()


def main():
    folder = Path(sys.argv[1])
    expected = {"versions": {"tensorflow": tf.__version__, "keras": keras.__version__}}
    for name, made in (("given", given()), ("adapted", adapted())):
        outputs = []
        for place, (layer, source, _) in enumerate(made.values()):
            output = source if layer is None else layer(source)
            if isinstance(layer, layers.Hashing):
                output = layers.Embedding(1000, 1)(output)
            outputs.append(layers.Dense(1)(output) if place % 2 and output.dtype == "float32" else output)
        keras.Model([source for _, source, _ in made.values()], outputs).save(folder / f"{name}.keras")
        expected[name] = {
            feature: [values, answers(layer, values, source)] for feature, (layer, source, values) in made.items()
        }
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
