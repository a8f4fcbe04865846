"""The document's DeepFM, in the example: against a plain embedding, and from training to a served model."""

import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from serving import load_model
from serving.cli.main import main
from training import embedding_plugin as plugin
from training.optimizers import Adam

ROOT = Path(__file__).parents[3]
EXAMPLE, PAGE = ROOT / "examples" / "embedding_plugin_deepfm.py", ROOT / "docs" / "embedding-plugin.md"
BATCH_SIZE, STEPS, SLOT_NUM = 64, 15, 26


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("gpus", [[0], [0, 1]])
def test_the_losses_are_those_of_a_plain_embedding_in_every_step(example, gpus):
    labels, dense, keys, vocabulary_size = example["samples"](BATCH_SIZE * STEPS, seed=1)
    init_value = np.random.default_rng(0).uniform(-0.05, 0.05, (vocabulary_size, 11)).astype(np.float32)
    torch.manual_seed(0)
    networks = [example["DeepFM"](13, SLOT_NUM, 10, [32, 32], [0.0, 0.0]) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    model = example["DeepFMPluginEmbedding"](init_value, SLOT_NUM, gpus, BATCH_SIZE, BATCH_SIZE, networks[0])
    original = example["DeepFMOriginalEmbedding"](init_value, networks[1])
    optimizer = Adam(model.parameters(), lr=0.001)
    of_original = [
        Adam(networks[1].parameters(), lr=0.001),
        Adam(original.embedding.parameters(), 0.01, 0.9, 0.99, 1e-5),
    ]

    losses = []
    for step in range(STEPS):
        batch = slice(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        rows = torch.arange(BATCH_SIZE * SLOT_NUM)
        each = plugin.broadcast_then_convert_to_csr(model.embedding_name, rows, keys[batch].flatten(), gpus)
        vectors = [plugin.fprop(model.embedding_name, r, each, model.bp_trigger) for r in range(len(gpus))]
        answer = model.network(dense[batch], torch.cat(vectors))
        loss = torch.nn.functional.binary_cross_entropy(answer, labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plain = example["train_step"](original, of_original, dense[batch], keys[batch], labels[batch], step)
        losses.append((loss.item(), plain))

    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-4)
    assert model.bp_trigger.tolist() == [1.0]


@pytest.mark.usefixtures("exporter")
def test_the_command_of_the_page_imports_the_files_of_the_example(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = torch.arange(4 * SLOT_NUM).reshape(4, SLOT_NUM) % 50
    dense = torch.rand(4, 13, generator=torch.Generator().manual_seed(0))
    init_value = np.random.default_rng(0).uniform(-1, 1, (50, 11)).astype(np.float32)
    torch.manual_seed(0)
    network = example["DeepFM"](13, SLOT_NUM, 10, [16], [0.5])
    model = example["DeepFMPluginEmbedding"](init_value, SLOT_NUM, [0], 4, 4, network)
    example["write_files"](model, 13, SLOT_NUM, tmp_path)
    [command] = re.findall(r"^hotrow (import .*)$", PAGE.read_text(), flags=re.MULTILINE)

    assert main(shlex.split(command)) == 0

    with load_model(tmp_path / "model_repository" / "deepfm" / "1") as session:
        served = session.predict(dense.numpy(), keys.flatten().numpy(), np.arange(keys.numel() + 1))
    expected = model.eval()(dense, example["convert"](model, keys, training=False), training=False)
    assert np.ptp(served) > 0.01
    np.testing.assert_allclose(served, expected.detach(), atol=1e-5)
