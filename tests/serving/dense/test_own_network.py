"""ONNX networks that Hotrow did not make: written here with onnx.helper, run instead of a graph's layers."""

import json
import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving.dense.calibration import Calibration
from serving.dense.files import open_dense
from serving.dense.own_network import open_own_network
from serving.errors import ConfigError, MissingExtraError, ModelFileError, RequestError
from serving.importers.network import read_network
from serving.model.graph import parse_graph

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

FLOAT, DOUBLE, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64
RNG = np.random.default_rng(8)
W_USER, W_ITEM, W_DENSE = (RNG.normal(0, 0.4, shape).astype(np.float32) for shape in [(8, 2), (6, 2), (3, 2)])


def inputs_document(dense_dim=3, label_dim=2):
    """A graph with two tables, user [B, 2, 4] and item [B, 2, 3], and no network."""
    return {
        "layers": [
            {
                "type": "Data",
                "label": {"label_dim": label_dim},
                "dense": {"top": "dense", "dense_dim": dense_dim},
                "sparse": [{"top": f"keys{t}", "slot_num": 2, "nnz_per_slot": 1} for t in range(2)],
            },
            *(
                {
                    "name": f"{name}_table",
                    "type": "DistributedSlotSparseEmbeddingHash",
                    "bottom": f"keys{t}",
                    "top": name,
                    "sparse_embedding_hparam": {"embedding_vec_size": dim, "combiner": "sum"},
                }
                for t, (name, dim) in enumerate([("user", 4), ("item", 3)])
            ),
        ]
    }


def value(name, shape, dtype=FLOAT):
    return onnx.helper.make_tensor_value_info(name, dtype, shape)


def constant(name, array):
    return onnx.numpy_helper.from_array(np.asarray(array), name)


def node(kind, inputs, outputs, **attributes):
    return onnx.helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


LOGISTIC = [
    node("Reshape", "user user_shape", "flat"),
    node("MatMul", "flat w_user", "a"),
    node("MatMul", "item w_item", "b"),
    node("MatMul", "dense w_dense", "c"),
    node("Sum", "a b c", "logits"),
    node("Sigmoid", "logits", "clicks"),
]
WITHOUT_DENSE = [*LOGISTIC[:3], node("Sum", "a b", "logits"), LOGISTIC[-1]]
WITHOUT_USER = [*LOGISTIC[2:4], node("Sum", "b c", "logits"), LOGISTIC[-1]]
INPUTS = [value("item", ["B", 6]), value("dense", ["B", 3]), value("user", ["B", 2, 4])]
OUTPUTS = [value("clicks", ["B", 2])]
CONSTANTS = [
    constant("user_shape", [-1, 8]),
    constant("w_user", W_USER),
    constant("w_item", W_ITEM),
    constant("w_dense", W_DENSE),
]


@pytest.fixture
def open_onnx_file(tmp_path):
    """Write an ONNX file from these parts and open it for the two tables."""

    def open_(nodes=LOGISTIC, inputs=INPUTS, outputs=OUTPUTS, constants=CONSTANTS, label_dim=2, dense_dim=3):
        model = onnx.helper.make_model(
            onnx.helper.make_graph(nodes, "own", inputs, outputs, constants),
            ir_version=10,
            opset_imports=[onnx.helper.make_opsetid("", 21)],
        )
        onnx.save(model, tmp_path / "net.onnx")
        graph = parse_graph(inputs_document(dense_dim, label_dim), "graph.json", inputs_only=True)
        network, opened = open_own_network(graph, tmp_path / "net.onnx")
        return network, opened.mixes_samples

    return open_


def draw(samples, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(samples, 3), (samples, 2, 4), (samples, 2, 3)]
    dense, user, item = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return dense, [user, item]


def in_float64(dense, embeddings):
    user, item = (
        one.reshape(len(dense), width).astype(np.float64) for width, one in zip((8, 6), embeddings, strict=True)
    )
    return 1 / (1 + np.exp(-(user @ W_USER + item @ W_ITEM + dense.astype(np.float64) @ W_DENSE)))


