"""HPS's binary dump, byte for byte (HugeCTR v24.06), and what is refused of it."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.dumps.formats import open_dump, write_dump
from serving.errors import ModelFileError
from serving.storage import TableSpec

WIDE, NARROW = TableSpec("m.t", 2), TableSpec("m.t", 2, key_bytes=4)
# The header, then key 258 and its row 1.0, -2.0, then key 7 and its row 0.5, 0.25.
GOLDEN = bytes.fromhex("62696e00 01000000 08000000 08000000 0201000000000000 0000803f000000c0 0700000000000000")
GOLDEN += bytes.fromhex("0000003f0000803e")
GOLDEN_OF_UINT32 = bytes.fromhex("62696e00 01000000 04000000 08000000 ffffffff 0000803f000000c0")
GOLDEN_EMPTY = bytes.fromhex("62696e00 01000000 08000000 00000000")


def write(path, spec, *batches):
    arrays = [(np.array(keys, np.int64), np.array(rows, np.float32).reshape(-1, spec.dim)) for keys, rows in batches]
    write_dump(path, spec, iter(arrays), in_key_order=False)


def read(path, spec, batch_rows=100):
    with open_dump(path, spec, "t") as dump:
        batches = list(dump.batches(batch_rows))
        assert dump.rows == sum(keys.size for keys, _ in batches)
    assert all(keys.dtype == np.int64 and rows.dtype == np.float32 for keys, rows in batches)
    return [pair for keys, rows in batches for pair in zip(keys.tolist(), rows.tolist(), strict=True)]


def test_a_dump_has_the_bytes_that_hps_writes(tmp_path):
    write(tmp_path / "t.bin", WIDE, ([258], [[1, -2]]), ([7], [[0.5, 0.25]]))
    write(tmp_path / "u.bin", NARROW, ([2**32 - 1], [[1, -2]]))
    write(tmp_path / "e.bin", WIDE)

    assert (tmp_path / "t.bin").read_bytes() == GOLDEN
    assert (tmp_path / "u.bin").read_bytes() == GOLDEN_OF_UINT32
    assert (tmp_path / "e.bin").read_bytes() == GOLDEN_EMPTY


@pytest.mark.parametrize(
    ("content", "spec", "expected"),
    [
        (GOLDEN, WIDE, [(258, [1, -2]), (7, [0.5, 0.25])]),
        (GOLDEN_OF_UINT32, NARROW, [(2**32 - 1, [1, -2])]),
        (GOLDEN_EMPTY, WIDE, []),
        (GOLDEN[:16], WIDE, []),  # no rows, but the size that they would have
        (GOLDEN[:12], WIDE, []),  # what HPS writes of a table that it does not know
    ],
    ids=["int64", "uint32", "empty", "empty of a known size", "unknown to HPS"],
)
def test_what_hps_wrote_is_read(tmp_path, content, spec, expected):
    (tmp_path / "t.bin").write_bytes(content)

    assert read(tmp_path / "t.bin", spec) == expected


@settings(deadline=None, max_examples=30)
@given(
    spec=st.sampled_from([WIDE, NARROW]),
    keys=st.lists(st.integers(0, 2**32 - 1), max_size=20, unique=True),
    batch_rows=st.integers(1, 7),
)
def test_a_dump_is_read_as_it_was_written_in_batches_of_any_size(tmp_path_factory, spec, keys, batch_rows):
    path = tmp_path_factory.mktemp("dump") / "t.bin"
    rows = np.random.default_rng(0).normal(size=(len(keys), 2)).astype(np.float32)
    parts = [slice(begin, begin + batch_rows) for begin in range(0, len(keys), batch_rows)]
    write(path, spec, *((keys[part], rows[part]) for part in parts))

    head = struct.pack("<4sIII", b"bin", 1, spec.key_bytes, 8 if keys else 0)
    form = "<q" if spec.key_bytes == 8 else "<I"
    pairs = [struct.pack(form, key) + row.tobytes() for key, row in zip(keys, rows, strict=True)]
    assert path.read_bytes() == head + b"".join(pairs)
    assert read(path, spec, batch_rows) == list(zip(keys, rows.tolist(), strict=True))


@pytest.mark.parametrize(
    ("content", "spec", "reason"),
    [
        (b"", WIDE, r"offset 0: expected b'bin\\x00', .* found b''"),
        (b"\x89PNG" + GOLDEN[4:], WIDE, r"offset 0: expected b'bin\\x00', .* found b'\\x89PNG'"),
        (GOLDEN[:11], WIDE, "offset 11: the file ends inside its header of 16 bytes"),
        (GOLDEN[:13], WIDE, "offset 13: the file ends inside its header of 16 bytes"),
        (GOLDEN[:4] + b"\x02\0\0\0" + GOLDEN[8:], WIDE, "offset 4: expected version 1, found 2"),
        (GOLDEN, NARROW, "offset 8: expected keys of 4 bytes, found 8"),
        (GOLDEN_OF_UINT32, WIDE, "offset 8: expected keys of 8 bytes, found 4"),
        (GOLDEN, TableSpec("m.t", 3), "offset 12: expected values of 12 bytes, 3 floats, found 8"),
        (GOLDEN_EMPTY + GOLDEN[16:], WIDE, "offset 12: expected values of 8 bytes, 2 floats, found 0"),
        (GOLDEN[:-1], WIDE, "offset 32: the file ends 15 bytes into pair 1, of 16 bytes"),
        (GOLDEN + b"\0", WIDE, "offset 48: the file ends 1 bytes into pair 2, of 16 bytes"),
    ],
)
def test_a_damaged_dump_or_one_of_another_table_is_refused_with_the_offset(tmp_path, content, spec, reason):
    (tmp_path / "t.bin").write_bytes(content)

    with pytest.raises(ModelFileError, match=rf"t\.bin: {reason}"):
        read(tmp_path / "t.bin", spec)


@pytest.mark.parametrize("key", [2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1])
def test_a_reserved_key_is_refused_with_its_offset(tmp_path, key):
    (tmp_path / "t.bin").write_bytes(GOLDEN[:32] + struct.pack("<q", key) + GOLDEN[40:])

    for batch_rows in (1, 10):
        with pytest.raises(ModelFileError, match=rf"offset 32: pair 1: key {key} is reserved"):
            read(tmp_path / "t.bin", WIDE, batch_rows)


def test_a_dump_that_shrinks_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(GOLDEN)
    with open_dump(path, WIDE, "t") as dump:
        path.write_bytes(GOLDEN[:32])

        with pytest.raises(ModelFileError, match="had 2 pairs when it was opened"):
            list(dump.batches(100))


def test_a_dump_that_is_absent_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"t\.bin: cannot be read: No such file"):
        read(tmp_path / "t.bin", WIDE)


def test_a_dump_that_goes_after_it_was_opened_is_refused(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(GOLDEN)
    with open_dump(path, WIDE, "t") as dump:
        path.unlink()

        with pytest.raises(ModelFileError, match=r"t\.bin: cannot be read: No such file"):
            list(dump.batches(100))
