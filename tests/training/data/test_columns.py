"""Parquet and CSV files: columns of any types, several files, and what is refused."""

import csv
import gc
import gzip
import json
import os
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ConfigError, MissingExtraError
from training.data import (
    ColumnMap,
    read_csv,
    read_hugectr_parquet,
    read_norm,
    read_parquet,
    read_raw,
    write_data_set,
    write_file_list,
)
from training.data import columns as columns_module
from training.data.columns import read_columns
from training.data.csv_faults import EndedStream
from training.errors import DataError
from training.samples import Bags, Samples

COLUMNS = ColumnMap(("click",), ("age", "price"), ("user", "tags"))
INTEGER = "expected an integer of 64 bits"


def table(**changes):
    return pa.table(
        {
            "tags": [[7, 8], [], None],
            "click": pa.array([1, 0, 1], pa.int8()),
            "unused": ["a", "b", "c"],
            "price": pa.array([0.5, 1.5, 2.5], pa.float64()),
            "age": pa.array([30, 40, 50], pa.uint16()),
            "user": pa.array([1, None, 3], pa.int32()),
        }
        | changes
    )


def samples_of(parts):
    return Samples.joined(list(parts))


def same(found, expected):
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.dense, expected.dense)
    np.testing.assert_array_equal(found.bags.keys, expected.bags.keys)
    np.testing.assert_array_equal(found.bags.row_ptrs, expected.bags.row_ptrs)


def test_columns_of_any_type_become_samples(tmp_path):
    pq.write_table(table(), tmp_path / "a.parquet")

    found = samples_of(read_parquet(tmp_path / "a.parquet", COLUMNS))

    assert found.labels.tolist() == [[1], [0], [1]]
    assert found.dense.tolist() == [[30, 0.5], [40, 1.5], [50, 2.5]]
    assert found.bags.keys.tolist() == [1, 7, 8, 3]
    assert found.bags.row_ptrs.tolist() == [0, 1, 3, 3, 3, 4, 4]


def test_a_folder_is_read_file_by_file_in_batches(tmp_path):
    rows = np.arange(150_000)
    for number in range(2):
        data = {"click": rows % 2, "user": rows + number * len(rows)}
        pq.write_table(pa.table(data), tmp_path / f"{number}.parquet", row_group_size=10_007)

    parts = list(read_parquet(tmp_path, ColumnMap(("click",), (), ("user",)), batch_size=1000))

    found = samples_of(parts)
    assert max(len(part) for part in parts) == 1000
    np.testing.assert_array_equal(found.bags.keys, np.arange(300_000))
    assert found.dense.shape == (300_000, 0)


def test_memory_does_not_grow_with_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(columns_module, "_READ_ROWS", 2000)
    data = pa.table({"click": np.zeros(400_000, np.int8), "user": np.random.default_rng(0).integers(0, 2**60, 400_000)})
    pq.write_table(data, tmp_path / "a.parquet", row_group_size=2000, use_dictionary=False)
    before = pa.total_allocated_bytes()

    parts = read_parquet(tmp_path / "a.parquet", ColumnMap(("click",), (), ("user",)), batch_size=2000)

    assert max(pa.total_allocated_bytes() - before for _ in parts) < data.nbytes / 2


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@pytest.mark.parametrize("first_row", [0, 1, 9, 10, 11, 24, 25, 26, 49, 50, 70])
def test_first_rows_can_be_left_out(tmp_path, suffix, first_row):
    for number in range(2):
        rows = pa.table({"click": np.arange(25) % 2, "user": np.arange(25) + 25 * number})
        if suffix == ".csv":
            pa_csv.write_csv(rows, tmp_path / f"{number}.csv")
        else:
            pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=10)

    parts = read_columns(tmp_path, ColumnMap(("click",), (), ("user",)), batch_size=7, first_row=first_row)

    assert [key for part in parts for key in part.bags.keys.tolist()] == [*range(first_row, 50)]


def test_a_fault_after_rows_that_are_left_out_has_its_row_of_the_file(tmp_path):
    pq.write_table(pa.table({"click": [0, 1, 1, 0, 5], "user": range(5)}), tmp_path / "a.parquet", row_group_size=2)

    with pytest.raises(DataError, match=r"a\.parquet column click record 4: expected 0 or 1, found 5"):
        list(read_columns(tmp_path / "a.parquet", ColumnMap(("click",), (), ("user",)), first_row=3))


