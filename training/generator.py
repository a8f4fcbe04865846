"""Generated samples for a graph, chosen by the inputs it reads."""

from serving.errors import ConfigError
from serving.model.graph import Graph
from training.criteo import DENSE_FEATURES, SLOTS
from training.shoppers import generate_visits
from training.synthetic import SyntheticSamples, generate


def generate_for(graph: Graph, rows: int, seed: int) -> SyntheticSamples:
    """Draw ``rows`` samples (at least 1) that ``graph`` can read; the same seed gives the same samples and truth.

    Raises:
        ConfigError: its inputs are neither Criteo's nor those of another graph that comes with the package.
    """
    visits = generate_visits(graph, rows, seed)
    if visits is not None:
        return visits
    slots = sum(entry.slots for entry in graph.sparse)
    if (slots, graph.dense_dim, graph.label_dim) == (SLOTS, DENSE_FEATURES, 1):
        return generate(rows, seed)
    inputs = ", ".join(f"{entry.top} {entry.slots}" for entry in graph.sparse)
    raise ConfigError(
        graph.source,
        "layers[0]",
        f"nothing is generated for {graph.label_dim} labels, {graph.dense_dim} dense features and the slots {inputs}; "
        "train on data of your own (--data), or take the inputs of a model that comes with Hotrow",
    )
