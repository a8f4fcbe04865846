"""Keys that a layer omits have HugeCTR's documented defaults."""

import pytest

from serving.model.graph import parse_graph


def graph_with(document, layer):
    """The DCN graph with ``layer`` between fc1 and relu1."""
    place = next(index for index, entry in enumerate(document["layers"]) if entry.get("name") == "relu1")
    document["layers"].insert(place, {"name": "new", "bottom": "fc1", "top": "new", **layer})
    document["layers"][place + 1]["bottom"] = "new"
    return parse_graph(document, "graph.json")


@pytest.mark.parametrize(
    ("layer", "params"),
    [
        ({"type": "BatchNorm", "bn_param": {}}, {"factor": 1.0, "eps": 1e-5}),
        ({"type": "LayerNorm", "ln_param": {}}, {"eps": 1e-5}),
        ({"type": "MLP", "mlp_param": {"num_outputs": [3, 2]}}, {"activations": ["Relu"] * 2, "biases": [True] * 2}),
        ({"type": "Dropout"}, {"rate": 0.5}),
    ],
    ids=lambda value: value.get("type", ""),
)
def test_omitted_keys_have_hugectrs_default(document, layer, params):
    graph = graph_with(document, layer)

    [new] = [one for one in graph.layers if one.name == "new"]
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in new.params.items()}
    assert {name: found[name] for name in params} == params


@pytest.mark.parametrize(
    ("layer", "mixes"),
    [
        ({"type": "ReLU"}, False),
        ({"type": "PReLU_Dice", "prelu_dice_param": {"alpha": 0.1, "eps": 1e-5}}, True),
    ],
    ids=["ReLU", "PReLU_Dice"],
)
def test_a_graph_knows_whether_it_mixes_samples(document, layer, mixes):
    assert graph_with(document, layer).mixes_samples is mixes
