"""A graph of two labels: both are learned, and the export answers with both."""

import copy
import dataclasses
import json
import re

import numpy as np
import pytest
import torch

from serving.errors import ConfigError
from serving.model.graph import parse_graph
from serving.opening import load_model
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.export import export_model
from training.model.trainer import predict_logits, train
from training.optimizers.learning_rate import LearningRateSchedule
from training.synthetic.criteo_like import generate

F = torch.nn.functional

BUY = {"name": "buy", "type": "InnerProduct", "bottom": "relu1", "top": "buy", "fc_param": {"num_output": 1}}


@pytest.fixture
def two_tasks(document):
    """Return the document with a second label, which is the opposite of the first."""
    layers = document["layers"]
    layers[0]["label"] = {"top": ["label", "opposite"], "label_dim": [1, 1]}
    loss = {"type": "BinaryCrossEntropyLoss", "bottom": ["buy", "opposite"], "top": "loss2"}
    document["layers"] = [*layers[:-1], copy.deepcopy(BUY), layers[-1], loss]
    return document


@pytest.fixture
def samples():
    samples = generate(300, seed=1).samples
    return dataclasses.replace(samples, labels=np.concatenate([samples.labels, 1 - samples.labels], axis=1))


def opened(tmp_path, document):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    return open_document(str(path))


def test_both_labels_are_learned_and_served(two_tasks, samples, tmp_path):
    model = CtrModel(parse_graph(two_tasks, "graph.json"), seed=0)

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


def test_the_loss_is_the_weighted_sum_of_the_labels_losses(two_tasks, samples, tmp_path):
    two_tasks["layers"][9]["rate"] = 0.0
    two_tasks["layers"][-2]["target_weight"] = [0.25]
    two_tasks["layers"][-1]["target_weight"] = [3]
    document = opened(tmp_path, two_tasks)
    model = CtrModel(document.graph, seed=0, label_weights=document.label_weights)
    model.train_batch(samples, learning_rate=0.01)  # now the tables have rows
    logits, labels = torch.tensor(model.logits(samples)), torch.tensor(samples.labels)
    first, second = (F.binary_cross_entropy(torch.sigmoid(logits[:, i]), labels[:, i]) for i in (0, 1))

    loss = model.train_batch(samples, learning_rate=0.01)

    assert loss == pytest.approx(float(0.25 * first + 3 * second), rel=1e-5)


def test_a_label_of_weight_0_has_no_effect(two_tasks, samples, tmp_path):
    two_tasks["layers"][-1]["target_weight"] = [0.0]
    document = opened(tmp_path, two_tasks)
    model = CtrModel(document.graph, seed=0, label_weights=document.label_weights)
    before = model.dense_weights()

    model.train_batch(samples, learning_rate=0.01)

    after = model.dense_weights()
    assert (after["fc2.weight"] != before["fc2.weight"]).any()
    np.testing.assert_array_equal(after["buy.weight"], before["buy.weight"])


def test_auc_and_log_loss_are_reported_for_each_label(two_tasks, samples):
    model = CtrModel(parse_graph(two_tasks, "graph.json"), seed=0)
    options = {"epochs": 1, "batch_size": 100, "schedule": LearningRateSchedule(0.003), "seed": 0}

    (result,) = train(model, samples, samples[:200], **options)

    logits, labels = predict_logits(model, samples[:200]), samples.labels[:200]
    assert len(result.figures) == len(result.evaluation_loss) == 2
    for label in (0, 1):
        ranks = logits[labels[:, label] == 1, label][:, None] > logits[labels[:, label] == 0, label]
        assert result.figures[label]["auc"] == pytest.approx(ranks.mean(), abs=1e-4)
        entropy = F.binary_cross_entropy_with_logits(*map(torch.tensor, (logits[:, label], labels[:, label])))
        assert result.evaluation_loss[label] == pytest.approx(float(entropy), rel=1e-5)


def test_labels_are_reported_by_name_and_column(two_tasks, tmp_path):
    assert opened(tmp_path, two_tasks).label_columns == ("label", "opposite")

    two_tasks["layers"][0]["label"]["label_dim"] = [1, 2]
    two_tasks["layers"][-3]["fc_param"]["num_output"] = 2
    two_tasks["layers"][-1]["target_weight"] = [0.5, 2]
    document = opened(tmp_path, two_tasks)

    assert document.label_columns == ("label", "opposite[0]", "opposite[1]")
    assert document.label_weights == (1.0, 0.5, 2.0)


def test_samples_of_other_labels_than_the_graphs_are_refused(two_tasks, samples):
    one_label = dataclasses.replace(samples, labels=samples.labels[:, :1])
    model = CtrModel(parse_graph(two_tasks, "graph.json"), seed=0)
    options = {"epochs": 1, "batch_size": 100, "schedule": LearningRateSchedule(0.003), "seed": 0}

    with pytest.raises(ConfigError, match="label_dim: the graph reads 2 labels, but the data has 1"):
        next(train(model, one_label, samples, **options))


@pytest.mark.parametrize("weights", [[], 1.0, ["1"], [True], [1, 1], [-0.5], [1e39]])
def test_a_wrong_target_weight_is_refused_with_its_path(two_tasks, tmp_path, weights):
    two_tasks["layers"][-1]["target_weight"] = weights

    with pytest.raises(ConfigError, match=r"graph.json: layers\[13\].target_weight(\[0\])?: expected "):
        opened(tmp_path, two_tasks)


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
            "layers[12].type: training supports only BinaryCrossEntropyLoss or MeanSquaredErrorLoss",
            id="other-loss",
        ),
    ],
)
def test_losses_in_another_order_are_refused(two_tasks, tmp_path, edit, message):
    edit(two_tasks["layers"])

    with pytest.raises(ConfigError, match=re.escape(f"graph.json: {message}")):
        opened(tmp_path, two_tasks)
