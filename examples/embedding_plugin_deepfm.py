"""Train the embedding plugin's DeepFM next to the same model with a plain PyTorch embedding, and serve it.

Run: python examples/embedding_plugin_deepfm.py [REPOSITORY]
"""

import argparse
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

import hotrow
from training import embedding_plugin as hugectr_tf_ops_v2
from training.optimizers import Adam
from training.synthetic.criteo_like import generate

# The document's rate of 0.1 diverges here. The document divides the mean loss by the batch size again, so its gradients
# are smaller than epsilon.
LEARNING_RATE, BETAS, EPSILON = 0.01, (0.9, 0.99), 1e-5


class Multiply(nn.Module):
    """Multiplies each dense feature by a vector of weights."""

    def __init__(self, in_units, out_units):
        super().__init__()
        self.w = nn.Parameter(nn.init.xavier_uniform_(torch.empty(in_units, out_units)))

    def forward(self, inputs):  # [B, F, 1] -> [B, F, out_units]
        return inputs * self.w


class DeepFM(nn.Module):
    """The document's DeepFM after its embedding layer, with the usual sign of the second order."""

    def __init__(self, dense_dim, slot_num, embedding_vec_size, deep_layers, dropout_rate):
        super().__init__()
        self.embedding_vec_size = embedding_vec_size
        self.dense_multi, self.dense_embedding = Multiply(dense_dim, 1), Multiply(dense_dim, embedding_vec_size)
        layers, width = [], (dense_dim + slot_num) * embedding_vec_size
        for units, rate in zip(deep_layers, dropout_rate, strict=True):
            layers += [nn.Linear(width, units), nn.Dropout(rate)]  # the document has no activation here
            width = units
        self.deep = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, dense_feature, sparse):  # [B, F], [B, slot_num, embedding_vec_size + 1]
        dense_0 = dense_feature[:, :, None]
        dense_mul, dense_emb = self.dense_multi(dense_0), self.dense_embedding(dense_0)
        sparse_emb, sparse_1 = sparse.split([self.embedding_vec_size, 1], dim=2)
        first_out = torch.cat([dense_mul, sparse_1], dim=1).sum(dim=1)  # [B, 1]
        second = torch.cat([dense_emb, sparse_emb], dim=1)
        square_sum, sum_square = second.sum(dim=1).square(), second.square().sum(dim=1)
        second_out = 0.5 * (square_sum - sum_square).sum(dim=1, keepdim=True)
        return torch.sigmoid(self.deep(second.flatten(1)) + first_out + second_out)


class DeepFMPluginEmbedding(nn.Module):
    """The document's DeepFM_PluginEmbedding."""

    def __init__(self, init_value, slot_num, gpus, batch_size, batch_size_eval, network, seed=123):
        super().__init__()
        hugectr_tf_ops_v2.init(
            visible_gpus=gpus, seed=seed, batch_size=batch_size, batch_size_eval=batch_size_eval, key_type="int64"
        )
        self.embedding_name = hugectr_tf_ops_v2.create_embedding(
            init_value=init_value,
            name_="hugectr_embedding",
            embedding_type="distributed",
            optimizer_type="Adam",
            max_vocabulary_size_per_gpu=len(init_value) // len(gpus) + 1,
            opt_hparams=[LEARNING_RATE, *BETAS, EPSILON],
            update_type="Local",
            slot_num=slot_num,
            max_nnz=1,
            max_feature_num=slot_num,
            embedding_vec_size=init_value.shape[1],
            combiner="sum",
        )
        self.bp_trigger = nn.Parameter(torch.ones(1))
        self.network = network

    def forward(self, dense_feature, each_replica, training=True):
        sparse = hugectr_tf_ops_v2.fprop(self.embedding_name, 0, each_replica, self.bp_trigger, is_training=training)
        return self.network(dense_feature, sparse)


class DeepFMOriginalEmbedding(nn.Module):
    """The same with an embedding of PyTorch."""

    def __init__(self, init_value, network):
        super().__init__()
        rows = torch.from_numpy(init_value)
        self.embedding = nn.EmbeddingBag.from_pretrained(rows.clone(), freeze=False, mode="sum", sparse=True)
        self.network = network

    def forward(self, dense_feature, keys):  # [B, F], [B, slot_num]
        sparse = self.embedding(keys.reshape(-1, 1)).reshape(*keys.shape, -1)
        return self.network(dense_feature, sparse)


