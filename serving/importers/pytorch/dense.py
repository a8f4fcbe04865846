"""The dense network of a module: what the module computes from its dense features and its tables' pooled rows."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from serving.errors import ConfigError
from serving.importers.pytorch.inputs import FeatureKeys, Inputs
from serving.importers.pytorch.tables import Tables

# What PyTorch raises if it cannot trace or convert a module.
_UNTRACEABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
_SAMPLES = 5  # the exporter would fix a B of 0 or 1


class _DenseNetwork(nn.Module):  # type: ignore[misc]
    """A module whose inputs are the dense features, float32[B, F] unless F is 0, and float32[B, S, D] of each table."""

    def __init__(self, module: nn.Module, tables: Tables, inputs: Inputs, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._tables, self._inputs, self._names = tables, inputs, names

    def forward(self, *tensors: Tensor) -> Any:
        first, samples = tensors[0], tensors[0].shape[0]
        dense, vectors = (first, tensors[1:]) if self._inputs.width else (first.new_zeros(samples, 0), tensors)
        keys = first.new_zeros(samples, dtype=torch.int64)  # nothing reads their values
        features = [FeatureKeys(keys, torch.ones_like(keys)) for _ in self._inputs.features]
        arguments = self._inputs.arguments(dense, features)
        with self._tables.watched(dict(zip(self._names, vectors, strict=True))):
            return self.module(*arguments.args, **arguments.kwargs)


def export_dense(
    source: str, module: nn.Module, tables: Tables, inputs: Inputs, slots: Mapping[str, int], dense_name: str
) -> Any:
    """Return the dense network as an ``onnx.ModelProto`` whose inputs have the names of the tables.

    Args:
        source: the module in messages.
        module: the module, in eval mode.
        tables: its tables.
        inputs: its inputs.
        slots: S by table, in the order of the network's inputs.
        dense_name: the name of the input with the dense features, which comes first. There is none if F is 0.

    Raises:
        ConfigError: PyTorch cannot export it, or its answer does not depend on one of its inputs.
    """
    shapes: dict[str, tuple[int, ...]] = {
        name: (_SAMPLES, count, tables.size(name)[1]) for name, count in slots.items()
    }
    if inputs.width:
        shapes = {dense_name: (_SAMPLES, inputs.width), **shapes}
    network = _DenseNetwork(module, tables, inputs, list(slots))
    samples = {0: torch.export.Dim("B")}
    try:
        with warnings.catch_warnings(action="ignore"):  # the exporter's own libraries are deprecated
            program = torch.export.export(
                network,
                tuple(torch.zeros(shape) for shape in shapes.values()),
                dynamic_shapes=((samples,) * len(shapes),),
                strict=False,
            )
            exported = torch.onnx.export(program, dynamo=True, verbose=False)
    except _UNTRACEABLE as err:
        lines = str(err).splitlines() or [type(err).__name__]
        raise ConfigError(source, "", f"PyTorch cannot export the dense network to ONNX: {lines[0]}") from err
    graph = exported.model.graph
    for value in (*graph.initializers.values(), *(value for node in graph for value in node.outputs)):
        value.name = f"{value.name}/"  # a table's name has no slash, so no value has the name of an input
    for name, value in zip(shapes, graph.inputs, strict=True):
        value.name = name
        if not value.uses() and not value.is_graph_output():
            where = ", ".join(inputs.dense) if name == dense_name else name
            raise ConfigError(source, where, "has no effect on the answer; remove it from forward")
    return exported.model_proto
