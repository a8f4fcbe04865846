"""A model with a probability, scores and vectors, written by the importer, with its answers computed in NumPy."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from serving.importers import plan_import, write_model

ROWS, DIM, WIDTH = 50, 4, 3
KINDS = {
    "click": "probability",
    "score": "score",
    "cosine": "score",
    "user_vector": "vector",
    "item_vector": "vector",
}
#: The columns of the answer.
COLUMNS = 3 + 2 * WIDTH
#: What requests call the dense features: of the user and of the item.
AGE, PRICE = "dense[0]", "dense[1]"
_RNG = np.random.default_rng(7)
TABLES = {name: _RNG.normal(size=(ROWS, DIM)).astype(np.float32) for name in ("user", "item")}
WEIGHTS = {name: _RNG.normal(0, 0.4, size=(1 + DIM, WIDTH)).astype(np.float32) for name in TABLES}


def expected(users, items, dense):
    """The oracle: the answer of each output in float64. A key that is None has a row of zeros."""
    vectors = {}
    for at, (name, keys) in enumerate((("user", users), ("item", items))):
        rows = [np.zeros(DIM) if key is None else TABLES[name][key].astype(np.float64) for key in keys]
        inputs = np.concatenate([np.asarray(dense, np.float64)[:, at : at + 1], np.stack(rows)], axis=1)
        vectors[name] = inputs @ WEIGHTS[name].astype(np.float64)
    score = (vectors["user"] * vectors["item"]).sum(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        sizes = [np.linalg.norm(vector, axis=1, keepdims=True) for vector in vectors.values()]
        cosine = score / (sizes[0] * sizes[1])
    click = 1 / (1 + np.exp(-score))
    return {"click": click, "score": score, "cosine": cosine} | {f"{name}_vector": vectors[name] for name in vectors}


def network():
    """The dense network as an ``onnx.ModelProto``; ``score`` and ``cosine`` are [B]."""
    constants = {
        **{name: np.array(value) for name, value in {"zero": [0], "one": [1], "two": [2]}.items()},
        **{f"{name}_weight": weight for name, weight in WEIGHTS.items()},
    }
    nodes = []

    def add(kind, *inputs, top, **attributes):
        nodes.append(helper.make_node(kind, inputs, [top], **attributes))

    for name, begin, end in (("user", "zero", "one"), ("item", "one", "two")):
        add("Slice", "dense", begin, end, "one", top=f"{name}_dense")
        add("Flatten", name, top=f"{name}_flat", axis=1)
        add("Concat", f"{name}_dense", f"{name}_flat", top=f"{name}_inputs", axis=1)
        add("MatMul", f"{name}_inputs", f"{name}_weight", top=f"{name}_vector")
        add("ReduceL2", f"{name}_vector", top=f"{name}_size", axes=[1], keepdims=0)
    add("Mul", "user_vector", "item_vector", top="products")
    add("ReduceSum", "products", "one", top="score", keepdims=0)
    add("Mul", "user_size", "item_size", top="sizes")
    add("Div", "score", "sizes", top="cosine")
    add("Sigmoid", "score", top="flat_click")
    add("Unsqueeze", "flat_click", "one", top="click")
    shapes = {"click": [1], "score": [], "cosine": [], "user_vector": [WIDTH], "item_vector": [WIDTH]}
    inputs = {"dense": [2], **{name: [1, DIM] for name in TABLES}}
    graph = helper.make_graph(
        nodes,
        "towers",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", *sizes]) for name, sizes in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", *sizes]) for name, sizes in shapes.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write_towers(repository, name="towers", kinds=KINDS, **options):
    """Write ``<repository>/<name>/1/`` with the outputs ``kinds``, and return that directory."""
    kinds = kinds | {output: "omit" for output in KINDS.keys() - kinds.keys()}
    files = repository.parent / f"files_of_{repository.name}_{name}"
    files.mkdir()
    onnx.save(network(), files / "dense.onnx")
    for table, rows in TABLES.items():
        np.save(files / f"{table}.npy", rows)
    tables = {table: files / f"{table}.npy" for table in TABLES}
    plan = plan_import(files / "dense.onnx", "sum", tables, outputs=kinds, max_batchsize=64, **options)
    return write_model(plan, repository, name)
