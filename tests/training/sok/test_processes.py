"""SOK's calls in several real processes against one process."""

import re

import numpy as np
import pytest
import torch

from tests.training.processes.test_processes import run
from tests.training.sok.compare import Demo, train_demo
from tests.training.sok.ids import sparse
from training import sok


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.long)])
def test_several_processes_get_the_numbers_of_one(processes, tmp_path):
    command = ("-m", "tests.training.sok.compare", tmp_path)

    out = run(*command, processes=processes, cwd=tmp_path)

    losses, alone = train_demo(0, 1)
    for rank in range(processes):
        found = re.search(f"rank {rank} of {processes}: all equal, losses (.*)", out)
        assert [float(loss) for loss in found[1].strip("[]").split(",")] == pytest.approx(losses, abs=1e-5)

    rng = np.random.default_rng(2)
    keys, bags = torch.tensor(rng.integers(0, 20, (8, 2, 3))), [rng.integers(0, 15, 3).tolist() for _ in range(16)]
    model = Demo(16 * processes)  # the processes had room for so many rows
    model.top = alone.top
    sok.load(tmp_path / "demo", [model.embedding_layer.embedding_variable, model.bags.embedding_variable])
    with torch.no_grad():
        torch.testing.assert_close(model(keys, sparse(bags)), alone(keys, sparse(bags)), atol=1e-5, rtol=1e-4)

    one, ids = sok.Variable(np.zeros((5, 2)), name="rows"), sok.DynamicVariable(2, name="ids")
    sok.load(tmp_path / "saved", [one, ids])
    assert one.tolist() == np.arange(10).reshape(5, 2).tolist()
    moved = {key: vector[0] for keys, vectors in ids.own_rows() for key, vector in zip(keys, vectors, strict=True)}
    assert moved == {key: 13 - sum(rank <= key for rank in range(processes)) for key in range(7)}
