"""Checkpoints, the best epoch, early stopping and the picture of a run."""

import json
import os
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from serving.errors import ConfigError
from serving.model.atomic import temporary_directory
from tests.tools.warm import Warm
from tests.training.command.running import hotrow_train
from tests.training.command.test_cli import write_criteo
from training.checkpoint_file import write_checkpoint_file
from training.command.checkpoint import Checkpoints
from training.model.metrics import calibration

ROOT = Path(__file__).parents[3]


def arguments(folder, *more, epochs=2, rows=2000):
    return [
        *("--synthetic", str(rows), "--model", "wdl", "--batch-size", "100", "--epochs", str(epochs)),
        *("--output", str(folder), "--checkpoint", str(folder / "checkpoints"), "--checkpoint-steps", "7", *more),
    ]


EARLIER = Path(__file__).parent / "earlier"


def tiny(folder, epochs, *more):
    """Train the graph next to the checkpoint of the earlier version. Its first epoch is the best."""
    return [
        *("--data", str(EARLIER / "train.npz"), "--model", str(EARLIER / "graph.json"), "--name", "tiny"),
        *("--batch-size", "10", "--learning-rate", "0.1", "--epochs", str(epochs), "--output", str(folder / "models")),
        *more,
    ]


def model_files(repository, version=1, name="wdl"):
    folder = repository / name / str(version)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "training.json")
    }


def start(folder, *more, **options):
    """Start the command in a process of its own."""
    return Warm(
        "-m", "serving.cli.main", "train", *arguments(folder, *more, **options), cwd=ROOT, stderr=subprocess.PIPE
    )


