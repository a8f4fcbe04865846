"""`EmbeddingCollection`: rows that are not pooled, next to PyTorch's own."""

import numpy as np
import pytest
import torch
from torch import nn

from serving.importers import from_torch
from serving.opening import load_model
from training import EmbeddingBagConfig, EmbeddingCollection, optimizers

KEYS, OFFSETS = torch.tensor([5, 6, 5, 9]), torch.tensor([0, 3, 3, 4])
L = 4


def collection(**more):
    config = EmbeddingBagConfig(3, features=("seen", "item"), **more)
    return EmbeddingCollection({"items": config}, seed=1)


def test_it_returns_the_row_of_each_key():
    tables = collection()

    rows = tables({"seen": (KEYS, OFFSETS), "item": torch.tensor([[9, -1], [6, 5], [-1, -1]])})

    of_key = dict(zip(*(array.tolist() for array in tables.tables["items"].rows()), strict=True))
    assert rows["seen"].values().tolist() == [of_key[key] for key in KEYS.tolist()]
    assert rows["seen"].lengths().tolist() == [3, 0, 1]
    assert rows["item"].offsets().tolist() == [0, 1, 3, 3]
    zeros = [[0.0] * 3]
    padded = [[of_key[5], of_key[6]], zeros * 2, [of_key[9], *zeros]]
    assert rows["seen"].to_padded_dense(2).tolist() == padded
    assert rows["seen"].to_padded_dense().shape == (3, 3, 3)
    assert (rows["item"].to_padded_dense(2, 7.0)[2] == 7).all()


def test_rows_learn_as_those_of_pytorch():
    tables = collection(rows=10)
    table = nn.Embedding(10, 3, padding_idx=0)
    with torch.no_grad():
        table.weight[:] = torch.from_numpy(tables.tables["items"].rows()[1])
        table.weight[0] = 0
    padded = torch.tensor([[5, 6, 5], [0, 0, 0], [9, 0, 0]])
    optimizer, expected = optimizers.SGD(tables.parameters(), lr=0.5), torch.optim.SGD(table.parameters(), lr=0.5)

    for _ in range(3):
        for rows, one in (
            (tables({"seen": (KEYS, OFFSETS)})["seen"].to_padded_dense(3), optimizer),
            (table(padded), expected),
        ):
            one.zero_grad()
            scores = rows.sum(-1).masked_fill(padded == 0, -1e9).softmax(-1)
            (scores[..., None] * rows).square().sum().backward()
            one.step()

    keys, rows = tables.tables["items"].rows()
    np.testing.assert_allclose(rows[1:], table.weight[keys[1:]].detach(), atol=1e-6)


def test_weights_are_refused():
    with pytest.raises(ValueError, match="feature 'seen': expected keys without weights, because no rows are added up"):
        collection()({"seen": (KEYS, OFFSETS, torch.ones(4))})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = collection()

    def forward(self, seen, offsets, item):
        found = self.tables({"seen": (seen, offsets), "item": (item, torch.arange(item.shape[0] + 1))})
        rows, target = found["seen"].to_padded_dense(L), found["item"].to_padded_dense(1)
        is_key = torch.arange(L) < found["seen"].lengths()[:, None]
        weights = (rows @ target.mT)[..., 0].masked_fill(~is_key, -1e9).softmax(-1)
        return torch.sigmoid((weights[..., None] * rows * target).sum((1, 2)) * 9)


@pytest.mark.usefixtures("exporter")
def test_a_module_with_it_is_served(tmp_path):
    module = Model()
    module(KEYS, OFFSETS, torch.tensor([5, 6, 9]))  # makes rows

    imported = from_torch(module, (KEYS, OFFSETS, torch.tensor([5, 6, 9])), tmp_path, "ctr")

    assert imported.slots == (("items", "seen"), ("items", "item"))
    seen, item = [[5, 6, 9, 6], [], [9]], [6, 5, 9]
    flat, ends = torch.tensor([key for bag in seen for key in bag]), np.cumsum([0, *map(len, seen)])
    with torch.no_grad():
        expected = module.eval()(flat, torch.from_numpy(ends), torch.tensor(item)).numpy()
    with load_model(imported.path) as session:
        answers = session.predict({"seen": seen, "item": item})
    assert np.ptp(expected) > 1e-4
    np.testing.assert_allclose(answers[:, 0], expected, atol=1e-6)
