"""The definition decides what a value is, however the value comes."""

import datetime
import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.errors import FeatureValueError
from serving.features import MISSING_WORDS, Texts
from serving.features.columns import joined_texts

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SAME_FIXTURE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)


def texts(values):
    return joined_texts([str(value).encode() for value in values])


def bags(found):
    return [bag.tolist() for bag in np.split(found.keys, found.row_ptrs[1:-1])]


@SAME_FIXTURE
@given(words=st.lists(WORDS, min_size=1, max_size=20))
def test_a_string_gives_the_same_key_in_every_form(reader_of, words):
    reader = reader_of({"name": "x", "kind": "hash"})
    forms = [words, np.array(words, object), [word.encode() for word in words], texts(words)]
    first, *others = (bags(reader({"x": form}, len(words))) for form in forms)
    assert all(other == first for other in others)
    assert [bool(bag) for bag in first] == [word != "" for word in words]


@SAME_FIXTURE
@given(numbers=st.lists(st.integers(1 - 2**53, 2**53 - 1), min_size=1, max_size=20))
def test_an_integer_gives_the_same_key_in_every_form(reader_of, numbers):
    reader = reader_of({"name": "x", "kind": "identity"})
    forms = [
        *(numbers, [float(number) for number in numbers], [str(number) for number in numbers]),
        *(np.array(numbers, np.int64), np.array(numbers, np.float64), texts(numbers)),
        texts(f"{number}.0" for number in numbers),
    ]
    assert all(reader({"x": form}, len(numbers)).keys.tolist() == numbers for form in forms)


@SAME_FIXTURE
@given(numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_a_number_gives_the_same_float_in_every_form(reader_of, numbers):
    reader = reader_of({"name": "x", "kind": "dense"})
    forms = [
        numbers,
        np.array(numbers, np.float32),
        np.array(numbers),
        [repr(number) for number in numbers],
        texts(numbers),
    ]
    for form in forms:
        assert reader({"x": form}, len(numbers)).dense[:, 0].tolist() == numbers


def test_an_integer_of_a_string_feature_is_its_digits(reader_of):
    reader = reader_of({"name": "x", "kind": "hash"})
    expected = reader({"x": ["17", "-3"]}, 2).keys.tolist()
    for form in ([17, -3], np.array([17, -3]), np.array([17, -3], np.int8)):
        assert reader({"x": form}, 2).keys.tolist() == expected


def test_numbers_of_64_bits_give_the_same_key_or_float_in_every_form(reader_of):
    reader = reader_of({"name": "x", "kind": "hash"}, {"name": "d", "kind": "dense"})
    large, even = 2**64 - 1, 2**60 + 2**36 + 1  # float64 rounds the second number to a tie of float32
    identity = reader_of({"name": "x", "kind": "identity"})
    for text in (" 9007199254740993.00 ", Decimal("9007199254740993.0"), "+9007199254740993"):
        assert identity({"x": [text]}, 1).keys.tolist() == [2**53 + 1]
    forms = [[large], [str(large)], np.array([large], np.uint64), texts([large])]
    dense = [[even], [str(even)], np.array([even]), texts([even])]
    found = [reader({"x": form, "d": number}, 1) for form, number in zip(forms, dense, strict=True)]
    assert all(bags(one) == bags(found[0]) for one in found)
    assert all(one.dense.tolist() == found[0].dense.tolist() for one in found)


@pytest.mark.parametrize(
    ("feature", "values"),
    [
        ({"kind": "hash"}, np.array([np.nan, np.nan])),
        ({"kind": "hash"}, np.array(["", ""])),
        ({"kind": "hash", "list": {}}, [math.nan, ""]),
        ({"kind": "hash", "list": {}}, np.empty((2, 0))),
        ({"kind": "identity", "type": "boolean"}, Texts(*texts(["true", "yes"])[:3], np.zeros(2, bool))),
    ],
)
def test_missing_values_of_every_form_have_no_key(reader_of, feature, values):
    assert bags(reader_of({"name": "x", **feature})({"x": values}, 2)) == [[], []]


def test_series_of_pandas_and_pyarrow_are_read_as_arrays(reader_of):
    reader = reader_of({"name": "x", "kind": "identity"}, {"name": "tags", "kind": "hash", "list": {}})
    numbers = [3, None, 5]
    assert bags(reader({"x": pa.array(numbers)}, 3))[::2] == [[3], [], [5]]
    tags = [["a", "b"], [], None]
    assert bags(reader({"tags": pa.array(tags)}, 3)) == bags(reader({"tags": tags}, 3))
    pandas = pytest.importorskip("pandas")
    series = pandas.Series(numbers, dtype="Int64")
    assert bags(reader({"x": series}, 3))[::2] == bags(reader({"x": [3, pandas.NA, 5]}, 3))[::2] == [[3], [], [5]]


def test_booleans_are_zero_and_one(reader_of):
    reader = reader_of({"name": "x", "kind": "identity", "type": "boolean"})
    forms = ([True, False], np.array([True, False]), [1, 0], ["true", "False"], ["1.0", "0.0"], texts(["TRUE", "0"]))
    assert all(reader({"x": form}, 2).keys.tolist() == [1, 0] for form in forms)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns", "day"])
def test_timestamps_are_whole_numbers_of_the_unit(reader_of, unit):
    times = np.array(["1970-01-02T00:00:01.5", "NaT", "1969-12-31"], "datetime64[ns]")
    reader = reader_of({"name": "x", "kind": "identity", "unit": unit})
    per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9, "day": 1 / 86400}[unit]
    expected = [[math.floor(86401.5 * per_second)], [], [math.floor(-86400 * per_second)]]
    zone = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
    forms = (
        times,
        list(times),
        [datetime.datetime(1970, 1, 1, 20, 30, 1, 500_000, zone), None, datetime.date(1969, 12, 31)],
        ["1970-01-02 00:00:01.500000Z", "", "1969-12-31"],
        ["1970-01-01T20:30:01.500-03:30", None, "1969-12-31 00:00 UTC"],
        texts(["1970-01-02 05:30:01.500000000+0530", "", "1969-12-31T00:00"]),
        texts(["1970-01-02T00:00:01.5", "NA", str(expected[2][0])]),
    )
    assert [bags(reader({"x": form}, 3)) for form in forms] == [expected] * len(forms)


