"""The dense network of a module: what the module computes from its dense features and its tables' pooled rows."""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn

from serving.errors import ConfigError
from serving.importers.pytorch.answers import Answers
from serving.importers.pytorch.inputs import Feature, FeatureKeys, Inputs
from serving.importers.pytorch.lines import at_line, line_of_error, line_of_trace
from serving.importers.pytorch.pooling import NO_KEY
from serving.importers.pytorch.runs import Source
from serving.importers.pytorch.tables import Tables

# What PyTorch raises if it cannot trace or convert a module.
_UNTRACEABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_OPERATOR = re.compile(r"(?<=No ONNX function found for <OpOverload\(op=')\w+\.(\w+)")
_SAMPLES = 5  # the exporter would fix a B of 0 or 1


class _DenseNetwork(nn.Module):  # type: ignore[misc]
    """A module whose inputs are the dense features, float32[B, F] unless F is 0, and float32[B, P, D] of each table.

    The masks of tables with sequences follow, float32[B, P].
    """

    def __init__(
        self,
        module: nn.Module,
        tables: Tables,
        inputs: Inputs,
        sources: Mapping[str, Sequence[Source]],
        masks: Sequence[str],
        answers: Answers,
    ) -> None:
        super().__init__()
        self.module = module
        self._tables, self._inputs, self._sources, self._masks = tables, inputs, sources, masks
        self._answers = answers
        keys = {(table, source.row_key) for table in masks for source in sources[table]}
        rows = {(table, key): tables.row(table, key).clone() for table, key in keys if key is not None}
        self._rows = {place: row for place, row in rows.items() if row.any()}  # of padding; the rest are zeros

    def forward(self, *tensors: Tensor) -> Any:
        first, samples = tensors[0], tensors[0].shape[0]
        rest = iter(tensors)
        dense = next(rest) if self._inputs.width else first.new_zeros(samples, 0)
        vectors = {table: [next(rest)] for table in self._sources}
        masks = {table: next(rest) > 0.5 for table in self._masks}
        keys = first.new_zeros(samples, dtype=torch.int64)  # nothing reads their values
        features = [FeatureKeys(_fillers(feature, keys), torch.ones_like(keys)) for feature in self._inputs.features]
        for table in self._masks:
            vectors[table] = self._with_padding(table, vectors[table][0], masks[table], features)
        arguments = self._inputs.arguments(dense, features)
        with self._tables.watched(vectors):
            answer = self.module(*arguments.args, **arguments.kwargs)
        return tuple(self._answers.tensors(answer, samples))

    def _with_padding(self, table: str, vectors: Tensor, mask: Tensor, features: list[FeatureKeys]) -> list[Tensor]:
        """Make the keys of the sequences in ``features``, and return the rows with those of the padding, by slot.

        An output that reads one slot does not depend on the others: the parts are not joined.
        """
        parts, begin = [], 0
        for source in self._sources[table]:
            end = begin + (1 if source.padding is None else source.padding.most)
            rows, is_key = vectors[:, begin:end], mask[:, begin:end]
            if source.padding is not None:
                key, [place] = source.padding.key, source.places
                if key is None or source.row_key is None:
                    of_feature = torch.where(is_key, 0, NO_KEY).reshape(-1)
                else:
                    of_feature = torch.where(is_key, source.padding.filler, key)
                    row = self._rows.get((table, source.row_key))
                    rows = rows if row is None else torch.where(is_key[..., None], rows, row)
                features[place] = FeatureKeys(of_feature, is_key.sum(1))
            parts.append(rows)
            begin = end
        return parts


def _fillers(feature: Feature, keys: Tensor) -> Tensor:
    """Return keys of a feature, in its form; ``keys`` are int64[B]."""
    if feature.padding is None or feature.padding.key is None:
        return keys
    return keys.new_full((keys.shape[0], feature.padding.most), feature.padding.filler)


def _line_of_operator(program: Any, operator: str) -> str:
    """Return the first line of the module that calls an operator, such as ``median``."""
    nodes = () if program is None else program.graph.nodes
    names = ((str(node.target).split("."), node) for node in nodes if node.op == "call_function")
    traces = (node.meta.get("stack_trace") or "" for parts, node in names if operator in parts)
    return next((line for trace in traces if (line := line_of_trace(trace))), "")


def export_dense(
    source: str,
    module: nn.Module,
    tables: Tables,
    inputs: Inputs,
    slots: Mapping[str, int],
    sources: Mapping[str, Sequence[Source]],
    dense_name: str,
    mask_names: Mapping[str, str],
    answers: Answers,
) -> tuple[Any, dict[str, str]]:
    """Return the dense network as an ``onnx.ModelProto``, and the names of the masks that it reads, by table.

    Its inputs have the names of the tables.

    Args:
        source: the module in messages.
        module: the module, in eval mode.
        tables: its tables.
        inputs: its inputs.
        slots: P by table, in the order of the network's inputs.
        sources: the slots of requests by table.
        dense_name: the name of the input with the dense features, which comes first. There is none if F is 0.
        mask_names: of the mask of each table with sequences.
        answers: its answers, whose outputs are those of the model.

    Raises:
        ConfigError: PyTorch cannot export it, or its answer does not depend on one of its inputs.
    """
    shapes: dict[str, tuple[int, ...]] = {
        name: (_SAMPLES, count, tables.size(name)[1]) for name, count in slots.items()
    }
    if inputs.width:
        shapes = {dense_name: (_SAMPLES, inputs.width), **shapes}
    shapes |= {mask: shapes[table][:2] for table, mask in mask_names.items()}
    network = _DenseNetwork(module, tables, inputs, sources, list(mask_names), answers)
    samples = {0: torch.export.Dim("B")}
    program = None
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # the exporter's own libraries are deprecated
            redirect_stderr(io.StringIO()),  # PyTorch prints its graph before it raises an error
        ):
            program = torch.export.export(
                network,
                tuple(torch.zeros(shape) for shape in shapes.values()),
                dynamic_shapes=((samples,) * len(shapes),),
                strict=False,
            )
            exported = torch.onnx.export(program, dynamo=True, verbose=False)
    except _UNTRACEABLE as err:
        lines = str(err).splitlines() or [type(err).__name__]
        reason, line = _ANSI.sub("", lines[0]), line_of_error(err.__traceback__)
        if operator := _OPERATOR.search(str(err)):
            reason = f"ONNX has no operator for {operator[0]}; compute it before the module, or with other operators"
            line = line or _line_of_operator(program, operator[1])
        reason = f"PyTorch cannot export the dense network to ONNX: {reason}"
        raise ConfigError(source, "", f"{reason}{at_line(line)}") from err
    graph = exported.model.graph
    for value in (*graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        value.name = f"{value.name}/"  # a table's name has no slash, so no value has the name of an input
    masks = dict(mask_names)
    for name, value in zip(shapes, list(graph.inputs), strict=True):
        value.name = name
        if value.uses() or value.is_graph_output():
            continue
        if table := next((table for table, mask in masks.items() if mask == name), None):
            graph.inputs.remove(value)
            del masks[table]
        else:
            where = ", ".join(inputs.dense) if name == dense_name else name
            raise ConfigError(source, where, "has no effect on the answer; remove it from forward")
    return exported.model_proto, masks
