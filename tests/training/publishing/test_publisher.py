"""A publisher: a server that applies its messages has the trainer's rows, whatever training does."""

import json
import logging
import time

import numpy as np
import pytest
import torch

from serving.errors import BadMessageError, ConfigError, ModelFileError, OutputError
from serving.model.hps_hash import key_groups
from serving.stream import Kind, decode, decode_hps
from tests.training.publishing.conftest import Learner
from tests.training.publishing.following import Follower, messages, rows_of
from training import EmbeddingBagConfig
from training.publishing import Publisher


@pytest.fixture
def publish(tmp_path):
    """Return a publisher of the learner's tables to ``log``."""
    opened = []

    def start(learner, **options):
        opened.append(Publisher(str(tmp_path / "log"), "dcn", learner.collection, tmp_path / "outbox", **options))
        return opened[-1]

    yield start
    for publisher in opened:
        publisher.close()


def crash(publisher):
    """End a publisher as a failing training does: what waits for the log stays in the outbox."""
    with pytest.raises(KeyboardInterrupt), publisher:
        raise KeyboardInterrupt


def check_equal(learner, log, run=None):
    follower = Follower().follow(log, run)
    for name, table in learner.tables.items():
        assert follower.tables.get(name, {}) == rows_of(table), name


def wait_until(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_server_that_follows_has_the_trainers_rows_also_after_evictions(learner, publish, tmp_path):
    publisher = publish(learner)
    for _ in range(12):
        for _ in range(learner.rng.integers(1, 4)):
            learner.learn()
        publisher.publish()
        publisher.flush()
        check_equal(learner, tmp_path / "log")
    kinds = [(message.table, message.kind) for message in messages(tmp_path / "log")]
    assert set(kinds) == {("user", "upsert"), ("user", "delete"), ("tags", "upsert"), ("day", "upsert")}


def test_only_what_changed_since_the_last_call_is_published(learner, publish, tmp_path):
    publisher = publish(learner)
    learner.learn(user=[1, 2], tags=[1, 2, 3])
    assert publisher.publish() == {"user": 2, "tags": 3, "day": 20}
    learner.learn(tags=[3, 900], day=[4])
    assert publisher.publish() == {"user": 0, "tags": 2, "day": 1}
    assert publisher.publish() == {"user": 0, "tags": 0, "day": 0}
    files = len(list((tmp_path / "outbox").iterdir()))

    publisher.flush()

    assert files <= 3
    assert [path.name for path in (tmp_path / "outbox").iterdir()] == ["outbox.json"]


def test_rows_that_are_loaded_or_removed_are_published_too(learner, publish, tmp_path):
    publisher = publish(learner)
    learner.learn()
    before = learner.collection.state_dict()
    for _ in range(5):
        learner.learn()
    publisher.publish()

    rows = learner.tables["tags"].new_rows(np.array([5, 10_000]), np.ones((2, 3), np.float32))
    learner.tables["tags"].load(rows)
    assert publisher.publish() == {"user": 0, "tags": 2, "day": 0}
    learner.collection.load_state_dict(before)
    learner.learn()
    learner.collection.load_state_dict(before)
    publisher.publish()
    publisher.flush()

    assert 10_000 not in rows_of(learner.tables["tags"])
    check_equal(learner, tmp_path / "log")


def test_rows_are_published_as_lookups_read_them(publish, tmp_path):
    learner = Learner({"tags": EmbeddingBagConfig(3, max_norm=0.01)})
    publisher = publish(learner)
    learner.learn(tags=range(50))
    publisher.publish()
    publisher.flush()

    [table] = Follower().follow(tmp_path / "log").tables.values()
    assert max(np.linalg.norm(np.frombuffer(row, np.float32)) for row in table.values()) < 0.0101
    check_equal(learner, tmp_path / "log")


@pytest.mark.parametrize(("rows", "error"), [("float16", 1e-3), ("int8", 1e-2)])
def test_rows_may_be_narrower(learner, publish, tmp_path, rows, error):
    publisher = publish(learner, rows=rows)
    learner.learn()
    publisher.publish()
    publisher.flush()

    follower = Follower().follow(tmp_path / "log")
    for name, table in learner.tables.items():
        expected = rows_of(table)
        assert set(follower.tables[name]) == set(expected)
        for key, row in follower.tables[name].items():
            difference = np.frombuffer(row, np.float32) - np.frombuffer(expected[key], np.float32)
            assert np.abs(difference).max() <= error


def test_messages_say_run_publisher_number_step_and_time(learner, publish, tmp_path):
    publisher = publish(learner)
    for _ in range(3):
        learner.learn()
        publisher.publish()
    publisher.flush()

    found = list(messages(tmp_path / "log"))
    assert [message.sequence for message in found] == list(range(1, len(found) + 1))
    assert {(message.model, message.run, message.publisher) for message in found} == {("dcn", publisher.run, "trainer")}
    assert {message.step for message in found} == {1, 2, 3}
    assert all(0 <= time.time() - message.time_ms / 1000 < 60 for message in found)
    assert all(len(set(key_groups(message.keys).tolist())) == 1 for message in found)


def test_the_position_is_the_one_after_everything_that_was_published(learner, publish, tmp_path):
    publisher = publish(learner)
    assert publisher.flush() == {}
    learner.learn()
    publisher.publish()
    positions = publisher.flush()
    assert positions == {"folder": str(len(list((tmp_path / "log").glob("*.update"))))}
    snapshot = {name: rows_of(table) for name, table in learner.tables.items()}
    for _ in range(4):
        learner.learn()
        publisher.publish()
    publisher.flush()

    follower = Follower()
    follower.tables = snapshot
    follower.follow(tmp_path / "log", after=positions["folder"])
    assert follower.tables == {name: rows_of(table) for name, table in learner.tables.items()}


def test_hps_messages_go_to_a_topic_for_each_table_and_deletes_are_counted(learner, publish, memory_log, caplog):
    publisher = publish(learner, message_format="hps")
    for _ in range(10):
        learner.learn()
        publisher.publish()
    positions = publisher.flush()

    tables = {"user": {}, "tags": {}, "day": {}}
    for payload, group, topic in memory_log.messages:
        message = decode_hps(payload, topic, 8)
        assert set(key_groups(message.keys).tolist()) == {group}
        tables[message.table] |= dict(zip(message.keys.tolist(), map(bytes, message.rows), strict=True))
    assert {topic for _, _, topic in memory_log.messages} == {f"hps_et.dcn.{name}" for name in tables}
    for name in ("tags", "day"):
        assert tables[name] == rows_of(learner.tables[name])
    assert rows_of(learner.tables["user"]).items() <= tables["user"].items()
    gone = len(tables["user"]) - len(rows_of(learner.tables["user"]))
    assert set(publisher.unsent_deletes) == {"user"}
    assert publisher.unsent_deletes["user"] >= gone > 0
    assert caplog.text.count("table user: HPS's format cannot delete keys") == 1
    assert set(positions) == {"p0", "p1"}


def test_a_log_that_is_away_stops_nothing_and_is_logged_once(learner, publish, memory_log, caplog):
    caplog.set_level(logging.INFO)
    memory_log.is_away = True
    publisher = publish(learner)
    for _ in range(3):
        learner.learn()
        publisher.publish()
    assert publisher.flush() == {}
    assert caplog.text.count("updates wait in the outbox, because the log does not take them: ") == 1
    assert "3 deltas still wait in the outbox" in caplog.text

    memory_log.is_away = False
    learner.learn()
    publisher.publish()
    publisher.flush()
    assert caplog.text.count("updates are published again") == 1
    found = [decode(payload) for payload, _, _ in memory_log.messages]
    assert [message.sequence for message in found] == list(range(1, len(found) + 1))

    memory_log.is_away = True
    learner.learn()
    publisher.publish()
    publisher.flush()
    memory_log.is_away = False
    wait_until(lambda: caplog.text.count("updates are published again") == 2)
    follower = Follower()
    for payload, _, _ in memory_log.messages:
        follower.apply(decode(payload))
    assert follower.tables == {name: rows_of(table) for name, table in learner.tables.items()}


def test_a_full_outbox_is_an_error_and_its_changes_are_published_later(learner, publish, memory_log):
    memory_log.is_away = True
    publisher = publish(learner, most_outbox_bytes=30_000)
    for _ in range(4):
        learner.learn()
        publisher.publish()
    for _ in range(60):
        learner.learn()
    expected = r"outbox: the outbox is full: [0-9,]+ bytes wait for the update log, and at most 30,000 may"
    with pytest.raises(OutputError, match=expected):
        publisher.publish()

    memory_log.is_away = False
    publisher.flush()
    publisher.publish()
    publisher.flush()
    follower = Follower()
    for payload, _, _ in memory_log.messages:
        follower.apply(decode(payload))
    assert follower.tables == {name: rows_of(table) for name, table in learner.tables.items()}


def test_what_was_not_confirmed_is_sent_again_with_the_same_numbers(learner, publish, memory_log):
    memory_log.is_away = True
    publisher = publish(learner)
    run = publisher.run
    for _ in range(3):
        learner.learn()
        publisher.publish()
    crash(publisher)
    memory_log.is_away = False

    publisher = publish(learner)
    assert not publisher.is_new
    publisher.publish()
    publisher.flush()

    found = [decode(payload) for payload, _, _ in memory_log.messages]
    assert {message.run for message in found} == {run}
    assert [message.sequence for message in found] == list(range(1, len(found) + 1))
    assert {message.step for message in found} == {1, 2, 3}


def test_after_going_back_the_present_value_of_every_published_key_is_published(learner, publish, tmp_path):
    publisher = publish(learner)
    learner.learn(tags=[1, 2], user=[1], day=[1])
    with publisher.checkpoint(1):
        at_checkpoint = learner.collection.state_dict()
    for _ in range(6):
        learner.learn()
        publisher.publish()
    learner.learn(tags=[7])
    crash(publisher)

    learner = Learner(seed=2)  # another order of the samples
    learner.collection.load_state_dict(at_checkpoint)
    publisher = publish(learner)
    counts = publisher.resume(1)
    publisher.flush()
    assert 0 < counts["tags"] < 130
    check_equal(learner, tmp_path / "log")
    assert publisher.publish() == {"user": 0, "tags": 0, "day": 0}
    for _ in range(6):
        learner.learn()
        publisher.publish()
    publisher.flush()
    check_equal(learner, tmp_path / "log")


def test_a_training_may_go_back_to_any_checkpoint_that_it_keeps(learner, publish, tmp_path):
    publisher = publish(learner)
    states = {}
    for step in range(1, 7):
        for _ in range(3):
            learner.learn()
            publisher.publish()
        with publisher.checkpoint(step, keeps=[2, 4] if step > 4 else range(step)):
            states[step] = learner.collection.state_dict()
    publisher.flush()
    assert len(list((tmp_path / "outbox").glob("*.keys"))) == 2

    for step in (4, 6, 2):
        learner.collection.load_state_dict(states[step])
        publisher.resume(step)
        publisher.flush()
        check_equal(learner, tmp_path / "log")
        learner.learn()
        publisher.publish()
    with pytest.raises(ConfigError, match=r"outbox: nothing is known of a checkpoint at step 3, .* delete this folder"):
        publisher.resume(3)


def test_an_unfinished_checkpoint_of_the_same_step_does_not_replace_the_earlier_one(learner, publish, tmp_path):
    publisher = publish(learner)
    learner.learn()
    with publisher.checkpoint(5):
        state = learner.collection.state_dict()
    learner.learn()
    with pytest.raises(KeyboardInterrupt), publisher, publisher.checkpoint(5):
        raise KeyboardInterrupt

    learner = Learner(seed=2)
    learner.collection.load_state_dict(state)
    publisher = publish(learner)
    publisher.resume(5)
    publisher.flush()

    check_equal(learner, tmp_path / "log")


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        (("log", "a.b"), {}, "Publisher: model: expected 1 to 120 letters"),
        (("log", "dcn"), {"message_format": "kafka"}, "message_format: expected hotrow or hps, got 'kafka'"),
        (("log", "dcn"), {"rows": "float64"}, "rows: expected float32 or float16 or int8, got 'float64'"),
        (("log", "dcn"), {"rows": "int8", "message_format": "hps"}, "rows: expected float32, got 'int8'"),
        (("log", "dcn"), {"key_bytes": 2}, "key_bytes: expected 4 or 8, got 2"),
        (("nats://host", "dcn"), {}, "nats://...: expected a folder, or a URL"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(tmp_path, learner, arguments, options, expected):
    url, model = arguments
    with pytest.raises(ConfigError, match=expected):
        Publisher(
            url if "://" in url else str(tmp_path / url), model, learner.collection, tmp_path / "outbox", **options
        )

    Publisher(str(tmp_path / "log"), "dcn", learner.collection, tmp_path / "outbox").close()  # nothing is left behind


def test_a_table_name_that_servers_refuse_is_refused(tmp_path, learner):
    with pytest.raises(ConfigError, match=r"Publisher: tables: expected names .*, got '\.x'"):
        Publisher(str(tmp_path / "log"), "dcn", {".x": learner.tables["tags"]}, tmp_path / "outbox")


def test_a_table_has_one_publisher(tmp_path, learner, publish):
    publish(learner)

    with pytest.raises(ValueError, match="table 'user': expected one publisher, got a second one"):
        Publisher(str(tmp_path / "log"), "dcn", learner.collection, tmp_path / "other")


def test_an_outbox_has_one_publisher(tmp_path, learner, publish):
    publish(learner)

    with pytest.raises(OutputError, match="outbox: another publisher uses this outbox"):
        publish(Learner())


def test_an_outbox_of_another_model_is_refused(tmp_path, learner, publish):
    publish(learner).close()

    with pytest.raises(ConfigError, match="model: expected the outbox of model 'wdl', found that of 'dcn'"):
        Publisher(str(tmp_path / "log"), "wdl", learner.collection, tmp_path / "outbox")


def test_an_outbox_that_cannot_be_a_folder_is_refused(tmp_path, learner, publish):
    (tmp_path / "outbox").write_text("")

    with pytest.raises(OutputError, match="outbox: cannot be written: file exists"):
        publish(learner)


@pytest.mark.parametrize(
    ("member", "value", "expected"),
    [
        ("format", 2, "format: expected one of 1, got 2"),
        ("run", 3, "run: expected"),
        ("checkpoints", [1], "checkpoints: expected pairs of a step and a delta"),
    ],
)
def test_a_damaged_state_of_an_outbox_is_refused(tmp_path, learner, publish, member, value, expected):
    publish(learner).close()
    path = tmp_path / "outbox" / "outbox.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {member: value}))

    with pytest.raises(ConfigError, match=f"outbox.json: {expected}"):
        publish(learner)


def test_a_delta_that_is_cut_short_is_refused_at_the_start(tmp_path, learner, publish, memory_log):
    memory_log.is_away = True
    publisher = publish(learner)
    learner.learn()
    publisher.publish()
    crash(publisher)
    [delta] = (tmp_path / "outbox").glob("*.delta")
    delta.write_bytes(delta.read_bytes()[:-1])

    with pytest.raises(ModelFileError, match=r"0000000001\.delta: expected the end of a delta, found other bytes"):
        publish(learner)


def test_a_damaged_delta_is_not_sent_and_ends_the_training(tmp_path, learner, publish, memory_log, caplog):
    memory_log.is_away = True
    publisher = publish(learner)
    learner.learn()
    publisher.publish()
    crash(publisher)
    [delta] = (tmp_path / "outbox").glob("*.delta")
    data = bytearray(delta.read_bytes())
    data[100] ^= 1
    delta.write_bytes(data)
    memory_log.is_away = False

    publisher = publish(learner)
    publisher.flush()

    assert memory_log.messages == []
    assert "no more updates are published: " in caplog.text
    with pytest.raises(ModelFileError, match=r"0000000001\.delta: a message of the delta is damaged"):
        publisher.publish()


def test_damaged_keys_of_an_outbox_are_refused(tmp_path, learner, publish):
    publisher = publish(learner)
    with publisher.checkpoint(1):
        pass
    learner.learn()
    publisher.publish()
    [keys] = (tmp_path / "outbox").glob("*.keys")
    keys.write_bytes(keys.read_bytes()[:-1] + b"x")

    with pytest.raises(ModelFileError, match=r"\.keys: is not a file of an outbox's keys: another checksum"):
        publisher.resume(1)


def test_a_row_that_a_message_cannot_hold_is_an_error_and_nothing_of_the_delta_is_published(learner, publish, tmp_path):
    publisher = publish(learner)
    rows = learner.tables["tags"].new_rows(np.array([8]), np.full((1, 3), np.nan, np.float32))
    learner.tables["tags"].load(rows)

    with pytest.raises(BadMessageError, match="table tags: row 0, of key 8: column 0 is nan"):
        publisher.publish()
    publisher.flush()
    assert list((tmp_path / "log").glob("*.update")) == []
    learner.tables["tags"].load(learner.tables["tags"].new_rows(np.array([8]), np.ones((1, 3), np.float32)))
    publisher.publish()
    publisher.flush()
    check_equal(learner, tmp_path / "log")


def test_deleted_keys_that_come_back_are_published_again(publish, tmp_path):
    learner = Learner({"user": EmbeddingBagConfig(2, max_rows=2)})
    publisher = publish(learner)
    for keys in ([1, 2], [3], [1], [2, 3], [1, 2]):
        learner.learn(user=keys)
        publisher.publish()
    learner.collection({"user": torch.tensor([5, 6])})  # new rows without a step
    publisher.publish()
    publisher.flush()

    kinds = [(message.kind, message.keys.tolist()) for message in messages(tmp_path / "log")]
    assert (Kind.DELETE, [1]) in kinds
    check_equal(learner, tmp_path / "log")
