"""A user's dense network is an ONNX file. Its inputs and output determine the model around it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.dense.network import DenseNetwork, Floats
from serving.dense.onnx import OnnxNetwork
from serving.dense.onnx_file import input_names, refuse_unread_inputs, refuse_weights_elsewhere, serialized
from serving.errors import MissingExtraError, ModelFileError, RequestError
from serving.importers.rows import TableRows
from serving.model.records import Graph
from serving.model.regular_file import MOST_ONNX_BYTES, check_regular, wrong_kind
from serving.model.sparse_rows import Vectors

_SAMPLES = 4  # of a trial
_BEGINNING = b"\x08"  # of an ONNX file: the field of its version
_SQUASHING = ("Sigmoid", "HardSigmoid", "Softmax")
# These may follow the last layer and keep its values. Their first input is the tensor.
_REARRANGING = ("Identity", "Cast", "Concat", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """One input: its name, and the sizes after B, which are (F,), (S * D,) or (S, D)."""

    name: str
    sizes: tuple[int, ...]

    @property
    def shape(self) -> str:
        """The shape as messages show it: ``[B, 2, 16]``."""
        return f"[B, {', '.join(map(str, self.sizes))}]"


@dataclass(frozen=True, slots=True)
class ImportedNetwork:
    """A dense network as an ONNX model.

    Attributes:
        source: its file or its module, for messages.
        inputs: all float32, in the model's order.
        label_dim: L.
        model: the ``onnx.ModelProto``, including weights from files next to it.
    """

    source: str
    inputs: tuple[NetworkInput, ...]
    label_dim: int
    model: Any

    def content(self) -> bytes:
        """Return the model as the content of one file. Raise ModelFileError if it is larger than 2 GiB."""
        try:
            return serialized(self.model)
        except ValueError as err:
            raise ModelFileError(self.source, str(err)) from err


def read_network(path: Path, logits: bool = False) -> ImportedNetwork:
    """Read an ONNX file and the weight files that it names. With ``logits``, append a Sigmoid.

    Raises:
        MissingExtraError: onnx is not installed.
        ModelFileError: it is not an ONNX file, its inputs or output are not those of a dense network, or no node reads
            one of its inputs.
    """
    return check_network(str(path), _load(path), logits)


def check_network(source: str, model: Any, logits: bool) -> ImportedNetwork:
    """Return an ``onnx.ModelProto`` as a dense network. See ``read_network``. ``source`` names it in messages."""
    graph = model.graph
    if len(graph.output) != 1:
        names = ", ".join(repr(output.name) for output in graph.output)
        found = f"{len(graph.output)}: {names}; concatenate them into one, [B, L]" if names else "none"
        raise ModelFileError(source, f"expected one output, the probabilities, found {found}")
    given = set(input_names(graph))
    inputs = tuple(
        NetworkInput(entry.name, _sizes(source, "input", entry, (1, 2))) for entry in graph.input if entry.name in given
    )
    refuse_unread_inputs(graph, source)
    label_dim = _sizes(source, "output", graph.output[0], (0, 1))
    if logits:
        _refuse_probabilities(source, graph)
        _append_sigmoid(graph)
    return ImportedNetwork(source, inputs, label_dim[0] if label_dim else 1, model)


def try_network(graph: Graph, network: ImportedNetwork, tables: Sequence[TableRows]) -> None:
    """Run a network on the first rows of its tables, in graph order.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelFileError: the network cannot be opened or run, or its answers are not probabilities.
    """
    opened = OnnxNetwork(graph, network.content(), source=network.source)
    first_rows = [
        rows.read(0, min(rows.rows, rows_tried(embedding.slots)))
        for rows, embedding in zip(tables, graph.embeddings, strict=True)
    ]
    answer = answer_to(graph, opened, first_rows, network.source)
    if (answer < 0).any() or (answer > 1).any():
        shown = [float(f"{value:.6g}") for value in answer.reshape(-1)[:3]]
        advice = "if they are logits, use --logits (logits=True), which adds a Sigmoid"
        raise ModelFileError(network.source, f"answers such as {shown} are not probabilities; {advice}")


def rows_tried(slots: int) -> int:
    """Return how many rows of a table a trial takes. A smaller table's rows are repeated."""
    return _SAMPLES * slots


