"""Slots and dense features by the names in the graph, without a features.json."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import hotrow
from serving.candidates import read_shared
from serving.config import ModelConfig, TableConfig
from serving.errors import ConfigError, RequestError, did_you_mean
from serving.features import definition_of_names, open_features, slots_of_graph
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.model.graph import parse_graph
from serving.model.manifest import write_manifest
from serving.model.slot_sizes import UNKNOWN_KEY, SlotRange
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.tools.tiny_model import NamedModel, TinyModel

TABLES = {"person": 1, "thing": 2}
SLOTS, DENSE = ("user", "item", "last"), ("age", "price")
VALUES = {"user": [3, 4, 5], "item": [[1, 2], [], [7]], "last": [9, None, [8]], "age": [0.5, 1, 2], "price": [3, 4, 6]}
BAGS = [[[3], [1, 2], [9]], [[4], [], []], [[5], [7], [8]]]


MODEL = NamedModel(tables=TABLES, dense_dim=2, names=SLOTS, dense_names=DENSE, labels=("clicked",))


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    MODEL.write(path, "named")
    return path


@pytest.fixture(scope="module")
def session(repository):
    with hotrow.load_model(repository / "named") as session:
        yield session


@pytest.fixture(scope="module")
def client(repository):
    with ModelRepository(repository) as models:
        models.load()
        yield Client(create_app(FrontEnd(models)))


def expected():
    return MODEL.probabilities(np.array([VALUES["age"], VALUES["price"]]).T, BAGS)


@pytest.mark.parametrize(
    "given",
    [
        VALUES,
        {**VALUES, "user": np.array([3, 4, 5]), "price": np.array([3, 4.0, 6])},
        pa.table({**VALUES, "last": [[9], None, [8]]}),
        pa.table({**VALUES, "last": [[9], None, [8]], "user": [3.0, 4.0, 5.0], "age": ["0.5", "1", "2"]}),
    ],
    ids=["lists", "arrays", "a table", "a table of other types"],
)
def test_values_by_name_give_the_models_answer(session, given):
    np.testing.assert_allclose(session.predict(given), expected(), atol=2e-6)


def test_a_number_is_a_list_of_one_number(session):
    lists = session.predict({**VALUES, "user": [[3], [4], [5]], "last": [[9], [], [8]]})
    assert lists.tolist() == session.predict(VALUES).tolist()


def test_requests_over_http_have_values_by_name_or_keys(client):
    rows = [dict(zip(VALUES, row, strict=True)) for row in zip(*VALUES.values(), strict=True)]
    dense = zip(VALUES["age"], VALUES["price"], strict=True)
    keyed = [{"dense": numbers, "keys": bags} for numbers, bags in zip(dense, BAGS, strict=True)]
    tensors = [
        {"name": "user", "datatype": "INT64", "shape": [3], "data": [3, 4, 5]},
        {"name": "item", "datatype": "INT64", "shape": [3], "data": [1, 2, 7]},
        {"name": "item.offsets", "datatype": "INT32", "shape": [4], "data": [0, 2, 2, 3]},
        {"name": "last", "datatype": "INT64", "shape": [2], "data": [9, 8]},
        {"name": "last.offsets", "datatype": "INT32", "shape": [4], "data": [0, 1, 1, 2]},
        *({"name": name, "datatype": "FP32", "shape": [3], "data": VALUES[name]} for name in DENSE),
    ]
    bodies = [{"samples": rows}, {"samples": keyed}]
    answers = [client.post("/predict/named", json=body).json()["predictions"] for body in bodies]
    answer = client.post("/v2/models/named/infer", json={"inputs": tensors}).json()["outputs"][0]["data"]

    assert answers[0] == answers[1]
    assert np.array(answers[0]).reshape(-1).tolist() == answer
    np.testing.assert_allclose(answers[0], expected(), atol=2e-6)


def test_the_metadata_has_the_names(client):
    metadata = client.get("/v2/models/named").json()

    assert (metadata["slots"], metadata["dense"], metadata["labels"]) == (list(SLOTS), list(DENSE), ["clicked"])
    names = [tensor["name"] for tensor in metadata["inputs"]]
    lists = [name for slot in SLOTS for name in (slot, f"{slot}.offsets")]
    assert names == ["DES", "CATCOLUMN", "ROWINDEX", *DENSE, *lists, "CANDIDATES"]


def test_the_status_and_the_openapi_document_list_the_features(client):
    [version] = client.get("/status").json()["models"][0]["versions"]
    body = client.get("/openapi.json").json()["paths"]["/predict/{model}"]["post"]["requestBody"]["content"]

    assert version["features"] == [*DENSE, *SLOTS]
    example = body["application/json"]["examples"]["named"]["value"]
    assert example == {"samples": [{"age": 0.5, "price": 0.5, "user": [0], "item": [0], "last": [0]}]}
    assert client.post("/predict/named", json=example).status_code == 200


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"itm": 5}, "samples[0].itm: is not a feature; did you mean 'item'?"),
        ({"item": "a"}, "samples[0].item: expected a list, got 'a'"),
        ({"item": [1.5]}, "samples[0].item: value 0: expected an integer, got 1.5"),
        ({"price": None}, "samples[0].price: is missing, and the feature has no value for missing"),
        ({"user": 2**63 - 1}, "samples[0].user: value 0: the key is reserved"),
    ],
)
def test_an_error_names_the_input(client, changed, message):
    sample = {name: values[0] for name, values in VALUES.items()}
    answer = client.post("/predict/named", json={"samples": [{**sample, **changed}]})

    assert (answer.status_code, answer.json()["error"][: len(message)]) == (400, message)


def test_a_faulty_dense_feature_of_a_request_with_keys_is_named(session):
    with pytest.raises(RequestError, match="DES: sample 1, feature 'price' is nan in float32"):
        session.predict([[1, 2], [3, np.nan]], [[1, 2, 3], [4, 5, 6]])


def test_a_value_without_a_name_is_no_request(session):
    with pytest.raises(RequestError, match=r"expected raw features by name, a data frame, .*; got only list"):
        session.predict([3, 4])


def test_slots_with_one_name_have_the_same_keys(tmp_path):
    model = NamedModel(tables={"deep": 2, "wide": 1}, dense_dim=0, names=("user", "item", "user"))
    model.write(tmp_path, "both")
    bags = [[[3], [1], [3]], [[4], [2], [4]]]
    with hotrow.load_model(tmp_path / "both") as session:
        answer = session.predict({"user": [3, 4], "item": [1, 2]})
    np.testing.assert_allclose(answer, model.probabilities(np.empty((2, 0)), bags), atol=2e-6)


def test_a_slot_for_one_key_takes_one_value():
    document = MODEL.graph()
    document["layers"][0]["sparse"][0]["max_feature_num_per_sample"] = 1
    graph = parse_graph(document, "graph.json")
    definition = definition_of_names(slots_of_graph(graph), graph.dense_names)

    assert [(feature.name, feature.kind, feature.is_list) for feature in definition.features] == [
        *((name, "dense", False) for name in DENSE),
        *(("user", "identity", False), ("item", "identity", True), ("last", "identity", True)),
    ]


@pytest.mark.parametrize(
    ("changed", "values", "keys"),
    [
        (
            {"slot_keys": "unshifted", "slot_ranges": (SlotRange(0, 10), SlotRange(10, 5))},
            {"a": [3, 11], "b": [4, 0]},
            [3, 14, UNKNOWN_KEY, 10],
        ),
        (
            {"slot_keys": "unshifted", "slot_ranges": (SlotRange(0, 10), SlotRange(10, 5))},
            {"a": [3], "b": [4, 0, 11]},
            [3, 14, 3, 10, 3, UNKNOWN_KEY],
        ),
        ({"key_type": "I32"}, {"a": [0, 2**32 - 1], "b": ["7", None]}, [0, 7, 2**32 - 1]),
        ({"key_type": "I32"}, {"a": [-1], "b": [0]}, "CATCOLUMN: -1 at position 0: a uint32 key is in 0..4294967295"),
        (
            {"key_type": "I32"},
            {"a": [1], "b": [0, -1]},
            "CATCOLUMN: -1 at position 3: a uint32 key is in 0..4294967295",
        ),
    ],
)
def test_keys_by_name_are_those_that_the_model_takes(changed, values, keys):
    """Keys from 0 in each slot, and uint32 keys."""
    table = TableConfig(name="t", dim=4, slots=2, combiner="sum", file=Path("x"), max_keys_per_sample=2)
    of_table = {"slot_names": ("a", "b"), "slot_ranges": changed.pop("slot_ranges", ())}
    config = ModelConfig(
        **{"name": "m", "graph_file": Path("graph.json"), "dense_file": Path("d"), "key_type": "I64", **changed},
        tables=(table.model_copy(update=of_table),),
        max_batchsize=8,
        dense_dim=0,
        label_dim=1,
    )
    reader = open_features(config)
    columns = reader.named_columns(values)
    if isinstance(keys, str):
        with pytest.raises(RequestError, match=re.escape(keys)):
            read_shared(config, reader, columns, None, 8)
    else:
        assert read_shared(config, reader, columns, None, 8).expanded().joined.keys.tolist() == keys


def test_a_graph_without_names_has_no_features():
    graph = parse_graph(TinyModel().graph(), "graph.json")
    assert definition_of_names(slots_of_graph(graph), graph.dense_names) is None


def test_a_feature_may_give_keys_to_the_slots_of_a_name(tmp_path):
    model = NamedModel(tables={"deep": 2, "wide": 1}, dense_dim=0, names=("user", "item", "user"))
    version = model.write(tmp_path, "m")
    features = [
        {"name": "person", "slot": "user", "kind": "vocabulary", "values": ["a", "b"]},
        {"name": "item", "kind": "identity", "size": 100, "offset": 10},
    ]
    (version / "features.json").write_text(json.dumps({"format": 1, "features": features}))
    (version / "manifest.json").unlink()
    write_manifest(version, "m", 1)
    with hotrow.load_model(tmp_path / "m") as session:
        assert session.read({"person": ["b", "x"], "item": [3, 4]}).joined.keys.tolist() == [2, 13, 0, 14, 2, 0]


@pytest.mark.parametrize(
    ("place", "names", "message"),
    [
        ("sparse", ["only"], "layers[0] data.sparse[1].names: expected one name per position, 2 in all, got 1"),
        ("sparse", None, "layers[0] data: expected names for every input or for none, but 'thing_keys' has none"),
        ("dense", None, "layers[0] data: expected names for every input or for none, but 'dense' has none"),
        (
            "dense",
            ["age", "keys"],
            "layers[0] data.dense: the name 'keys' is reserved in requests",
        ),
        ("sparse", ["item", "x.offsets"], "layers[0] data.sparse: the name 'x.offsets' is reserved in requests"),
        (
            "dense",
            ["age", "age"],
            "layers[0] data.dense.names: 'age' is the name of a dense feature and of another",
        ),
        ("dense", ["age", "item"], "layers[0] data.dense.names: 'item' is the name of a dense feature and of another"),
        ("dense", ["age", 5], "layers[0] data.dense.names[1]: expected a name, got 5"),
        ("label", ["a", "b"], "layers[0] data.label.names: expected one name per position, 1 in all, got 2"),
    ],
)
def test_names_that_do_not_fit_are_refused(place, names, message):
    document = MODEL.graph()
    data = document["layers"][0]
    entry = data["sparse"][1] if place == "sparse" else data[place]
    entry.update(names=names)
    if names is None:
        del entry["names"]
    with pytest.raises(ConfigError) as caught:
        parse_graph(document, "graph.json")
    assert message in str(caught.value).replace('"', "")


def test_a_vector_without_a_name_of_its_own_is_explained():
    assert did_you_mean("c", ["cc", "c[0]", "c[1]"]) == "; did you mean 'c[0]' to 'c[1]', each with one value?"
    assert did_you_mean("c", ["cc", "c[0]"]) == "; did you mean 'cc'?"
