import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.model.strict_json import Fields, parse_json, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(value=VALUES)
def test_every_json_value_is_read_back(value):
    assert parse_json(json.dumps(value), "x.json") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "x.json: line 1 column 1: the file is empty", id="empty"),
        pytest.param(" \n", "the file is empty", id="blank"),
        pytest.param('{"a": 1,\n}', "line 2 column 1: a comma before the closing bracket", id="comma-object"),
        pytest.param('{"a": [1, 2,]}', "a comma before the closing bracket", id="comma-list"),
        pytest.param('{\n// note\n"a": 1}', "line 2 column 1: comments are not JSON", id="comment"),
        pytest.param('{"a": 1} # note', "comments are not JSON", id="trailing-comment"),
        pytest.param("{'a': 1}", "strings need double quotes", id="single-quotes"),
        pytest.param('{"a": 1', "the text ends too early", id="truncated-object"),
        pytest.param('{"a": "b', "the text ends too early", id="truncated-string"),
        pytest.param('{"a":', "the text ends too early", id="truncated-value"),
        pytest.param('{"a": 1}\n{"b": 2}', "line 2 column 1: Extra data", id="two-documents"),
        pytest.param('{"a": tru}', "line 1 column 7", id="misspelt-literal"),
        pytest.param('{"a": 1, "b": {"a": 2, "a": 3}}', 'the key "a" appears twice', id="duplicate-key"),
        pytest.param('{"a": NaN}', "NaN is not a finite number", id="nan"),
        pytest.param('{"a": [-Infinity]}', "-Infinity is not a finite number", id="infinity"),
        pytest.param('{"a": 1e999}', "1e999 is not a finite number", id="overflow"),
        pytest.param("[" * 100_000, "nested too deeply", id="depth"),
        pytest.param("1" * 5000, "x.json: a whole number has more digits", id="endless-integer"),
        pytest.param("\ufeff{}", "the file begins with a byte order mark", id="byte-order-mark"),
        pytest.param(r'{"a": ["\ud800"]}', r"\ud800 is half of a surrogate pair", id="half-pair-value"),
        pytest.param(r'{"a\uDC01": 1}', r"\udc01 is half of a surrogate pair", id="half-pair-key"),
    ],
)
def test_text_that_is_not_strict_json_is_refused_and_the_place_is_named(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "x.json")

    assert message in str(caught.value)
    assert str(caught.value).startswith("x.json: ")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"' + "a" * 1_000_000 + '": 1, "' + "a" * 1_000_000 + '": 2}', id="key"),
        pytest.param("9" * 1_000_000 + ".0", id="number"),
    ],
)
def test_an_error_quotes_only_the_beginning_of_a_long_text(text):
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "x.json")

    assert len(str(caught.value)) < 200


def test_the_repeated_one_of_many_keys_is_found():
    text = "{" + ",".join(f'"{number}": 0' for number in range(200_000)) + ', "199999": 0}'

    with pytest.raises(ConfigError, match='the key "199999" appears twice'):
        parse_json(text, "x.json")


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        pytest.param("dense" * 100_000, "unknown key; expected one of dense, input_0", id="long"),
        pytest.param("denze", "unknown key; did you mean 'dense'?", id="misspelt"),
    ],
)
def test_an_unknown_key_is_compared_with_thousands_of_known_ones(key, reason):
    known = ["dense", *(f"input_{number}" * 100 for number in range(20_000))]

    with pytest.raises(ConfigError) as caught:
        Fields({key: 1}, "x.json", "", known)

    assert reason in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_a_missing_key_that_is_misspelt_is_shown():
    with pytest.raises(ConfigError) as caught:
        Fields({"typ": "Data", "name": "a"}, "x.json", "layers[0]").text("type")

    assert str(caught.value) == 'x.json: layers[0].type: missing; the object has "typ"'


def test_a_file_is_read(tmp_path):
    (tmp_path / "x.json").write_text('{"name": "\u00e9"}', encoding="utf-8")

    assert read_json(tmp_path / "x.json") == {"name": "é"}


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.json: no such file"):
        read_json(tmp_path / "x.json")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a regular file"):
        read_json(tmp_path)


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "x.json")

    with pytest.raises(ConfigError, match="not a regular file"):
        read_json(tmp_path / "x.json")


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / "x.json").write_bytes(b'{"a": "\xe9"}')

    with pytest.raises(ConfigError, match="not UTF-8: byte 7 is 0xe9"):
        read_json(tmp_path / "x.json")
