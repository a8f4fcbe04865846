"""Folders of safetensors files as RecIS and TorchEasyRec write them, made with the safetensors package."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from serving.errors import ModelFileError
from serving.sources import open_checkpoint, open_table


def everything(rows):
    rows.check_keys()
    return {
        key: row for keys, vectors in rows.batches(2) for key, row in zip(keys.tolist(), vectors.tolist(), strict=True)
    }


def rows_of(*keys, dim=2):
    return {key: [float(key)] * dim for key in keys}


def part(table, number, count, keys, dim=2, names=("id", "embedding")):
    vectors = np.repeat(np.array(keys, np.float32)[:, None], dim, axis=1)
    of_keys, of_vectors = (f"{table}.{name}/part_{number}_{count}" for name in names)
    return {of_keys: np.array(keys, np.int64), of_vectors: vectors}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of RecIS by two processes: a table, its optimizer's state, and a layer's matrix."""
    first, second = part("bags.ads", 0, 2, [7, -3]), part("bags.ads", 1, 2, [5])
    states = {f"bags.ads.exp_avg/part_{number}_2": np.ones((2 - number, 2), np.float32) for number in (0, 1)}
    # RecIS writes a tensor's parts into the files of its processes, and its own pairs into different files
    save_file({**second, "states": np.ones(3, np.float32)}, tmp_path / "model-000001-of-000002.safetensors")
    save_file({**first, **states, "net.weight": np.eye(2, 3, dtype=np.float32)}, tmp_path / "model-000000.safetensors")
    return tmp_path


def test_the_parts_of_a_table_of_recis_are_one_table(folder):
    assert everything(open_table("ads", folder)) == rows_of(7, -3, 5)
    assert open_checkpoint(folder).tables() == ["bags.ads", "net.weight"]
    assert everything(open_table("anything", f"{folder}#net.weight")) == {0: [1, 0, 0], 1: [0, 1, 0]}


def test_a_header_as_recis_writes_it_is_read(tmp_path):
    tensors = part("t", 0, 1, [4, 9])
    header, data = {}, b""
    for name, tensor in tensors.items():
        dtype = "I64" if tensor.dtype == np.int64 else "F32"
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (8 - len(text) % 8)
    (tmp_path / "model-000000-of-000001.safetensors").write_bytes(struct.pack("<q", len(text)) + text + data)

    assert everything(open_table("t", tmp_path)) == rows_of(4, 9)


def test_a_process_may_have_no_rows(tmp_path):
    save_file({**part("t", 0, 2, []), **part("t", 1, 2, [1])}, tmp_path / "a.safetensors")

    assert everything(open_table("t", tmp_path)) == rows_of(1)


def test_keys_and_values_of_torcheasyrec_are_one_table(tmp_path):
    names = ("keys", "values")
    rows = {f"ebc.users.weight/part_{number}_2": np.full((2, 3), number, np.float16) for number in (0, 1)}
    save_file({**part("ebc.ads", 1, 2, [5], names=names), **rows}, tmp_path / "model-000001-of-000002.safetensors")
    save_file(part("ebc.ads", 0, 2, [8, 6], names=names), tmp_path / "model-000000-of-000002.safetensors")

    assert everything(open_table("ads", tmp_path)) == rows_of(8, 6, 5)
    assert everything(open_table("users", tmp_path)) == {key: [key // 2] * 3 for key in range(4)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (part("t", 1, 2, [1]), "#t.id: expected 2 parts, numbered from 0, found 1"),
        (part("t", 0, 1, []), "#t: expected at least one row, found none"),
        ({**part("t", 0, 2, [1]), **part("t", 1, 2, [2], dim=3)}, "#t: expected rows of one dimension, found 2 and 3"),
        (
            {**part("t", 0, 1, [1]), "t.embedding/part_0_1": np.ones((2, 2), np.float32)},
            "#t: expected 2 keys, one per vector of .*#t, got 1",
        ),
        (
            {**part("t", 0, 1, [1]), "t.embedding/part_0_1": np.ones((1, 2))},
            r"#t.embedding/part_0_1: expected float32, float16 or bfloat16 .*got float64 \[1, 2\]",
        ),
        (
            {**part("t", 0, 1, [1]), "t.id/part_0_1": np.ones(1, np.int32)},
            r"#t.id/part_0_1: expected int64 keys \[V\], got int32 \[1\]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "a.safetensors")

    with pytest.raises(ModelFileError, match=message):
        open_table("t", tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"t": np.ones((2, 2), np.float32)}, tmp_path / f"{name}.safetensors")

    with pytest.raises(ModelFileError, match=r"b.safetensors#t: expected each tensor once.*a.safetensors"):
        open_table("t", tmp_path)
