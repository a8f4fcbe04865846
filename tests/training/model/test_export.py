import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from serving import ParameterServer, load_table
from serving.config import read_repository
from serving.dense.network import NumpyNetwork, open_network
from serving.errors import ConfigError, OutputError
from serving.model.dense_file import read_dense
from serving.model.graph import parse_graph, read_graph
from serving.model.manifest import verify_manifest
from serving.model.sparse_file import open_sparse
from serving.opening import load_model
from tests.serving.ps_files import write_ps
from training.data.criteo import encode_rows
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.export import export_delta, export_dense, export_model
from training.publishing import Publisher
from training.samples import Bags, Samples
from training.synthetic.criteo_like import generate


@pytest.fixture
def version(exported, tmp_path):
    """The version of the model ``trained``."""
    return Path(shutil.copytree(exported, tmp_path / "models" / "two" / "1"))


def ragged_samples(model, rows, rng):
    """Random samples: seen and unseen keys, empty bags, several keys."""
    bags = []
    for embedding, table in zip(model.graph.embeddings, model.tables, strict=True):
        counts = rng.integers(0, 3, rows * embedding.slots)
        known = rng.choice(table.rows()[0], counts.sum())
        unseen = rng.integers(2**50, 2**51, counts.sum())
        keys = np.where(rng.random(counts.sum()) < 0.3, unseen, known)
        bags.append(Bags(keys, np.concatenate([[0], np.cumsum(counts)]), embedding.slots))
    dense = rng.normal(size=(rows, 13)).astype(np.float32)
    return Samples(np.zeros((rows, 1), np.float32), dense, Bags.side_by_side(bags))


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def pooled_from_files(version, embedding, bags):
    """Read a table's two files and pool bag by bag."""
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
    samples = ragged_samples(trained, 40, rng)

    graph = read_graph(version / "graph.json")
    weights = read_dense(version / "dense.model", graph)
    onnx_file = version / "dense.onnx"
    network = NumpyNetwork(graph, weights) if engine == "numpy" else open_network(graph, weights, engine, onnx_file)
    bags = samples.bags.split([6, 20])
    pooled = [pooled_from_files(version, e, b) for e, b in zip(graph.embeddings, bags, strict=True)]

    np.testing.assert_allclose(network(samples.dense, pooled), sigmoid(trained.logits(samples)), atol=1e-5)


def test_a_session_predicts_what_the_trainer_predicts(trained, version):
    rng = np.random.default_rng(2)
    samples = ragged_samples(trained, 30, rng)

    # Several tables: keys sample by sample, offsets table by table.
    bags = samples.bags.split([6, 20])
    keys = []
    for sample in range(30):
        for table_bags, count in zip(bags, (6, 20), strict=True):
            keys += table_bags.keys[slice(*table_bags.row_ptrs[[sample * count, (sample + 1) * count]])].tolist()
    row_ptrs = np.concatenate([table_bags.row_ptrs for table_bags in bags]).astype(np.int32)
    with load_model(version) as session:
        predictions = session.predict(samples.dense, np.array(keys, np.int64), row_ptrs)
        same = session.predict(samples.dense, samples.bags.keys, samples.bags.row_ptrs)

    np.testing.assert_allclose(predictions, sigmoid(trained.logits(samples)), atol=1e-5)
    np.testing.assert_array_equal(same, predictions)


def test_raw_rows_encoded_by_a_client_are_predicted_as_in_training(tmp_path):
    dcn = open_document("dcn")
    model = CtrModel(dcn.graph, seed=0)
    rows = [[str(i * 3), *[""] * 12, *[f"{(i * 7 + c) % 5:08x}" for c in range(26)]] for i in range(20)]
    dense, keys = encode_rows(rows)
    samples = Samples((np.arange(20) % 2).astype(np.float32)[:, None], dense, Bags.one_key_each(keys))
    model.train_batch(samples, learning_rate=0.01)
    path = export_model(model, dcn.document, tmp_path, "dcn")

    with load_model(path) as session:
        predictions = session.predict(dense, keys.reshape(-1), np.arange(20 * 26 + 1, dtype=np.int32))

    np.testing.assert_allclose(predictions, sigmoid(model.logits(samples)), atol=1e-5)


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
    for name, bags in zip(("wide_table", "deep_table"), samples.bags.split([6, 20]), strict=True):
        written = np.fromfile(version / name / "key", "<i8")
        assert sorted(written.tolist()) == np.unique(bags.keys).tolist()


