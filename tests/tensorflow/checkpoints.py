"""Checkpoints and SavedModels that TensorFlow writes, and their tables as TensorFlow reads them.

``python -m tests.tensorflow.checkpoints tests/serving/sources/checkpoints`` has written the files that tests without
TensorFlow read.
"""

import json
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tensorflow import compat

tf1 = compat.v1


def write_keras(folder):
    """A model: two embeddings, a kernel, and the states of Adam. As a checkpoint, and as a SavedModel."""
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((1,), dtype="int64", name=name) for name in ("user", "item")]
    vectors = [
        keras.layers.Embedding(5, 3, name="users")(inputs[0]),
        keras.layers.Embedding(7, 3, name="items")(inputs[1]),
    ]
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(vectors[0] * vectors[1])))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(model=model).save(folder / "keras" / "ckpt")
    model.export(folder / "saved_model", verbose=False)
    return {name: model.get_layer(name).embeddings.numpy() for name in ("users", "items")}


def write_session(folder):
    """TensorFlow 1: a variable in three partitions, with the states of Adagrad, and one of bfloat16."""
    with tf1.Graph().as_default(), tf1.Session() as session:
        tf1.set_random_seed(1)
        ads = tf1.get_variable("deep/ads", (100, 2), partitioner=tf1.fixed_size_partitioner(3))
        tags = tf1.get_variable("deep/tags", (4, 3), tf1.bfloat16, tf1.random_normal_initializer())
        loss = tf1.reduce_sum(tf1.nn.embedding_lookup(ads, [1, 50, 99], partition_strategy="div"))
        step = tf1.train.AdagradOptimizer(0.1).minimize(loss)
        session.run(tf1.global_variables_initializer())
        session.run(step)
        tf1.train.Saver().save(session, str(folder / "session" / "model.ckpt"), 3, write_meta_graph=False)
        return {"ads": session.run(tf1.convert_to_tensor(ads)), "tags": session.run(tags).astype(np.float32)}


def write_hash_table(folder):
    """A hash table of TensorFlow."""
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, [0.0, 0.0])
    table.insert([7, -3, 10**15], [[7.0, 7.5], [3.0, 3.5], [1.0, 1.5]])
    tf.train.Checkpoint(words=table).write(folder / "hash_table")
    keys, rows = table.export()
    return {"words": dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))}


def write_embedding_variables(folder):
    """The tensors that DeepRec's documentation lists, in TensorFlow's files."""
    tensors = {
        "a-keys": np.arange(2),
        "a-values": np.ones((2, 4), np.float32),
        "a-freqs": np.zeros(0, np.int64),
        "a/Adagrad-keys": np.arange(2),
        "a/Adagrad-values": np.zeros((2, 4), np.float32),
        **{f"b/part_{part}-keys": np.array([8, 5, 9][part : part * 2 + 1]) for part in (0, 1)},
        **{f"b/part_{part}-values": np.full((part + 1, 2), part, np.float32) for part in (0, 1)},
        "b/part_2-keys": np.zeros(0, np.int64),
        "b/part_2-values": np.zeros((0, 2), np.float32),
    }
    names = sorted(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    tf.raw_ops.SaveV2(
        prefix=str(folder / "deeprec"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.constant(tensors[name]) for name in names],
    )
    return {"a": {0: [1.0] * 4, 1: [1.0] * 4}, "b": {8: [0.0, 0.0], 5: [1.0, 1.0], 9: [1.0, 1.0]}}


def write_all(folder):
    """Write every checkpoint. Return the tables of each source: the rows by their keys."""
    keras_tables = write_keras(folder)
    tables = {
        "keras": keras_tables,
        "saved_model": keras_tables,
        "session": write_session(folder),
        "hash_table": write_hash_table(folder),
        "deeprec": write_embedding_variables(folder),
    }
    return {
        source: {name: rows if isinstance(rows, dict) else dict(enumerate(rows.tolist())) for name, rows in own.items()}
        for source, own in tables.items()
    }


if __name__ == "__main__":
    [target] = map(Path, sys.argv[1:])
    shutil.rmtree(target, ignore_errors=True)
    written = write_all(target)
    for file in (target / "saved_model").iterdir():
        if file.is_file():  # the functions, which are large
            file.unlink()
    (target / "tables.json").write_text(json.dumps(written) + "\n")
