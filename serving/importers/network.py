"""A user's dense network is an ONNX file. Its inputs and outputs determine the model around it."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.dense.network import DenseNetwork, Floats
from serving.dense.onnx import OnnxNetwork
from serving.dense.onnx_file import input_names, refuse_unread_inputs, refuse_weights_elsewhere, serialized
from serving.errors import MissingExtraError, ModelFileError, RequestError
from serving.importers.outputs import ADVICE, ONE_ANSWER, Kind, Kinds, kinds_of, outputs_of_widths, strange_answers
from serving.model.records import Graph, Output
from serving.model.regular_file import MOST_ONNX_BYTES, check_regular, wrong_kind
from serving.model.sparse_rows import Vectors
from serving.sources.rows import TableRows

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
        outputs: in the order of the columns of its answer.
        model: the ``onnx.ModelProto``, including weights from files next to it.
    """

    source: str
    inputs: tuple[NetworkInput, ...]
    outputs: tuple[Output, ...]
    model: Any

    @property
    def label_dim(self) -> int:
        """L."""
        return sum(output.width for output in self.outputs)

    def content(self) -> bytes:
        """Return the model as the content of one file. Raise ModelFileError if it is larger than 2 GiB."""
        try:
            return serialized(self.model)
        except ValueError as err:
            raise ModelFileError(self.source, str(err)) from err


def read_network(path: Path, logits: bool = False, kinds: Mapping[str, Kind] | None = None) -> ImportedNetwork:
    """Read an ONNX file and the weight files that it names.

    Args:
        path: the file.
        logits: append a Sigmoid to each output that is a probability.
        kinds: see ``kinds_of``. An only output without a kind is called ``OUTPUT0``.

    Raises:
        MissingExtraError: onnx is not installed.
        ConfigError: the network has no such output, or the name of an output cannot be used.
        ModelFileError: it is not an ONNX file, its inputs or outputs are not those of a dense network, or no node reads
            one of its inputs.
    """
    model, source = _load(path), str(path)
    entries = {entry.name: entry for entry in model.graph.output}
    if not entries:
        raise ModelFileError(source, "expected an output, found none")
    if kinds is None and len(entries) == 1:
        return check_network(source, model, ONE_ANSWER, logits)
    kinds = kinds_of(source, list(entries), kinds)
    kept = [deepcopy(entries[name]) for name in kinds]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    return check_network(source, model, kinds, logits)


def check_network(source: str, model: Any, kinds: Kinds, logits: bool) -> ImportedNetwork:
    """Return an ``onnx.ModelProto`` as a dense network, whose outputs become one.

    Args:
        source: names the model in messages.
        model: the model.
        kinds: of its outputs, in order.
        logits: see ``read_network``.
    """
    graph = model.graph
    given = set(input_names(graph))
    inputs = tuple(
        NetworkInput(entry.name, _sizes(source, "input", entry, (1, 2))) for entry in graph.input if entry.name in given
    )
    refuse_unread_inputs(graph, source)
    sizes = [_sizes(source, "output", entry, (0, 1)) for entry in graph.output]
    outputs = outputs_of_widths(kinds, [math.prod(size) for size in sizes])
    if logits and "probability" not in kinds.values():
        raise ModelFileError(source, "none of its outputs is a probability; remove --logits (logits=True)")
    names = [entry.name for entry in graph.output]
    for at, output in enumerate(outputs) if logits else ():
        if output.kind == "probability":
            _refuse_probabilities(source, graph, names[at])
            names[at] = _append(graph, "Sigmoid", [names[at]], "probabilities")
    if len(outputs) > 1:
        names = [_as_columns(graph, name) if not size else name for name, size in zip(names, sizes, strict=True)]
        names = [_append(graph, "Concat", names, "answer", axis=1)]
        graph.output[0].CopyFrom(_described(names[0], graph.output[0], sum(output.width for output in outputs)))
        del graph.output[1:]
    graph.output[0].name = names[0]
    return ImportedNetwork(source, inputs, outputs, model)


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
    if fault := strange_answers(answer, network.outputs):
        raise ModelFileError(network.source, f"{fault}; {ADVICE}")


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


def _refuse_probabilities(source: str, graph: Any, output: str) -> None:
    """Raise ModelFileError if an output is already a probability: a second Sigmoid would go unnoticed."""
    maker = {name: node for node in graph.node for name in node.output}
    name = output
    while name in maker and maker[name].op_type in _REARRANGING:
        name = maker[name].input[0]
    if name in maker and maker[name].op_type in _SQUASHING:
        kind = maker[name].op_type
        reason = f"ends in a {kind}, so its answers are not logits; remove --logits (logits=True)"
        raise ModelFileError(source, f"output {output!r} {reason}")


def _append(graph: Any, operator: str, inputs: Sequence[str], wanted: str, **attributes: Any) -> str:
    """Append a node, and return the name of its output, which begins with ``wanted``."""
    import onnx

    name = _free_name(graph, wanted)
    graph.node.append(onnx.helper.make_node(operator, inputs, [name], **attributes))
    return name


def _as_columns(graph: Any, name: str) -> str:
    """Turn a tensor [B] into [B, 1], and return its name."""
    import onnx

    shape = _free_name(graph, "one_column")
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 1]), shape))
    return _append(graph, "Reshape", [name, shape], "column")


def _free_name(graph: Any, wanted: str) -> str:
    named = {entry.name for entry in (*graph.input, *graph.initializer, *graph.output)}
    taken = named.union(*((*node.input, *node.output) for node in graph.node))
    while wanted in taken:
        wanted += "_"
    return wanted


def _described(name: str, like: Any, columns: int) -> Any:
    """Return the description of an output [B, columns]; ``like`` describes another output."""
    import onnx

    first = like.type.tensor_type.shape.dim[0].dim_param or None
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [first, columns])
