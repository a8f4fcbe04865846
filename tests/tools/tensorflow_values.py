"""Write ``tests/serving/features/tensorflow.json``: what TensorFlow and Keras make of values.

Run it in an environment of its own, with ``tensorflow-cpu``:

    python tests/tools/tensorflow_values.py tests/serving/features/tensorflow.json
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

ALPHABET = list("abcdefghij0123456789 _|üß日本語🙂")
VOCABULARY = ["de", "fr", "Zürich", "日本", "us"]
PROBE = ["us", "de", "xx", "", "日本", "Zürich", "fr", "yy", "zz"]
BOUNDARIES = [-1.5, 0.0, 18.0, 25.5]


def main():
    rng = np.random.default_rng(7)
    lengths = [*range(1, 140), 255, 256, 1000]
    words = ["", "a", "Hello", "Zürich", "日本", "68fd1e64", *("".join(rng.choice(ALPHABET, n)) for n in lengths)]
    ints = [0, 1, -1, 17, 2**31, -(2**63), 2**63 - 1, *rng.integers(-(2**62), 2**62, 20).tolist()]
    numbers = np.array([-2, -1.5, -1, 0, 17.99, 18, 25.5, 1e9], np.float32)
    texts, whole = tf.constant(words), tf.constant(ints, tf.int64)
    layers = keras.layers
    made = {
        "fast": tf.strings.to_hash_bucket_fast(texts, 1_000_003),
        "strong": tf.strings.to_hash_bucket_strong(texts, 1_000_003, [133, 137]),
        "keras": layers.Hashing(1000)(texts),
        "keras_salt": layers.Hashing(1000, salt=133)(texts),
        "keras_salts": layers.Hashing(1000, salt=[133, 137])(texts),
        "keras_ints": layers.Hashing(1000)(whole),
        "fast_ints": tf.strings.to_hash_bucket_fast(tf.as_string(whole), 1_000_003),
        "cross": layers.HashedCrossing(1000)((texts[: len(ints)], whole)),
        "cross_words": layers.HashedCrossing(1000)((texts, tf.constant(words[::-1]))),
        "lookup_1": layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=1)(tf.constant(PROBE)),
        "lookup_3": layers.StringLookup(vocabulary=VOCABULARY, num_oov_indices=3)(tf.constant(PROBE)),
        "lookup_ints": layers.IntegerLookup(vocabulary=[10, -3, 7])(tf.constant([7, 10, 5, -3])),
        "discretization": layers.Discretization(bin_boundaries=BOUNDARIES)(numbers),
        "normalization": layers.Normalization(mean=3.0, variance=4.0, axis=None)(numbers),
    }
    document = {
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
        **{"words": words, "ints": ints, "vocabulary": VOCABULARY, "probe": PROBE},
        **{"boundaries": BOUNDARIES, "x": numbers.tolist()},
        **{name: np.asarray(values).tolist() for name, values in made.items()},
    }
    Path(sys.argv[1]).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