def test_a_calibration_is_a_request_next_to_the_graph(trained, document, tmp_path):
    samples = generate(700, seed=1).samples[600:]

    version = export_model(trained, document, tmp_path, "two", calibration=samples)

    assert "calibration.npz" in verify_manifest(version).files
    with np.load(version / "calibration.npz") as archive:
        assert set(archive.files) == {"DES", "CATCOLUMN", "ROWINDEX"}
        request = archive["DES"], archive["CATCOLUMN"], archive["ROWINDEX"]
    with load_model(version) as session:
        np.testing.assert_allclose(session.predict(*request), sigmoid(trained.logits(samples)), atol=1e-5)


def test_the_next_version_follows_the_newest(trained, document, version):
    repository = version.parent.parent

    assert export_model(trained, document, repository, "two").name == "2"
    assert export_model(trained, document, repository, "two", version=9).name == "9"
    verify_manifest(version)


def test_a_version_that_exists_is_refused(trained, document, version):
    with pytest.raises(OutputError, match="this version exists"):
        export_model(trained, document, version.parent.parent, "two", version=1)
    verify_manifest(version)


def test_a_table_with_the_name_of_a_file_is_refused(document, tmp_path):
    document["layers"][1]["name"] = "model.py"
    model = CtrModel(parse_graph(document, "graph.json"), seed=0)

    with pytest.raises(ConfigError, match=r"a table cannot be called 'model\.py'"):
        export_model(model, document, tmp_path, "two")


@pytest.mark.parametrize("update_type", ["Local", "LazyGlobal", "Global"])
def test_a_delta_has_the_rows_that_changed(document, tmp_path, update_type):
    first, second = (generate(300, seed=seed).samples for seed in (0, 1))
    model = CtrModel(parse_graph(document, "graph.json"), seed=0, update_type=update_type)
    for start in range(0, 300, 100):
        model.train_batch(first[start : start + 100], 0.01)
    published = [dict(zip(*map(list, table.rows()), strict=True)) for table in model.tables]
    published = [{key: vector.copy() for key, vector in rows.items()} for rows in published]
    mark = model.step
    for start in range(0, 300, 100):
        model.train_batch(second[start : start + 100], 0.01)

    counts = export_delta(model, tmp_path / "delta", mark)

    for t, (embedding, table) in enumerate(zip(model.graph.embeddings, model.tables, strict=True)):
        [(keys, vectors)] = open_sparse(tmp_path / "delta" / embedding.table, embedding.dim).batches(10**6)
        assert counts[embedding.table] == len(keys)
        touched = set(model.bags(second)[t].keys.tolist())
        assert set(keys.tolist()) == (set(table.rows()[0].tolist()) if update_type == "Global" else touched)
        published[t].update(zip(keys.tolist(), vectors, strict=True))
        for key, vector in zip(*table.rows(), strict=True):
            np.testing.assert_array_equal(published[t][key], vector)


