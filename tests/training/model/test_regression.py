"""Labels that are any number: the squared error, compared with PyTorch and with figures that scikit-learn publishes."""

import copy
import math

import numpy as np
import pytest
import torch

from serving.errors import ConfigError
from serving.model.graph import parse_graph
from serving.model.records import Output
from serving.opening import load_model
from training.model.ctr_model import CtrModel
from training.model.document import parse_document
from training.model.export import export_model
from training.model.loss_layers import first_labels, with_label_statistics, with_losses
from training.model.losses import LogLoss, SquaredError, losses_of
from training.model.metrics import mean_absolute_error, mean_squared_error, r_squared, variance
from training.samples import Bags, Samples
from training.synthetic.generator import generate_for
from training.tables.rules import SgdRule

DIM, MEAN, STD, RATE = 3, 3.25, 1.5, 0.05


def layer(kind, bottom, top, **members):
    return {"name": top, "type": kind, "bottom": bottom, "top": top, **members}


def graph_of(*losses, label=None):
    data = {
        "type": "Data",
        "label": label or {"top": "rating", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 2},
        "sparse": [{"top": "user", "slot_num": 1, "max_feature_num_per_sample": 1}],
    }
    hparam = {"embedding_vec_size": DIM, "combiner": "sum"}
    embedding = layer("DistributedSlotSparseEmbeddingHash", "user", "rows", sparse_embedding_hparam=hparam)
    layers = [
        layer("Reshape", "rows", "flat", leading_dim=DIM),
        layer("Concat", ["flat", "dense"], "all"),
        layer("InnerProduct", "all", "fc1", fc_param={"num_output": 4}),
        layer("ReLU", "fc1", "relu1"),
        layer("InnerProduct", "relu1", "fc2", fc_param={"num_output": 1}),
        layer("InnerProduct", "relu1", "fc3", fc_param={"num_output": 1}),
    ]
    return {"layers": [data, embedding, *layers[: 5 + (len(losses) > 1)], *losses]}


def squared(bottom="fc2", label="rating", **members):
    return layer("MeanSquaredErrorLoss", [bottom, label], f"loss_{bottom}", **members)


def ratings(count=64, weights=None):
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 9, (count, 1))
    labels = rng.integers(1, 6, (count, 1)).astype(np.float32)
    return Samples(labels, rng.normal(size=(count, 2)).astype(np.float32), Bags.one_key_each(keys), weights)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_steps_equal_those_of_the_same_network_in_pytorch(is_weighted):
    samples = ratings(weights=np.random.default_rng(1).random(64).astype(np.float32) if is_weighted else None)
    model = CtrModel(parse_graph(graph_of(squared(mean=[MEAN], std=[STD])), "g.json"), seed=0, rule=SgdRule())
    model.train_batch(samples, 0.0)  # makes the rows
    (rows,) = model.tables[0].dump(-1)
    order = np.argsort(rows.keys)
    table = torch.tensor(rows.vectors[order], requires_grad=True)
    places = torch.from_numpy(np.searchsorted(rows.keys[order], samples.bags.keys))
    weights = {name: torch.tensor(values, requires_grad=True) for name, values in model.dense_weights().items()}
    optimizer = torch.optim.SGD([table, *weights.values()], lr=RATE)
    labels, counts = torch.from_numpy(samples.labels), torch.from_numpy(samples.weights) if is_weighted else None

    for _ in range(5):
        x = torch.cat([table[places], torch.from_numpy(samples.dense)], dim=1)
        hidden = torch.relu(x @ weights["fc1.weight"] + weights["fc1.bias"])
        prediction = (hidden @ weights["fc2.weight"] + weights["fc2.bias"]) * STD + MEAN
        each = torch.nn.MSELoss(reduction="none")(prediction, labels)[:, 0] / STD**2
        expected = (each if counts is None else each * counts).mean()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert model.train_batch(samples, RATE) == pytest.approx(float(expected.detach()), rel=1e-5)

    for name, values in model.dense_weights().items():
        np.testing.assert_allclose(values, weights[name].detach(), rtol=1e-4, atol=1e-6)


def test_a_server_answers_what_the_trainer_predicts(tmp_path):
    document, samples = graph_of(squared(mean=[50_000.0], std=[20_000.0])), ratings()
    model = CtrModel(parse_graph(document, "g.json"), seed=0)
    model.train_batch(samples, 0.01)
    (loss,) = losses_of(model.graph)
    version = export_model(model, document, tmp_path, "price", calibration=samples)
    with load_model(version) as session:
        answers = session.predict(samples.dense, samples.bags.keys, samples.bags.row_ptrs)
        assert session.outputs == (Output("OUTPUT0", "score"),)
    assert session.config.label_kinds == ("score",)
    np.testing.assert_allclose(answers, loss.answers(model.logits(samples)), rtol=1e-5)
    with load_model(version, engine="int8", tolerance=0.1) as session:
        integers = session.predict(samples.dense, samples.bags.keys, samples.bags.row_ptrs)
        assert session.quantization.max_error == pytest.approx(np.abs(integers - answers).max() / 20_000, rel=0.01)
        assert " standard deviations of its label at most" in str(session.quantization)
    assert loss.logits(loss.answers(model.logits(samples))) == pytest.approx(model.logits(samples), abs=1e-5)