@pytest.mark.parametrize("samples", [0, 1, 2, 7, 64])
def test_inputs_match_by_name_in_any_order_and_tables_may_be_flat(open_onnx_file, samples):
    network, mixes_samples = open_onnx_file()
    dense, embeddings = draw(samples)

    probabilities = network(dense, embeddings)

    assert (network.engine, mixes_samples) == ("onnx", False)
    assert (probabilities.shape, probabilities.dtype) == ((samples, 2), np.float32)
    # ONNX Runtime approximates this file's Sigmoid.
    np.testing.assert_allclose(probabilities, in_float64(dense, embeddings), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("shape", [[None, None, None], None], ids=["no sizes", "no rank"])
def test_open_dimensions_of_a_file_are_accepted(open_onnx_file, shape):
    inputs = [value("item", ["B", 6]), value("dense", ["B", 3]), value("user", shape)]

    network, _ = open_onnx_file(inputs=inputs, outputs=[value("clicks", None)])

    np.testing.assert_allclose(network(*draw(5)), in_float64(*draw(5)), rtol=1e-3)


def test_one_probability_per_sample_needs_no_second_dimension(open_onnx_file):
    nodes = [node("ReduceMean", "dense axes", "mean", keepdims=0), node("Sigmoid", "mean", "clicks")]

    network, _ = open_onnx_file(nodes, [INPUTS[1]], [value("clicks", ["B"])], [constant("axes", [1])], label_dim=1)

    dense, embeddings = draw(4)
    probabilities = network(dense, embeddings)
    assert probabilities.shape == (4, 1)
    np.testing.assert_allclose(probabilities[:, 0], 1 / (1 + np.exp(-dense.mean(axis=1))), rtol=1e-3)


def test_dense_features_need_not_be_read_and_need_not_exist(open_onnx_file, caplog):
    inputs = [INPUTS[0], INPUTS[2]]

    for dense_dim in (3, 0):
        network, _ = open_onnx_file(WITHOUT_DENSE, inputs, OUTPUTS, CONSTANTS[:3], dense_dim=dense_dim)
        assert network.inputs == ("item", "user")
    assert caplog.text == ""
    dense, embeddings = draw(5)
    expected = in_float64(np.zeros_like(dense), embeddings)
    np.testing.assert_allclose(network(dense[:, :0], embeddings), expected, rtol=1e-3)


def test_a_table_that_the_network_does_not_read_is_logged(open_onnx_file, caplog):
    with caplog.at_level(logging.WARNING):
        open_onnx_file([*LOGISTIC[:2], LOGISTIC[3], node("Sum", "a c", "logits"), LOGISTIC[-1]], INPUTS[1:])

    assert "net.onnx: no input reads the table 'item_table', so its lookups have no effect" in caplog.text


def test_an_input_that_is_also_the_output_counts_as_read(open_onnx_file):
    network, _ = open_onnx_file([], [value("dense", ["B", 2])], [value("dense", ["B", 2])], [], dense_dim=2)

    dense, embeddings = draw(4)
    np.testing.assert_array_equal(network(dense[:, :2], embeddings), dense[:, :2])


def test_an_input_that_only_the_branches_of_an_if_read_counts_as_read(open_onnx_file):
    arms = [
        onnx.helper.make_graph([node(kind, "user_logits", name)], name, [], [value(name, ["B", 2])])
        for kind, name in (("Identity", "same"), ("Neg", "negative"))
    ]
    nodes = [
        *[node("Reshape", "user user_shape", "flat"), node("MatMul", "flat w_user", "user_logits")],
        node("If", "always", "logits", then_branch=arms[0], else_branch=arms[1]),
        LOGISTIC[-1],
    ]
    constants = [*CONSTANTS[:2], constant("always", np.array(True))]

    network, _ = open_onnx_file(nodes, [INPUTS[2]], constants=constants)

    assert network.inputs == ("user",)


def test_answers_that_are_not_probabilities_are_logged(open_onnx_file, caplog):
    with caplog.at_level(logging.WARNING):
        open_onnx_file([*LOGISTIC[:4], node("Sum", "a b c", "logits"), node("Exp", "logits", "clicks")])

    assert "are not probabilities; is a sigmoid missing at its end?" in caplog.text


def test_answers_that_are_not_finite_are_logged(open_onnx_file, caplog):
    weights = replaced(CONSTANTS, "w_item", constant("w_item", np.full_like(W_ITEM, np.nan)))

    with caplog.at_level(logging.WARNING):
        open_onnx_file(constants=weights)

    assert "answers such as [nan, nan] are not finite; does it have weights that are NaN or infinite?" in caplog.text


MIXING = [
    *LOGISTIC[:4],
    node("Sum", "a b c", "raw"),
    node("ReduceMean", "raw zero", "mean", keepdims=1),
    node("Sub", "raw mean", "logits"),
    LOGISTIC[-1],
]


def test_a_network_that_mixes_samples_is_recognised(open_onnx_file, caplog):
    with caplog.at_level(logging.WARNING):
        _, mixes_samples = open_onnx_file(MIXING, constants=[*CONSTANTS, constant("zero", [0])])

    assert mixes_samples
    assert "the answer to a sample depends on the other samples" in caplog.text


def test_a_network_that_mixes_samples_is_recognised_by_small_answers_too(open_onnx_file):
    """Answers are small, as for ads: a quarter of 0.0003 is less than a thousandth."""
    nodes = [*MIXING[:-2], node("Sub", "raw mean", "d"), node("Sub", "d eleven", "logits"), MIXING[-1]]

    network, mixes_samples = open_onnx_file(
        nodes, constants=[*CONSTANTS, constant("zero", [0]), constant("eleven", np.float32([11]))]
    )

    assert network(*draw(5)).max() < 0.01
    assert mixes_samples


def test_a_network_that_mixes_samples_is_not_run_on_integers(tmp_path, open_onnx_file):
    open_onnx_file(MIXING, constants=[*CONSTANTS, constant("zero", [0])])
    (tmp_path / "graph.json").write_text(json.dumps(inputs_document()))

    with pytest.raises(
        ConfigError, match=r"net\.onnx: engine int8: the answer to a sample depends on the other samples"
    ):
        open_dense(tmp_path / "graph.json", tmp_path / "net.onnx", None, "int8", 1, Calibration(*draw(64)))


def test_many_threads_get_the_answers_of_a_single_thread(open_onnx_file):
    network, _ = open_onnx_file()
    requests = [draw(1 + seed % 9, seed) for seed in range(40)]
    alone = [network(*request) for request in requests]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda request: network(*request), requests))

    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def replaced(values, name, *instead):
    return [one for one in values if one.name != name] + list(instead)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"nodes": WITHOUT_USER},
            "no node reads these inputs, so they have no effect on the answer: 'user'; remove them, or export",
            id="a table that no node reads",
        ),
        pytest.param(
            {"nodes": WITHOUT_DENSE},
            "no node reads these inputs, so they have no effect on the answer: 'dense'; remove them, or export",
            id="dense features that no node reads",
        ),
        pytest.param(
            {"inputs": [*INPUTS, value("age", ["B", 1])]},
            "input 'age': expected the name of the dense top or of an embedding's top (dense, user, item)",
            id="a stranger",
        ),
        pytest.param(
            {"inputs": [*INPUTS, value("users", ["B", 2, 4])]}, "input 'users': .*; did you mean 'user'?", id="misspelt"
        ),
        pytest.param(
            {"inputs": [*INPUTS, value("user_table", ["B", 2, 4])]},
            "input 'user_table': expected the name of the dense top or of an embedding's top (dense, user, item)",
            id="the table instead of its top",
        ),
        pytest.param(
            {"inputs": replaced(INPUTS, "user", value("user", ["B", 2, 5]))},
            "input 'user': expected float32 [B, 2, 4] or [B, 8], got float32 [B, 2, 5]",
            id="another dim",
        ),
        pytest.param(
            {"inputs": replaced(INPUTS, "user", value("user", ["B", 9]))},
            "input 'user': expected float32 [B, 2, 4] or [B, 8], got float32 [B, 9]",
            id="another width",
        ),
        pytest.param(
            {"inputs": replaced(INPUTS, "user", value("user", ["B", 1, 2, 4]))},
            "input 'user': expected float32 [B, 2, 4] or [B, 8], got float32 [B, 1, 2, 4]",
            id="another rank",
        ),
        pytest.param(
            {"nodes": WITHOUT_DENSE, "inputs": replaced(INPUTS, "dense", value("dense", ["B", 4]))},
            "input 'dense': expected float32 [B, 3], got float32 [B, 4]",
            id="more features",
        ),
        pytest.param(
            {"inputs": replaced(INPUTS, "dense", value("dense", ["B"]))},
            "input 'dense': expected float32 [B, 3], got float32 [B]",
            id="flat features",
        ),
        pytest.param(
            {"nodes": WITHOUT_DENSE, "inputs": replaced(INPUTS, "dense", value("dense", [None, 3], DOUBLE))},
            "input 'dense': expected float32 [B, 3], got float64",
            id="double",
        ),
        pytest.param(
            {"nodes": WITHOUT_USER, "inputs": replaced(INPUTS, "user", value("user", ["B", 2], INT64))},
            "input 'user': expected float32 [B, 2, 4] or [B, 8], got int64",
            id="keys instead of vectors",
        ),
        pytest.param(
            {"inputs": replaced(INPUTS, "dense", value("dense", [1, 3]))},
            "input 'dense': expected float32 [B, 3], got float32 [1, 3]: export it with a free number of samples, "
            "as by torch.onnx.export(..., dynamic_axes={'dense': {0: 'B'}, ...})",
            id="a fixed batch",
        ),
        pytest.param(
            {"outputs": [value("clicks", [64, 2])]},
            "output 'clicks': expected float32 [B, 2], got float32 [64, 2]: export it with a free number of samples",
            id="a fixed batch of answers",
        ),
        pytest.param(
            {"outputs": [*OUTPUTS, value("logits", ["B", 2])]},
            "expected one output, the probabilities, got 2: 'clicks', 'logits'",
            id="two outputs",
        ),
        pytest.param(
            {"label_dim": 1},
            "output 'clicks': expected float32 [B, 1] or [B], got float32 [B, 2]",
            id="more labels",
        ),
        pytest.param(
            {
                "nodes": [*LOGISTIC[:-1], node("Cast", "logits", "clicks", to=DOUBLE)],
                "outputs": [value("clicks", ["B", 2], DOUBLE)],
            },
            "output 'clicks': expected float32 [B, 2], got float64",
            id="an answer of doubles",
        ),
        pytest.param(
            {
                "nodes": [
                    *LOGISTIC[:-1],
                    node("Gather", "dense zero", "first", axis=1),
                    node("Cast", "first", "is_set", to=onnx.TensorProto.BOOL),
                    node("Not", "is_set", "is_zero"),
                    node("Compress", "logits is_zero", "clicks", axis=0),
                ],
                "constants": [*CONSTANTS, constant("zero", np.array(0))],
            },
            "tried on 3 samples: the network answers with the shape [0, 2], expected [3, 2]",
            id="a shape that only a run tells",
        ),
        pytest.param(
            {"constants": [constant("user_shape", [1, 8]), *CONSTANTS[1:]]},
            "tried on 3 samples: the network cannot run on this batch: .*Reshape",
            id="a batch of one inside",
        ),
    ],
)
def test_a_network_that_does_not_fit_the_inputs_is_refused(open_onnx_file, change, message):
    pattern = re.escape(message).replace(r"\.\*", ".*")

    with pytest.raises(ModelFileError, match=rf"net\.onnx: {pattern}") as caught:
        open_onnx_file(**{"label_dim": 2, **change})

    assert "\n" not in str(caught.value)


