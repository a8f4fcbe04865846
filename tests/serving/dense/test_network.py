import gc
import logging
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving.dense.network import NumpyNetwork, open_network, run_graph
from serving.dense.onnx import OnnxNetwork, build_onnx, network_digest
from serving.errors import MissingExtraError, ModelFileError
from serving.model.graph import parse_graph

ENGINES = ["numpy", "onnx"]


@pytest.fixture(params=ENGINES)
def engine(request):
    if request.param == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("ndonnx")
    return request.param


@pytest.fixture
def onnx_file(graph, weights, tmp_path):
    pytest.importorskip("ndonnx")
    (tmp_path / "dense.onnx").write_bytes(build_onnx(graph, weights))
    return tmp_path / "dense.onnx"


def test_building_a_model_leaves_nothing_for_the_garbage_collector(graph, weights):
    pytest.importorskip("ndonnx")
    build_onnx(graph, weights)  # imports
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        build_onnx(graph, weights)
        assert len(gc.get_objects()) < before + 100
    finally:
        gc.enable()


def dcn_in_pytorch(weights, dense, embedding):
    """The small DCN written in PyTorch, in float64; returns probabilities."""
    torch = pytest.importorskip("torch")
    w = {key: torch.tensor(array, dtype=torch.float64) for key, array in weights.items()}
    x0 = torch.tensor(np.concatenate([embedding.reshape(len(dense), -1), dense], axis=1), dtype=torch.float64)
    x = x0
    for level in range(3):
        x = x0 * (x @ w[f"multicross1.weight{level}"])[:, None] + x + w[f"multicross1.bias{level}"]
    deep = torch.relu(torch.addmm(w["fc1.bias"], x0, w["fc1.weight"]))
    return torch.sigmoid(torch.addmm(w["fc2.bias"], torch.cat([deep, x], dim=1), w["fc2.weight"])).numpy()


@pytest.mark.parametrize("samples", [1, 2, 7, 64])
def test_dcn_agrees_with_pytorch(graph, weights, draw_inputs, engine, samples):
    dense, embeddings = draw_inputs(graph, samples)

    probabilities = open_network(graph, weights, engine)(dense, embeddings)

    assert (probabilities.shape, probabilities.dtype) == ((samples, 1), np.float32)
    assert probabilities.flags.c_contiguous
    np.testing.assert_allclose(probabilities, dcn_in_pytorch(weights, dense, embeddings[0]), rtol=1e-5)


def test_small_probabilities_are_as_exact_as_large_probabilities(graph, weights, draw_inputs, engine):
    dense, embeddings = draw_inputs(graph, 64)
    rare = {**weights, "fc2.bias": np.array([-16], np.float32)}  # ONNX Runtime's own Sigmoid is off by 7 % here

    probabilities = open_network(graph, rare, engine)(dense, embeddings)

    expected = dcn_in_pytorch(rare, dense, embeddings[0])
    assert expected.min() < 1e-7
    np.testing.assert_allclose(probabilities, expected, rtol=2e-5)


def test_no_samples_give_no_probabilities(graph, weights, draw_inputs, engine):
    probabilities = open_network(graph, weights, engine)(*draw_inputs(graph, 0))

    assert (probabilities.shape, probabilities.dtype) == ((0, 1), np.float32)


def test_a_call_does_not_change_its_arguments_or_the_weights(graph, weights, draw_inputs, engine):
    dense, embeddings = draw_inputs(graph, 5)
    arrays = [dense, *embeddings, *weights.values()]
    before = [array.copy() for array in arrays]

    first = open_network(graph, weights, engine)(dense, embeddings)
    first[:] = 9  # a caller may write into the answer

    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, before, strict=True))


