import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import HotrowError
from serving.dense.network import NumpyNetwork, open_network
from serving.errors import ConfigError
from serving.model.dense_file import read_dense
from serving.model.graph import parse_graph, read_graph
from serving.model.manifest import verify_manifest
from serving.session import load_model
from training import export
from training.criteo import encode_rows
from training.ctr_model import CtrModel
from training.document import open_document
from training.errors import OutputError
from training.export import export_model
from training.optimizer import LearningRateSchedule
from training.samples import Bags
from training.synthetic import generate
from training.trainer import train


@pytest.fixture
def trained(model):
    samples = generate(600, seed=0).samples
    list(train(model, samples, samples, epochs=1, batch_size=64, schedule=LearningRateSchedule(0.01), seed=0))
    return model


@pytest.fixture
def version(trained, document, tmp_path):
    return export_model(trained, document, tmp_path / "models", "two")


def ragged_bags(model, samples, rng):
    """Random bags for every table: seen and unseen keys, empty bags, several keys."""
    bags = []
    for embedding, table in zip(model.graph.embeddings, model.tables, strict=True):
        counts = rng.integers(0, 3, samples * embedding.slots)
        known = rng.choice(table.rows()[0], counts.sum())
        unseen = rng.integers(2**50, 2**51, counts.sum())
        keys = np.where(rng.random(counts.sum()) < 0.3, unseen, known)
        bags.append(Bags(keys, np.concatenate([[0], np.cumsum(counts)])))
    return bags


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def pooled_from_files(version, embedding, bags):
    """Read a table's two files plainly and pool bag by bag."""
    keys = np.fromfile(version / embedding.table / "key", "<i8").tolist()
    vectors = np.fromfile(version / embedding.table / "emb_vector", "<f4").reshape(len(keys), -1).astype(np.float64)
    table = dict(zip(keys, vectors, strict=True))
    assert len(table) == len(keys)
    default = np.full(embedding.dim, embedding.default_value)
    pooled = []
    for begin, end in zip(bags.row_ptrs[:-1], bags.row_ptrs[1:], strict=True):
        rows = [table.get(key, default) for key in bags.keys[begin:end].tolist()]
        total = np.sum(rows, axis=0) if rows else np.zeros(embedding.dim)
        pooled.append(total / len(rows) if rows and embedding.combiner == "mean" else total)
    return np.array(pooled, np.float32).reshape(-1, embedding.slots, embedding.dim)


@pytest.mark.parametrize("engine", ["numpy", "onnx"])
def test_the_files_predict_what_the_trainer_predicts(trained, version, engine):
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(40, 13)).astype(np.float32)
    bags = ragged_bags(trained, 40, rng)

    graph = read_graph(version / "graph.json")
    weights = read_dense(version / "dense.model", graph)
    onnx_file = version / "dense.onnx"
    network = NumpyNetwork(graph, weights) if engine == "numpy" else open_network(graph, weights, engine, onnx_file)
    pooled = [pooled_from_files(version, e, b) for e, b in zip(graph.embeddings, bags, strict=True)]

    np.testing.assert_allclose(network(dense, pooled), sigmoid(trained.logits(dense, bags)), atol=1e-5)


def test_a_session_predicts_what_the_trainer_predicts(trained, version):
    rng = np.random.default_rng(2)
    dense = rng.normal(size=(30, 13)).astype(np.float32)
    bags = ragged_bags(trained, 30, rng)

    # Several tables: keys sample by sample, offsets table by table.
    slots = [embedding.slots for embedding in trained.graph.embeddings]
    keys = []
    for sample in range(30):
        for table_bags, count in zip(bags, slots, strict=True):
            keys += table_bags.keys[slice(*table_bags.row_ptrs[[sample * count, (sample + 1) * count]])].tolist()
    row_ptrs = np.concatenate([table_bags.row_ptrs for table_bags in bags]).astype(np.int32)
    with load_model(version) as session:
        predictions = session.predict(dense, np.array(keys, np.int64), row_ptrs)

    np.testing.assert_allclose(predictions, sigmoid(trained.logits(dense, bags)), atol=1e-5)


