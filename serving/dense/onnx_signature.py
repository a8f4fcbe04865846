"""Matches an ONNX model's inputs and output with the tensors of a graph, by name."""

from collections.abc import Sequence
from typing import Any, Final

from serving.errors import ModelFileError, did_you_mean
from serving.model.records import Graph

_FLOAT: Final = "tensor(float)"
_TYPE_NAMES = {"float": "float32", "double": "float64"}  # other types have the same name in NumPy


def flat_inputs(session: Any, graph: Graph, source: str) -> dict[str, bool]:
    """Check that a model's inputs are inputs of ``graph`` and that its one output holds probabilities.

    A model may leave a rank or a dimension open. Any other mismatch is a ModelFileError.

    Args:
        session: an ``onnxruntime.InferenceSession``.
        graph: the structure, or only the inputs.
        source: the model's file, for messages.

    Returns:
        the inputs by name, in the model's order; True for an input that takes [B, S * D] instead of [B, S, D].
    """
    outputs = session.get_outputs()
    if len(outputs) != 1:
        names = ", ".join(repr(output.name) for output in outputs)
        raise ModelFileError(source, f"expected one output, the probabilities, got {len(outputs)}: {names}")
    label_dim = graph.label_dim
    _check(outputs[0], "output", [(label_dim,), *([()] if label_dim == 1 else [])], source)
    return {entry.name: _is_flat(entry, graph, source) for entry in session.get_inputs()}


def unread_tables(inputs: Sequence[str], graph: Graph) -> list[str]:
    """Return the tables whose vectors no input of a model takes."""
    return [embedding.table for embedding in graph.embeddings if embedding.top not in inputs]


def _is_flat(entry: Any, graph: Graph, source: str) -> bool:
    if entry.name == graph.dense_top:
        _check(entry, "input", [(graph.dense_dim,)], source)
        return False
    masks = dict(graph.masks)
    if entry.name in masks:
        _check(entry, "input", [(masks[entry.name],)], source)
        return False
    for embedding in graph.embeddings:
        if entry.name == embedding.top:
            flat = (embedding.slots * embedding.dim,)
            _check(entry, "input", [(embedding.slots, embedding.dim), flat], source)
            return len(entry.shape) == 2
    names = [graph.dense_top, *masks, *(embedding.top for embedding in graph.embeddings)]
    hint = did_you_mean(entry.name, names)
    what = (
        "of the dense top, of a mask or of an embedding's top" if masks else "of the dense top or of an embedding's top"
    )
    reason = f"input {entry.name!r}: expected the name {what}"
    raise ModelFileError(source, f"{reason} ({', '.join(names)}){hint}")


def _check(entry: Any, kind: str, allowed: Sequence[tuple[int, ...]], source: str) -> None:
    """Check one input or output; ``allowed`` lists the sizes that may follow B in its shape."""
    expected = " or ".join(_show(("B", *sizes)) for sizes in allowed)
    type_name = entry.type.removeprefix("tensor(").removesuffix(")")
    type_name = _TYPE_NAMES.get(type_name, type_name)
    if entry.type != _FLOAT:
        raise ModelFileError(source, f"{kind} {entry.name!r}: expected float32 {expected}, got {type_name}")
    shape = entry.shape
    if not shape:  # of unknown rank
        return
    came = f"{kind} {entry.name!r}: expected float32 {expected}, got {type_name} {_show(shape)}"
    if not any(_fits(shape[1:], sizes) for sizes in allowed):
        raise ModelFileError(source, came)
    if isinstance(shape[0], int):
        how = f"torch.onnx.export(..., dynamic_axes={{{entry.name!r}: {{0: 'B'}}, ...}})"
        raise ModelFileError(source, f"{came}: export it with a free number of samples, as by {how}")


def _fits(shape: Sequence[Any], sizes: tuple[int, ...]) -> bool:
    """Whether each dimension has the expected size, a name, or None."""
    return len(shape) == len(sizes) and all(
        not isinstance(came, int) or came == expected for came, expected in zip(shape, sizes, strict=True)
    )


def _show(shape: Sequence[Any]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
