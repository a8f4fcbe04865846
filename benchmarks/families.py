"""The four models that `benchmarks.predict` times: their graphs, and the same networks in eager PyTorch.

Sizes are those of HugeCTR's samples: wide and deep, DeepFM, DCN, and DLRM for the Kaggle data set. A graph's layers and
a module's weights have the same names.
"""

import torch
from torch import nn

SLOTS, FEATURES = 26, 13


def data(*sparse_tops, slots=SLOTS):
    inputs = [
        {"top": top, "type": "DistributedSlot", "max_feature_num_per_sample": 2 * slots, "slot_num": slots}
        for top in sparse_tops
    ]
    label, dense = {"top": "label", "label_dim": 1}, {"top": "dense", "dense_dim": FEATURES}
    return {"type": "Data", "name": "data", "label": label, "dense": dense, "sparse": inputs}


def embedding(name, bottom, dim):
    hparam = {"embedding_vec_size": dim, "combiner": "sum"}
    kind = "DistributedSlotSparseEmbeddingHash"
    return {"type": kind, "name": name, "bottom": bottom, "top": name, "sparse_embedding_hparam": hparam}


def layer(kind, name, bottom, **more):
    return {"type": kind, "name": name, "bottom": bottom, "top": name, **more}


def split(bottom, tops, ranges):
    return {"type": "Slice", "name": f"slice_{bottom}", "bottom": bottom, "top": tops, "ranges": ranges}


def fully_connected(name, bottom, width):
    return layer("InnerProduct", name, bottom, fc_param={"num_output": width})


def deep(bottom, widths, first=1):
    """Layers fc<n> and relu<n>, n from ``first``; the last top is ``relu<n>``."""
    layers = []
    for number, width in enumerate(widths, first):
        layers += [fully_connected(f"fc{number}", bottom, width), layer("ReLU", f"relu{number}", f"fc{number}")]
        bottom = f"relu{number}"
    return layers


def linear(weights, name):
    weight, bias = (torch.from_numpy(weights[f"{name}.{part}"]) for part in ("weight", "bias"))
    module = nn.Linear(*weight.shape)
    module.weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
    module.bias = nn.Parameter(bias, requires_grad=False)
    return module


def perceptron(weights, names):
    return nn.Sequential(*(part for name in names for part in (linear(weights, name), nn.ReLU())))


def bag(vectors):
    return nn.EmbeddingBag.from_pretrained(torch.from_numpy(vectors), mode="sum", include_last_offset=True)


class Wdl(nn.Module):
    """Wide and deep: a table of dim 1 for the wide part, one of dim 16 for the deep part; both see the same keys."""

    DIMS = (1, 16)
    LAYERS = (
        data("wide_data", "deep_data"),
        embedding("wide", "wide_data", 1),
        embedding("deep", "deep_data", 16),
        layer("Reshape", "wide_flat", "wide", leading_dim=SLOTS),
        layer("ReduceSum", "wide_sum", "wide_flat", axis=1),
        layer("Reshape", "deep_flat", "deep", leading_dim=SLOTS * 16),
        layer("Concat", "concat", ["deep_flat", "dense"]),
        *deep("concat", (1024, 1024)),
        fully_connected("fc3", "relu2", 1),
        layer("Add", "add", ["fc3", "wide_sum"]),
        layer("Sigmoid", "probability", "add"),
    )

    def __init__(self, weights, tables):
        super().__init__()
        self.wide, self.deep = (bag(vectors) for vectors in tables)
        self.hidden, self.top = perceptron(weights, ["fc1", "fc2"]), linear(weights, "fc3")

    def forward(self, dense, keys, offsets):
        samples = dense.shape[0]
        wide = self.wide(keys, offsets).view(samples, -1).sum(dim=1, keepdim=True)
        deep = torch.cat([self.deep(keys, offsets).view(samples, -1), dense], dim=1)
        return torch.sigmoid(self.top(self.hidden(deep)) + wide)


