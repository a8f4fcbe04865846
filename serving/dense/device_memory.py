"""Estimates a dense network's memory on a device from its graph, before any memory is allocated."""

from math import prod

from kernels.cublas import WORKSPACE_BYTES
from serving.dense.network_workspace import class_sizes
from serving.model.records import Graph, Samples, Shape


def network_bytes(graph: Graph, max_samples: int, worker_buffers: int, use_graphs: bool) -> int:
    """Return about how many bytes the network's weights and workspaces take, without the lookup's own memory.

    Every tensor of the graph counts once per size class, as if no two tensors shared memory. Temporary values inside a
    layer and the allocator's overhead are not counted.
    """
    weights = sum(prod(spec.shape) for spec in (*graph.weights, *graph.statistics))
    return 4 * weights + worker_buffers * (WORKSPACE_BYTES + _tensor_bytes(graph, max_samples, use_graphs))


def _tensor_bytes(graph: Graph, max_samples: int, use_graphs: bool) -> int:
    sizes = class_sizes(max_samples) if use_graphs and not graph.mixes_samples else ()
    brought = {graph.dense_top, *(embedding.top for embedding in graph.embeddings)}
    per_sample = sum(_values(shape) for name, shape in graph.shapes.items() if name not in brought)
    # The first batch of a class runs once without a graph before the graph is captured.
    return 4 * (max_samples + sum(sizes)) * per_sample


def _values(shape: Shape) -> int:
    """Return how many values a tensor has per sample."""
    return prod(size.times if isinstance(size, Samples) else size for size in shape)