@pytest.mark.parametrize("text", ["2024-13-01", "2024-02-30", "2024-02-29T25:00", "9999-01-01", "now", "NaT"])
def test_a_text_that_is_no_time_of_the_unit_is_named(reader_of, text):
    reader = reader_of({"name": "x", "kind": "identity", "unit": "ns"})
    for form in ([text], texts([text])):
        with pytest.raises(FeatureValueError, match=f"x of sample 0: expected an integer, got '{text}'"):
            reader({"x": form}, 1)


@pytest.mark.parametrize("kind", ["integer", "float", "boolean"])
def test_words_for_missing_values_are_missing_unless_they_are_strings(reader_of, kind):
    words = [*MISSING_WORDS, "1"]
    options = {"kind": "bucketize", "boundaries": [0]} if kind == "float" else {"kind": "identity", "type": kind}
    typed, text = reader_of({"name": "x", **options}), reader_of({"name": "x", "kind": "hash"})
    for form in (words, np.array(words, object), [word.encode() for word in words], texts(words)):
        assert bags(typed({"x": form}, len(words))) == [[]] * len(MISSING_WORDS) + [[1]]
        assert all(bags(text({"x": form}, len(words))))


@pytest.mark.parametrize("kind", ["hash", "vocabulary", "bucketize", "identity"])
def test_a_missing_value_has_no_key_or_that_of_the_stated_value(reader_of, tmp_path, kind):
    (tmp_path / "v.txt").write_text("7\n8\n")
    kinds = {"type": "integer"} | {
        "hash": {"buckets": 100},
        "vocabulary": {"vocabulary": "v.txt"},
        "bucketize": {"boundaries": [5, 7]},
        "identity": {},
    }[kind]
    for form in ([None, 7, None], ["", "7", math.nan], np.array([np.nan, 7, np.nan]), texts(["", 7, ""])):
        found = bags(reader_of({"name": "x", "kind": kind, **kinds})({"x": form}, 3))
        assert [len(bag) for bag in found] == [0, 1, 0]
        filled = bags(reader_of({"name": "x", "kind": kind, "missing": 7, **kinds})({"x": form}, 3))
        assert filled == [found[1]] * 3
        assert bags(reader_of({"name": "x", "kind": kind, "missing": 7, **kinds})({}, 3)) == filled


