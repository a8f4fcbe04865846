"""What was trained is served with the predictions of the NN worker."""

import json
import time
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from kernels.host import TrainingTable
from serving import ParameterServer
from serving.config import read_repository
from serving.errors import ConfigError, OutputError
from serving.importers import plan_import, write_model
from serving.model.pooling import Pooling
from serving.opening import load_model
from tests.serving.ps_files import write_ps
from tests.training.persia.batches import batch_of
from tests.training.persia.cluster import served
from tests.training.persia.training import enter
from tests.training.publishing.following import rows_in
from training.persia.checkpoint import CheckpointFacts, dump_rows, load_rows, write_tables
from training.persia.config import read_embedding_config
from training.persia.signs import request_keys, table_keys
from training.persia.sparse.optim import Adagrad

SLOTS = {
    "user": {"dim": 4},
    "friend": {"dim": 4},
    "tags": {"dim": 3, "sqrt_scaling": True},
    "ads": {"dim": 3, "sqrt_scaling": True, "hash_stack_config": {"hash_stack_rounds": 2, "embedding_size": 40}},
    "seen": {"dim": 2, "embedding_summation": False, "sample_fixed_size": 3},
}
GROUPS = {"people": ["user", "friend"]}
TABLES = {"people": 2, "tags": 1, "ads": 1, "seen": 3}  # and their slots
LARGEST = 2**64 - 1


