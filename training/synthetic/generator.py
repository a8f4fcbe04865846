"""Generate samples for the inputs of a graph."""

from serving.errors import ConfigError
from serving.model.graph import Graph
from training.data.criteo import DENSE_FEATURES, SLOTS
from training.synthetic.criteo_like import SyntheticSamples, generate
from training.synthetic.shoppers import generate_visits


def generate_for(graph: Graph, rows: int, seed: int) -> SyntheticSamples:
    """Draw ``rows`` samples for ``graph``. The same seed gives the same samples and truth.

    Raises:
        ConfigError: its inputs are not those of a graph that comes with the package, or it is a regression.
    """
    if "score" in graph.label_kinds:
        reason = "generated labels are 0 and 1, from which no regression is learned; train on your own data (--data)"
        raise ConfigError(graph.source, "layers", reason)
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
        f"cannot generate samples for {graph.label_dim} labels, {graph.dense_dim} dense features and slots {inputs}; "
        "train on your own data (--data), or use the inputs of a built-in model",
    )
