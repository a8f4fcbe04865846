"""A definition that cannot work is refused before anything is served or trained, with the place in the file."""

import re

import pytest

from serving.errors import ConfigError
from serving.features import FeatureReader, SlotOfTable, read_definition, write_definition

HASH = {"name": "x", "kind": "hash", "buckets": 10}
LIST = {**HASH, "list": {"most": 2}}
WEIGHTS = {"name": "w", "kind": "dense", "list": {"most": 2}, "weighs": "x"}


@pytest.mark.parametrize(
    ("features", "text"),
    [
        ([{"kind": "hash"}], "features[0].name: required, but absent"),
        ([{**HASH, "kind": "hsh"}], "features[0].kind: input should be 'hash', "),
        ([{**HASH, "bukets": 10}], "features[0].bukets: unknown key; did you mean 'buckets'?"),
        ([{**HASH, "buckets": 0}], "features[0].buckets: input should be greater than or equal to 1"),
        ([{**HASH, "offset": -1}], "features[0].offset: input should be greater than or equal to 0"),
        ([{**HASH, "boundaries": [1]}], "features[0].boundaries: only for the kind bucketize, but the kind is hash"),
        ([{**HASH, "type": "float"}], "features[0].type: expected string or integer or boolean for the kind hash"),
        ([{**HASH, "unit": "s"}], "features[0].unit: only integers have a unit, but the type is string"),
        ([{**HASH, "hash": "md5"}], "features[0].hash: input should be 'farmhash', 'murmur3' or 'xxh64'"),
        ([{**HASH, "hash": "xxh64", "salt": 1}], "features[0].hash: a salt implies SipHash, so leave out hash"),
        ([{**HASH, "salt": -1}], "features[0].salt"),
        ([{**HASH, "missing": ""}], "features[0].missing: expected a value of the type string, got ''"),
        ([{**HASH, "missing": 5}], "features[0].missing: expected a value of the type string, got 5"),
        (
            [{"name": "x", "kind": "hash", "offset": 5}],
            "features[0].offset: needs buckets, which bounds the keys",
        ),
        ([{"name": "x", "kind": "identity", "offset": 5}], "features[0].offset: needs size, which bounds the keys"),
        ([{"name": "x", "kind": "dense", "missing": 1e39}], "features[0].missing: expected a value of the type float"),
        ([{**HASH, "list": {"keep": "last"}}], "features[0].list.keep: most is required"),
        ([{**HASH, "list": {"separator": "ü"}}], "features[0].list.separator: expected one ASCII character"),
        ([{**HASH, "list": {"separator": "||"}}], "features[0].list.separator: expected one ASCII character"),
        (
            [{"name": "x", "kind": "vocabulary"}],
            "features[0].vocabulary: expected either vocabulary, a file, or values",
        ),
        ([{"name": "x", "kind": "vocabulary", "values": []}], "features[0].values: "),
        (
            [{"name": "x", "kind": "vocabulary", "values": ["a", "b", "a"]}],
            "features[0].values: 'a' is in value 1 and in",
        ),
        ([{"name": "x", "kind": "vocabulary", "values": ["a"], "vocabulary": "v"}], "features[0].vocabulary: expected"),
        ([{"name": "x", "kind": "bucketize", "boundaries": [2, 1]}], "features[0].boundaries: expected ascending"),
        ([{"name": "x", "kind": "dense", "clip": [2, 1]}], "features[0].clip: expected the smaller number first"),
        ([{"name": "x", "kind": "dense", "std": 0}], "features[0].std: input should be greater than 0"),
        (
            [{"name": "x", "kind": "dense", "slot": "x"}],
            "features[0].slot: only for the kind hash or vocabulary or bucketize",
        ),
        ([HASH, HASH], "features: 2 features have the feature 'x'"),
        ([HASH, {**HASH, "name": "y", "slot": "x"}], "features: 2 features have the slot 'x'"),
        ([HASH, {"name": "c", "kind": "cross", "of": ["x"]}], "features[1].of"),
        ([HASH, {"name": "c", "kind": "cross", "of": ["x", "xx"]}], "features[1].of: 'xx' is not a feature"),
        (
            [{**HASH, "list": {}}, {**HASH, "name": "y"}, {"name": "c", "kind": "cross", "of": ["x", "y"]}],
            "'x' is a list",
        ),
        (
            [{"name": "w", "kind": "dense", "list": {}}],
            "features[0].list: a list of dense numbers weighs the keys of a feature, so",
        ),
        (
            [{"name": "w", "kind": "dense", "weighs": "x"}],
            "features[0].weighs: a list of dense numbers weighs the keys of a feature, ",
        ),
        ([LIST, {**WEIGHTS, "missing": 1}], "features[1].missing: each key has a weight"),
        ([LIST, {**WEIGHTS, "list": {"most": 3}}], "features[1].weighs: 'x' has another most or keep"),
        ([LIST, {**WEIGHTS, "weighs": "xx"}], "features[1].weighs: 'xx' is not a feature; did you mean 'x'?"),
        ([HASH, WEIGHTS], "features[1].weighs: 'x' is not a list of keys"),
        ([{**LIST, "missing": "?"}, WEIGHTS], "features[1].weighs: 'x' has a key for a missing value"),
        ([{**LIST, "list": {}}, WEIGHTS], "features[1].weighs: 'x' has no most"),
        (
            [{"name": "x", "kind": "vocabulary", "values": ["a"], "unknown_buckets": 0, "list": {"most": 2}}, WEIGHTS],
            "features[1].weighs: 'x' has no key for an unknown value",
        ),
        ([{**HASH, "shares": "x"}], "features[0].shares: 'x' shares keys itself"),
        ([HASH, {**HASH, "name": "y", "shares": "x", "buckets": 5}], "features[1].shares: 'x' has another buckets"),
        ([], "features"),
    ],
)
def test_a_wrong_definition_is_refused(reader_of, features, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        reader_of(*features)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"unknown_features": "drop"}, "unknown_features: input should be 'error' or 'ignore'"),
        ({"unknown_feature": "error"}, "unknown_feature: unknown key; did you mean 'unknown_features'?"),
    ],
)
def test_a_wrong_member_is_refused(reader_of, members, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        reader_of(HASH, **members)


def test_a_format_of_a_later_release_is_refused(tmp_path):
    (tmp_path / "features.json").write_text('{"format": 2, "features": []}')
    with pytest.raises(ConfigError, match="format: input should be 1"):
        read_definition(tmp_path / "features.json")


@pytest.mark.parametrize(
    ("slots", "features", "text"),
    [
        (["x", "y"], [HASH], "features: no feature gives the keys of the slot 'y'"),
        (["y"], [{**HASH, "slot": "yy"}], "features[0].slot: the model has no slot 'yy'; did you mean 'y'?; it has y"),
        (["y"], [HASH], "features[0].name: the model has no slot 'x'"),
    ],
)
def test_a_definition_that_does_not_fit_the_model_is_refused(reader_of, slots, features, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        reader_of(*features, slots=slots)


@pytest.mark.parametrize("other", [{"buckets": 10, "offset": 9}, {"buckets": None, "offset": 0}])
def test_features_of_one_table_have_keys_of_their_own(reader_of, other):
    features = {**HASH, "offset": 5}, {**HASH, "name": "y", **{k: v for k, v in other.items() if v is not None}}
    if other["buckets"] is None:
        del features[1]["buckets"]
    with pytest.raises(
        ConfigError, match=r"features\[1\]: the keys of 'y' are .*set offset to 15 or more, or set shares"
    ):
        reader_of(*features, tables={"x": "t", "y": "t"})
    reader_of(*features)  # each has a table of its own
    reader_of(features[0], {**HASH, "name": "y", "offset": 15}, tables={"x": "t", "y": "t"})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a\nb\na\n", "features[0].vocabulary: 'a' is in line 1 and in line 3"),
        (b"a\n\nb\n", "features[0].vocabulary: line 2 is empty"),
        (b"", "features[0].vocabulary: line 1 is empty"),
        (b"a\n\xff\n", "features[0].vocabulary: expected text in UTF-8"),
        (None, "no such file or directory"),
        (b"HRVOCAB1", "expected a vocabulary of Hotrow"),
        (b"HRVOCAB1" + bytes(24), "damaged"),
        (b"HRVOCAB1" + (5).to_bytes(8, "little") + (16).to_bytes(8, "little") + bytes(8), "damaged"),
    ],
)
def test_a_wrong_vocabulary_is_refused(reader_of, tmp_path, content, text):
    if content is not None:
        (tmp_path / "v").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(text)):
        reader_of({"name": "x", "kind": "vocabulary", "vocabulary": "v"})


def test_a_written_definition_gives_the_same_keys(reader_of, tmp_path):
    item = {"name": "item", "kind": "vocabulary", "values": ["a", "b"], "slot": "t[0]"}
    seen = {**item, "name": "seen", "slot": "t[1]", "shares": "item", "list": {}}
    of_other_name = {"name": "feature0", "kind": "vocabulary", "vocabulary": "windows.txt"}
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfx\r\na b\r\n\xc3\xbc")
    tables = {"t[0]": "t", "t[1]": "t"}
    reader = reader_of(item, seen, of_other_name, tables=tables)
    write_definition(reader.definition, tmp_path / "written.json")
    again = FeatureReader(
        read_definition(tmp_path / "written.json"),
        [SlotOfTable(name, tables.get(name, name)) for name in ("t[0]", "t[1]", "feature0")],
        0,
        "written.json",
    )
    rows = {"item": ["a", "b", "c"], "seen": [["b"], [], ["a"]], "feature0": ["x", "ü", "a b"]}
    assert reader(rows, 3).keys.tolist() == again(rows, 3).keys.tolist() == [1, 2, 1, 2, 3, 0, 1, 2]
