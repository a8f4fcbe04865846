"""Graphs without a network: the inputs of an ONNX network."""

import json
import re
from pathlib import Path

import pytest

from serving.errors import ConfigError
from serving.model.graph import B, inference_document, is_network_file, parse_graph, read_graph, read_model_graph

DATA_AND_EMBEDDINGS = 2


@pytest.fixture
def inputs(document):
    document["layers"] = document["layers"][:DATA_AND_EMBEDDINGS]
    return document


def test_data_and_embeddings_describe_a_request(document, graph, inputs):
    alone = parse_graph(inputs, "graph.json", inputs_only=True)

    assert (alone.sparse, alone.embeddings) == (graph.sparse, graph.embeddings)
    assert (alone.dense_top, alone.dense_dim, alone.label_dim) == (graph.dense_top, graph.dense_dim, graph.label_dim)
    assert alone.shapes == {"dense": (B, 2), "embedding1": (B, 4, 3)}
    assert (alone.layers, alone.stored, alone.logits, alone.output) == ((), (), "", "")
    assert (alone.least_samples, alone.mixes_samples) == (1, False)


def test_the_labels_of_several_tasks_are_concatenated(inputs):
    inputs["layers"][0]["label"] = {"top": ["click", "buy"], "label_dim": [1, 2]}

    assert parse_graph(inputs, "graph.json", inputs_only=True).label_dim == 3


def test_the_example_in_the_documentation_is_a_graph_of_inputs():
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    (block,) = re.findall(
        r"```json\n(.*?)```", page.partition("## A dense network of your own")[2].partition("\n## ")[0], re.S
    )

    graph = parse_graph(json.loads(block), "configuration.md", inputs_only=True)

    assert (graph.dense_top, graph.dense_dim, graph.label_dim) == ("dense", 13, 1)
    assert graph.shapes["user_vectors"] == (B, 2, 16)


@pytest.mark.parametrize("first", [2, -1], ids=["a dense layer", "a loss"])
def test_a_layer_of_a_second_network_is_refused(base_document, inputs, first):
    layer = base_document["layers"][first]
    inputs["layers"].append(layer)

    with pytest.raises(ConfigError, match=f"{layer['type']} describes a network, but the dense file is") as caught:
        parse_graph(inputs, "graph.json", inputs_only=True)

    assert caught.value.path == f'layers[2] "{layer["name"]}".type'


def test_inputs_are_checked_as_those_of_any_graph(inputs):
    inputs["layers"][0]["sparse"].append({"top": "more", "slot_num": 1, "nnz_per_slot": 1})

    with pytest.raises(ConfigError, match="no embedding reads 'more'"):
        parse_graph(inputs, "graph.json", inputs_only=True)


@pytest.mark.parametrize("read", [lambda d: parse_graph(d, ""), inference_document], ids=["graph", "inference form"])
def test_without_a_network_there_is_nothing_to_run_or_train(inputs, read):
    with pytest.raises(
        ConfigError, match="layers: no layer follows the embeddings; add the layers of the dense network"
    ):
        read(inputs)


@pytest.mark.parametrize(
    ("name", "is_network"), [("net.onnx", True), ("a.b/net.model", False), ("net.onnx/dense.model", False), ("", False)]
)
def test_the_suffix_distinguishes_a_network_from_weights(name, is_network):
    assert is_network_file(name) == is_network


def test_the_dense_file_decides_how_a_graph_is_read(base_document, tmp_path):
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(base_document))

    assert read_model_graph(file, tmp_path / "dense.model") == read_graph(file)
    with pytest.raises(ConfigError, match="describes a network"):
        read_model_graph(file, tmp_path / "net.onnx")


def test_a_data_layer_without_a_label_has_one_label(inputs):
    del inputs["layers"][0]["label"]

    assert parse_graph(inputs, "graph.json", inputs_only=True).label_dim == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([0], "padding_keys: expected 4 keys or null, one per slot, got 1"),
        ([0, None, 1.5, None], "padding_keys[2]: expected an integer, got 1.5"),
        (0, "padding_keys: expected a list, got 0"),
        ([0, None, -1, None], None),
    ],
)
def test_padding_keys_have_a_key_or_null_for_each_slot(inputs, keys, message):
    inputs["layers"][0]["sparse"][0]["padding_keys"] = keys

    if message is None:
        assert parse_graph(inputs, "graph.json", inputs_only=True).sparse[0].paddings == tuple(keys)
    else:
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse_graph(inputs, "graph.json", inputs_only=True)


def test_training_would_not_know_padding_keys(document):
    document["layers"][0]["sparse"][0]["padding_keys"] = [0, None, None, None]

    with pytest.raises(ConfigError, match="padding_keys need a network in an ONNX file"):
        parse_graph(document, "graph.json")
