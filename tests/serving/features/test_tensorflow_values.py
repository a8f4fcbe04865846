"""Hashes, vocabularies and buckets equal those of TensorFlow and Keras, bit for bit."""

import numpy as np
import pytest


def keys_of(reader, **features):
    return reader(features, len(next(iter(features.values())))).keys.tolist()


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"buckets": 1_000_003}, "words", "fast"),
        ({"buckets": 1000}, "words", "keras"),
        ({"buckets": 1_000_003, "salt": [133, 137]}, "words", "strong"),
        ({"buckets": 1000, "salt": 133}, "words", "keras_salt"),
        ({"buckets": 1000, "salt": [133, 137]}, "words", "keras_salts"),
        ({"buckets": 1000, "type": "integer"}, "ints", "keras_ints"),
        ({"buckets": 1_000_003}, "ints", "fast_ints"),
    ],
)
def test_a_hash_is_that_of_tensorflow(reader_of, tensorflow, options, values, expected):
    reader = reader_of({"name": "x", "kind": "hash", **options})
    pairs = [pair for pair in zip(tensorflow[values], tensorflow[expected], strict=True) if pair[0] != ""]
    assert keys_of(reader, x=[value for value, _ in pairs]) == [key for _, key in pairs]


def test_a_cross_is_that_of_keras(reader_of, tensorflow):
    words, ints = tensorflow["words"], tensorflow["ints"]
    reader = reader_of(
        {"name": "a", "kind": "hash"},
        {"name": "b", "kind": "hash", "type": "integer"},
        {"name": "c", "kind": "hash"},
        {"name": "ab", "kind": "cross", "of": ["a", "b"], "buckets": 1000},
        {"name": "ac", "kind": "cross", "of": ["a", "c"], "buckets": 1000},
    )
    count = len(tensorflow["cross"])
    found = reader({"a": words[:count], "b": ints, "c": words[-1 : -count - 1 : -1]}, count)
    bags = np.split(found.keys, found.row_ptrs[1:-1])
    is_there = [word != "" for word in words[:count]]
    assert [bag.tolist() for bag in bags[3::5]] == [
        [key] * there for key, there in zip(tensorflow["cross"], is_there, strict=True)
    ]
    crossed = zip(tensorflow["cross_words"], is_there, strict=False)
    assert [bag.tolist() for bag in bags[4::5]] == [[key] * there for key, there in crossed]


@pytest.mark.parametrize(("unknown", "expected"), [(1, "lookup_1"), (3, "lookup_3")])
def test_a_vocabulary_is_that_of_keras(reader_of, tensorflow, tmp_path, unknown, expected):
    (tmp_path / "words.txt").write_text("\n".join(tensorflow["vocabulary"]) + "\n", encoding="utf-8")
    feature = {"name": "x", "kind": "vocabulary", "vocabulary": "words.txt", "unknown_buckets": unknown}
    found = reader_of(feature)({"x": tensorflow["probe"]}, len(tensorflow["probe"]))
    pairs = zip(tensorflow["probe"], tensorflow[expected], strict=True)
    assert found.keys.tolist() == [key for word, key in pairs if word != ""]
    assert found.unknown == {"x": 3}


def test_a_vocabulary_of_integers_is_that_of_keras(reader_of, tensorflow, tmp_path):
    (tmp_path / "numbers").write_text("10\n-3\n7", encoding="utf-8")
    for vocabulary in ({"vocabulary": "numbers"}, {"values": [10, -3, 7]}):
        reader = reader_of({"name": "x", "kind": "vocabulary", "type": "integer", **vocabulary})
        assert keys_of(reader, x=[7, 10, 5, -3]) == tensorflow["lookup_ints"]


def test_buckets_and_standardised_numbers_are_those_of_keras(reader_of, tensorflow):
    reader = reader_of(
        {"name": "b", "kind": "bucketize", "boundaries": tensorflow["boundaries"]},
        {"name": "d", "kind": "dense", "mean": 3.0, "std": 2.0},
    )
    found = reader({"b": tensorflow["x"], "d": tensorflow["x"]}, len(tensorflow["x"]))
    assert found.keys.tolist() == tensorflow["discretization"]
    assert found.dense[:, 0].tolist() == tensorflow["normalization"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("farmhash", "a", 12917804110809363939),
        ("farmhash", "0123456789" * 20, 9663085027203515285),
        ("murmur3", "hello", 0xCBD8A7B341BD9B02),
        ("xxh64", "abc", 0x44BC2CF5AD770999),
    ],
)
def test_a_hash_without_buckets_is_its_low_63_bits(reader_of, name, text, expected):
    reader = reader_of({"name": "x", "kind": "hash", "hash": name})
    assert keys_of(reader, x=[text]) == [expected & (2**63 - 1)]
