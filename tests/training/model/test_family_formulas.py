"""The families against their papers' formulas, written out by hand in float64, NumPy for some and PyTorch for others:
a graph wired wrongly trains well all the same.
"""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import serving
from training.built_in import built_in_graphs
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.export import export_model
from training.model.fitting import Sizes, fitted
from training.model.sequences import Sequences
from training.model.trainer import train
from training.samples import Bags, Samples
from training.synthetic.generator import generate_for

F = torch.nn.functional


def fc(w, name, x):
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def deep(w, names, x):
    for name in names:
        x = np.maximum(fc(w, name, x), 0)
    return x


def side_by_side(*tensors):
    return np.concatenate([tensor.reshape(len(tensor), -1) for tensor in tensors], axis=1)


def dcn(w, dense, rows):
    """Wang et al. 2017: a cross network and a deep network, concatenated."""
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


def neumf(w, dense, user, item):
    """He et al. 2017: a weighted product of vectors, and a network of other vectors of the same user and item."""
    (user_gmf, user_mlp), (item_gmf, item_mlp) = (np.split(rows[:, 0], [8], axis=1) for rows in (user, item))
    mlp = deep(w, ["fc1", "fc2", "fc3"], side_by_side(user_mlp, item_mlp))
    return fc(w, "fc4", side_by_side(user_gmf * item_gmf, mlp))


def mmoe(w, dense, profile, history):
    """Ma et al. 2018: each task's tower reads the experts through its own softmax gate."""
    x = side_by_side(profile, history, dense)
    weights, biases = (np.split(w[f"experts_fc.{name}"], 4, axis=-1) for name in ("weight", "bias"))
    experts = [np.maximum(x @ weight + bias, 0) for weight, bias in zip(weights, biases, strict=True)]
    logits = []
    for task in (1, 2):
        gate = torch.softmax(torch.tensor(fc(w, f"gate{task}_fc", x)), dim=1).numpy()
        mixture = sum(gate[:, k : k + 1] * expert for k, expert in enumerate(experts))
        logits.append(fc(w, f"tower{task}_fc2", deep(w, [f"tower{task}_fc1"], mixture)))
    return side_by_side(*logits)


def linear(w, name, x):
    return F.linear(x, torch.tensor(w[f"{name}.weight"]).T, torch.tensor(w[f"{name}.bias"]))


def din(w, dense, user, goods, categories):
    """Zhou et al. 2018: a visitor's history, weighted by its fit to the target; weights need not sum to 1."""
    items = torch.tensor(np.concatenate([goods, categories], axis=2))
    target, interest = items[:, 10], 0
    for past in items[:, :10].unbind(dim=1):
        pair = torch.cat([target, past, target - past, target * past], dim=1)
        interest = interest + linear(w, "attention_fc2", torch.sigmoid(linear(w, "attention_fc1", pair))) * past
    x = torch.cat([torch.tensor(user[:, 0]), interest, target], dim=1)
    for layer in (1, 2):  # Dice: a gate of the running statistics
        x = linear(w, f"fc{layer}", x)
        mean, var, gamma, beta = (
            torch.tensor(w[f"dice{layer}_norm.{key}"]) for key in ("mean", "var", "gamma", "beta")
        )
        x = x * torch.sigmoid(F.batch_norm(x, mean, var, gamma, beta, eps=1e-5))
    return linear(w, "fc3", x).numpy()


def bst(w, dense, user, goods, categories, ages):
    """Chen et al. 2019: one transformer block over the target and the history."""
    x = torch.tensor(np.concatenate([goods, categories, ages], axis=2))
    is_there = torch.arange(11) < torch.tensor(dense)
    q, k, v = (linear(w, name, x).unflatten(2, (4, 8)).transpose(1, 2) for name in ("queries", "keys", "values"))
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=is_there[:, None, None, :])
    norm = {n: [torch.tensor(w[f"norm{n}.{key}"]) for key in ("gamma", "beta")] for n in (1, 2)}
    x = F.layer_norm(x + linear(w, "attention", heads.transpose(1, 2).flatten(2)), (32,), *norm[1])
    forward = linear(w, "feed_forward2", F.relu(linear(w, "feed_forward1", x)))
    x = F.layer_norm(x + forward, (32,), *norm[2]) * is_there[:, :, None]
    x = torch.cat([torch.tensor(user[:, 0]), x.flatten(1)], dim=1)
    return linear(w, "fc3", F.relu(linear(w, "fc2", F.relu(linear(w, "fc1", x))))).numpy()


FORMULAS = {
    "bst": bst, "dcn": dcn, "dcn_v2": dcn_v2, "deepfm": deepfm, "din": din, "dlrm": dlrm, "mmoe": mmoe, "ncf": neumf,
    "wdl": wdl,
}  # fmt: skip

AVERAGED = ["sparse_embedding_history"]


@pytest.fixture(scope="module", params=built_in_graphs())
def family(request, tmp_path_factory):
    """A family after a short training, its exported version, and its training samples."""
    document = open_document(request.param)
    samples = generate_for(document.graph, 1000, seed=0).samples
    model = CtrModel(document.graph, seed=0, label_weights=document.label_weights)
    list(train(model, samples, samples, epochs=1, batch_size=50, schedule=document.schedule, seed=0))
    version = export_model(model, document.document, tmp_path_factory.mktemp("models"), request.param)
    return SimpleNamespace(name=request.param, graph=document.graph, model=model, version=version, samples=samples)


