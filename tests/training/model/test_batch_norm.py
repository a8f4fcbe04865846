"""BatchNorm in training uses the batch's statistics, and exports the running statistics."""

import json

import numpy as np
import pytest
import torch

from serving.model.graph import parse_graph
from serving.opening import load_model
from training.model.ctr_model import CtrModel
from training.model.export import export_model
from training.synthetic.criteo_like import generate

FACTOR, EPS = 0.75, 1e-3


@pytest.fixture
def normalized(document):
    """Return the document with a BatchNorm of the concatenated features."""
    document["layers"].insert(
        6,
        {
            "name": "norm",
            "type": "BatchNorm",
            "bottom": "concat",
            "top": "norm",
            "bn_param": {"factor": FACTOR, "eps": EPS},
        },
    )
    document["layers"][7]["bottom"] = "norm"
    return document


def test_a_step_updates_mean_and_variance_as_pytorch_does(normalized):
    model = CtrModel(parse_graph(normalized, "graph.json"), seed=0)
    samples = generate(50, seed=1).samples
    features = slice(98, 111)  # the dense features are the last of the 18 + 80 + 13 columns
    theirs = torch.nn.BatchNorm1d(13, momentum=FACTOR, eps=EPS)
    theirs(torch.tensor(samples.dense))

    model.train_batch(samples, learning_rate=0.01)

    weights = model.dense_weights()
    np.testing.assert_allclose(weights["norm.mean"][features], theirs.running_mean.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights["norm.var"][features], theirs.running_var.numpy(), rtol=1e-5)
    assert (weights["norm.gamma"] != 1).any()
    assert (weights["norm.beta"] != 0).any()


def test_one_sample_does_not_change_the_statistics(normalized):
    model = CtrModel(parse_graph(normalized, "graph.json"), seed=0)

    model.train_batch(generate(1, seed=1).samples, learning_rate=0.01)

    assert (model.dense_weights()["norm.mean"] == 0).all()
    assert (model.dense_weights()["norm.var"] == 1).all()


def test_the_export_serves_with_the_running_statistics(normalized, tmp_path):
    model = CtrModel(parse_graph(normalized, "graph.json"), seed=0)
    samples = generate(200, seed=1).samples
    for _ in range(3):
        model.train_batch(samples, learning_rate=0.01)

    version = export_model(model, normalized, tmp_path, "two")

    entry = json.loads((version / "dense.model.ntp.json").read_text())["layers"][0]
    assert entry["mean"] == model.dense_weights()["norm.mean"].astype(float).tolist()
    assert "dense.model.ntp.json" in json.loads((version / "manifest.json").read_text())["files"]
    with load_model(version) as session:
        predictions = session.predict(samples.dense, samples.bags.keys, samples.bags.row_ptrs)
    logits = model.logits(samples).astype(float)
    np.testing.assert_allclose(predictions, 1 / (1 + np.exp(-logits)), atol=1e-5)