def test_dense_numbers_are_clipped_then_logged_then_standardised(reader_of):
    reader = reader_of(
        {"name": "x", "kind": "dense", "clip": [0, 1e6], "log1p": True, "mean": 2, "std": 0.5, "missing": 3}
    )
    values = np.array([-5, 0, 3, 1e9, np.nan], np.float32)
    expected = (np.log1p(np.clip(np.nan_to_num(values, nan=3), 0, 1e6).astype(np.float64)) - 2) / 0.5
    assert reader({"x": values}, 5).dense[:, 0].tolist() == expected.astype(np.float32).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[1, 2, 3], [], [4], [5]]),
        ({"most": 2, "keep": "first"}, [[1, 2], [], [4], [5]]),
        ({"most": 2, "keep": "last"}, [[2, 3], [], [4], [5]]),
    ],
)
def test_a_list_has_several_values(reader_of, options, expected):
    reader = reader_of({"name": "x", "kind": "identity", "list": {"separator": "|", **options}})
    values = [[1, 2, 3], [], [4, None], (5,)]
    assert bags(reader({"x": values}, 4)) == expected
    for text in (["1|2|3", "", "4|", "5"], np.array(["1|2|3", None, "4|", "5"], object)):
        assert bags(reader({"x": text}, 4)) == expected
    assert bags(reader({"x": texts(["1|2|3", "", "4|", "5"])}, 4)) == expected
    lists = [[1, 2], [3, 4]]
    assert bags(reader({"x": np.array(lists)}, 2)) == lists


@SAME_FIXTURE
@given(
    lists=st.lists(st.lists(st.none() | st.integers(0, 99), max_size=8), min_size=1, max_size=4),
    most=st.integers(1, 4),
    keep=st.sampled_from([None, "first", "last"]),
    fill=st.none() | st.just(7),
)
def test_missing_values_are_left_out_of_a_list_before_it_is_cut(reader_of, lists, most, keep, fill):
    options = {"most": most} if keep is None else {"most": most, "keep": keep}
    missing = {} if fill is None else {"missing": fill}
    reader = reader_of({"name": "x", "kind": "hash", "type": "integer", "list": options, **missing})
    whole = reader_of({"name": "x", "kind": "hash", "type": "integer", "list": {}})
    present = [
        [fill if value is None else value for value in row if fill is not None or value is not None] for row in lists
    ]
    kept = [row[-most:] if keep == "last" else row[:most] for row in present]
    kept = [row or [fill] * (fill is not None) for row in kept]
    too_long = [at for at, row in enumerate(present) if keep is None and len(row) > most]
    forms = [
        lists,
        [["" if value is None else str(value) for value in row] for row in lists],
        pa.array(lists, pa.list_(pa.int64())),
    ]
    for form in forms:
        if too_long:
            expected = f"x of sample {too_long[0]}: has {len(present[too_long[0]])} values, but at most {most} are"
            with pytest.raises(FeatureValueError, match=expected):
                reader({"x": form}, len(lists))
        else:
            assert bags(reader({"x": form}, len(lists))) == bags(whole({"x": kept}, len(lists)))


@pytest.mark.parametrize("keep", ["first", "last"])
def test_weights_belong_to_the_keys_that_a_list_keeps(reader_of, keep):
    options = {"most": 2, "keep": keep}
    reader = reader_of(
        {"name": "x", "kind": "identity", "list": options},
        {"name": "w", "kind": "dense", "list": options, "weighs": "x"},
    )
    keys = [[1, None, 2], [None, 1, None, 2, 3, None], [None], [], None, [4]]
    padded = [[1, 9, 2], [9, 1, None, 2, 3, math.nan], [9], None, [], [4]]
    expected = [[1, 2], [1, 2] if keep == "first" else [2, 3], [], [], [], [4]]
    for weights in (padded, [[1, 2], [1, 2, 3], [], [], None, [4]]):
        found = reader({"x": keys, "w": weights}, 6)
        assert bags(found) == expected
        assert found.dense.tolist() == [row + [0] * (2 - len(row)) for row in expected]
    for weights, count in (([1], 2), ([1, 2, 3, 4], 2)):
        with pytest.raises(
            FeatureValueError, match=f"w of sample 0: expected {count} weights, one for each key of 'x', got"
        ):
            reader({"x": keys[:1], "w": [weights]}, 1)
    with pytest.raises(FeatureValueError, match="w of sample 0: value 2: is missing"):
        reader({"x": keys[:1], "w": [[1, 2, None]]}, 1)


def test_lists_share_the_keys_of_a_single_value(reader_of):
    item = {"name": "item", "kind": "hash", "buckets": 50, "offset": 10, "slot": "t[0]"}
    seen = {**item, "name": "seen", "slot": "t[1]", "shares": "item", "list": {}}
    reader = reader_of(item, seen, tables={"t[0]": "t", "t[1]": "t"})
    found = bags(reader({"item": ["a", "b"], "seen": [["b", "a"], []]}, 2))
    assert found == [found[0], found[2] + found[0], found[2], []]
    assert all(10 <= key < 60 for bag in found for key in bag)


