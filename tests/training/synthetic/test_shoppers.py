import numpy as np
import pytest

from training.built_in import built_in_graphs
from training.model.document import open_document
from training.model.metrics import area_under_curve
from training.synthetic.generator import generate_for
from training.synthetic.shoppers import FORMS, HISTORY


def generated(name, rows=20_000, seed=0):
    return generate_for(open_document(name).graph, rows, seed)


def slots_of(name, samples):
    """For each sparse input: its keys, int64[B, S], -1 for an empty slot. A slot has at most one key."""
    entries = open_document(name).graph.sparse
    padded = {}
    for entry, bags in zip(entries, samples.bags.split([entry.slots for entry in entries]), strict=True):
        assert bags.sizes.max() == 1
        padded[entry.top] = np.full(bags.sizes.shape, -1)
        padded[entry.top][bags.sizes == 1] = bags.keys
    return padded


@pytest.mark.parametrize("name", FORMS)
def test_samples_depend_on_the_seed(name):
    first, again, other = generated(name, 300, seed=1), generated(name, 300, seed=1), generated(name, 300, seed=2)

    for left, right in ((first, again), (again, first)):
        assert left.samples.labels.tolist() == right.samples.labels.tolist()
        assert left.samples.dense.tolist() == right.samples.dense.tolist()
        assert left.samples.bags.keys.tolist() == right.samples.bags.keys.tolist()
        assert left.samples.bags.row_ptrs.tolist() == right.samples.bags.row_ptrs.tolist()
    assert first.samples.bags.keys.tolist() != other.samples.bags.keys.tolist()


@pytest.mark.parametrize("name", FORMS)
def test_labels_are_as_frequent_as_their_probabilities(name):
    data = generated(name)

    for label in range(data.samples.labels.shape[1]):
        for part in np.array_split(np.argsort(data.probabilities[:, label]), 8):
            observed, expected = data.samples.labels[part, label].mean(), data.probabilities[part, label].mean()
            assert observed == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("name", FORMS)
def test_the_best_known_auc_is_that_of_the_probabilities(name):
    data = generated(name)

    for label in range(data.samples.labels.shape[1]):
        best = data.best_known_auc(label=label)
        assert best == area_under_curve(data.samples.labels[:, label], data.probabilities[:, label])
        assert 0.75 < best < 0.9
        assert data.best_known_auc(slice(15_000, None), label) != best


@pytest.mark.parametrize(("name", "target"), [("bst", 0), ("din", HISTORY)])
def test_a_history_has_its_newest_goods_first_and_the_target_in_its_own_slot(name, target):
    samples = generated(name, 500).samples

    inputs = slots_of(name, samples)

    goods, history = inputs["goods"], np.delete(inputs["goods"], target, axis=1)
    lengths = (history >= 0).sum(axis=1)
    assert (goods[:, target] >= 0).all()
    assert set(lengths.tolist()) == set(range(HISTORY + 1))
    assert ((history >= 0) == (np.arange(HISTORY) < lengths[:, None])).all()
    assert (inputs["categories"] == np.where(goods >= 0, goods % 20, -1)).all()
    if name == "bst":
        assert samples.dense[:, 0].tolist() == (lengths + 1).tolist()
        ages = inputs["ages"]
        assert (ages[:, 0] == 0).all()
        assert ((ages >= 0) == (goods >= 0)).all()
        assert all((np.diff(age[age >= 0]) >= 0).all() and age.max() < 10 for age in ages)


def test_goods_of_the_targets_category_raise_the_chance_of_a_click():
    for name, target in (("din", HISTORY), ("bst", 0)):
        data = generated(name)
        categories = slots_of(name, data.samples)["categories"]
        matches = np.delete(categories, target, axis=1) == categories[:, [target]]
        counts = matches.sum(axis=1)
        clicks = data.samples.labels[:, 0]
        assert clicks[counts == 0].mean() + 0.2 < clicks[counts == 1].mean() < clicks[counts > 2].mean()
        newest, old = (clicks[(counts == 1) & matches[:, place].any(axis=1)].mean() for place in ([0], [5, 6, 7, 8, 9]))
        assert (newest > old + 0.15) == (name == "bst")


def test_a_purchase_needs_a_click_and_a_low_price():
    data = generated("mmoe")
    click, purchase = data.samples.labels.T

    assert (purchase <= click).all()
    cheap = data.samples.dense[:, 0] < 0
    assert purchase[cheap].mean() > 2 * purchase[~cheap].mean()
    assert abs(click[cheap].mean() - click[~cheap].mean()) < 0.03


def test_every_built_in_graph_has_generated_samples():
    for name in built_in_graphs():
        graph = open_document(name).graph
        samples = generate_for(graph, 10, seed=0).samples
        assert samples.bags.slots == sum(entry.slots for entry in graph.sparse)
        assert (samples.dense.shape, samples.labels.shape) == ((10, graph.dense_dim), (10, graph.label_dim))