class Dense(nn.Module):
    """The network as the server runs it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 + 8 + 3 + 3 + 9, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, people, tags, ads, seen):
        is_there = (seen != 0).any(dim=2, keepdim=True).float()
        seen = torch.cat([seen, is_there], dim=2)
        return self.layers(torch.cat([dense, people.flatten(1), tags, ads, seen.flatten(1)], dim=1))


def draw(rng, samples=32):
    signs = {name: [(rng.integers(0, 30, rng.integers(0, 3)) * 7).tolist() for _ in range(samples)] for name in SLOTS}
    for bags in signs.values():
        bags[0] = [LARGEST, 2**63 + 1]  # both beyond int64
    target = [[float(sum(bag) % 2)] for bag in signs["tags"]]
    return batch_of([rng.normal(size=(samples, 2))], signs, target)


def predict(context, data, net):
    ([dense], (user, friend, tags, ads, seen)), target = context.prepare_features(data)
    return net(dense, torch.stack([user, friend], dim=1), tags, ads, seen[:, :, :2]), target


def request(batch, features):
    """The keys of a request and its offsets: sample after sample, slot after slot."""
    slots = []
    for name, feature in features.items():
        signs, row_ptrs = batch.sparse[name]
        bags = [signs[begin:end] for begin, end in pairwise(row_ptrs)]
        if feature.is_summed:
            slots.append([request_keys(feature, bag) for bag in bags])
        else:
            slots += [[request_keys(feature, bag[n : n + 1]) for bag in bags] for n in range(feature.sample_fixed_size)]
    in_order = [bag for of_sample in zip(*slots, strict=True) for bag in of_sample]
    return np.concatenate(in_order), np.cumsum([0, *map(len, in_order)])


def export(net, folder, facts):
    shapes = ((2,), (2, 4), (3,), (3,), (3, 2))
    with warnings.catch_warnings(action="ignore"):  # the exporter's own libraries are deprecated
        torch.onnx.export(
            net.eval(),
            tuple(torch.zeros(2, *shape) for shape in shapes),
            folder / "net.onnx",
            input_names=["dense", *TABLES],
            dynamic_shapes=tuple({0: torch.export.Dim("B")} for _ in shapes),
            verbose=False,
        )
    combiners = {"tags": "sqrtn", "ads": "sqrtn"}
    plan = plan_import(folder / "net.onnx", "sum", checkpoint=folder / "tables", combiners=combiners, logits=True)
    return write_model(plan, folder / "models", "ctr", run=facts.run, positions=facts.positions)


@pytest.mark.usefixtures("exporter")
def test_a_model_that_was_trained_is_served_with_its_predictions(tmp_path):
    torch.manual_seed(0)
    net, rng = Dense(), np.random.default_rng(0)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    batches = [draw(rng) for _ in range(40)]
    (tmp_path / "saved").mkdir()
    roles = served(tmp_path, SLOTS, 2, 2, GROUPS, checkpoint=tmp_path / "saved")
    with roles as roles, roles.loading(batches), enter(optimizer=Adagrad(0.5)) as context:
        for number, data in enumerate(context.data_loader()):
            output, target = predict(context, data, net)
            if number + 1 == len(batches):
                expected = output.sigmoid()
                break
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(output, target).backward()
            context.on_after_backward(1.0, number)
            optimizer.step()
        checkpoint = context.dump_checkpoint(net)

    write_tables(checkpoint, tmp_path / "tables")
    facts = CheckpointFacts.read(checkpoint)
    path = export(net, tmp_path, facts)

    assert sorted(one.name for one in (tmp_path / "tables").iterdir()) == sorted(TABLES)
    keys, row_ptrs = request(batches[-1], facts.config.features)
    with load_model(path) as session:
        answer = session.predict(batches[-1].dense[0], keys, row_ptrs)
    assert np.ptp(answer) > 0.1  # equal answers would prove nothing
    np.testing.assert_allclose(answer, expected.detach(), atol=1e-6)
    assert sum((tmp_path / "tables" / name / "key").stat().st_size // 8 for name in TABLES) == sum(
        len(rows.keys) for _, rows in load_rows(checkpoint)
    )


@pytest.mark.usefixtures("exporter")
def test_a_server_with_an_early_export_follows_the_training_to_the_rows_of_a_late_one(tmp_path):
    net, rng = Dense(), np.random.default_rng(0)
    (tmp_path / "saved").mkdir()
    roles = served(tmp_path, SLOTS, 2, 2, GROUPS, checkpoint=tmp_path / "saved")
    batches = [draw(rng, samples) for samples in (2, 4, 32, 32)]
    with roles as roles, roles.loading(batches), enter(optimizer=Adagrad(0.5)) as context:
        publisher = context.publish_to(str(tmp_path / "log"), "ctr")
        for number, data in enumerate(context.data_loader()):
            output, target = predict(context, data, net)
            nn.functional.binary_cross_entropy_with_logits(output, target).backward()
            context.on_after_backward(1.0, number)
            publisher.publish()
            if number == 1:
                early = context.dump_checkpoint(net)
                write_tables(early, tmp_path / "tables")
                facts = CheckpointFacts.read(early)
        write_tables(context.dump_checkpoint(net), tmp_path / "late")
    before, expected = rows_in(tmp_path / "tables"), rows_in(tmp_path / "late")
    export(net, tmp_path, facts)
    write_ps(
        tmp_path / "models", update_source={"type": "folder", "path": str(tmp_path / "log"), "poll_timeout_ms": 20}
    )

    assert before != expected
    with ParameterServer.from_config(read_repository(tmp_path / "models")) as server:
        until = time.monotonic() + 30
        while (found := served_rows(server, expected)) != expected:
            assert time.monotonic() < until, found
            time.sleep(0.02)


def served_rows(server, tables):
    """The rows of these keys in a server."""
    found = {}
    for name, rows in tables.items():
        vectors, is_known = server.lookup(f"ctr@1.{name}", np.array(list(rows)))
        found[name] = {
            key: vector.tobytes() for key, vector, known in zip(rows, vectors, is_known, strict=True) if known
        }
    return found


@pytest.mark.parametrize(
    ("other", "is_right"),
    [
        ({"dim": 4}, False),
        ({"dim": 4, "sqrt_scaling": True}, True),
        ({"dim": 4, "embedding_summation": False}, True),  # a slot has one row, so both ways give the same
    ],
)
def test_a_group_whose_features_are_pooled_in_different_ways_is_refused(tmp_path, other, is_right):
    slots = {"user": {"dim": 4, "sqrt_scaling": True}, "friend": other}
    (tmp_path / "config.yml").write_text(json.dumps({"slots_config": slots, "feature_groups": GROUPS}))
    config = read_embedding_config(tmp_path / "config.yml")
    CheckpointFacts(1, 1, {"rule": "sgd", "initial_states": []}, config, 1).write(tmp_path)

    if is_right:
        table, key = (
            TrainingTable("dim 4", 4, rule="sgd"),
            table_keys(config.features["user"], np.array([7], np.uint64)),
        )
        table.write(
            key, np.ones((1, 4), np.float32), np.ones((1, 0), np.float32), np.zeros(1, int), np.zeros(1, np.uint64)
        )
        dump_rows(tmp_path, 0, {4: table})
        write_tables(tmp_path, tmp_path / "tables")
        assert Pooling.read(tmp_path / "tables" / "people") == Pooling("sqrtn")
        return
    with pytest.raises(ConfigError, match=r"'people': expected one combiner, .* got 'user' sqrtn and 'friend' sum"):
        write_tables(tmp_path, tmp_path / "tables")


def test_what_cannot_be_exported_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.json: no such file"):
        write_tables(tmp_path, tmp_path / "tables")
    for name, error, message in (
        ("../x", ConfigError, r"feature group '\.\./x': expected 1 to 120 letters"),
        ("x", OutputError, "file/tables: cannot be written: not a directory"),
    ):
        saved = tmp_path / error.__name__
        saved.mkdir()
        with served(tmp_path, {name: {"dim": 1}}, checkpoint=saved), enter() as context:
            checkpoint = context.dump_checkpoint()
        (tmp_path / "file").touch()
        with pytest.raises(error, match=message):
            write_tables(checkpoint, tmp_path / "file" / "tables")