def test_an_unknown_feature_is_an_error_or_ignored(reader_of):
    feature = {"name": "user_id", "kind": "hash"}
    for name in ("user_idd", "userId", "USERID"):
        with pytest.raises(FeatureValueError, match=rf"{name}: is not a feature; did you mean 'user_id'\?"):
            reader_of(feature)({name: ["a"]}, 1)
    reader = reader_of(feature, unknown_features="ignore")
    assert reader({"user_idd": ["a"], "user_id": ["b"]}, 1).keys.size == 1
    assert [(sample.name, sample.value) for sample in reader.readings(())] == [("hotrow_ignored_features", 1)]


@pytest.mark.parametrize(
    ("feature", "values", "text"),
    [
        ({"kind": "hash"}, ["a", 1.5], "x of sample 1: expected a string or an integer, got 1.5"),
        ({"kind": "hash"}, np.array([1.5]), "x of sample 0: expected a string or an integer, got 1.5$"),
        (
            {"kind": "hash"},
            np.array([17.0]),
            'string or an integer, got 17.0; a feature of "type": "integer" takes it$',
        ),
        ({"kind": "hash"}, ["a", True], "x of sample 1: expected a string or an integer, got True"),
        ({"kind": "hash"}, [b"a", b"\xff"], "x of sample 1: expected text in UTF-8"),
        ({"kind": "hash"}, ["\ud800"], "x of sample 0: expected text in UTF-8"),
        ({"kind": "identity"}, [17, 17.5], "x of sample 1: expected an integer, got 17.5"),
        ({"kind": "identity"}, np.array([17, 17.5]), "x of sample 1: expected an integer, got 17.5"),
        ({"kind": "identity"}, ["17", "17.5"], "x of sample 1: expected an integer, got '17.5'"),
        ({"kind": "identity"}, [True], "x of sample 0: expected an integer, got True"),
        ({"kind": "identity"}, [2**63], rf"got {2**63}; integers go from -2\^63 to 2\^63 - 1$"),
        ({"kind": "identity"}, [str(2**63)], rf"got '{2**63}'; integers go from -2\^63 to 2\^63 - 1$"),
        ({"kind": "identity"}, texts([-(2**63) - 1]), r"integers go from -2\^63 to 2\^63 - 1$"),
        ({"kind": "identity"}, [1e300], r"expected an integer, got 1e\+300; integers go from -2\^63"),
        (
            {"kind": "identity"},
            np.array([2**64 - 1], np.uint64),
            "x of sample 0: expected an integer, got 1844.*; integers go",
        ),
        ({"kind": "identity"}, [2**63 - 1], "x of sample 0: the key is reserved, got 9223372036854775807$"),
        ({"kind": "identity", "size": 5}, [0, 5], "x of sample 1: expected a key from 0 to 4, got 5$"),
        ({"kind": "identity", "size": 5}, [-1], "x of sample 0: expected a key from 0 to 4, got -1$"),
        ({"kind": "identity", "size": 5, "missing": 7}, [None], "x of sample 0: expected a key from 0 to 4$"),
        ({"kind": "identity"}, np.array(["2024-01-01"], "M8[s]"), "x of sample 0: expected an integer, got"),
        ({"kind": "identity", "type": "boolean"}, [2], "x of sample 0: expected true or false, got 2"),
        ({"kind": "identity", "type": "boolean"}, ["yes"], "x of sample 0: expected true or false, got 'yes'"),
        ({"kind": "identity"}, [2.0**53], r"got 9007199254740992.0; from 2\^53 on, a float may be"),
        ({"kind": "identity"}, np.array([2.0**60]), r"; from 2\^53 on, a float may be another integer, rounded: send"),
        ({"kind": "identity"}, ["9007199254740993e0"], "x of sample 0: expected an integer, got '9007199254740993e0'"),
        ({"kind": "identity"}, ["."], "x of sample 0: expected an integer, got '.'"),
        ({"kind": "identity"}, ["+5", "+-5"], "x of sample 1: expected an integer, got '\\+-5'"),
        ({"kind": "dense"}, ["1.5", "x"], "x of sample 1: expected a number, got 'x'"),
        ({"kind": "dense"}, [1.5, True], "x of sample 1: expected a number, got True"),
        ({"kind": "dense"}, [1.5, None], "x of sample 1: is missing, and the feature has no value for missing"),
        ({"kind": "dense"}, [1.5, math.inf], "x of sample 1: expected a finite number, got inf$"),
        ({"kind": "dense"}, [1.5, 1e300], "x of sample 1: expected a finite number"),
        ({"kind": "dense", "log1p": True}, [-1.0], "x of sample 0: expected a number above -1"),
        ({"kind": "dense", "std": 1e-30}, [1e30], "x of sample 0: the number does not fit float32 after mean and std"),
        ({"kind": "identity", "list": {}}, [[1], "2"], "x of sample 1: expected a list, got '2'"),
        ({"kind": "hash", "list": {}}, [["a"], "b"], "x of sample 1: expected a list, got 'b'"),
        ({"kind": "identity", "list": {}}, [[1], [2, "b"]], "x of sample 1: value 1: expected an integer, got 'b'"),
        (
            {"kind": "hash", "list": {}},
            [["a"], ["b", b"\xff"]],
            r"x of sample 1: value 1: expected text in UTF-8, got b'\\xff'$",
        ),
        (
            {"kind": "hash", "list": {"most": 1}},
            [["a"], ["b", "c"]],
            "x of sample 1: has 2 values, but at most 1 are allowed",
        ),
        ({"kind": "hash", "list": {}}, joined_texts([b"a"]), "x: expected lists; text needs the list's separator"),
        ({"kind": "hash", "list": {}}, [{"a": 1}], "x of sample 0: expected a list, got {'a': 1}"),
        ({"kind": "hash"}, np.array([["a"]]), "x: expected one value for each sample, got lists"),
        ({"kind": "hash"}, "u1", "x: expected a list with a value for each sample, got 'u1'"),
        ({"kind": "hash"}, {"a": 1}, "x: expected a list with a value for each sample, got {'a': 1}"),
        ({"kind": "dense"}, np.array([1], "M8[ns]"), "x of sample 0: expected a number, got 1970-01-01T"),
        ({"kind": "identity"}, np.array([1], "m8[ns]"), "x of sample 0: expected an integer, got 1"),
        (
            {"kind": "identity", "unit": "ns"},
            np.array(["2024-01-01", "9999-12-31"], "M8[s]"),
            "x of sample 1: expected an integer, got 9999-12-31",
        ),
        ({"kind": "hash"}, ["a", "b", "c"], "x: expected 2 samples, got 3"),
    ],
)
def test_a_wrong_value_is_named(reader_of, feature, values, text):
    samples = (
        2 if text.startswith("x: expected 2") else len(values.begins) if isinstance(values, Texts) else len(values)
    )
    with pytest.raises(FeatureValueError, match=text):
        reader_of({"name": "x", **feature})({"x": values}, samples)


