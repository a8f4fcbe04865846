"""What a dense network takes of a device's memory, told from its graph before any is taken."""

from math import prod

from kernels.cublas import WORKSPACE_BYTES
from serving.dense.device_workspace import class_sizes
from serving.model.records import Graph, Samples, Shape


def network_bytes(graph: Graph, max_samples: int, worker_buffers: int, use_graphs: bool) -> int:
    """Return about how many bytes the network's weights and workspaces take, but for what the lookup brings.

    Every tensor of the graph is counted once per size class, as if a layer had no values in between and none of two
    tensors lay where the other had been; pieces of the device's allocator are not.

    Args:
        graph: the network.
        max_samples: of a request.
        worker_buffers: how many workspaces there may be.
        use_graphs: whether these capture CUDA graphs.
    """
    weights = sum(prod(spec.shape) for spec in (*graph.weights, *graph.statistics))
    return 4 * weights + worker_buffers * (WORKSPACE_BYTES + _tensor_bytes(graph, max_samples, use_graphs))


def _tensor_bytes(graph: Graph, max_samples: int, use_graphs: bool) -> int:
    sizes = class_sizes(max_samples) if use_graphs and not graph.mixes_samples else ()
    brought = {graph.dense_top, *(embedding.top for embedding in graph.embeddings)}
    per_sample = sum(_values(shape) for name, shape in graph.shapes.items() if name not in brought)
    # The first batch of a class runs by itself before it is captured.
    return 4 * (max_samples + sum(sizes)) * per_sample


def _values(shape: Shape) -> int:
    """How many values a tensor has for each sample."""
    return prod(size.times if isinstance(size, Samples) else size for size in shape)
