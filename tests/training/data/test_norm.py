"""HugeCTR's Norm files: golden bytes, round trips, streams, and damaged files."""

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY
from training.data import read_norm, write_file_list, write_norm
from training.data.norm import is_norm
from training.errors import DataError
from training.samples import Samples

# One record with checksums: label 1.0, dense 0.5 and 0.25, slots [7] and [8, 9] as uint32.
GOLDEN = bytes.fromhex(
    "40000000" + "".join(f"{number:02x}00000000000000" for number in (1, 1, 1, 2, 2, 0, 0, 0)) + "07"
    "20000000"
    "0000803f"
    "0000003f"
    "0000803e"
    "01000000"
    "07000000"
    "02000000"
    "08000000"
    "09000000"
    "d7"
)


def nested(samples):
    """The keys of samples as lists, by sample and slot."""
    ptrs = samples.bags.row_ptrs
    bags = [samples.bags.keys[begin:end].tolist() for begin, end in pairwise(ptrs)]
    return [bags[first : first + samples.bags.slots] for first in range(0, len(bags), samples.bags.slots)]


def test_the_bytes_are_hugectrs(tmp_path):
    file = tmp_path / "one"

    write_norm(file, [[1.0]], [[0.5, 0.25]], [[[7], [8, 9]]], "uint32", "Sum")

    assert file.read_bytes() == GOLDEN


def test_hugectrs_bytes_are_read(tmp_path):
    file = tmp_path / "one"
    file.write_bytes(GOLDEN)

    [samples] = read_norm(file, "uint32")

    assert (samples.labels.tolist(), samples.dense.tolist()) == ([[1.0]], [[0.5, 0.25]])
    assert nested(samples) == [[[7], [8, 9]]]
    assert is_norm(file)


@st.composite
def data_sets(draw):
    slots, labels, dense = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(["uint32", "int64"]))
    key = st.integers(*((0, 2**32 - 1) if dtype == "uint32" else (SMALLEST_KEY, LARGEST_KEY)))
    count = draw(st.integers(1, 9))
    keys = draw(
        st.lists(st.lists(st.lists(key, max_size=3), min_size=slots, max_size=slots), min_size=count, max_size=count)
    )
    number = st.floats(width=32, allow_nan=False, allow_infinity=False)
    rows = [draw(st.tuples(*[st.sampled_from([0.0, 1.0])] * labels, *[number] * dense)) for _ in range(count)]
    numbers = np.array(rows, np.float32).reshape(count, labels + dense)
    return numbers[:, :labels], numbers[:, labels:], keys, dtype


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=data_sets(), check=st.sampled_from(["Sum", "None"]), batch_size=st.integers(1, 10))
def test_what_was_written_is_read_in_batches(tmp_path, data, check, batch_size):
    labels, dense, keys, dtype = data
    file = tmp_path / "data"
    write_norm(file, labels, dense, keys, dtype, check)

    batches = list(read_norm(file, dtype, batch_size))

    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    read = Samples.joined(batches)
    np.testing.assert_array_equal(read.labels, labels)
    np.testing.assert_array_equal(read.dense, dense)
    assert [keys for batch in batches for keys in nested(batch)] == keys
    assert is_norm(file)


@pytest.mark.parametrize("check", ["Sum", pytest.param("None", marks=pytest.mark.long)])
def test_a_file_larger_than_the_blocks_that_are_read_is_whole(tmp_path, check):
    rng = np.random.default_rng(0)
    count = 25_000
    labels, dense = rng.integers(0, 2, (count, 1)), rng.random((count, 13), np.float32)
    keys = rng.integers(0, 1 << 40, (count, 26))
    file = tmp_path / "data"
    write_norm(file, labels, dense, keys[:, :, None].tolist(), "int64", check)
    assert file.stat().st_size > 2 * (4 << 20)

    read = Samples.joined(list(read_norm(file, batch_size=1000)))

    np.testing.assert_array_equal(read.labels, labels)
    np.testing.assert_array_equal(read.dense, dense)
    np.testing.assert_array_equal(read.bags.keys.reshape(count, 26), keys)


def test_the_files_of_a_list_are_read_one_after_another(tmp_path):
    for number in range(3):
        write_norm(tmp_path / f"{number}.data", [[0]], [[]], [[[number]]])
    write_file_list(tmp_path / "list.txt", [tmp_path / "2.data", "0.data", "1.data"])

    assert [int(batch.bags.keys[0]) for batch in read_norm(tmp_path / "list.txt")] == [2, 0, 1]
    assert is_norm(tmp_path / "list.txt")


