"""``hotrow train --publish``: the log has the rows of the model that is written, and the manifest its position."""

import logging
import shutil
import time
from contextlib import closing

import numpy as np
import pytest

from serving import ParameterServer
from serving.config import read_repository
from serving.model.manifest import read_manifest
from serving.stream import open_sink
from tests.serving.ps_files import write_ps
from tests.training.command.running import hotrow_train
from tests.training.command.test_checkpoint import tiny
from tests.training.publishing.following import Follower, messages, rows_in
from training.publishing.outbox import Outbox


def arguments(folder, epochs, *more, publish=True):
    """Train the tiny graph, with steps of 10 samples."""
    options = ["--publish", str(folder / "log"), "--publish-steps", "2"] if publish else []
    return tiny(folder, epochs, "--checkpoint", str(folder / "checkpoints"), *options, *more)


def files_in(log):
    return len(list(log.glob("*.update")))


def test_the_log_has_the_rows_of_the_written_model_and_the_manifest_says_the_position(tmp_path):
    assert hotrow_train(arguments(tmp_path, 3)) == 0  # the best epoch is the first, so the rows go back to it

    version = tmp_path / "models" / "tiny" / "1"
    manifest = read_manifest(version)
    assert manifest.positions == {"folder": str(files_in(tmp_path / "log"))}
    assert Follower().follow(tmp_path / "log", manifest.run).tables == rows_in(version)
    assert {message.model for message in messages(tmp_path / "log")} == {"tiny"}
    assert 2 in {message.step for message in messages(tmp_path / "log")}


def test_a_server_of_an_earlier_version_reaches_the_rows_of_a_resumed_training(tmp_path):
    assert hotrow_train(arguments(tmp_path, 1)) == 0
    version = tmp_path / "models" / "tiny" / "1"
    manifest, follower = read_manifest(version), Follower()
    follower.tables = rows_in(version)

    assert hotrow_train(arguments(tmp_path, 2, "--learning-rate", "0.1", "--resume")) == 0

    follower.follow(tmp_path / "log", manifest.run, after=manifest.positions["folder"])
    assert follower.tables == rows_in(tmp_path / "models" / "tiny" / "2")
    assert read_manifest(tmp_path / "models" / "tiny" / "2").run == manifest.run


def test_a_resumed_training_that_did_not_publish_before_publishes_every_row(tmp_path):
    assert hotrow_train(arguments(tmp_path, 1, publish=False)) == 0
    assert read_manifest(tmp_path / "models" / "tiny" / "1").run == ""
    assert hotrow_train(arguments(tmp_path, 2, "--resume")) == 0

    assert Follower().follow(tmp_path / "log").tables == rows_in(tmp_path / "models" / "tiny" / "2")


def test_a_checkpoint_that_the_outbox_does_not_know_is_refused(tmp_path, capsys):
    assert hotrow_train(arguments(tmp_path, 1)) == 0
    assert hotrow_train(arguments(tmp_path, 2, "--resume", publish=False)) == 0

    assert hotrow_train(arguments(tmp_path, 3, "--resume")) == 1

    assert "outbox: nothing is known of a checkpoint at step 12, so what servers have" in capsys.readouterr().err


def test_a_log_that_is_away_does_not_stop_the_training(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "log").write_text("")
    assert hotrow_train(arguments(tmp_path, 1)) == 0
    assert caplog.text.count("updates wait in the outbox, because the log does not take them: ") == 1
    manifest = read_manifest(tmp_path / "models" / "tiny" / "1")
    assert manifest.positions == {}

    (tmp_path / "log").unlink()
    assert hotrow_train(arguments(tmp_path, 1, "--resume")) == 0

    assert Follower().follow(tmp_path / "log", manifest.run).tables == rows_in(tmp_path / "models" / "tiny" / "2")


def test_a_new_training_in_the_folder_is_a_new_run(tmp_path):
    open_sink(str(tmp_path / "log")).send(b"of another writer", 0)
    outbox = tmp_path / "checkpoints" / "outbox"
    outbox.mkdir(parents=True)
    (outbox / "outbox.json").write_text("of a run that ended before its first checkpoint")
    (outbox / "0000000001.delta").write_text("of this run, too")
    (outbox / "notes").write_text("of a person")

    assert hotrow_train(arguments(tmp_path, 1)) == 0

    assert (outbox / "notes").read_text() == "of a person"

    manifest = read_manifest(tmp_path / "models" / "tiny" / "1")
    follower = Follower().follow(tmp_path / "log", manifest.run, after="1")
    assert follower.tables == rows_in(tmp_path / "models" / "tiny" / "1")


