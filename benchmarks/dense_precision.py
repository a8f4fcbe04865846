"""The error of a dense network's probabilities on a device, by the precision of its products.

    python -m benchmarks.dense_precision --device cuda:0

For each family of graphs: the difference from the same layers in float64, with random weights that keep the scale of
products, and random features and rows. On the runner TF32 is float32, so that only float16 differs there.
"""

import argparse
import math

import numpy as np

from benchmarks.families import FAMILIES
from kernels.device import open_device
from serving.dense.device_network import open_device_network
from serving.dense.network import run_graph
from serving.model.dense_file import weight_key
from serving.model.graph import parse_graph


def draw(graph, samples):
    """Draw weights, and a batch by tensor name."""
    rng = np.random.default_rng(11)
    shapes = {weight_key(s): s.shape for s in graph.weights}
    scales = {key: math.sqrt(shape[0] if len(shape) > 1 else 2 * shape[-1]) for key, shape in shapes.items()}
    weights = {key: (rng.standard_normal(shape) / scales[key]).astype(np.float32) for key, shape in shapes.items()}
    sizes = {graph.dense_top: (samples, graph.dense_dim)}
    sizes |= {e.top: (samples, e.slots, e.dim) for e in graph.embeddings}
    return weights, {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def in_double(graph, weights, batch):
    """Return the probabilities in float64."""
    doubles = [{name: array.astype(np.float64) for name, array in arrays.items()} for arrays in (weights, batch)]
    with np.errstate(all="ignore"):
        return run_graph(graph, *doubles)[graph.output]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="runner")
    parser.add_argument("--samples", type=int, default=256)
    options = parser.parse_args()
    device = open_device(options.device)
    print(f"{device.name}, {options.samples} samples\n{'graph':8} {'products':8} {'largest':>9} {'mean':>9}")
    for name, family in FAMILIES.items():
        graph = parse_graph({"layers": list(family.LAYERS)}, name)
        weights, batch = draw(graph, options.samples)
        exact = in_double(graph, weights, batch)
        for precision in ("fp32", "tf32", "fp16"):
            network, stream = open_device_network(graph, weights, device, precision), device.stream()
            dense, *rows = (device.xp.asarray(array) for array in batch.values())
            with device.using(stream):
                error = np.abs(device.to_host(network(dense, rows, stream)) - exact)
            print(f"{name:8} {precision:8} {error.max():9.1e} {error.mean():9.1e}")


if __name__ == "__main__":
    main()
