"""``TrainCtx`` and a data loader, with embedding roles that listen in this process."""

import json
import os
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from serving.errors import ConfigError, ModelFileError
from tests.training.persia.batches import SLOTS, batch_of, batches_of, draw
from tests.training.persia.cluster import served
from tests.training.persia.training import Net, a_net, enter, plain_losses, step
from training.errors import SessionError
from training.persia import ctx as persia_ctx
from training.persia.checkpoint import checkpoints_in, remove_unfinished
from training.persia.config import read_embedding_config
from training.persia.ctx import TrainCtx
from training.persia.sparse.optim import SGD, Adagrad
from training.persia.wire import RoleError


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3)])
def test_with_staleness_1_every_loss_is_that_of_one_process(workers, servers, tmp_path):
    net, dense_optimizer = a_net()
    batches, roles = draw(12), served(tmp_path, SLOTS, workers, servers)
    with roles as roles, roles.loading(batches_of(batches)), enter(optimizer=Adagrad(0.1)) as context:
        losses = [step(context, data, net, dense_optimizer) for data in context.data_loader()]

    expected = plain_losses(batches, read_embedding_config(tmp_path / "embedding_config.yml"))
    assert np.ptp(losses) > 0.01
    np.testing.assert_allclose(losses, expected, rtol=1e-4)  # float32 against float64


def test_staleness_bounds_the_batches_whose_gradients_are_not_applied(tmp_path):
    with served(tmp_path, {"a": {"dim": 3}}, workers=2) as roles:
        in_flight, most, changed = set(), [], threading.Condition()
        for worker in roles.workers:
            spy_on(worker, in_flight, most, changed)
        batches = [batch_of([], {"a": [[number]]}) for number in range(20)]
        with roles.loading(batches), enter(staleness=3, queue=20) as context:
            for number, data in enumerate(context.data_loader()):
                if number == 0:  # three are looked up before any gradient
                    with changed:
                        assert changed.wait_for(lambda: len(in_flight) == 3, timeout=30)
                (_, [vectors]), _ = context.prepare_features(data)
                vectors.sum().backward()
                context.on_after_backward(1.0, number)

        assert max(most) == 3
        assert len(most) == 20
        # no gradient was lost: each sign was in one batch
        one = read_embedding_config(tmp_path / "embedding_config.yml").features["a"]
        for sign in range(20):
            assert (roles.row(one, sign) < -0.48).all()


def spy_on(worker, in_flight, most, changed):
    """Record the batches between the begin of their lookup and the end of their update."""
    look_up, update = worker.look_up, worker.update

    def watched_look_up(message):
        with changed:
            in_flight.add(message.facts["number"])
            most.append(len(in_flight))
            changed.notify_all()
        return look_up(message)

    def watched_update(message):
        answer = update(message)
        with changed:
            in_flight.remove(message.facts["number"])
        return answer

    worker.look_up, worker.update = watched_look_up, watched_update


def test_a_training_that_hands_no_gradients_back_is_warned_once(tmp_path, caplog):
    batches = [batch_of([], {"a": [[1]]}, [[1]])] * 3
    with served(tmp_path, {"a": {"dim": 3}}) as roles, roles.loading(batches), enter() as context:
        assert len(list(context.data_loader())) == 3

    assert caplog.text.count("a batch moves no row, because on_after_backward was not called for it") == 1


def test_arrays_come_in_order_and_with_their_types(tmp_path):
    batch = batch_of(
        [np.ones((2, 1)), np.zeros((2, 2))], {"b": [[1], []], "a": [[2], [3]]}, [[1], [0]], [[1, 2], [3, 4]]
    )
    batch.add_dense_f64(np.full((2, 1), 0.1))
    batch.add_dense_i32(np.array([[-1], [2]], np.int32))
    batch.add_dense_i64(np.array([[2**40], [2]]))
    with served(tmp_path, {"a": {"dim": 3}, "b": {"dim": 2}}) as roles, roles.loading([batch]), enter() as context:
        [data] = [(context.prepare_features(one)) for one in context.data_loader()]

    (dense, sparse), target = data
    assert [one.dtype for one in dense] == [torch.float32, torch.float32, torch.float64, torch.int32, torch.int64]
    assert [one.shape[1] for one in dense] == [1, 2, 1, 1, 1]
    assert dense[4].tolist() == [[2**40], [2]]
    assert [tuple(one.shape) for one in sparse] == [(2, 2), (2, 3)]  # in the order of the batch
    assert all(one.requires_grad and one.is_leaf for one in sparse)
    assert sparse[0][1].tolist() == [0, 0]
    assert [one.tolist() for one in target] == [[[1], [0]], [[1, 2], [3, 4]]]


