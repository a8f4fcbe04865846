"""A snapshot read as a sparse model, compared with the directory it was made of."""

import os

import numpy as np
import pytest

from kernels.host import round_rows
from serving.errors import ModelFileError
from serving.model.snapshot_model import is_snapshot, write_snapshot_file
from serving.model.sparse_file import open_sparse, write_sparse_directory
from tests.serving.model.single_file import write_single_file

KEYS = np.array([7, -3, 2**40, 0, 2**63 - 3], dtype=np.int64)
VECTORS = np.arange(10, dtype=np.float32).reshape(5, 2) / 7
SOURCE = "0123456789abcdef" * 4


@pytest.fixture
def snapshot(tmp_path):
    """Make a snapshot of these rows, and return its path."""

    def write(keys=KEYS, vectors=VECTORS, row_dtype="fp32", name="t.snapshot"):
        write_sparse_directory(tmp_path / "d", keys, vectors)
        write_snapshot_file(tmp_path / name, open_sparse(tmp_path / "d", vectors.shape[1]), row_dtype, SOURCE)
        return tmp_path / name

    return write


def rows_of(model, batch_rows=2):
    return [
        (key, row)
        for keys, rows in model.batches(batch_rows)
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True)
    ]


def test_a_snapshot_has_the_rows_of_its_model_in_order(snapshot, tmp_path):
    model = open_sparse(snapshot(), 2)

    assert (model.rows, model.dim) == (5, 2)
    assert rows_of(model) == rows_of(open_sparse(tmp_path / "d", 2))
    assert [keys.tolist() for keys in model.key_batches(3)] == [KEYS[:3].tolist(), KEYS[3:].tolist()]


def test_rows_of_a_narrow_snapshot_are_the_rounded_values(snapshot):
    expected = np.empty_like(VECTORS)
    round_rows(VECTORS, "int8", expected)

    model = open_sparse(snapshot(row_dtype="int8"), 2)

    assert rows_of(model) == list(zip(KEYS.tolist(), expected.tolist(), strict=True))


def test_the_first_row_of_a_repeated_key_in_a_single_file_counts(tmp_path):
    write_single_file(tmp_path / "one", KEYS, VECTORS)
    write_single_file(tmp_path / "two", KEYS, VECTORS + 1)
    (tmp_path / "f").write_bytes((tmp_path / "one").read_bytes() + (tmp_path / "two").read_bytes())

    written = write_snapshot_file(tmp_path / "t.snapshot", open_sparse(tmp_path / "f", 2), "fp32", SOURCE)

    assert written == 5
    model = open_sparse(tmp_path / "t.snapshot", 2)
    assert rows_of(model) == list(zip(KEYS.tolist(), VECTORS.tolist(), strict=True))
    model.check(full=True)


def test_a_snapshot_of_another_dim_is_refused(snapshot):
    with pytest.raises(ModelFileError, match=r"t\.snapshot: expected vectors of 3 floats, but the snapshot has 2"):
        open_sparse(snapshot(), 3)


def test_a_damaged_snapshot_is_refused_and_not_read_as_a_file_of_rows(snapshot):
    path = snapshot()
    os.truncate(path, path.stat().st_size - 4)

    with pytest.raises(ModelFileError, match=r"t\.snapshot: expected \d+ bytes by its header"):
        open_sparse(path, 2)


def test_a_snapshot_that_is_truncated_during_reading_is_a_model_file_error(snapshot):
    path = snapshot()
    model = open_sparse(path, 2)
    os.truncate(path, 4096)

    for call in (
        lambda: list(model.batches(2)),
        lambda: list(model.key_batches(2)),
        lambda: model.check(full=False),
        lambda: model.check(full=True),
    ):
        with pytest.raises(ModelFileError, match="bytes while it was open"):
            call()


@pytest.mark.parametrize("section", [-2, -1], ids=["keys", "rows"])
def test_a_damaged_row_is_a_model_file_error(snapshot, section):
    path = snapshot()
    data = bytearray(path.read_bytes())
    data[4096 * (len(data) // 4096 + section) + 2] ^= 1  # one page each, then a few checksums
    path.write_bytes(data)
    model = open_sparse(path, 2)

    with pytest.raises(ModelFileError, match=r"t\.snapshot: is damaged: the page"):
        list(model.batches(2))


def test_keys_beyond_uint32_are_refused_for_a_uint32_model(snapshot):
    path = snapshot(np.array([5, 2**32 - 1, 0, 2**32, 1]))

    with pytest.raises(ModelFileError, match="row 3: key 4294967296 is not a uint32"):
        open_sparse(path, 2, "I32").batches(10)

    keys = np.array([5, 2**32 - 1, 0, 3, 1])
    assert [key for key, _ in rows_of(open_sparse(snapshot(keys), 2, "I32"))] == keys.tolist()


def test_an_empty_batch_size_is_refused(snapshot):
    with pytest.raises(ValueError, match="at least 1 row per batch"):
        open_sparse(snapshot(), 2).batches(0)


def test_the_digest_and_the_stamp_name_the_content(snapshot):
    digest = open_sparse(snapshot(), 2).digest()

    assert open_sparse(snapshot(name="again"), 2).digest() == digest == open_sparse(snapshot(), 2).stamp()
    assert open_sparse(snapshot(row_dtype="fp16"), 2).digest() != digest
    assert open_sparse(snapshot(vectors=VECTORS + 1), 2).digest() != digest
    assert open_sparse(snapshot(keys=KEYS[::-1].copy()), 2).digest() != digest


def test_the_stamp_of_a_folder_changes_with_its_files(tmp_path):
    def stamp(vectors):
        write_sparse_directory(tmp_path / "d", KEYS, vectors)
        return open_sparse(tmp_path / "d", 2).stamp()

    first = stamp(VECTORS)

    assert open_sparse(tmp_path / "d", 2).stamp() == first
    assert stamp(VECTORS + 1) != first
    write_sparse_directory(tmp_path / "elsewhere", KEYS, VECTORS)
    assert open_sparse(tmp_path / "elsewhere", 2).stamp() != first


def test_a_snapshot_is_recognized_by_its_first_bytes(snapshot, tmp_path):
    (tmp_path / "short").write_bytes(b"HRSNAP")

    assert is_snapshot(snapshot())
    assert not any(is_snapshot(tmp_path / name) for name in ("short", "absent", "d", "d/key"))


def test_a_disk_that_refuses_writes_is_named(snapshot, tmp_path):
    snapshot()
    with pytest.raises(ModelFileError, match=r"absent/t\.snapshot: cannot be written: No such file"):
        write_snapshot_file(tmp_path / "absent" / "t.snapshot", open_sparse(tmp_path / "d", 2), "fp32", SOURCE)


def test_a_failed_write_leaves_the_old_file_and_no_other(snapshot, tmp_path):
    path = snapshot()
    before = path.read_bytes()
    wrong = VECTORS.copy()
    wrong[3, 1] = np.nan
    write_sparse_directory(tmp_path / "wrong", KEYS, wrong)

    with pytest.raises(ModelFileError, match="wrong: row 3, of key 0: column 1 is nan, which int8 rows cannot hold"):
        write_snapshot_file(path, open_sparse(tmp_path / "wrong", 2), "int8", SOURCE)

    assert path.read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["d", "t.snapshot", "wrong"]
