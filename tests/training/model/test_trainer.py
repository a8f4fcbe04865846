import numpy as np
import pytest
import torch

from kernels.errors import ReservedKeyError
from serving.errors import ConfigError
from serving.model.graph import parse_graph
from tests.training.rows import make_rows
from training.errors import DataError, DivergedError
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.trainer import predict_logits, train
from training.optimizers.learning_rate import LearningRateSchedule
from training.samples import Bags, Samples
from training.synthetic.criteo_like import generate
from training.tables.rules import AdamRule

RATE = LearningRateSchedule(0.003)


def trained(document, samples, seed=0, epochs=1, batch_size=100):
    model = CtrModel(parse_graph(document, "graph.json"), seed=seed)
    options = {"epochs": epochs, "batch_size": batch_size, "schedule": RATE, "seed": seed}
    return model, list(train(model, samples, samples[:200], **options))


def test_samples_in_memory_are_checked_before_the_first_step(document):
    samples = generate(300, seed=0).samples
    samples.labels[250] = 3

    with pytest.raises(DataError, match=r"training samples column label\[0\] record 250: expected 0 or 1, found 3"):
        trained(document, samples)


def test_the_loss_falls_from_epoch_to_epoch(document):
    _, results = trained(document, generate(2000, seed=0).samples, epochs=3)

    losses = [result.loss for result in results]
    assert losses[0] > losses[1] > losses[2]
    assert [result.epoch for result in results] == [1, 2, 3]


def test_the_trained_model_depends_on_the_seed(document):
    samples = generate(1000, seed=0).samples

    one, first = trained(document, samples, seed=3)
    again, second = trained(document, samples, seed=3)
    other, _ = trained(document, samples, seed=4)

    assert first[0].loss == second[0].loss
    for key, weight in one.dense_weights().items():
        np.testing.assert_array_equal(weight, again.dense_weights()[key])
    for table, same in zip(one.tables, again.tables, strict=True):
        np.testing.assert_array_equal(table.rows()[0], same.rows()[0])
        np.testing.assert_array_equal(table.rows()[1], same.rows()[1])
    assert (predict_logits(one, samples) != predict_logits(other, samples)).any()


def test_a_step_equals_autograd_with_a_dense_adam(document):
    """Oracle: gradients of one autograd graph over full weight matrices, Adam written out in float64."""
    document["layers"][9]["rate"] = 0.0
    model = CtrModel(parse_graph(document, "graph.json"), seed=0, rule=AdamRule(0.9, 0.99, 1e-3))
    samples = generate(50, seed=1).samples
    untrained = CtrModel(parse_graph(document, "graph.json"), seed=0)
    dense = {key: torch.tensor(w, requires_grad=True) for key, w in untrained.dense_weights().items()}
    vectors, pooled = [], []
    for table, bags in zip(untrained.tables, untrained.bags(samples), strict=True):
        make_rows(table, bags)
        keys, rows = table.rows()
        vectors.append(torch.tensor(rows, requires_grad=True))
        position = {key: row for row, key in enumerate(keys.tolist())}
        index = [position[key] for key in bags.keys.tolist()]
        pooled.append(vectors[-1][index].reshape(50, -1, rows.shape[1]))
    wide, deep = pooled
    x0 = torch.cat([wide.reshape(50, 18), deep.reshape(50, 80), torch.tensor(samples.dense)], dim=1)
    x = x0
    for level in range(2):
        x = x0 * (x @ dense[f"cross.u{level}"] @ dense[f"cross.v{level}"] + dense[f"cross.bias{level}"]) + x
    hidden = torch.relu(x @ dense["fc1.weight"] + dense["fc1.bias"])
    logits = hidden @ dense["fc2.weight"] + dense["fc2.bias"]
    labels = torch.tensor(samples.labels)
    loss = torch.nn.functional.binary_cross_entropy(torch.sigmoid(logits), labels)
    loss.backward()

    stepped = model.train_batch(samples, learning_rate=0.01)

    def moved(weight):
        gradient = weight.grad.double()
        rate = 0.01 * (1 - 0.99) ** 0.5 / (1 - 0.9)
        return (weight - rate * 0.1 * gradient / ((0.01 * gradient**2).sqrt() + 1e-3)).detach().numpy()

    assert stepped == pytest.approx(float(loss.detach()), rel=1e-5)
    for key, weight in model.dense_weights().items():
        np.testing.assert_allclose(weight, moved(dense[key]), atol=2e-6, err_msg=key)
    for table, weight in zip(model.tables, vectors, strict=True):
        np.testing.assert_allclose(table.rows()[1], moved(weight), atol=2e-6)