def test_a_raw_feature_has_a_row_and_a_mark_for_each_sign_of_a_sample(tmp_path):
    slots = {"r": {"dim": 2, "embedding_summation": False, "sample_fixed_size": 3}}
    batch = batch_of([], {"r": [[7, 2**64 - 1, 7, 9], [], [9]]}, [[1], [1], [1]])
    with served(tmp_path, slots) as roles:
        with roles.loading([batch]), enter() as context:
            for data in context.data_loader():
                (_, [vectors]), _ = context.prepare_features(data)
                one = read_embedding_config(tmp_path / "embedding_config.yml").features["r"]
                rows = {sign: torch.tensor(roles.row(one, sign)) for sign in (7, 2**64 - 1, 9)}
                (vectors[0, 0] * 2 + vectors[0, 2] + vectors[1, 1]).sum().backward()
                context.on_after_backward(1.0, 0)

        nothing = torch.zeros(3)
        expected = [[7, 2**64 - 1, 7], [None] * 3, [9, None, None]]  # the fourth sign is left out
        for sample, signs in zip(vectors, expected, strict=True):
            for vector, sign in zip(sample, signs, strict=True):
                torch.testing.assert_close(vector, nothing if sign is None else torch.cat([rows[sign], torch.ones(1)]))
        np.testing.assert_allclose(roles.row(one, 7), rows[7].numpy() - 0.5 * 3, rtol=1e-6)
        np.testing.assert_array_equal(roles.row(one, 9), rows[9])


def test_gradients_are_divided_by_the_scale_and_dropped_if_not_finite(tmp_path):
    batches = [batch_of([], {"a": [[1]], "b": [[2]]}, [[1]])] * 4
    seen = []
    with served(tmp_path, {"a": {"dim": 3}, "b": {"dim": 2}}) as roles, roles.loading(batches):
        with enter() as context:
            for number, data in enumerate(context.data_loader()):
                (_, [a, b]), _ = context.prepare_features(data)
                seen.append((a.detach().clone(), b.detach().clone()))
                factor = [1.0, 64.0, float("inf"), float("nan")][number]
                (factor * a.sum() + b.sum()).backward()
                assert context.on_after_backward(64.0, number) is (number < 2)
        one = read_embedding_config(tmp_path / "embedding_config.yml").features["a"]
        end = roles.row(one, 1)

    (first, b_first), (second, _), (third, b_third), (fourth, b_fourth) = seen
    torch.testing.assert_close(second, first - 0.5 / 64)
    torch.testing.assert_close(third, second - 0.5)
    torch.testing.assert_close(b_third, b_first - 2 * 0.5 / 64)
    assert torch.equal(fourth, third)
    assert torch.equal(b_fourth, b_third)  # the finite gradients of the batch are dropped too
    assert end.tolist() == third[0].tolist()


def test_the_loop_of_the_document_lowers_the_scale_of_pytorchs_scaler(tmp_path):
    weight = nn.Parameter(torch.ones(1))
    dense_optimizer = torch.optim.SGD([weight], 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=1000)
    scales = []
    batches = [batch_of([], {"a": [[1]]}, [[1]])] * 6
    roles = served(tmp_path, {"a": {"dim": 3}})
    with roles as roles, roles.loading(batches), enter(optimizer=SGD(0.0), scaler=scaler) as context:
        for number, data in enumerate(context.data_loader()):
            (_, [a]), _ = context.prepare_features(data)
            loss = (1e10 * weight * a).sum()
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            finite = context.on_after_backward(scale, number)
            scaler.step(dense_optimizer)
            dense_optimizer.zero_grad()
            if finite:
                scaler.update()
            else:
                scaler.update(scale / 4.0)
            scales.append((finite, scale))

    # 1e10 * 2^100 is beyond float32, and 1e10 * 2^94 is not
    assert scales == [(False, 2.0**100), (False, 2.0**98), (False, 2.0**96), *[(True, 2.0**94)] * 3]


