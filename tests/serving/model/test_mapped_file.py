"""Files that are mapped without an open descriptor."""

import gc
import os

import numpy as np
import pytest

from serving.model.mapped_file import map_file
from serving.model.sparse_file import open_sparse, write_sparse_directory


def is_mapped(path):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return str(path) in maps.read()


def test_a_mapped_file_is_read_only_and_stays_until_its_last_view_is_gone(tmp_path):
    path = tmp_path / "rows"
    np.arange(12, dtype="<f4").tofile(path)
    rows = map_file(path, "<f4", (3, 4))
    view = rows[1:]

    assert rows.tolist() == np.arange(12).reshape(3, 4).tolist()
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1
    del rows
    gc.collect()
    assert is_mapped(path)
    assert view[0, 0] == 4
    del view
    gc.collect()
    assert not is_mapped(path)


def test_an_open_table_needs_no_descriptor(tmp_path):
    keys = np.arange(5)
    write_sparse_directory(tmp_path / "t", keys, np.ones((5, 4), np.float32))
    before = len(os.listdir("/proc/self/fd"))

    tables = [open_sparse(tmp_path / "t", 4) for _ in range(20)]

    assert len(os.listdir("/proc/self/fd")) == before
    [(read, _)] = tables[-1].batches(10)
    assert read.tolist() == keys.tolist()


@pytest.mark.parametrize("rows", [0, 4])
def test_a_file_of_another_size_is_refused(tmp_path, rows):
    np.arange(3).tofile(tmp_path / "keys")

    with pytest.raises(ValueError, match=r"keys: expected at least \d+ bytes, found 24"):
        map_file(tmp_path / "keys", "<i8", (rows,))