def test_slot_sizes_make_keys_of_one_table(tmp_path):
    pq.write_table(table(user=pa.array([0, 1, 3])), tmp_path / "a.parquet")

    found = samples_of(read_parquet(tmp_path / "a.parquet", COLUMNS, slot_sizes=[4, 10]))

    assert found.bags.keys.tolist() == [0, 11, 12, 1, 3]
    with pytest.raises(DataError, match=r"a.parquet column tags record 0: expected a key from 0 to 7, found 8"):
        list(read_parquet(tmp_path / "a.parquet", COLUMNS, slot_sizes=[4, 8]))
    with pytest.raises(DataError, match=r"a.parquet column user record 2: expected a key from 0 to 2, found 3"):
        list(read_parquet(tmp_path / "a.parquet", COLUMNS, slot_sizes=[3, 9]))
    with pytest.raises(ValueError, match="slot_sizes: expected 2 numbers, got 1"):
        list(read_parquet(tmp_path / "a.parquet", COLUMNS, slot_sizes=[3]))


def test_a_slot_of_size_0_shares_the_keys_of_the_next_slot(tmp_path):
    pq.write_table(table(user=pa.array([9, 1, 3])), tmp_path / "a.parquet")

    found = samples_of(read_parquet(tmp_path / "a.parquet", COLUMNS, slot_sizes=[0, 10]))

    assert found.bags.keys.tolist() == [9, 7, 8, 1, 3]


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_csv_files(tmp_path, suffix):
    opened = gzip.open if suffix.endswith("gz") else open
    for number in range(2):
        with opened(tmp_path / f"{number}.{suffix}", "wt", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["user", "name", "click", "price", "tags", "age"])
            writer.writerows([[5, 'a "b", c', 1, 0.5, "", -3], ["", "d", 0, "1e3", -7, 4]])

    found = samples_of(read_csv(tmp_path, COLUMNS))

    assert found.labels.tolist() == [[1], [0]] * 2
    assert found.dense.tolist() == [[-3, 0.5], [4, 1000]] * 2
    assert found.bags.keys.tolist() == [5, -7] * 2
    assert found.bags.row_ptrs.tolist() == [0, 1, 1, 1, 2, 3, 3, 3, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"click": [1, 2, 0]}, "column click record 1: expected 0 or 1, found 2"),
        ({"click": ["1", "true", "yes"]}, "column click record 2: expected a number, found 'yes'"),
        ({"age": [1.0, None, 2.0]}, "column age record 1: expected a number, found null"),
        ({"price": [1.0, 2.0, float("nan")]}, "column price record 2: expected a finite number, found nan"),
        ({"price": [1e39, 2.0, 3.0]}, "column price record 0: expected a number of at most 3.4e\\+38, found 1e\\+39"),
        ({"user": ["x", "y", "z"]}, "column user: expected integers, found string"),
        ({"user": [1.0, 2.0, 3.0]}, "column user: expected integers, found double"),
        ({"user": pa.array([1, 2**64 - 1, 1], pa.uint64())}, f"column user record 1: {INTEGER}, found {2**64 - 1}"),
        ({"tags": [[1, 2], [], [3, None]]}, f"column tags record 2: {INTEGER}, found null"),
        ({"tags": pa.array([[], [1], [2**63]], pa.list_(pa.uint64()))}, f"column tags record 2: {INTEGER}, found"),
        ({"tags": [["a"], [], []]}, "column tags: expected integers, found string"),
    ],
)
def test_values_that_are_refused(tmp_path, change, message):
    pq.write_table(table(**change), tmp_path / "a.parquet")

    with pytest.raises(DataError, match=f"a.parquet {message}"):
        list(read_parquet(tmp_path / "a.parquet", COLUMNS))


