import numpy as np
import pytest

from tests.training.rows import make_rows
from training.data.criteo import write_lines
from training.data.criteo_reader import read_criteo
from training.embedding import EmbeddingBagConfig, EmbeddingTable
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.metrics import area_under_curve
from training.samples import Bags
from training.synthetic.criteo_like import generate, planted_weights, power_law_keys, true_logits, true_uniform


def test_power_law_keys_have_hugectrs_golden_values():
    uniform = np.array([0, 0.25, 0.5, 0.75, 0.9, 0.99, 1])

    assert power_law_keys(uniform, 1.2, 0, 99_999).tolist() == [0, 3, 19, 275, 4038, 64992, 99999]


@pytest.mark.parametrize("alpha", [0.9, 1.1, 1.3])
def test_power_law_keys_stay_in_their_range_and_low_keys_lead(alpha):
    keys = power_law_keys(np.random.default_rng(0).random(50_000), alpha, 10, 40)

    counts = np.bincount(keys - 10, minlength=31)
    assert counts.size == 31
    assert counts[1] > counts[5] > counts[25] > 0


def test_a_range_of_one_key_gives_that_key():
    assert power_law_keys(np.array([0.0, 0.5, 1.0]), 1.1, 7, 7).tolist() == [7, 7, 7]


@pytest.mark.parametrize(("alpha", "highest"), [(1.0, 9), (0.0, 9), (-1.0, 9), (float("nan"), 9), (1.1, -1)])
def test_an_impossible_power_law_is_refused(alpha, highest):
    with pytest.raises(ValueError, match=r"alpha must be|no keys"):
        power_law_keys(np.array([0.5]), alpha, 0, highest)


def test_samples_depend_on_the_seed():
    first, again, other = generate(500, seed=1), generate(500, seed=1), generate(500, seed=2)

    np.testing.assert_array_equal(first.samples.bags.keys, again.samples.bags.keys)
    np.testing.assert_array_equal(first.samples.dense, again.samples.dense)
    np.testing.assert_array_equal(first.samples.labels, again.samples.labels)
    assert (first.samples.bags.keys != other.samples.bags.keys).any()


def test_labels_are_as_frequent_as_their_probabilities():
    data = generate(50_000, seed=0)

    order = np.argsort(data.probabilities[:, 0])
    for part in np.array_split(order, 10):
        assert data.samples.labels[part].mean() == pytest.approx(data.probabilities[part].mean(), abs=0.03)


def test_the_best_known_auc_is_that_of_the_probabilities():
    data = generate(20_000, seed=0)

    assert data.best_known_auc() == area_under_curve(data.samples.labels[:, 0], data.probabilities[:, 0])
    assert data.best_known_auc(slice(15_000, None)) != data.best_known_auc(slice(0, 15_000))
    assert 0.75 < data.best_known_auc() < 0.9


def test_generated_samples_written_as_criteo_lines_read_back_the_same(tmp_path):
    data = generate(300, seed=5)
    with (tmp_path / "raw.txt").open("w") as file:
        write_lines(file, data.samples, data.counts)

    samples = read_criteo(tmp_path / "raw.txt")

    np.testing.assert_array_equal(samples.labels, data.samples.labels)
    np.testing.assert_array_equal(samples.dense, data.samples.dense)
    np.testing.assert_array_equal(samples.bags.keys, data.samples.bags.keys)


@pytest.mark.parametrize(
    ("left", "right", "act_together"), [(0, 1, True), (4, 5, True), (0, 2, False), (24, 25, False)]
)
def test_keys_of_some_slots_have_a_weight_as_a_pair(left, right, act_together):
    samples = generate(4, seed=0).samples
    dense, keys = samples.dense[[0] * 4], samples.bags.keys.reshape(4, 26)[[0] * 4]
    keys[[1, 3], left] += 1
    keys[[2, 3], right] += 1

    neither, left_changed, right_changed, both = true_logits(dense, keys, seed=0)

    surplus = (both - left_changed) - (right_changed - neither)
    assert (abs(surplus) > 1e-6) == act_together
    assert abs(left_changed - neither) > 1e-6


def test_no_row_of_a_table_starts_with_the_truth():
    embedding = open_document("ncf").graph.embeddings[0]
    keys = np.arange(4000, dtype=np.int64)
    truths = [true_uniform(keys, 2, seed) for seed in range(6)]
    truths += [planted_weights(keys, seed)[:, None] for seed in range(6)]

    for seed in range(6):
        table = EmbeddingTable("t", EmbeddingBagConfig(embedding.dim), seed=seed)
        make_rows(table, Bags.one_key_each(keys[:, None]))
        _, first_weights = table.rows()
        for truth in truths:
            together = np.corrcoef(np.concatenate([first_weights, truth], axis=1), rowvar=False)
            assert np.abs(together[: embedding.dim, embedding.dim :]).max() < 0.1


def test_the_first_weights_of_a_model_are_independent_of_the_truth():
    samples = generate(1, seed=0).samples
    keys = np.repeat(samples.bags.keys.reshape(1, 26), 2000, axis=0)
    keys[:, 25] = np.arange(2000) + 10**9
    model = CtrModel(open_document("ncf").graph, seed=0)
    logits = true_logits(np.repeat(samples.dense, 2000, axis=0), keys, seed=0)

    make_rows(model.tables[0], Bags.one_key_each(keys[:, 25:]))
    _, first_weights = model.tables[0].rows()

    for column in first_weights.T:
        assert abs(np.corrcoef(column, logits)[0, 1]) < 0.12