def test_values_that_the_network_cannot_process_are_a_request_error(open_onnx_file):
    nodes = [
        node("Gather", "dense zero", "first", axis=1),
        node("Cast", "first", "index", to=INT64),
        node("Gather", "rates index", "clicks", axis=0),
    ]
    rates = np.linspace(0, 1, 10, dtype=np.float32).reshape(10, 1)
    constants = [constant("zero", np.array(0)), constant("rates", rates)]
    network, _ = open_onnx_file(nodes, [INPUTS[1]], [value("clicks", None)], constants, label_dim=1)
    dense, embeddings = draw(2)
    dense[:, 0] = [3, 9]

    np.testing.assert_array_equal(network(dense, embeddings), rates[[3, 9]])
    dense[1, 0] = 10
    with pytest.raises(RequestError, match=r"the network cannot run on this batch: .*Gather"):
        network(dense, embeddings)


@pytest.fixture
def files(tmp_path, open_onnx_file):
    """Write a graph file without a network, and the network next to it."""
    open_onnx_file()
    (tmp_path / "graph.json").write_text(json.dumps(inputs_document()))
    return tmp_path / "graph.json", tmp_path / "net.onnx", None


@pytest.mark.parametrize("engine", ["auto", "onnx"])
def test_both_engines_with_onnx_runtime_run_it(files, engine):
    graph, network = open_dense(*files, engine)

    assert (graph.layers, graph.label_dim, graph.mixes_samples) == ((), 2, False)
    np.testing.assert_allclose(network(*draw(5)), in_float64(*draw(5)), rtol=1e-3)


