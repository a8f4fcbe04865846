"""Checkpoints that TensorFlow 2.21 has written: ``tests/tensorflow/checkpoints.py`` says how."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from serving.errors import ModelFileError
from serving.sources import open_checkpoint, open_table
from serving.sources.crc32c import crc32c

GOLDEN = Path(__file__).with_name("checkpoints")
TABLES = json.loads((GOLDEN / "tables.json").read_text())


@pytest.fixture
def copy(tmp_path):
    """The golden files, which a test may change."""
    return shutil.copytree(GOLDEN, tmp_path / "copy")


def everything(rows):
    rows.check_keys()
    return {
        str(key): row
        for keys, vectors in rows.batches(30)
        for key, row in zip(keys.tolist(), vectors.tolist(), strict=True)
    }


@pytest.mark.parametrize("source", TABLES)
def test_the_tables_of_a_checkpoint_are_found_by_the_names_of_variables_and_layers(source):
    for name, expected in TABLES[source].items():
        assert everything(open_table(name, GOLDEN / source)) == expected
    tables = open_checkpoint(GOLDEN / source).tables()
    assert {name.rpartition("/")[2] for name in tables} == set(TABLES[source])


@pytest.mark.parametrize("source", ["keras/ckpt-1", "keras/ckpt-1.index", "keras"])
def test_a_checkpoint_is_named_by_its_prefix_its_index_or_its_folder(source):
    assert everything(open_table("items", GOLDEN / source)) == TABLES["keras"]["items"]
    assert everything(open_table("x", f"{GOLDEN / source}#users")) == TABLES["keras"]["users"]
    place = f"{GOLDEN / source}#model/_operations/2/_embeddings"
    assert everything(open_table("x", place)) == TABLES["keras"]["users"]


def test_a_variable_that_is_no_table_is_refused():
    for name, reason in (
        ("adam/iteration", r"expected float32, float16 or bfloat16 \[V, D\], .*got int64 \[\]"),
        ("dense/bias", r"got float32 \[2\]"),
        ("absent", "no table 'absent'"),
    ):
        with pytest.raises(ModelFileError, match=reason):
            open_table("x", f"{GOLDEN / 'keras'}#{name}")


def test_every_changed_byte_of_a_table_is_noticed(copy):
    path = copy / "hash_table.data-00000-of-00001"
    content = path.read_bytes()
    for place in range(3 * 8 + 3 * 2 * 4):  # the keys and the rows; the graph of objects follows
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ModelFileError, match="is damaged: its bytes do not have the check sum of the index"):
            open_table("words", copy / "hash_table")


def test_every_changed_byte_of_an_index_is_noticed_or_has_no_effect(copy):
    path = copy / "hash_table.index"
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            rows = everything(open_table("words", copy / "hash_table"))
        except ModelFileError as err:
            assert str(path) in str(err)  # noqa: PT017
        else:
            assert rows == TABLES["hash_table"]["words"]


def test_truncated_files_are_named(copy):
    for name, reason in (
        ("hash_table.index", "is not the index of a TensorFlow checkpoint, or is truncated"),
        ("hash_table.data-00000-of-00001", "expected at least .* bytes: the file is truncated"),
    ):
        content = (copy / name).read_bytes()
        for size in (0, 10, 50):
            (copy / name).write_bytes(content[:size])
            with pytest.raises(ModelFileError, match=f"{name}: {reason}"):
                open_table("words", copy / "hash_table")
        (copy / name).write_bytes(content)
    (copy / name).unlink()
    with pytest.raises(ModelFileError, match=f"{name}: cannot be read: No such file"):
        open_table("words", copy / "hash_table")


def test_a_folder_without_its_latest_checkpoint_is_named(copy):
    (copy / "keras" / "ckpt-1.index").unlink()

    with pytest.raises(ModelFileError, match=r"ckpt-1.index: cannot be read: No such file"):
        open_checkpoint(copy / "keras")


def test_check_sums_are_those_of_rfc_3720():
    for data, expected in (
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ):
        assert crc32c(np.frombuffer(data, np.uint8)) == expected


def test_a_check_sum_of_many_words_is_that_of_its_parts_in_a_loop():
    data = np.random.default_rng(0).integers(0, 256, 1 << 13, dtype=np.uint8)
    for size in (0, 1, 2, 3, 4, 5, 4095, 8192):
        state = 0xFFFFFFFF
        for byte in data[:size].tolist():
            state ^= byte
            for _ in range(8):
                state = state >> 1 ^ 0x82F63B78 * (state & 1)
        assert crc32c(data[:size]) == state ^ 0xFFFFFFFF
