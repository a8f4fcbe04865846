"""The part of an ONNX network that one output needs.

ONNX Runtime runs every node of a session, whatever outputs it is asked for. So an output that needs a small part of the
network, such as the vector of an item, has a session of its own.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from serving.dense.needs import tensors_of_outputs
from serving.dense.onnx_file import has_weights_elsewhere, names_read_by
from serving.model.records import Graph, Output

_MOST_WEIGHTS = 0.75  # of the network's: a larger part saves little time, and takes memory


def parts_of_outputs(structure: Any, graph: Graph) -> Iterator[tuple[Output, Any]]:
    """Yield each output that needs only a part of the network, and this part, an ``onnx.ModelProto``.

    Args:
        structure: the network, an ``onnx.ModelProto``.
        graph: states the outputs.
    """
    tensors = tensors_of_outputs(structure, graph)
    if len(tensors) < 2 or has_weights_elsewhere(structure):
        return
    for output in graph.stated_outputs:
        part = _part(structure, tensors[output.name], output.width)
        if _weights(part) <= _MOST_WEIGHTS * _weights(structure):
            yield output, part


def _part(structure: Any, tensor: str, width: int) -> Any:
    """Return the network with ``tensor``, [B, width], as its output."""
    from onnx import TensorProto, helper

    network = structure.graph
    makers = {name: node for node in network.node for name in node.output if name}  # an output may be left out: ""
    needed: set[str] = set()
    left = [tensor]
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += names_read_by(makers[name]) if name in makers else ()
    graph = helper.make_graph(
        [node for node in network.node if not needed.isdisjoint(filter(None, node.output))],
        network.name or "part",
        [entry for entry in network.input if entry.name in needed],
        [helper.make_tensor_value_info(tensor, TensorProto.FLOAT, [None, width])],
        [weight for weight in network.initializer if weight.name in needed],
        sparse_initializer=[weight for weight in network.sparse_initializer if weight.values.name in needed],
    )
    imports, functions = structure.opset_import, structure.functions
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=structure.ir_version)


def _weights(model: Any) -> int:
    """Return how many numbers the weights of a model have."""
    constants = (attribute.t for node in model.graph.node if node.op_type == "Constant" for attribute in node.attribute)
    return sum(prod(tensor.dims) for tensor in (*model.graph.initializer, *constants) if tensor.dims)
