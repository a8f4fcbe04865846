import json
import os
import re
import shutil

import pytest

from serving.config import read_model_directory, read_repository
from serving.errors import ConfigError, ModelFileError
from serving.model.manifest import write_manifest


def write_version(write_model, version, folder="dcn", **sketch):
    model = write_model(folder=f"{folder}/{version}", **sketch)
    model.config_file.rename(model.config_file.with_name("graph.json"))
    return model.config_file.parent


def test_the_folders_name_the_model_and_its_version(write_model):
    directory = write_version(write_model, 3)

    config = read_model_directory(directory)

    assert (config.name, config.version) == ("dcn", 3)
    assert config.full_name(config.tables[0]) == f"dcn@3-{config.digest[:8]}.table0"
    assert config.hps_name(config.tables[0]) == "dcn.table0"
    assert config.graph_file == directory / "graph.json"
    assert config.onnx_file is None


def test_the_newest_complete_version_of_a_model_directory_is_read(write_model, tmp_path):
    for version in (2, 10, 9, ".11.tmp", "old"):
        write_version(write_model, version)
    (tmp_path / "dcn" / "12").mkdir()

    assert read_model_directory(tmp_path / "dcn").version == 10


def test_a_repository_is_no_model_and_one_of_its_models_is_named(write_model, tmp_path):
    write_version(write_model, 1)

    with pytest.raises(ModelFileError, match=rf"this is a repository, and a model of it is {tmp_path / 'dcn'}$"):
        read_model_directory(tmp_path)


def test_a_folder_without_an_integer_name_is_a_model_without_a_version(write_model):
    config = read_model_directory(write_version(write_model, "export"))

    assert (config.name, config.version) == ("export", 0)


def test_an_onnx_file_next_to_the_dense_weights_is_recorded(write_model):
    directory = write_version(write_model, 1)
    (directory / "_dense_10.onnx").write_bytes(b"")

    assert read_model_directory(directory).onnx_file == directory / "_dense_10.onnx"


def test_an_onnx_file_that_is_a_dead_link_is_recorded_too_so_a_session_refuses_it(write_model):
    directory = write_version(write_model, "export")
    (directory / "_dense_10.onnx").symlink_to("gone")

    assert read_model_directory(directory).onnx_file == directory / "_dense_10.onnx"


def test_dense_weights_whose_name_is_too_long_for_another_suffix_have_no_onnx_file(write_model):
    directory = write_version(write_model, 1)
    graph = json.loads((directory / "graph.json").read_text())
    graph["inference"]["dense_model_file"] = "a" * 255
    (directory / "graph.json").write_text(json.dumps(graph))

    assert read_model_directory(directory).onnx_file is None


@pytest.mark.parametrize("file", ["graph.json", "_dense_10.model", "0_sparse_10.model"])
def test_a_file_that_differs_from_the_manifest_is_refused(write_model, file):
    directory = write_version(write_model, 1)
    write_manifest(directory, "dcn", 1)
    assert read_model_directory(directory).version == 1
    content = bytearray((directory / file).read_bytes())
    content[-1] ^= 1
    (directory / file).write_bytes(content)

    with pytest.raises(ModelFileError, match=file):
        read_model_directory(directory)


def test_swapped_version_folders_are_refused(write_model, tmp_path):
    for version in (1, 2):
        write_manifest(write_version(write_model, version), "dcn", version)
    (tmp_path / "dcn" / "1").rename(tmp_path / "dcn" / "3")

    with pytest.raises(ModelFileError, match=r"manifest\.json: expected the manifest of dcn/3, found that of dcn/1"):
        read_model_directory(tmp_path / "dcn")


def correct_the_manifest(file):
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "model": "copy", "version": 4}))


