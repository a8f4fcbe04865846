"""The request form for people."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import ModelConfig, TableConfig
from serving.errors import RequestError
from serving.protocol.samples import (
    PREDICTIONS_SCHEMA,
    SAMPLES_SCHEMA,
    SamplesRequest,
    decode_samples,
    encode_answer,
)


def table(name, slots):
    return TableConfig(name=name, dim=4, slots=slots, combiner="sum", file=Path("x"))


def config(tables, dense_dim=2):
    return ModelConfig(
        name="m",
        graph_file=Path("g"),
        dense_file=Path("d"),
        tables=tables,
        key_type="I64",
        max_batchsize=8,
        dense_dim=dense_dim,
        label_dim=1,
    )


TWO_TABLES = config((table("user", 1), table("item", 2)))
BAG = st.lists(st.integers(-(2**62), 2**62), max_size=3)


PLAIN = SamplesRequest(None)


def body(samples):
    return json.dumps({"samples": samples}).encode()


@settings(deadline=None)
@given(samples=st.lists(st.lists(BAG, min_size=3, max_size=3), min_size=1, max_size=8))
def test_every_bag_arrives_at_its_table_sample_and_slot(samples):
    batch = decode_samples(body([{"dense": [0, 1], "keys": bags} for bags in samples]), TWO_TABLES).batch

    for keys, slots in zip(batch.tables, (slice(0, 1), slice(1, 3)), strict=True):
        expected = [bag for bags in samples for bag in bags[slots]]
        assert [bag.tolist() for bag in np.split(keys.keys, keys.row_ptrs[1:-1])] == expected


def test_keys_may_be_given_by_table_name_in_any_order():
    second = {"dense": [2, 3], "keys": [[5], [], [6]]}
    named = body([{"dense": [0, 1], "keys": {"item": [[4, 9], []], "user": [17]}}, second])
    listed = body([{"dense": [0, 1], "keys": [[17], [4, 9], []]}, second])

    batches = [decode_samples(text, TWO_TABLES)[0] for text in (named, listed)]

    for got, expected in zip(batches[0].tables, batches[1].tables, strict=True):
        assert [part.tolist() for part in got] == [part.tolist() for part in expected]


def test_the_schema_describes_both_forms_of_keys():
    keyed, raw = SAMPLES_SCHEMA["properties"]["samples"]["items"]["oneOf"]
    forms = keyed["properties"]["keys"]["oneOf"]

    assert "raw features" in raw["description"]
    assert [form["type"] for form in forms] == ["array", "object"]


def test_dense_features_may_be_left_out_if_the_model_has_none():
    batch = decode_samples(body([{"keys": [[1]]}]), config((table("user", 1),), dense_dim=0)).batch

    assert batch.dense.shape == (1, 0)


def test_the_documented_example_is_a_valid_request():
    batch = decode_samples(json.dumps(SAMPLES_SCHEMA["example"]).encode(), TWO_TABLES).batch

    assert batch.samples == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(b"{", "the body is not JSON", id="broken JSON"),
        pytest.param(b"{}", "samples: missing", id="no samples"),
        pytest.param(
            b'{"samples": [], "sample": 1}',
            "sample: unknown; expected candidates, context, freshness, outputs, samples, top_k, top_output",
            id="an unknown field",
        ),
        pytest.param(body([]), "samples: the list is empty", id="an empty list"),
        pytest.param(body([5]), "samples[0]: expected an object, but the number 5 came", id="a sample no object"),
        pytest.param(body([{"dense": [1, 2]}]), "samples[0].keys: missing", id="no keys"),
        pytest.param(
            body([{"dense": [1], "keys": [[], [], []]}]),
            "samples[0].dense: shape [2] needs 2 numbers, but 1 came",
            id="too few features",
        ),
        pytest.param(
            body([{"dense": [1, None], "keys": [[], [], []]}]), "samples[0].dense[1]: expected a number", id="null"
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": [[1], [2]]}]),
            "samples[0].keys: the model has 3 slots, but 2 lists of keys came",
            id="too few slots",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": [[], [], []]}, {"dense": [1, 2], "keys": [[1], 2, []]}]),
            "samples[1].keys[1]: expected a list, but the number 2 came",
            id="a bag no list",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": [[], [], []]}, {"dense": [1, 2], "keys": [[1], [2, 2.5], []]}]),
            "samples[1].keys[1][1]: expected a whole number from -9223372036854775808 to 9223372036854775807, "
            "but the number 2.5 came",
            id="a fraction for a key",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": [[True], [], []]}]), "samples[0].keys[0][0]: expected", id="true for a key"
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": [[], [], []], "label": 1}]),
            "samples[0].label: unknown; expected dense, keys",
            id="a label",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": 5}]),
            "samples[0].keys: expected a list or an object, but the number 5 came",
            id="a number for all keys",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": {"user": [1], "itme": [[], []]}}]),
            "samples[0].keys.itme: the model has no such table; did you mean 'item'?",
            id="a misspelt table",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": {"user": [1]}}]),
            "samples[0].keys.item: missing",
            id="a table without keys",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": {"user": 1, "item": [[], []]}}]),
            "samples[0].keys.user: expected a list, but the number 1 came",
            id="a key without its list",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": {"user": [1], "item": [[]]}}]),
            "samples[0].keys.item: the table has 2 slots, but 1 lists of keys came",
            id="too few slots of a table",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": {"user": [1], "item": [[], 7]}}]),
            "samples[0].keys.item[1]: expected a list, but the number 7 came",
            id="a slot of a table no list",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": {"user": [1], "item": [[], [3, None]]}}]),
            "samples[0].keys.item[1][1]: expected a whole number",
            id="null for a key of a table",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": {"user": [[1]], "item": [[], []]}}]),
            "samples[0].keys.user[0]: expected a whole number",
            id="a list for a key",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": [[], [], []]}, {"dense": [1, 2], "keys": [[], [], [5, 2**63 - 1]]}]),
            "samples[1].keys[2]: 9223372036854775807 at position 1: is reserved: a key is in",
            id="a reserved key",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": {"user": [], "item": [[], [-(2**63)]]}}]),
            "samples[0].keys.item[1]: -9223372036854775808 at position 0: is reserved: a key is in",
            id="a reserved key of a table",
        ),
        pytest.param(
            body([{"dense": [1, 2], "keys": [[]] * 3}] * 9),
            "samples: 9 samples, but the model takes at most 8",
            id="more than max_batchsize",
        ),
    ],
)
def test_a_wrong_document_is_refused_with_its_path(text, expected):
    with pytest.raises(RequestError) as caught:
        decode_samples(text, TWO_TABLES)

    assert expected in str(caught.value)


@pytest.mark.parametrize("keys", [[[1], [2], [3]], {"user": [], "item": [[3, 4], []]}], ids=["by slot", "by table"])
def test_too_many_keys_of_a_table_are_refused_with_the_sample(keys):
    item = table("item", 2).model_copy(update={"max_keys_per_sample": 1})
    limited = TWO_TABLES.model_copy(update={"tables": (table("user", 1), item)})

    with pytest.raises(RequestError) as caught:
        decode_samples(body([{"dense": [1, 2], "keys": [[], [5], []]}, {"dense": [1, 2], "keys": keys}]), limited)

    assert str(caught.value) == "samples[1].keys: 2 keys of table 'item', which takes at most 1 per sample"


def test_predictions_are_one_list_of_probabilities_per_sample():
    facts = {"defaulted_keys": 3, "model_version": "7"}
    answer = encode_answer(PLAIN, {"OUTPUT0": np.array([[0.5, 0.25], [1, 0]], np.float32)}, facts)

    assert answer == b'{"predictions":[[0.5,0.25],[1.0,0.0]],"defaulted_keys":3,"model_version":"7"}'
    assert {*json.loads(answer), "outputs", "top", "freshness"} == set(PREDICTIONS_SCHEMA["properties"])


def test_outputs_by_name_are_a_number_or_a_list_of_numbers_for_each_sample():
    outputs = {"click": np.array([[0.5], [1]], np.float32), "user": np.array([[0, 1], [2, 3]], np.float32)}
    answer = json.loads(encode_answer(PLAIN, outputs, {"model_version": "7"}))

    assert answer == {"outputs": {"click": [0.5, 1], "user": [[0, 1], [2, 3]]}, "model_version": "7"}


def test_a_request_may_ask_how_new_the_rows_are():
    samples = {"samples": [{"dense": [0, 1], "keys": [[], [], []]}]}

    asked = [decode_samples(json.dumps(samples | one).encode(), TWO_TABLES) for one in ({}, {"freshness": True})]

    assert [one.wants_freshness for one in asked] == [False, True]
    with pytest.raises(RequestError, match=r"^freshness: expected true or false"):
        decode_samples(json.dumps(samples | {"freshness": 1}).encode(), TWO_TABLES)
