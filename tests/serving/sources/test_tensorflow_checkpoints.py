"""Checkpoints that TensorFlow 2.21 has written: ``tests/tensorflow/checkpoints.py`` says how."""

import json
import shutil
import struct
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


def test_a_file_of_keras_is_refused_with_the_call_that_takes_the_model(tmp_path):
    (tmp_path / "model.keras").touch()

    with pytest.raises(ModelFileError, match=r"found '.keras'; for a Keras model, call from_keras"):
        open_table("users", tmp_path / "model.keras")


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


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def message(*fields):
    """A protocol buffer of numbers, messages and, as ``(field, number, None)``, numbers of 4 bytes."""
    parts = []
    for field, value, *is_fixed in fields:
        if is_fixed:
            parts.append(bytes([field << 3 | 5]) + value.to_bytes(4, "little"))
        elif isinstance(value, bytes):
            parts.append(bytes([field << 3 | 2]) + varint(len(value)) + value)
        else:
            parts.append(bytes([field << 3]) + varint(value))
    return b"".join(parts)


def masked(data):
    crc = crc32c(np.frombuffer(data, np.uint8))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def block(items, compression=0):
    content = b"".join(
        varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in sorted(items.items())
    )
    content += struct.pack("<II", 0, 1)
    return content + bytes([compression]) + masked(content + bytes([compression])).to_bytes(4, "little")


def write_checkpoint(folder, entries, header=((1, 1),), compression=0):
    """Write a checkpoint whose tensors have 24 bytes each: 2 rows of 3 floats."""
    rows = np.arange(6, dtype="<f4").tobytes()
    (folder / "c.data-00000-of-00001").write_bytes(rows)
    place = ((4, 0), (5, len(rows)), (6, masked(rows), None))
    entries = {name: message(*fields, *place) for name, fields in entries.items()}
    first = block({b"": message(*header), **entries}, compression)
    handle = varint(0) + varint(len(first) - 5)
    index = block({b"z": handle})
    footer = handle + varint(len(first)) + varint(len(index) - 5)
    magic = 0xDB4775248B80FB57.to_bytes(8, "little")
    (folder / "c.index").write_bytes(first + index + footer.ljust(40, b"\0") + magic)
    return folder / "c"


def shape(*sizes):
    return (2, message(*((2, message((1, size))) for size in sizes)))


def partition(begin, length):
    return (7, message((1, message((1, begin), (2, length))), (1, b"")))


PARTS = {b"\0t\0\1\1\2" + bytes([128 ^ begin, 130, 128, 127]): ((1, 1), shape(2, 3)) for begin in (0, 2)}


def test_a_checkpoint_of_this_file_is_read(tmp_path):
    path = write_checkpoint(tmp_path, {b"t": ((1, 1), shape(4, 3), partition(2, 2), partition(0, 2)), **PARTS})

    assert everything(open_table("t", path)) == {
        str(key): [key % 2 * 3.0 + one for one in range(3)] for key in range(4)
    }


@pytest.mark.parametrize(
    ("entries", "changes", "reason"),
    [
        (
            {b"t": ((1, 1), shape(2, 3))},
            {"compression": 1},
            "c.index: .* without compression.*found type 1",
        ),
        ({b"t": ((1, 1), shape(2, 3))}, {"header": ((1, 1), (2, 1))}, "c.index: expected little-endian numbers"),
        ({b"t": ((1, 1), shape(2, 4))}, {}, r"c#t: expected the bytes of float32 \[2, 4\], found 24"),
        ({b"t": ((1, 2), shape(1, 3))}, {}, "expected float32, float16 or bfloat16.*got float64"),
        ({b"t": ((1, 23), shape(2, 3))}, {}, "expected float32, float16 or bfloat16.*got TensorFlow's type 23"),
        ({b"t-keys": ((1, 7), shape(2)), b"t-values": ((1, 1), shape(2, 3))}, {}, "expected numbers, found string"),
        (
            {b"t-keys": ((1, 1), shape(6)), b"t-values": ((1, 1), shape(2, 3))},
            {},
            r"expected integer keys \[V\], got float32",
        ),
        ({b"t": ((1, 1), shape(4, 3), partition(0, 2)), **PARTS}, {}, "expected partitions with 4 rows, found 2"),
        ({b"t": ((1, 1), shape(4, 3), partition(2, 2)), **PARTS}, {}, "0 to 4, found a gap at row 0"),
        ({b"t": ((1, 1), shape(4, 3), partition(0, 2), partition(2, 2))}, {}, "0 to 4, found a gap at row 0"),
        (
            {b"t/part_1-keys": ((1, 9), shape(3)), b"t/part_1-values": ((1, 1), shape(2, 3))},
            {},
            "c#t: expected 1 part, numbered from 0, found 1",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_a_table_is_named(tmp_path, entries, changes, reason):
    path = write_checkpoint(tmp_path, entries, **changes)

    with pytest.raises(ModelFileError, match=reason):
        open_table("t", f"{path}#t")
