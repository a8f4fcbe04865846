"""Which processes train together. Several processes are in test_processes.py."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from training import sok
from training.errors import SessionError
from training.sok import experiment, initialize


@pytest.fixture
def group():
    """A default process group with one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: sok.Variable(np.zeros((2, 2))), id="Variable"),
        pytest.param(lambda: sok.DynamicVariable(2), id="DynamicVariable"),
        pytest.param(lambda: sok.All2AllDenseEmbedding(8, 2, 1, 1), id="All2AllDenseEmbedding"),
        pytest.param(lambda: sok.DistributedEmbedding("sum", 8, 2, 1, 1), id="DistributedEmbedding"),
    ],
)
def test_a_variable_before_init_is_refused(make, monkeypatch, request):
    monkeypatch.setattr(initialize, "_start", None)

    with pytest.raises(SessionError, match=r"call sok\.init first"):
        make()


def test_init_takes_a_group_that_exists(group):
    sok.init(group)
    given = sok.Variable(np.zeros((2, 2)))
    sok.init()
    found = sok.Variable(np.zeros((2, 2)))

    assert given.placement.processes.group is found.placement.processes.group is group


def test_without_torchrun_a_process_is_alone():
    assert sok.Variable(np.zeros((2, 2))).placement.processes.group is None


def test_variables_of_several_groups_are_not_looked_up_together(group):
    sok.init(group)
    one = sok.Variable(np.zeros((2, 2)))
    dist.destroy_process_group()
    sok.init()
    other = sok.Variable(np.zeros((2, 2)))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    ids = sok.SparseTensor([[0, 0]], [1], [1, 1])

    with pytest.raises(ValueError, match="expected variables of the same processes, got those of several calls"):
        sok.lookup_sparse([one, other], [ids, ids])


def test_the_legacy_init_answers_ok():
    assert sok.Init(global_batch_size=65536) == "OK"
    assert sok.Init(global_batch_size=65536, seed=3) == "OK"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"global_batch_size": 0}, ValueError, "expected global_batch_size of at least 1, got 0"),
        ({"global_batch_size": 8.0}, TypeError, "expected global_batch_size as an int, got 8.0"),
        ({"global_batch_size": True}, TypeError, "expected global_batch_size as an int, got True"),
        ({"global_batch_size": 8, "seed": -1}, ValueError, "expected seed of at least 0, got -1"),
        ({"global_batch_size": 8, "seed": "a"}, TypeError, "expected seed as an int, got 'a'"),
    ],
)
def test_a_wrong_argument_of_the_legacy_init_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"Init: {message}"):
        sok.Init(**arguments)


@pytest.mark.parametrize("group", ["gloo", object()])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(TypeError, match="init: expected a process group that this process is in, got "):
        sok.init(group)


def test_the_seed_decides_the_first_weights():
    def draw(seed):
        sok.Init(global_batch_size=8, seed=seed)
        layers = [sok.All2AllDenseEmbedding(8, 2, 1, 1) for _ in range(2)]
        return torch.cat([layer(torch.tensor([[5]])) for layer in layers]).tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1)[0] != draw(1)[1]


def test_the_name_experiment_has_the_new_calls():
    assert experiment.lookup_sparse is sok.lookup_sparse
    assert set(experiment.__all__) < set(sok.__all__)
