"""Run docs/importing.md. Every recipe serves the answers of the PyTorch model."""

import contextlib
import re
import shlex
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from serving.cli.main import main
from serving.opening import load_model
from tests.tools import warm

pytestmark = pytest.mark.usefixtures("exporter")
PAGE = (Path(__file__).parents[2] / "docs" / "importing.md").read_text()
USER_ID = 1_000_003  # the factor on the page


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [block for found, block in fenced if found == language]


def recipes():
    """The commands by the name of the model they write."""
    commands = [line for block in blocks("") for line in block.splitlines()]
    return {line.rpartition("--name ")[2]: line for line in commands if line.startswith("hotrow import")}


class StandIn(nn.Module):
    """The parts of TorchRec's DLRM that the page uses, in plain PyTorch with the same names."""

    class Interaction(nn.Module):
        def forward(self, dense, sparse):
            rows = torch.cat([dense[:, None], sparse], dim=1)
            first, second = torch.triu_indices(4, 4, offset=1)
            return torch.cat([dense, torch.bmm(rows, rows.transpose(1, 2))[:, first, second]], dim=1)

    def __init__(self):
        super().__init__()
        bags = {"t_ads": nn.EmbeddingBag(1000, 8, mode="sum"), "t_users": nn.EmbeddingBag(500, 8, mode="sum")}
        collection = nn.ModuleDict({"embedding_bags": nn.ModuleDict(bags)})
        self.sparse_arch = nn.ModuleDict({"embedding_bag_collection": collection})
        self.dense_arch = nn.Sequential(nn.Linear(13, 8), nn.ReLU())
        self.inter_arch = self.Interaction()
        self.over_arch = nn.Linear(8 + 6, 1)

    def forward(self, dense, shown, clicked, users):
        bags = self.sparse_arch["embedding_bag_collection"]["embedding_bags"]
        sparse = torch.stack([bags["t_ads"](*shown), bags["t_ads"](*clicked), bags["t_users"](*users)], dim=1)
        return torch.sigmoid(self.over_arch(self.inter_arch(self.dense_arch(dense), sparse)))


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run the page's Python in one folder. Give the names it defines, and the folder."""
    folder = tmp_path_factory.mktemp("importing")
    torch.manual_seed(0)
    names = {"dlrm": StandIn(), "__name__": "session"}
    # the exporter warns of its own libraries
    with contextlib.chdir(folder), warnings.catch_warnings(action="ignore"):
        for block in blocks("python"):
            exec(compile(block, "importing.md", "exec"), names)
        from torch.distributed import checkpoint  # takes a second

        checkpoint.save(names["model"].state_dict(), checkpoint_id="checkpoint", no_dist=True)
        write_dump(names["model"], Path("dump") / "model.ebc")
    return names, folder


def write_dump(model, folder):
    """Write what DynamicEmb writes for tables that are sharded over two ranks by the key's remainder."""
    folder.mkdir(parents=True)
    for table in ("ads", "users"):
        vectors = getattr(model, table).weight.detach().numpy()
        for rank in (0, 1):
            np.arange(rank, len(vectors), 2).tofile(folder / f"{table}_emb_keys.rank_{rank}.world_size_2")
            vectors[rank::2].tofile(folder / f"{table}_emb_values.rank_{rank}.world_size_2")


def draw_bags(rng, rows, samples):
    """Draw one feature: keys and the offset of each sample. Some samples have no key."""
    sizes = rng.integers(0, 4, samples)
    return torch.from_numpy(rng.integers(0, rows, sizes.sum())), torch.from_numpy(np.cumsum(sizes) - sizes)


def check_answers(path, model, user_id):
    """Compare the served model with the PyTorch model on 50 samples."""
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(50, 13)).astype(np.float32)
    features = [draw_bags(rng, 1000, 50), draw_bags(rng, 1000, 50), draw_bags(rng, 500, 50)]
    with torch.no_grad():
        expected = model(torch.from_numpy(dense), *features).numpy()

    factors = (1, 1, user_id)
    bags = [
        torch.tensor_split(keys * factor, begins[1:]) for (keys, begins), factor in zip(features, factors, strict=True)
    ]
    by_sample = list(zip(*bags, strict=True))
    keys = torch.cat([bag for sample in by_sample for bag in sample]).numpy()
    row_ptrs = np.cumsum([0, *(len(bag) for sample in by_sample for bag in sample)])
    with load_model(path) as session:
        answer = session.predict(dense, keys, row_ptrs)

    assert np.ptp(expected) > 0.01  # equal answers for all samples would prove nothing
    np.testing.assert_allclose(answer, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_every_recipe_serves_what_the_pytorch_model_answers(session, name):
    names, folder = session
    with contextlib.chdir(folder):
        for line in before(name):
            assert warm.run(*shlex.split(line)[1:], timeout=250).returncode == 0
        if name == "from_hugectr" and not Path("models/from_numpy").exists():  # another process ran that test
            assert main(shlex.split(recipes()["from_numpy"])[1:]) == 0
        assert main(shlex.split(recipes()[name])[1:]) == 0

    model = names["dlrm"] if name == "from_torchrec" else names["model"]
    own_keys = name in ("from_numpy", "from_hugectr")
    check_answers(folder / "models" / name, model, USER_ID if own_keys else 1)


def before(name):
    """The commands in the same block as a recipe."""
    [block] = [block for block in blocks("") if recipes()[name] in block]
    return [line for line in block.splitlines() if line.startswith("python ")]


@pytest.mark.slow
def test_the_python_calls_do_the_same(session):
    names, folder = session

    assert names["version"] == Path("models/from_python/1")
    check_answers(folder / names["version"], names["model"], 1)


@pytest.mark.slow
def test_one_call_does_the_same(session):
    names, folder = session

    check_answers(folder / names["imported"].path, names["model"], 1)


@pytest.mark.slow
def test_a_dry_run_of_the_first_command_describes_its_tables_and_writes_nothing(session, capsys):
    _, folder = session
    with contextlib.chdir(folder):
        assert main([*shlex.split(recipes()["from_pytorch"])[1:], "--name", "tried", "--dry-run"]) == 0

    assert "table users: 1 slot, mean" in capsys.readouterr().out
    assert not (folder / "models" / "tried").exists()