def test_dropout_is_active_only_in_training(document):
    model = CtrModel(parse_graph(document, "graph.json"), seed=0)
    samples = generate(100, seed=0).samples

    losses = {model.train_batch(samples, learning_rate=0.0) for _ in range(4)}
    logits = [model.logits(samples).tobytes() for _ in range(4)]

    assert len(losses) == 4
    assert len(set(logits)) == 1


def test_dropout_keeps_the_expected_value():
    dcn = open_document("dcn")
    model = CtrModel(dcn.graph, seed=0)

    (dropped,) = model._dropout(400, slice(None), {"rate": 0.25}, [torch.ones(400, 400)], {})

    assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)


def test_a_smaller_last_batch_is_used_too(document):
    samples = generate(30, seed=0).samples

    model, results = trained(document, samples, batch_size=1000)
    by_parts, _ = trained(document, samples, batch_size=29)

    assert len(results) == 1
    assert sum(len(table) for table in by_parts.tables) == sum(len(table) for table in model.tables)
    assert sum(len(table) for table in model.tables) == np.unique(samples.bags.keys).size


def test_every_epoch_uses_every_sample_once_in_a_new_order(document):
    class Recording(CtrModel):
        def train_batch(self, samples, learning_rate):
            taken.append(samples.dense[:, 0].astype(int))
            return 0.0

    samples = generate(100, seed=0).samples
    samples.dense[:, 0] = np.arange(100)
    orders = []
    for seed in (0, 0, 1):
        taken = []
        model = Recording(parse_graph(document, "graph.json"), seed=0)
        list(train(model, samples, samples, epochs=2, batch_size=30, schedule=RATE, seed=seed))
        assert [batch.size for batch in taken] == [30, 30, 30, 10] * 2
        orders.append(np.concatenate(taken).reshape(2, 100).tolist())

    assert all(sorted(order) == list(range(100)) for epochs in orders for order in epochs)
    assert orders[0] == orders[1] != orders[2]
    assert list(range(100)) != orders[0][0] != orders[0][1]


def test_tables_with_the_same_keys_start_from_different_weights(model):
    for table in model.tables:
        make_rows(table, Bags.one_key_each(np.arange(60).reshape(-1, 20 if table is model.tables[1] else 6)))

    wide, deep = (table.rows()[1] for table in model.tables)

    assert (wide != deep[:, :3]).mean() > 0.99


def test_the_learning_rate_follows_the_schedule(document):
    class Recorded(LearningRateSchedule):
        steps = []  # noqa: RUF012

        def at(self, step):
            self.steps.append(step)
            return super().at(step)

    samples = generate(250, seed=0).samples
    model = CtrModel(parse_graph(document, "graph.json"), seed=0)

    list(train(model, samples, samples, epochs=2, batch_size=100, schedule=Recorded(0.1), seed=0))

    assert Recorded.steps == [1, 2, 3, 4, 5, 6]


def test_evaluation_data_of_one_label_has_no_auc(document):
    samples = generate(50, seed=0).samples
    positives = samples[np.flatnonzero(samples.labels[:, 0] == 1)]
    model = CtrModel(parse_graph(document, "graph.json"), seed=0)

    (result,) = train(model, samples, positives, epochs=1, batch_size=10, schedule=RATE, seed=0)

    assert np.isnan(result.figures[0]["auc"])
    assert result.evaluation_loss[0] > 0