class DeepFm(nn.Module):
    """DeepFM: a factorization machine over 39 vectors of dim 10, and a deep network on the same vectors."""

    DIMS = (11,)
    LAYERS = (
        data("sparse"),
        embedding("embedding", "sparse", 11),
        layer("Reshape", "rows", "embedding", leading_dim=11),
        split("rows", ["vectors", "weights"], [[0, 10], [10, 11]]),
        layer("Reshape", "vectors_flat", "vectors", leading_dim=SLOTS * 10),
        layer("Reshape", "weights_flat", "weights", leading_dim=SLOTS),
        split("dense", ["dense1", "dense2"], [[0, FEATURES]] * 2),
        layer("WeightMultiply", "dense_vectors", "dense1", weight_dims=[FEATURES, 10]),
        layer("WeightMultiply", "dense_weights", "dense2", weight_dims=[FEATURES, 1]),
        layer("Concat", "all_vectors", ["vectors_flat", "dense_vectors"]),
        split("all_vectors", ["for_deep", "for_fm"], [[0, (SLOTS + FEATURES) * 10]] * 2),
        *deep("for_deep", (400, 400, 400)),
        fully_connected("fc4", "relu3", 1),
        layer("FmOrder2", "fm", "for_fm", out_dim=10),
        layer("ReduceSum", "second_order", "fm", axis=1),
        layer("Concat", "all_weights", ["weights_flat", "dense_weights"]),
        layer("ReduceSum", "first_order", "all_weights", axis=1),
        layer("Add", "add", ["fc4", "second_order", "first_order"]),
        layer("Sigmoid", "probability", "add"),
    )

    def __init__(self, weights, tables):
        super().__init__()
        self.rows = bag(tables[0])
        self.dense_vectors = torch.from_numpy(weights["dense_vectors.weight"])
        self.dense_weights = torch.from_numpy(weights["dense_weights.weight"])
        self.hidden, self.top = perceptron(weights, ["fc1", "fc2", "fc3"]), linear(weights, "fc4")

    def forward(self, dense, keys, offsets):
        rows = self.rows(keys, offsets).view(dense.shape[0], SLOTS, 11)
        vectors = torch.cat([rows[:, :, :10], dense[:, :, None] * self.dense_vectors], dim=1)
        first_order = rows[:, :, 10].sum(dim=1, keepdim=True) + dense @ self.dense_weights
        second_order = 0.5 * (vectors.sum(dim=1) ** 2 - (vectors**2).sum(dim=1)).sum(dim=1, keepdim=True)
        return torch.sigmoid(self.top(self.hidden(vectors.flatten(1))) + second_order + first_order)


class Dcn(nn.Module):
    """DCN: six cross layers and a deep network, on 26 vectors of dim 16."""

    DIMS = (16,)
    WIDTH = SLOTS * 16 + FEATURES
    LAYERS = (
        data("sparse"),
        embedding("embedding", "sparse", 16),
        layer("Reshape", "flat", "embedding", leading_dim=SLOTS * 16),
        layer("Concat", "concat", ["flat", "dense"]),
        split("concat", ["for_cross", "for_deep"], [[0, WIDTH]] * 2),
        layer("MultiCross", "cross", "for_cross", mc_param={"num_layers": 6}),
        *deep("for_deep", (1024, 1024)),
        layer("Concat", "both", ["relu2", "cross"]),
        fully_connected("fc3", "both", 1),
        layer("Sigmoid", "probability", "fc3"),
    )

    def __init__(self, weights, tables):
        super().__init__()
        self.rows = bag(tables[0])
        self.cross = [
            tuple(torch.from_numpy(weights[f"cross.{part}{level}"]) for part in ("weight", "bias"))
            for level in range(6)
        ]
        self.hidden, self.top = perceptron(weights, ["fc1", "fc2"]), linear(weights, "fc3")

    def forward(self, dense, keys, offsets):
        x0 = x = torch.cat([self.rows(keys, offsets).view(dense.shape[0], -1), dense], dim=1)
        for weight, bias in self.cross:
            x = x0 * (x @ weight)[:, None] + x + bias
        return torch.sigmoid(self.top(torch.cat([self.hidden(x0), x], dim=1)))


class Dlrm(nn.Module):
    """DLRM: products of all pairs of 27 vectors of dim 128, one of them made from the dense features."""

    DIMS = (128,)
    LAYERS = (
        data("sparse"),
        embedding("embedding", "sparse", 128),
        *deep("dense", (512, 256, 128)),
        layer("Interaction", "products", ["relu3", "embedding"]),
        *deep("products", (1024, 1024, 512, 256), first=4),
        fully_connected("fc8", "relu7", 1),
        layer("Sigmoid", "probability", "fc8"),
    )

    def __init__(self, weights, tables):
        super().__init__()
        self.rows = bag(tables[0])
        self.bottom = perceptron(weights, ["fc1", "fc2", "fc3"])
        self.top = nn.Sequential(perceptron(weights, ["fc4", "fc5", "fc6", "fc7"]), linear(weights, "fc8"))
        self.pairs = torch.tril_indices(SLOTS + 1, SLOTS + 1, offset=-1)

    def forward(self, dense, keys, offsets):
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None], self.rows(keys, offsets).view(-1, SLOTS, 128)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        joined = torch.cat(
            [bottom, products, bottom.new_zeros(len(bottom), 1)], dim=1
        )  # HugeCTR adds a column of zeros
        return torch.sigmoid(self.top(joined))


FAMILIES = {"wdl": Wdl, "deepfm": DeepFm, "dcn": Dcn, "dlrm": Dlrm}
