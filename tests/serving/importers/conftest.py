"""A small dense network in an ONNX file, and tables to feed it."""

from importlib.util import find_spec

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

collect_ignore = [] if find_spec("keras") else ["test_keras_with_torch.py"]


class Sketch:
    """A logistic regression over its concatenated inputs.

    Attributes:
        inputs: sizes after B by name.
        weight: float32[sum of all sizes, L].
    """

    def __init__(self, inputs, labels=1):
        self.inputs = inputs
        width = sum(int(np.prod(sizes)) for sizes in inputs.values())
        self.weight = np.random.default_rng(5).normal(size=(width, labels)).astype(np.float32)

    def probabilities(self, *tensors):
        """The oracle: the network's answers in float64 to tensors in the order of its inputs."""
        flat = np.concatenate([np.asarray(tensor, np.float64).reshape(len(tensor), -1) for tensor in tensors], axis=1)
        return 1 / (1 + np.exp(-flat @ self.weight.astype(np.float64)))

    def model(self, *, sigmoid=True, samples="B", dtype=TensorProto.FLOAT, outputs=None, output_shape=None):
        inputs = [helper.make_tensor_value_info(n, dtype, [samples, *sizes]) for n, sizes in self.inputs.items()]
        nodes = [helper.make_node("Flatten", [name], [f"{name}_flat"], axis=1) for name in self.inputs]
        nodes.append(helper.make_node("Concat", [f"{name}_flat" for name in self.inputs], ["all"], axis=1))
        nodes.append(helper.make_node("MatMul", ["all", "weight"], ["logits"]))
        if sigmoid:
            nodes.append(helper.make_node("Sigmoid", ["logits"], ["answer"]))
        shape = [samples, self.weight.shape[1]] if output_shape is None else output_shape
        names = outputs or (["answer"] if sigmoid else ["logits"])
        graph = helper.make_graph(
            nodes,
            "sketch",
            inputs,
            [helper.make_tensor_value_info(name, dtype, shape) for name in names],
            [numpy_helper.from_array(self.weight, "weight")],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def write(self, path, **changes):
        onnx.save(self.model(**changes), path)
        return path


@pytest.fixture
def sketch():
    """Three inputs: 3 dense features, 2 slots of dim 4, and a flat input of 4 (1 slot of dim 4 or 2 of dim 2)."""
    return Sketch({"dense": (3,), "ads": (2, 4), "users": (4,)})


@pytest.fixture
def network(sketch, tmp_path):
    return sketch.write(tmp_path / "dense.onnx")


@pytest.fixture
def sketch_of():
    return Sketch


def matrix(rows, dim, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)


@pytest.fixture
def tables(tmp_path):
    """Two matrices in .npy files, by table name."""
    paths = {"ads": tmp_path / "ads.npy", "users": tmp_path / "users.npy"}
    np.save(paths["ads"], matrix(30, 4, 1))
    np.save(paths["users"], matrix(20, 4, 2))
    return paths
