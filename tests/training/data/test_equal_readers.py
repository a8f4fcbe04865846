"""One table through CSV and Parquet, in any layout of the files: the samples are equal."""

import csv
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import ColumnMap, read_csv, read_parquet
from training.errors import DataError
from training.samples import Samples

INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
NAMES = ["label", "a", "a.b", "C[0]", "_x", "naïve", "two words", "unused"]
KEYS = st.integers(-(2**62), 2**62)


@st.composite
def tables(draw):
    """Rows as dictionaries, the columns that hold keys, and a map of them."""
    keys = draw(st.lists(st.sampled_from(NAMES[1:-1]), min_size=1, max_size=4, unique=True))
    numbers = [name for name in NAMES[1:-1] if name not in keys]
    values = st.one_of(st.none(), st.integers(0, 100), KEYS)
    rows = draw(
        st.lists(
            st.fixed_dictionaries(
                {"label": st.integers(0, 1), "unused": st.sampled_from(["", "1", "x"])}
                | dict.fromkeys(keys, values)
                | {name: st.floats(-(2.0**100), 2.0**100, width=32) for name in numbers}
            ),
            min_size=1,
            max_size=12,
        )
    )
    for name in draw(st.sets(st.sampled_from(keys))):  # a day without this feature
        for row in rows[: draw(st.integers(0, len(rows)))]:
            row[name] = None
    columns = ColumnMap(
        tuple(draw(st.lists(st.just("label"), min_size=1, max_size=2))),
        tuple(draw(st.lists(st.sampled_from([*numbers, "label"]), max_size=4))),
        tuple(draw(st.lists(st.sampled_from([*keys, "label"]), min_size=1, max_size=5))),
    )
    return rows, keys, columns


def column(draw, name, values, is_key):
    """The values of a column of one file, in one of the types that Parquet may store them in."""
    if not is_key:
        return pa.array(values, pa.int8() if name == "label" else pa.string() if name == "unused" else pa.float64())
    if all(value is None for value in values) and draw(st.booleans()):
        return pa.array(values, draw(st.sampled_from([pa.null(), pa.list_(pa.null())])))
    fits = [
        kind
        for kind in INTEGERS
        if all(
            value is None or np.iinfo(kind.to_pandas_dtype()).min <= value <= np.iinfo(kind.to_pandas_dtype()).max
            for value in values
        )
    ]
    kind = draw(st.sampled_from(fits))
    array = pa.array(values, kind)
    form = draw(st.sampled_from(["plain", "dictionary", "list", "large list", "empty lists"]))
    if form == "dictionary":
        return array.dictionary_encode()
    if form == "empty lists":
        return pa.array([[] if value is None else [value] for value in values], pa.list_(kind))
    if form != "plain":
        lists = [None if value is None else [value] for value in values]
        return pa.array(lists, pa.list_(kind) if form == "list" else pa.large_list(kind))
    return array


def cuts(draw, count):
    """The bounds of files that share ``count`` rows."""
    inner = draw(st.lists(st.integers(0, count), max_size=3))
    bounds = sorted([0, *inner, count])
    return [(begin, end) for begin, end in pairwise(bounds) if begin < end]


def write_csv_files(draw, folder, rows):
    for number, (begin, end) in enumerate(cuts(draw, len(rows))):
        with open(folder / f"{number}.csv", "w", newline="", encoding="utf-8") as file:
            names = draw(st.permutations(NAMES))
            writer = csv.writer(file, quoting=draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_NONE])))
            writer.writerow(names)
            writer.writerows([["" if row[name] is None else row[name] for name in names] for row in rows[begin:end]])


def write_parquet_files(draw, folder, rows, keys):
    for number, (begin, end) in enumerate(cuts(draw, len(rows))):
        part = rows[begin:end]
        arrays = {name: column(draw, name, [row[name] for row in part], name in keys) for name in NAMES}
        pq.write_table(
            pa.table({name: arrays[name] for name in draw(st.permutations(NAMES))}),
            folder / f"{number}.parquet",
            row_group_size=draw(st.integers(1, 5)),
            use_dictionary=draw(st.booleans()),
            store_schema=draw(st.booleans()),
        )


def expected_samples(rows, columns):
    labels = [[row[name] for name in columns.labels] for row in rows]
    dense = [[row[name] for name in columns.dense] for row in rows]
    bags = [[[] if row[name] is None else [row[name]] for name in columns.slots] for row in rows]
    return labels, dense, bags


def bags_of(samples):
    keys, offsets = samples.bags.keys.tolist(), samples.bags.row_ptrs.tolist()
    bags = [keys[begin:end] for begin, end in pairwise(offsets)]
    slots = samples.bags.slots
    return [bags[first : first + slots] for first in range(0, len(bags), slots)]


@settings(deadline=None, max_examples=12)
@given(tables(), st.integers(1, 5), st.data())
def test_csv_and_parquet_files_of_one_table_have_equal_samples(tmp_path_factory, drawn, batch_size, data):
    rows, keys, columns = drawn
    folder = tmp_path_factory.mktemp("table")
    for kind in ("csv", "parquet"):
        (folder / kind).mkdir()
    write_csv_files(data.draw, folder / "csv", rows)
    write_parquet_files(data.draw, folder / "parquet", rows, keys)

    found = [
        Samples.joined(list(read(folder / kind, columns, batch_size=batch_size)))
        for kind, read in (("csv", read_csv), ("parquet", read_parquet))
    ]

    labels, dense, bags = expected_samples(rows, columns)
    for samples in found:
        assert samples.labels.tolist() == labels
        np.testing.assert_array_equal(samples.dense, np.array(dense, np.float32).reshape(len(rows), -1))
        assert bags_of(samples) == bags
        assert math.prod(samples.labels.shape) == len(rows) * len(columns.labels)


def test_a_column_of_numbers_without_any_value_is_refused_in_both_formats(tmp_path):

    columns = ColumnMap(("click",), ("price",), ("user",))
    pq.write_table(pa.table({"click": [1, 0], "price": pa.nulls(2), "user": [7, 8]}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("click,price,user\n1,,7\n0,,8\n", encoding="utf-8")

    for file, read, place in (
        ("a.parquet", read_parquet, "column price record 0: expected a number, found null"),
        ("a.csv", read_csv, "line 2 column price: expected a number, found ''"),
    ):
        with pytest.raises(DataError, match=f"{file} {place}"):
            list(read(tmp_path / file, columns))


def test_the_types_of_unused_csv_columns_may_change_in_a_file(tmp_path):
    rows = 300_000  # more than one block of the reader
    lines = [f"1,{number},{'' if number < rows - 1 else 'a comment'},0.5" for number in range(rows)]
    (tmp_path / "a.csv").write_text("click,user,comment,price\n" + "\n".join(lines) + "\n", encoding="utf-8")

    samples = Samples.joined(list(read_csv(tmp_path / "a.csv", ColumnMap(("click",), ("price",), ("user",)))))

    assert len(samples) == rows
