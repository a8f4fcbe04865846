"""The families against their papers' formulas, written out in NumPy: a graph wired wrongly trains well all the same."""

from itertools import combinations

import numpy as np
import pytest

from training.built_in import built_in_graphs
from training.ctr_model import CtrModel
from training.document import open_document
from training.synthetic import generate
from training.trainer import predict_logits, train


def fc(w, name, x):
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def deep(w, names, x):
    for name in names:
        x = np.maximum(fc(w, name, x), 0)
    return x


def side_by_side(*tensors):
    return np.concatenate([tensor.reshape(len(tensor), -1) for tensor in tensors], axis=1)


def dcn(w, dense, rows):
    """Wang et al. 2017: cross and deep network side by side."""
    x0 = x = side_by_side(rows, dense)
    for level in range(3):
        x = x0 * (x @ w[f"multicross1.weight{level}"])[:, None] + w[f"multicross1.bias{level}"] + x
    return fc(w, "fc3", side_by_side(deep(w, ["fc1", "fc2"], x0), x))


def dcn_v2(w, dense, rows):
    """Wang et al. 2021: a deep network on top of a cross network of low rank."""
    x0 = x = side_by_side(rows, dense)
    for level in range(3):
        u, v, bias = (w[f"multicross1.{name}{level}"] for name in ("u", "v", "bias"))
        assert u.shape == (429, 64)
        x = x0 * (x @ u @ v + bias) + x
    return fc(w, "fc3", deep(w, ["fc1", "fc2"], x))


def wdl(w, dense, rows):
    """Cheng et al. 2016: a linear model of the keys plus a deep network."""
    vectors, weights = rows[:, :, :16], rows[:, :, 16]
    return weights.sum(axis=1, keepdims=True) + fc(w, "fc3", deep(w, ["fc1", "fc2"], side_by_side(vectors, dense)))


def deepfm(w, dense, rows):
    """Guo et al. 2017: a factorization machine of keys and dense features plus a deep network on its vectors."""
    dense_vectors = dense[:, :, None] * w["weight_multiply1.weight"]
    vectors = np.concatenate([rows[:, :, :16], dense_vectors], axis=1)
    first_order = rows[:, :, 16].sum(axis=1) + dense @ w["weight_multiply2.weight"][:, 0]
    second_order = sum((vectors[:, i] * vectors[:, j]).sum(axis=1) for i, j in combinations(range(39), 2))
    return (first_order + second_order)[:, None] + fc(w, "fc3", deep(w, ["fc1", "fc2"], side_by_side(vectors)))


def dlrm(w, dense, rows):
    """Naumov et al. 2019: products of all pairs of vectors, one of them made from the dense features."""
    bottom = deep(w, ["fc1", "fc2"], dense)
    vectors = np.concatenate([bottom[:, None], rows], axis=1)
    products = [(vectors[:, i] * vectors[:, j]).sum(axis=1) for i in range(27) for j in range(i)]
    joined = side_by_side(bottom, np.stack(products, axis=1), np.zeros(len(dense)))  # HugeCTR adds a column of zeros
    return fc(w, "fc5", deep(w, ["fc3", "fc4"], joined))


FORMULAS = {"dcn": dcn, "dcn_v2": dcn_v2, "deepfm": deepfm, "dlrm": dlrm, "wdl": wdl}


@pytest.mark.parametrize("name", built_in_graphs())
def test_a_family_computes_its_papers_formula(name):
    samples = generate(1000, seed=0).samples
    document = open_document(name)
    model = CtrModel(document.graph, seed=0)
    list(train(model, samples, samples, epochs=1, batch_size=50, schedule=document.schedule, seed=0))

    weights = {key: weight.astype(np.float64) for key, weight in model.dense_weights().items()}
    table = dict(zip(*(array.tolist() for array in model.tables[0].rows()), strict=True))
    rows = np.array([[table[key] for key in sample] for sample in samples.keys[:100].tolist()])
    logits = FORMULAS[name](weights, samples.dense[:100].astype(np.float64), rows)

    np.testing.assert_allclose(predict_logits(model, samples[:100]), logits[:, 0], rtol=0, atol=1e-4)