HEADER = b"click,price,user,note\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"1,2,3\n", "line 2: expected 4 fields, as the header has, found 3", id="too few fields"),
        pytest.param(b"1,2,3,,\n", "line 2: expected 4 fields, as the header has, found 5", id="too many fields"),
        pytest.param(b"1,2,3,\n1,x,3,\n", "line 3 column price: expected a number, found 'x'", id="text"),
        pytest.param(b"1,2,3,\r\n1,x,3,\r\n", "line 3 column price: expected a number, found 'x'", id="CRLF"),
        pytest.param(b"\n1,2,3,\n\n\n1,x,3,\n", "line 6 column price: expected a number, found 'x'", id="empty lines"),
        pytest.param(b'1,2,3,"a\nb"\n1,x,3,\n', "line 4 column price: expected a number, found 'x'", id="quoted lines"),
        pytest.param(b"1,2,3,\n" * 70_000 + b"1,2e,3,\n", "line 70002 column price: .*'2e'", id="a late line"),
        pytest.param(b"1,NA,3,\n", "line 2 column price: expected a number, found 'NA'", id="no number"),
        pytest.param(
            b"1,2,3,\nnan,2,3,\n",
            "line 3 column click: expected a number, found 'nan'; leave out rows without a label",
            id="NaN label",
        ),
        pytest.param(b"1,-inf,3,\n", "line 2 column price: expected a finite number, found -inf", id="infinity"),
        pytest.param(b"1,1e39,3,\n", "line 2 column price: expected a finite number, found '1e39'", id="too large"),
        pytest.param(
            b"1e39,2,3,\n",
            r"line 2 column click: expected a number of at most 3.4e\+38, found 1e\+39",
            id="a large label",
        ),
        pytest.param(b"\n,2,3,\n", "line 3 column click: expected a number, found ''", id="no label"),
        pytest.param(b"0,2,3,\n2,2,3,\n", "line 3 column click: expected 0 or 1, found 2", id="another label"),
        pytest.param(b"1,2,3.0,\n", "line 2 column user: expected an integer of 64 bits, found '3.0'", id="a fraction"),
        pytest.param(
            b"1,2,+3,\n", "line 2 column user: expected an integer of 64 bits, found '\\+3'", id="a plus sign"
        ),
        pytest.param(b"1,2,%d,\n" % 2**63, f"line 2 column user: .* of 64 bits, found '{2**63}'", id="65 bits"),
        pytest.param(b'1,2,3,\n1,2,3,"a\n1,2,3,\n', "line 3: a quoted field has no closing quote", id="open quote"),
        pytest.param(b'1,2,3,"a', "line 2: a quoted field has no closing quote", id="open quote in the last line"),
        pytest.param(b'1,2,"3,\n', "line 2: a quoted field has no closing quote", id="open quote of a key"),
        pytest.param(b'1,2,3,"' + b"1,2,3,\n" * 30_000, "line 2: a field has more than 131,072", id="long open quote"),
        pytest.param(b"1,2,3,\n1,2,10,\n", "line 3 column user: expected a key from 0 to 9, found 10", id="range"),
        pytest.param(b"1,2,\xff,\n", r"line 2 column user: expected an integer of 64 bits, found b'\\xff'", id="bytes"),
    ],
)
def test_a_wrong_value_of_a_csv_file_names_the_line_and_the_column(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(HEADER + content)

    with pytest.raises(DataError, match=f"a.csv {message}"):
        list(read_csv(tmp_path / "a.csv", ColumnMap(("click",), ("price",), ("user",)), slot_sizes=[10]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", ": the file is empty, expected a header with the names of the columns", id="empty"),
        pytest.param(b"\n\n", ": the file is empty, expected a header", id="empty lines"),
        pytest.param(b'click,"user\n1,2\n', " line 1: a quoted field has no closing quote", id="open quote"),
        pytest.param(
            b'click,"user\n' + b"1,2\n" * 40_000, " line 1: a field has more than 131,072", id="long open quote"
        ),
        pytest.param(b"click,user\n", " line 1 column price: missing; the file has click, user", id="missing"),
        pytest.param(b"\nclick,user,user,price\n", " line 2 column user: occurs twice", id="twice"),
        pytest.param(
            b"click,user,price,\xe9\n", r" line 1: the header is not in UTF-8: b'click,.*\\xe9'", id="Latin-1"
        ),
        pytest.param("click\n1\n".encode("utf-16"), r" line 1: the header is not in UTF-8: b'\\xff\\xfe", id="UTF-16"),
    ],
)
def test_a_wrong_header_of_a_csv_file_is_refused(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)

    with pytest.raises(DataError, match=f"a.csv{message}"):
        list(read_csv(tmp_path / "a.csv", ColumnMap(("click",), ("price",), ("user",))))


@pytest.mark.parametrize("header", [HEADER, HEADER.rstrip()])
def test_a_csv_file_may_have_no_rows(tmp_path, header):
    (tmp_path / "a.csv").write_bytes(header)

    samples = list(read_csv(tmp_path / "a.csv", ColumnMap(("click",), ("price",), ("user",))))

    assert sum(map(len, samples)) == 0


@pytest.mark.parametrize("last", [b"1,2,3,\n", b"2,2,3,\n", b"1,x,3,\n", b'1,2,3,"\n'])
def test_after_reading_no_thread_has_the_stream_of_a_csv_file(tmp_path, last):
    """A thread that drops the stream while Python ends aborts the process."""
    (tmp_path / "a.csv").write_bytes(HEADER + b"1,2,3,\n" * 9 + last)
    columns = ColumnMap(("click",), ("price",), ("user",))

    with suppress(DataError):
        next(read_csv(tmp_path / "a.csv", columns, batch_size=1))  # and leave the others
    error = None
    try:
        list(read_csv(tmp_path / "a.csv", columns))
    except DataError as err:
        error = err  # its traceback has the frames of the readers

    assert (error is None) == (last == b"1,2,3,\n")
    assert not [get_object for get_object in gc.get_objects() if type(get_object) is EndedStream]


def test_quoted_fields_with_several_lines_may_be_anywhere(tmp_path):
    rows = [f'{row % 2},1,{row},"{"a" * (row % 50)}\n""{"b,"}"\n' for row in range(90_000)]  # more than one block
    (tmp_path / "a.csv").write_bytes(HEADER + "".join(rows).encode() + b'1,1,7,"c\n"')

    found = samples_of(read_csv(tmp_path / "a.csv", ColumnMap(("click",), ("price",), ("user",))))

    assert found.bags.keys.tolist() == [*range(90_000), 7]


def test_bytes_in_a_column_that_is_not_read_are_no_fault(tmp_path):
    (tmp_path / "a.csv").write_bytes(HEADER + b"1,2,3,\xff\n")

    assert samples_of(read_csv(tmp_path / "a.csv", ColumnMap(("click",), ("price",), ("user",)))).bags.keys == [3]


def test_the_line_of_a_compressed_csv_file_is_counted_in_its_content(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(HEADER + b"1,2,3,\n1,x,3,\n"))

    with pytest.raises(DataError, match=r"a.csv.gz line 3 column price: expected a number, found 'x'"):
        list(read_csv(tmp_path / "a.csv.gz", ColumnMap(("click",), ("price",), ("user",))))


def test_columns_that_are_missing_or_there_twice(tmp_path):
    pq.write_table(table().rename_columns(["tags", "click", "click", "price", "ages", "user"]), tmp_path / "a.parquet")

    for labels, dense, message in (
        (("click",), (), "column click: occurs twice"),
        (("tags",), ("age",), "column age: missing; the file has tags, .*; did you mean ages?"),
    ):
        with pytest.raises(DataError, match=message):
            list(read_parquet(tmp_path / "a.parquet", ColumnMap(labels, dense, ("user",))))


def test_a_parquet_file_may_have_one_column(tmp_path):
    pq.write_table(pa.table({"a|b": [7, 8]}), tmp_path / "a.parquet")
    [samples] = read_parquet(tmp_path / "a.parquet", ColumnMap((), (), ("a|b",)))
    assert samples.bags.keys.tolist() == [7, 8]


def test_files_that_cannot_be_read(tmp_path):
    pq.write_table(table(), tmp_path / "whole")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole").read_bytes()[:-9])
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"click,age\n" * 9)[:-12])
    (tmp_path / "folder").mkdir()

    for name in ("none.parquet", "none.csv"):
        with pytest.raises(DataError, match=rf"{name}: no such file"):
            list((read_csv if name.endswith("csv") else read_parquet)(tmp_path / name, COLUMNS))
    with pytest.raises(DataError, match=r"cut.parquet: expected a Parquet file, found"):
        list(read_parquet(tmp_path / "cut.parquet", COLUMNS))
    with pytest.raises(DataError, match=r"cut.csv.gz: "):
        list(read_csv(tmp_path / "cut.csv.gz", COLUMNS))
    with pytest.raises(DataError, match=r"the folder has no files \*.parquet"):
        list(read_parquet(tmp_path / "folder", COLUMNS))