def test_a_batch_that_is_not_handed_back_moves_no_row_and_holds_nothing_up(tmp_path):
    batches = [batch_of([], {"a": [[1]]}, [[1]])] * 5
    with served(tmp_path, {"a": {"dim": 3}}) as roles, roles.loading(batches), enter(staleness=1) as context:
        vectors = []
        for data in context.data_loader():
            (_, [a]), _ = context.prepare_features(data)
            a.sum().backward()
            vectors.append(a.detach())
        assert context.batches == 5

    assert all(torch.equal(vector, vectors[0]) for vector in vectors)


def test_the_training_may_leave_before_the_data_ends(tmp_path):
    with served(tmp_path, {"a": {"dim": 3}}) as roles:
        with enter(queue=3) as context, roles.loading([batch_of([], {"a": [[1]]}, [[1]])] * 50) as errors:
            for _ in context.data_loader():
                break
            context._feed.close()
        assert errors.empty()
        assert len(roles.workers[0]._batches) < 8  # the rest was not sent


def test_misuse_is_refused(tmp_path):
    batches = [batch_of([], {"a": [[1]]}, [[1]])] * 2
    with served(tmp_path, {"a": {"dim": 3}}) as roles, roles.loading(batches), enter(staleness=2) as context:
        with pytest.raises(SessionError, match="on_after_backward: expected prepare_features"):
            context.on_after_backward(1.0, 0)
        with pytest.raises(SessionError, match="dump_checkpoint: expected the option --checkpoint DIR of the run"):
            context.dump_checkpoint()
        with pytest.raises(SessionError, match="load_checkpoint: expected the option --checkpoint DIR of the run"):
            context.load_checkpoint()
        iterator = context.data_loader()
        first = next(iterator)
        with pytest.raises(SessionError, match="on_after_backward: expected prepare_features"):
            context.on_after_backward(1.0, 0)
        context.prepare_features(first)
        for scale in (0.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="on_after_backward: expected a scale above 0, got"):
                context.on_after_backward(scale, 0)
        assert context.on_after_backward(1.0, 0)  # without a backward pass no row moves
        with pytest.raises(SessionError, match="prepare_features: expected the batch that data_loader gave last"):
            context.prepare_features(first)
        with pytest.raises(SessionError, match="expected one call of data_loader, got another"):
            next(context.data_loader())
        assert len(list(iterator)) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sparse_optimizer": None}, TypeError, "expected a sparse_optimizer of training.persia, got None"),
        ({"data_queue_size": 0}, ValueError, "expected data_queue_size of at least 1, got 0"),
        ({"embedding_staleness": 0}, ValueError, "expected embedding_staleness of at least 1, got 0"),
        ({"embedding_staleness": "8"}, TypeError, "expected embedding_staleness as an int, got '8'"),
        ({"data_queue_size": 1.5}, TypeError, "expected data_queue_size as an int, got 1.5"),
        ({"weight_bound": float("nan")}, ValueError, "expected weight_bound from 0 to .*, got nan"),
        ({"weight_bound": -1}, ValueError, "expected weight_bound from 0 to .*, got -1"),
        ({"weight_bound": "x"}, TypeError, "expected weight_bound as a number, got 'x'"),
        ({"emb_initialization": (-float("inf"), 0)}, ValueError, "expected emb_initialization from .*, got -inf"),
        ({"emb_initialization": 0.1}, ValueError, "expected emb_initialization as two numbers, got 0.1"),
        ({"admit_probability": 1.5}, ValueError, "expected admit_probability from 0 to 1, got 1.5"),
        (
            {"emb_initialization": (1.0, 0.5)},
            ValueError,
            r"expected emb_initialization \(low, high\), got \(1.0, 0.5\)",
        ),
        ({"port": 1}, SessionError, r"expected TRAINER_PORT as port, 127\.0\.0\.1:\d+, got 1"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, error, message, tmp_path):
    with served(tmp_path, SLOTS):
        given = {"sparse_optimizer": SGD(0.1), "port": int(os.environ["TRAINER_PORT"]), "data_queue_size": 2}
        with pytest.raises(error, match=message):
            TrainCtx(**given | arguments)