def wait_for(condition, process):
    until = time.monotonic() + 100
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_killed_training_resumes_to_the_same_model(tmp_path, capsys):
    """Two kills, at any moment: the resumed training writes the model that an undisturbed one writes."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    metrics = tmp_path / "metrics.json"
    assert hotrow_train(arguments(whole, "--metrics", str(metrics), epochs=3, rows=4000)) == 0
    expected = json.loads(metrics.read_text())["epochs"]
    checkpoints = killed / "checkpoints"

    def newest():
        return max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=0)

    for resume, at_step in (((), 14), (("--resume",), 56)):
        process = start(killed, *resume, epochs=3, rows=4000)
        wait_for(lambda at_step=at_step: newest() >= at_step, process)
        process.kill()
        process.communicate()
        assert not (killed / "wdl").exists()
    capsys.readouterr()
    metrics.unlink()

    assert hotrow_train(arguments(killed, "--resume", "--metrics", str(metrics), epochs=3, rows=4000)) == 0

    assert re.search(r"^resumed at step \d+, in epoch [23]$", capsys.readouterr().out, re.MULTILINE)
    assert model_files(killed) == model_files(whole)
    written = json.loads(metrics.read_text())["epochs"]
    for epoch in (*expected, *written):
        del epoch["seconds"]
    assert written == expected


def test_fewer_epochs_than_the_checkpoint_has_are_refused(tmp_path, capsys):
    assert hotrow_train(tiny(tmp_path, 2, "--checkpoint", str(tmp_path / "c"))) == 0

    assert hotrow_train(tiny(tmp_path, 1, "--checkpoint", str(tmp_path / "c"), "--resume")) == 1

    assert "c: expected --epochs of at least 2, because it has 2 epochs, got 1" in capsys.readouterr().err
    assert not (tmp_path / "models" / "tiny" / "2").exists()


def test_a_checkpoint_that_a_killed_training_was_replacing_is_not_forgotten(tmp_path, capsys):
    assert hotrow_train(tiny(tmp_path, 1, "--checkpoint", str(tmp_path))) == 0
    (tmp_path / "step-6").rename(tmp_path / ".step-6.0a1b2c3d.old")

    assert hotrow_train(tiny(tmp_path, 1, "--checkpoint", str(tmp_path))) == 1

    assert "step-6: a checkpoint of an earlier training; continue it with --resume" in capsys.readouterr().err
    assert hotrow_train(tiny(tmp_path, 2, "--checkpoint", str(tmp_path), "--resume")) == 0
    assert "resumed at step 6, in epoch 2" in capsys.readouterr().out


def test_a_second_training_cannot_use_the_folder_of_one_that_runs(tmp_path, capsys):
    first = start(tmp_path, epochs=500)
    try:
        wait_for(lambda: list((tmp_path / "checkpoints").glob("step-*")), first)

        assert hotrow_train(arguments(tmp_path, "--resume", epochs=500)) == 1
    finally:
        first.kill()
        first.communicate()

    assert "checkpoints: another training writes its checkpoints here" in capsys.readouterr().err


def test_data_from_a_file_that_has_moved_resumes_within_a_window(tmp_path):
    path = write_criteo(tmp_path / "train.txt", 1500)

    def options(folder, *more):
        return [
            *("--data", str(path), "--window", "200", "--batch-size", "50", "--output", str(tmp_path / folder)),
            *("--checkpoint", str(tmp_path / folder / "c"), "--checkpoint-steps", "5", "--model", "wdl", *more),
        ]

    assert hotrow_train(options("whole")) == 0
    assert hotrow_train(options("again")) == 0
    newest = max((tmp_path / "again" / "c").glob("step-*"))
    document = json.loads((newest / "checkpoint.json").read_text())
    assert document["position"]["step"] == 27
    path = path.rename(tmp_path / "moved.txt")
    assert hotrow_train(options("again", "--resume")) == 0

    assert model_files(tmp_path / "again", 2) == model_files(tmp_path / "whole")


def test_only_the_newest_checkpoint_is_kept_and_nothing_else_is_touched(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-mine").mkdir(parents=True)
    (checkpoints / "step-3").mkdir()
    (checkpoints / "notes").write_text("kept")
    half_removed = checkpoints / "step-2"

    assert hotrow_train(tiny(tmp_path, 1, "--checkpoint", str(checkpoints), "--checkpoint-steps", "2")) == 0
    half_removed.mkdir()
    (half_removed / "1.rows").write_text("of a training that was killed when it removed the checkpoint")
    assert hotrow_train(tiny(tmp_path, 2, "--checkpoint", str(checkpoints), "--resume")) == 0

    names = ["notes", "step-12", "step-3", "step-6", "step-mine"]  # the first epoch, of 6 steps, is the best
    assert sorted(path.name for path in checkpoints.iterdir()) == names


def test_what_killed_trainings_were_writing_is_removed_at_the_next_start(tmp_path):
    checkpoints, output = tmp_path / "checkpoints", tmp_path / "models"
    kept = [checkpoints / ".step-mine.0a1b2c3d.tmp", checkpoints / ".step-7.tmp", output / ".mine.0a1b2c3d.tmp"]
    killed = [
        checkpoints / ".step-7.0a1b2c3d.tmp",
        output / ".hotrow-train.0a1b2c3d.tmp",
        output / "tiny/.1.0a1b2c3d.tmp",
    ]
    for folder in (*kept, *killed):
        folder.mkdir(parents=True)
        (folder / "half").write_text("half")

    with temporary_directory(output / "hotrow-train") as of_a_live_process:
        (output / ".hotrow-train.1a1b2c3d.tmp").mkdir()
        assert hotrow_train(tiny(tmp_path, 1, "--checkpoint", str(checkpoints))) == 0
        assert hotrow_train(tiny(tmp_path, 2)) == 0
        assert of_a_live_process.is_dir()

    assert [folder for folder in killed if folder.exists()] == []
    assert not (output / ".hotrow-train.1a1b2c3d.tmp").exists()
    assert all((folder / "half").exists() for folder in kept)


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory):
    """The folder of a training of one epoch."""
    folder = tmp_path_factory.mktemp("one_epoch")
    assert hotrow_train(arguments(folder, epochs=1)) == 0
    return folder


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch-size", "200"], "settings.batch_size: the checkpoint was made with 100, and now it is 200"),
        (["--seed", "3"], "settings.seed: the checkpoint was made with 0, and now it is 3"),
        (["--synthetic", "2010"], "settings.rows[0]: the checkpoint was made with 1800, and now it is 1809"),
        (["--learning-rate", "0.5"], "settings.learning_rate: the checkpoint was made with null, and now it is 0.5"),
        (["--model", "dcn"], "settings.graph.layers"),
    ],
)
def test_other_settings_cannot_resume(one_epoch, capsys, more, message):
    assert hotrow_train(arguments(one_epoch, "--resume", *more)) == 1

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (
            {"a": 1},
            {"a": 1, "missing": 0},
            "settings.features[1].missing: the checkpoint was made with none, and now it is 0",
        ),
        ({"a": 1, "salt": [1, 2]}, {"a": 1}, "settings.features[1].salt: the checkpoint was made with [1, 2], and now"),
        ({"a": ["b"] * 99}, {"a": ["b"] * 98}, "settings.features[1].a: the checkpoint was made with 99 entries, and"),
        ({"a": "b" * 99 + "c"}, {"a": "b" * 99 + "d"}, 'bbbbbbbbbbc", and now it is ...'),
    ],
)
def test_the_differing_member_of_the_settings_is_named(tmp_path, was, now, message):
    before, after = ({"features": [{"name": "long " * 30}, feature], "content": {}} for feature in (was, now))
    (tmp_path / "step-1").mkdir()
    write_checkpoint_file(tmp_path / "step-1", {"settings": before, "position": {}, "results": []})
    with pytest.raises(ConfigError, match=re.escape(message)):
        Checkpoints(tmp_path, None, "Adam", after).load()


def test_without_a_checkpoint_nothing_starts_from_zero(tmp_path, capsys):
    assert hotrow_train(arguments(tmp_path, "--resume")) == 1

    shown = capsys.readouterr()
    assert "checkpoints: no checkpoint, so nothing can be resumed" in shown.err
    assert "loss" not in shown.out
    with pytest.raises(SystemExit, match="2"):
        hotrow_train(["--synthetic", "100", "--output", str(tmp_path), "--resume"])
    assert "--resume needs --checkpoint" in capsys.readouterr().err


def test_a_full_disk_keeps_the_last_checkpoint(one_epoch, tmp_path, capsys):
    shutil.copytree(one_epoch, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert hotrow_train(arguments(tmp_path, "--resume", epochs=2)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert "cannot be written: file too large" in capsys.readouterr().err.lower()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def losses(text):
    return [float(found) for found in re.findall(r"log loss ([\d.]+)\)$", text, re.MULTILINE)]


def test_the_best_epoch_is_written(tmp_path, capsys):
    """Few samples and a high rate: a later epoch is worse."""

    def overfit(name, epochs):
        options = ("--synthetic", "400", "--model", "wdl", "--batch-size", "20", "--learning-rate", "0.01")
        return [*options, "--epochs", str(epochs), "--output", str(tmp_path / name)]

    assert hotrow_train(overfit("a", 4)) == 0
    output = capsys.readouterr().out
    best = losses(output).index(min(losses(output))) + 1
    assert best < 4
    assert f"the model of epoch {best} is written, because its log loss is the best" in output

    assert hotrow_train(overfit("b", best)) == 0

    assert model_files(tmp_path / "a") == model_files(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["ps.json", "wdl"]


def test_patience_stops_a_training_that_gets_worse(tmp_path, capsys):
    assert hotrow_train(tiny(tmp_path, 20, "--patience", "2")) == 0

    output = capsys.readouterr().out
    found = losses(output)
    best = found.index(min(found))
    assert len(found) == best + 3 < 20
    assert "stopped: 2 epochs without a better log loss" in output


@pytest.fixture(scope="module", params=[(), ("--patience", "2")], ids=["all epochs", "early stopping"])
def uninterrupted(request, tmp_path_factory):
    """The folder of a training of five epochs, its epochs, and its options."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    metrics = folder / "metrics.json"
    assert hotrow_train(tiny(folder, 5, "--metrics", str(metrics), *request.param)) == 0
    return folder, epochs_of(metrics), request.param