@pytest.mark.timeout(60)
def test_a_compressed_file_that_ends_after_many_batches_is_damaged(tmp_path):
    text = b"click,age,user\n" + b"".join(b"1,2,%d\n" % (row * 7919 % 100_003) for row in range(300_000))
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(text, 1)[:-500_000])

    with pytest.raises(DataError, match=r"cut.csv.gz: "):
        list(read_csv(path, ColumnMap(("click",), ("age",), ("user",))))


def test_only_the_data_files_of_a_folder_are_read_and_the_log_says_which_are_left_out(tmp_path, caplog):
    pq.write_table(table(), tmp_path / "part-0.snappy.parquet")
    for name in (".part-0.snappy.parquet.crc", "_SUCCESS", "._1.parquet", "_1.parquet", "1.parquet.bak", "1.parquet~"):
        (tmp_path / name).write_bytes(b"not data")
    for name in ("_temporary", "day=1"):
        (tmp_path / name).mkdir()

    assert len(samples_of(read_parquet(tmp_path, COLUMNS))) == 3
    [line] = caplog.messages
    assert line == (
        f"{tmp_path}: 1 of 9 entries are data files; "
        "the name begins with '.' or '_': 5 ('._1.parquet', '.part-0.snappy.parquet.crc', '_1.parquet', ...); "
        "the name does not end in .parquet: 2 ('1.parquet.bak', '1.parquet~'); "
        "a folder: 1 ('day=1')"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda path: path.mkdir(), "not a regular file", id="folder"),
        pytest.param(os.mkfifo, "not a regular file", id="pipe"),
        pytest.param(lambda path: path.symlink_to("gone"), "a link to a file that does not exist", id="dead link"),
    ],
)
def test_a_data_file_name_that_is_not_a_file_is_refused(tmp_path, make, message):
    pq.write_table(table(), tmp_path / "0.parquet")
    make(tmp_path / "1.parquet")

    with pytest.raises(DataError, match=rf"1.parquet: {message}"):
        list(read_parquet(tmp_path, COLUMNS))