def test_labels_of_both_kinds_are_learned_together(tmp_path):
    label = {"top": ["rating", "clicked"], "label_dim": [1, 1]}
    click = layer("BinaryCrossEntropyLoss", ["fc3", "clicked"], "loss_click")
    document = graph_of(squared(mean=[MEAN], std=[STD]), click, label=label)
    one = ratings()
    samples = Samples(np.concatenate([one.labels, one.labels > 3], axis=1), one.dense, one.bags)
    model = CtrModel(parse_graph(document, "g.json"), seed=0)
    model.train_batch(samples, 0.01)  # makes the rows
    logits = torch.from_numpy(model.logits(samples))
    labels = torch.from_numpy(samples.labels)
    first = (logits[:, 0] - (labels[:, 0] - MEAN) / STD).square().mean()
    second = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 1], labels[:, 1])

    assert model.train_batch(samples, 0.01) == pytest.approx(float(first + second), rel=1e-5)
    losses = [model.train_batch(samples, 0.01) for _ in range(60)]
    assert losses[-1] < 0.8 * losses[0]
    with load_model(export_model(model, document, tmp_path, "both")) as session:
        request = samples.dense, samples.bags.keys, samples.bags.row_ptrs
        assert [(output.name, output.kind) for output in session.outputs] == [
            ("OUTPUT0", "score"),
            ("rating", "score"),
            ("clicked", "probability"),
        ]
        together = session.predict(*request)
    for column, loss in enumerate(losses_of(model.graph)):
        np.testing.assert_allclose(
            together[:, column], loss.answers(model.logits(samples)[:, column]), rtol=1e-5, atol=1e-6
        )


def test_figures_equal_those_in_the_documentation_of_scikit_learn():
    labels, predictions = np.array([3, -0.5, 2, 7], np.float32), np.array([2.5, 0.0, 2, 8], np.float32)

    assert mean_squared_error(labels, predictions) == 0.375
    assert mean_absolute_error(labels, predictions) == 0.5
    assert r_squared(labels, predictions) == pytest.approx(0.9486081370449679)
    equal = np.full(10, 4.3)  # whose sum is rounded
    assert math.isnan(r_squared(equal, equal + 1))
    assert SquaredError().statistics([equal], None)["std"] == [1.0]
    assert not SquaredError().is_worthless(SquaredError().figures(equal, equal + 1))
    figures = SquaredError(2.0, 4.0).figures(labels, (predictions - 2) / 4)
    assert figures["rmse"] == pytest.approx(math.sqrt(0.375))
    assert figures["base_rmse"] == pytest.approx(labels.std())
    assert SquaredError(2.0, 4.0).mean(labels, (predictions - 2) / 4) == pytest.approx(0.375 / 16)


def test_a_weight_counts_as_repeats_of_the_sample():
    rng = np.random.default_rng(0)
    labels, predictions, weights = rng.normal(size=20), rng.normal(size=20), rng.integers(0, 3, 20).astype(float)
    repeated = [np.repeat(values, weights.astype(int)) for values in (labels, predictions)]

    for measure in (mean_squared_error, mean_absolute_error, r_squared):
        assert measure(labels, predictions, weights) == pytest.approx(measure(*repeated))
    assert variance(labels, weights) == pytest.approx(repeated[0].var())


def test_the_mean_and_the_deviation_of_the_training_labels_are_those_of_numpy():
    samples, document = ratings(), parse_document(graph_of(squared()), "g.json")
    found = with_label_statistics(document, *first_labels(samples)).document["layers"][-1]
    assert (found["mean"], found["std"]) == (
        pytest.approx([samples.labels.mean()]),
        pytest.approx([samples.labels.std()]),
    )

    weighted = ratings(weights=np.arange(64, dtype=np.float32))
    found = with_label_statistics(document, *first_labels(weighted)).document["layers"][-1]
    assert found["mean"] == pytest.approx([np.average(samples.labels[:, 0], weights=np.arange(64))])

    given = parse_document(graph_of(squared(mean=[1.0], std=[2.0])), "g.json")
    assert with_label_statistics(given, *first_labels(samples)) is given
    equal = Samples(np.full((64, 1), 7, np.float32), samples.dense, samples.bags, np.zeros(64, np.float32))
    found = with_label_statistics(document, *first_labels(equal)).document["layers"][-1]
    assert (found["mean"], found["std"]) == ([7.0], [1.0])


def test_losses_are_replaced_and_their_statistics_with_them():
    document = parse_document(graph_of(squared(mean=[1.0], std=[2.0])), "g.json")
    assert with_losses(document, ["mse"]).document == document.document

    binary = with_losses(document, ["log"])
    assert [type(loss) for loss in binary.losses] == [LogLoss]
    assert with_losses(binary, ["mse"]).losses == (SquaredError(0.0, 1.0),)
    with pytest.raises(ConfigError, match="--loss: expected one loss for all labels, or one for each of rating; got 2"):
        with_losses(document, ["mse", "log"])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"std": [0]}, "std: expected numbers above 0, got 0"),
        ({"std": [1, 2]}, "std: expected 1 numbers, got 2"),
        ({"mean": 3.5}, "mean: expected a list, got 3.5"),
        ({"mean": [1e39]}, r"mean\[0\]: expected a number within float32"),
        ({"means": [1]}, "means: unknown key; did you mean 'mean'?"),
    ],
)
def test_wrong_statistics_are_refused(members, message):
    with pytest.raises(ConfigError, match=rf"layers\[7\].*{message.replace('?', '.')}"):
        parse_graph(graph_of(squared(**members)), "g.json")


def test_a_probability_has_no_mean():
    click = layer("BinaryCrossEntropyLoss", ["fc2", "rating"], "loss", mean=[1.0])
    with pytest.raises(ConfigError, match=r"layers\[7\].*mean: unknown key"):
        parse_graph(graph_of(click), "g.json")


def test_no_regression_is_learned_from_generated_samples(document):
    regression = copy.deepcopy(document)
    regression["layers"][-1]["type"] = "MeanSquaredErrorLoss"
    with pytest.raises(ConfigError, match="generated labels are 0 and 1, from which no regression is learned"):
        generate_for(parse_graph(regression, "g.json"), 100, 0)
