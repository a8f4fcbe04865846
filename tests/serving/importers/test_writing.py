import json

import numpy as np
import pytest

from serving.errors import ConfigError, ModelFileError, OutputError
from serving.importers import plan_import, write_model, writing
from serving.model.manifest import verify_manifest
from serving.opening import load_model


@pytest.fixture
def plan(network, tables):
    return plan_import(network, "sum", tables, combiners={"users": "mean"}, max_batchsize=7)


def pooled(vectors, bags, combiner):
    """The oracle: float64[B, S, D]; rows outside the matrix count as zeros."""
    rows = {key: row.astype(np.float64) for key, row in enumerate(vectors)}
    zeros = np.zeros(vectors.shape[1])
    return np.array(
        [
            [
                sum((rows.get(key, zeros) for key in bag), zeros) / (len(bag) if combiner == "mean" and bag else 1)
                for bag in sample
            ]
            for sample in bags
        ]
    )


def test_the_version_predicts_what_the_network_answers_to_the_pooled_rows(plan, sketch, tables, tmp_path):
    path = write_model(plan, tmp_path / "models", "ctr")

    ads = [[[1, 29], []], [[5], [5, 5, 6]], [[1000], [0]]]
    users = [[[3, 4]], [[]], [[19, 1000]]]
    dense = np.random.default_rng(3).normal(size=(3, 3)).astype(np.float32)
    keys = [key for sample in zip(ads, users, strict=True) for table in sample for bag in table for key in bag]
    row_ptrs = [0, 2, 2, 3, 6, 7, 8, 0, 2, 2, 4]
    with load_model(path) as session:
        answer = session.predict(dense, keys, row_ptrs)
    expected = sketch.probabilities(
        dense, pooled(np.load(tables["ads"]), ads, "sum"), pooled(np.load(tables["users"]), users, "mean")
    )
    np.testing.assert_allclose(answer, expected, atol=1e-6)


def test_the_version_is_complete(plan, tmp_path):
    path = write_model(plan, tmp_path / "models", "ctr")

    assert path == tmp_path / "models" / "ctr" / "1"
    assert set(verify_manifest(path).files) == {
        *("graph.json", "dense.onnx", "model.py"),
        *(f"{table}/{name}" for table in ("ads", "users") for name in ("key", "emb_vector")),
    }
    document = json.loads((path / "graph.json").read_text())
    assert document["inference"] == {
        "max_batchsize": 7,
        "input_key_type": "I64",
        "dense_model_file": "dense.onnx",
        "sparse_model_file": ["ads", "users"],
    }
    assert [layer["type"] for layer in document["layers"]] == ["Data", *["DistributedSlotSparseEmbeddingHash"] * 2]
    assert (path.parent / "config.pbtxt").exists()
    assert (path.parent.parent / "ps.json").exists()


def test_rows_are_written_in_batches_and_none_is_lost(plan, tables, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_BATCH_BYTES", 4 * 4 * 7)  # 7 rows

    reported = []

    path = write_model(plan, tmp_path / "models", "ctr", progress=lambda *numbers: reported.append(numbers))

    assert [numbers for numbers in reported if numbers[0] == "users"] == [("users", rows, 20) for rows in (7, 14, 20)]
    for table, file in tables.items():
        vectors = np.load(file)
        assert np.fromfile(path / table / "key", "<i8").tolist() == list(range(len(vectors)))
        assert np.fromfile(path / table / "emb_vector", "<f4").tobytes() == vectors.tobytes()


def test_a_row_that_is_not_finite_is_written_and_logged(network, tables, tmp_path, caplog):
    vectors = np.load(tables["ads"])
    vectors[0, 0], vectors[21, 3], vectors[9, 1] = np.nan, np.inf, -np.inf
    np.save(tables["ads"], vectors)

    path = write_model(plan_import(network, "sum", tables), tmp_path / "models", "ctr")

    assert np.fromfile(path / "ads" / "emb_vector", "<f4").tobytes() == vectors.tobytes()
    [message] = caplog.messages
    assert message == (f"{tables['ads']}: 3 of 30 rows have values that are NaN or infinite, the first has key 0")


def test_a_version_is_never_overwritten(plan, tmp_path):
    write_model(plan, tmp_path, "ctr", version=4)

    with pytest.raises(OutputError, match="this version exists"):
        write_model(plan, tmp_path, "ctr", version=4)
    assert write_model(plan, tmp_path, "ctr").name == "5"


@pytest.mark.parametrize("name", ["", "a/b", "a b"])
def test_a_name_that_no_server_takes_is_refused(plan, tmp_path, name):
    with pytest.raises(OutputError, match="expected 1 to 120 letters"):
        write_model(plan, tmp_path / "models", name)
    assert not (tmp_path / "models").exists()


def test_a_table_with_the_name_of_a_file_is_refused(sketch_of, tables, tmp_path):
    path = sketch_of({"model.py": (2, 4)}).write(tmp_path / "net.onnx")

    with pytest.raises(ConfigError, match=r"a table cannot be called 'model\.py'"):
        write_model(plan_import(path, "sum", {"model.py": tables["ads"]}), tmp_path / "models", "ctr")


def test_files_that_are_not_a_model_do_not_become_a_version(plan, tmp_path, monkeypatch):
    """The source changes after the plan was made: a key is repeated."""
    rows = plan.tables[0].rows
    batches = [(np.array([1, 1]), rows.read(0, 2))]
    monkeypatch.setattr(type(rows), "batches", lambda self, batch_rows: iter(batches))

    with pytest.raises(ModelFileError, match="key 1 is in row 0 and again in row 1"):
        write_model(plan, tmp_path / "models", "ctr")
    assert not (tmp_path / "models" / "ctr").exists()


def test_a_full_disk_leaves_no_version(plan, tmp_path, monkeypatch):
    def full(path, batches):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_sparse_batches", full)

    with pytest.raises(OutputError, match="No space left"):
        write_model(plan, tmp_path / "models", "ctr")
    assert not (tmp_path / "models" / "ctr").exists()
