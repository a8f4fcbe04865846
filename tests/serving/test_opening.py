"""Opening and closing models."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kernels.host import round_rows
from serving import ParameterServer, load_model
from serving.errors import ConfigError, ModelFileError, StoreFullError, UnknownModelError
from serving.model.sparse_model import SparseModel
from serving.storage import MemoryStore
from tests.serving.ps_files import write_ps
from tests.tools.tiny_model import TinyModel

# Float32 against float64 through two layers of at most 40 inputs.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
DEADLINE_S = 60


@pytest.fixture
def write_version(write_model):
    """Write a model as a version directory. Return the WrittenModel and the directory."""

    def write(version=1, **options):
        model = write_model(folder=f"dcn/{version}", **options)
        model.config_file.rename(model.config_file.with_name("graph.json"))
        return model, model.config_file.parent

    return write


def test_load_model_opens_an_inference_json_under_the_name_of_the_file(write_model):
    model = write_model()
    dense, bags = model.draw_request(np.random.default_rng(3), samples=4)
    keys, row_ptrs, _ = model.flatten(bags)

    with load_model(model.config_file, engine="numpy") as session:
        np.testing.assert_allclose(session.predict(dense, keys, row_ptrs), model.expected(dense, bags), **TOLERANCE)
        assert session.config.name == "model"


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(ConfigError, match="expected a path, got ''"):
        load_model("")


@pytest.mark.parametrize(
    ("row_dtype", "kept"),
    [(None, ["fp32", "fp32"]), ("bf16", ["bf16", "bf16"]), ({"table1": "int8"}, ["fp32", "int8"])],
)
def test_load_model_keeps_rows_in_the_given_row_type(write_model, row_dtype, kept):
    model = write_model(write_model.table(), write_model.table())
    dense, bags = model.draw_request(np.random.default_rng(3), samples=4)
    keys, row_ptrs, _ = model.flatten(bags)

    with load_model(model.config_file, engine="numpy", row_dtype=row_dtype) as session:
        assert [table.row_dtype for table in session.config.tables] == kept
        known = np.array(list(model.tables[1]), dtype=np.int64)
        rows, _ = session.embedding_cache.server.lookup("model.table1", known)
        rounded = np.array(list(model.tables[1].values()))
        round_rows(rounded, kept[1], rounded)
        np.testing.assert_array_equal(rows, rounded)
        np.testing.assert_allclose(session.predict(dense, keys, row_ptrs), model.expected(dense, bags), atol=0.02)


@pytest.mark.parametrize(
    ("row_dtype", "message"),
    [
        ("int4", "expected one of fp32, fp16, bf16, int8, uint8, got 'int4'"),
        ({"table0": "half"}, "expected one of .*, got 'half'"),
        ({"tabel0": "int8"}, "no table is called 'tabel0'; there are table0"),
    ],
)
def test_load_model_refuses_an_unknown_row_type_and_an_unknown_table(write_model, row_dtype, message):
    with pytest.raises(ConfigError, match=f"^load_model: row_dtype: {message}"):
        load_model(write_model().config_file, row_dtype=row_dtype)


@pytest.mark.parametrize("content", ['{"supportlonglong": true, "models": []}', "[]"], ids=["a ps.json", "no object"])
def test_load_model_refuses_another_file_and_names_the_call_that_opens_it(tmp_path, content):
    (tmp_path / "ps.json").write_text(content)

    with pytest.raises(ConfigError, match=r"expected a model's folder, or an inference JSON.*\.from_config"):
        load_model(tmp_path / "ps.json")


def test_an_object_that_is_not_a_parameter_server_is_refused(write_version):
    with pytest.raises(ConfigError, match="parameter_server: expected a ParameterServer or None, got int"):
        load_model(write_version()[1], 1)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b"])
def test_an_impossible_path_is_refused(path):
    with pytest.raises(ModelFileError, match="cannot be a model's folder"):
        load_model(path)


def test_load_model_opens_a_directory_and_closing_frees_everything(write_version):
    model, directory = write_version()
    dense, bags = model.draw_request(np.random.default_rng(7), samples=3)
    keys, row_ptrs, _ = model.flatten(bags)

    with load_model(directory.parent, engine="numpy") as session:
        np.testing.assert_allclose(session.predict(dense, keys, row_ptrs), model.expected(dense, bags), **TOLERANCE)

    session.close()
    with pytest.raises(UnknownModelError):
        session.predict(dense, keys, row_ptrs)


def test_a_model_that_ends_without_an_activation_answers_with_logits_and_warns(write_version, caplog):
    model, directory = write_version()
    document = json.loads((directory / "graph.json").read_text())
    assert document["layers"].pop()["type"] == "Sigmoid"
    (directory / "graph.json").write_text(json.dumps(document))
    (directory / "manifest.json").unlink(missing_ok=True)
    dense, bags = model.draw_request(np.random.default_rng(7), samples=3)

    for engine in ("numpy", "auto"):
        with load_model(directory, engine=engine) as session:
            logits = session.predict(dense, *model.flatten(bags)[:2])

        np.testing.assert_allclose(1 / (1 + np.exp(-logits)), model.expected(dense, bags), **TOLERANCE)
        assert "graph.json: ends without Sigmoid or Softmax" in caplog.text


def test_load_model_leaves_a_given_server_open(write_version):
    with ParameterServer([MemoryStore()]) as server:
        load_model(write_version(1)[1], server, engine="numpy").close()
        assert server.models() == ()

        second = load_model(write_version(2, seed=1)[1], server, engine="numpy")

        assert [(model.name, model.version) for model in server.models()] == [("dcn", 2)]
        assert second.predict([0.0, 0.0], [0], [0, 1, 1, 1]).shape == (1, 1)


@pytest.mark.parametrize("dim", [4, 5], ids=["of the same shape", "of another shape"])
def test_a_session_never_answers_from_the_rows_of_a_version_that_replaced_its_own(write_model, write_version, dim):
    with ParameterServer([MemoryStore()]) as server:
        first = load_model(write_version(1)[1], server, engine="numpy")
        server.unload_model("dcn", 1)
        tables = (write_model.table(dim=dim),)
        model = write_model(*tables, folder="dcn/2", seed=1)
        model.config_file.rename(model.config_file.with_name("graph.json"))
        load_model(model.config_file.parent, server, engine="numpy")

        with pytest.raises(UnknownModelError, match=r"table 'dcn@1.*' was unloaded with its model"):
            first.predict([0.0, 0.0], [0], [0, 1, 1, 1])


def test_closing_a_session_of_a_replaced_version_leaves_the_new_version(write_version):
    with ParameterServer([MemoryStore()]) as server:
        first = load_model(write_version(1)[1], server, engine="numpy")
        server.unload_model("dcn")
        load_model(write_version(2, seed=1)[1], server, engine="numpy")

        first.close()

        assert [model.version for model in server.models()] == [2]


def test_closing_a_session_of_a_reloaded_model_leaves_the_new_model(write_version):
    with ParameterServer([MemoryStore()]) as server:
        directory = write_version(1)[1]
        first = load_model(directory, server, engine="numpy")
        server.unload_model("dcn")
        second = load_model(directory, server, engine="numpy")

        first.close()

        assert second.predict([0.0, 0.0], [0], [0, 1, 1, 1]).size == 1
        second.close()
        assert server.models() == ()


def test_a_session_may_be_closed_after_its_server(write_version):
    with ParameterServer([MemoryStore()]) as server:
        session = load_model(write_version()[1], server, engine="numpy")

    session.close()

    with pytest.raises(UnknownModelError):
        session.predict([0.0, 0.0], [0], [0, 1, 1, 1])


def test_a_model_is_unloaded_again_if_its_dense_network_cannot_be_opened(write_version):
    _, directory = write_version()
    (directory / "_dense_10.model").write_bytes(b"1234")

    with ParameterServer([MemoryStore()]) as server:
        with pytest.raises(ModelFileError, match="_dense_10"):
            load_model(directory, server)
        assert server.models() == ()


def test_a_model_that_does_not_fit_the_given_server_is_refused(write_version):
    _, directory = write_version()

    with ParameterServer([MemoryStore(capacity_rows=10)]) as server, pytest.raises(StoreFullError):
        load_model(directory, server)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"threads": 0}, "load_model: threads: expected a whole number from 1 to 1024, got 0"),
        ({"threads": 1025}, "load_model: threads: expected a whole number from 1 to 1024, got 1025"),
        ({"threads": 1.0}, "load_model: threads: expected a whole number from 1 to 1024, got 1.0"),
        ({"threads": "2"}, "load_model: threads: expected a whole number from 1 to 1024, got '2'"),
        ({"threads": True}, "load_model: threads: expected a whole number from 1 to 1024, got True"),
        ({"engine": "torch"}, "load_model: engine: expected auto, numpy, onnx or int8, got 'torch'"),
        ({"engine": None}, "load_model: engine: expected auto, numpy, onnx or int8, got None"),
        ({"engine": ["onnx"]}, r"load_model: engine: expected auto, numpy, onnx or int8, got \['onnx'\]"),
    ],
    ids=str,
)
def test_an_invalid_engine_or_number_of_threads_is_refused_by_name(tmp_path, options, expected):
    with pytest.raises(ConfigError, match=expected):
        load_model(tmp_path, **options)


@pytest.fixture
def repository(tmp_path):
    """Write a repository of two versions of the model "tiny" and return its folder."""
    folder = tmp_path / "models"
    for version in (1, 2):
        TinyModel(rows=50, seed=version).write(folder, version=version)
    return folder


ROCKSDB = {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "rocks_db", "path": "rows", "num_threads": 1}}


def stores_of(session):
    return [store.name for store in session.embedding_cache.server.stores]


@pytest.mark.parametrize("path", ["tiny", "tiny/2", "tiny/../tiny"])
def test_load_model_uses_the_tiers_of_the_repositorys_ps_json(repository, path):
    pytest.importorskip("rocksdict")
    write_ps(repository, **ROCKSDB)

    with load_model(repository / path, engine="numpy") as session:
        assert stores_of(session) == ["rocksdb"]
        assert session.config.version == 2

    assert (repository / "rows" / "CURRENT").is_file()


def test_a_model_folder_that_is_a_link_has_the_ps_json_next_to_the_link(repository, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "tiny").symlink_to(repository / "tiny")
    write_ps(linked, volatile_db={"type": "snapshot", "path": "made"})

    with load_model(linked / "tiny", engine="numpy") as session:
        assert stores_of(session) == ["snapshot"]


def test_the_sessions_of_a_process_share_one_server_for_a_ps_json(repository):
    pytest.importorskip("rocksdict")
    write_ps(repository, **ROCKSDB)  # two servers cannot have one database open

    first, second = (load_model(repository / "tiny", engine="numpy") for _ in range(2))
    server = first.embedding_cache.server
    assert second.embedding_cache.server is server
    first.close()
    assert second.predict([0.0] * 3, [], [0] * 4).shape == (1, 1)
    second.close()

    assert server.models() == ()
    with load_model(repository / "tiny", engine="numpy") as third:
        assert third.embedding_cache.server is not server


def test_closing_a_session_does_not_wait_for_a_load_of_another_repository(repository, tmp_path, monkeypatch):
    is_loading, may_go_on = threading.Event(), threading.Event()
    batches = SparseModel.batches

    def held(*arguments):
        is_loading.set()
        may_go_on.wait(DEADLINE_S)
        return batches(*arguments)

    TinyModel(rows=50).write(tmp_path / "others", version=1)
    for folder in (repository, tmp_path / "others"):
        write_ps(folder)
    session = load_model(repository / "tiny", engine="numpy")
    monkeypatch.setattr(SparseModel, "batches", held)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(load_model, tmp_path / "others" / "tiny", engine="numpy")
        try:
            assert is_loading.wait(DEADLINE_S)
            pool.submit(session.close).result(DEADLINE_S)
        finally:
            may_go_on.set()
        other.result(DEADLINE_S).close()


def test_two_versions_of_a_model_share_the_server_of_a_ps_json_and_no_row(repository):
    write_ps(repository)

    with (
        load_model(repository / "tiny" / "1", engine="numpy") as first,
        load_model(repository / "tiny" / "2", engine="numpy") as second,
    ):
        server = first.embedding_cache.server
        server.insert("tiny@1.user", np.array([1]), np.full((1, 4), 7, np.float32))

        assert second.embedding_cache.server is server
        assert (server.lookup("tiny@1.user", np.array([1]))[0] == 7).all()
        assert (server.lookup("tiny@2.user", np.array([1]))[0] != 7).all()


@pytest.mark.parametrize(
    ("tiers", "path", "reason"),
    [
        ({"volatile_db": {"type": "hash_mapp"}}, "volatile_db.type", "did you mean 'hash_map'"),
        (
            {"volatile_db": {"type": "map", "row_dtype_per_table": {"tiny.usr": "int8"}}},
            "volatile_db",
            "no model has a",
        ),
        ({"supportlonglong": False}, "supportlonglong", "means I32 keys"),
    ],
)
def test_load_model_refuses_a_broken_ps_json_unless_a_server_is_given(repository, tiers, path, reason):
    write_ps(repository, **tiers)

    with pytest.raises(ConfigError, match=reason) as caught:
        load_model(repository / "tiny", engine="numpy")
    assert (caught.value.source, caught.value.path.startswith(path)) == (str(repository / "ps.json"), True)

    with ParameterServer([MemoryStore()]) as server, load_model(repository / "tiny", server, engine="numpy") as session:
        assert stores_of(session) == ["memory"]


def test_load_model_ignores_tables_of_other_models_in_ps_json(repository):
    write_ps(repository, volatile_db={"type": "map", "capacity_rows_per_table": {"other.user": 3}})

    load_model(repository / "tiny", engine="numpy").close()