def test_a_loss_that_is_not_finite_ends_the_training(document):
    samples = generate(200, seed=0).samples
    model = CtrModel(parse_graph(document, "graph.json"), seed=0)
    options = {"epochs": 1, "batch_size": 20, "schedule": LearningRateSchedule(1e30), "seed": 0}

    with pytest.raises(DivergedError, match=r"not finite at step [2-9]: a learning rate below 1e\+30"):
        list(train(model, samples, samples, **options))


def test_a_last_step_that_diverges_ends_the_training(document):
    """The step's own loss is measured before it."""
    samples = generate(20, seed=0).samples
    model = CtrModel(parse_graph(document, "graph.json"), seed=0)
    options = {"epochs": 1, "batch_size": 20, "schedule": LearningRateSchedule(1e30), "seed": 0}

    with pytest.raises(DivergedError, match=r"not finite at step 1: a learning rate below 1e\+30"):
        list(train(model, samples, samples, **options))


def test_an_input_without_any_key_is_refused_before_any_work():
    graph = open_document("ncf").graph
    labels, dense = np.zeros((4, 1), np.float32), np.empty((4, 0), np.float32)
    users_alone = Bags.padded(np.arange(8).reshape(4, 2), np.array([[True, False]] * 4))
    samples = Samples(labels, dense, users_alone)
    whole = Samples(labels, dense, Bags.one_key_each(np.arange(8).reshape(4, 2)))
    options = {"epochs": 1, "batch_size": 2, "schedule": RATE, "seed": 0}

    with pytest.raises(ConfigError, match=r"sparse\[1\]: no training sample has a key of 'item'"):
        list(train(CtrModel(graph, seed=0), samples, whole, **options))
    assert list(train(CtrModel(graph, seed=0), whole, samples, **options))


def test_a_reserved_key_is_refused(document):
    samples = generate(20, seed=0).samples
    samples.bags.keys[82] = np.iinfo(np.int64).min

    with pytest.raises(DataError, match=rf"training samples column slot\[4\] record 3: .* found {-(2**63)}"):
        trained(document, samples)
    with pytest.raises(ReservedKeyError):
        CtrModel(parse_graph(document, "graph.json"), seed=0).train_batch(samples, 0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["dense"].update(dense_dim=12),
            "dense_dim: the graph reads 12 dense features, but the data has 13",
        ),
        (
            lambda data: data["sparse"][0].update(max_feature_num_per_sample=5),
            "at most 5 keys are allowed, but sample 0 has 6",
        ),
    ],
)
def test_a_graph_that_reads_other_inputs_than_the_data_has_is_refused(document, change, message):
    change(document["layers"][0])
    if "dense_dim" in message:
        document["layers"][6]["mc_param"]["num_layers"] = 1

    with pytest.raises(ConfigError, match=message):
        trained(document, generate(20, seed=0).samples)


def test_a_sample_with_more_keys_than_a_request_may_have_is_refused(document):
    good = generate(20, seed=0).samples
    sizes = np.ones(20 * 26, dtype=np.int64)
    sizes[13 * 26 + 2] = 36  # 41 keys in the first six slots
    crowded = Bags(np.arange(sizes.sum()), np.concatenate([[0], np.cumsum(sizes)]), 26)

    with pytest.raises(ConfigError, match=r"sparse\[0\]: at most 40 keys are allowed, but sample 13 has 41"):
        trained(document, Samples(good.labels, good.dense, crowded))


def test_samples_of_other_slots_than_the_graphs_are_refused(document):
    good = generate(20, seed=0).samples

    with pytest.raises(ConfigError, match="reads 26 slots, but the data has 25"):
        trained(document, Samples(good.labels, good.dense, Bags.one_key_each(good.bags.keys.reshape(20, 26)[:, 1:])))
