"""Reads the structure of an ONNX model without running it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving.errors import MissingExtraError, ModelFileError
from serving.model.regular_file import real_path

_LARGEST_BYTES = 2**31 - 1  # of a protobuf message


def serialized(model: Any) -> bytes:
    """Return an ``onnx.ModelProto`` as the content of one file; more than 2 GiB are a ValueError."""
    from google.protobuf.message import EncodeError

    try:
        content: bytes = model.SerializeToString()
    except EncodeError as err:  # gives no reason, but a model that was read can only be too large
        raise ValueError(f"it has more than {_LARGEST_BYTES:,} bytes, the limit of an ONNX file") from err
    if len(content) > _LARGEST_BYTES:  # protobuf without its native part writes files that nobody can read
        raise ValueError(f"it has {len(content):,} bytes; the limit of an ONNX file is {_LARGEST_BYTES:,}")
    return content


def read_structure(file: Path) -> Any:
    """Return an ONNX file's ``onnx.ModelProto`` without the weights in files next to it."""
    return _import_onnx().load(file, load_external_data=False)


def refuse_weights_elsewhere(file: Path, structure: Any) -> None:
    """Raise ModelFileError if the file of weights is missing or outside the folder of the network.

    A network must not read other files of the machine, and its version must be complete.
    """
    onnx, folder = _import_onnx(), real_path(file.parent)
    for tensor in _tensors_of(structure):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        try:
            weights = real_path(folder / location)
            is_inside = not Path(location).is_absolute() and weights.is_relative_to(folder)
            is_file = weights.is_file()
        except (OSError, ValueError) as err:  # a name that is too long, or has a NUL
            raise ModelFileError(file, f"tensor {tensor.name!r}: cannot find its weights: {err}") from err
        if not is_inside:
            reason = f"its weights are in {location!r}, expected a file in the folder of the network, {folder}"
            raise ModelFileError(file, f"tensor {tensor.name!r}: {reason}")
        if not is_file:  # reading a pipe would block
            fault = "not a regular file" if weights.exists() else "no such file"
            raise ModelFileError(file, f"tensor {tensor.name!r}: its weights are in {location!r}: {fault}")


def refuse_unread_inputs(graph: Any, source: str | Path) -> None:
    """Raise ModelFileError if no node reads an input: the table of that input would not affect the answer."""
    read = set(_names_read(graph))
    unread = [repr(name) for name in input_names(graph) if name not in read]
    if unread:
        advice = (
            "remove them, or export the network again with a tensor of its own for each input: torch.onnx.export "
            "merges inputs whose example is the same tensor, as in [torch.zeros(2, 16)] * 4"
        )
        reason = f"no node reads these inputs, so they have no effect on the answer: {', '.join(unread)}; {advice}"
        raise ModelFileError(source, reason)


def has_files_beside(file: Path) -> bool:
    """Whether weights of an ONNX file are in other files, as they must be for more than 2 GiB."""
    return has_weights_elsewhere(read_structure(file))


def has_weights_elsewhere(structure: Any) -> bool:
    """Whether weights of an ONNX model are in other files than its structure."""
    external = _import_onnx().TensorProto.EXTERNAL
    return any(tensor.data_location == external for tensor in _tensors_of(structure))


def signature(content: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Return the inputs and the outputs of a model, in its order: names to shapes such as ``[B, 26, 16]``."""
    graph = _import_onnx().load_model_from_string(content).graph
    names = set(input_names(graph))
    inputs = {entry.name: _shape(entry) for entry in graph.input if entry.name in names}
    return inputs, {entry.name: _shape(entry) for entry in graph.output}


def input_names(graph: Any) -> list[str]:
    """Return the names of a graph's inputs, without the weights that older files list as inputs."""
    weights = {initializer.name for initializer in graph.initializer}
    return [entry.name for entry in graph.input if entry.name not in weights]


def _names_read(graph: Any) -> Iterator[str]:
    """Yield the names that a graph reads, in its nodes and their inner graphs (an If's branches) and as its outputs."""
    yield from (output.name for output in graph.output)
    for node in graph.node:
        yield from names_read_by(node)


def names_read_by(node: Any) -> Iterator[str]:
    """Yield the names that a node reads, with those that its inner graphs read."""
    yield from node.input
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs):
            yield from _names_read(inner)


def _import_onnx() -> Any:
    try:
        import onnx
    except ImportError as err:
        raise MissingExtraError("onnx", "onnx", "reading an ONNX file") from err
    return onnx


def _tensors_of(model: Any) -> Iterator[Any]:
    return (tensor for part in (model.graph, *model.functions) for tensor in _tensors_in(part))


def _tensors_in(part: Any) -> Iterator[Any]:
    """Yield the constant tensors of a graph or function and of the graphs in its nodes, such as an If's branches."""
    yield from getattr(part, "initializer", ())  # a function has no initializers
    yield from _values_of(*getattr(part, "sparse_initializer", ()))
    for attribute in (attribute for node in part.node for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        yield from _values_of(attribute.sparse_tensor, *attribute.sparse_tensors)
        for inner in (attribute.g, *attribute.graphs):
            yield from _tensors_in(inner)


def _values_of(*sparse: Any) -> Iterator[Any]:
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _shape(entry: Any) -> str:
    dims = entry.type.tensor_type.shape.dim
    sizes = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims]
    return f"[{', '.join(sizes)}]"
