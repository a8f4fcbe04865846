"""Training in several real processes against the same training in one."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import TCPStore

from serving.cli.main import main
from serving.model.dense_file import read_dense
from serving.model.graph import parse_graph
from serving.model.sparse_file import open_sparse
from tests.tools.warm import Warm
from tests.training.hugectr.conftest import GRAPH, write_data
from tests.training.publishing.following import Follower

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
HOTROW = ("-m", "serving.cli.main")


def run(*arguments, processes=1, cwd):
    """Run Python in several processes as torchrun does, with a store outside them, and return their output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if processes > 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(processes)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    how = {"cwd": cwd, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        started = [
            stack.enter_context(Warm(*arguments, env=environment | {"RANK": str(rank)}, **how))
            for rank in range(processes)
        ]
        for process in started:
            stack.callback(process.kill)
        printed = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes, printed
    return "".join(printed)


def torchrun(*command, cwd):
    """Run a command in two processes that torchrun starts, and return their output."""
    start = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*start, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=True
    ).stdout


def rows_of(path, dim, row_layout="distributed", key_type="I64"):
    """The rows of a sparse model by key."""
    model = open_sparse(path, dim, key_type, row_layout)
    keys, vectors = (np.concatenate(part) for part in zip(*model.batches(1000), strict=True))
    order = np.argsort(keys)
    return keys[order], vectors[order], None if model.slot_ids is None else np.array(model.slot_ids)[order]


def dict_of(repository):
    """The rows of the model deepfm, as a follower of updates has them."""
    keys, vectors, _ = rows_of(Path(repository) / "deepfm" / "1" / "sparse_embedding1", 17)
    return dict(zip(keys.tolist(), map(bytes, vectors), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.long)])
def test_lookups_in_shared_tables_are_those_of_one_process(processes, tmp_path):
    out = run("-m", "tests.training.processes.compare", processes=processes, cwd=tmp_path)

    for rank in range(processes):
        assert f"rank {rank} of {processes}: all equal" in out
        assert f"seed 0 rank {rank}: equal" in out
    assert out.count("another process has ended") == processes - 1


@pytest.mark.long
@pytest.mark.parametrize(("processes", "first"), [(2 + number % 3, 20 * number) for number in range(10)])
def test_processes_with_other_losses_and_features_get_equal_rows_or_a_named_error(processes, first, tmp_path):
    program = ("-m", "tests.training.processes.trials", str(first), "20")

    out = run(*program, processes=processes, cwd=tmp_path)

    assert out.count("another process has ended") == processes - 1


@pytest.mark.long
def test_a_silent_process_is_logged_and_then_an_error(tmp_path):
    program = ("-m", "tests.training.processes.trials", "0", "0")

    out = run(*program, processes=3, cwd=tmp_path)

    for rank in (0, 1):
        assert out.count(f"process {rank} has waited 10 s for process 2") == 2
        assert f"rank {rank}: keys of training lookup 3 of tables plain[3], " in out
    assert out.count("process 2 did not arrive") == 2


@pytest.mark.slow
def test_hotrow_train_in_two_processes_learns_what_one_learns_and_either_resumes_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # the last of 1,800 samples are a batch of 1
    train = ("train", "--synthetic", "2000", "--model", "deepfm", "--batch-size", "257")
    checkpoint = ("--checkpoint", "saved")

    def arguments(name, *more):
        return [*train, "--output", name, "--metrics", f"{name}.json", *more]

    assert main(arguments("one", "--epochs", "2")) == 0
    publish = ("--publish", "log", "--publish-steps", "3")
    out = run(*HOTROW, *arguments("two", "--epochs", "1", *checkpoint, *publish), processes=2, cwd=tmp_path)
    assert out.count("model written to") == 1
    assert Follower().follow("log").tables == {"sparse_embedding1": dict_of("two")}
    assert main(arguments("resumed", "--epochs", "2", *checkpoint, *publish, "--resume")) == 0
    assert Follower().follow("log").tables == {"sparse_embedding1": dict_of("resumed")}

    one, two, resumed = (
        json.loads(Path(f"{name}.json").read_text(encoding="utf-8"))["epochs"] for name in ("one", "two", "resumed")
    )
    for ours, theirs in ((two[0], one[0]), (resumed[1], one[1])):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["auc"]["label"] == pytest.approx(theirs["auc"]["label"], abs=1e-3)
    folders = [tmp_path / name / "deepfm" / "1" / "sparse_embedding1" for name in ("one", "resumed")]
    (keys, vectors, _), (others, expected, _) = (rows_of(folder, 17) for folder in folders)
    np.testing.assert_array_equal(keys, others)
    np.testing.assert_allclose(vectors, expected, atol=1e-3)


@pytest.mark.long
def test_two_processes_write_the_model_of_the_best_epoch(tmp_path):
    train = (
        "train",
        "--synthetic",
        "1000",
        "--model",
        "wdl",
        "--learning-rate",
        "0.03",
        "--epochs",
        "4",
    )

    together = torchrun(BIN / "hotrow", *train, "--output", "two", cwd=tmp_path)
    alone = run(*HOTROW, *train, "--output", "one", cwd=tmp_path)

    [line] = [line for line in alone.splitlines() if "is written, because its log loss is the best" in line]
    assert line in together
    folders = [tmp_path / name / "wdl" / "1" / "sparse_embedding1" for name in ("one", "two")]
    (keys, vectors, _), (others, expected, _) = (rows_of(folder, 17) for folder in folders)
    np.testing.assert_array_equal(keys, others)
    np.testing.assert_allclose(vectors, expected, atol=1e-3)


@pytest.mark.long
def test_a_session_of_hugectr_in_two_processes_writes_the_files_of_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data("uint32")
    # not Adam, which makes large moves of rounding errors: BatchNorm cancels the gradient of the bias before it
    momentum = {"type": "MomentumSGD", "momentum_sgd_hparam": {"learning_rate": 0.05}}
    Path("graph.json").write_text(json.dumps({**GRAPH, "optimizer": momentum}), encoding="utf-8")
    session = ("-m", "tests.training.processes.train_session")

    alone = run(*session, "one", cwd=tmp_path)
    together = run(*session, "two", processes=2, cwd=tmp_path)
    files = [f"two{name}_1.model" for name in ("0_sparse", "1_sparse", "0_opt_sparse", "1_opt_sparse", "_dense")]
    again = run(*session, "again", *files, "two_opt_dense_1.model", processes=2, cwd=tmp_path)

    floats = alone.splitlines()[-1]  # after a note on arguments without effect
    assert floats.startswith("floats ")
    assert together.count(floats) == again.count(floats) == 2
    for table, (dim, layout) in enumerate([(1, "distributed"), (4, "localized")]):
        ours, theirs = (rows_of(f"{name}{table}_sparse_1.model", dim, layout, "I32") for name in ("two", "one"))
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)
        if layout == "localized":
            np.testing.assert_array_equal(ours[2], theirs[2])
    graph = parse_graph(GRAPH, "graph.json")
    ours, theirs = (read_dense(f"{name}_dense_1.model", graph) for name in ("two", "one"))
    for key, weight in theirs.items():
        np.testing.assert_allclose(ours[key], weight, atol=1e-5)
    ours, theirs = (np.loadtxt(f"{name}_predictions.txt") for name in ("two", "one"))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert Path("two_labels.txt").read_bytes() == Path("one_labels.txt").read_bytes()
