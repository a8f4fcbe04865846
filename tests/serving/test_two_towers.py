"""A request that asks for some outputs needs the features of these outputs alone."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import hotrow
from serving.dense.needs import output_needs
from serving.errors import RequestError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.model.graph import parse_graph
from serving.repository import ModelRepository
from serving.request_log import RequestLog
from tests.serving.frontend.app_client import Client
from tests.tools.two_towers import AGE, PRICE, expected, write_towers

ITEMS, PRICES = [7, 8, 9], [1.0, 2.0, 0.5]
ITEM = {"item": ITEMS, PRICE: PRICES}
RIGHT = expected([None] * 3, ITEMS, [[0, price] for price in PRICES])["item_vector"]
FEATURES = [
    {"name": "user", "kind": "hash", "buckets": 50},
    {"name": "item", "kind": "identity", "size": 50},
    {"name": "age", "kind": "dense"},
    {"name": "price", "kind": "dense"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_towers(folder)
    definition = folder.parent / "features.json"
    definition.write_text(json.dumps({"format": 1, "features": FEATURES}))
    write_towers(folder, "raw", features=definition)
    return folder


@pytest.fixture(scope="module", params=["towers", "raw"])
def session(folder, request):
    with hotrow.load_model(folder / request.param) as session:
        yield session


def named(session, values):
    """The values with the names that the model has for them."""
    names = {AGE: "age", PRICE: "price"} if session.config.name == "raw" else {}
    return {names.get(name, name): value for name, value in values.items()}


def test_the_vector_of_an_item_needs_nothing_of_a_user(session):
    answer = session.predict(named(session, ITEM), outputs=["item_vector"])

    np.testing.assert_allclose(answer["item_vector"], RIGHT, rtol=1e-5, atol=1e-6)
    document = {
        "context": {},
        "candidates": [named(session, {"item": i, PRICE: p}) for i, p in zip(ITEMS, PRICES, strict=True)],
    }
    assert (
        session.predict(document, outputs=["item_vector"])["item_vector"].tobytes() == answer["item_vector"].tobytes()
    )


def test_what_an_output_depends_on_is_still_required(session):
    age, price = named(session, {AGE: 0}), named(session, {PRICE: 0})
    for outputs, values, absent in (
        (["item_vector"], {"item": ITEMS}, price),
        (["user_vector"], {"user": [1]}, age),
        (["score"], ITEM, age),
        (["item_vector", "score"], ITEM, age),
        ((), ITEM, age),
    ):
        with pytest.raises(RequestError, match=f"{next(iter(absent))}.*is missing".replace("[", r"\[")):
            session.predict(named(session, values), outputs=outputs)


def test_a_ranking_needs_what_its_output_needs(session):
    with pytest.raises(RequestError, match="is missing"):
        session.rank(named(session, ITEM), 1, "score")
    both = named(session, {**ITEM, "user": [3], AGE: [0.5]})
    assert session.rank(both, 1, "score").index.shape == (1, 1)


def test_a_data_frame_needs_only_the_columns_of_the_outputs(session):
    import pyarrow as pa

    answer = session.predict(pa.table(named(session, ITEM)), outputs=["item_vector"])

    np.testing.assert_allclose(answer["item_vector"], RIGHT, rtol=1e-5, atol=1e-6)


def test_features_that_nobody_needs_do_not_change_the_answer(session):
    alone = session.predict(named(session, ITEM), outputs=["item_vector"])["item_vector"]
    with_user = named(session, {**ITEM, "user": [3] * 3, AGE: [9.0] * 3})

    assert session.predict(with_user, outputs=["item_vector"])["item_vector"].tobytes() == alone.tobytes()


def test_values_are_counted_whoever_reads_them(folder):
    features = [FEATURES[0] | {"kind": "vocabulary", "values": [str(user) for user in range(49)]}, *FEATURES[1:]]
    features[0].pop("buckets")
    definition = folder.parent / "vocabulary.json"
    definition.write_text(json.dumps({"format": 1, "features": features}))
    write_towers(folder, "counted", features=definition)
    with hotrow.load_model(folder / "counted") as session:
        session.predict({"user": ["3"], "age": [1]}, outputs=["user_vector"])
        session.predict({"user": ["x"], "item": [1], "age": [1], "price": [1]}, outputs=["score"])
        counts = {
            dict(request_reading.labels).get("state"): request_reading.value
            for request_reading in session.request_readings()
        }
    assert counts == {"known": 1, "unknown": 1}


def test_over_http_and_in_the_log(folder, tmp_path):
    import pyarrow.parquet as pq

    log = RequestLog(tmp_path, 1.0, 1 << 30)
    with ModelRepository(folder) as models:
        models.load()
        client = Client(create_app(FrontEnd(models, request_log=log)))
        samples = [{"item": item, "price": price} for item, price in zip(ITEMS, PRICES, strict=True)]
        people = client.post("/predict/raw", {"samples": samples, "outputs": ["item_vector"]})
        inputs = [
            {"name": "item", "shape": [3], "datatype": "INT64", "data": ITEMS},
            {"name": "price", "shape": [3], "datatype": "FP32", "data": PRICES},
        ]
        kserve = client.post("/v2/models/raw/infer", {"inputs": inputs, "outputs": [{"name": "item_vector"}]})
        refused = client.post("/v2/models/raw/infer", {"inputs": inputs})
    log.close()

    np.testing.assert_allclose(people.json()["outputs"]["item_vector"], RIGHT, rtol=1e-5, atol=1e-6)
    (output,) = kserve.json()["outputs"]
    np.testing.assert_allclose(np.reshape(output["data"], RIGHT.shape), RIGHT, rtol=1e-5, atol=1e-6)
    assert "age" in refused.json()["error"]
    assert "is missing" in refused.json()["error"]
    rows = pq.read_table(next((tmp_path / "raw").glob("*.parquet"))).to_pylist()
    assert [(row["item"], row["age"], row["prediction_0"]) for row in rows] == [(i, None, None) for i in ITEMS * 2]


def needs_of(nodes, outputs, constants, widths=None):
    """The needs of a network over four dense features and a table."""
    graph = helper.make_graph(
        nodes,
        "needs",
        [helper.make_tensor_value_info("dense", TensorProto.FLOAT, ["B", 4])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["B", None])],
        [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()],
    )
    stated = [{"name": name, "kind": "score"} for name in outputs]
    data = {
        "type": "Data",
        "label": {"label_dim": len(outputs)},
        "outputs": stated,
        "dense": {"top": "dense", "dense_dim": 4},
        "sparse": [{"top": "keys", "slot_num": 1, "nnz_per_slot": 1}],
    }
    table = {
        "type": "DistributedSlotSparseEmbeddingHash",
        "bottom": "keys",
        "top": "rows",
        "sparse_embedding_hparam": {"embedding_vec_size": 2, "combiner": "sum"},
    }
    document = parse_graph({"layers": [data, table]}, "graph.json", inputs_only=True)
    return {name: sorted(needs.dense) for name, needs in output_needs(onnx.helper.make_model(graph), document).items()}


def node(kind, *inputs, top, **attributes):
    return helper.make_node(kind, inputs, [top] if isinstance(top, str) else top, **attributes)


SLICES = {"zero": [0], "one": [1], "two": [2], "end": [2**63 - 1], "axis": [1], "minus": [-1], "places": [3, 0]}
FORMS = {
    "a slice": ([node("Slice", "dense", "zero", "two", "axis", top="a")], [0, 1]),
    "a slice to the end": ([node("Slice", "dense", "two", "end", "minus", top="a")], [2, 3]),
    "a slice from the end": ([node("Slice", "dense", "minus", "end", "axis", top="a")], [3]),
    "a slice with steps": ([node("Slice", "dense", "one", "end", "axis", "two", top="a")], [1, 3]),
    "a slice of samples": ([node("Slice", "dense", "zero", "two", "zero", top="a")], [0, 1, 2, 3]),
    "a slice of a slice": (
        [node("Slice", "dense", "one", "end", "axis", top="b"), node("Slice", "b", "one", "two", "axis", top="a")],
        [2],
    ),
    "chosen columns": ([node("Gather", "dense", "places", top="a", axis=1)], [0, 3]),
    "chosen samples": ([node("Gather", "dense", "places", top="a", axis=0)], [0, 1, 2, 3]),
    "an identity": ([node("Identity", "dense", top="b"), node("Slice", "b", "zero", "one", "axis", top="a")], [0]),
    "a part": (
        [node("Split", "dense", "sizes", top=["c", "b"], axis=1), node("Relu", "b", top="a")],
        [1, 2, 3],
    ),
    "a product": (
        [node("Mul", "dense", "dense", top="b"), node("Slice", "b", "zero", "one", "axis", top="a")],
        [0, 1, 2, 3],
    ),
    "bounds that are computed": (
        [node("Add", "zero", "zero", top="begin"), node("Slice", "dense", "begin", "one", "axis", top="a")],
        [0, 1, 2, 3],
    ),
}


@pytest.mark.parametrize(("nodes", "columns"), FORMS.values(), ids=FORMS)
def test_the_columns_that_a_network_chooses_are_found_and_others_are_all(nodes, columns):
    last = node("Slice", "dense", "two", "end", "axis", top="last")
    joined = node("Concat", "a", "last", top="answer", axis=1)

    found = needs_of([*nodes, last, joined], ["x", "y"], {**SLICES, "sizes": [1, 3]})

    assert found == {"x": columns, "y": [2, 3]}


def test_a_branch_may_read_everything():
    condition = numpy_helper.from_array(np.array(True), "yes")
    branch = helper.make_graph(
        [node("Identity", "dense", top="inside")],
        "b",
        [],
        [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)],
    )
    choice = helper.make_node("If", ["yes"], ["a"], then_branch=branch, else_branch=branch)
    nodes = [helper.make_node("Constant", [], ["yes"], value=condition), choice, node("Identity", "a", top="answer")]

    assert needs_of(nodes, ["x"], {}) == {"x": [0, 1, 2, 3]}


def test_a_network_that_does_not_join_its_outputs_needs_all():
    nodes = [node("Slice", "dense", "zero", "two", "axis", top="a"), node("Relu", "a", top="answer")]

    assert needs_of(nodes, ["x", "y"], SLICES) == {}
    assert needs_of(nodes, ["x"], SLICES) == {"x": [0, 1]}
