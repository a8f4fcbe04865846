"""A graph with slot_size_array: training data, requests, calibration and the export mean the same keys."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.config import read_model_directory, read_ps_config
from serving.errors import ConfigError, ModelFileError
from serving.model.manifest import read_manifest, write_manifest
from serving.opening import load_model
from serving.protocol.ctr import triton_config
from serving.protocol.samples import read_samples
from tests.training.conftest import TWO_TABLES
from training.data.opening import default_columns, open_data
from training.errors import DataError
from training.model.ctr_model import CtrModel
from training.model.document import read_document
from training.model.export import export_model
from training.samples import Bags, Samples

SIZES = [3, 0, 5, 4, 1, 6, *([2, 9] * 10)]  # a slot of size 0 has the keys of the next slot
REAL_SIZES = np.array([3, 5, 5, 4, 1, 6, *([2, 9] * 10)])
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)[:-1]])
ROWS = 60


@pytest.fixture(scope="module")
def raw():
    """Labels, dense features and keys as files and requests have them."""
    rng = np.random.default_rng(0)
    keys = rng.integers(0, REAL_SIZES, (ROWS, 26))
    return keys[:, :1] % 2, rng.normal(size=(ROWS, 13)).astype(np.float32), keys


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slot_sizes")


@pytest.fixture(scope="module")
def training_document(folder):
    document = copy.deepcopy(TWO_TABLES)
    document["layers"][0] |= {"format": "Parquet", "slot_size_array": SIZES}
    (folder / "graph.json").write_text(json.dumps(document), encoding="utf-8")
    return read_document(folder / "graph.json")


def write_parquet(path, document, raw):
    labels, dense, keys = raw
    pq.write_table(pa.table([*labels.T, *dense.T, *keys.T], names=default_columns(document).names), path)


def write_arrays(path, raw):
    labels, dense, keys = raw
    np.savez(path, label=labels, dense=dense, wide=keys[:, :6], deep=keys[:, 6:])


@pytest.fixture(scope="module")
def trained_on_files(folder, training_document, raw):
    write_parquet(folder / "data.parquet", training_document, raw)
    samples = open_data(folder / "data.parquet", training_document)
    model = CtrModel(training_document.graph, seed=0)
    for _ in range(5):
        model.train_batch(samples, learning_rate=0.05)
    return model


@pytest.fixture(scope="module")
def exported_with_calibration(folder, training_document, trained_on_files, raw):
    labels, dense, keys = raw
    shifted = Samples(labels.astype(np.float32), dense, Bags.one_key_each(keys + OFFSETS))
    return export_model(trained_on_files, training_document.document, folder / "models", "two", calibration=shifted)


@pytest.fixture
def version(exported_with_calibration, tmp_path):
    return Path(shutil.copytree(exported_with_calibration, tmp_path / "models" / "two" / "1"))


def probabilities(model, raw):
    labels, dense, keys = raw
    logits = model.logits(Samples(labels.astype(np.float32), dense, Bags.one_key_each(keys + OFFSETS)))
    return 1 / (1 + np.exp(-logits))


def test_a_request_has_the_keys_of_the_training_data(version, trained_on_files, raw):
    _, dense, keys = raw
    expected = probabilities(trained_on_files, raw)
    ptrs = np.arange(keys.size + 1)

    assert read_manifest(version).keys == "unshifted"
    with load_model(version) as session:
        flat = session.predict(dense, keys, ptrs)
        samples = [
            {"dense": row.tolist(), "keys": [[key] for key in of_row]}
            for row, of_row in zip(dense, keys.tolist(), strict=True)
        ]
        by_slot = session.predict_batch(read_samples({"samples": samples}, session.config)).values

    np.testing.assert_allclose(flat, expected, atol=1e-5)
    np.testing.assert_array_equal(by_slot, flat)


def test_bags_of_any_size_are_shifted_by_their_slots(version, trained_on_files):
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 3, 20 * 26)
    slots = np.repeat(np.arange(20 * 26) % 26, counts)
    keys = rng.integers(0, REAL_SIZES[slots])
    row_ptrs = np.concatenate([[0], np.cumsum(counts)])
    dense = rng.normal(size=(20, 13)).astype(np.float32)
    logits = trained_on_files.logits(
        Samples(np.zeros((20, 1), np.float32), dense, Bags(keys + OFFSETS[slots], row_ptrs, 26))
    )

    with load_model(version) as session:
        found = session.predict(dense, keys, row_ptrs)

    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-5)


@pytest.mark.parametrize("wrong", [-1, -(2**40), 3, 4, 2**40])
def test_a_key_beyond_its_slot_is_unknown_and_never_another_slots_key(version, trained_on_files, raw, wrong):
    _, dense, keys = raw
    asked = keys.copy()
    asked[:, 0] = wrong  # the first slot has 3 keys

    with load_model(version) as session:
        config = session.config
        samples = [
            {"dense": row.tolist(), "keys": [[key] for key in of_row]}
            for row, of_row in zip(dense, asked.tolist(), strict=True)
        ]
        answer = session.predict_batch(read_samples({"samples": samples}, config))

    absent = Samples(
        np.zeros((ROWS, 1), np.float32), dense, Bags.one_key_each(np.c_[[2**50] * ROWS, (keys + OFFSETS)[:, 1:]])
    )
    np.testing.assert_allclose(answer.values, 1 / (1 + np.exp(-trained_on_files.logits(absent))), atol=1e-5)
    assert answer.defaulted_keys == ROWS


def test_the_calibration_of_the_export_is_a_request(version, raw):
    arrays = np.load(version / "calibration.npz")

    np.testing.assert_array_equal(arrays["CATCOLUMN"].reshape(ROWS, 26), raw[2])
    with load_model(version, engine="int8", tolerance=1) as session:
        assert session.quantization is not None


def test_a_model_of_ps_json_takes_the_same_keys(version, tmp_path):
    ps = {
        "supportlonglong": True,
        "models": [
            {
                "model": "two",
                "sparse_files": [str(version / "wide_table"), str(version / "deep_table")],
                "dense_file": str(version / "dense.model"),
                "network_file": str(version / "graph.json"),
                "max_batch_size": 64,
            }
        ],
    }
    (tmp_path / "ps.json").write_text(json.dumps(ps), encoding="utf-8")
    [config] = read_ps_config(tmp_path / "ps.json").models

    assert triton_config("two", config)["parameters"]["keys"] == {"string_value": "unshifted"}
    assert config.tables == read_model_directory(version).tables


def test_an_older_export_takes_the_keys_of_the_table_and_the_log_warns_once(version, trained_on_files, raw, caplog):
    _, dense, keys = raw
    manifest = json.loads((version / "manifest.json").read_text(encoding="utf-8"))
    del manifest["keys"]
    (version / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    with load_model(version) as session:
        found = session.predict(dense, keys + OFFSETS, np.arange(keys.size + 1))
        session.predict(dense, keys + OFFSETS, np.arange(keys.size + 1))

    np.testing.assert_allclose(found, probabilities(trained_on_files, raw), atol=1e-5)
    [line] = [line for line in caplog.messages if "slot_size_array" in line]
    assert line.startswith("model two: its graph has slot_size_array, so training may have shifted")


def test_every_format_of_the_data_is_shifted(tmp_path, training_document, raw):
    write_parquet(tmp_path / "data.parquet", training_document, raw)
    write_arrays(tmp_path / "data.npz", raw)

    for name in ("data.parquet", "data.npz"):
        samples = open_data(tmp_path / name, training_document)
        np.testing.assert_array_equal(samples.bags.keys.reshape(ROWS, 26), raw[2] + OFFSETS)


def test_a_key_beyond_its_slot_in_the_data_is_refused(tmp_path, training_document, raw):
    keys = raw[2].copy()
    keys[7, 3] = 4
    write_arrays(tmp_path / "data.npz", (raw[0], raw[1], keys))

    with pytest.raises(DataError, match=r"column wide\[3\] record 7: expected a key from 0 to 3, found 4"):
        open_data(tmp_path / "data.npz", training_document)


def test_a_model_whose_samples_were_not_shifted_is_exported_as_before(tmp_path, training_document, raw, caplog):
    labels, dense, keys = raw
    stored = keys + (np.arange(1, 27) << 40)
    samples = Samples(labels.astype(np.float32), dense, Bags.one_key_each(stored))
    model = CtrModel(training_document.graph, seed=0)
    model.train_batch(samples, learning_rate=0.05)

    version = export_model(model, training_document.document, tmp_path / "models", "two", calibration=samples)

    assert read_manifest(version).keys == "stored"
    assert "training did not shift keys" in caplog.text
    np.testing.assert_array_equal(np.load(version / "calibration.npz")["CATCOLUMN"], stored.reshape(-1))


def test_a_graph_without_sizes_says_nothing_about_keys(exported):
    assert "keys" not in json.loads((exported / "manifest.json").read_text(encoding="utf-8"))
    assert read_model_directory(exported).slot_keys == "stored"


def test_a_manifest_that_does_not_fit_its_graph_is_refused(version):
    graph = json.loads((version / "graph.json").read_text(encoding="utf-8"))
    manifest = json.loads((version / "manifest.json").read_text(encoding="utf-8"))
    (version / "manifest.json").write_text(json.dumps(manifest | {"keys": "halved"}), encoding="utf-8")
    with pytest.raises(ModelFileError, match=r'manifest.json: keys: expected one of "stored", "unshifted"'):
        read_model_directory(version)

    graph["layers"][0]["slot_size_array"].pop()
    (version / "graph.json").write_text(json.dumps(graph), encoding="utf-8")
    write_manifest(version, "two", 1, "unshifted")
    with pytest.raises(ConfigError, match=r"layers\[0\]: manifest.json says keys: unshifted, which needs a Data layer"):
        read_model_directory(version)
