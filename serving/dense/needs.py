"""Which dense features and rows each output of an ONNX network depends on, from the network's structure.

A request that asks for some of the outputs may leave out the others.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from serving.model.records import Graph, Needs

Place = tuple[str, int]  # an input of the network, and a number on its second axis: a dense feature or a row


def output_needs(structure: Any, graph: Graph) -> dict[str, Needs]:
    """Return what each output depends on; empty if the structure does not tell.

    A feature or a row may be among them although the output ignores it, never the other way round.

    Args:
        structure: an ``onnx.ModelProto``. Its last node joins the outputs, as the importer writes it.
        graph: states the outputs.
    """
    tensors = tensors_of_outputs(structure, graph)
    needs = _needs(structure.graph, graph) if tensors else {}
    tables = {embedding.top: number for number, embedding in enumerate(graph.embeddings)}
    found = {output: needs.get(tensor, frozenset()) for output, tensor in tensors.items()}
    return {
        output: Needs(
            frozenset(at for name, at in places if name == graph.dense_top),
            frozenset((tables[name], at) for name, at in places if name != graph.dense_top),
        )
        for output, places in found.items()
    }


def tensors_of_outputs(structure: Any, graph: Graph) -> dict[str, str]:
    """Return the tensor of each output, by its name; empty if the structure does not tell. See ``output_needs``."""
    nodes = list(structure.graph.node)
    outputs = graph.stated_outputs
    if not outputs or not nodes:
        return {}
    joined = nodes[-1]
    is_joined = joined.op_type == "Concat" and list(joined.output) == [structure.graph.output[0].name]
    tensors = list(joined.input) if len(outputs) > 1 and is_joined else [structure.graph.output[0].name]
    if len(tensors) != len(outputs):
        return {}
    return {output.name: tensor for output, tensor in zip(outputs, tensors, strict=True)}


def _needs(network: Any, graph: Graph) -> dict[str, frozenset[Place]]:
    """Return what each tensor depends on."""
    constants, scalars = _constants(network)
    sizes = {graph.dense_top: graph.dense_dim, **{embedding.top: embedding.slots for embedding in graph.embeddings}}
    chosen = {name: [(name, at) for at in range(size)] for name, size in sizes.items()}  # tensors that choose inputs
    needs = {name: frozenset(places) for name, places in chosen.items()}
    every = frozenset[Place]().union(*needs.values())
    for entry in network.input:
        if entry.name != graph.dense_top and len(entry.type.tensor_type.shape.dim) < 3:
            chosen.pop(entry.name, None)  # the floats of several rows are on one axis
    for node in network.node:  # in an order in which they can run
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            needs.update(dict.fromkeys(node.output, every))  # a branch or a loop reads tensors without naming them
            continue
        found = _chosen(node, chosen, constants, graph.dense_top)
        if found is not None:
            if node.op_type != "Gather" or node.input[1] not in scalars:  # which removes the axis
                chosen.update(zip(node.output, found, strict=True))
            needs.update(zip(node.output, map(frozenset, found), strict=True))
        else:
            of_inputs = frozenset[Place]().union(*(needs.get(name, frozenset()) for name in node.input))
            needs.update(dict.fromkeys(node.output, of_inputs))
    return needs


def _chosen(
    node: Any, chosen: Mapping[str, list[Place]], constants: Mapping[str, list[int]], dense: str
) -> list[list[Place]] | None:
    """Return the places of each output of a node that only chooses places of a tensor; None of another node."""
    given = chosen.get(node.input[0]) if node.input else None
    if given is None:
        return None
    is_dense = {name for name, _ in given} <= {dense}
    second = (1, -1) if is_dense else (1,)  # the second axis of rows is not the last
    arguments = [constants.get(name) for name in node.input[1:]]
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    if node.op_type in ("Identity", "Cast"):
        return [given]
    if node.op_type == "Slice" and len(arguments) in (3, 4):
        begins, ends, axes, steps = (*arguments, [1])[:4]
        if begins and ends and axes and len(axes) == 1 and axes[0] in second and steps and steps[0] > 0:
            return [given[begins[0] : ends[0] : steps[0]]]
    elif node.op_type == "Gather" and axis in second and arguments[0] is not None:
        return [[given[at] for at in arguments[0]]]
    elif node.op_type == "Split" and axis in second and arguments and arguments[0] is not None:
        ends = list(accumulate(arguments[0]))
        return [given[end - size : end] for end, size in zip(ends, arguments[0], strict=True)]
    return None


def _constants(network: Any) -> tuple[dict[str, list[int]], set[str]]:
    """Return the integers of constant tensors of at most one dimension, by name, and the names of those without."""
    from onnx import TensorProto, numpy_helper

    tensors = {tensor.name: tensor for tensor in network.initializer}
    found: dict[str, list[int]] = {}
    for node in network.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                tensors[node.output[0]] = attribute.t
            elif attribute.name == "value_ints":
                found[node.output[0]] = list(attribute.ints)
    scalars = {name for name, tensor in tensors.items() if not tensor.dims}
    for name, tensor in tensors.items():
        is_integer = tensor.data_type in (TensorProto.INT64, TensorProto.INT32)
        if is_integer and len(tensor.dims) <= 1 and tensor.data_location != TensorProto.EXTERNAL:
            found[name] = numpy_helper.to_array(tensor).reshape(-1).tolist()
    return found, scalars
