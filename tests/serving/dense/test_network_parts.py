"""A request for one output runs only the part of an ONNX network that the output needs."""

import numpy as np
import pytest

import hotrow
from serving.errors import RequestError
from serving.importers import plan_import, write_model

onnx = pytest.importorskip("onnx")
helper, numpy_helper, TensorProto = onnx.helper, onnx.numpy_helper, onnx.TensorProto
RNG = np.random.default_rng(3)
TABLES = {name: RNG.normal(size=(9, 2)).astype(np.float32) for name in ("user", "item")}
WEIGHTS = {name: RNG.normal(size=(2, 3)).astype(np.float32) for name in TABLES}
AGES = RNG.normal(size=(4, 3)).astype(np.float32)
SHARED = RNG.normal(size=(3, 3)).astype(np.float32)
#: An age that the user's tower cannot look up.
UNKNOWN = 99.0
FEATURES = {"user": [1, 2], "item": [3, 4], "dense[0]": [0.0, 2.0]}


def node(kind, *inputs, top, **attributes):
    return helper.make_node(kind, inputs, [top], **attributes)


def branch(*nodes):
    """A branch of an If, which reads tensors that are outside of it."""
    made = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)]
    return helper.make_graph(nodes, "branch", [], made)


USER = [
    node("Cast", "dense", top="age", to=TensorProto.INT64),
    node("Gather", "ages", "age", top="of_age"),
    node("Squeeze", "of_age", "one", top="flat_age"),
    node("Flatten", "user", top="user_flat"),
    node("MatMul", "user_flat", "user_weight", top="of_user"),
    node("Add", "of_user", "flat_age", top="user_vector"),
]
ITEM = [
    node("Flatten", "item", top="item_flat"),
    node("MatMul", "item_flat", "item_weight", top="of_item"),
    node("Clip", "of_item", "", "most", top="item_vector"),
]
ITEM_IN_A_BRANCH = [
    *ITEM[:1],
    node(
        "If",
        "yes",
        top="item_vector",
        then_branch=branch(node("MatMul", "item_flat", "item_weight", top="then")),
        else_branch=branch(node("MatMul", "item_flat", "user_weight", top="else")),
    ),
]
#: The item's vector needs the user's.
ITEM_OF_USER = [
    *ITEM[:1],
    node("MatMul", "item_flat", "item_weight", top="of_item"),
    node("MatMul", "user_vector", "shared", top="for_item"),
    node("Add", "of_item", "for_item", top="item_vector"),
]


def write(folder, item=ITEM):
    constants = {
        "ages": AGES,
        "one": np.array([1]),
        "most": np.array(1e9, np.float32),
        "yes": np.array(True),
        "shared": SHARED,
        **{f"{name}_weight": weight for name, weight in WEIGHTS.items()},
    }
    graph = helper.make_graph(
        [
            *USER,
            *item,
            node("Mul", "user_vector", "item_vector", top="products"),
            node("ReduceSum", "products", "one", top="score"),
        ],
        "towers",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", *sizes])
            for name, sizes in {"dense": [1], "user": [1, 2], "item": [1, 2]}.items()
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", width])
            for name, width in {"user_vector": 3, "score": 1, "item_vector": 3}.items()
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "network.onnx"
    )
    for name, rows in TABLES.items():
        np.save(folder / f"{name}.npy", rows)
    kinds = {"user_vector": "vector", "score": "score", "item_vector": "vector"}
    tables = {name: folder / f"{name}.npy" for name in TABLES}
    return write_model(plan_import(folder / "network.onnx", "sum", tables, outputs=kinds), folder / "models", "towers")


def answers(users, items, ages):
    """The oracle."""
    user = TABLES["user"][users].astype(np.float64) @ WEIGHTS["user"] + AGES[np.array(ages, int)]
    item = TABLES["item"][items].astype(np.float64) @ WEIGHTS["item"]
    return {"user_vector": user, "score": (user * item).sum(axis=1, keepdims=True), "item_vector": item}


@pytest.fixture(scope="module", params=[ITEM, ITEM_IN_A_BRANCH], ids=["nodes", "a branch"])
def session(request, tmp_path_factory):
    with hotrow.load_model(write(tmp_path_factory.mktemp("model"), request.param)) as session:
        yield session


def test_each_output_alone_is_what_all_outputs_are(session):
    right = answers([1, 2], [3, 4], [0, 2])
    together = session.predict(FEATURES)
    for name, values in right.items():
        np.testing.assert_allclose(together[name], values, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(session.predict(FEATURES, outputs=[name])[name], values, rtol=1e-5, atol=1e-6)


def test_nodes_that_an_output_does_not_need_are_not_run(session):
    strange = {**FEATURES, "dense[0]": [UNKNOWN, 0.0]}

    found = session.predict(strange, outputs=["item_vector"])["item_vector"]

    np.testing.assert_allclose(found, answers([1, 2], [3, 4], [0, 0])["item_vector"], rtol=1e-5, atol=1e-6)
    for outputs in (["user_vector"], ["score"], ["item_vector", "user_vector"], None):
        with pytest.raises(RequestError, match="cannot run on this batch"):
            session.predict(strange, outputs=outputs)


def test_merged_requests_for_the_same_output_run_its_part_alone(session):
    strange = session.read({**FEATURES, "dense[0]": [UNKNOWN, 0.0]}, ["item_vector"])
    known, everything = session.read(FEATURES, ["item_vector"]), session.read(FEATURES)

    both = session.predict_batches([strange, known])

    columns = strange.wanted[0].columns
    assert both[0].values[:, columns].tobytes() == both[1].values[:, columns].tobytes()
    with pytest.raises(RequestError, match="cannot run on this batch"):
        session.predict_batches([strange, everything])


def test_an_output_that_needs_most_of_the_network_runs_all_of_it(tmp_path):
    with hotrow.load_model(write(tmp_path, ITEM_OF_USER)) as session:
        assert session.predict(FEATURES, outputs=["item_vector"])["item_vector"].shape == (2, 3)
        with pytest.raises(RequestError, match="cannot run on this batch"):
            session.predict({**FEATURES, "dense[0]": [UNKNOWN, 0.0]}, outputs=["item_vector"])