@pytest.mark.parametrize("name", ["0.csv.bak", "0.csv~", ".0.csv.Xy12", ".0.csv.swp", "0.csv.part", "0.csv.tmp"])
def test_a_copy_of_a_csv_file_is_not_data(tmp_path, name):
    (tmp_path / "0.csv").write_text("click,user\n1,7\n", encoding="utf-8")
    (tmp_path / name).write_text("click,user\n0,99\n", encoding="utf-8")

    found = samples_of(read_csv(tmp_path, ColumnMap(("click",), (), ("user",))))

    assert found.bags.keys.tolist() == [7]
    (tmp_path / "0.csv").unlink()
    with pytest.raises(DataError, match=r"the folder has no files \*.csv; 0 of 1 entries are data files; the name "):
        list(read_csv(tmp_path, ColumnMap(("click",), (), ("user",))))


def test_a_damaged_page_with_a_checksum_is_refused(tmp_path):
    plain = {"compression": "none", "use_dictionary": False}
    rows, prices = np.arange(1000), np.full(1000, 1.5)
    data = pa.table({"click": np.ones(1000), "age": prices, "price": prices, "user": rows, "tags": rows})
    pq.write_table(data, tmp_path / "a.parquet", write_page_checksum=True, **plain)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole.replace(prices.tobytes(), (prices + 1).tobytes(), 1))

    with pytest.raises(
        DataError, match=r"a.parquet: expected a Parquet file, found a file that is cut short or damaged"
    ):
        list(read_parquet(tmp_path / "a.parquet", COLUMNS))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(columns_module, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))

    with pytest.raises(MissingExtraError, match=r"pyarrow.*parquet"):
        list(read_csv("a.csv", COLUMNS))


