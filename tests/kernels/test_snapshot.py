"""Snapshots against dicts, against the host table and against a reader in plain Python."""

import os
import struct
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import ReservedKeyError, RowValueError, TableFullError
from kernels.host import pool_rows, round_rows
from kernels.snapshot import Snapshot, write_snapshot
from tests.kernels.snapshot_files import (
    PAGE,
    SOURCE,
    bucket_at,
    find,
    header_of,
    random_rows,
    sections,
    write,
)

pytestmark = pytest.mark.usefixtures("reading_loops")

ROW_DTYPES = ["fp32", "fp16", "bf16", "int8", "uint8"]
KEYS = st.lists(
    st.one_of(st.integers(-20, 20), st.sampled_from([-(2**63) + 2, 2**63 - 3, 2**32])),
    min_size=1,
    max_size=40,
    unique=True,
)


def fetch(snapshot, keys):
    """Fetch into a buffer of NaN, so an unwritten row shows."""
    out = np.full((len(keys), snapshot.dim), np.nan, dtype=np.float32)
    return out, snapshot.fetch(np.array(keys, dtype=np.int64), out)


@settings(deadline=None, max_examples=30)
@given(keys=KEYS, asked=st.lists(st.integers(-30, 30), max_size=40), dim=st.sampled_from([1, 3, 8, 32, 100]))
def test_a_snapshot_answers_as_a_dict_does(keys, asked, dim):
    rows = np.random.default_rng(len(keys)).standard_normal((len(keys), dim), dtype=np.float32)
    model = dict(zip(keys, rows.tolist(), strict=True))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "t.snapshot"
        write(path, keys, rows, batch_rows=7)
        snapshot = Snapshot(path)

        out, found = fetch(snapshot, asked + keys)

        assert found.tolist() == [key in model for key in asked + keys]
        assert out.tolist() == [model.get(key, [0.0] * dim) for key in asked + keys]
        assert [batch.tolist() for batch, _ in snapshot.items(9)] == [
            keys[at : at + 9] for at in range(0, len(keys), 9)
        ]
        snapshot.check_content()


