"""`hotrow export-onnx`: its files run in ONNX Runtime, and in Hotrow in place of the layers."""

import json
import shutil

import numpy as np
import pytest

from serving import load_model
from serving.cli.main import main
from serving.reading import read_batch
from tests.tools.tiny_model import TinyModel, flatten

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("ndonnx")

MODEL = TinyModel(tables={"user": 1, "item": 2}, dense_dim=3)


@pytest.fixture
def version(tmp_path):
    return MODEL.write(tmp_path / "models")


def predict_request(samples=20):
    dense, bags = MODEL.sample_requests(samples)
    keys, offsets = flatten(bags)
    return (dense, keys, offsets), MODEL.probabilities(dense, bags)


def as_own_network(version, file, folder):
    """Copy a version and replace its layers and weights with ``file``."""
    own = folder / "own" / "1"
    shutil.copytree(version, own)
    (own / "manifest.json").unlink()
    (own / "dense.model").unlink()
    shutil.copy(file, own / "net.onnx")
    document = json.loads((own / "graph.json").read_text())
    document["inference"]["dense_model_file"] = "net.onnx"
    document["layers"] = [layer for layer in document["layers"] if layer["type"] == "Data" or "hparam" in str(layer)]
    (own / "graph.json").write_text(json.dumps(document))
    return own


@pytest.mark.parametrize("name", ["mine.onnx", "dense.onnx"])
def test_no_file_is_written_into_a_version(version, capsys, name):
    before = {file: file.read_bytes() for file in version.rglob("*") if file.is_file()}

    assert main(["export-onnx", str(version), str(version / name)]) == 1

    assert f"{name}: its folder is a model's version, which takes no file that" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in version.rglob("*") if file.is_file()} == before
    load_model(version).close()


def test_the_file_runs_in_onnx_runtime_on_looked_up_vectors(version, tmp_path, capsys):
    file = tmp_path / "tiny.onnx"
    call, expected = predict_request()

    assert main(["export-onnx", str(version), str(file)]) == 0

    assert capsys.readouterr().out.splitlines() == [
        f"model tiny written to {file}",
        "  input  dense float32[B, 3]",
        "  input  user_vectors float32[B, 1, 4]",
        "  input  item_vectors float32[B, 2, 4]",
        "  output probability float32[B, 1]",
    ]
    onnx.checker.check_model(onnx.load(file), full_check=True)
    with load_model(version) as session:
        batch = read_batch(session.config, *call)
        user, item = session.embedding_cache.lookup_pooled(batch).embeddings
        by_session = session.predict(*call)
    runtime = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (answer,) = runtime.run(None, {"dense": batch.dense, "user_vectors": user, "item_vectors": item})
    np.testing.assert_allclose(answer, by_session, rtol=1e-6)
    np.testing.assert_allclose(answer, expected, rtol=1e-4)