def test_raw_rows_encoded_by_a_client_are_predicted_as_in_training(tmp_path):
    dcn = open_document("dcn")
    model = CtrModel(dcn.graph, seed=0)
    rows = [[str(i * 3), *[""] * 12, *[f"{(i * 7 + c) % 5:08x}" for c in range(26)]] for i in range(20)]
    dense, keys = encode_rows(rows)
    labels = (np.arange(20) % 2).astype(np.float32)[:, None]
    model.train_batch(dense, model.bags(keys), labels, learning_rate=0.01)
    path = export_model(model, dcn.document, tmp_path, "dcn")

    with load_model(path) as session:
        predictions = session.predict(dense, keys.reshape(-1), np.arange(20 * 26 + 1, dtype=np.int32))

    np.testing.assert_allclose(predictions, sigmoid(model.logits(dense, model.bags(keys))), atol=1e-5)


def test_a_version_holds_the_documented_files_and_only_keys_seen_in_training(trained, version):
    manifest = verify_manifest(version)

    assert (manifest.model, manifest.version) == ("two", 1)
    assert set(manifest.files) == {
        *("graph.json", "dense.model", "dense.onnx", "model.py"),
        *(f"{table}_table/{name}" for table in ("wide", "deep") for name in ("key", "emb_vector")),
    }
    graph = json.loads((version / "graph.json").read_text())
    assert set(graph) == {"inference", "layers"}
    assert graph["inference"] == {
        "max_batchsize": 1024,
        "hit_rate_threshold": 0.5,
        "input_key_type": "I64",
        "dense_model_file": "dense.model",
        "sparse_model_file": ["wide_table", "deep_table"],
    }
    assert graph["layers"][-1]["type"] == "Sigmoid"
    samples = generate(600, seed=0).samples
    for name, keys in (("wide_table", samples.keys[:, :6]), ("deep_table", samples.keys[:, 6:])):
        written = np.fromfile(version / name / "key", "<i8")
        assert sorted(written.tolist()) == np.unique(keys).tolist()


def test_tritons_files_and_the_tiers_lie_where_servers_look(version):
    entry = (version / "model.py").read_text()
    assert "from serving.frontend.triton import TritonPythonModel" in entry
    compile(entry, "model.py", "exec")
    config = (version.parent / "config.pbtxt").read_text()
    for text in ('name: "two"', 'backend: "python"', "max_batch_size: 0", "KIND_CPU"):
        assert text in config
    for name, datatype in (("DES", "FP32"), ("CATCOLUMN", "INT64"), ("ROWINDEX", "INT32")):
        assert f'name: "{name}" data_type: TYPE_{datatype} dims: [ -1, -1 ]' in config
    assert 'name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, 1 ]' in config
    tiers = json.loads((version.parent.parent / "ps.json").read_text())
    assert tiers == {"supportlonglong": True, "models": [], "volatile_db": {"type": "parallel_hash_map"}}


def test_the_next_version_follows_the_newest_and_leaves_what_is_there(trained, document, version):
    repository = version.parent.parent
    (version.parent / "config.pbtxt").write_text("changed by hand")
    (repository / "ps.json").write_text("{}")
    (version.parent / "7").mkdir()
    (version.parent / "notes").mkdir()

    assert export_model(trained, document, repository, "two").name == "8"
    assert export_model(trained, document, repository, "two", version=3).name == "3"
    assert (version.parent / "config.pbtxt").read_text() == "changed by hand"
    assert (repository / "ps.json").read_text() == "{}"
    verify_manifest(version)


@pytest.mark.parametrize("number", [1, 0, -1])
def test_a_version_that_exists_or_cannot_be_is_refused(trained, document, version, number):
    before = (version / "manifest.json").read_bytes()

    with pytest.raises(OutputError, match=f"this version exists|version {number}: expected at least 1"):
        export_model(trained, document, version.parent.parent, "two", version=number)
    assert (version / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "a b", "x" * 121])
