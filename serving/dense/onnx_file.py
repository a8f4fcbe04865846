"""What an ONNX model says of itself, read without running it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving.errors import MissingExtraError


def has_files_beside(file: Path) -> bool:
    """Whether weights of an ONNX file lie in other files, as those of one of more than 2 GiB do.

    Raises:
        MissingExtraError: the package onnx is not installed.
    """
    onnx = _import_onnx()
    model = onnx.load(file, load_external_data=False)
    tensors = (tensor for part in (model.graph, *model.functions) for tensor in _tensors_in(part))
    return any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in tensors)


def signature(content: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Return the inputs and the outputs of a model, in its order: names to shapes such as ``[B, 26, 16]``.

    Raises:
        MissingExtraError: the package onnx is not installed.
    """
    graph = _import_onnx().load_model_from_string(content).graph
    weights = {initializer.name for initializer in graph.initializer}  # older files list them as inputs too
    inputs = {entry.name: _shape(entry) for entry in graph.input if entry.name not in weights}
    return inputs, {entry.name: _shape(entry) for entry in graph.output}


def _import_onnx() -> Any:
    try:
        import onnx
    except ImportError as err:
        raise MissingExtraError("onnx", "onnx", "looking into an ONNX file") from err
    return onnx


def _tensors_in(part: Any) -> Iterator[Any]:
    """The constant tensors of a graph or a function, and of the graphs in its nodes: the arms of an If, say."""
    yield from getattr(part, "initializer", ())  # a function has none
    for attribute in (attribute for node in part.node for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for inner in (attribute.g, *attribute.graphs):
            yield from _tensors_in(inner)


def _shape(entry: Any) -> str:
    dims = entry.type.tensor_type.shape.dim
    sizes = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims]
    return f"[{', '.join(sizes)}]"