def answer_to(graph: Graph, network: DenseNetwork, first_rows: Sequence[Vectors], source: str) -> Floats:
    """Return float32[B, L] for samples with one key per slot and zeros as dense features.

    Raises:
        ModelFileError: the network cannot run, or an answer is not finite.
    """
    embeddings = [
        # rows that are not finite are reported when they are copied, and say nothing about the network
        np.resize(np.nan_to_num(rows, posinf=0, neginf=0), (_SAMPLES, embedding.slots, embedding.dim))
        for rows, embedding in zip(first_rows, graph.embeddings, strict=True)
    ]
    try:
        dense = np.zeros((_SAMPLES, graph.dense_width), np.float32)
        dense[:, graph.dense_dim :] = 1.0  # masks of full sequences
        answer = network(dense, embeddings)
    except RequestError as err:
        raise ModelFileError(source, f"tried on {_SAMPLES} samples: {err}") from err
    if not np.isfinite(answer).all():
        raise ModelFileError(source, f"tried on {_SAMPLES} samples: its answer is not finite")
    return answer


def _load(path: Path) -> Any:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as err:
        raise MissingExtraError("onnx", "onnx", "importing a model") from err
    try:
        check_regular(path, MOST_ONNX_BYTES)
        model = onnx.load(path, load_external_data=False)
        if not model.ByteSize():
            raise ModelFileError(path, wrong_kind(path, "an ONNX network"))
        refuse_weights_elsewhere(path, model)
        return onnx.load(path)
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror or err}") from err
    except DecodeError as err:
        raise ModelFileError(path, wrong_kind(path, "an ONNX network", (_BEGINNING,))) from err
    except (ValueError, onnx.checker.ValidationError) as err:  # weight files are missing
        raise ModelFileError(path, f"not an ONNX network: {err}") from err


def _sizes(source: str, kind: str, entry: Any, ranks: tuple[int, int]) -> tuple[int, ...]:
    """Return the sizes after B of a float32 input or output, which must have one of ``ranks`` such sizes."""
    import onnx

    if not isinstance(entry.name, str):  # protobuf returns bytes if the name is not UTF-8
        raise ModelFileError(source, f"{kind} {entry.name!r}: expected a name in UTF-8")
    tensor = entry.type.tensor_type
    dtypes = {number: name.lower() for name, number in onnx.TensorProto.DataType.items()}
    dtype = dtypes.get(tensor.elem_type, f"of type {tensor.elem_type}")
    shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    came = f"{kind} {entry.name!r} is {dtype} [{', '.join(map(str, shape))}]"
    if tensor.elem_type != onnx.TensorProto.FLOAT or len(shape) - 1 not in ranks:
        expected = "[B, F], [B, S, D] or [B, S * D]" if kind == "input" else "[B, L]"
        raise ModelFileError(source, f"{came}, expected float {expected}")
    sizes = tuple(size for size in shape[1:] if isinstance(size, int) and size > 0)
    if isinstance(shape[0], int) or len(sizes) < len(shape) - 1:
        advice = "export it with dynamic_shapes that free only the first dimension"
        raise ModelFileError(source, f"{came}, expected a free number of samples and fixed sizes after it: {advice}")
    return sizes


def _refuse_probabilities(source: str, graph: Any) -> None:
    """Raise ModelFileError if the output is already a probability: a second Sigmoid would go unnoticed."""
    maker = {name: node for node in graph.node for name in node.output}
    name = graph.output[0].name
    while name in maker and maker[name].op_type in _REARRANGING:
        name = maker[name].input[0]
    if name in maker and maker[name].op_type in _SQUASHING:
        kind = maker[name].op_type
        reason = f"ends in a {kind}, so its answers are not logits; remove --logits (logits=True)"
        raise ModelFileError(source, f"output {graph.output[0].name!r} {reason}")


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
