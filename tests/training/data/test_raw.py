"""HugeCTR's Raw files: round trips, HugeCTR's reading of integers, and damaged files."""

import struct

import numpy as np
import pytest

from training.data import read_raw, write_raw
from training.errors import DataError
from training.samples import Samples


def test_a_record_is_labels_then_dense_features_then_keys(tmp_path):
    write_raw(tmp_path / "raw", [[1]], [[2, 3]], [[4, 2**32 - 1]])

    assert (tmp_path / "raw").read_bytes() == struct.pack("<3i2I", 1, 2, 3, 4, 2**32 - 1)


@pytest.mark.parametrize("batch_size", [1, 7, 100, 1000])
def test_floats_and_keys_are_read_as_written(tmp_path, batch_size):
    rng = np.random.default_rng(0)
    labels, dense = rng.integers(0, 2, (100, 2)), rng.standard_normal((100, 3), np.float32)
    keys = rng.integers(0, 2**32, (100, 4))
    write_raw(tmp_path / "raw", labels, dense, keys, has_floats=True)

    batches = list(read_raw(tmp_path / "raw", 2, 3, 4, has_floats=True, batch_size=batch_size))

    assert max(map(len, batches)) == min(batch_size, 100)
    read = Samples.joined(batches)
    np.testing.assert_array_equal(read.labels, labels)
    np.testing.assert_array_equal(read.dense, dense)
    np.testing.assert_array_equal(read.bags.keys.reshape(100, 4), keys)


def test_integers_become_logarithms_and_slots_get_keys_of_their_own(tmp_path):
    write_raw(tmp_path / "raw", [[1], [0]], [[0, 9], [1, 2]], [[4, 2, 0], [0, 0, 6]])

    [samples] = read_raw(tmp_path / "raw", 1, 2, 3, slot_sizes=[5, 3, 7])

    assert samples.labels.tolist() == [[1], [0]]
    np.testing.assert_allclose(samples.dense, np.log([[1, 10], [2, 3]]), rtol=1e-6)
    assert samples.bags.keys.tolist() == [4, 7, 8, 0, 5, 14]
    assert samples.bags.slots == 3


def test_a_file_that_ends_in_a_record_is_refused_with_the_record(tmp_path):
    write_raw(tmp_path / "raw", [[1]] * 5, [[2]] * 5, [[3]] * 5)
    (tmp_path / "raw").write_bytes((tmp_path / "raw").read_bytes()[:-4])

    with pytest.raises(DataError, match="raw record 4: the file ends after 8 of its 12 bytes"):
        list(read_raw(tmp_path / "raw", 1, 1, 1, batch_size=3))


@pytest.mark.parametrize(
    ("dense", "keys", "message"),
    [
        (
            [[1], [1], [-5]],
            [[0]] * 3,
            r"raw column dense\[0\] record 2: expected at least 0, because training reads ln\(v \+ 1\), found -5",
        ),
        ([[1]] * 3, [[0], [4], [0]], r"raw column slot\[0\] record 1: expected a key from 0 to 3, found 4"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_record(tmp_path, dense, keys, message):
    write_raw(tmp_path / "raw", [[1]] * 3, dense, keys)

    with pytest.raises(DataError, match=message):
        list(read_raw(tmp_path / "raw", 1, 1, 1, slot_sizes=[4], batch_size=1))


def test_a_missing_file_and_wrong_sizes_are_refused(tmp_path):
    with pytest.raises(DataError, match="nothing: no such file"):
        list(read_raw(tmp_path / "nothing", 1, 1, 1))
    write_raw(tmp_path / "raw", [[1]], [[1]], [[0, 0]])
    with pytest.raises(ValueError, match="slot_sizes: expected 2 numbers, got 1"):
        list(read_raw(tmp_path / "raw", 1, 1, 2, slot_sizes=[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": [[1.5]]}, r"keys: expected integers \[B, S\], got float64"),
        ({"keys": [1]}, r"keys: expected integers \[B, S\], got int64\[1\]"),
        ({"keys": [[-1]]}, "keys: expected numbers from 0 to 4294967295"),
        ({"labels": [[1], [2]]}, r"labels: expected numbers of shape \[1, columns\], got \[2, 1\]"),
        ({"dense": [[0.5]]}, "dense: a number is not an int32; has_floats writes float32"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_raw(**{"path": tmp_path / "raw", "labels": [[1]], "dense": [[2]], "keys": [[3]], **arguments})
    assert not list(tmp_path.iterdir())
