import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from serving.model.manifest import verify_manifest
from serving.opening import load_model
from tests.training.command.running import hotrow_train
from training.built_in import built_in_graphs
from training.command import cli
from training.data import write_file_list, write_norm, write_raw
from training.data.criteo import write_lines
from training.data.criteo_reader import read_criteo
from training.synthetic.criteo_like import generate

DATA = Path(os.environ.get("HOTROW_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))


def figures(text, name):
    return [float(value) for value in re.findall(rf"^{name} ([\d.]+|nan)", text, flags=re.MULTILINE)]


def write_criteo(path, rows, seed=0):
    data = generate(rows, seed)
    with path.open("w") as file:
        write_lines(file, data.samples, data.counts)
    return path


def test_generated_samples_become_a_served_model(tmp_path, capsys):
    code = hotrow_train(["--synthetic", "3000", "--epochs", "2", "--output", str(tmp_path), "--batch-size", "100"])

    output = capsys.readouterr().out
    assert code == 0
    assert len(figures(output, "loss")) == len(figures(output, "AUC")) == 2
    assert 0.5 < figures(output, "AUC")[-1] < figures(output, "best known AUC")[0]
    assert f"model written to {tmp_path / 'dcn' / '1'}\n" in output
    assert f"hotrow serve {tmp_path}\n" in output
    verify_manifest(tmp_path / "dcn" / "1")


def test_a_network_larger_than_memory_is_refused_with_its_size(tmp_path, capsys, monkeypatch, document):
    def no_memory(*_arguments, **_options):  # PyTorch's message; a real network would need terabytes
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("training.command.run.CtrModel", no_memory)
    graph = tmp_path / "huge.json"
    graph.write_text(json.dumps(document))

    assert hotrow_train(["--synthetic", "100", "--model", str(graph), "--output", str(tmp_path / "out")]) == 1

    assert re.search(r"huge\.json: layers: the weights of the dense network take [\d,]+ bytes", capsys.readouterr().err)


def test_a_criteo_file_and_a_users_graph_become_a_model(tmp_path, capsys, document):
    train, held_out = write_criteo(tmp_path / "train.txt", 500), write_criteo(tmp_path / "eval.txt", 77, seed=1)
    graph = tmp_path / "mine.json"
    graph.write_text(json.dumps(document))

    code = hotrow_train(
        ["--data", str(train), "--eval-data", str(held_out), "--model", str(graph), "--output", str(tmp_path / "out")]
    )

    output = capsys.readouterr().out
    assert code == 0
    assert "500 rows in" in output
    assert "(evaluation: 77 rows," in output
    assert "best known" not in output
    verify_manifest(tmp_path / "out" / "mine" / "1")


def test_the_clause_solver_is_accepted_and_has_no_effect(tmp_path, capsys, document):
    graph = tmp_path / "mine.json"
    graph.write_text(json.dumps({"solver": {"batchsize": 16384}, **document}))

    assert hotrow_train(["--synthetic", "300", "--model", str(graph), "--output", str(tmp_path / "out")]) == 0

    assert f"note: {graph}: solver: no effect: the options of `hotrow train`" in capsys.readouterr().out


def test_without_evaluation_data_the_last_tenth_is_held_out(tmp_path, capsys):
    path = write_criteo(tmp_path / "train.txt", 205)

    assert hotrow_train(["--data", str(path), "--output", str(tmp_path), "--name", "mine"]) == 0

    output = capsys.readouterr().out
    assert "185 rows in" in output
    assert "(evaluation: 20 rows," in output
    keys = np.fromfile(tmp_path / "mine" / "1" / "sparse_embedding1" / "key", "<i8")
    assert sorted(keys.tolist()) == np.unique(read_criteo(path)[:185].bags.keys).tolist()


def test_the_same_command_writes_the_same_model_twice(tmp_path):
    for name in ("one", "two"):
        assert hotrow_train(["--synthetic", "300", "--seed", "5", "--output", str(tmp_path), "--name", name]) == 0

    for file in ("dense.model", "sparse_embedding1/key", "sparse_embedding1/emb_vector"):
        assert (tmp_path / "one" / "1" / file).read_bytes() == (tmp_path / "two" / "1" / file).read_bytes()


def test_the_learning_rate_option_replaces_the_graphs_rate(tmp_path, capsys):
    losses = []
    for rate in ("0.0001", "0.01"):
        options = ["--epochs", "2", "--batch-size", "50", "--learning-rate", rate, "--output", str(tmp_path)]
        assert hotrow_train(["--synthetic", "1000", *options]) == 0
        losses.append(figures(capsys.readouterr().out, "loss")[-1])

    assert losses[1] < losses[0] - 0.05


def test_the_genuine_sample_trains_and_serves(tmp_path, capsys):
    path = DATA / "criteo_sample.csv"
    if not path.exists():
        pytest.skip(f"no real data: {path} is absent (HOTROW_TEST_DATA)")

    assert hotrow_train(["--data", str(path), "--output", str(tmp_path), "--epochs", "3"]) == 0

    losses = figures(capsys.readouterr().out, "loss")
    assert losses[2] < losses[0]
    samples = read_criteo(path)
    with load_model(tmp_path / "dcn") as session:
        predictions = session.predict(samples.dense, samples.bags.keys, samples.bags.row_ptrs)
    assert predictions.shape == (200, 1)
    assert ((predictions > 0) & (predictions < 1)).all()


def test_generated_samples_of_two_labels_are_reported_by_label(tmp_path, capsys):
    assert hotrow_train(["--synthetic", "2000", "--model", "mmoe", "--output", str(tmp_path)]) == 0

    output = capsys.readouterr().out
    assert re.search(r"^best known AUC click 0\.\d{4}, purchase 0\.\d{4}$", output, re.MULTILINE)
    line = (
        r"^AUC click 0\.\d{4}, purchase 0\.\d{4}  \(evaluation: 200 rows, log loss click 0\.\d{4}, purchase 0\.\d{4}\)$"
    )
    assert re.search(line, output, re.MULTILINE)


def test_a_users_arrays_become_a_model(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name, rows in (("train", 300), ("eval", 50)):
        item = rng.integers(0, 9, (rows, 1))
        np.savez(tmp_path / f"{name}.npz", label=item[:, 0] > 4, user=rng.integers(0, 5, rows), item=item)
    data = ["--data", str(tmp_path / "train.npz"), "--eval-data", str(tmp_path / "eval.npz")]

    options = ["--epochs", "30", "--batch-size", "20", "--output", str(tmp_path / "out")]
    assert hotrow_train([*data, "--model", "ncf", *options]) == 0

    assert figures(capsys.readouterr().out, "AUC")[-1] > 0.99
    with load_model(tmp_path / "out" / "ncf") as session:
        likely, unlikely = session.predict(None, [1, 7, 1, 2], [0, 1, 2, 3, 4])[:, 0]
    assert likely > 0.9 > 0.1 > unlikely


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "absent.npz", "--output", "out"], "absent.npz: no such file"),
        (["--data", "bad.npz", "--output", "out"], "bad.npz: expected a .npz file of numbers, found "),
        (["--data", "one.npz", "--output", "out", "--model", "ncf"], "one.npz: 1 sample, expected at least 2"),
        (["--data", "one.npz", "--output", "out"], "one.npz array dense: missing; the file has label, user, item"),
        (
            ["--data", "two.txt", "--output", "out", "--model", "din"],
            "the graph reads 0 dense features, but the data has 13",
        ),
        (
            ["--synthetic", "10", "--output", "out", "--model", "other.json"],
            "other.json: layers[0]: cannot generate samples for 1 labels, 0 dense features and slots user 2, item 1; ",
        ),
        (["--data", "absent.txt", "--output", "out"], "absent.txt: no such file"),
        (
            ["--data", "bad.txt", "--output", "out"],
            "bad.txt line 1: expected the 40 columns of Criteo's data, found 1. To train on other columns, name",
        ),
        (["--data", "one.txt", "--output", "out"], "one.txt: 1 sample, expected at least 2"),
        (["--synthetic", "10", "--output", "bad.txt"], "bad.txt: cannot be created"),
        (
            ["--synthetic", "10", "--output", "out", "--model", "fm"],
            "fm: no such graph file, and no built-in model (bst, dcn, ",
        ),
        (["--synthetic", "10", "--output", "out", "--model", "bad.txt"], "bad.txt"),
        (["--synthetic", "10", "--output", "out", "--name", "a/b"], "model name 'a/b'"),
        (["--synthetic", "10", "--output", "out", "--name", ""], "model name ''"),
        (["--describe", ""], "no such graph file"),
        (
            ["--synthetic", "100", "--output", "out", "--metrics", "/dev/full"],
            "/dev/full: cannot be written: no space left on device",
        ),
        (["--synthetic", "2000", "--output", "out", "--learning-rate", "1e30"], "the loss is not finite at step"),
    ],
)
def test_an_error_is_one_line_with_exit_code_1(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.txt").write_text("what?\n", encoding="utf-8")
    write_criteo(Path("one.txt"), 1)
    write_criteo(Path("two.txt"), 2)
    Path("bad.npz").write_text("what?\n", encoding="utf-8")
    np.savez("one.npz", label=[1], user=[1], item=[1])
    ncf = json.loads(built_in_graphs()["ncf"].read_text())
    ncf["layers"][0]["sparse"][0].update(slot_num=2, max_feature_num_per_sample=2)
    ncf["layers"][3].update(leading_dim=48)
    Path("other.json").write_text(json.dumps(ncf), encoding="utf-8")

    code = hotrow_train(arguments)

    errors = capsys.readouterr().err
    assert code == 1
    assert errors.startswith("hotrow train: ")
    assert errors.count("\n") == 1
    assert message in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ["--output", "out"],
        ["--synthetic", "10"],
        ["--synthetic", "9", "--output", "out"],
        ["--synthetic", "many", "--output", "out"],
        ["--synthetic", "9" * 5000, "--output", "out"],
        ["--synthetic", "10", "--data", "x", "--output", "out"],
        ["--synthetic", "10", "--output", "out", "--epochs", "0"],
        ["--synthetic", "10", "--output", "out", "--batch-size", "-1"],
        ["--synthetic", "10", "--output", "out", "--threads", "65"],
        ["--synthetic", "10", "--output", "out", "--learning-rate", "0"],
        ["--synthetic", "10", "--output", "out", "--learning-rate", "nan"],
        ["--synthetic", "10", "--output", "out", "--eval-data", "x"],
        ["--synthetic", "10", "--output", "out", "--sed", "1"],
    ],
)
def test_a_wrong_option_is_refused_with_exit_code_2(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        hotrow_train(arguments)

    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert "hotrow train: error:" in errors
    assert ("did you mean --seed?" in errors) == ("--sed" in arguments)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_is_quiet(tmp_path, monkeypatch, capsys):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)

    assert hotrow_train(["--synthetic", "10", "--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "hotrow train: interrupted\n"


def test_help_needs_no_torch_and_a_missing_torch_names_the_extra(tmp_path):
    hide_torch = "import sys; sys.modules['torch'] = None; from hotrow.__main__ import run_train; sys.exit(run_train())"

    shown = subprocess.run([sys.executable, "-c", hide_torch, "--help"], capture_output=True, text=True, check=False)
    refused = subprocess.run(
        [sys.executable, "-c", hide_torch, "--synthetic", "10", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert shown.returncode == 0
    assert "--synthetic ROWS" in shown.stdout
    assert f"({', '.join(built_in_graphs())}; default: dcn)" in " ".join(shown.stdout.split())
    assert refused.returncode == 1
    assert refused.stderr == "hotrow train: training needs the package 'torch': pip install 'hotrow[train]'\n"


@pytest.mark.parametrize(("dtype", "key_type"), [("uint32", "I32"), ("int64", "I64")])
def test_norm_files_give_the_model_that_arrays_give(tmp_path, capsys, document, dtype, key_type):
    rng = np.random.default_rng(0)
    labels, dense = rng.integers(0, 2, (400, 1)).astype(np.float32), rng.random((400, 13), np.float32)
    keys = rng.integers(0, 50, (400, 26))
    graph = tmp_path / "two.json"
    graph.write_text(json.dumps(document))
    np.savez(tmp_path / "data.npz", label=labels, dense=dense, wide=keys[:, :6], deep=keys[:, 6:])
    for number, part in enumerate(np.array_split(np.arange(400), 3)):
        write_norm(tmp_path / f"{number}.norm", labels[part], dense[part], keys[part][:, :, None].tolist(), dtype)
    write_file_list(tmp_path / "list.txt", ["0.norm", "1.norm", "2.norm"])

    shown = []
    for data, options in (("data.npz", ()), ("list.txt", ("--key-type", key_type))):
        arguments = ["--data", str(tmp_path / data), "--model", str(graph), "--output", str(tmp_path / data[:4])]
        assert hotrow_train([*arguments, *options]) == 0
        shown.append(figures(capsys.readouterr().out, "loss"))

    assert shown[0] == shown[1]
    one, other = (tmp_path / name / "two" / "1" for name in ("data", "list"))
    ours, theirs = (verify_manifest(version).files for version in (one, other))
    assert {**ours, "training.json": None} == {**theirs, "training.json": None}


def test_a_graph_of_raw_files_is_trained_on_one(tmp_path, capsys, document):
    rng = np.random.default_rng(0)
    document["layers"][0] |= {"format": "Raw", "slot_size_array": [50] * 26}
    graph = tmp_path / "raw.json"
    graph.write_text(json.dumps(document))
    keys = rng.integers(0, 50, (400, 26))
    write_raw(tmp_path / "data.raw", rng.integers(0, 2, (400, 1)), rng.integers(0, 9, (400, 13)), keys)

    assert hotrow_train(["--data", str(tmp_path / "data.raw"), "--model", str(graph), "--output", str(tmp_path)]) == 0

    assert figures(capsys.readouterr().out, "AUC")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "Row"}, r'layers\[0\].format: expected one of "Norm", "Raw", "Parquet", got "Row"; did you mean'),
        (
            {"format": "Raw", "slot_size_array": [5]},
            r"\[0\].slot_size_array: expected 26 numbers, one per slot, got 1",
        ),
    ],
)
def test_a_wrong_description_of_files_is_refused(tmp_path, capsys, document, changes, message):
    document["layers"][0] |= changes
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps(document))

    assert hotrow_train(["--data", str(graph), "--model", str(graph), "--output", str(tmp_path / "out")]) == 1

    assert re.search(message, capsys.readouterr().err)


