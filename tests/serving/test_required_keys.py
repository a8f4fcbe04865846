"""Slots with exactly one key: a network that reads the key's row would get zeros for it."""

import json

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from serving.config import read_inference_config
from serving.dense.needs import output_needs
from serving.errors import ConfigError, RequestError
from serving.features import changes
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.model.graph import parse_graph
from serving.opening import load_model
from serving.reading import read_batch
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.tools.sequence_model import SequenceModel
from tests.tools.tiny_model import flatten


class OneKey(SequenceModel):
    def graph(self):
        document = super().graph()
        for entry in document["layers"][0]["sparse"]:
            entry["one_key"] = True
        return document


MODEL = OneKey()
MODELS = (MODEL, "new"), (SequenceModel(), "old")
RIGHT = [[1], [2], []]  # a sequence may be empty
ZEROS = np.zeros((2, 2), np.float32)
WRONG = {
    "no key": ([[1], [], [3]], "sample 1 has no key in 'item', but the network needs exactly one; a missing value"),
    "two keys": ([[1], [2, 3], []], "sample 1 has 2 keys in 'item', but the network needs exactly one$"),
    "keys of another slot": ([[], [2], [3]], "sample 1 has no key in 'user'"),
}


def by_name(bags):
    return {name: [slots[at] for slots in bags] for at, name in enumerate(MODEL.names)} | {"n0": [0, 0], "n1": [0, 0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    MODEL.write(folder, "ones")
    return folder


@pytest.fixture(scope="module")
def session(folder):
    with load_model(folder / "ones") as session:
        yield session


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_a_sample_without_exactly_one_key_is_refused(session, wrong, message):
    bags = [RIGHT, wrong]
    with pytest.raises(RequestError, match=message):
        session.predict(ZEROS, *flatten(bags))
    with pytest.raises(RequestError, match=message):
        session.predict(by_name(bags))
    batches = [read_batch(session.config, ZEROS[:1], *flatten([slots])) for slots in bags]
    with pytest.raises(RequestError, match=message.replace("sample 1", "sample 0")):
        session.predict_batches(batches)


def test_samples_with_one_key_are_answered(session):
    bags = [RIGHT, [[4], [5], [6, 7]]]

    np.testing.assert_allclose(session.predict(by_name(bags)), MODEL.probabilities(ZEROS, bags), rtol=1e-5)


def test_candidates_of_a_user_without_a_key_are_refused(session):
    for user, item, message in (([], [1], "sample 0 has no key in 'user'"), ([1], [], "sample 1 has no key in 'item'")):
        candidates = [{"item": [3]}, {"item": item}]
        with pytest.raises(RequestError, match=message):
            session.predict({"context": {"user": user, "n0": 0, "n1": 0}, "candidates": candidates})


def test_a_server_refuses_them(folder):
    with ModelRepository(folder) as models:
        models.load()
        client = Client(create_app(FrontEnd(models)))
        sample = {"user": 1, "item": 2, "n0": 0, "n1": 0}
        samples = client.post("/predict/ones", {"samples": [sample, {**sample, "item": []}]})
        data = {"DES": [[0, 0]], "CATCOLUMN": [1], "ROWINDEX": [0, 1, 0, 0, 0]}
        types = {"DES": "FP32", "CATCOLUMN": "INT64", "ROWINDEX": "INT32"}
        inputs = [
            {"name": one, "shape": list(np.shape(of)), "datatype": types[one], "data": of} for one, of in data.items()
        ]
        tensors = client.post("/v2/models/ones/infer", {"inputs": inputs})
        answered = client.post("/predict/ones", {"samples": [sample]})

    assert (samples.status_code, tensors.status_code, answered.status_code) == (400, 400, 200)
    assert "sample 1 has no key in 'item'" in samples.json()["error"]
    assert "sample 0 has no key in 'item'" in tensors.json()["error"]


def test_a_list_whose_values_have_slots_of_their_own_needs_all(tmp_path):
    model = OneKey(most={}, names=())
    version = model.write(tmp_path)
    (version / "manifest.json").unlink()
    goods = {"kind": "vocabulary", "values": ["a", "b", "c"], "unknown_buckets": 0}
    features = [
        {"name": "user", "kind": "identity"},
        {"name": "seen", **goods, "slot": "goods[0:2]", "list": {"most": 2}},
        *({"name": name, "kind": "dense"} for name in ("x", "y")),
    ]
    (version / "features.json").write_text(json.dumps({"format": 1, "features": features}))
    given = {"user": [1], "x": [0], "y": [0]}

    with load_model(version.parent) as session:
        answer = session.predict({**given, "seen": [["c", "a"]]})
        for seen, came in ((["a"], "1 key"), ([], "no key"), (["a", "other"], "1 key"), (None, "no key")):
            with pytest.raises(
                RequestError, match=f"sample 0 has {came} in 'seen', but the network needs exactly 2; a"
            ):
                session.predict({**given, "seen": [seen]})
        with pytest.raises(
            RequestError, match=r"sample 0 has 2, 0 keys in the slots of 'seen', but .* needs one in each"
        ):
            session.predict(ZEROS[:1], np.array([1, 2, 0]), np.array([0, 1, 3, 3]))

    np.testing.assert_allclose(answer, model.probabilities(ZEROS[:1], [[[1], [2], [0]]]), rtol=1e-5)


def test_a_check_says_that_a_key_is_now_required(tmp_path):
    configs = [read_inference_config(one.write(tmp_path, name) / "graph.json", name) for one, name in MODELS]

    assert list(changes(*configs)) == [f"always send a key of {name}: it is now required" for name in ("user", "item")]
    assert not list(changes(*configs[::-1]))


def test_the_key_of_the_graph_is_true_or_false():
    document = MODEL.graph()
    document["layers"][0]["sparse"][0]["one_key"] = 1

    with pytest.raises(ConfigError, match=r"sparse\[0\].one_key: expected one of true, false, got 1"):
        parse_graph(document, "graph.json")


def needs_of(nodes):
    """The rows that the outputs ``x`` and ``y`` of a network need of a table with three slots."""
    values = {"zero": [0], "one": [1], "two": [2], "end": [2**63 - 1], "last": [-1], "first": 0, "places": [2, 0]}
    graph = helper.make_graph(
        [*nodes, helper.make_node("Concat", ["x", "y"], ["answer"], axis=1)],
        "needs",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["B", 3, 2])],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["B", None])],
        [numpy_helper.from_array(np.array(value), name) for name, value in values.items()],
    )
    data = {
        "type": "Data",
        "label": {"label_dim": 2},
        "outputs": [{"name": name, "kind": "score"} for name in ("x", "y")],
        "dense": {"top": "dense", "dense_dim": 0},
        "sparse": [{"top": "keys", "slot_num": 3, "nnz_per_slot": 1}],
    }
    hparam = {"embedding_vec_size": 2, "combiner": "sum"}
    kind = "DistributedSlotSparseEmbeddingHash"
    table = {"type": kind, "bottom": "keys", "top": "rows", "sparse_embedding_hparam": hparam}
    document = parse_graph({"layers": [data, table]}, "graph.json", inputs_only=True)
    found = output_needs(helper.make_model(graph), document)
    return {name: sorted(needs.rows) for name, needs in found.items()}


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "rows"),
    [
        pytest.param("Slice", ["rows", "one", "end", "one"], {}, [2], id="a slice"),
        pytest.param("Slice", ["rows", "one", "end", "last"], {}, [0, 1, 2], id="a slice of floats"),
        pytest.param("Gather", ["rows", "places"], {"axis": 1}, [0], id="rows"),
        pytest.param("Gather", ["rows", "first"], {"axis": 1}, [0], id="one row"),
        pytest.param("Gather", ["rows", "first"], {"axis": 2}, [0, 1, 2], id="one float"),
    ],
)
def test_the_rows_that_an_output_reads_are_found(kind, inputs, attributes, rows):
    chosen = helper.make_node(kind, inputs, ["a"], **attributes)
    again = helper.make_node("Slice", ["a", "one", "end", "one"], ["b"])  # of the floats, where the axis is gone
    nodes = [chosen, again, helper.make_node("Flatten", ["b"], ["x"]), helper.make_node("Flatten", ["rows"], ["y"])]

    found = needs_of(nodes)

    assert found["x"] == [(0, at) for at in rows]
    assert found["y"] == [(0, 0), (0, 1), (0, 2)]