@pytest.mark.parametrize("row_dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 16, 32, 65, 128])
def test_rows_come_back_rounded_to_their_row_dtype(tmp_path, dim, row_dtype):
    keys, rows = random_rows(5000, dim)
    rounded = np.empty_like(rows)
    round_rows(rows, row_dtype, rounded)
    assert write(tmp_path / "t", keys, rows, row_dtype) == 5000
    snapshot = Snapshot(tmp_path / "t")

    out, found = fetch(snapshot, keys)
    walked = np.concatenate([batch for _, batch in snapshot.items(999)])

    assert found.all()
    assert (out == rounded).all()
    assert (walked == rounded).all()
    assert (len(snapshot), snapshot.dim, snapshot.row_dtype) == (5000, dim, row_dtype)


@pytest.mark.parametrize("row_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_pooled_like_their_fetched_rows(tmp_path, row_dtype, combiner, weighted):
    keys, rows = random_rows(3000, 20)
    write(tmp_path / "t", keys, rows, row_dtype)
    snapshot = Snapshot(tmp_path / "t")
    rng = np.random.default_rng(1)
    asked = np.where(rng.random(2000) < 0.9, rng.choice(keys, 2000), 2**50)
    row_ptrs = np.sort(np.concatenate(([0, 2000], rng.integers(0, 2000, 500)))).astype(np.int32)
    weights = rng.random(2000, dtype=np.float32) if weighted else None
    gathered, held = fetch(snapshot, asked)
    expected = np.empty((501, 20), dtype=np.float32)
    pool_rows(gathered, row_ptrs, expected, combiner, weights)
    out = np.full((501, 20), np.nan, dtype=np.float32)

    found = snapshot.fetch_pooled(asked, row_ptrs, out, combiner, weights)

    assert (found == held).all()
    assert (found == np.isin(asked, keys)).all()
    assert (out == expected).all()


def test_the_file_follows_the_format(tmp_path):
    keys, rows = random_rows(4000, 10)  # rows of 40 bytes take 64
    write(tmp_path / "t", keys, rows)
    data = (tmp_path / "t").read_bytes()
    header = header_of(data)
    where = sections(header, stride_bytes=64)

    assert header["magic"] == b"HRSNAP\r\n"
    assert [header[name] for name in ("format", "dim", "row_type", "key_bytes", "unused")] == [2, 10, 0, 8, 0]
    assert (header["rows"], header["capacity_rows"], header["source"]) == (4000, 4000, SOURCE)
    assert len(data) == where["end"]
    assert struct.unpack_from("<4000q", data, where["keys"]) == tuple(keys.tolist())
    assert [find(data, key) for key in keys.tolist()] == list(range(4000))
    assert find(data, 2**60) is None
    for number in (0, 17, 3999):
        assert struct.unpack_from("<10f", data, where["rows"] + 64 * number) == tuple(rows[number].tolist())
    assert not any(data[where["rows"] + 64 * 4000 : where["checksums"]])


def test_the_checksums_match_zlib(tmp_path):
    keys, rows = random_rows(500, 16)
    write(tmp_path / "t", keys, rows)
    data = bytearray((tmp_path / "t").read_bytes())
    where = sections(header_of(data), stride_bytes=64)

    sums = [zlib.crc32(data[at : at + PAGE]) for at in range(PAGE, where["checksums"], PAGE)]

    assert list(struct.unpack_from(f"<{len(sums)}I", data, where["checksums"])) == sums


def test_unused_rows_change_nothing(tmp_path):
    keys, rows = random_rows(300, 8)
    write(tmp_path / "t", keys, rows, capacity_rows=1000)
    snapshot = Snapshot(tmp_path / "t")

    out, found = fetch(snapshot, [*keys, 2**50])

    assert found.tolist() == [True] * 300 + [False]
    assert (out[:300] == rows).all()
    assert not out[300].any()
    assert len(snapshot) == 300
    snapshot.check_content()


def test_a_probe_that_goes_past_full_buckets_finds_its_key(tmp_path):
    keys, rows = random_rows(20_000, 4)
    write(tmp_path / "t", keys, rows)
    data = (tmp_path / "t").read_bytes()
    count = header_of(data)["bucket_count"]
    passed = [number for number in range(count) if bucket_at(data, number)[2]]
    assert passed  # otherwise this test shows nothing
    late = [key for number in passed for key in bucket_at(data, (number + 1) % count)[0] if key != -(2**63)]

    out, found = fetch(Snapshot(tmp_path / "t"), late)

    assert found.all()
    by_key = dict(zip(keys.tolist(), rows.tolist(), strict=True))
    assert out.tolist() == [by_key[key] for key in late]


@pytest.mark.parametrize("key", [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1])
def test_reserved_keys_are_neither_written_nor_looked_up(tmp_path, key):
    with pytest.raises(ReservedKeyError):
        write(tmp_path / "t", [key], np.ones((1, 4), np.float32))
    write(tmp_path / "t", [1], np.ones((1, 4), np.float32))
    with pytest.raises(ReservedKeyError):
        fetch(Snapshot(tmp_path / "t"), [key])


def test_a_repeated_key_is_refused(tmp_path):
    with pytest.raises(ValueError, match="key 5 occurs twice"):
        write(tmp_path / "t", [5, 6, 5], np.ones((3, 4), np.float32), batch_rows=2)


def test_more_rows_than_the_capacity_are_refused(tmp_path):
    with pytest.raises(TableFullError, match="holds 100 of 150 rows, and the call adds 100"):
        write(tmp_path / "t", range(200), np.ones((200, 4), np.float32), capacity_rows=150)


def test_a_value_that_the_row_dtype_cannot_hold_is_refused_with_its_key(tmp_path):
    rows = np.ones((300, 4), np.float32)
    rows[211, 2] = np.nan
    with pytest.raises(RowValueError, match="of key 211: column 2 is nan"):
        write(tmp_path / "t", range(300), rows, "int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, "fp32"), "dim: expected 1 to"),
        ((4, 0, "fp32"), "capacity_rows: expected 1 to"),
        ((4, 10, "fp8"), "row_dtype: expected one of"),
    ],
)
def test_a_snapshot_with_invalid_arguments_is_not_written(tmp_path, arguments, message):
    with (tmp_path / "t").open("wb") as file, pytest.raises(ValueError, match=message):
        write_snapshot(file.fileno(), *arguments, [], SOURCE)


def test_a_source_of_the_wrong_length_is_refused(tmp_path):
    with (tmp_path / "t").open("wb") as file, pytest.raises(ValueError, match="source: expected 32 bytes, got 3"):
        write_snapshot(file.fileno(), 4, 1, "fp32", [], b"abc")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_an_os_error():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    keys, rows = random_rows(100, 8)

    with pytest.raises(OSError, match="No space left"):
        write_snapshot(descriptor, 8, 100, "fp32", [(keys, rows)], SOURCE)

    os.close(descriptor)


def test_missing_rows_cannot_be_read_by_number(tmp_path):
    write(tmp_path / "t", range(10), np.ones((10, 4), np.float32))
    snapshot = Snapshot(tmp_path / "t")

    for first, count in ((0, 11), (11, 0), (-1, 2), (5, -1), (2**62, 2**62)):
        with pytest.raises(ValueError, match="expected rows of 0 to 10"):
            snapshot.read_items(first, count)
        with pytest.raises(ValueError, match="expected rows of 0 to 10"):
            snapshot.read_keys(first, count)


def test_arguments_are_checked_like_those_of_the_host_table(tmp_path):
    write(tmp_path / "t", range(10), np.ones((10, 4), np.float32))
    snapshot = Snapshot(tmp_path / "t")
    keys, out = np.arange(3), np.empty((3, 4), np.float32)

    with pytest.raises(ValueError, match="out: expected"):
        snapshot.fetch(keys, np.empty((3, 5), np.float32))
    with pytest.raises(TypeError, match="keys: expected"):
        snapshot.fetch(keys.astype(np.float64), out)
    with pytest.raises(ValueError, match="row_ptrs"):
        snapshot.fetch_pooled(keys, np.array([0, 2]), out[:1], "sum")
    with pytest.raises(ValueError, match="combiner"):
        snapshot.fetch_pooled(keys, np.array([0, 3]), out[:1], "max")


def test_a_warm_up_changes_no_answer_and_stops_on_request(tmp_path):
    keys, rows = random_rows(2000, 100)
    write(tmp_path / "t", keys, rows)
    snapshot = Snapshot(tmp_path / "t")
    asked = []

    snapshot.warm_up()
    snapshot.warm_up(lambda: not asked.append(1))

    assert asked == [1]
    assert (fetch(snapshot, keys)[0] == rows).all()


def test_warming_up_a_truncated_file_does_no_harm(tmp_path):
    write(tmp_path / "t", range(10), np.ones((10, 4), np.float32))
    snapshot = Snapshot(tmp_path / "t")
    os.truncate(tmp_path / "t", 100)

    snapshot.warm_up()