def test_many_threads_get_the_answers_of_a_single_thread(graph, weights, draw_inputs, engine):
    network = open_network(graph, weights, engine, threads=2)
    inputs = [draw_inputs(graph, 1 + seed % 9, seed) for seed in range(40)]
    alone = [network(*arguments) for arguments in inputs]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda arguments: network(*arguments), inputs))

    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_tables_without_dense_features_and_products_of_three_dimensions(engine, draw_weights, draw_inputs):
    graph = parse_graph(
        {
            "layers": [
                {
                    "type": "Data",
                    "label": {"label_dim": 2},
                    "dense": {"top": "dense", "dense_dim": 0},
                    "sparse": [{"top": f"keys{t}", "slot_num": 3, "nnz_per_slot": 1} for t in range(2)],
                },
                *(
                    {
                        "type": "LocalizedSlotSparseEmbeddingHash",
                        "bottom": f"keys{t}",
                        "top": f"table{t}",
                        "sparse_embedding_hparam": {"embedding_vec_size": 4, "combiner": "sum"},
                    }
                    for t in range(2)
                ),
                {"type": "Add", "bottom": ["table0", "table1"], "top": "sum"},
                {"type": "InnerProduct", "bottom": "sum", "top": "mix", "fc_param": {"num_output": 5}},
                {"type": "ReLU", "bottom": "mix", "top": "mix_relu"},
                {"type": "Concat", "axis": 2, "bottom": ["mix_relu", "table1"], "top": "wide"},
                {"type": "Reshape", "bottom": "wide", "top": "flat", "leading_dim": 27},
                {"type": "Concat", "bottom": ["flat", "dense"], "top": "all"},
                {"type": "InnerProduct", "bottom": "all", "top": "logits", "fc_param": {"num_output": 2}},
                {"type": "Sigmoid", "bottom": "logits", "top": "clicks"},
            ]
        },
        "two_tables.json",
    )
    weights = draw_weights(graph)
    dense, (one, two) = draw_inputs(graph, 6)

    probabilities = open_network(graph, weights, engine)(dense, [one, two])

    w = {key: array.astype(np.float64) for key, array in weights.items()}
    mixed = np.maximum(np.einsum("bsd,de->bse", one.astype(np.float64) + two, w["mix.weight"]) + w["mix.bias"], 0)
    flat = np.concatenate([mixed, two], axis=2).reshape(6, 27)
    np.testing.assert_allclose(
        probabilities, 1 / (1 + np.exp(-(flat @ w["logits.weight"] + w["logits.bias"]))), rtol=1e-5
    )


def test_run_graph_returns_every_tensor_and_accepts_overrides(graph, weights, draw_inputs):
    dense, embeddings = draw_inputs(graph, 3)
    inputs = {"dense": dense, "embedding1": embeddings[0]}

    plain = run_graph(graph, weights, inputs)
    doubled = run_graph(graph, weights, inputs, {"Dropout": lambda params, bottoms, own: [2 * bottoms[0]]})

    assert plain.keys() == graph.shapes.keys()
    assert all(array.shape == (3, *graph.shapes[name][1:]) for name, array in plain.items())
    assert np.array_equal(doubled["dropout1"], 2 * plain["relu1"])
    assert inputs.keys() == {"dense", "embedding1"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda d, e: (d, []), "expected 1 embedding tensors, got 0", id="no-embedding"),
        pytest.param(lambda d, e: (d, e * 2), "expected 1 embedding tensors, got 2", id="two-embeddings"),
        pytest.param(lambda d, e: (d[:, :1], e), "dense: expected float32 [3, 2], got float32 [3, 1]", id="dense"),
        pytest.param(lambda d, e: (d[0], e), "dense: expected float32 [2, 2], got float32 [2]", id="dense-flat"),
        pytest.param(lambda d, e: (d.astype(float), e), "dense: expected float32 [3, 2], got float64", id="float64"),
        pytest.param(
            lambda d, e: (d, [e[0][:2]]), "embedding1: expected float32 [3, 4, 3], got float32 [2, 4, 3]", id="samples"
        ),
        pytest.param(
            lambda d, e: (d, [e[0].reshape(3, 12)]), "embedding1: expected float32 [3, 4, 3], got", id="embedding-flat"
        ),
    ],
)
def test_arguments_of_other_shapes_are_refused(graph, weights, draw_inputs, engine, edit, message):
    network = open_network(graph, weights, engine)

    with pytest.raises(ValueError, match=re.escape(message)):
        network(*edit(*draw_inputs(graph, 3)))


def test_weights_of_another_graph_are_refused(graph, weights, engine):
    with pytest.raises(ValueError, match=r"fc1\.bias: missing"):
        open_network(graph, {key: w for key, w in weights.items() if key != "fc1.bias"}, engine)


def test_an_unknown_engine_is_refused(graph, weights):
    with pytest.raises(ValueError, match="expected engine auto, numpy, onnx or int8, got 'torch'"):
        open_network(graph, weights, "torch")


def test_zero_threads_are_refused(graph, onnx_file):
    with pytest.raises(ValueError, match="at least 1 thread, got 0"):
        OnnxNetwork(graph, onnx_file.read_bytes(), threads=0)


def test_auto_is_onnx_runtime_if_it_is_installed(graph, weights):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("ndonnx")

    assert open_network(graph, weights).engine == "onnx"


