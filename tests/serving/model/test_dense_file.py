import logging
import os
import re
import struct

import numpy as np
import pytest

from serving.errors import ModelFileError
from serving.model.dense_file import read_dense, weight_key, write_dense
from serving.model.graph import parse_graph


@pytest.fixture
def weights(graph):
    rng = np.random.default_rng(7)
    return {weight_key(spec): rng.standard_normal(spec.shape).astype(np.float32) for spec in graph.weights}


@pytest.fixture
def dense_file(tmp_path, graph, weights):
    write_dense(tmp_path / "dense.model", graph, weights)
    return tmp_path / "dense.model"


def test_a_file_is_the_weights_in_graph_order_and_nothing_else(document, tmp_path):
    document["layers"][3:-1] = [
        {"name": "flat", "type": "InnerProduct", "bottom": "dense", "top": "fc0", "fc_param": {"num_output": 3}},
        {"name": "cross", "type": "MultiCross", "bottom": "fc0", "top": "cross", "mc_param": {"num_layers": 1}},
        {"name": "last", "type": "InnerProduct", "bottom": "cross", "top": "fc2", "fc_param": {"num_output": 1}},
    ]
    graph = parse_graph(document, "graph.json")
    by_hand = struct.pack("<6f", 1, 2, 3, 4, 5, 6) + struct.pack("<3f", 7, 8, 9)  # flat: W[2, 3], b[3]
    by_hand += struct.pack("<3f", 10, 11, 12) + struct.pack("<3f", 13, 14, 15)  # cross: w[3], b[3]
    by_hand += struct.pack("<3f", 16, 17, 18) + struct.pack("<1f", 19)  # last: W[3, 1], b[1]
    (tmp_path / "by_hand").write_bytes(by_hand)

    weights = read_dense(tmp_path / "by_hand", graph)
    write_dense(tmp_path / "written", graph, weights)

    assert weights["flat.weight"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert weights["cross.bias0"].tolist() == [13, 14, 15]
    assert weights["last.bias"].tolist() == [19]
    assert (tmp_path / "written").read_bytes() == by_hand


def test_written_weights_are_read_back(graph, weights, dense_file):
    read = read_dense(dense_file, graph)

    assert read.keys() == weights.keys()
    assert all(np.array_equal(read[key], weights[key]) for key in weights)
    assert all(array.dtype == np.float32 for array in read.values())


def test_weights_of_any_memory_layout_are_written(graph, weights, dense_file, tmp_path):
    weights["fc1.weight"] = np.asfortranarray(weights["fc1.weight"])

    write_dense(tmp_path / "again", graph, weights)

    assert (tmp_path / "again").read_bytes() == dense_file.read_bytes()


@pytest.mark.parametrize("change", [-1, 1, -4, 4, "empty"])
def test_a_file_of_the_wrong_size_is_refused(graph, dense_file, change):
    content = dense_file.read_bytes()
    dense_file.write_bytes(b"" if change == "empty" else content[:change] if change < 0 else content + b"\0" * change)

    with pytest.raises(ModelFileError) as caught:
        read_dense(dense_file, graph)

    floats = 3 * 28 + 14 * 8 + 8 + 22 + 1
    message = str(caught.value)
    assert message.startswith(f"{dense_file}: expected {4 * floats:,} bytes (multicross1.weight0 14, ")
    assert "fc1.weight 14x8, fc1.bias 8" in message
    assert message.endswith(f"found {dense_file.stat().st_size:,} bytes")


def test_a_missing_file_is_refused(graph, tmp_path):
    with pytest.raises(ModelFileError, match="no such file"):
        read_dense(tmp_path / "dense.model", graph)


def test_a_folder_is_refused(graph, tmp_path):
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_dense(tmp_path, graph)


def test_a_pipe_is_refused_without_waiting(graph, tmp_path):
    os.mkfifo(tmp_path / "dense.model")

    with pytest.raises(ModelFileError, match="not a regular file"):
        read_dense(tmp_path / "dense.model", graph)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_reported_by_name(graph, weights, tmp_path, caplog, value):
    weights["fc1.weight"][3, 2] = value
    write_dense(tmp_path / "dense.model", graph, weights)

    with caplog.at_level(logging.WARNING):
        read_dense(tmp_path / "dense.model", graph)

    assert [record.args[1] for record in caplog.records] == ["fc1.weight"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda w: w.pop("fc1.bias"), "fc1.bias: missing", id="missing"),
        pytest.param(
            lambda w: w.update({"fc9.bias": w["fc1.bias"]}), "fc9.bias: the graph has no such weight", id="unknown"
        ),
        pytest.param(
            lambda w: w.update({"fc1.weight": w["fc1.weight"].T}),
            "fc1.weight: expected float32 [14, 8], got float32 [8, 14]",
            id="transposed",
        ),
        pytest.param(
            lambda w: w.update({"fc1.bias": w["fc1.bias"].astype(np.float64)}),
            "fc1.bias: expected float32 [8], got float64 [8]",
            id="float64",
        ),
    ],
)
def test_weights_of_another_graph_are_not_written(graph, weights, dense_file, edit, message):
    before = dense_file.read_bytes()
    edit(weights)

    with pytest.raises(ModelFileError, match=re.escape(message)):
        write_dense(dense_file, graph, weights)

    assert dense_file.read_bytes() == before


def test_a_folder_that_does_not_exist_is_named(graph, weights, tmp_path):
    with pytest.raises(ModelFileError, match=r"absent/dense\.model: cannot be written: No such file"):
        write_dense(tmp_path / "absent" / "dense.model", graph, weights)