def test_a_script_that_is_no_role_is_told_how_to_start(monkeypatch):
    monkeypatch.delenv("HOTROW_PERSIA", raising=False)
    persia_ctx._backend.cache_clear()
    for call in (persia_ctx.init_backend, lambda: TrainCtx(None, SGD(0.1), 1, 1)):
        with pytest.raises(SessionError, match=r"start it with python -m training\.persia run"):
            call()
    with pytest.raises(ValueError, match="expected init_output = True, got False"):
        persia_ctx.init_backend(init_output=False)


def test_a_refused_batch_is_reported_to_the_data_loader(tmp_path):
    with served(tmp_path, {"a": {"dim": 3}, "b": {"dim": 1}}) as roles, enter() as context:
        waiting = threading.Thread(target=next, args=(context.data_loader(), None))
        waiting.start()
        with roles.loading([batch_of([], {"a": [[1]]})]) as errors:
            message = str(errors.get(timeout=30))
        context._feed.close()
        waiting.join()

    assert message == "embedding worker 0: add_sparse: expected every feature of slots_config, b missing"


def test_the_servers_take_one_context(tmp_path):
    with served(tmp_path, {"a": {"dim": 3}}):
        with enter():
            pass
        with pytest.raises(RoleError, match="embedding server 0: expected one TrainCtx in a run, got another"), enter():
            pass


def test_a_port_in_use_is_reported(tmp_path, monkeypatch):
    with served(tmp_path, {"a": {"dim": 3}}) as roles, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = replace(roles.cluster, nn_worker=f"127.0.0.1:{port}")
        monkeypatch.setenv("HOTROW_PERSIA", cluster.environment()["HOTROW_PERSIA"])
        context = TrainCtx(None, SGD(0.1), port, 1)
        with pytest.raises(SessionError, match=rf"127\.0\.0\.1:{port}: cannot listen"), context:
            pass


def losses(roles, batches, net, dense_optimizer, saves_at=None, loads=False):
    """Train to the end, and return the losses."""
    found = []
    loaded = batches_of(batches)
    with roles.loading(loaded), enter(optimizer=Adagrad(0.1)) as context:
        if loads:
            assert context.load_checkpoint(net, dense_optimizer) == 4
        for number, data in enumerate(context.data_loader()):
            found.append(step(context, data, net, dense_optimizer, number))
            if context.batches == saves_at:
                path = context.dump_checkpoint(net, dense_optimizer)
                assert path.name == f"batch-{saves_at}"
        assert context.batches == len(batches)
    return found