def test_numpy_cannot_run_it(files):
    with pytest.raises(ConfigError, match=r"net\.onnx: an ONNX network runs on ONNX Runtime.* numpy cannot"):
        open_dense(*files, "numpy")


def test_an_unknown_engine_is_refused(files):
    with pytest.raises(ValueError, match="expected engine auto, numpy, onnx or int8, got 'torch'"):
        open_dense(*files, "torch")


@pytest.mark.parametrize("engine", ["auto", "onnx"])
def test_without_onnx_runtime_the_extra_is_named(files, engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(MissingExtraError, match=r"onnxruntime.*pip install 'hotrow\[onnx\]'"):
        open_dense(*files, engine)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "no such file", id="missing"),
        pytest.param(b"", "ONNX Runtime cannot open it", id="empty"),
        pytest.param(b"not a model", "ONNX Runtime cannot open it", id="text"),
    ],
)
def test_a_file_that_is_not_a_network_is_refused(files, content, message):
    files[1].unlink()
    if content is not None:
        files[1].write_bytes(content)

    with pytest.raises(ModelFileError, match=rf"net\.onnx: {message}"):
        open_dense(*files)


def test_weights_in_a_file_next_to_the_network_are_found(files):
    model = onnx.load(files[1])
    onnx.save(model, files[1], save_as_external_data=True, location="net.weights", size_threshold=80)
    assert (files[1].parent / "net.weights").exists()

    _, network = open_dense(*files)

    np.testing.assert_allclose(network(*draw(5)), in_float64(*draw(5)), rtol=1e-3)


