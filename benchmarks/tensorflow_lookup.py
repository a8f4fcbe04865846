"""``training.tf.sok`` against TensorFlow's own lookups, on the CPU: `make bench-tensorflow`.

26 tables of 100,000 vectors of 16 floats, batches of 4,096 rows, and 1 to 3 ids per row and table, combined by sum.
Both sides train in one ``tf.function``: lookup, backward pass and a step of Adam that moves only rows with a gradient.
The peer is ``tf.nn.embedding_lookup_sparse`` with a ``tf.Variable`` for each table. Keras has no such Adam, so the
peer's is written in TensorFlow's operations: gather the states, compute, scatter.

- ``dynamic``: ``DynamicVariable`` and ``OptimizerWrapper``. Rows are found by key, the peer's by position.
- ``variable``: ``Variable`` and ``sok.optimizers.Adam``. Rows are in TensorFlow's memory, as the peer's.

Both use the same number of threads, and take turns.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.report import Record, parse_arguments, publish, take_turns
from kernels.host import lookup_threads
from training.tf import sok

TABLES, BATCH, DIM, MOST_IDS = 26, 4096, 16, 3
LEARNING_RATE = 0.01


def draw(rng, rows_of_table):
    """The ids of each table in one batch."""
    batch = []
    for _ in range(TABLES):
        counts = rng.integers(1, MOST_IDS + 1, BATCH)
        ids = tf.constant(rng.integers(0, rows_of_table, counts.sum()))
        batch.append(tf.RaggedTensor.from_row_lengths(ids, counts).to_sparse())
    return batch


class Ours:
    """One call for all tables."""

    def __init__(self, variables, optimizer):
        @tf.function
        def step(ids, weights):
            with tf.GradientTape() as tape:
                vectors = sok.lookup_sparse(variables, ids, combiners=["sum"] * TABLES)
                loss = tf.add_n([tf.reduce_sum(one * weight) for one, weight in zip(vectors, weights, strict=True)])
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        self.step = lambda ids, weights: float(step(ids, weights))


class Peer:
    """One call per table."""

    def __init__(self, tables):
        variables = [tf.Variable(table) for table in tables]
        states = [[tf.Variable(tf.zeros_like(table), trainable=False) for _ in range(2)] for table in tables]
        count = tf.Variable(0.0)

        def move(variable, first, second, gradient):
            rows, places = tf.unique(gradient.indices)
            floats = tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(rows)[0])
            rate = LEARNING_RATE * tf.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            m = 0.9 * tf.gather(first, rows) + 0.1 * floats
            v = 0.999 * tf.gather(second, rows) + 0.001 * tf.square(floats)
            first.scatter_update(tf.IndexedSlices(m, rows))
            second.scatter_update(tf.IndexedSlices(v, rows))
            variable.scatter_sub(tf.IndexedSlices(rate * m / (tf.sqrt(v) + 1e-7), rows))

        @tf.function
        def step(ids, weights):
            with tf.GradientTape() as tape:
                vectors = [
                    tf.nn.embedding_lookup_sparse(variable, one, None, combiner="sum")
                    for variable, one in zip(variables, ids, strict=True)
                ]
                loss = tf.add_n([tf.reduce_sum(one * weight) for one, weight in zip(vectors, weights, strict=True)])
            count.assign_add(1)
            for variable, of_variable, gradient in zip(variables, states, tape.gradient(loss, variables), strict=True):
                move(variable, *of_variable, gradient)
            return loss

        self.step = lambda ids, weights: float(step(ids, weights))


def dynamic(tables):
    """Variables with all rows, which exist before the clock runs."""
    variables = [sok.DynamicVariable(DIM) for _ in tables]
    for variable, table in zip(variables, tables, strict=True):
        variable.set_rows(np.arange(len(table)), table)
    return variables


def main():
    """Run the benchmark."""
    options = parse_arguments(__doc__)
    rows, rounds, batches = (1_000, 1, 1) if options.quick else (100_000, 15, 4)
    sok.init()
    rng = np.random.default_rng(0)
    tables = list(rng.normal(size=(TABLES, rows, DIM)).astype(np.float32))
    weights = [tf.constant(one) for one in rng.normal(size=(TABLES, BATCH, DIM)).astype(np.float32)]
    data = [[(draw(rng, rows), weights) for _ in range(batches)] for _ in range(rounds + 1)]
    params = {"rows": rows, "batch": BATCH, "tables": TABLES, "dim": DIM, "threads": lookup_threads()}
    sides = {
        "dynamic": lambda: Ours(dynamic(tables), sok.OptimizerWrapper(keras.optimizers.Adam(LEARNING_RATE))),
        "variable": lambda: Ours([sok.Variable(table) for table in tables], sok.optimizers.Adam(LEARNING_RATE)),
    }
    records = []
    for name, make in sides.items():
        ours, peer = make(), Peer(tables)
        seconds = take_turns(ours.step, peer.step, data)[1:]  # the first round warms up
        np.testing.assert_allclose(ours.step(*data[0][0]), peer.step(*data[0][0]), rtol=1e-2, atol=1)
        speeds = [(batches * BATCH / one, batches * BATCH / other) for one, other in seconds]
        records.append(Record.of(f"tensorflow_lookup.{name}", params, "1/s", speeds))
    publish(records, options.json)


if __name__ == "__main__":
    main()