def test_the_printed_inputs_are_those_of_the_file(version, tmp_path, capsys):
    """An own network may take a flat table, and may ignore another table or the dense features."""
    helper, file = onnx.helper, tmp_path / "net.onnx"
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["item_vectors", "weight"], ["logit"]),
            helper.make_node("Sigmoid", ["logit"], ["click"]),
        ],
        "flat",
        [helper.make_tensor_value_info("item_vectors", onnx.TensorProto.FLOAT, ["B", 8])],
        [helper.make_tensor_value_info("click", onnx.TensorProto.FLOAT, ["B", 1])],
        [onnx.numpy_helper.from_array(np.full((8, 1), 0.1, np.float32), "weight")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    own = as_own_network(version, file, tmp_path)

    assert main(["export-onnx", str(own), str(tmp_path / "again.onnx")]) == 0

    assert capsys.readouterr().out.splitlines()[1:] == [
        "  input  item_vectors float32[B, 8]",
        "  output click float32[B, 1]",
    ]


def test_the_file_serves_as_an_own_network_and_is_exported_unchanged(version, tmp_path):
    file, again = tmp_path / "tiny.onnx", tmp_path / "again.onnx"
    call, _ = predict_request()

    assert main(["export-onnx", str(version), str(file)]) == 0
    own = as_own_network(version, file, tmp_path)
    assert main(["export-onnx", str(own), str(again)]) == 0

    assert again.read_bytes() == file.read_bytes()
    with load_model(version, engine="onnx") as session, load_model(own) as of_own:
        assert np.array_equal(session.predict(*call), of_own.predict(*call))


@pytest.mark.parametrize("form", ["graph.json", "model directory", "repository"])
def test_every_form_of_one_model_is_accepted(version, tmp_path, form):
    path = {"graph.json": version / "graph.json", "model directory": version.parent, "repository": tmp_path / "models"}

    assert main(["export-onnx", str(path[form]), str(tmp_path / "net.onnx")]) == 0

    assert (tmp_path / "net.onnx").stat().st_size > 0


def test_an_existing_file_is_replaced_and_no_other_file_is_left(version, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "net.onnx").write_bytes(b"old")

    assert main(["export-onnx", str(version), str(tmp_path / "out" / "net.onnx")]) == 0

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["net.onnx"]
    onnx.load(tmp_path / "out" / "net.onnx")


def refused(capsys, *arguments):
    assert main(["export-onnx", *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_name_that_serving_would_not_recognize_is_refused(version, tmp_path, capsys):
    error = refused(capsys, version, tmp_path / "net.model")

    assert "net.model: expected a name that ends in .onnx" in error


def test_a_missing_folder_is_named(version, tmp_path, capsys):
    error = refused(capsys, version, tmp_path / "nowhere" / "net.onnx")

    assert "net.onnx: cannot be written: No such file or directory" in error


def test_several_models_are_refused(version, tmp_path, capsys):
    MODEL.write(tmp_path / "models", "other")

    error = refused(capsys, tmp_path / "models", tmp_path / "net.onnx")

    assert "has 2 models (other, tiny); give the directory of one model" in error
    assert not (tmp_path / "net.onnx").exists()


def test_damaged_weights_leave_no_file(version, tmp_path, capsys):
    (version / "manifest.json").unlink()
    (version / "dense.model").write_bytes(b"1234")

    assert "dense.model" in refused(capsys, version, tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


def test_a_network_with_external_files_is_refused(version, tmp_path, capsys):
    file = tmp_path / "tiny.onnx"
    assert main(["export-onnx", str(version), str(file)]) == 0
    own = as_own_network(version, file, tmp_path)
    model = onnx.load(own / "net.onnx")
    for node in [node for node in model.graph.node if node.op_type == "Constant"]:  # only initializers may be external
        tensor = node.attribute[0].t
        tensor.name = node.output[0]
        model.graph.initializer.append(tensor)
        model.graph.node.remove(node)
    onnx.save(model, own / "net.onnx", save_as_external_data=True, location="weights", size_threshold=70)

    assert "net.onnx: has weights in files next to it" in refused(capsys, own, tmp_path / "again.onnx")


@pytest.mark.parametrize("place", ["initializer", "constant"])
def test_external_weights_are_found_in_the_branches_of_an_if_too(version, tmp_path, capsys, place):
    helper = onnx.helper
    weight = onnx.numpy_helper.from_array(np.full((8, 1), 0.1, np.float32), "weight")
    onnx.external_data_helper.set_external_data(weight, "weights")
    content = weight.raw_data
    weight.ClearField("raw_data")
    constants = [helper.make_node("Constant", [], ["weight"], value=weight)] if place == "constant" else []
    result = helper.make_tensor_value_info("logit", onnx.TensorProto.FLOAT, ["B", 1])
    arm = helper.make_graph(
        [*constants, helper.make_node("MatMul", ["item_vectors", "weight"], ["logit"])],
        "arm",
        [],
        [result],
        [] if constants else [weight],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], ["true"], value=onnx.numpy_helper.from_array(np.array(True))),
            helper.make_node("If", ["true"], ["either"], then_branch=arm, else_branch=arm),
            helper.make_node("Sigmoid", ["either"], ["click"]),
        ],
        "branches",
        [helper.make_tensor_value_info("item_vectors", onnx.TensorProto.FLOAT, ["B", 8])],
        [helper.make_tensor_value_info("click", onnx.TensorProto.FLOAT, ["B", 1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "tiny.onnx").write_bytes(model.SerializeToString())
    own = as_own_network(version, tmp_path / "tiny.onnx", tmp_path)
    (own / "weights").write_bytes(content)

    assert "net.onnx: has weights in files next to it" in refused(capsys, own, tmp_path / "again.onnx")
