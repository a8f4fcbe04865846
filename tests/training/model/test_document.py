import json
import os
from pathlib import Path

import numpy as np
import pytest

from serving.errors import ConfigError
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.trainer import train
from training.optimizers.learning_rate import LearningRateSchedule
from training.synthetic.criteo_like import generate
from training.synthetic.generator import generate_for
from training.tables.rules import AdamRule, MomentumSgdRule, NesterovRule, RowWiseAdaGradRule, SgdRule

DATA = Path(os.environ.get("HOTROW_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))


def opened(tmp_path, document):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    return open_document(str(path))


def test_a_built_in_model_is_opened_by_its_name():
    dcn = open_document("dcn")

    assert dcn.name == "dcn"
    assert dcn.graph.dense_dim == 13
    assert [entry.slots for entry in dcn.graph.sparse] == [26]
    assert dcn.tables[0].update_type == "Local"
    assert dcn.schedule == LearningRateSchedule(0.001)


def test_hugectrs_own_training_graph_is_read_with_its_optimizer():
    path = DATA / "hugectr_configs" / "dcn_train.json"
    if not path.exists():
        pytest.skip(f"no real data: {path} is absent (HOTROW_TEST_DATA)")

    document = open_document(str(path))

    assert document.name == "dcn_train"
    assert document.tables[0].update_type == "Global"
    assert document.rule == AdamRule(0.9, 0.999, 1e-7)
    assert document.schedule == LearningRateSchedule(0.001)


def test_hugectrs_own_din_trains_once_its_last_reshape_is_corrected(tmp_path):
    path = DATA / "hugectr_configs" / "din_train.json"
    if not path.exists():
        pytest.skip(f"no real data: {path} is absent (HOTROW_TEST_DATA)")
    din = json.loads(path.read_text())
    wrong = din["layers"][22]
    assert (wrong["bottom"], wrong["top"]) == ("reshape_reduce_item_his", "reduce_item_his")
    wrong["bottom"], wrong["top"] = wrong["top"], wrong["bottom"]
    document = opened(tmp_path, din)
    samples = generate_for(open_document("din").graph, 6_000, seed=0).samples
    model = CtrModel(document.graph, seed=0, rule=document.rule)

    options = {"epochs": 3, "batch_size": 64, "schedule": document.schedule, "seed": 0}
    *_, last = train(model, samples[:5_000], samples[5_000:], **options)

    assert last.figures[0]["auc"] > 0.6  # 0.68 was seen


def test_a_schedule_is_read_from_the_optimizer(tmp_path, document):
    rates = {"learning_rate": 2, "warmup_steps": 3, "decay_start": 4, "decay_steps": 5, "decay_power": 3, "end_lr": 0.5}
    document["optimizer"] = {"type": "Adam", "adam_hparam": {**rates, "beta1": 0.5, "beta2": 0.25, "epsilon": 1e-3}}

    read = opened(tmp_path, document)

    assert read.schedule == LearningRateSchedule(2, 3, 4, 5, 3, 0.5)
    assert read.rule == AdamRule(0.5, 0.25, 1e-3)
    assert read.tables[0].update_type == "Local"


@pytest.mark.parametrize(
    ("kind", "clause", "parameters", "rule"),
    [
        ("SGD", "sgd_hparam", {}, SgdRule()),
        ("MomentumSGD", "momentum_sgd_hparam", {"momentum_factor": 0.5}, MomentumSgdRule(0.5)),
        ("Nesterov", "nesterov_hparam", {"momentum_factor": 0.25}, NesterovRule(0.25)),
        (
            "RowWiseAdaGrad",
            "row_wise_ada_grad_hparam",
            {"initial_accumulator": 0.1, "epsilon": 1e-5},
            RowWiseAdaGradRule(0.1, 1e-5),
        ),
    ],
)
@pytest.mark.parametrize("update_type", ["Local", "Global", "LazyGlobal"])
def test_every_optimizer_and_update_type_is_read_and_learns(
    tmp_path, document, kind, clause, parameters, rule, update_type
):
    hparam = {"learning_rate": 0.05, **parameters}
    document["optimizer"] = {"type": kind, "update_type": update_type, clause: hparam}
    read = opened(tmp_path, document)
    assert (read.rule, read.tables[0].update_type, read.schedule.base) == (rule, update_type, 0.05)

    samples = generate_for(read.graph, 1_000, seed=0).samples
    model = CtrModel(read.graph, seed=0, rule=read.rule, tables=read.tables)
    first, last = train(model, samples, samples, epochs=2, batch_size=50, schedule=read.schedule, seed=0)
    assert last.loss < first.loss


def test_the_optimizers_of_hugectrs_samples_are_read(tmp_path, document):
    document["optimizer"] = {"type": "SGD", "sgd_hparam": {"learning_rate": 0.1, "atomic_update": True}}
    assert opened(tmp_path, document).rule == SgdRule()
    for is_global, update_type in ((True, "Global"), (False, "Local")):
        document["optimizer"] = {"type": "Adam", "global_update": is_global, "adam_hparam": {"learning_rate": 0.1}}
        assert {table.update_type for table in opened(tmp_path, document).tables} == {update_type}


def test_a_graph_without_an_optimizer_is_trained_with_adam(tmp_path, document):
    assert opened(tmp_path, document).rule == AdamRule()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"type": "SGD", "adam_hparam": {}}, "optimizer.adam_hparam: unknown key"),
        ({"type": "SGD", "sgd_hparam": {"beta1": 0.9}}, "optimizer.sgd_hparam.beta1: unknown key"),
        (
            {"type": "Sgd", "sgd_hparam": {}},
            'type: expected one of "Adam", "MomentumSGD", "Nesterov", "SGD", "RowWiseAdaGrad", got "Sgd"',
        ),
        (
            {"type": "Nesterov", "nesterov_hparam": {"momentum_factor": 1}},
            "momentum_factor must be at least 0 and below 1",
        ),
        ({"type": "Adam"}, "optimizer.adam_hparam: missing"),
        ({"type": "SGD", "sgd_hparam": {"atomic_update": 1}}, "sgd_hparam.atomic_update: expected one of true, false"),
        ({"type": "Adam", "adam_hparam": {"atomic_update": True}}, "adam_hparam.atomic_update: unknown key"),
        ({"type": "Adam", "global_update": "yes", "adam_hparam": {}}, "optimizer.global_update: expected one of true"),
        (
            {"type": "Adam", "update_type": "Local", "global_update": True, "adam_hparam": {}},
            "optimizer.global_update: means Global, but update_type is Local; remove one of them",
        ),
        ({"type": "Adam", "adam_hparam": {"learning_rat": 1}}, "adam_hparam.learning_rat: unknown key"),
        ({"type": "Adam", "adam_hparam": {"learning_rate": -1}}, "base must be a number of at least 0"),
        ({"type": "Adam", "adam_hparam": {"beta1": 1.0}}, "beta1 must be at least 0 and below 1"),
        ({"type": "Adam", "adam_hparam": {"epsilon": 0}}, "epsilon must be above 0"),
        ({"type": "Adam", "adam_hparam": {"warmup_steps": 0}}, "adam_hparam.warmup_steps: expected an integer from 1"),
        (
            {"type": "Adam", "adam_hparam": {}, "update_type": "Locl"},
            'update_type: expected one of .* did you mean "Lo',
        ),
    ],
)
def test_a_wrong_optimizer_is_refused_with_its_path(tmp_path, document, optimizer, message):
    document["optimizer"] = optimizer

    with pytest.raises(ConfigError, match=message) as caught:
        opened(tmp_path, document)
    assert str(caught.value).startswith(str(tmp_path / "mine.json"))


