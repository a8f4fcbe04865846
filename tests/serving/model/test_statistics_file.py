"""The side file of a dense model file: the statistics of BatchNorm layers."""

import json
import re

import numpy as np
import pytest

from serving.errors import ModelFileError
from serving.model.dense_file import read_dense, weight_key, write_dense
from serving.model.graph import parse_graph


@pytest.fixture
def graph(document):
    """A graph of two BatchNorm layers, of 14 and of 8 columns."""
    norm = {"type": "BatchNorm", "bn_param": {"factor": 0.9, "eps": 1e-5}}
    document["layers"][5] = {**norm, "name": "wide", "bottom": "slice11", "top": "multicross1"}
    document["layers"][7] = {**norm, "name": "deep", "bottom": "fc1", "top": "relu1"}
    return parse_graph(document, "graph.json")


@pytest.fixture
def weights(graph):
    rng = np.random.default_rng(7)
    return {weight_key(s): rng.uniform(0.1, 1, s.shape).astype(np.float32) for s in graph.stored}


@pytest.fixture
def dense_file(tmp_path, graph, weights):
    write_dense(tmp_path / "dense.model", graph, weights)
    return tmp_path / "dense.model"


@pytest.fixture
def edit(dense_file):
    """Change the side file's JSON by a function of its layers."""

    def change(how):
        path = dense_file.with_name("dense.model.ntp.json")
        layers = json.loads(path.read_text())["layers"]
        path.write_text(json.dumps({"layers": how(layers) or layers}))

    return change


def test_the_file_is_hugectrs(graph, weights, dense_file):
    document = json.loads((dense_file.parent / "dense.model.ntp.json").read_text())

    assert document == {
        "layers": [
            {"type": "BatchNorm", "mean": weights[f"{name}.mean"].tolist(), "var": weights[f"{name}.var"].tolist()}
            for name in ("wide", "deep")
        ]
    }
    trained = sum(spec.shape[0] * (spec.shape[1:] or (1,))[0] for spec in graph.weights)
    assert dense_file.stat().st_size == 4 * trained


def test_statistics_are_read_back_bit_for_bit(graph, weights, dense_file):
    read = read_dense(dense_file, graph)

    assert read.keys() == weights.keys()
    assert all(read[key].dtype == np.float32 and np.array_equal(read[key], weights[key]) for key in weights)


def test_a_graph_without_batch_norm_writes_and_reads_none(base_document, tmp_path):
    graph = parse_graph(base_document, "graph.json")
    weights = {weight_key(s): np.zeros(s.shape, np.float32) for s in graph.weights}

    write_dense(tmp_path / "dense.model", graph, weights)

    assert graph.statistics == ()
    assert [path.name for path in tmp_path.iterdir()] == ["dense.model"]
    assert read_dense(tmp_path / "dense.model", graph).keys() == weights.keys()


def test_a_missing_file_is_named_with_its_purpose(graph, dense_file):
    dense_file.with_name("dense.model.ntp.json").unlink()

    with pytest.raises(ModelFileError) as caught:
        read_dense(dense_file, graph)

    assert str(caught.value) == f"{dense_file}.ntp.json: no such file; it holds the mean and variance of wide, deep"


def swap_layers(layers):
    layers.reverse()


def swap_members(layers):
    layers[0]["mean"][3] = -0.5
    layers[0]["mean"], layers[0]["var"] = layers[0]["var"], layers[0]["mean"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param(
            swap_layers, "layers[0].mean: expected 14 numbers, the columns of wide, got 8", id="layers-swapped"
        ),
        pytest.param(swap_members, "layers[0].var[3]: expected a variance, at least 0, got -0.5", id="members-swapped"),
        pytest.param(
            lambda x: x[:1], "layers: expected 2 entries, for wide, deep, found 1", id="one-entry-for-two-layers"
        ),
        pytest.param(lambda x: x + x[:1], "layers: expected 2 entries, for wide, deep, found 3", id="three-entries"),
        pytest.param(lambda x: x[1].pop("var") and None, "layers[1].var: missing", id="missing-member"),
        pytest.param(
            lambda x: x[1]["var"].pop() and None,
            "layers[1].var: expected 8 numbers, the columns of deep, got 7",
            id="one-number-short",
        ),
        pytest.param(
            lambda x: x[1].update(variance=[]), "layers[1].variance: unknown key; expected", id="unknown-member"
        ),
        pytest.param(
            lambda x: x[1].update(type="LayerNorm"),
            'layers[1].type: expected one of "BatchNorm", got "LayerNorm"',
            id="other-type",
        ),
        pytest.param(
            lambda x: x[0]["mean"].__setitem__(2, None), "layers[0].mean[2]: expected a number, got null", id="null"
        ),
        pytest.param(
            lambda x: x[0]["mean"].__setitem__(2, 1e39),
            "layers[0].mean[2]: expected a number within float32, got 1e+39",
            id="too-large",
        ),
        pytest.param(lambda x: x[0].update(mean={}), "layers[0].mean: expected a list, got an object", id="no-list"),
    ],
)
def test_a_wrong_file_is_refused_and_the_place_is_named(graph, dense_file, edit, how, message):
    edit(how)

    with pytest.raises(ModelFileError, match=re.escape(f"dense.model.ntp.json: {message}")):
        read_dense(dense_file, graph)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": []}', '{"layers": [1]}', '{"layers": [NaN]}'])
def test_a_file_of_another_form_is_refused(graph, dense_file, text):
    dense_file.with_name("dense.model.ntp.json").write_text(text)

    with pytest.raises(ModelFileError, match=re.escape(f"{dense_file}.ntp.json: ")):
        read_dense(dense_file, graph)


def test_statistics_of_another_shape_are_not_written(graph, weights, dense_file):
    before = dense_file.with_name("dense.model.ntp.json").read_bytes()
    weights["deep.var"] = weights["deep.var"][:-1]

    with pytest.raises(ModelFileError, match=re.escape("deep.var: expected float32 [8], got float32 [7]")):
        write_dense(dense_file, graph, weights)

    assert dense_file.with_name("dense.model.ntp.json").read_bytes() == before