def test_a_text_file_and_a_missing_file_are_not_norm(tmp_path):
    (tmp_path / "criteo.txt").write_text("0\t1\t2\n")
    (tmp_path / "short").write_bytes(b"\1")

    assert not any(is_norm(tmp_path / name) for name in ("criteo.txt", "short", "missing"))


def header(check=0, records=1, labels=1, dense=0, slots=1):
    return struct.pack("<8q", check, records, labels, dense, slots, 0, 0, 0)


def replaced(place, byte):
    return GOLDEN[:place] + bytes([byte]) + GOLDEN[place + 1 :]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", ": not a Norm file: it is shorter than a header"),
        (GOLDEN[:30], ": not a Norm file: it is shorter than a header"),
        (GOLDEN[:68], ": not a Norm file: it is shorter than a header"),
        (replaced(68, 8), ": the checksum of the header is wrong"),
        (header(check=1), ": not a Norm file: the header's first number does not fit its framing"),
        (header(slots=0), ": not a Norm file: the header says 1 records, 1 labels, 0 dense features and 0 slots"),
        (header(records=-1), ": not a Norm file: the header says -1 records"),
        (GOLDEN[:69], " record 0: the file ends, but its header says 1 records"),
        (GOLDEN[:-1], " record 0: the file ends, but its header says 1 records"),
        (GOLDEN + b"\0", ": the header says 1 records, but more bytes follow them"),
        (replaced(80, 1), " record 0: its checksum is wrong"),
        (replaced(len(GOLDEN) - 1, 0), " record 0: its checksum is wrong"),
        (replaced(72, 255), " record 0: its length is negative"),
        (header() + struct.pack("<fi", 1, -1), " record 0: a slot has a negative number of keys"),
        (header() + struct.pack("<fi", 1, 1), " record 0: the file ends, but its header says 1 records"),
        (header(records=2) + struct.pack("<fiI", 1, 1, 5), " record 1: the file ends, but its header says 2 records"),
    ],
)
def test_a_damaged_file_is_named_with_its_record(tmp_path, data, message):
    file = tmp_path / "damaged"
    file.write_bytes(data)

    with pytest.raises(DataError) as caught:
        list(read_norm(file, "uint32"))

    assert str(caught.value).startswith(f"{file}{message}")


@pytest.mark.parametrize("keys", [[], [1, 2, 3]])
def test_a_frame_that_does_not_fit_its_record_is_refused(tmp_path, keys):
    payload = struct.pack("<fi", 1, 2) + struct.pack(f"<{len(keys)}I", *keys)
    framed = struct.pack("<i", 64) + header(check=1) + bytes([sum(header(check=1)) % 256])
    framed += struct.pack("<i", len(payload)) + payload + bytes([sum(payload) % 256])
    (tmp_path / "file").write_bytes(framed)

    with pytest.raises(DataError, match="record 0: its length is not that of its labels, dense features and keys"):
        list(read_norm(tmp_path / "file", "uint32"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2\none\n", "the first line says 2 files, but 1 are listed"),
        ("1\nmissing\n", "no such file or directory"),
        (b"1\n\xff\n", "the file list is not UTF-8"),
    ],
)
def test_a_wrong_file_list_is_refused(tmp_path, text, message):
    (tmp_path / "list").write_bytes(text.encode() if isinstance(text, str) else text)

    with pytest.raises(DataError, match=message):
        list(read_norm(tmp_path / "list"))
    with pytest.raises(DataError, match="no such file"):
        list(read_norm(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key_dtype": "int32"}, "key_dtype: expected uint32 or int64, got int32"),
        ({"check": "CRC"}, "check: expected 'Sum' or 'None', got 'CRC'"),
        ({"labels": [1.0]}, r"labels: expected numbers of shape \[1, columns\], got \[1\]"),
        ({"dense": [[1.0], [2.0]]}, r"dense: expected numbers of shape \[1, columns\], got \[2, 1\]"),
        ({"slots": [[[-1]]], "key_dtype": "uint32"}, "slots: a key does not fit uint32"),
        ({"slots": [[[1]], [[1], [2]]]}, r"slots: expected samples with the same number of slots, got \[1, 2\]"),
        ({"slots": []}, r"slots: expected samples with the same number of slots, got \[\]"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        write_norm(**{"path": tmp_path / "file", "labels": [[1.0]], "dense": [[2.0]], "slots": [[[3]]], **arguments})
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_norm(file, [[1.0]], [[2.0]], [[[3]]])
    before = file.read_bytes()
    monkeypatch.setattr("training.data.norm._encode", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        write_norm(file, [[9.0]], [[9.0]], [[[9]]])

    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == before