@st.composite
def data_sets(draw):
    slots, labels, dense = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 3))
    rows = draw(st.integers(1, 30))
    sizes = np.array(draw(st.lists(st.integers(0, 3), min_size=rows * slots, max_size=rows * slots)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    row_ptrs = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    bags = Bags(rng.integers(-(2**40), 2**40, row_ptrs[-1]), row_ptrs, slots)
    numbers = rng.normal(size=(rows, dense)).astype(np.float32)
    return Samples(rng.integers(0, 2, (rows, labels)).astype(np.float32), numbers, bags)


@settings(max_examples=15)
@given(data_sets(), st.integers(1, 40), st.integers(1, 9))
def test_what_is_written_is_read_in_every_format(tmp_path_factory, samples, samples_per_file, batch_size):
    folder = tmp_path_factory.mktemp("data")
    parts = [samples[first : first + 7] for first in range(0, len(samples), 7)]

    for data_format, read in (("Parquet", read_hugectr_parquet), ("Norm", read_norm)):
        path = folder / f"{data_format}.txt"
        write_data_set(path, parts, data_format, samples_per_file=samples_per_file)
        same(samples_of(read(path, batch_size=batch_size)), samples)


@given(st.integers(1, 50), st.integers(1, 20))
def test_raw_data_is_read_as_it_was_written(tmp_path_factory, rows, samples_per_file):
    path = tmp_path_factory.mktemp("data") / "data.bin"
    rng = np.random.default_rng(rows)
    keys = np.stack([rng.integers(0, 10, rows), rng.integers(10, 15, rows)], axis=1)
    samples = Samples(
        rng.integers(0, 2, (rows, 1)).astype(np.float32),
        rng.normal(size=(rows, 2)).astype(np.float32),
        Bags.one_key_each(keys),
    )

    write_data_set(path, [samples], "Raw", slot_sizes=[10, 5], samples_per_file=samples_per_file)

    same(samples_of(read_raw(path, 1, 2, 2, slot_sizes=[10, 5], has_floats=True)), samples)
    assert np.fromfile(path, np.uint32).reshape(rows, 5)[:, 4].max() < 5


def test_what_cannot_be_written(tmp_path):
    [samples] = [
        Samples(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), Bags(np.arange(2), np.array([0, 2]), 1))
    ]

    with pytest.raises(ValueError, match="expected one key per slot, got 2"):
        write_data_set(tmp_path / "data.bin", [samples], "Raw")
    with pytest.raises(ValueError, match="needs a suffix"):
        write_data_set(tmp_path / "train", [samples], "Norm")
    assert [path.name for path in tmp_path.iterdir()] == []


class TestHugectrsMetadata:
    @pytest.fixture
    def data(self, tmp_path):
        samples = Samples(
            np.ones((10, 1), np.float32), np.zeros((10, 1), np.float32), Bags.one_key_each(np.arange(20).reshape(10, 2))
        )
        write_data_set(tmp_path / "list.txt", [samples], "Parquet", samples_per_file=6)
        return tmp_path

    def edit(self, data, change):
        path = data / "list" / "_metadata.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        change(document)
        path.write_text(json.dumps(document), encoding="utf-8")

    def test_it_names_columns_and_rows(self, data):
        document = json.loads((data / "list" / "_metadata.json").read_text(encoding="utf-8"))

        assert document == {
            "file_stats": [{"file_name": "0.parquet", "num_rows": 6}, {"file_name": "1.parquet", "num_rows": 4}],
            "labels": [{"col_name": "label0", "index": 0}],
            "conts": [{"col_name": "I1", "index": 1}],
            "cats": [{"col_name": "C1", "index": 2}, {"col_name": "C2", "index": 3}],
        }

    def test_one_file_of_the_list_can_be_read(self, data):
        assert len(samples_of(read_hugectr_parquet(data / "list" / "1.parquet"))) == 4

    def test_another_number_of_rows(self, data):
        self.edit(data, lambda document: document["file_stats"][1].update(num_rows=5))
        with pytest.raises(DataError, match=r"1.parquet: 4 rows, but _metadata.json says 5"):
            list(read_hugectr_parquet(data / "list.txt"))

    def test_no_columns(self, data):
        self.edit(data, lambda document: document.update(cats=[]))
        with pytest.raises(ConfigError, match=r"_metadata.json: cats: expected a list of objects, got an empty list"):
            list(read_hugectr_parquet(data / "list.txt"))
        self.edit(data, lambda document: document.pop("labels"))
        with pytest.raises(ConfigError, match=r"_metadata.json: labels: "):
            list(read_hugectr_parquet(data / "list.txt"))

    def test_no_metadata(self, data):
        (data / "list" / "_metadata.json").unlink()
        with pytest.raises(ConfigError, match=r"_metadata.json: no such file"):
            list(read_hugectr_parquet(data / "list.txt"))

    def test_a_file_that_is_missing(self, data):
        write_file_list(data / "list.txt", [data / "list" / "7.parquet"])
        with pytest.raises(DataError, match=r"7.parquet: no such file"):
            list(read_hugectr_parquet(data / "list.txt"))