def test_without_changes_a_delta_is_empty_and_replaces_an_older_one(trained, tmp_path):
    assert all(export_delta(trained, tmp_path / "delta", 0).values())

    assert set(export_delta(trained, tmp_path / "delta", trained.step).values()) == {0}

    assert list((tmp_path / "delta").iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file: cannot be written: not a directory"):
        export_delta(trained, tmp_path / "file", 0)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_delta_is_loaded_into_the_tiers_of_a_served_model(trained, version, document, tmp_path):
    config = {
        "supportlonglong": True,
        "models": [],
        "persistent_db": {"type": "rocks_db", "path": str(tmp_path / "db")},
    }
    (tmp_path / "models" / "ps.json").write_text(json.dumps(config))
    mark = trained.step
    trained.train_batch(generate(100, seed=9).samples, 0.01)
    with ParameterServer.from_config(read_repository(tmp_path / "models")):
        pass  # the first start loads the model's files

    for table in export_delta(trained, tmp_path / "delta", mark):
        load_table(tmp_path / "models", f"two@1.{table}", tmp_path / "delta" / table, False)

    with ParameterServer.from_config(read_repository(tmp_path / "models")) as server:
        for embedding, table in zip(trained.graph.embeddings, trained.tables, strict=True):
            keys, vectors = table.rows()
            found, is_known = server.lookup(f"two@1.{embedding.table}", keys)
            np.testing.assert_array_equal(found, vectors)
            assert is_known.all()


def test_a_dense_version_and_the_published_rows_predict_what_the_trainer_predicts(model, document, tmp_path):
    first, second, fresh = (generate(100, seed=seed).samples for seed in (0, 1, 2))
    repository = tmp_path / "models"
    with Publisher(str(tmp_path / "log"), "two", model, tmp_path / "outbox") as publisher:
        model.train_batch(first, 0.01)
        export_model(model, document, repository, "two", calibration=fresh, publisher=publisher)
        model.train_batch(second, 0.01)
        dense = export_dense(model, document, repository, "two", base=1, publisher=publisher)
    source = {"type": "folder", "path": str(tmp_path / "log"), "poll_timeout_ms": 20, "update_headroom_ratio": 9}
    write_ps(repository, update_source=source)

    assert set(verify_manifest(dense).files) == {
        *("graph.json", "dense.model", "dense.onnx", "model.py", "calibration.npz")
    }
    with np.load(dense / "calibration.npz") as archive, load_model(repository / "two") as session:
        assert (session.config.version, session.config.base.version) == (2, 1)
        request = archive["DES"], archive["CATCOLUMN"], archive["ROWINDEX"]
        np.testing.assert_allclose(session.predict(*request), sigmoid(model.logits(fresh)), atol=1e-5)


def test_a_dense_version_may_have_other_layers_and_a_calibration_of_its_own(trained, document, version):
    (layer,) = [layer for layer in document["layers"] if layer["name"] == "fc1"]
    layer["fc_param"]["num_output"] = 24
    model = CtrModel(parse_graph(document, "graph.json"), seed=3)
    samples = generate(100, seed=1).samples

    dense = export_dense(model, document, version.parents[1], "two", base=1, version=7, calibration=samples)

    assert dense.name == "7"
    for number, table in enumerate(model.tables):
        for rows in trained.dump(number):
            table.load(rows)
    with np.load(dense / "calibration.npz") as archive, load_model(dense) as session:
        request = archive["DES"], archive["CATCOLUMN"], archive["ROWINDEX"]
        np.testing.assert_allclose(session.predict(*request), sigmoid(model.logits(samples)), atol=1e-5)


def test_a_base_that_brings_no_tables_is_refused(trained, document, version):
    repository = version.parents[1]
    export_dense(trained, document, repository, "two", base=1)

    with pytest.raises(OutputError, match="version 2 brings no tables: it shares those of version 1; name that"):
        export_dense(trained, document, repository, "two", base=2)
    with pytest.raises(OutputError, match=r"version 5 brings no tables: .*manifest\.json"):
        export_dense(trained, document, repository, "two", base=5)
    assert sorted(path.name for path in (repository / "two").iterdir() if path.name.isdecimal()) == ["1", "2"]


def test_a_network_with_other_inputs_than_its_base_is_refused(document, version):
    document["layers"][2]["sparse_embedding_hparam"]["combiner"] = 1
    model = CtrModel(parse_graph(document, "graph.json"), seed=0)

    with pytest.raises(OutputError, match=r"the network has other inputs: expected .*'deep_table'.*'sum'.*mean"):
        export_dense(model, document, version.parents[1], "two", base=1)


def test_a_base_of_another_run_is_refused(model, document, version, tmp_path):
    with Publisher(str(tmp_path / "log"), "two", model, tmp_path / "outbox") as publisher:
        expected = f"its tables follow no run, and the publisher's run is '{publisher.run}'"
        with pytest.raises(OutputError, match=expected):
            export_dense(model, document, version.parents[1], "two", base=1, publisher=publisher)
