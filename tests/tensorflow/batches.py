"""Random rows of ids, as sparse and as ragged tensors, and lookups in plain TensorFlow."""

import numpy as np
import tensorflow as tf


def ragged_ids(rng, rows, most, below):
    counts = rng.integers(0, most + 1, rows)
    return tf.RaggedTensor.from_row_lengths(tf.constant(rng.integers(0, below, counts.sum())), counts)


def weights_like(rng, ids):
    return ids.with_values(tf.constant(rng.uniform(0.5, 2, len(ids.values)).astype(np.float32)))


def plain_lookup(table, ids, weights=None, combiner="mean"):
    """The same as ``lookup_sparse``, where a row without ids is zero."""
    sparse = None if weights is None else weights.to_sparse()
    vectors = tf.nn.safe_embedding_lookup_sparse(table, ids.to_sparse(), sparse, combiner=combiner)
    return tf.ensure_shape(vectors, (ids.shape[0], table.shape[1]))


def dense(gradient, rows):
    """A gradient as an array with every row of a table."""
    return np.asarray(tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows))
