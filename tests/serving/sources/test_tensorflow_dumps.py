"""Tables as SparseOperationKit and TensorFlow Recommenders Addons write them: bytes that this file spells out."""

import struct

import numpy as np
import pytest

from serving.errors import ModelFileError
from serving.sources import open_checkpoint, open_table

SOK_TYPES = {"int32": 0, "int64": 1, "uint64": 3, "float16": 4, "float32": 5, "float64": 6}


def sok_head(name, kind, dtype):
    return name.rjust(256).encode() + struct.pack(">I", kind) + b" " * 32 + struct.pack(">I", SOK_TYPES[dtype])


def write_sok(folder, name, keys, rows, prefix=None):
    prefix = prefix or name
    (folder / f"{prefix}-key").write_bytes(sok_head(name, 0, str(keys.dtype)) + keys.tobytes())
    (folder / f"{prefix}-weight").write_bytes(sok_head(name, 1, str(rows.dtype)) + rows.tobytes())
    (folder / f"{prefix}-Adam-m").write_bytes(sok_head(name, 2, str(rows.dtype)) + rows.tobytes())


def write_shard(folder, table, number, count, keys, rows):
    np.array(keys, "<i8").tofile(folder / f"{table}_mht_{number}of{count}-keys")
    np.array(rows, "<f4").tofile(folder / f"{table}_mht_{number}of{count}-values")


def everything(rows):
    return {
        key: row for keys, vectors in rows.batches(2) for key, row in zip(keys.tolist(), vectors.tolist(), strict=True)
    }


@pytest.mark.parametrize("key_type", ["int32", "int64", "uint64"])
@pytest.mark.parametrize("row_type", ["float32", "float16"])
def test_a_dump_of_sok_is_read_by_the_names_of_its_variables(tmp_path, key_type, row_type):
    write_sok(tmp_path, "ads/v:0", np.array([7, 2, 5], key_type), np.arange(6, dtype=row_type).reshape(3, 2), "ads_v_0")
    write_sok(tmp_path, "users", np.array([1], key_type), np.ones((1, 3), row_type))

    rows = open_table("users", tmp_path)
    assert everything(rows) == {1: [1, 1, 1]}
    assert everything(open_table("anything", f"{tmp_path}#ads/v:0")) == {7: [0, 1], 2: [2, 3], 5: [4, 5]}
    assert sorted(open_checkpoint(tmp_path).tables()) == ["ads/v:0", "users"]


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("t-key", b"short", "t-key: expected a head of 296 bytes, found 5 bytes in all"),
        ("t-key", sok_head("t", 1, "int64") + bytes(8), "expected kind 0 and a type below 7 .*found kind 1 and type 1"),
        ("t-key", sok_head("t", 0, "int64") + bytes(9), "t-key: expected a multiple of 8 bytes .int64., found 9"),
        ("t-key", sok_head("t", 0, "int64"), "t-weight: expected a multiple of 0 numbers, .* found 4"),
        ("t-key", sok_head("t", 0, "float32") + bytes(8), "t-key: expected integer keys"),
        ("t-weight", sok_head("t", 1, "float32") + bytes(12), "multiple of 2 numbers, a row for each key .* found 3"),
        ("t-weight", sok_head("t", 1, "float64") + bytes(32), "expected float32, float16 or bfloat16 .*got float64"),
    ],
)
def test_a_damaged_dump_of_sok_is_named(tmp_path, file, data, message):
    write_sok(tmp_path, "t", np.array([1, 2]), np.ones((2, 2), np.float32))
    (tmp_path / file).write_bytes(data)

    with pytest.raises(ModelFileError, match=message):
        open_table("t", tmp_path)


def test_the_shards_of_tfra_are_one_table(tmp_path):
    write_shard(tmp_path, "emb_ads", 1, 2, [3, 1], [[3, 3], [1, 1]])
    write_shard(tmp_path, "emb_ads", 2, 2, [2], [[2, 2]])
    write_shard(tmp_path, "emb_users", 1, 2, [], [])
    write_shard(tmp_path, "emb_users", 2, 2, [9], [[9]])

    assert everything(open_table("emb_ads", tmp_path).as_dtype("fp32")) == {3: [3, 3], 1: [1, 1], 2: [2, 2]}
    assert everything(open_table("emb_users", tmp_path).as_dtype("fp32")) == {9: [9]}
    assert open_checkpoint(tmp_path).tables() == ["emb_ads", "emb_users"]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(1, 2, [1], [[1.0]])], "#t: expected 2 parts, numbered from 1, found 1"),
        ([(1, 1, [1], [[1.0]]), (2, 2, [2], [[2.0]]), (3, 2, [2], [[2.0]])], "2 parts, numbered from 1, found 1, 2, 3"),
        ([(1, 1, [], [])], "#t: expected at least one row, found none"),
        ([(1, 1, [1, 2, 3], [[1.0]])], "a vector for each of 3 keys .*, found 4 bytes"),
        ([(1, 2, [1], [[1.0]]), (2, 2, [2], [[2.0, 2.0]])], "one dimension in all files, found rows of 4 and 8"),
    ],
)
def test_shards_of_tfra_that_do_not_fit_are_named(tmp_path, shards, message):
    for shard in shards:
        write_shard(tmp_path, "t", *shard)

    with pytest.raises(ModelFileError, match=message):
        open_table("t", tmp_path)