def with_weights_at(file, location):
    """Let the file's first large tensor name another file for its weights."""
    model = onnx.load(file)
    tensor = next(one for one in model.graph.initializer if one.name == "w_user")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    file.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    "location", ["../secret", "{}", "inside/../../secret", "link", "circle", "pipe", "gone", "a\0b", ""]
)
def test_weights_outside_the_folder_of_the_network_are_refused(files, tmp_path, location):
    folder = tmp_path / "version"
    folder.mkdir()
    file = files[1].rename(folder / "net.onnx")
    secret = tmp_path / "secret"
    W_USER.tofile(secret)
    (folder / "link").symlink_to(secret)
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    with_weights_at(file, location.format(secret))

    with pytest.raises(ModelFileError, match=r"net\.onnx: tensor 'w_user': "):
        open_own_network(parse_graph(inputs_document(), "graph.json", inputs_only=True), file)
    with pytest.raises(ModelFileError, match=r"net\.onnx: tensor 'w_user': "):
        read_network(file)


def test_weights_in_the_folder_are_read(files):
    W_USER.tofile(files[1].parent / "weights.bin")
    with_weights_at(files[1], "./weights.bin")

    _, network = open_dense(*files)

    np.testing.assert_allclose(network(*draw(5)), in_float64(*draw(5)), rtol=1e-3)


def test_a_name_that_is_not_utf8_is_refused(files):
    files[1].write_bytes(files[1].read_bytes().replace(b"item", b"ite\xff"))

    with pytest.raises(ModelFileError, match=r"net\.onnx: .*(UTF-8|utf-8)"):
        open_dense(*files)
