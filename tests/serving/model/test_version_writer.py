import dataclasses
import json

import pytest

from serving.errors import ConfigError, OutputError
from serving.model.graph import parse_graph
from serving.model.manifest import verify_manifest
from serving.model.version_writer import check_output, write_version
from tests.tools.tiny_model import TinyModel


def graph_of(model):
    return parse_graph(model.graph(), "graph.json")


def write_one_file(folder):
    (folder / "notes").write_text("something")


@pytest.fixture
def write(tmp_path):
    def write(name="two", version=None, graph=None):
        return write_version(
            tmp_path / "models", name, graph or graph_of(TinyModel(dense_dim=13)), write_one_file, version
        )

    return write


def test_a_version_has_the_written_files_the_entry_for_triton_and_a_manifest(write, tmp_path):
    version = write()

    assert version == tmp_path / "models" / "two" / "1"
    manifest = verify_manifest(version)
    assert (manifest.model, manifest.version) == ("two", 1)
    assert set(manifest.files) == {"notes", "model.py"}
    entry = (version / "model.py").read_text()
    assert "from serving.frontend.triton import TritonPythonModel" in entry
    compile(entry, "model.py", "exec")


@pytest.mark.parametrize("dense_dim", [13, 0])
def test_tritons_configuration_and_the_tiers_are_written(write, dense_dim):
    version = write(graph=graph_of(TinyModel(dense_dim=dense_dim)))

    config = (version.parent / "config.pbtxt").read_text()
    for text in ('name: "two"', 'backend: "python"', "max_batch_size: 64", "dynamic_batching { }", "KIND_CPU"):
        assert text in config
    for name, datatype in (("DES", "FP32"), ("CATCOLUMN", "INT64"), ("ROWINDEX", "INT32")):
        assert f'name: "{name}" data_type: TYPE_{datatype} dims: [ -1 ] allow_ragged_batch: true' in config
    assert config.count("optional: true") == (2 if dense_dim == 0 else 1)  # ROWINDEX always
    assert 'name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ]' in config
    assert (version.parent / "configs" / "gpu.pbtxt").read_text() == config.replace("KIND_CPU", "KIND_GPU")
    tiers = json.loads((version.parent.parent / "ps.json").read_text())
    assert tiers == {"supportlonglong": True, "models": [], "volatile_db": {"type": "parallel_hash_map"}}


def test_the_next_version_follows_the_newest(write):
    version = write()
    repository = version.parent.parent
    (version.parent / "config.pbtxt").write_text("changed by hand")
    (repository / "ps.json").write_text('{"supportlonglong": true}')
    (version.parent / "7").mkdir()
    (version.parent / "notes").mkdir()

    assert write().name == "8"
    assert write(version=3).name == "3"
    assert (version.parent / "config.pbtxt").read_text() == "changed by hand"
    assert (repository / "ps.json").read_text() == '{"supportlonglong": true}'
    verify_manifest(version)


def test_a_version_that_contradicts_tritons_configuration_is_logged(write, caplog):
    graph = graph_of(TinyModel(dense_dim=13))
    config = write(graph=graph).parent / "config.pbtxt"
    write(graph=graph)
    assert caplog.messages == []

    write(graph=dataclasses.replace(graph, label_dim=2))

    for file, message in zip((config, config.parent / "configs" / "gpu.pbtxt"), caplog.messages, strict=True):
        advice = f"`hotrow check {config.parent} --write-config` corrects it"
        assert message == f"{file} does not fit the version: OUTPUT0 has 1 columns, not 2; {advice}"
        assert "dims: [ 1 ]" in file.read_text()


def test_tritons_configuration_of_an_earlier_export_is_compared_too(write, caplog):
    version = write(graph=graph_of(TinyModel(dense_dim=13)))
    (version.parent / "config.pbtxt").write_text('output [ { name: "OUTPUT0" dims: [ -1, 2 ] } ]')

    write(graph=graph_of(TinyModel(dense_dim=13)))

    assert "no input DES, CATCOLUMN, ROWINDEX; OUTPUT0 has 2 columns, not 1" in caplog.messages[0]


@pytest.mark.parametrize("number", [1, 0, -1])
def test_an_existing_or_impossible_version_is_refused(write, number):
    version = write()
    before = (version / "manifest.json").read_bytes()

    with pytest.raises(OutputError, match=f"this version exists|version {number}: expected at least 1"):
        write(version=number)
    assert (version / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "a b", "stats", "x" * 121])
def test_a_model_name_that_no_server_accepts_is_refused(write, tmp_path, name):
    with pytest.raises(OutputError, match="expected 1 to 120 letters"):
        write(name)
    assert list(tmp_path.iterdir()) == []


def test_a_repository_that_is_a_file_is_refused(write, tmp_path):
    (tmp_path / "models").write_text("")

    with pytest.raises(OutputError, match="models: cannot be created"):
        write()


@pytest.mark.parametrize("table", ["graph.json", "dense.model", "dense.onnx", "model.py", "manifest.json"])
def test_a_table_with_the_name_of_a_file_is_refused_before_any_work(tmp_path, table):
    with pytest.raises(ConfigError, match=f"a table cannot be called '{table}'"):
        check_output(tmp_path, "two", graph_of(TinyModel(tables={table: 1})))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"supportlonglong": false}', "ps.json: supportlonglong: expected true, .* got false"),
        ('{"supportlonglong": "false"}', 'ps.json: supportlonglong: expected true, .* got "false"'),
        ('{"models": []}', "ps.json: supportlonglong: expected true, .* got nothing"),
        ("[]", r"ps.json: expected an object, got \[\]"),
        ('{"supportlonglong": true,}', "ps.json: line 1 column"),
    ],
)
def test_a_ps_json_for_other_models_is_refused_before_anything_is_written(write, tmp_path, text, expected):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "ps.json").write_text(text)

    with pytest.raises(ConfigError, match=expected):
        write()

    assert [path.name for path in (tmp_path / "models").iterdir()] == ["ps.json"]


@pytest.mark.parametrize("said", ["true", '"True"'])
def test_a_ps_json_of_int64_keys_does_not_change(write, tmp_path, said):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "ps.json").write_text(f'{{"supportlonglong": {said}}}')

    write()

    assert (tmp_path / "models" / "ps.json").read_text() == f'{{"supportlonglong": {said}}}'
