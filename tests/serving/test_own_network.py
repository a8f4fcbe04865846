"""Models whose dense network is an ONNX file, opened in every way: JSON, folder, ps.json, v3.0 calls, commands."""

import json
import sys

import numpy as np
import pytest

from serving import CreateEmbeddingCache, CreateParameterServer, InferenceSession, load_model
from serving.cli.main import main
from serving.config import read_inference_config, read_model_directory, read_ps_config
from serving.errors import ConfigError, MissingExtraError, ModelFileError, RequestError
from serving.model.manifest import write_manifest
from serving.parameter_server.table_files import memory_needed
from serving.repository import ModelRepository
from tests.serving.ps_files import listed, write_ps

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

# For float32 against float64, and for ONNX Runtime's approximate Sigmoid.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}


def as_onnx(model):
    """Return the network of a ``WrittenModel`` as an ONNX model with unflattened table inputs."""
    cross_w, cross_b, w1, b1, w2, b2 = model.weights
    arrays = {"cw": cross_w[:, None], "cb": cross_b, "w1": w1, "b1": b1, "w2": w2, "b2": b2}
    tables = [f"embedding{index}" for index in range(len(model.sketches))]
    shapes = {name: ["B", sketch.slots, sketch.dim] for name, sketch in zip(tables, model.sketches, strict=True)}
    make = onnx.helper.make_node
    return onnx.helper.make_model(
        onnx.helper.make_graph(
            [
                *(make("Flatten", [name], [f"flat_{name}"]) for name in tables),
                make("Concat", [*(f"flat_{name}" for name in tables), "dense"], ["x"], axis=1),
                make("MatMul", ["x", "cw"], ["level"]),
                make("Mul", ["x", "level"], ["scaled"]),
                make("Sum", ["scaled", "x", "cb"], ["cross"]),
                make("Gemm", ["x", "w1", "b1"], ["hidden"]),
                make("Relu", ["hidden"], ["active"]),
                make("Concat", ["cross", "active"], ["both"], axis=1),
                make("Gemm", ["both", "w2", "b2"], ["logit"]),
                make("Sigmoid", ["logit"], ["click"]),
            ],
            "own",
            [
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
                for name, shape in {"dense": ["B", model.features], **shapes}.items()
            ],
            [onnx.helper.make_tensor_value_info("click", onnx.TensorProto.FLOAT, ["B", 1])],
            [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
        ),
        ir_version=10,
        opset_imports=[onnx.helper.make_opsetid("", 21)],
    )


@pytest.fixture
def write_own(write_model):
    """Write a model of two tables with its network as net.onnx; return the WrittenModel."""

    def write(**options):
        table = write_model.table
        model = write_model(table(slots=3, dim=4), table(slots=1, dim=5, combiner=1), **options)
        onnx.save(as_onnx(model), model.config_file.with_name("net.onnx"))
        model.document["inference"]["dense_model_file"] = "net.onnx"
        model.network = model.document["layers"][3:]
        model.document["layers"] = model.document["layers"][:3]
        model.config_file.with_name("_dense_10.model").unlink()
        model.write_config()
        return model

    return write


@pytest.fixture
def write_own_version(write_own):
    """Write such a model as a version directory; return the WrittenModel and the directory."""

    def write(folder="dcn/1"):
        model = write_own(folder=folder)
        directory = model.config_file.parent
        model.config_file.rename(directory / "graph.json")
        write_manifest(directory, *folder.split("/")[:1], int(folder.split("/")[1]))
        return model, directory

    return write


def request_of(model, samples=9):
    dense, bags = model.draw_request(np.random.default_rng(3), samples, unknown_ratio=0.2)
    keys, row_ptrs, _ = model.flatten(bags)
    return (dense, keys, row_ptrs), model.expected(dense, bags)


@pytest.mark.parametrize("engine", ["auto", "onnx"])
def test_a_model_folder_answers_like_its_network_in_float64(write_own_version, engine):
    model, directory = write_own_version()
    request, expected = request_of(model)

    with load_model(directory.parent, engine=engine) as session:
        probabilities = session.predict(*request)

    assert (session.engine, session.graph.layers) == ("onnx", ())
    assert (probabilities.shape, probabilities.dtype) == ((9, 1), np.float32)
    np.testing.assert_allclose(probabilities, expected, **TOLERANCE)


def test_the_calls_of_hugectr_answer_the_same(write_own):
    model = write_own()
    request, expected = request_of(model)
    server = CreateParameterServer([model.config_file], ["dcn"], True)
    cache = CreateEmbeddingCache(server, 0, False, 0.2, model.config_file, "dcn", True)

    with server:
        probabilities = InferenceSession(model.config_file, 0, cache).predict(*request, True)

    np.testing.assert_allclose(probabilities, expected, **TOLERANCE)


@pytest.fixture
def ps_file(write_own, tmp_path):
    """Write a ps.json that lists such a model, outside its repository."""
    (tmp_path / "hps").mkdir()
    return write_ps(tmp_path / "hps", [listed(write_own().config_file, gpucache=False, label_dim=1, slot_num=4)])


def test_a_ps_json_names_the_network_as_dense_file(ps_file):
    (config,) = read_ps_config(ps_file).models

    assert config.dense_file.name == "net.onnx"
    assert config.onnx_file is None
    assert [(table.name, table.slots, table.dim) for table in config.tables] == [("table0", 3, 4), ("table1", 1, 5)]
    assert (config.dense_dim, config.label_dim) == (2, 1)


def test_memory_needed_counts_the_network(write_own):
    config = read_inference_config(write_own().config_file, "dcn")

    assert memory_needed(config)["dense"] == config.dense_file.stat().st_size


def test_check_opens_the_network_in_every_form(write_own_version, ps_file, tmp_path, capsys):
    _, directory = write_own_version()

    for path in (directory, directory.parent, directory / "graph.json", ps_file):
        assert main(["check", str(path)]) == 0
        assert "table1" in capsys.readouterr().out

    (directory / "manifest.json").unlink()
    (directory / "net.onnx").write_bytes(b"no network")
    assert main(["check", str(directory)]) == 1
    assert "net.onnx: ONNX Runtime cannot open it" in capsys.readouterr().err


def test_a_repository_serves_it_next_to_other_models(write_own_version, write_model, tmp_path):
    model, _ = write_own_version("models/1")
    (tmp_path / "repository").mkdir()
    (tmp_path / "models").rename(tmp_path / "repository" / "own")
    (tmp_path / "repository" / "own" / "1" / "manifest.json").unlink()
    other = write_model(folder="repository/plain/1")
    other.config_file.rename(other.config_file.with_name("graph.json"))
    request, expected = request_of(model)

    with ModelRepository(tmp_path / "repository") as repository:
        repository.load()

        np.testing.assert_allclose(repository.session("own").predict(*request), expected, **TOLERANCE)
        assert sum(line.startswith("model ") for line in repository.describe()) == 2


def test_an_answer_that_is_not_finite_is_refused(write_own):
    model = write_own()
    file = model.config_file.with_name("net.onnx")
    network = onnx.load(file)
    (bias,) = (one for one in network.graph.initializer if one.name == "b2")
    bias.CopyFrom(onnx.numpy_helper.from_array(np.array([np.nan], np.float32), "b2"))
    onnx.save(network, file)
    request, _ = request_of(model)
    server = CreateParameterServer([model.config_file], ["dcn"], True)
    cache = CreateEmbeddingCache(server, 0, False, 0.2, model.config_file, "dcn", True)

    with server, pytest.raises(RequestError, match=r"sample 0: the network's answer is \[nan\], not a finite number"):
        InferenceSession(model.config_file, 0, cache).predict(*request)


def test_numpy_cannot_run_it(write_own_version):
    with pytest.raises(ConfigError, match=r"net\.onnx: an ONNX network runs on ONNX Runtime"):
        load_model(write_own_version()[1], engine="numpy")


def test_without_onnx_runtime_the_extra_is_named(write_own_version, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'hotrow\[onnx\]'"):
        load_model(write_own_version()[1])


def test_a_missing_network_is_named(write_own):
    model = write_own()
    model.config_file.with_name("net.onnx").unlink()
    server = CreateParameterServer([model.config_file], ["dcn"], True)
    cache = CreateEmbeddingCache(server, 0, False, 0.2, model.config_file, "dcn", True)

    with server, pytest.raises(ModelFileError, match=r"net\.onnx: no such file"):
        InferenceSession(model.config_file, 0, cache)


def test_two_networks_are_refused(write_own):
    model = write_own()
    model.document["layers"] += model.network
    model.write_config()

    with pytest.raises(
        ConfigError, match=r"remove every layer except Data and the embeddings, or replace the \.onnx"
    ) as caught:
        read_inference_config(model.config_file, "dcn")

    assert (caught.value.source, caught.value.path) == (str(model.config_file), 'layers[3] "reshape0".type')


def test_a_model_without_a_network_is_refused(write_own):
    model = write_own()
    model.document["inference"]["dense_model_file"] = "net.model"
    model.write_config()

    with pytest.raises(ConfigError, match=r"add the layers of the dense network, or replace the \.model") as caught:
        read_inference_config(model.config_file, "dcn")

    assert (caught.value.source, caught.value.path) == (str(model.config_file), "layers")


def test_a_ps_json_with_two_networks_or_none_names_the_graph(ps_file):
    document = json.loads(ps_file.read_text())
    document["models"][0]["dense_file"] = "model/net.model"
    ps_file.write_text(json.dumps(document))

    with pytest.raises(ConfigError, match=r"model\.json: layers: no layer follows the embeddings"):
        read_ps_config(ps_file)


def test_a_manifest_covers_the_network(write_own_version):
    _, directory = write_own_version()
    (directory / "net.onnx").write_bytes(b"another network")

    with pytest.raises(ModelFileError, match=r"net\.onnx: expected .* bytes"):
        read_model_directory(directory)
