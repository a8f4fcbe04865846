"""A shard: steps against PyTorch's optimizers in float64, the least recently used rows, bounds, and checkpoints."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.errors import ModelFileError, OutputError
from tests.training.persia.cluster import SGD as FACTS
from tests.training.persia.cluster import Direct, feature, start
from training.errors import SessionError
from training.optimizers import RowWiseAdaGrad
from training.persia.checkpoint import CheckpointFacts, load_rows
from training.persia.config import EmbeddingConfig
from training.persia.embedding_server import EmbeddingServer
from training.persia.signs import servers_of
from training.persia.sparse.optim import SGD, Adagrad, Adam

ONE = EmbeddingConfig({"a": feature("a", 1, dim=4)})
TWO = EmbeddingConfig({"a": feature("a", 1, dim=4), "b": feature("b", 2, dim=2)})


EARLIER = Path(__file__).parent / "earlier" / "batch-1"  # a checkpoint of two servers with ``TWO``


def dump(folder, roles, config=ONE, optimizer=FACTS):
    steps = [role.call("dump", folder=str(folder)).facts["step"] for role in roles]
    CheckpointFacts(1, max(steps), optimizer, config, len(roles)).write(folder)


def look_up(server, keys, dim=4):
    return server.call("look_up", {str(dim): np.array(keys, np.int64)}).arrays[str(dim)]


def update(server, keys, gradients, dim=4):
    arrays = {f"keys {dim}": np.array(keys, np.int64), f"gradients {dim}": np.array(gradients, np.float32)}
    server.call("update", arrays)


OPTIMIZERS = [
    (SGD(0.1), lambda rows: torch.optim.SGD(rows, 0.1)),
    (SGD(0.1, momentum=0.8), lambda rows: torch.optim.SGD(rows, 0.1, momentum=0.8)),
    (SGD(0.1, 0.8, 0.3), lambda rows: torch.optim.SGD(rows, 0.1, momentum=0.8, weight_decay=0.3)),
    (Adagrad(lr=0.1), lambda rows: torch.optim.Adagrad(rows, 0.1, initial_accumulator_value=0.01, eps=1e-10)),
    (
        Adagrad(0.1, 0.5, 0.3, eps=1e-3),
        lambda rows: torch.optim.Adagrad(rows, 0.1, initial_accumulator_value=0.5, weight_decay=0.3, eps=1e-3),
    ),
    (Adagrad(0.1, 0.5, eps=1e-3, vectorwise_shared=True), lambda rows: RowWiseAdaGrad(rows, 0.1, 0.5, 1e-3)),
    (Adam(0.1), lambda rows: torch.optim.Adam(rows, 0.1)),
    (Adam(0.1, (0.5, 0.6), 0.3, 1e-2), lambda rows: torch.optim.Adam(rows, 0.1, (0.5, 0.6), 1e-2, 0.3)),
]


@pytest.mark.parametrize(("ours", "peer"), OPTIMIZERS)
def test_steps_are_those_of_pytorch(ours, peer):
    [server], _ = start(1, ONE, optimizer=json.loads(json.dumps(ours.facts())))
    rng = np.random.default_rng(0)
    keys = [5, -7, 100]
    rows = torch.tensor(look_up(server, keys), dtype=torch.float64, requires_grad=True)
    optimizer = peer([rows])

    for _ in range(20):
        gradients = rng.normal(size=(3, 4))
        rows.grad = torch.tensor(gradients)
        optimizer.step()
        # the server sums the gradients of a key that occurs twice
        update(server, [5, *keys], [gradients[0] / 4, gradients[0] * 3 / 4, *gradients[1:]])

    # float32 against float64, over 20 steps
    np.testing.assert_allclose(look_up(server, keys), rows.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-1), r"SGD: expected lr from 0 to 3\.40282e\+38, got -1"),
        (lambda: SGD(float("inf")), "SGD: expected lr from 0 to .*, got inf"),
        (lambda: SGD(0.1, weight_decay=float("nan")), "SGD: expected weight_decay from 0 to .*, got nan"),
        (lambda: Adam(betas=(0.9,)), r"Adam: expected betas as two numbers, got \(0.9,\)"),
        (lambda: Adam(eps=float("inf")), "Adam: expected eps from .*, got inf"),
        (lambda: SGD(0.1, momentum=1.0), "momentum_factor must be at least 0 and below 1"),
        (lambda: Adam(betas=(0.9, 1.0)), "beta2 must be at least 0 and below 1"),
        (lambda: Adam(eps=0), "epsilon must be above 0"),
        (lambda: Adagrad(initial_accumulator_value=-1), "initial_accumulator must be at least 0"),
        (lambda: Adagrad(g_square_momentum=0.9), "Adagrad: expected g_square_momentum = 1, got 0.9"),
    ],
)
def test_an_optimizer_that_is_out_of_range_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD("0.1"), "SGD: expected lr as a number, got '0.1'"),
        (lambda: SGD(0.1, momentum="0.9"), "SGD: expected momentum as a number, got '0.9'"),
        (lambda: Adam(betas=(0.9, None)), "Adam: expected betas as a number, got None"),
        (lambda: Adagrad(eps="1"), "Adagrad: expected eps as a number, got '1'"),
        (lambda: Adagrad(initial_accumulator_value="1"), "Adagrad: expected initial_accumulator_value as a number"),
    ],
)
def test_an_argument_of_an_optimizer_that_is_no_number_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_numbers_of_numpy_are_sent_as_json():
    half = np.float32(0.5)

    for optimizer, same in (
        (SGD(half, half, half), SGD(0.5, 0.5, 0.5)),
        (Adam(half, (half, half), half, half), Adam(0.5, (0.5, 0.5), 0.5, 0.5)),
        (Adagrad(half, half, half, eps=half), Adagrad(0.5, 0.5, 0.5, eps=0.5)),
    ):
        assert json.loads(json.dumps(optimizer.facts())) == same.facts()


def test_first_weights_depend_on_the_key_only():
    answers = []
    for _ in range(2):
        [server], _ = start(1, ONE, initialization=[-0.25, 0.5])
        look_up(server, np.random.default_rng(len(answers)).integers(0, 99, 7))
        answers.append(look_up(server, range(1000)))

    np.testing.assert_array_equal(*answers)
    assert -0.25 <= answers[0].min() < -0.24
    assert 0.49 < answers[0].max() < 0.5


def test_a_full_server_drops_the_row_that_was_looked_up_least_recently():
    [server], _ = start(1, ONE, capacity=3)
    look_up(server, [1, 2, 3])
    update(server, [1, 2, 3], np.ones((3, 4)))
    moved = look_up(server, [1])
    look_up(server, [4])  # drops 2

    table = server.role._tables[4]
    assert (table.find(np.array([1, 2, 3, 4])) >= 0).tolist() == [True, False, True, True]
    np.testing.assert_array_equal(look_up(server, [1]), moved)
    update(server, [2], np.ones((1, 4)))  # a gradient that comes too late
    assert len(table) == 3
    assert (look_up(server, [2]) < 0.01).all()  # 2 begins again
    assert (look_up(server, [2]) >= -0.01).all()


def test_a_new_key_is_admitted_with_the_probability():
    [server], _ = start(1, ONE, admit_probability=0.25)
    rows = look_up(server, range(4000))
    has_row = (rows != 0).any(axis=1)

    assert 0.2 < has_row.mean() < 0.3
    assert len(server.role._tables[4]) == has_row.sum()
    known = np.flatnonzero(has_row)
    np.testing.assert_array_equal(look_up(server, known), rows[known])  # a row stays
    update(server, np.flatnonzero(~has_row), np.ones(((~has_row).sum(), 4)))
    assert len(server.role._tables[4]) == has_row.sum()
    [nobody], _ = start(1, ONE, admit_probability=0.0)
    assert not look_up(nobody, range(100)).any()


def test_weights_stay_within_the_bound():
    [server], _ = start(1, ONE, weight_bound=1.0)
    look_up(server, [1, 2, 3])
    update(server, [1, 2], [[-9, 9, 0, 1], [0, 0, 0, 0]])  # the learning rate is 0.5

    one, two, three = look_up(server, [1, 2, 3])
    assert one[:2].tolist() == [1, -1]
    assert abs(one[2]) <= 0.01
    assert -0.52 < one[3] < -0.48
    assert np.abs([two, three]).max() <= 0.01
    [unbounded], _ = start(1, ONE, weight_bound=0.0)
    look_up(unbounded, [1])
    update(unbounded, [1], [[-90, 0, 0, 0]])
    assert look_up(unbounded, [1])[0, 0] > 44


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_a_checkpoint_goes_to_any_number_of_servers(servers, tmp_path):
    optimizer = Adam(0.1).facts()
    keys = np.arange(-100, 100, 7)
    roles, _ = start(2, TWO, optimizer=optimizer)
    owners = servers_of(keys, 2)
    for number, role in enumerate(roles):
        mine = keys[owners == number]
        look_up(role, mine), look_up(role, mine, 2)
        arrays = {f"keys {dim}": mine for dim in (4, 2)}
        arrays |= {f"gradients {dim}": np.repeat(mine[:, None], dim, 1).astype(np.float32) for dim in (4, 2)}
        role.call("update", arrays)
    dump(tmp_path, roles, TWO, optimizer)

    others, _ = start(servers, TWO, optimizer=optimizer)
    for role in others:
        role.call("load", folder=str(tmp_path), step=1)
    before = {
        dim: {
            int(key): [*rows.vectors[i], *rows.states[i]]
            for some, rows in load_rows(tmp_path)
            if some == dim
            for i, key in enumerate(rows.keys)
        }
        for dim in (4, 2)
    }
    after = {dim: {} for dim in (4, 2)}
    for number, role in enumerate(others):
        for dim, table in role.role._tables.items():
            found, vectors, states, last_steps, _ = table.read(table.changed_rows())
            parts = np.concatenate([vectors, states], axis=1)
            assert (servers_of(found, servers) == number).all()
            assert last_steps.tolist() == [1] * len(found)
            after[dim].update(zip(found.tolist(), parts.tolist(), strict=True))
        assert role.role._step == 1
    assert after == before
    assert sorted(after[4]) == keys.tolist()


def test_loaded_rows_keep_their_order_of_use(tmp_path):
    [server], _ = start(1, ONE, capacity=3)
    look_up(server, [1, 2, 3])
    look_up(server, [1])
    dump(tmp_path, [server])

    [smaller], _ = start(1, ONE, capacity=2)
    smaller.call("load", folder=str(tmp_path), step=0)

    assert (smaller.role._tables[4].find(np.array([1, 2, 3])) >= 0).tolist() == [True, False, True]
    look_up(smaller, [4])
    assert (smaller.role._tables[4].find(np.array([1, 3])) >= 0).tolist() == [True, False]


def test_an_empty_table_can_be_loaded(tmp_path):
    [server], _ = start(1, ONE)
    dump(tmp_path, [server])
    server_of_two = start(2, ONE)[0][1]

    server_of_two.call("load", folder=str(tmp_path), step=3)

    assert len(server_of_two.role._tables[4]) == 0


def test_a_checkpoint_of_the_earlier_revision_loads(tmp_path):
    """The two servers trained the keys -10, -7, ... in one step of Adam, with the gradient ``key`` in every float."""
    roles, _ = start(2, TWO, optimizer=Adam(0.1).facts())
    for role in roles:
        role.call("load", folder=str(EARLIER), step=1)

    keys = np.arange(-10, 10, 3)
    for number, role in enumerate(roles):
        for dim, table in role.role._tables.items():
            found, _, states, last_steps, _ = table.read(table.changed_rows())
            assert sorted(found) == sorted(keys[servers_of(keys, 2) == number])
            assert last_steps.tolist() == [1] * len(found)
            expected = np.stack([0.1 * found, 0.001 * found**2], 1).repeat(dim, 1)
            np.testing.assert_allclose(states, expected, rtol=1e-4)
    dump(tmp_path, roles, TWO, Adam(0.1).facts())
    for (dim, one), (of_same, other) in zip(
        *(sorted(load_rows(folder), key=lambda of: (of[0], *of[1].keys)) for folder in (EARLIER, tmp_path)), strict=True
    ):
        assert dim == of_same
        np.testing.assert_array_equal(one.vectors, other.vectors)


def test_damaged_files_of_the_earlier_revision_are_reported(tmp_path):
    [server], _ = start(1, TWO, optimizer=Adam(0.1).facts())
    shutil.copytree(EARLIER, tmp_path / "saved")
    folder = tmp_path / "saved" / "server-0" / "dim-4"
    whole = (folder / "last_steps.npy").read_bytes()
    for content, message in (
        (whole[:-8], r"server-0/dim-4/last_steps.npy: expected a .npy file, found a file that is cut"),
        (np.zeros(8, np.int64), "expected as many rows and steps as keys, found 6 keys, 6 rows and 8 steps"),
        (np.zeros(6, np.int32), "expected int64 keys and steps and float32 rows .*, found int64, int32"),
        (b"", r"server-0/dim-4/last_steps.npy: expected a .npy file, found an empty file"),
    ):
        if isinstance(content, bytes):
            (folder / "last_steps.npy").write_bytes(content)
        else:
            np.save(folder / "last_steps.npy", content)
        with pytest.raises(ModelFileError, match=message):
            server.call("load", folder=str(tmp_path / "saved"), step=0)
    (folder / "last_steps.npy").unlink()
    os.mkfifo(folder / "last_steps.npy")
    with pytest.raises(ModelFileError, match=r"last_steps\.npy: cannot be read: not a regular file"):
        server.call("load", folder=str(tmp_path / "saved"), step=0)


def test_damaged_and_unwritable_folders_are_reported(tmp_path):
    roles, _ = start(2, TWO)
    for role in roles:
        look_up(role, range(9))
    dump(tmp_path / "good", roles, TWO)
    file = tmp_path / "good" / "server-1" / "dim-4.rows"
    whole = file.read_bytes()
    for content, message in (
        (whole[:-8], r"server-1/dim-4\.rows: expected CRC-32"),
        (whole.replace(b'"sgd"', b'"adam"'), r"server-1/dim-4\.rows: expected the states of sgd, found those of adam"),
        (None, r"server-1/dim-4\.rows: cannot be read: no such file"),
    ):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            roles[0].call("load", folder=str(tmp_path / "good"), step=0)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file/server-0: cannot be written: not a directory"):
        roles[0].call("dump", folder=str(tmp_path / "file"))


def test_a_server_is_configured_once_and_first():
    server = Direct(EmbeddingServer(ONE, 10, 0, 1))
    with pytest.raises(SessionError, match="expected a TrainCtx to configure the embedding servers first"):
        look_up(server, [1])
    settings = {"optimizer": FACTS, "initialization": [0, 1], "admit_probability": 1, "weight_bound": 1}
    server.call("configure", **settings)
    with pytest.raises(SessionError, match="expected one TrainCtx in a run, got another"):
        server.call("configure", **settings)