@pytest.mark.parametrize("mend", [correct_the_manifest, lambda file: file.unlink()], ids=["corrected", "removed"])
def test_a_copy_under_another_name_is_read_after_the_manifest_is_corrected_as_the_message_says(
    write_model, tmp_path, mend
):
    original = write_version(write_model, 1)
    write_manifest(original, "dcn", 1)
    copy = tmp_path / "copy" / "4"
    shutil.copytree(original, copy)
    with pytest.raises(ModelFileError, match="correct 'model' and 'version' in this file, or remove it"):
        read_model_directory(copy)

    mend(copy / "manifest.json")

    config = read_model_directory(copy)
    assert (config.name, config.version) == ("copy", 4)


def test_a_directory_without_any_version_is_refused(tmp_path):
    (tmp_path / "dcn" / "01").mkdir(parents=True)

    with pytest.raises(ModelFileError, match="version folders"):
        read_model_directory(tmp_path / "dcn")


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="nowhere: no such file or folder"):
        read_model_directory(tmp_path / "nowhere")


def test_a_pipe_is_not_a_directory(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ModelFileError, match="pipe: not a folder"):
        read_model_directory(tmp_path / "pipe")


GRAPHS = [
    pytest.param(os.mkfifo, "cannot be read: not a regular file", id="pipe"),
    pytest.param(lambda path: path.symlink_to("/dev/zero"), "cannot be read: not a regular file", id="device"),
    pytest.param(lambda path: path.symlink_to("none"), "cannot be read: a link to a file", id="link"),
    pytest.param(os.mkdir, "cannot be read: not a regular file", id="folder"),
]


@pytest.mark.parametrize(("make", "reason"), GRAPHS)
def test_a_graph_that_is_not_a_regular_file_is_refused(tmp_path, make, reason):
    version = tmp_path / "dcn" / "1"
    version.mkdir(parents=True)
    make(version / "graph.json")

    with pytest.raises(ConfigError, match=rf"graph\.json: {reason}"):
        read_model_directory(version)
    with pytest.raises(ConfigError, match=rf"graph\.json: {reason}"):
        read_repository(tmp_path)


def test_a_graph_that_is_too_large_is_refused_before_the_digest_reads_it(write_model):
    directory = write_version(write_model, 1)
    with (directory / "graph.json").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(ConfigError, match=r"graph\.json: cannot be read: expected at most 67,108,864 bytes"):
        read_model_directory(directory)


def test_a_table_of_the_wrong_size_is_refused_before_the_digest_reads_any_file(write_model):
    directory = write_version(write_model, 1)
    (directory / "0_sparse_10.model").write_bytes(b"x")
    os.mkfifo(directory / "unreadable")

    with pytest.raises(ModelFileError, match=r"0_sparse_10\.model: expected a multiple of \d+ bytes"):
        read_model_directory(directory)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("_dense_10.model", r"expected \d+ bytes \(.*\), found 4,398,046,511,104 bytes"),
        ("0_sparse_10.model", r"expected a multiple of \d+ bytes"),
        *(
            (name, "cannot be read: expected at most 2,147,483,648 bytes, found 4,398,046,511,104")
            for name in ("_dense_10.onnx", "calibration.npz", "model.py", "notes/old")
        ),
    ],
)
def test_a_file_that_is_too_large_is_refused_before_the_digest_reads_any_file(write_model, name, reason):
    directory = write_version(write_model, 1)
    (directory / "notes").mkdir()
    with (directory / name).open("ab") as file:
        file.truncate(1 << 42)

    with pytest.raises(ModelFileError, match=rf"{re.escape(str(directory / name))}: {reason}"):
        read_model_directory(directory)


def test_a_network_that_is_too_large_is_refused_before_the_digest_reads_any_file(write_model):
    directory = write_version(write_model, 1)
    graph = json.loads((directory / "graph.json").read_text())
    graph["inference"]["dense_model_file"] = "net.onnx"
    graph["layers"] = [one for one in graph["layers"] if one["type"] == "Data" or "sparse_embedding_hparam" in one]
    (directory / "graph.json").write_text(json.dumps(graph))
    with (directory / "net.onnx").open("wb") as file:
        file.truncate(1 << 42)

    with pytest.raises(ModelFileError, match=r"net\.onnx: cannot be read: expected at most 2,147,483,648 bytes"):
        read_model_directory(directory)