def test_files_without_samples_are_refused(tmp_path, capsys):
    (tmp_path / "list.txt").write_text("0\n")

    assert hotrow_train(["--data", str(tmp_path / "list.txt"), "--output", str(tmp_path / "out")]) == 1

    assert "list.txt: no samples" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["dcn", "din", "mmoe"])
def test_a_description_names_the_arrays_that_a_model_reads(tmp_path, capsys, monkeypatch, model):
    assert hotrow_train(["--describe", model]) == 0
    described = re.findall(r"^  (\S+) +(?:numbers|integers) \[", capsys.readouterr().out, flags=re.MULTILINE)

    script = Path(__file__).parents[3] / "examples" / "write_npz_file.py"
    monkeypatch.setattr("sys.argv", [str(script), model, str(tmp_path / "data.npz"), "20"])
    runpy.run_path(str(script), run_name="__main__")
    written = np.load(tmp_path / "data.npz").files
    assert set(written) <= set(described)
    assert {name.split(".")[0] for name in described} == {name.split(".")[0] for name in written}


def test_the_results_of_every_epoch_are_in_a_file(tmp_path, capsys):
    file = tmp_path / "metrics.json"
    arguments = ["--synthetic", "3000", "--model", "mmoe", "--epochs", "2", "--output", str(tmp_path / "out")]

    assert hotrow_train([*arguments, "--metrics", str(file)]) == 0

    output = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["model"] == "mmoe"
    assert [epoch["epoch"] for epoch in written["epochs"]] == [1, 2]
    assert [round(epoch["loss"], 4) for epoch in written["epochs"]] == figures(output, "loss")
    for epoch in written["epochs"]:
        shown = (
            f"AUC click {epoch['auc']['click']:.4f}, purchase {epoch['auc']['purchase']:.4f}  (evaluation: 300 rows, "
        )
        assert shown + f"log loss click {epoch['log_loss']['click']:.4f}, " in output


