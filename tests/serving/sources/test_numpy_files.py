import os
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ModelFileError
from serving.sources import open_table


def everything(rows):
    """All rows of a source as a dict, read in batches of 3."""
    table = {}
    for keys, vectors in rows.batches(3):
        assert keys.dtype == np.int64
        assert vectors.dtype == np.float32
        table.update(zip(keys.tolist(), vectors.tolist(), strict=True))
    assert len(table) == rows.rows
    return table


VECTORS = np.arange(20, dtype=np.float32).reshape(5, 4) / 8
KEYS = np.array([7, -3, 2**62, 0, 9])
BY_ROW = dict(enumerate(VECTORS.tolist()))
BY_KEY = dict(zip(KEYS.tolist(), VECTORS.tolist(), strict=True))


@pytest.mark.parametrize("dtype", ["<f4", "<f2", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_row_numbers_of_a_matrix_are_its_keys(tmp_path, dtype, order):
    np.save(tmp_path / "ads.npy", np.array(VECTORS, dtype, order=order))

    assert everything(open_table("ads", tmp_path / "ads.npy")) == BY_ROW


def test_an_open_table_needs_no_descriptor(tmp_path):
    np.save(tmp_path / "keys.npy", KEYS)
    np.save(tmp_path / "vectors.npy", VECTORS)
    before = len(os.listdir("/proc/self/fd"))

    tables = [open_table("ads", f"{tmp_path / 'keys.npy'},{tmp_path / 'vectors.npy'}") for _ in range(20)]

    assert len(os.listdir("/proc/self/fd")) == before
    assert all(everything(table) == BY_KEY for table in tables)


def test_an_archive_has_keys_and_vectors_or_one_matrix(tmp_path):
    np.savez(tmp_path / "both.npz", keys=KEYS, vectors=VECTORS)
    np.savez_compressed(tmp_path / "one.npz", weight=VECTORS)

    assert everything(open_table("ads", tmp_path / "both.npz")) == BY_KEY
    assert everything(open_table("ads", tmp_path / "one.npz")) == BY_ROW


def test_two_files_may_each_be_npy_or_bare_numbers(tmp_path):
    KEYS.astype("<i8").tofile(tmp_path / "keys")
    VECTORS.astype("<f4").tofile(tmp_path / "vectors.f32")
    np.save(tmp_path / "keys.npy", KEYS)
    np.save(tmp_path / "vectors.npy", VECTORS)

    for keys in ("keys", "keys.npy"):
        for vectors in ("vectors.f32", "vectors.npy"):
            rows = open_table("ads", f"{tmp_path / keys},{tmp_path / vectors}")
            assert everything(rows if vectors.endswith("npy") else rows.as_dtype("fp32")) == BY_KEY


def test_a_hugectr_folder_is_a_table_or_holds_tables_by_name(tmp_path):
    folder = tmp_path / "model" / "ads"
    folder.mkdir(parents=True)
    KEYS.astype("<i8").tofile(folder / "key")
    VECTORS.astype("<f4").tofile(folder / "emb_vector")

    assert everything(open_table("anything", folder)) == BY_KEY
    assert everything(open_table("ads", folder.parent)) == BY_KEY
    with pytest.raises(ModelFileError, match=r"no table 'users'; found 'ads'"):
        open_table("users", folder.parent)


def test_an_existing_path_is_not_split(tmp_path):
    np.save(tmp_path / "a,b#c.npy", VECTORS)

    assert everything(open_table("ads", tmp_path / "a,b#c.npy")) == BY_ROW


@settings(deadline=None)
@given(
    dtype=st.sampled_from(["int8", "uint16", "int32", "uint32", "int64", "uint64"]),
    keys=st.lists(st.integers(0, 127), min_size=1, max_size=20, unique=True),
)
def test_keys_of_any_integer_type_become_int64(tmp_path_factory, dtype, keys):
    folder = tmp_path_factory.mktemp("keys")
    np.save(folder / "keys.npy", np.array(keys, dtype))
    np.save(folder / "vectors.npy", np.ones((len(keys), 2), np.float32))

    assert list(everything(open_table("ads", f"{folder / 'keys.npy'},{folder / 'vectors.npy'}"))) == keys


class TestRefused:
    @pytest.mark.parametrize(
        ("array", "expected"),
        [
            (np.ones((3, 2)), r"expected float32, float16 or bfloat16 \[V, D\].*got float64 \[3, 2\]"),
            (np.ones((3, 2), np.int64), r"got int64 \[3, 2\]"),
            (np.ones(3, np.float32), r"got float32 \[3\]"),
            (np.ones((3, 2, 1), np.float32), r"got float32 \[3, 2, 1\]"),
            (np.ones((0, 2), np.float32), r"got float32 \[0, 2\]"),
            (np.ones((3, 0), np.float32), r"got float32 \[3, 0\]"),
            (np.array([["a"]]), r"got <U1"),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_a_tensor_that_is_not_a_matrix_of_floats(self, tmp_path, array, expected):
        np.save(tmp_path / "ads.npy", array)

        with pytest.raises(ModelFileError, match=expected):
            open_table("ads", tmp_path / "ads.npy")

    @pytest.mark.parametrize("name", ["ads.npy", "ads.npz"])
    @pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00", b"PK\x03\x04 half"])
    def test_a_damaged_file(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)

        with pytest.raises(ModelFileError, match=f"{name}: expected (a NumPy file of numbers|the arrays)"):
            open_table("ads", tmp_path / name)

    @pytest.mark.parametrize(
        "shape",
        ["(True, 4)", "(1 << 70, 4)", "(1 << 40, 1024)", "(1000000000000, 4)", "(-2, 4)", f"({'(' * 4000}"],
        ids=len,
    )
    @pytest.mark.parametrize("name", ["ads.npy", "ads.npz"])
    def test_a_header_with_an_impossible_shape(self, tmp_path, name, shape):
        shape = shape.replace("1 << 70", str(1 << 70)).replace("1 << 40", str(1 << 40))
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
        content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
        if name == "ads.npz":
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                archive.writestr("vectors.npy", content)
        else:
            (tmp_path / name).write_bytes(content)

        with pytest.raises(
            ModelFileError, match=f"{name}: (expected a NumPy file of numbers|does not fit into memory)"
        ) as caught:
            open_table("ads", tmp_path / name)
        assert len(str(caught.value)) < 1000

    @pytest.mark.parametrize(
        ("source", "expected"), [("k4,", "no file of vectors after the comma"), (",v4", "no file of keys before the")]
    )
    def test_half_a_pair(self, source, expected):
        with pytest.raises(ModelFileError, match=f"table 'users': expected KEYS,VECTORS, got '{source}': {expected}"):
            open_table("users", source)

    def test_a_truncated_matrix(self, tmp_path):
        np.save(tmp_path / "ads.npy", VECTORS)
        (tmp_path / "ads.npy").write_bytes((tmp_path / "ads.npy").read_bytes()[:-1])

        with pytest.raises(ModelFileError, match=r"expected a NumPy file of numbers"):
            open_table("ads", tmp_path / "ads.npy")

    @pytest.mark.parametrize("name", ["ads.npy", "ads.npz"])
    def test_pickled_objects(self, tmp_path, name):
        objects = np.array([{"code": "that would run"}], dtype=object)
        (np.save if name.endswith("y") else np.savez)(tmp_path / name, objects)

        with pytest.raises(ModelFileError, match=r"expected a NumPy file of numbers, found Python objects"):
            open_table("ads", tmp_path / name)

    def test_other_arrays_in_an_archive(self, tmp_path):
        np.savez(tmp_path / "ads.npz", ids=KEYS, vectors=VECTORS)

        with pytest.raises(ModelFileError, match=r"expected the arrays 'keys' and 'vectors'.*found 'ids', 'vectors'"):
            open_table("ads", tmp_path / "ads.npz")

    @pytest.mark.parametrize(
        ("keys", "vectors", "expected"),
        [
            (b"1234567", b"", r"keys: expected a multiple of 8 bytes, little-endian int64, found 7 bytes"),
            (b"12345678", b"12345", r"#?expected rows of fp32, 4 bytes per number, found 5 bytes per key"),
            (b"8 bytes." * 3, b"four" * 7, r"vectors: expected a multiple of 3 bytes, .* 3 keys in .*, found 28"),
            (b"", b"four", r"keys: expected at least one key, found none"),
            (b"8 bytes.", b"", r"vectors: expected a multiple of 1 bytes, .* 1 keys in .*, found 0"),
            (None, b"four", r"keys: cannot be read: No such file"),
            (b"8 bytes.", None, r"vectors: cannot be read: No such file"),
        ],
    )
    def test_bare_numbers_whose_sizes_do_not_divide(self, tmp_path, keys, vectors, expected):
        for name, content in (("keys", keys), ("vectors", vectors)):
            if content is not None:
                (tmp_path / name).write_bytes(content)

        with pytest.raises(ModelFileError, match=expected):
            open_table("ads", f"{tmp_path}/keys,{tmp_path}/vectors").as_dtype("fp32")

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            (np.arange(4), "expected 5 keys, one per vector of .*#vectors, got 4"),
            (np.ones(5), r"expected integer keys \[V\], got float64 \[5\]"),
            (np.ones((5, 1), np.int64), r"expected integer keys \[V\], got int64 \[5, 1\]"),
            (np.array([1, 2, 2**63, 4, 5], np.uint64), "row 2: key 9223372036854775808 is not an int64"),
        ],
    )
    def test_keys_that_are_not_one_integer_per_vector(self, tmp_path, keys, expected):
        np.savez(tmp_path / "ads.npz", keys=keys, vectors=VECTORS)

        with pytest.raises(ModelFileError, match=expected):
            open_table("ads", tmp_path / "ads.npz")

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ([1, 2, 3, 4, 2], "key 2 is in row 1 and again in row 4"),
            ([1, 2, -(2**63), 4, 5], r"row 2: key -9223372036854775808 is reserved"),
            ([1, -(2**63) + 1, 3, 4, 5], "row 1: key -9223372036854775807 is reserved"),
            ([2**63 - 1, 2, 3, 4, 5], "row 0: key 9223372036854775807 is reserved"),
            ([1, 2, 3, 4, 2**63 - 2], "row 4: key 9223372036854775806 is reserved"),
        ],
    )
    def test_repeated_and_reserved_keys(self, tmp_path, keys, expected):
        np.savez(tmp_path / "ads.npz", keys=np.array(keys), vectors=VECTORS)

        with pytest.raises(ModelFileError, match=rf"ads\.npz#keys: {expected}"):
            open_table("ads", tmp_path / "ads.npz").check_keys()

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("ads.csv", r"expected \.npy, \.npz, \.safetensors, \.parquet, \.pt or \.pth, found '\.csv'"),
            ("ads.csv#ads", r"expected \.safetensors, \.parquet, \.pt or \.pth, found '\.csv'"),
            ("folder", "no tables found: expected"),
            ("absent.pt", "absent.pt: no such file or folder"),
            ("absent.npy", "absent.npy: cannot be read: No such file"),
        ],
    )
    def test_a_path_that_is_not_a_source(self, tmp_path, source, expected):
        (tmp_path / "ads.csv").write_text("1,2")
        (tmp_path / "folder").mkdir()

        with pytest.raises(ModelFileError, match=expected):
            open_table("ads", tmp_path / source)
