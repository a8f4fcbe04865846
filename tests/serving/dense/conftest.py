import json
import math
from pathlib import Path

import numpy as np
import pytest

from serving.model.dense_file import weight_key
from serving.model.graph import parse_graph


@pytest.fixture(scope="session")
def device(device):
    """Every device that runs layers: the runner uses NumPy's functions, which follow the array API from 2.0 on."""
    if device.name == "runner" and not hasattr(np, "permute_dims"):
        pytest.skip(f"layers run on the runner with NumPy 2, this is {np.__version__}")
    return device


@pytest.fixture(scope="session")
def document():
    """The training graph of a small DCN."""
    return json.loads((Path(__file__).parents[1] / "model" / "dcn_small.json").read_text())


@pytest.fixture(scope="session")
def graph(document):
    return parse_graph(document, "graph.json")


@pytest.fixture(scope="session")
def draw_weights():
    """Draw weights of a graph that are small enough to keep probabilities away from 0 and 1."""

    def draw(graph, seed=11):
        rng = np.random.default_rng(seed)
        return {weight_key(s): (0.3 * rng.standard_normal(s.shape)).astype(np.float32) for s in graph.weights}

    return draw


@pytest.fixture(scope="session")
def weights(graph, draw_weights):
    return draw_weights(graph)


@pytest.fixture(scope="session")
def draw_inputs():
    """Draw the arguments of a network: dense float32[B, F] and a list of float32[B, S, D]."""

    def draw(graph, samples, seed=5):
        rng = np.random.default_rng(seed)
        dense = rng.standard_normal((samples, graph.dense_dim)).astype(np.float32)
        shapes = [(samples, e.slots, e.dim) for e in graph.embeddings]
        return dense, [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    return draw


@pytest.fixture(scope="session")
def scaled_weights():
    """Draw weights whose products keep their size at any width, and statistics of about 1."""

    def draw(graph, seed=11):
        rng = np.random.default_rng(seed)
        weights = {
            weight_key(s): rng.standard_normal(s.shape) / math.sqrt(s.shape[0] if len(s.shape) > 1 else 2 * s.shape[-1])
            for s in graph.weights
        }
        weights |= {weight_key(s): rng.uniform(0.5, 1.5, s.shape) for s in graph.statistics}
        return {key: array.astype(np.float32) for key, array in weights.items()}

    return draw
