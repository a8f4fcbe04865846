"""What a data loader may put into a batch, and what is refused."""

import numpy as np
import pytest

from training.persia.prelude import PyPersiaBatchData


def uint64(*bags):
    return [np.array(bag, np.uint64) for bag in bags]


def test_a_batch_keeps_what_was_added_in_order():
    batch = PyPersiaBatchData()
    batch.add_dense([np.ones((2, 3), np.float32), np.zeros((2, 1), np.float32)])
    batch.add_dense_f32(np.ones((2, 2), np.float32))
    batch.add_dense_f64(np.ones((2, 2), np.float64))
    batch.add_dense_i32(np.ones((2, 2), np.int32))
    batch.add_dense_i64(np.ones((2, 0), np.int64))
    batch.add_sparse([("a", uint64([2**64 - 1, 5, 5], [])), ("b", uint64([1], [2]))])
    batch.add_sparse([("c", uint64([], []))])
    batch.add_target(np.ones((2, 1), np.float32))
    batch.add_target(np.zeros((2, 4), np.float32))

    assert [(one.dtype.name, one.shape[1]) for one in batch.dense] == [
        ("float32", 3),
        ("float32", 1),
        ("float32", 2),
        ("float64", 2),
        ("int32", 2),
        ("int64", 0),
    ]
    assert {name: (signs.tolist(), ends.tolist()) for name, (signs, ends) in batch.sparse.items()} == {
        "a": ([2**64 - 1, 5, 5], [0, 3, 3]),
        "b": ([1, 2], [0, 1, 2]),
        "c": ([], [0, 0, 0]),
    }
    assert [target.shape for target in batch.targets] == [(2, 1), (2, 4)]


@pytest.mark.parametrize(
    ("call", "value", "error", "message"),
    [
        (
            "add_dense",
            np.ones((2, 1), np.float32),
            TypeError,
            r"add_dense: expected a list of arrays, got float32\[2, 1\]",
        ),
        ("add_dense", [[1.0]], TypeError, r"add_dense: expected an array float32\[B, n\], got list"),
        (
            "add_dense_f32",
            np.ones((2, 1)),
            TypeError,
            r"add_dense_f32: expected an array float32\[B, n\], got float64\[2, 1\]",
        ),
        (
            "add_dense_f32",
            np.ones(2, np.float32),
            ValueError,
            r"add_dense_f32: expected an array float32\[B, n\], got float32\[2\]",
        ),
        ("add_dense_f64", np.ones((2, 1), np.float32), TypeError, "add_dense_f64: expected an array float64"),
        ("add_dense_i32", np.ones((2, 1), np.int64), TypeError, "add_dense_i32: expected an array int32"),
        ("add_dense_i64", np.ones((2, 1), np.int32), TypeError, "add_dense_i64: expected an array int64"),
        (
            "add_target",
            np.ones(2, np.float32),
            ValueError,
            r"add_target: expected an array float32\[B, n\], got float32\[2\]",
        ),
        ("add_target", np.ones((0, 1), np.float32), ValueError, "add_target: expected at least one sample, got none"),
        (
            "add_target",
            np.ones((3, 1), np.float32),
            ValueError,
            "add_target: expected 2 samples, as the batch has, got 3",
        ),
        (
            "add_sparse",
            [("a", uint64([1], [2])), ("a", uint64([1], [2]))],
            ValueError,
            "expected each feature once, got 'a' again",
        ),
        ("add_sparse", [("a", uint64([1]))], ValueError, "feature 'a': expected 2 samples, as the batch has, got 1"),
        ("add_sparse", [("a", [])], ValueError, "feature 'a': expected at least one sample, got none"),
        (
            "add_sparse",
            [("a", [[1], [2]])],
            TypeError,
            r"feature 'a', sample 0: expected an array uint64\[n\], got list",
        ),
        (
            "add_sparse",
            [("a", [*uint64([1]), np.array([1])])],
            TypeError,
            r"feature 'a', sample 1: expected an array uint64\[n\], got int64\[1\]",
        ),
        (
            "add_sparse",
            [("a", uint64([[1]], [2]))],
            ValueError,
            r"feature 'a', sample 0: expected an array uint64\[n\], got uint64\[1, 1\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, value, error, message):
    batch = PyPersiaBatchData()
    batch.add_dense_f32(np.ones((2, 1), np.float32))

    with pytest.raises(error, match=message):
        getattr(batch, call)(value)