def test_a_new_training_does_not_take_the_outbox_of_a_publisher_that_runs(tmp_path, capsys):
    outbox = tmp_path / "checkpoints" / "outbox"
    with closing(Outbox(outbox, "tiny", 1 << 20)):
        assert hotrow_train(arguments(tmp_path, 1)) == 1
    assert "another publisher uses this outbox" in capsys.readouterr().err
    assert (outbox / "outbox.json").exists()


@pytest.mark.parametrize("rows", ["float16", "int8"])
def test_rows_may_be_narrower(tmp_path, rows):
    assert hotrow_train(arguments(tmp_path, 1, "--publish-rows", rows)) == 0

    expected = rows_in(tmp_path / "models" / "tiny" / "1")
    tables = Follower().follow(tmp_path / "log").tables
    assert {name: set(table) for name, table in tables.items()} == {
        name: set(table) for name, table in expected.items()
    }
    for name, table in tables.items():
        assert table.keys() == expected[name].keys()
        for key, row in table.items():
            difference = np.frombuffer(row, np.float32) - np.frombuffer(expected[name][key], np.float32)
            assert np.abs(difference).max() < 0.01


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--publish", "log"], "--publish needs --checkpoint, where its outbox is"),
        (["--publish-format", "hps", "--publish-rows", "int8"], "--publish-format hps has rows of float32"),
        (["--publish-format", "kafka"], "argument --publish-format: invalid choice: 'kafka'"),
        (["--publish-steps", "0"], "argument --publish-steps: "),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, capsys, options, expected):
    with pytest.raises(SystemExit, match="2"):
        hotrow_train(tiny(tmp_path, 1, *options))

    assert expected in capsys.readouterr().err


def test_settings_of_the_log_come_from_a_file(tmp_path, memory_log):
    (tmp_path / "settings.json").write_text('{"sasl.password": "secret"}')

    assert hotrow_train(arguments(tmp_path, 1, "--publish-settings", str(tmp_path / "settings.json"))) == 0

    assert memory_log.settings == {"sasl.password": "secret"}
    assert memory_log.messages


@pytest.mark.parametrize("text", ["[]", '{"sasl.password": 3}', "{"])
def test_settings_that_are_no_texts_are_refused(tmp_path, capsys, text):
    (tmp_path / "settings.json").write_text(text)

    assert hotrow_train(arguments(tmp_path, 1, "--publish-settings", str(tmp_path / "settings.json"))) == 1

    assert "settings.json: " in capsys.readouterr().err


def test_a_url_of_no_log_is_refused_before_the_training(tmp_path, capsys):
    assert hotrow_train([*arguments(tmp_path, 1, publish=False), "--publish", "nats://host/subject"]) == 1

    assert "nats://...: expected a folder, or a URL" in capsys.readouterr().err


def test_hps_messages_need_a_log_with_topics(tmp_path, caplog):
    assert hotrow_train(arguments(tmp_path, 1, "--publish-format", "hps")) == 0

    assert "a folder has no topic 'hps_et.tiny." in caplog.text
    assert files_in(tmp_path / "log") == 0


def test_hotrows_server_follows_a_training_to_its_last_rows(tmp_path):
    """The server has the first version, and reads the rest of the training from the log."""
    slow = ("--learning-rate", "0.001")  # so the last epoch is the best
    assert hotrow_train(arguments(tmp_path, 1, *slow)) == 0
    assert hotrow_train(arguments(tmp_path, 3, *slow, "--resume")) == 0
    models = tmp_path / "models"
    before, expected = rows_in(models / "tiny" / "1"), rows_in(models / "tiny" / "2")
    shutil.rmtree(models / "tiny" / "2")
    write_ps(models, update_source={"type": "folder", "path": str(tmp_path / "log"), "poll_timeout_ms": 20})
    config = read_repository(models)
    [model] = config.models

    assert before != expected
    with ParameterServer.from_config(config) as server:
        until = time.monotonic() + 30
        while (found := served(server, model, expected)) != expected:
            assert time.monotonic() < until, found
            time.sleep(0.02)


def served(server, model, tables):
    """The rows of these keys in a server."""
    found = {}
    for table in model.tables:
        keys = np.array(list(tables[table.name]))
        rows = server.lookup(f"tiny@1.{table.name}", keys)[0]
        found[table.name] = {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}
    return found