def epochs_of(metrics):
    """The epochs without their times."""
    return [{**epoch, "seconds": None} for epoch in json.loads(metrics.read_text())["epochs"]]


@pytest.mark.parametrize("first", [1, 3])
def test_more_epochs_are_exactly_the_uninterrupted_run(tmp_path, uninterrupted, first):
    """After one epoch and after several, and with early stopping."""
    whole, expected, patience = uninterrupted
    metrics, checkpoint = tmp_path / "metrics.json", ("--checkpoint", str(tmp_path / "c"), *patience)
    assert hotrow_train(tiny(tmp_path, first, *checkpoint)) == 0
    assert hotrow_train(tiny(tmp_path, 5, *checkpoint, "--resume", "--metrics", str(metrics))) == 0

    found = epochs_of(metrics)
    assert found == expected
    assert model_files(tmp_path / "models", 2, "tiny") == model_files(whole / "models", 1, "tiny")
    assert (len(found) < 5) == bool(patience)


def test_a_training_that_has_stopped_early_stops_again(tmp_path, capsys):
    options = ("--checkpoint", str(tmp_path / "c"), "--patience", "2")
    assert hotrow_train(tiny(tmp_path, 5, *options)) == 0
    first = capsys.readouterr().out

    assert hotrow_train(tiny(tmp_path, 5, *options, "--resume")) == 0

    assert "stopped: 2 epochs without a better log loss" in first
    assert capsys.readouterr().out.splitlines()[-4:-2] == first.splitlines()[-4:-2]
    assert model_files(tmp_path / "models", 2, "tiny") == model_files(tmp_path / "models", 1, "tiny")


