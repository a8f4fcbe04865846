"""MultiCross layers whose JSON does not say how wide they project: the size of the dense file tells.

HugeCTR's exporter leaves ``projection_dim`` out of the graph up to v24.06, so that a cross network of version 2, of
matrices, looks like one of version 1, of vectors.
"""

import dataclasses
import math
from pathlib import Path

from serving.errors import ModelFileError
from serving.model.layer_types import cross_weights
from serving.model.records import Graph, Layer, WeightSpec


def with_projection(graph: Graph, dense_file: str | Path) -> Graph:
    """Return the graph that fits the dense file: ``graph``, or one whose MultiCross is of version 2.

    A file that fits neither is left to ``read_dense`` to complain of.

    Args:
        graph: read from the JSON; a MultiCross without ``projection_dim`` was taken for version 1.
        dense_file: its dense model file, of which only the size is looked at.

    Raises:
        ModelFileError: the file is too large for version 1, and several layers could be of version 2.
    """
    silent = [layer for layer in graph.layers if _is_silent(layer)]
    path = Path(dense_file)
    if not silent or not path.is_file():
        return graph
    more_bytes = path.stat().st_size - 4 * sum(math.prod(spec.shape) for spec in graph.weights)
    if more_bytes <= 0:
        return graph
    if len(silent) > 1:
        places = ", ".join(f"{layer.path} ({layer.name})" for layer in silent)
        reason = f"{more_bytes:,} bytes too many for a graph without projection_dim; add it to mc_param of {places}"
        raise ModelFileError(path, reason)
    return _widened(graph, silent[0], more_bytes)


def _is_silent(layer: Layer) -> bool:
    return layer.type == "MultiCross" and layer.params["projection_dim"] is None


def _widened(graph: Graph, layer: Layer, more_bytes: int) -> Graph:
    """Return ``graph`` with the ``projection_dim`` of ``layer`` that needs so many bytes more, if there is one."""
    depth = layer.params["num_layers"]
    columns = next(spec.shape[0] for spec in graph.weights if spec.layer == layer.name)
    # each level has two matrices, 2 * columns * rank floats, in place of a vector of columns floats
    ratio, rest = divmod(more_bytes, 4 * depth * columns)
    if rest or ratio % 2 == 0:
        return graph
    rank = (ratio + 1) // 2
    wide = dataclasses.replace(layer, params={**layer.params, "projection_dim": rank})
    before = [spec.layer for spec in graph.weights].index(layer.name)
    own = [WeightSpec(layer.name, name, shape) for name, shape in cross_weights(columns, depth, rank)]
    weights = [*graph.weights[:before], *own, *graph.weights[before + 2 * depth :]]
    layers = tuple(wide if one is layer else one for one in graph.layers)
    return dataclasses.replace(graph, layers=layers, weights=tuple(weights))
