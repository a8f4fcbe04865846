"""The same rows give the same bits as Python's values, Arrow columns of every type, frames and JSON."""

import datetime
import json
from decimal import Decimal

import orjson
import pyarrow as pa
import pytest

from serving.errors import FeatureValueError, RequestError
from serving.features import columns_of_frame

FEATURES = (
    {"name": "user", "kind": "hash", "buckets": 1000},
    {"name": "country", "kind": "vocabulary", "vocabulary": "country.txt", "missing": "fr"},
    {"name": "tags", "kind": "hash", "buckets": 50, "list": {"separator": "|"}},
    {"name": "clicks", "kind": "identity", "list": {"separator": " "}},
    {"name": "day", "kind": "hash", "type": "integer", "unit": "day", "buckets": 9},
    {"name": "is_new", "kind": "identity", "type": "boolean"},
    {"name": "pair", "kind": "cross", "of": ["user", "country"], "buckets": 77},
    {"name": "price", "kind": "dense", "log1p": True, "missing": 1},
)
DAYS = [datetime.date(2024, 2, 29), None, datetime.date(1969, 12, 31)]
ROWS = {
    "user": ["u1", "Zürich", None],
    "country": ["de", None, "日本"],
    "tags": [["a", "b"], [], None],
    "clicks": [[1, -2], None, []],
    "day": [(day - datetime.date(1970, 1, 1)).days if day else None for day in DAYS],
    "is_new": [True, False, None],
    "price": [9.5, None, 0.1],
}
TEXT = {name: pa.array(values) for name, values in ROWS.items()}


@pytest.fixture
def reader(reader_of, tmp_path):
    (tmp_path / "country.txt").write_text("de\nfr\n")
    return reader_of(*FEATURES)


def bits(found):
    return [found.keys.tolist(), found.row_ptrs.tolist(), found.dense.tobytes(), found.known, found.unknown]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {name: TEXT[name].cast(pa.large_string()) for name in ("user", "country")},
        {name: TEXT[name].dictionary_encode() for name in ("user", "country", "day")},
        {name: pa.concat_arrays([pa.array(["x", "yy"]), TEXT[name]]).slice(2) for name in ("user", "country")},
        {
            "tags": TEXT["tags"].cast(pa.large_list(pa.large_string())),
            "clicks": TEXT["clicks"].cast(pa.list_(pa.int8())),
        },
        {"user": TEXT["user"].cast(pa.string_view()), "tags": TEXT["tags"].cast(pa.list_(pa.string_view()))},
        {"user": pa.DictionaryArray.from_arrays([0, 1, None], pa.array(["u1", "Zürich"], pa.string_view()))},
        {"__index_level_0__": pa.array([5, 7, 1])},
        {"tags": pa.array(["a|b", "", None]), "clicks": pa.array(["1 -2", None, ""])},
        {"day": pa.array(DAYS), "price": TEXT["price"].cast(pa.float32())},
        {"day": pa.array(DAYS).cast(pa.timestamp("us", "UTC"))},
        {"day": TEXT["day"].cast(pa.float64()), "is_new": pa.array(["true", "0", ""])},
        {"day": TEXT["day"].cast(pa.string()), "price": TEXT["price"].cast(pa.string())},
        {"price": pa.array([Decimal("9.5"), None, Decimal("0.1")])},
    ],
)
def test_arrow_columns_of_every_type_give_the_same_bits(reader, changed):
    expected = bits(reader(ROWS, 3))
    table = pa.table({**TEXT, **changed})
    for given in (table, pa.concat_tables([table.slice(0, 1), table.slice(1)])):
        columns, rows = columns_of_frame(reader, given)
        assert bits(reader.transform(columns, rows)) == expected


def test_an_object_of_another_library_is_read_through_arrow(reader):
    class Frame:
        def __arrow_c_stream__(self, requested_schema=None):
            return pa.table(TEXT).__arrow_c_stream__(requested_schema)

    columns, rows = columns_of_frame(reader, Frame())
    assert bits(reader.transform(columns, rows)) == bits(reader(ROWS, 3))


def test_decimals_of_python_are_their_text(reader):
    decimals = {"user": [Decimal("1.50")], "price": [Decimal("1.50")], "day": [Decimal("3.0")]}
    texts = {name: [str(value)] for name, [value] in decimals.items()}
    assert bits(reader(decimals, 1)) == bits(reader(texts, 1))


def test_json_gives_the_same_bits(reader):
    rows = orjson.loads(json.dumps(ROWS))
    assert bits(reader(rows, 3)) == bits(reader(ROWS, 3))


def test_a_column_without_values_is_missing(reader):
    rows = {**ROWS, "user": [None] * 3, "tags": [None] * 3}
    table = pa.table({**TEXT, "user": pa.nulls(3), "tags": pa.array([None, [], [None]])})
    columns, count = columns_of_frame(reader, table)
    assert bits(reader.transform(columns, count)) == bits(reader(rows, 3))


def test_a_frame_that_arrow_cannot_read_is_named(reader):
    pandas = pytest.importorskip("pandas")
    with pytest.raises(RequestError, match=r"Arrow cannot read the DataFrame: .*failed for column user"):
        columns_of_frame(reader, pandas.DataFrame({"user": ["u1", 17]}))
    with pytest.raises(RequestError, match=r"Arrow cannot read the DataFrame: Python int too large"):
        columns_of_frame(reader, pandas.DataFrame({"user": [10**30]}))


def test_a_column_that_is_twice_in_a_frame_is_named(reader):
    table = pa.table([TEXT["user"], TEXT["user"]], names=["user", "user"])
    with pytest.raises(FeatureValueError, match="user: is in the frame 2 times"):
        columns_of_frame(reader, table)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"user": pa.array([1.5, 2.5, 3.5])}, "user of sample 0: expected a string or an integer, got 1.5"),
        ({"is_new": pa.array([1, 2, 0])}, "is_new of sample 1: expected true or false, got 2"),
        ({"user": pa.array([{"a": 1}] * 3)}, "user: expected a column of values, got one of struct"),
        ({"user": pa.array([["a"], ["b"], []])}, "user: expected one value for each sample, got lists"),
        ({"userr": pa.array(["a"] * 3)}, "userr: is not a feature; did you mean 'user'?"),
        ({"user": pa.array([b"\xff", b"a", b"b"])}, "user of sample 0: expected text in UTF-8"),
    ],
)
def test_a_wrong_column_is_named(reader, changed, text):
    table = pa.table({**TEXT, **changed})
    with pytest.raises(FeatureValueError) as caught:
        reader.transform(*columns_of_frame(reader, table))
    assert str(caught.value).startswith(text)