def test_a_training_goes_on_from_a_checkpoint_with_other_numbers_of_roles(tmp_path):
    folder, batches = tmp_path / "checkpoints", draw(8)
    folder.mkdir()
    with served(tmp_path, SLOTS, 2, 2, checkpoint=folder) as roles:
        whole = losses(roles, batches, *a_net(), saves_at=4)
    assert [path.name for path in folder.iterdir()] == ["batch-4"]

    torch.manual_seed(1)
    net = Net()
    with served(tmp_path, SLOTS, 1, 3, checkpoint=folder) as roles:
        rest = losses(roles, batches, net, torch.optim.SGD(net.parameters(), 0.1), saves_at=8, loads=True)

    np.testing.assert_allclose(rest, whole[4:], rtol=1e-5)
    assert [path.name for path in folder.iterdir()] == ["batch-8"]


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    net, dense_optimizer = a_net()
    with served(tmp_path, SLOTS, checkpoint=tmp_path / "checkpoints") as roles:
        (tmp_path / "checkpoints").mkdir()
        with roles.loading(batches_of(draw(1))), enter() as context:
            assert context.load_checkpoint(net) == 0
            for data in context.data_loader():
                step(context, data, net, dense_optimizer)
                with pytest.raises(SessionError, match="load_checkpoint: expected the call before data_loader"):
                    context.load_checkpoint(net)
            context.dump_checkpoint(net)

    saved = tmp_path / "checkpoints"
    before = [one.clone() for one in net.state_dict().values()]
    refused(saved, r"dense_optimizer: missing; dump_checkpoint was called without it", net, dense_optimizer)
    refused(saved, r"optimizer\.rule: expected ada_grad, as the sparse_optimizer has, got sgd", net, rule=Adagrad(0.1))
    slots = SLOTS | {"d": {"dim": 1}}
    refused(saved, r"batch-1: expected the features of .*embedding_config\.yml, got others", net, slots=slots)
    for wrong in (nn.Linear(2, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)):
        refused(saved, r"dense\.pt: model: does not fit: ", wrong, error=ModelFileError)
    assert all(torch.equal(one, was) for one, was in zip(net.state_dict().values(), before, strict=True))
    assert [path.name for path in saved.iterdir()] == ["batch-1"]


def refused(saved, message, *stateful, error=ConfigError, rule=None, slots=SLOTS):
    """Check that load_checkpoint raises an error, and that the training cannot begin then."""
    with served(saved.parent, slots, checkpoint=saved), enter(optimizer=rule) as context:
        with pytest.raises(error, match=message):
            context.load_checkpoint(*stateful)
        with pytest.raises(SessionError, match="batch-1: not loaded"):
            next(context.data_loader())


def save(folder, *stateful):
    """Write a checkpoint without rows."""
    folder.mkdir()
    with served(folder.parent, SLOTS, checkpoint=folder), enter() as context:
        return context.dump_checkpoint(*stateful)