@pytest.fixture
def earlier(tmp_path):
    """A checkpoint of the earlier version, after two epochs."""
    shutil.copytree(EARLIER / "checkpoints", tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "step-12" / "checkpoint.json"
    document = json.loads(file.read_text())
    document["settings"]["data"] = str(EARLIER / "train.npz")
    file.write_text(json.dumps(document))
    return ("--checkpoint", str(tmp_path / "checkpoints"), "--resume")


def test_a_checkpoint_of_the_earlier_revision_loads(tmp_path, earlier):
    """It has other files of rows, no checksums, and the model of the best epoch in a folder of its own."""
    assert hotrow_train(tiny(tmp_path / "now", 2)) == 0

    assert hotrow_train(tiny(tmp_path, 2, *earlier)) == 0

    best, files = EARLIER / "checkpoints" / "best", model_files(tmp_path / "models", 1, "tiny")
    assert files.keys() == model_files(tmp_path / "now" / "models", 1, "tiny").keys()
    for name in ("dense.model", "dense.model.ntp.json"):
        assert files[name] == (best / name).read_bytes()
    rows_of = {"wide_table": [("row", "V4")], "deep_table": [("slot", "V8"), ("row", "V16")]}
    for t, (table, fields) in enumerate(rows_of.items()):
        rows = np.fromfile(best / f"{t}.sparse", [("key", "<i8"), *fields])
        found = np.frombuffer(files[f"{table}/emb_vector"], fields[-1][1])
        keys = np.frombuffer(files[f"{table}/key"], np.int64)
        assert dict(zip(keys, found, strict=True)) == dict(zip(rows["key"], rows["row"], strict=True))


def test_a_checkpoint_of_the_earlier_revision_goes_on(tmp_path, earlier):
    """The checkpoint comes from another processor, whose sums may differ in their last bits."""
    metrics = tmp_path / "metrics.json"
    assert hotrow_train(tiny(tmp_path / "now", 3, "--metrics", str(metrics))) == 0
    expected = json.loads(metrics.read_text())["epochs"][-1]

    assert hotrow_train(tiny(tmp_path, 3, *earlier, "--metrics", str(metrics))) == 0

    found = json.loads(metrics.read_text())["epochs"][-1]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["log_loss"]["label"] == pytest.approx(expected["log_loss"]["label"], rel=0.01)


def test_data_that_has_changed_cannot_resume(tmp_path, capsys):
    data = tmp_path / "train.npz"
    shutil.copy(EARLIER / "train.npz", data)
    arrays = dict(np.load(data))
    for window in ("100", "20"):
        options = ("--data", str(data), "--window", window, "--checkpoint", str(tmp_path / window))
        np.savez(data, **arrays)
        assert hotrow_train(tiny(tmp_path, 1, *options)) == 0
        assert hotrow_train(tiny(tmp_path, 2, *options, "--resume")) == 0
        for name in ("label", "dense", "wide"):
            changed = {**arrays, name: arrays[name].copy()}
            changed[name][3] = 1 - changed[name][3]
            np.savez(data, **changed)
            capsys.readouterr()

            assert hotrow_train(tiny(tmp_path, 2, *options, "--resume")) == 1

            changes = r"train\.npz has changed since the checkpoint: expected samples with CRC-32 \w+, got \w+"
            assert re.search(rf"content\.data: .*{changes}", capsys.readouterr().err)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after one epoch."""
    folder = tmp_path_factory.mktemp("saved")
    assert hotrow_train(tiny(folder, 1, "--checkpoint", str(folder / "checkpoints"))) == 0
    return folder / "checkpoints"


FILES = [
    "0.rows",
    "1.rows",
    "checkpoint.json",
    "dense.model",
    "dense.model.ntp.json",
    "dense.states",
    "dense.states.json",
]


@pytest.mark.parametrize("name", FILES)
def test_every_missing_or_damaged_file_is_named(tmp_path, capsys, saved, name):
    shutil.copytree(saved, tmp_path / "c")
    file = tmp_path / "c" / "step-6" / name
    assert sorted(path.name for path in file.parent.iterdir()) == FILES
    whole = file.read_bytes()
    middle = len(whole) // 2
    damages = [None, b"", whole[:-2], whole[:middle], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]]
    if name.endswith(".rows"):  # other files are compared with their sums
        other = (file.parent / ("1.rows" if name == "0.rows" else "0.rows")).read_bytes()
        damages += [
            other,
            whole + b"0",
            whole.replace(b'"adam"', b'"ftrl"'),
            whole.replace(b'"states": ', b'"states": 1'),
            b"{}\n" + whole,
        ]
    for content in damages:
        file.unlink() if content is None else file.write_bytes(content)

        assert hotrow_train(tiny(tmp_path, 2, "--checkpoint", str(tmp_path / "c"), "--resume")) == 1

        expected = (
            "no such file" if content is None else r"expected .*(found|got)|not UTF-8|line \d+|checkpoint was made with"
        )
        assert re.search(rf"step-6/{re.escape(name)}: .*({expected})", capsys.readouterr().err, re.IGNORECASE), content
    file.unlink()
    os.mkfifo(file)

    assert hotrow_train(tiny(tmp_path, 2, "--checkpoint", str(tmp_path / "c"), "--resume")) == 1

    assert f"step-6/{name}: cannot be read: not a regular file" in capsys.readouterr().err


def test_a_missing_checkpoint_of_the_best_epoch_is_named_before_training(tmp_path, capsys):
    options = tiny(tmp_path, 3, "--checkpoint", str(tmp_path / "c"))
    assert hotrow_train(options) == 0
    shutil.rmtree(tmp_path / "c" / "step-6")  # of the first epoch, which is the best
    capsys.readouterr()

    assert hotrow_train([*options, "--epochs", "9", "--resume"]) == 1

    printed = capsys.readouterr()
    assert "step-6/checkpoint.json: no such file" in printed.err
    assert "loss" not in printed.out


def test_a_picture_of_the_epochs(tmp_path, capsys):
    picture = tmp_path / "run.svg"
    options = ["--synthetic", "1000", "--model", "mmoe", "--output", str(tmp_path / "out"), "--plot"]

    assert hotrow_train([*options, str(picture)]) == 0
    text = picture.read_text()
    assert "<svg" in text
    for words in ("log loss", "AUC", "calibration of the last epoch", "evaluation, click", "purchase"):
        assert words in text

    capsys.readouterr()
    expected = "expected a file that ends in .svg, .png, .pdf"
    for file, reason in (("none/run.svg", "cannot be written: No such file"), ("run.doc", expected), ("run", expected)):
        assert hotrow_train([*options, str(tmp_path / file)]) == 1
        shown = capsys.readouterr()
        assert reason in shown.err
        assert str(tmp_path / file) in shown.err
        assert "loss" not in shown.out


def test_calibration_compares_predictions_with_what_happened():
    import numpy as np

    predictions = np.repeat([0.1, 0.5, 0.9], 100)
    labels = np.concatenate([np.arange(100) < 10, np.arange(100) < 80, np.arange(100) < 90]).astype(np.float32)

    found = calibration(labels, predictions, groups=3)

    np.testing.assert_allclose(found, [(0.1, 0.1), (0.5, 0.8), (0.9, 0.9)], atol=1e-6)
    assert len(calibration(labels[:4], predictions[:4])) == 4
