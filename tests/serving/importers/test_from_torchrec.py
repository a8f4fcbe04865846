"""`from_torch` of a module with TorchRec's collections. A stand-in has the same interface.

To run the tests with TorchRec itself, install it and set HOTROW_TEST_TORCHREC=1.
"""

import os

import numpy as np
import pytest
import torch
from torch import nn

from serving.errors import ConfigError
from serving.importers import from_torch
from serving.opening import load_model
from tests.serving.importers.torch_modules import Head, draw_bags, request

if os.environ.get("HOTROW_TEST_TORCHREC"):
    import torchrec

    MEAN = torchrec.PoolingType.MEAN
else:
    from tests.serving.importers import torchrec_stand_in as torchrec

    MEAN = "mean"
FEATURES = ["users", "not_used", "clicked", "shown"]


def table(name, rows, features, **more):
    return torchrec.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=4, name=name, feature_names=features, **more)


class Dlrm(nn.Module):
    """A module in the way of TorchRec's DLRM."""

    def __init__(self, **more):
        super().__init__()
        tables = [table("t_ads", 40, ["shown", "clicked"]), table("t_users", 30, ["users"], pooling=MEAN)]
        self.sparse_arch = nn.ModuleDict({"bags": torchrec.EmbeddingBagCollection(tables=tables, **more)})
        self.wide = torchrec.EmbeddingBagCollection(tables=[table("t_ads", 40, ["clicked"])])
        self.over_arch = Head(3 * 4 + 3 + 4)

    def forward(self, dense_features, sparse_features):
        pooled = self.sparse_arch["bags"](sparse_features)
        by_feature = pooled.to_dict()
        vectors = torch.stack([by_feature[name] for name in pooled.keys()], dim=1)  # noqa: SIM118  no dictionary
        wide = self.wide(sparse_features).values()
        return torch.sigmoid(self.over_arch(dense_features, vectors.reshape(-1, 3, 4), wide))


def keyed_jagged(bags, **more):
    """Return a KeyedJaggedTensor with the keys of each feature of FEATURES per sample."""
    flat = [bag for of_feature in bags for bag in of_feature]
    values = torch.tensor([key for bag in flat for key in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bag in flat], dtype=torch.int32)
    return torchrec.KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths, **more)


@pytest.mark.usefixtures("exporter")
def test_a_collection_is_served(tmp_path):
    torch.manual_seed(0)
    module = Dlrm()
    example = (torch.zeros(2, 3), keyed_jagged([[[1], [2, 3]]] * 4))

    imported = from_torch(module, example, tmp_path, "ctr")

    assert imported.slots == (
        ("t_ads", "sparse_features['shown']"),
        ("t_ads", "sparse_features['clicked']"),
        ("t_users", "sparse_features['users']"),
        ("wide.embedding_bags.t_ads", "sparse_features['clicked']"),
    )
    assert imported.names[-3:] == ("shown", "clicked", "users")
    rng = np.random.default_rng(1)
    users, not_used, clicked, shown = (draw_bags(rng, rows, 50) for rows in (30, 1000, 40, 40))
    dense = rng.normal(size=(50, 3)).astype(np.float32)
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(dense), keyed_jagged([users, not_used, clicked, shown]))
    with load_model(imported.path) as session:
        served = session.predict(dense, *request(shown, clicked, users, clicked))
    assert expected.std() > 0.01
    np.testing.assert_allclose(served, expected.numpy(), atol=1e-6)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        tables = [table("t_ads", 40, ["shown", "clicked"]), table("t_users", 30, ["users"])]
        self.bags = torchrec.EmbeddingBagCollection(tables=tables, is_weighted=True)
        self.over_arch = Head(3 * 4)

    def forward(self, features):
        return torch.sigmoid(self.over_arch(self.bags(features).values()))


@pytest.mark.usefixtures("exporter")
def test_a_weighted_collection_is_served(tmp_path):
    torch.manual_seed(0)
    module, rng = Weighted(), np.random.default_rng(1)
    example = (keyed_jagged([[[1], [2, 3]]] * 4, weights=torch.rand(12)),)

    most = {"most_keys": {"t_ads": 3, "t_users": 4}}

    imported = from_torch(module, example, tmp_path, "weighted", **most)

    with pytest.raises(ConfigError, match="t_users: expected keys of each feature of this table in the example; in "):
        from_torch(module, (keyed_jagged([[[], []]] + [[[1], [2]]] * 3, weights=torch.rand(6)),), tmp_path, "w", **most)
    users, clicked, shown = (draw_bags(rng, rows, 50) for rows in (30, 40, 40))
    bags = dict(zip(FEATURES, (users, [[]] * 50, clicked, shown), strict=True))
    weights = {key: [rng.normal(size=len(bag)).astype(np.float32) for bag in own] for key, own in bags.items()}
    flat = torch.from_numpy(np.concatenate([of for own in weights.values() for of in own]))
    with torch.no_grad():
        expected = module.eval()(keyed_jagged(list(bags.values()), weights=flat))
    del bags["not_used"], weights["not_used"]
    with load_model(imported.path) as session:
        served = session.predict({**bags, **{f"{key}.weights": own for key, own in weights.items()}})
    assert expected.std() > 0.01
    np.testing.assert_allclose(served, expected.numpy(), atol=1e-6)


class WithLengths(Dlrm):
    def forward(self, dense_features, sparse_features):
        counts = sparse_features["users"].lengths()
        return super().forward(dense_features + counts[:, None].float(), sparse_features)


def test_lengths_as_features_are_refused(tmp_path):
    example = (torch.zeros(2, 3), keyed_jagged([[[1], [2]]] * 4))

    with pytest.raises(ConfigError, match=r"WithLengths: with other keys and the same rows.* no lengths of bags"):
        from_torch(WithLengths(), example, tmp_path, "ctr")