def samples(rows, seed):
    """Generate labels [B, 1], dense features [B, 13] and keys [B, 26], which are numbered from 0, and their number."""
    generated = generate(rows, seed).samples
    known, keys = np.unique(generated.bags.keys, return_inverse=True)
    keys = torch.from_numpy(keys.reshape(rows, -1).astype(np.int64))
    return torch.from_numpy(generated.labels), torch.from_numpy(generated.dense), keys, len(known)


def convert(model, keys, training=True):
    """Pass keys [B, slot_num] to the plugin, without the padding."""
    reshape_keys = keys.reshape(-1, 1)
    indices = (reshape_keys != -1).nonzero()
    values, row_indices = reshape_keys[tuple(indices.T)], indices.T
    return hugectr_tf_ops_v2.broadcast_then_convert_to_csr(
        model.embedding_name, row_indices, values, T=[torch.int32], is_training=training
    )


def train_step(model, optimizers, dense, sparse, labels, seed):
    """Return the loss of a batch. The seed makes both models drop the same neurons."""
    torch.manual_seed(seed)
    loss = nn.functional.binary_cross_entropy(model(dense, sparse), labels)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def write_files(model, dense_dim, slot_num, folder):
    """Write the embedding as ``rows`` and the network after it as ``dense.onnx``."""
    hugectr_tf_ops_v2.save(model.embedding_name, folder / "rows")
    with warnings.catch_warnings(action="ignore"):  # the exporter warns of its own libraries
        torch.onnx.export(
            model.network.eval(),
            (torch.zeros(2, dense_dim), torch.zeros(2, slot_num, model.network.embedding_vec_size + 1)),
            folder / "dense.onnx",
            input_names=["dense", model.embedding_name],
            dynamic_shapes=({0: torch.export.Dim("B")},) * 2,
            verbose=False,
        )


def main():
    parser = argparse.ArgumentParser(description="Train the embedding plugin's DeepFM, and serve it.")
    parser.add_argument("repository", type=Path, nargs="?", default="model_repository", help="default: %(default)s")
    repository = parser.parse_args().repository
    batch_size, steps, held_out, slot_num, dense_dim = 128, 60, 500, 26, 13
    labels, dense, keys, vocabulary_size = samples(batch_size * steps + held_out, seed=0)
    init_value = np.random.default_rng(0).uniform(-0.05, 0.05, (vocabulary_size, 11)).astype(np.float32)
    shape = {"embedding_vec_size": 10, "deep_layers": [64] * 3, "dropout_rate": [0.5] * 3}
    torch.manual_seed(0)
    networks = [DeepFM(dense_dim, slot_num, **shape) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())

    hugectr_tf_ops_v2.reset()
    model = DeepFMPluginEmbedding(init_value, slot_num, [0], batch_size, held_out, networks[0])
    original = DeepFMOriginalEmbedding(init_value, networks[1])
    optimizers = [Adam(model.parameters(), lr=0.001)]
    of_original = [
        Adam(original.network.parameters(), lr=0.001),
        Adam(original.embedding.parameters(), LEARNING_RATE, *BETAS, EPSILON),
    ]
    losses = []
    for step in range(steps):
        batch = slice(step * batch_size, (step + 1) * batch_size)
        loss = train_step(model, optimizers, dense[batch], convert(model, keys[batch]), labels[batch], step)
        plain = train_step(original, of_original, dense[batch], keys[batch], labels[batch], step)
        losses.append((loss, plain))
        if (step + 1) % 20 == 0:
            mean, of_plain = np.mean(losses[-20:], axis=0)
            print(f"step: {step + 1}, loss: {mean:.4f}, with a plain embedding: {of_plain:.4f}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(model, dense_dim, slot_num, folder)
        plan = hotrow.plan_import(folder / "dense.onnx", "sum", {model.embedding_name: folder / "rows"})
        version = hotrow.write_model(plan, repository, "deepfm_plugin")
    rest = slice(-held_out, None)
    with torch.no_grad():
        expected = model.eval()(dense[rest], convert(model, keys[rest], training=False), training=False)
    with hotrow.load_model(version) as session:
        served = session.predict(dense[rest].numpy(), keys[rest].flatten().numpy(), np.arange(keys[rest].numel() + 1))
    print(f"{version} answers as the trained model: {np.allclose(served, expected, atol=1e-5)}")


if __name__ == "__main__":
    main()