@pytest.mark.parametrize("missing", ["onnxruntime", "ndonnx", "spox"])
def test_auto_is_numpy_if_a_package_is_missing(graph, weights, monkeypatch, missing):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("ndonnx")
    monkeypatch.delitem(sys.modules, "serving.dense.tracing", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)

    assert isinstance(open_network(graph, weights), NumpyNetwork)
    with pytest.raises(MissingExtraError, match=rf"{missing}.*pip install 'hotrow\[onnx\]'"):
        open_network(graph, weights, "onnx")


def test_a_stored_model_does_not_need_the_packages_that_build_a_model(
    graph, weights, draw_inputs, onnx_file, monkeypatch
):
    for package in ("ndonnx", "spox", "onnx"):
        monkeypatch.setitem(sys.modules, package, None)

    network = open_network(graph, weights, "onnx", onnx_file)

    dense, embeddings = draw_inputs(graph, 4)
    np.testing.assert_allclose(network(dense, embeddings), NumpyNetwork(graph, weights)(dense, embeddings), rtol=1e-5)


def test_numpy_runs_the_network_without_onnx_runtime(graph, weights, onnx_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    assert open_network(graph, weights, "auto", onnx_file).engine == "numpy"
    with pytest.raises(MissingExtraError, match="onnxruntime"):
        open_network(graph, weights, "onnx", onnx_file)


def test_a_stale_model_is_reported_and_built_again(graph, weights, draw_weights, draw_inputs, onnx_file, caplog):
    newer = draw_weights(graph, seed=12)

    with caplog.at_level(logging.WARNING):
        network = open_network(graph, newer, "onnx", onnx_file)

    assert network.digest == network_digest(graph, newer)
    assert (
        f"hotrow_digest: expected {network_digest(graph, newer)}, found {network_digest(graph, weights)}" in caplog.text
    )
    dense, embeddings = draw_inputs(graph, 4)
    np.testing.assert_allclose(network(dense, embeddings), NumpyNetwork(graph, newer)(dense, embeddings), rtol=1e-5)


def test_a_stale_model_is_not_used_even_if_no_model_can_be_built(graph, draw_weights, onnx_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "ndonnx", None)

    assert open_network(graph, draw_weights(graph, seed=12), "auto", onnx_file).engine == "numpy"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "ONNX Runtime cannot open it", id="empty"),
        pytest.param(b"not a model", "ONNX Runtime cannot open it", id="text"),
        pytest.param(None, "cannot be read: No such file", id="missing"),
    ],
)
def test_a_file_that_is_not_a_model_is_refused(graph, weights, onnx_file, content, message):
    onnx_file.unlink()
    if content is not None:
        onnx_file.write_bytes(content)

    with pytest.raises(ModelFileError, match=re.escape(f"dense.onnx: {message}")):
        OnnxNetwork.from_file(graph, weights, onnx_file)


def test_a_truncated_model_is_refused(graph, weights, onnx_file):
    onnx_file.write_bytes(onnx_file.read_bytes()[:-100])

    with pytest.raises(ModelFileError):
        OnnxNetwork.from_file(graph, weights, onnx_file)


def test_the_digest_differs_between_graphs_and_between_weights(document, graph, weights):
    changed = {**weights, "fc1.bias": weights["fc1.bias"] + 1}
    other = parse_graph({**document, "layers": [*document["layers"][:-1], {**document["layers"][-1]}]}, "copy.json")
    swapped = parse_graph(
        {"layers": [{**x, "bottom": x["bottom"][::-1]} if x["name"] == "concat2" else x for x in document["layers"]]},
        "swapped.json",
    )

    assert network_digest(other, weights) == network_digest(graph, weights)
    assert len({network_digest(graph, weights), network_digest(graph, changed), network_digest(swapped, weights)}) == 3


def test_the_built_model_has_products_that_quantisation_finds_and_no_constant_sums(graph, weights, onnx_file):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(onnx_file)
    operators = [node.op_type for node in model.graph.node]

    assert operators.count("Gemm") == 3  # fc1, fc2, and one for all cross layers
    assert not {"If", "MatMul", "ReduceSum", "Unsqueeze"} & set(operators)
    assert [entry.name for entry in model.graph.input] == ["dense", "embedding1"]
    assert [entry.name for entry in model.graph.output] == [graph.output]


def test_serving_imports_no_heavy_package_until_it_is_needed():
    program = (
        "import sys, serving.dense.network, serving.dense.onnx, serving.model.graph, serving.model.sparse_file\n"
        "print([m for m in ('torch', 'ndonnx', 'spox', 'onnx', 'onnxruntime', 'cupy', 'pydantic') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "[]"