def pooled(embedding, table, bags):
    """Sum or average the rows of each bag, key by key. An untrained key counts as zeros."""
    rows = dict(zip(*(array.tolist() for array in table.rows()), strict=True))
    vectors = np.zeros((len(bags.row_ptrs) - 1, embedding.dim))
    for bag, (begin, end) in enumerate(zip(bags.row_ptrs[:-1], bags.row_ptrs[1:], strict=True)):
        for key in bags.keys[begin:end].tolist():
            vectors[bag] += rows.get(key, 0.0)
        if embedding.table in AVERAGED and end > begin:
            vectors[bag] /= end - begin
    return vectors.reshape(-1, embedding.slots, embedding.dim)


def probabilities(family, samples):
    weights = {key: weight.astype(np.float64) for key, weight in family.model.dense_weights().items()}
    bags = samples.bags.split([entry.slots for entry in family.graph.sparse])
    tables = map(pooled, family.graph.embeddings, family.model.tables, bags)
    return 1 / (1 + np.exp(-FORMULAS[family.name](weights, samples.dense.astype(np.float64), *tables)))


def odd_samples(family):
    """Samples with empty slots, several keys per slot, and untrained keys, unlike generated samples."""
    rng, rows = np.random.default_rng(1), 60
    parts = []
    for entry, table in zip(family.graph.sparse, family.model.tables, strict=True):
        totals = rng.integers(0, entry.max_keys_per_sample + 1, rows)
        sizes = rng.multinomial(totals, np.full(entry.slots, 1 / entry.slots))
        keys = rng.choice(table.rows()[0], sizes.sum())
        keys[::9] += 2**50
        parts.append(Bags(keys, np.concatenate([[0], np.cumsum(sizes)]), entry.slots))
    dense = rng.integers(1, 12, (rows, family.graph.dense_dim)).astype(np.float32)
    return Samples(np.zeros((rows, family.graph.label_dim), np.float32), dense, Bags.side_by_side(parts))


@pytest.mark.parametrize("kind", ["generated", "odd"])
def test_a_served_family_computes_its_papers_formula(family, kind):
    samples = family.samples[:100] if kind == "generated" else odd_samples(family)

    with serving.load_model(family.version) as session:
        predictions = session.predict(samples.dense, samples.bags.keys, samples.bags.row_ptrs)

    assert predictions.shape == (len(samples), family.graph.label_dim)
    np.testing.assert_allclose(predictions, probabilities(family, samples), rtol=0, atol=1e-5)
    assert (np.ptp(predictions, axis=0) > 0.01).all()


@pytest.mark.parametrize("name", ["bst", "din"])
def test_a_network_of_raw_features_reads_histories_of_any_length(name, tmp_path):
    sequences = Sequences(pairs=(("seen", "item"),), others=("user",), positions=10)
    document = fitted(open_document(name), Sizes(1, 0, 1, ("label",), dim=32, sequences=sequences))
    rng, rows, target = np.random.default_rng(0), 40, 0 if name == "bst" else 10
    lengths = np.concatenate([[0, 10], rng.integers(0, 11, rows - 2)])
    sizes = np.stack([np.ones(rows, np.int64), lengths], axis=1)[:, :: 1 if name == "bst" else -1]
    items = Bags(rng.integers(0, 30, sizes.sum()), np.concatenate([[0], sizes.reshape(-1).cumsum()]), 2)
    users = Bags.one_key_each(rng.integers(0, 9, (rows, 1)))
    labels = rng.integers(0, 2, (rows, 1)).astype(np.float32)
    samples = Samples(labels, np.empty((rows, 0), np.float32), Bags.side_by_side([users, items]))
    model = CtrModel(document.graph, seed=0)
    for _ in range(9):
        model.train_batch(samples, 0.02)

    version = export_model(model, document.document, tmp_path, name)

    with serving.load_model(version) as session:
        predictions = session.predict(samples.dense, samples.bags.keys, samples.bags.row_ptrs)
    of_key, goods = (
        dict(zip(*(array.tolist() for array in model.tables[1].rows()), strict=True)),
        np.zeros((rows, 11, 32)),
    )
    for sample, (begin, end) in enumerate(zip(items.row_ptrs[:-1:2], items.row_ptrs[2::2], strict=True)):
        vectors = np.array([of_key[key] for key in items.keys[begin:end].tolist()])
        own, past = (vectors[0], vectors[1:]) if name == "bst" else (vectors[-1], vectors[:-1])
        goods[sample, target] = own
        goods[sample, 1 - target // 10 :][: len(past)] = past
    weights = {key: weight.astype(np.float64) for key, weight in model.dense_weights().items()}
    user, none = pooled(document.graph.embeddings[0], model.tables[0], users), np.zeros((rows, 11, 0))
    expected = FORMULAS[name](weights, 1.0 + lengths[:, None], user, goods, *([none] * (2 if name == "bst" else 1)))
    np.testing.assert_allclose(predictions, 1 / (1 + np.exp(-expected)), atol=1e-5)
    assert np.ptp(predictions) > 0.01