def test_an_auc_of_few_rows_is_announced_as_unreliable(tmp_path, capsys):
    assert hotrow_train(["--synthetic", "200", "--output", str(tmp_path)]) == 0
    few = capsys.readouterr().out
    assert hotrow_train(["--synthetic", "3000", "--output", str(tmp_path)]) == 0

    assert re.search(
        r"^note: \d+ evaluation rows have label 1 and \d+ have 0: too few for a reliable AUC$", few, re.MULTILINE
    )
    assert "too few" not in capsys.readouterr().out


def test_without_an_output_nothing_is_trained(capsys):
    with pytest.raises(SystemExit, match="2"):
        hotrow_train(["--synthetic", "100"])

    assert "the following arguments are required: --output" in capsys.readouterr().err


def test_metrics_that_cannot_be_written_are_refused_before_the_training(tmp_path, capsys):
    file = tmp_path / "none" / "metrics.json"

    assert hotrow_train(["--synthetic", "100", "--output", str(tmp_path / "out"), "--metrics", str(file)]) == 1

    shown = capsys.readouterr()
    assert f"hotrow train: {file}: cannot be written: no such file or directory\n" in shown.err
    assert "loss" not in shown.out


def test_files_with_other_labels_than_the_graph_are_refused(tmp_path, capsys):
    write_norm(tmp_path / "data", np.ones((20, 1)), np.ones((20, 2)), np.ones((20, 4, 1), int).tolist())

    assert hotrow_train(["--data", str(tmp_path / "data"), "--model", "mmoe", "--output", str(tmp_path / "out")]) == 1

    assert "the graph reads 2 labels, but the data has 1" in capsys.readouterr().err