def test_an_embedding_layer_may_have_an_optimizer_of_its_own(tmp_path, document):
    document["optimizer"] = {"type": "Adam", "adam_hparam": {"learning_rate": 0.01}}
    document["layers"][1]["optimizer"] = {
        "type": "Nesterov",
        "update_type": "Global",
        "nesterov_hparam": {"learning_rate": 0.01, "momentum_factor": 0.5},
    }
    read = opened(tmp_path, document)

    assert [(type(table.rule), table.update_type) for table in read.tables] == [
        (NesterovRule, "Global"),
        (AdamRule, "Local"),
    ]
    own = CtrModel(read.graph, seed=0, rule=read.rule, tables=read.tables)
    plain = CtrModel(read.graph, seed=0, rule=read.tables[0].rule, update_type="Global")
    samples = generate(100, seed=0).samples
    for model in (own, plain):
        model.train_batch(samples, 0.01)
    np.testing.assert_array_equal(own.tables[0].rows()[1], plain.tables[0].rows()[1])
    assert (own.tables[1].rows()[1] != plain.tables[1].rows()[1]).any()

    document["layers"][1]["optimizer"]["nesterov_hparam"]["learning_rate"] = 0.02
    with pytest.raises(ConfigError, match=r"layers\[1\].optimizer: its learning rates must be those of the document's"):
        opened(tmp_path, document)


