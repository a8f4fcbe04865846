"""A graph of two labels: both are learnt, and the export answers with both."""

import dataclasses
import json
import re

import numpy as np
import pytest

from serving.errors import ConfigError
from serving.model.graph import parse_graph
from serving.session import load_model
from training.ctr_model import CtrModel
from training.document import open_document
from training.export import export_model
from training.synthetic import generate

BUY = {"name": "buy", "type": "InnerProduct", "bottom": "relu1", "top": "buy", "fc_param": {"num_output": 1}}


@pytest.fixture
def two_tasks(document):
    """Return the document with a second label, which is the first one turned around."""
    layers = document["layers"]
    layers[0]["label"] = {"top": ["label", "opposite"], "label_dim": [1, 1]}
    loss = {"type": "BinaryCrossEntropyLoss", "bottom": ["buy", "opposite"], "top": "loss2"}
    document["layers"] = [*layers[:-1], BUY, layers[-1], loss]
    return document


def test_both_labels_are_learnt_and_served(two_tasks, tmp_path):
    model = CtrModel(parse_graph(two_tasks, "graph.json"), seed=0)
    samples = generate(300, seed=1).samples
    samples = dataclasses.replace(samples, labels=np.concatenate([samples.labels, 1 - samples.labels], axis=1))

    losses = [model.train_batch(samples, learning_rate=0.01) for _ in range(30)]
    version = export_model(model, two_tasks, tmp_path, "two")

    assert losses[-1] < 0.5 * losses[0]
    with load_model(version) as session:
        predictions = session.predict(samples.dense, samples.bags.keys, samples.bags.row_ptrs)
    assert predictions.shape == (300, 2)
    np.testing.assert_allclose(predictions, 1 / (1 + np.exp(-model.logits(samples).astype(float))), atol=1e-5)
    assert np.corrcoef(predictions.T)[0, 1] < -0.9
    types = [layer["type"] for layer in json.loads((version / "graph.json").read_text())["layers"]]
    assert types[-2:] == ["Sigmoid", "Sigmoid"]


def exchange(layers):
    layers[-1], layers[-2] = layers[-2], layers[-1]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(
            exchange, "layers[12].bottom: expected the losses in the order of the labels, so 'label' here", id="order"
        ),
        pytest.param(
            lambda layers: layers[-2].update(type="CrossEntropyLoss"),
            "layers[12].type: training has BinaryCrossEntropyLoss only",
            id="other-loss",
        ),
    ],
)
def test_losses_that_training_would_mix_up_are_refused(two_tasks, tmp_path, edit, message):
    edit(two_tasks["layers"])
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(two_tasks))

    with pytest.raises(ConfigError, match=re.escape(f"graph.json: {message}")):
        open_document(str(path))
