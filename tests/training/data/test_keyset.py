"""Keyset files."""

import numpy as np
import pytest

from training.data import read_keyset, write_keyset
from training.errors import DataError
from training.samples import Bags, Samples


def parts(*keys):
    rows = [np.array(some, np.int64).reshape(-1, 1) for some in keys]
    return [
        Samples(np.zeros((len(some), 1), np.float32), np.zeros((len(some), 0), np.float32), Bags.one_key_each(some))
        for some in rows
    ]


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
def test_a_keyset_has_each_key_once(tmp_path, dtype):
    write_keyset(tmp_path / "k", parts([3, 1, 3], [2**31, 1]), dtype)

    assert (tmp_path / "k").read_bytes() == np.array([1, 3, 2**31], dtype).tobytes()
    assert read_keyset(tmp_path / "k", dtype).tolist() == [1, 3, 2**31]


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a key does not fit uint32"):
        write_keyset(tmp_path / "k", parts([-1]), "uint32")
    with pytest.raises(ValueError, match="expected uint32 or int64, got int32"):
        write_keyset(tmp_path / "k", parts([1]), "int32")
    assert not (tmp_path / "k").exists()
    with pytest.raises(DataError, match="k: no such file"):
        read_keyset(tmp_path / "k", "int64")
    (tmp_path / "k").write_bytes(np.array([7, 2**63 - 1]).tobytes())
    with pytest.raises(DataError, match=f"k: expected keys from {2 - 2**63} to {2**63 - 3}, found {2**63 - 1}"):
        read_keyset(tmp_path / "k", "int64")
    (tmp_path / "k").write_bytes(bytes(12))
    with pytest.raises(DataError, match=r"k: expected a multiple of 8 bytes \(int64 keys\), found 12 bytes"):
        read_keyset(tmp_path / "k", "int64")