def test_a_cross_joins_the_values_that_its_features_have(reader_of):
    features = [
        {"name": "user", "kind": "hash", "missing": "17"},
        {"name": "age", "kind": "bucketize", "boundaries": [18], "missing": 30},
        {"name": "both", "kind": "cross", "of": ["user", "age"], "buckets": 10**9},
    ]
    reader = reader_of(*features)
    expected = reader({"user": ["17", "17"], "age": [30.0, 30.0]}, 2).keys.tolist()
    for users in ([17, 17], np.array([17, 17]), ["", "17"], [None, 17], texts(["17", ""])):
        assert reader({"user": users, "age": [None, 40]}, 2).keys.tolist() == expected
    assert reader({"age": np.array([30, 31])}, 2).keys.tolist() == expected


def test_the_sample_of_a_wrong_crossed_value_is_named(reader_of):
    reader = reader_of(
        {"name": "a", "kind": "bucketize", "boundaries": [1]},
        {"name": "b", "kind": "hash"},
        {"name": "ab", "kind": "cross", "of": ["a", "b"], "buckets": 10},
    )
    assert len(bags(reader({"a": [0.5, 3], "b": ["x", "y"]}, 2))[2]) == 1
    assert bags(reader({"a": [0.5], "b": [None]}, 1))[1:] == [[], []]


def test_weights_may_be_missing_if_nobody_reads_their_numbers(reader_of):
    reader = reader_of(
        {"name": "x", "kind": "hash", "list": {"most": 2}},
        {"name": "w", "kind": "dense", "list": {"most": 2}, "weighs": "x"},
        {"name": "price", "kind": "dense"},
    )
    values = {"x": [["a"], ["b", "c"]], "price": [0.5, 2.0]}
    for given_weights in ({}, {"w": [[1.0], [2.0, 3.0]]}, {"w": [[1.0], []]}):
        assert reader.without({0, 1})(values | given_weights, 2).dense[:, 2].tolist() == [0.5, 2.0]
    for number in (0, 1):  # the other one is read
        with pytest.raises(FeatureValueError, match="w of sample 0: expected 1 weight, one for each key of 'x', got 0"):
            reader.without({number})(values, 2)