def test_a_model_name_that_no_server_takes_is_refused(trained, document, tmp_path, name):
    with pytest.raises(OutputError, match="expected 1 to 120 letters"):
        export_model(trained, document, tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_repository_that_is_a_file_is_refused(trained, document, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(OutputError, match="file: cannot be made"):
        export_model(trained, document, tmp_path / "file", "two")


def test_a_table_named_like_a_file_beside_it_is_refused(document, tmp_path):
    document["layers"][1]["name"] = "model.py"
    model = CtrModel(parse_graph(document, "graph.json"), seed=0)

    with pytest.raises(ConfigError, match=r"a table cannot be called 'model\.py'"):
        export_model(model, document, tmp_path, "two")


def versions_of(folder):
    return [entry.name for entry in folder.iterdir() if entry.name.isdecimal()] if folder.exists() else []


def test_wherever_the_disk_refuses_no_version_is_left(trained, document, tmp_path, monkeypatch):
    """Every fsync and every rename of an export fails in turn; the export that meets no fault succeeds."""
    monkeypatch.setattr(export, "build_onnx", lambda graph, weights: b"onnx")
    faults = 0
    for failing_call in range(100):
        calls = 0

        def faulty(function, *arguments, failing_call=failing_call):
            nonlocal calls
            calls += 1
            if calls == failing_call + 1:
                raise OSError(28, "No space left on device")
            return function(*arguments)

        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace")):
                original = getattr(owner, name)
                patch.setattr(owner, name, lambda *a, original=original, faulty=faulty: faulty(original, *a))
            repository = tmp_path / str(failing_call)
            try:
                path = export_model(trained, document, repository, "two")
            except HotrowError as err:
                assert "No space left" in str(err)  # noqa: PT017
                faults += 1
                for version in versions_of(repository / "two"):
                    verify_manifest(repository / "two" / version)
                assert not list((repository / "two").glob(".*.tmp"))
                continue
        verify_manifest(path)
        break

    assert faults >= 10


def test_folders_that_a_killed_export_left_are_cleared_by_the_next(trained, document, tmp_path):
    stale = tmp_path / "two" / ".1.0123.tmp"
    (stale / "wide_table").mkdir(parents=True)
    (stale / "wide_table" / "key").write_bytes(b"half")
    (tmp_path / "two" / ".config.pbtxt.4567.tmp").write_text("half")

    path = export_model(trained, document, tmp_path, "two")

    assert path.name == "1"
    assert not list((tmp_path / "two").glob(".*.tmp"))


def test_exports_at_the_same_time_take_turns(trained, document, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(export_model, trained, document, tmp_path, "two") for _ in range(4)]
        paths = [future.result() for future in futures]

    assert sorted(path.name for path in paths) == ["1", "2", "3", "4"]
    for path in paths:
        verify_manifest(path)


EXPORT_FOR_EVER = """
import json, sys
from pathlib import Path
import torch
from serving.model.graph import parse_graph
from training import export
from training.ctr_model import CtrModel
from training.synthetic import generate

export.build_onnx = lambda graph, weights: b"onnx" * 100_000
torch.set_num_threads(1)
document = json.loads(sys.argv[1])
model = CtrModel(parse_graph(document, "graph.json"), seed=0)
samples = generate(2_000, seed=0).samples
model.train_batch(samples.dense, model.bags(samples.keys), samples.labels[:, None], 0.01)
while True:
    export.export_model(model, document, Path(sys.argv[2]), "two")
"""


@pytest.mark.slow
def test_a_killed_exporter_leaves_only_whole_versions(document, trained, tmp_path):
    rng = np.random.default_rng()
    for _ in range(3):
        seen = len(versions_of(tmp_path / "two"))
        process = subprocess.Popen([sys.executable, "-c", EXPORT_FOR_EVER, json.dumps(document), str(tmp_path)])
        try:
            deadline = time.monotonic() + 60
            while len(versions_of(tmp_path / "two")) == seen:
                assert process.poll() is None
                assert time.monotonic() < deadline
            spin_until = time.monotonic() + rng.uniform(0, 0.1)  # a random point of some later export
            while time.monotonic() < spin_until:
                pass
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()

        for version in versions_of(tmp_path / "two"):
            verify_manifest(tmp_path / "two" / version)

    export_model(trained, document, tmp_path, "two")  # the killed process holds no lock
    assert not list((tmp_path / "two").glob(".*.tmp"))
