"""Servers that follow a training of several roles have its rows, also after evictions and after a restart."""

import pytest

from serving.errors import ConfigError
from tests.training.persia.batches import SLOTS, batches_of, draw
from tests.training.persia.cluster import served
from tests.training.persia.training import a_net, enter, step
from tests.training.publishing.following import Follower, messages
from training.errors import SessionError
from training.persia.checkpoint import CheckpointFacts
from training.persia.sparse.optim import Adagrad

PREFIX_BITS = 8


def rows_of(roles, slots):
    """The rows of all servers as a follower has them: by feature group and sign."""
    tables = {}
    for server in roles.servers:
        for table in server._tables.values():
            keys, vectors, *_ = table.read(table.changed_rows())
            for key, row in zip(keys.tolist(), vectors, strict=True):
                group, sign = divmod((key + 2**64) % 2**64 ^ 2**63, 2 ** (64 - PREFIX_BITS))
                tables.setdefault(list(slots)[group - 1], {})[sign] = row.tobytes()
    return tables


def train(context, data, net, dense_optimizer, batches):
    for _ in range(batches):
        step(context, next(data), net, dense_optimizer)


def publish(context, roles):
    """Publish, and return the rows of that moment: lookups that run ahead make new rows."""
    with context._quiet():
        context.publisher.publish()
        expected = rows_of(roles, SLOTS)
    context.publisher.flush()
    return expected


@pytest.fixture
def start(tmp_path):
    """Return a function that starts roles, whose checkpoints are in ``saved``, with batches of a few signs."""
    (tmp_path / "saved").mkdir()

    def started(**options):
        return served(tmp_path, SLOTS, workers=2, checkpoint=tmp_path / "saved", **options)

    return started


def test_a_server_that_follows_has_the_rows_of_two_embedding_servers_also_after_evictions(start, tmp_path):
    net, dense_optimizer = a_net()
    batches, roles = batches_of(draw(12, samples=2)), start(servers=2, capacity=6)
    with roles as roles, roles.loading(batches), enter(staleness=3, optimizer=Adagrad(0.1)) as context:
        context.publish_to(str(tmp_path / "log"), "ctr")
        data = context.data_loader()
        for _ in range(4):
            train(context, data, net, dense_optimizer, 3)
            expected = publish(context, roles)
            assert Follower().follow(tmp_path / "log").tables == expected

    kinds = {(message.table, message.kind) for message in messages(tmp_path / "log")}
    assert kinds >= {("a", "upsert"), ("b", "upsert"), ("c", "upsert"), ("a", "delete"), ("c", "delete")}
    assert len({(message.run, message.publisher) for message in messages(tmp_path / "log")}) == 1


def test_after_a_crash_a_training_with_other_servers_takes_back_what_its_checkpoint_has_not_seen(start, tmp_path):
    net, dense_optimizer = a_net()
    drawn = draw(12)
    for _, bags, _ in drawn[7:]:  # new signs, which lookups that run ahead of the checkpoint do not reach
        bags["a"][0] = [100 + len(bags["a"][0])]

    def train_and_crash():
        with start(servers=2) as roles, roles.loading(batches_of(drawn)), enter(staleness=3) as context:
            context.publish_to(str(tmp_path / "log"), "ctr")
            data = context.data_loader()
            train(context, data, net, dense_optimizer, 4)
            context.dump_checkpoint(net, dense_optimizer)
            train(context, data, net, dense_optimizer, 6)
            publish(context, roles)
            context._server.stop()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_and_crash()
    crashed = Follower().follow(tmp_path / "log").tables
    facts = CheckpointFacts.read(tmp_path / "saved" / "batch-4")
    since = Follower().follow(tmp_path / "log", after=facts.positions["folder"])

    with start(servers=3) as roles, roles.loading(batches_of(draw(6))), enter(staleness=2) as context:
        publisher = context.publish_to(str(tmp_path / "log"), "ctr")
        assert context.load_checkpoint(net, dense_optimizer) == 4
        data = context.data_loader()
        train(context, data, net, dense_optimizer, 1)
        expected = publish(context, roles)
    follower = Follower().follow(tmp_path / "log")

    assert facts.run == publisher.run
    assert since.tables
    assert any(sign >= 100 for sign in crashed["a"])
    assert not any(sign >= 100 for sign in expected["a"])
    assert follower.tables == expected


def test_a_training_that_was_killed_before_its_first_checkpoint_begins_again_for_servers_too(start, tmp_path):
    net, dense_optimizer = a_net()
    for _ in range(2):
        with start(servers=2) as roles, roles.loading(batches_of(draw(2))), enter() as context:
            context.publish_to(str(tmp_path / "log"), "ctr")
            assert context.load_checkpoint(net, dense_optimizer) == 0
            train(context, context.data_loader(), net, dense_optimizer, 2)
            expected = publish(context, roles)

    assert Follower().follow(tmp_path / "log").tables == expected


def test_a_checkpoint_of_a_training_that_did_not_publish_is_refused(start, tmp_path):
    net, dense_optimizer = a_net()
    for publishes in (True, False):
        with start(servers=1) as roles, roles.loading(batches_of(draw(4))), enter() as context:
            if publishes:
                context.publish_to(str(tmp_path / "log"), "ctr")
            context.load_checkpoint(net, dense_optimizer)
            train(context, context.data_loader(), net, dense_optimizer, 1)
            context.dump_checkpoint(net, dense_optimizer)

    with start(servers=1), enter() as context:
        context.publish_to(str(tmp_path / "log"), "ctr")
        context.load_checkpoint(net, dense_optimizer)
        with pytest.raises(
            ConfigError, match=r"outbox: nothing is known of a checkpoint at step 2, .* begin a new run"
        ):
            next(context.data_loader())


def test_publish_to_is_called_once_and_needs_a_folder_of_checkpoints(start, tmp_path):
    with start(), enter() as context:
        context.publish_to(str(tmp_path / "log"), "ctr")
        with pytest.raises(SessionError, match="publish_to: expected one call, before data_loader"):
            context.publish_to(str(tmp_path / "log"), "ctr")
    without = r"publish_to: expected the option --checkpoint DIR of the run"
    with served(tmp_path, SLOTS), enter() as context, pytest.raises(SessionError, match=without):
        context.publish_to(str(tmp_path / "log"), "ctr")


def test_a_feature_group_that_cannot_be_a_table_is_refused(tmp_path):
    refused = pytest.raises(ConfigError, match=r"Publisher: tables: expected names .*, got 'a b'")
    roles = served(tmp_path, {"a b": {"dim": 2}}, checkpoint=tmp_path / "saved")
    with roles, enter() as context, refused:
        context.publish_to(str(tmp_path / "log"), "ctr")