@pytest.mark.parametrize(("kind", "power", "divisor"), [("L1", 1, 1), ("L2", 2, 2)])
def test_a_regularizer_adds_its_term_to_the_loss_and_its_gradient_to_the_weights(
    tmp_path, document, kind, power, divisor
):
    """SGD shows the gradient: L2 adds lambda / B * w, L1 adds lambda / B * sign(w)."""
    document["optimizer"] = {"type": "SGD", "sgd_hparam": {"learning_rate": 1.0}}
    document["layers"] = [layer for layer in document["layers"] if layer["type"] != "Dropout"]
    document["layers"][-2]["bottom"] = "relu1"
    samples = generate(50, seed=0).samples
    factor, found = 3.0, []
    for settings in ({}, {"regularizer": kind, "lambda": factor}):
        document["layers"][-1].update(settings)
        read = opened(tmp_path, document)
        model = CtrModel(read.graph, seed=0, rule=read.rule, regularizers=read.regularizers)
        before = model.dense_weights()
        loss = model.train_batch(samples, 1.0)
        found.append((loss, before, model.dense_weights()))

    (plain_loss, before, plain), (loss, _, penalized) = found
    total = sum(float((np.abs(weight.astype(np.float64)) ** power).sum()) for weight in before.values())
    assert loss - plain_loss == pytest.approx(factor / (divisor * 50) * total, rel=1e-4)
    for name, weight in before.items():
        gradient = np.sign(weight) if kind == "L1" else weight
        np.testing.assert_allclose(plain[name] - penalized[name], factor / 50 * gradient, atol=1e-5)


def test_settings_that_training_does_not_have_are_refused(tmp_path, document):
    document["layers"][-1].update(regularizer="L3", **{"lambda": 0.1})
    with pytest.raises(ConfigError, match=r"layers\[11\].regularizer: "):
        opened(tmp_path, document)
    document["layers"][-1].update(regularizer="L2", **{"lambda": -0.1})
    with pytest.raises(ConfigError, match=r"layers\[11\].lambda: expected a number of at least 0, got -0.1"):
        opened(tmp_path, document)
    del document["layers"][-1]["lambda"]
    with pytest.raises(ConfigError, match=r"layers\[11\].lambda: "):
        opened(tmp_path, document)

    document["layers"][-1] = {"name": "p", "type": "Sigmoid", "bottom": "fc2", "top": "p"}
    with pytest.raises(ConfigError, match=r"layers\[11\].type: a training graph ends in Bin.*; to train .* use --from"):
        opened(tmp_path, document)


def test_a_model_that_is_neither_built_in_nor_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no such graph file, and no built-in model \(bst, dcn, "):
        open_document(str(tmp_path / "absent.json"))


def test_a_misspelled_model_is_refused_with_the_closest_name():
    with pytest.raises(ConfigError, match=r"no built-in model \(bst, .*\); did you mean deepfm\?"):
        open_document("deepfn")


def test_a_graph_without_a_network_cannot_be_trained(tmp_path):
    document = open_document("dcn").document
    inputs = {"layers": document["layers"][:2]}

    with pytest.raises(ConfigError, match="layers: no layer follows the embeddings"):
        opened(tmp_path, inputs)