def test_damaged_checkpoints_are_refused_and_change_nothing(tmp_path):
    net, dense_optimizer = a_net()
    path = save(tmp_path / "checkpoints", net, dense_optimizer)
    whole = {name: (path / name).read_bytes() for name in ("dense.pt", "checkpoint.json")}
    document = json.loads(whole["checkpoint.json"])
    del document["crc32"], document["files"]  # as an earlier version has written it
    flipped = bytearray(whole["dense.pt"])
    flipped[len(flipped) // 2] ^= 1
    no_dim = [{name: value for name, value in document["features"][0].items() if name != "dim"}]
    states = torch.load(path / "dense.pt", weights_only=True)
    states["dense_optimizer"]["param_groups"] = []
    torch.save(states, tmp_path / "other.pt")
    torch.save([1], tmp_path / "list.pt")
    with torch.no_grad():
        net.layers[0].bias += 1
    before = net.layers[0].bias.clone()
    for name, content, error, message in (
        ("dense.pt", flipped, ModelFileError, r"batch-0/dense\.pt: expected CRC-32 "),
        ("dense.pt", None, ModelFileError, r"batch-0/dense\.pt: cannot be read: no such file"),
        ("checkpoint.json", whole["checkpoint.json"].replace(b"0", b"1", 1), ModelFileError, "json: expected CRC-32 "),
        ("earlier", None, None, None),
        ("dense.pt", b"abc", ModelFileError, r"batch-0/dense\.pt: cannot be read: "),
        ("dense.pt", (tmp_path / "list.pt").read_bytes(), ConfigError, r"batch-0/dense\.pt: model: missing"),
        (
            "dense.pt",
            (tmp_path / "other.pt").read_bytes(),
            ModelFileError,
            r"batch-0/dense\.pt: dense_optimizer: does not fit: ValueError: loaded state dict has a different number",
        ),
        ("checkpoint.json", b"{", ConfigError, r"batch-0/checkpoint\.json: line 1"),
        (
            "checkpoint.json",
            json.dumps(document | {"features": no_dim}).encode(),
            ConfigError,
            r"batch-0/checkpoint\.json: features\[0\]\.dim: missing",
        ),
        (
            "checkpoint.json",
            json.dumps(document | {"optimizer": {"rule": "sgd"}}).encode(),
            ConfigError,
            r"batch-0/checkpoint\.json: optimizer\.initial_states: missing",
        ),
    ):
        if name == "earlier":
            whole["checkpoint.json"] = json.dumps(document).encode()
            (path / "checkpoint.json").write_bytes(whole["checkpoint.json"])
            continue
        (path / name).unlink() if content is None else (path / name).write_bytes(content)
        with served(tmp_path, SLOTS, checkpoint=path.parent), enter() as context:
            with pytest.raises(error, match=message):
                context.load_checkpoint(net, dense_optimizer)
            assert context.batches == 0
        (path / name).write_bytes(whole[name])
        assert torch.equal(net.layers[0].bias, before)
    (path / "dense.pt").unlink()
    os.mkfifo(path / "dense.pt")
    with (
        served(tmp_path, SLOTS, checkpoint=path.parent),
        enter() as context,
        pytest.raises(ModelFileError, match=r"dense\.pt: cannot be read: not a regular file"),
    ):
        context.load_checkpoint(net, dense_optimizer)


def test_a_checkpoint_that_is_not_loaded_is_reported_before_the_training(tmp_path):
    path = save(tmp_path / "checkpoints")
    with served(tmp_path, SLOTS, checkpoint=path.parent), enter() as context:
        for call in (lambda: next(context.data_loader()), context.dump_checkpoint):
            with pytest.raises(
                SessionError, match="batch-0: not loaded; expected load_checkpoint before data_loader, or"
            ):
                call()
        assert context.load_checkpoint() == 0
        context.dump_checkpoint()
        assert context.dump_checkpoint() == path


def test_calls_outside_the_with_block_are_refused(tmp_path):
    path = save(tmp_path / "checkpoints")
    with served(tmp_path, SLOTS, checkpoint=path.parent):
        context = TrainCtx(None, SGD(0.1), int(os.environ["TRAINER_PORT"]))
        calls = {
            "load_checkpoint": context.load_checkpoint,
            "dump_checkpoint": context.dump_checkpoint,
            "data_loader": lambda: next(context.data_loader()),
            "on_after_backward": lambda: context.on_after_backward(1.0, 0),
        }
        outside(calls)
        with context:
            pass
        context._server.stop()
        outside(calls)


def outside(calls):
    for name, call in calls.items():
        with pytest.raises(SessionError, match=f"{name}: expected the call in the with block of TrainCtx"):
            call()


def test_a_killed_run_leaves_the_checkpoint_that_it_was_replacing(tmp_path):
    net, _ = a_net()
    path = save(tmp_path / "checkpoints", net)
    path.rename(path.with_name(".batch-0.0a1b2c3d.old"))
    (path.parent / ".batch-0.4e5f6a7b.tmp").mkdir()

    remove_unfinished(path.parent)

    assert [one.name for one in path.parent.iterdir()] == ["batch-0"]
    with served(tmp_path, SLOTS, checkpoint=path.parent), enter() as context:
        assert context.load_checkpoint(net) == 0
    (path.parent / ".batch-0.0a1b2c3d.old").mkdir()  # was not deleted after the checkpoint was replaced
    remove_unfinished(path.parent)
    assert [one.name for one in path.parent.iterdir()] == ["batch-0"]
    assert checkpoints_in(path.parent).newest() == path


def test_a_checkpoint_without_its_description_is_named(tmp_path):
    net, _ = a_net()
    path = save(tmp_path / "checkpoints", net)
    (path / "checkpoint.json").unlink()

    expected = pytest.raises(ConfigError, match=r"batch-0/checkpoint\.json: no such file")
    with served(tmp_path, SLOTS, checkpoint=path.parent), enter() as context, expected:
        context.load_checkpoint(net)
