"""The dense network on a device: the same layer functions, run on arrays of a GPU or of the runner."""

from collections.abc import Sequence

import numpy as np

from kernels.device import Array, Device, Stream
from serving.dense.calibration import Quantization
from serving.dense.device_arithmetic import FIRST_INFINITE_HALF, DeviceArithmetic, Precision, check_precision
from serving.dense.network import input_tensors, run_graph
from serving.dense.network_workspace import Lookup, NetworkWorkspace
from serving.errors import ConfigError
from serving.model.dense_file import Weights, check_weights
from serving.model.records import Graph

_TRIAL_SAMPLES = 2


class DeviceNetwork:
    """A graph with weights, ready to run on one device. Several threads may call it at the same time.

    Attributes:
        device: the device that runs it.
        graph: its structure.
        precision: the precision of products; see ``open_device_network``.
        use_graphs: whether workspaces capture CUDA graphs.
        engine: the device's kind, ``"cuda"`` or ``"runner"``.
        quantization: None; see ``DenseNetwork``.
    """

    quantization: Quantization | None = None

    def __init__(
        self, device: Device, graph: Graph, weights: Weights, precision: Precision = "fp32", use_graphs: bool = True
    ) -> None:
        """Upload the weights and run the network once; see ``open_device_network``."""
        check_precision(precision)
        check_weights(graph, weights)
        self.device = device
        self.graph = graph
        self.precision: Precision = precision
        self.use_graphs = use_graphs
        self.engine = device.name.partition(":")[0]
        stream = device.stream()
        self._weights = {key: self._uploaded(array, stream) for key, array in weights.items()}
        self._arithmetic = DeviceArithmetic(device, precision, list(self._weights.values()))
        self._try(stream)
        self._check_rounded(weights)

    def __call__(self, dense: Array, embeddings: Sequence[Array], stream: Stream) -> Array:
        """Queue the network without waiting. Call it once normally before ``Device.capture`` calls it.

        Args:
            dense: float32[B, F]; B and F may be 0. The masks of sequences follow, in the order of ``Graph.masks``.
            embeddings: float32[B, S, D] per embedding layer, in graph order.
            stream: the stream to queue on. The arrays are on the device and complete on this stream.

        Returns:
            float32[B, L] on the device, C-contiguous.

        Raises:
            ValueError: an argument has another shape or dtype than the graph says, or B is too small for the graph.
        """
        tensors = input_tensors(self.graph, dense, embeddings)
        with self.device.using(stream):
            if not dense.shape[0]:
                return self.device.empty((0, self.graph.label_dim), np.float32)
            made = run_graph(self.graph, self._weights, tensors, arithmetic=self._arithmetic.on(stream))
            output = made[self.graph.output]
            return self.device.xp.ascontiguousarray(output, dtype=np.float32)

    def workspace(self, lookup: Lookup, max_samples: int, in_one: bool = False) -> NetworkWorkspace:
        """Return a workspace that runs the network after ``lookup``, for one request at a time."""
        return NetworkWorkspace(self, lookup, max_samples, in_one)

    def _uploaded(self, weight: np.ndarray[tuple[int, ...], np.dtype[np.float32]], stream: Stream) -> Array:
        array = self.device.empty(weight.shape, np.float32)
        self.device.upload(np.ascontiguousarray(weight), array, stream)
        return array

    def _try(self, stream: Stream) -> None:
        """Run once on zeros, which uploads constants, rounds weights and compiles kernels before the first request."""
        samples = max(self.graph.least_samples, _TRIAL_SAMPLES)
        zeros = self.device.zeros
        dense = zeros((samples, self.graph.dense_width), np.float32)
        rows = [zeros((samples, e.slots, e.dim), np.float32) for e in self.graph.embeddings]  # kept until they are read
        self(dense, rows, stream)
        stream.synchronize()

    def _check_rounded(self, weights: Weights) -> None:
        rounded = {id(weight) for weight in self._arithmetic.rounded_weights()}
        for name, array in self._weights.items():
            if id(array) in rounded and not (largest := np.abs(weights[name]).max()) < FIRST_INFINITE_HALF:
                reason = f"{name}: a weight of magnitude {largest:.6g} is too large for half precision (fp16)"
                raise ConfigError(self.graph.source, "", reason)


def open_device_network(
    graph: Graph, weights: Weights, device: Device, precision: Precision = "fp32", use_graphs: bool = True
) -> DeviceNetwork:
    """Return the network that runs ``graph`` on a device.

    Args:
        graph: the structure.
        weights: its weights.
        device: the device that runs it.
        precision: of matrix products; their sums and everything else are float32. ``"fp32"`` does not round factors.
            ``"tf32"`` rounds factors to a mantissa of 10 bits on a GPU. ``"fp16"`` rounds factors to float16, also 10
            bits. A feature, row or layer output of 65520 or more then makes the sample's answer NaN, and the session
            refuses the request.
        use_graphs: capture CUDA graphs, one per workspace and size class of batches.

    Raises:
        ConfigError: a weight is too large for fp16.
        DeviceUnavailableError: cuBLAS is missing.
        ValueError: the weights are not the graph's, the graph has no layers (the network is an ONNX file), or there is
            no such precision.
    """
    if not graph.layers:
        raise ValueError(f"{graph.source}: has no layers: a network that is an ONNX file runs on the CPU")
    return DeviceNetwork(device, graph, weights, precision, use_graphs)
