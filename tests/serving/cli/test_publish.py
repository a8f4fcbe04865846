"""``hotrow publish``: the rows of a folder as messages."""

from pathlib import Path

import numpy as np
import pytest

from serving.cli.main import main
from serving.model.sparse_writer import write_table_folders
from serving.stream import decode, open_source

KEYS, ROWS = np.arange(-5, 3000), np.random.default_rng(0).normal(size=(3005, 4)).astype(np.float32)


@pytest.fixture
def delta(tmp_path):
    """A folder with two tables, as ``export_delta`` writes it."""
    write_table_folders(tmp_path / "delta", {"user": [(KEYS, ROWS)], "item": [(KEYS[:3], ROWS[:3, :1])]})
    return tmp_path / "delta"


@pytest.fixture
def publish(delta, tmp_path, capsys):
    """Run the command, and return its exit code and what it printed."""

    def run(*options, folder=delta, url=tmp_path / "log", model="dcn"):
        code = main(["publish", str(folder), str(url), "--model", model, *map(str, options)])
        return code, capsys.readouterr()

    return run


def messages(log):
    source = open_source(str(log))
    source.start({})
    return [decode(record.payload) for record in source.poll(0.0)]


@pytest.mark.parametrize(("rows", "error"), [("float32", 0), ("float16", 2e-3), ("int8", 3e-2)])
def test_the_messages_have_the_rows_of_the_folder(publish, tmp_path, rows, error):
    code, shown = publish("--rows", rows)

    assert (code, shown.out) == (0, "item: published 3 rows\nuser: published 3,005 rows\n")
    tables = {"user": {}, "item": {}}
    for message in messages(tmp_path / "log"):
        assert (message.model, message.kind, message.run, message.sequence) == ("dcn", "upsert", None, None)
        assert message.time_ms is not None
        tables[message.table] |= dict(zip(message.keys.tolist(), message.rows, strict=True))
    assert set(tables["item"]) == {-5, -4, -3}
    np.testing.assert_allclose(np.stack([tables["user"][key] for key in KEYS.tolist()]), ROWS, atol=error, rtol=0)


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        (np.nan, [], "table user: row 0, of key 2999: column 3 is nan"),
        (1e6, ["--rows", "float16"], "column 3 is 1000000, which float16 cannot hold"),
        (1, ["--format", "hps", "--key-type", "I32"], "is not a uint32, the model's key type"),
    ],
)
def test_a_row_that_cannot_be_sent_is_refused_before_any_row_is_sent(publish, tmp_path, value, options, expected):
    rows = ROWS.copy()
    rows[-1, 3] = value
    write_table_folders(tmp_path / "delta", {"user": [(KEYS, rows)]})

    code, shown = publish(*options)

    assert code == 1
    assert "hotrow publish: table user: " in shown.err
    assert expected.removeprefix("table user: row 0, ") in shown.err
    assert list((tmp_path / "log").iterdir()) == []


def test_a_folder_without_tables_is_refused(publish, tmp_path):
    (tmp_path / "empty").mkdir()

    for folder, expected in (("empty", "no tables found"), ("absent", "no such file")):
        code, shown = publish(folder=tmp_path / folder)
        assert code == 1
        assert f"{tmp_path / folder}: {expected}" in shown.err


def test_a_file_of_a_whole_model_is_refused(publish, tmp_path):
    (tmp_path / "model.safetensors").touch()

    assert publish(folder=tmp_path / "model.safetensors")[1].err.endswith(": expected a folder of tables\n")


def test_rows_of_another_system_are_sent(publish, tmp_path):
    (tmp_path / "tfra").mkdir()
    KEYS[:2].tofile(tmp_path / "tfra" / "user_mht_1of1-keys")
    ROWS[:2].tofile(tmp_path / "tfra" / "user_mht_1of1-values")

    assert publish(folder=tmp_path / "tfra")[1].out == "user: published 2 rows\n"
    sent = messages(tmp_path / "log")  # one for each group of keys
    assert sorted(key for message in sent for key in message.keys.tolist()) == KEYS[:2].tolist()


def test_the_tables_of_a_checkpoint_of_tensorflow_are_sent(publish, tmp_path):
    golden = Path(__file__).parents[1] / "sources" / "checkpoints"

    assert publish(folder=golden / "session")[1].out == "ads: published 100 rows\ntags: published 4 rows\n"
    assert publish(folder=golden / "keras" / "ckpt-1")[1].out == "users: published 5 rows\nitems: published 7 rows\n"
    assert {message.table for message in messages(tmp_path / "log")} == {"ads", "tags", "users", "items"}


def test_two_tables_with_one_name_are_refused(publish, tmp_path):
    for folder in ("left", "right"):
        (tmp_path / "dump" / folder).mkdir(parents=True)
        KEYS[:1].tofile(tmp_path / "dump" / folder / "user_emb_keys.rank_0.world_size_1")
        ROWS[:1].tofile(tmp_path / "dump" / folder / "user_emb_values.rank_0.world_size_1")

    code, shown = publish(folder=tmp_path / "dump")

    assert code == 1
    assert "dump: expected tables of different names, found 'user' in 'right/user' again" in shown.err


@pytest.mark.parametrize("cut", ["key", "emb_vector"])
def test_a_damaged_table_is_refused(publish, delta, cut):
    path = delta / "user" / cut
    path.write_bytes(path.read_bytes()[:-1])

    code, shown = publish()

    assert code == 1
    assert f"hotrow publish: {delta / 'user'}" in shown.err


def test_a_log_that_cannot_be_used_is_an_error(publish, tmp_path):
    (tmp_path / "log").write_text("")

    code, shown = publish()
    assert code == 1
    assert "log: cannot be used: File exists" in shown.err
    code, shown = publish(url="nats://user:secret@host")
    assert code == 1
    assert "expected a folder, or a URL" in shown.err
    assert "secret" not in shown.err


def test_hps_messages_need_a_log_with_topics(publish, tmp_path):
    write_table_folders(tmp_path / "delta", {"user": [(KEYS, ROWS)]})

    code, shown = publish("--format", "hps")

    assert code == 1
    assert "a folder has no topic 'hps_et.dcn.user'" in shown.err


def test_options_that_do_not_fit_are_refused(publish, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        publish("--format", "hps", "--rows", "int8")
    code, shown = publish(model="a.b")
    assert code == 1
    assert "--model: expected 1 to 120 letters" in shown.err
    (tmp_path / "settings.json").write_text("[]")
    code, shown = publish("--settings", tmp_path / "settings.json")
    assert code == 1
    assert "settings.json: " in shown.err
