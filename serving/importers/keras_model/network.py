"""The dense network of a Keras model: everything behind the embeddings, as Keras exports it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError
from serving.importers.keras_model.example import said
from serving.importers.keras_model.graph import KerasGraph, Lookup


def dense_name(graph: KerasGraph) -> str:
    """Return the name of the network's input with the numbers."""
    name = "dense_features"
    while name in graph.tables:
        name += "_"
    return name


def mask_name(graph: KerasGraph, table: str) -> str:
    """Return the name of the network's input that says which positions of a table have a key."""
    name = f"{table}_mask"
    while name in (*graph.tables, dense_name(graph)):
        name += "_"
    return name


class Network:
    """Makes the model whose inputs are the rows of each table, their masks and the numbers."""

    def __init__(self, keras: Any, graph: KerasGraph, padding_rows: Mapping[str, NDArray[np.float32]]) -> None:
        """Cut the model.

        Args:
            keras: the module.
            graph: the parts of the model.
            padding_rows: the row of key 0 of each table with sequences.
        """
        self._keras, self._graph, self._padding_rows = keras, graph, padding_rows
        self._inputs: dict[str, Any] = {}
        cuts, parts, masks = list[Any](), list[Any](), list[Any]()
        first = dict.fromkeys(graph.tables, 0)
        for lookup in graph.lookups:
            table = lookup.layer.name
            place = slice(first[table], first[table] + lookup.size)
            first[table] += lookup.size
            rows, mask = self._rows_of(lookup, place)
            known = {id(tensor) for tensor in cuts}
            for of_keys, is_key in graph.masks_of(lookup) if mask is not None else ():
                if id(of_keys) in known:  # of another table
                    continue
                cuts.append(of_keys)
                parts.append(mask if is_key else keras.ops.logical_not(mask))
                masks.append(None)
            cuts.append(lookup.vectors)
            parts.append(keras.ops.reshape(rows, (-1, *lookup.vectors.shape[1:])))
            masks.append(mask)
        if graph.cuts:
            numbers = self._input(dense_name(graph), sum(graph.widths))
            begin = 0
            for cut, width in zip(graph.cuts, graph.widths, strict=True):
                parts.append(keras.ops.reshape(numbers[:, begin : begin + width], (-1, *cut.shape[1:])))
                masks.append(None)
                begin += width
        behind = keras.Model([*cuts, *graph.cuts], graph.outputs, name="network")
        self._model = keras.Model(self._inputs, _with_masks(keras, behind, parts, masks))

    def _input(self, name: str, *sizes: int) -> Any:
        if name not in self._inputs:
            self._inputs[name] = self._keras.Input(sizes, dtype="float32", name=name)
        return self._inputs[name]

    def _rows_of(self, lookup: Lookup, place: slice) -> tuple[Any, Any]:
        """Return the rows of a lookup, and which of them have a key; None: all."""
        graph, table = self._graph, lookup.layer.name
        positions = sum(one.size for one in graph.of_table(table))
        rows = self._input(table, positions, int(lookup.vectors.shape[-1]))[:, place]
        if lookup.padding is None:
            return rows, None
        mask = self._input(mask_name(graph, table), positions)[:, place] > 0.5
        return self._keras.ops.where(mask[..., None], rows, self._padding_rows[table]), mask

    def export(self, folder: Path) -> Any:
        """Return the network as an ``onnx.ModelProto``.

        Args:
            folder: for files of the exporter.

        Raises:
            ConfigError: the exporter of Keras's backend does not know a layer or an operation.
        """
        import onnx

        example = {name: np.zeros((1, *one.shape[1:]), np.float32) for name, one in self._inputs.items()}
        self._model(example)  # before an export
        file = folder / "network.onnx"
        try:
            self._model.export(str(file), format="onnx", verbose=False)
        except Exception as err:  # of any exporter
            reason = f"Keras cannot export the layers behind the embeddings to ONNX: {said(err)[:500]}"
            raise ConfigError(self._graph.source, "", reason) from err
        exported = onnx.load(str(file))
        self._fill_constants(exported.graph)
        self._check_operators(exported)
        for entry, tensor in zip(exported.graph.output, self._graph.outputs, strict=True):
            for dim, size in zip(entry.type.tensor_type.shape.dim[1:], tensor.shape[1:], strict=False):
                dim.dim_value = size or 0  # exporters do not know the sizes behind some layers
        return exported

    def _fill_constants(self, graph: Any) -> None:
        """Give constants their values: tf2onnx makes inputs of TensorFlow's tensors that a layer has."""
        import onnx

        extra = [entry for entry in graph.input if entry.name not in self._inputs]
        if not extra:
            return
        import tensorflow as tf

        signature = {name: tf.TensorSpec((None, *one.shape[1:]), tf.float32) for name, one in self._inputs.items()}
        captured = tf.function(self._model).get_concrete_function(signature).captured_inputs
        values = [resource.numpy() for resource in captured if resource.dtype != tf.resource]
        if len(values) != len(extra):
            names = ", ".join(entry.name for entry in extra)
            raise ConfigError(self._graph.source, "", f"Keras exports constants of a layer as inputs: {names}")
        for entry, value in zip(extra, values, strict=True):
            graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), entry.name))
            graph.input.remove(entry)

    def _check_operators(self, exported: Any) -> None:
        """Write operators of TensorFlow that ONNX does not have in others, and refuse the rest."""
        import onnx

        graph, nodes = exported.graph, list[Any]()
        known = {entry.domain: entry.version for entry in exported.opset_import}
        for node in graph.node:
            if node.op_type in ("Log1p", "Expm1"):
                one, between = f"{node.name}/one", f"{node.name}/between"
                graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1), one))
                first, second = ("Add", "Log") if node.op_type == "Log1p" else ("Exp", "Sub")
                given = [[node.input[0], one], [between]] if first == "Add" else [[node.input[0]], [between, one]]
                nodes.append(onnx.helper.make_node(first, given[0], [between]))
                nodes.append(onnx.helper.make_node(second, given[1], node.output))
                continue
            if node.domain in known and not onnx.defs.has(node.op_type, known[node.domain], node.domain):
                reason = f"ONNX has no operation {node.op_type}, which a layer behind the embeddings needs: {node.name}"
                raise ConfigError(self._graph.source, "", f"{reason}; use other operations there")
            nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)


def _with_masks(keras: Any, model: Any, parts: list[Any], masks: list[Any]) -> Any:
    """Return a model's answer to tensors with masks. A layer that takes a list of tensors gets a list of masks."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return model(parts)

    def call(tensors: list[Any]) -> Any:
        rest = iter(tensors[len(parts) :])
        return model(tensors[: len(parts)], mask=[None if mask is None else next(rest) for mask in masks])

    # a symbolic call of a model drops masks, and this layer's call is never symbolic
    layer = keras.layers.Lambda(call, dtype="float32")
    layer.parts = list(model.layers)  # has the weights; an exporter would call a model once more, without masks
    return layer([*parts, *given])
