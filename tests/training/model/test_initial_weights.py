import math

import pytest

from serving.model.graph import parse_graph
from training.model.initial_weights import initial_statistics, initial_weights


def weights_of(document, seed=0):
    return initial_weights(parse_graph(document, "graph.json"), seed)


def test_weights_follow_hugectrs_defaults_and_biases_are_zero(document):
    document["layers"][7]["fc_param"]["num_output"] = 400
    weights = weights_of(document)

    fc1, u0 = weights["fc1.weight"].detach(), weights["cross.u0"].detach()
    std = math.sqrt(2 / (111 + 400))
    assert float(fc1.std()) == pytest.approx(std, rel=0.02)
    assert float(fc1.abs().max()) <= 2 * std / 0.8796256610342398 + 1e-6
    limit = math.sqrt(6 / (111 + 4))
    assert 0.95 * limit < float(u0.abs().max()) <= limit
    assert not any(weight.any() for key, weight in weights.items() if ".bias" in key)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("Zero", 0.0), ("Uniform", 1 / 127), ("XavierUniform", math.sqrt(6 / 127)), ("XavierNorm", 1.0), ("Default", 1.0)],
)
def test_a_named_initializer_is_used(document, name, limit):
    document["layers"][7]["fc_param"]["weight_init"] = name

    weight = weights_of(document)["fc1.weight"].detach()

    largest = float(weight.abs().max())
    assert largest <= limit
    assert largest > 0.2 * limit or limit == 0.0


def test_a_bias_initializer_is_used(document):
    document["layers"][7]["fc_param"]["bias_init"] = "Uniform"

    assert 0 < float(weights_of(document)["fc1.bias"].detach().abs().max()) <= 1 / 16


def test_the_same_seed_draws_the_same_weights_and_every_weight_learns(document):
    one, again, other = weights_of(document), weights_of(document), weights_of(document, seed=1)

    assert all((one[key] == again[key]).all() for key in one)
    assert (one["fc1.weight"] != other["fc1.weight"]).any()
    assert all(weight.requires_grad and weight.is_leaf for weight in one.values())


def test_a_normalization_starts_as_the_identity(document):
    norm = {"bottom": "concat", "type": "BatchNorm", "top": "norm", "bn_param": {"factor": 0.9, "eps": 1e-5}}
    document["layers"].insert(6, norm)
    graph = parse_graph(document, "graph.json")

    weights, statistics = initial_weights(graph, seed=0), initial_statistics(graph)

    assert (weights["norm.gamma"] == 1).all()
    assert (weights["norm.beta"] == 0).all()
    assert (statistics["norm.mean"] == 0).all()
    assert (statistics["norm.var"] == 1).all()
    assert statistics.keys() == {"norm.mean", "norm.var"}
    assert not any(array.requires_grad for array in statistics.values())


def test_a_gamma_initializer_is_used(document):
    norm = {"bottom": "concat", "type": "LayerNorm", "top": "norm", "ln_param": {"gamma_init": "Zero"}}
    document["layers"].insert(6, norm)

    assert not weights_of(document)["norm.gamma"].any()
