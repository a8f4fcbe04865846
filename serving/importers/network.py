"""A user's dense network: an ONNX file, whose inputs and output say what the model around it must be like."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.dense.onnx_file import input_names, refuse_unread_inputs, serialized
from serving.errors import MissingExtraError, ModelFileError

_SQUASHING = ("Sigmoid", "HardSigmoid", "Softmax")
# What may stand behind the last layer and leaves its values as they are; their first input is the tensor.
_REARRANGING = ("Identity", "Cast", "Concat", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """One input: its name, and the sizes behind B: (F,), (S * D,) or (S, D)."""

    name: str
    sizes: tuple[int, ...]

    @property
    def shape(self) -> str:
        """The shape as messages write it: ``[B, 2, 16]``."""
        return f"[B, {', '.join(map(str, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class ImportedNetwork:
    """A dense network as an ONNX model.

    Attributes:
        path: its file.
        inputs: all float32, in the model's order.
        label_dim: L.
        model: the ``onnx.ModelProto``, with the weights that lay in files beside it.
    """

    path: Path
    inputs: tuple[NetworkInput, ...]
    label_dim: int
    model: Any

    def content(self) -> bytes:
        """Return it as one file's content.

        Raises:
            ModelFileError: it has more than 2 GiB.
        """
        try:
            return serialized(self.model)
        except ValueError as err:
            raise ModelFileError(self.path, str(err)) from err


def read_network(path: Path, logits: bool = False) -> ImportedNetwork:
    """Read an ONNX file, and the weights beside it that it names.

    Args:
        path: the file.
        logits: its output are logits; a Sigmoid is put behind it.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelFileError: it is no ONNX file, or its inputs and its output cannot be those of a dense network, or no node
            reads one of its inputs.
    """
    model = _load(path)
    graph = model.graph
    if len(graph.output) != 1:
        names = ", ".join(repr(output.name) for output in graph.output)
        raise ModelFileError(
            path,
            f"expected one output, the probabilities, found {len(graph.output)}: {names}; "
            "concatenate them to one, [B, L]",
        )
    names = input_names(graph)
    inputs = tuple(
        NetworkInput(entry.name, _sizes(path, "input", entry, (1, 2))) for entry in graph.input if entry.name in names
    )
    refuse_unread_inputs(graph, path)
    label_dim = _sizes(path, "output", graph.output[0], (0, 1))
    if logits:
        _refuse_probabilities(path, graph)
        _append_sigmoid(graph)
    return ImportedNetwork(path, inputs, label_dim[0] if label_dim else 1, model)


def _load(path: Path) -> Any:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as err:
        raise MissingExtraError("onnx", "onnx", "importing a model") from err
    try:
        return onnx.load(path)
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror or err}") from err
    except (DecodeError, ValueError, onnx.checker.ValidationError) as err:  # no ONNX; weights beside it are missing
        raise ModelFileError(path, f"not an ONNX network: {err}") from err


def _sizes(path: Path, kind: str, entry: Any, ranks: tuple[int, int]) -> tuple[int, ...]:
    """Return the sizes behind B of a float32 input or output; ``ranks``: how many there may be."""
    import onnx

    if not isinstance(entry.name, str):  # protobuf gives bytes for what is not UTF-8
        raise ModelFileError(path, f"{kind} {entry.name!r}: expected a name in UTF-8")
    tensor = entry.type.tensor_type
    dtypes = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}
    dtype = dtypes.get(tensor.elem_type, f"of type {tensor.elem_type}")
    shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    came = f"{kind} {entry.name!r} is {dtype} [{', '.join(map(str, shape))}]"
    if tensor.elem_type != onnx.TensorProto.FLOAT or len(shape) - 1 not in ranks:
        expected = "[B, F], [B, S, D] or [B, S * D]" if kind == "input" else "[B, L]"
        raise ModelFileError(path, f"{came}, expected float {expected}")
    sizes = tuple(size for size in shape[1:] if isinstance(size, int) and size > 0)
    if isinstance(shape[0], int) or len(sizes) < len(shape) - 1:
        advice = "export it with dynamic_shapes that free the first dimension alone"
        raise ModelFileError(path, f"{came}, expected a free number of samples and fixed sizes behind it: {advice}")
    return sizes


def _refuse_probabilities(path: Path, graph: Any) -> None:
    """Raise ModelFileError where the output is a Sigmoid's or Softmax's already: a second would go unnoticed."""
    maker = {name: node for node in graph.node for name in node.output}
    name = graph.output[0].name
    while name in maker and maker[name].op_type in _REARRANGING:
        name = maker[name].input[0]
    if name in maker and maker[name].op_type in _SQUASHING:
        kind = maker[name].op_type
        reason = f"ends in a {kind}, so that its answers are no logits; leave --logits (logits=True) out"
        raise ModelFileError(path, f"output {graph.output[0].name!r} {reason}")


def _append_sigmoid(graph: Any) -> None:
    import onnx

    [output] = graph.output
    named = {entry.name for entry in (*graph.input, *graph.initializer, output)}
    taken = named.union(*((*node.input, *node.output) for node in graph.node))
    name = "probabilities"
    while name in taken:
        name += "_"
    graph.node.append(onnx.helper.make_node("Sigmoid", [output.name], [name]))
    output.name = name
