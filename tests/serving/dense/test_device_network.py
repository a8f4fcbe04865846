"""The dense network on a device agrees with NumPy: to the last bit on the runner, up to rounding on a GPU."""

import gc
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kernels.errors import KernelError
from serving.dense.device_memory import network_bytes
from serving.dense.device_network import open_device_network
from serving.dense.files import open_device_dense
from serving.dense.network import NumpyNetwork, run_graph
from serving.dense.network_workspace import CLASS_SAMPLES, class_sizes
from serving.errors import ConfigError
from serving.model.graph import parse_graph, read_graph
from tests.serving.dense.given_rows import GivenRows, Served

FAMILIES = pytest.importorskip("benchmarks.families", reason="PyTorch is missing", exc_type=ImportError).FAMILIES
KEYS = {"top": "keys", "slot_num": 2, "nnz_per_slot": 1}
ROWS = {"embedding_vec_size": 1, "combiner": "sum"}
FLOAT32_ROUNDING_RATIO = 1e-5  # of a probability, the same bound as for the CPU engines


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return parse_graph({"layers": list(FAMILIES[request.param].LAYERS)}, f"{request.param}.json")


@pytest.fixture(scope="module")
def uploaded(device):
    """Copy the arguments of a network to the device, and wait until every stream may read them."""

    def upload(dense, embeddings):
        return device.xp.asarray(dense), [device.xp.asarray(array) for array in embeddings]

    return upload


@pytest.fixture
def computed(device, uploaded):
    """Run a network on host arrays with one call."""

    def compute(network, dense, embeddings):
        stream = device.stream()
        arguments = uploaded(dense, embeddings)
        with device.using(stream):
            return device.to_host(network(*arguments, stream))

    return compute


@pytest.fixture(scope="session")
def in_double():
    """Run a graph in float64 on NumPy; other tests check the layers in float64."""

    def run(graph, weights, dense, embeddings):
        tensors = dict(zip((e.top for e in graph.embeddings), embeddings, strict=True)) | {graph.dense_top: dense}
        doubles = [{name: array.astype(np.float64) for name, array in arrays.items()} for arrays in (weights, tensors)]
        with np.errstate(all="ignore"):
            return run_graph(graph, *doubles)[graph.output]

    return run


@pytest.mark.parametrize("samples", [1, 7])
def test_a_family_agrees_with_numpy(device, family, scaled_weights, draw_inputs, computed, samples):
    weights, inputs = scaled_weights(family), draw_inputs(family, samples)

    probabilities = computed(open_device_network(family, weights, device), *inputs)

    expected = NumpyNetwork(family, weights)(*inputs)
    assert (probabilities.shape, probabilities.dtype) == ((samples, 1), np.float32)
    if device.name == "runner":
        assert np.array_equal(probabilities, expected)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-4)  # for logits up to 90


@pytest.mark.parametrize(
    "name", ["dcn_train.json", "dlrm_kaggle_train.json", "simple_inference.json", "wdl_train.json"]
)
def test_a_genuine_graph_agrees_with_numpy(device, name, genuine_config, scaled_weights, draw_inputs, computed):
    graph = read_graph(genuine_config(name))
    weights, inputs = scaled_weights(graph), draw_inputs(graph, 3)

    probabilities = computed(open_device_network(graph, weights, device), *inputs)

    np.testing.assert_allclose(probabilities, NumpyNetwork(graph, weights)(*inputs), rtol=1e-4)


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_ten_bits_of_precision_keep_the_third_digit_of_a_probability(
    device, family, scaled_weights, draw_inputs, computed, in_double, precision
):
    weights, inputs = scaled_weights(family), draw_inputs(family, 64)

    probabilities = computed(open_device_network(family, weights, device, precision), *inputs)

    # The relative error of each factor is at most 2^-11. benchmarks.dense_precision measures 1.3e-3 for the answer.
    np.testing.assert_allclose(probabilities, in_double(family, weights, *inputs), atol=2e-3)


@pytest.fixture(scope="module")
def line():
    """Return the graph of ``x @ w + b``, which ends with the logits."""
    layers = [
        {"type": "Data", "label": {"label_dim": 1}, "dense": {"top": "dense", "dense_dim": 2}, "sparse": [KEYS]},
        {"type": "LocalizedSlotSparseEmbeddingHash", "bottom": "keys", "top": "rows", "sparse_embedding_hparam": ROWS},
        {"type": "Reshape", "bottom": "rows", "top": "flat", "leading_dim": 2},
        {"type": "Multiply", "name": "scaled", "bottom": "flat", "top": "scaled", "weight_dims": [2, 1]},
        {"type": "ReduceSum", "bottom": "scaled", "top": "sum", "axis": 1},
        {"type": "InnerProduct", "name": "fc", "bottom": "dense", "top": "fc", "fc_param": {"num_output": 1}},
        {"type": "Add", "bottom": ["fc", "sum"], "top": "logits"},
    ]
    return parse_graph({"layers": layers}, "line.json")


def line_weights(weight=1, scale=1):
    weights = {"fc.weight": [[weight], [1]], "fc.bias": [2**-14], "scaled.weight": [[scale], [1]]}
    return {name: np.array(values, np.float32) for name, values in weights.items()}


@pytest.mark.parametrize(
    ("use_graphs", "tensor_bytes"),
    [
        (False, 10 * 7 * 4),  # flat and scaled have two columns; sum, fc and logits have one
        (True, 10 * 7 * 4 + (1 + 8 + 10) * 7 * 4),  # classes of 1, 8 and 10
    ],
)
def test_the_memory_of_a_network_is_known_in_advance(line, use_graphs, tensor_bytes):
    assert network_bytes(line, 10, 3, use_graphs) == 5 * 4 + 3 * (2**25 + tensor_bytes)


def test_half_precision_rounds_factors_and_not_sums(device, line, computed):
    dense = np.array([[60000, 60000], [1, 2**-13], [1 + 2**-12, 0], [65519, 1]], np.float32)
    rows = np.zeros((4, 2, 1), np.float32)

    answers = computed(open_device_network(line, line_weights(), device, "fp16"), dense, [rows])

    # The first sum is too large for float16, the second too fine; 1 + 2^-12 and 65519 are factors.
    assert answers[:, 0].tolist() == [120000, 1 + 2**-13 + 2**-14, 1 + 2**-14, 65505]


def test_a_factor_beyond_half_precision_makes_only_its_own_sample_nan(device, line, computed):
    dense = np.array([[1, 2], [65520, 0], [0, -np.inf], [3, 4]], np.float32)
    rows = np.full((4, 2, 1), 70000, np.float32)  # not a factor of a matrix product

    answers = computed(open_device_network(line, line_weights(scale=70000), device, "fp16"), dense, [rows])

    assert np.isfinite(answers[:, 0]).tolist() == [True, False, False, True]
    assert np.isnan(answers[1:3]).all()


def test_overflow_gives_the_same_infinities_as_on_the_cpu(device, line, computed):
    dense = np.array([[3e38, 3e38], [1, 1]], np.float32)
    rows = np.zeros((2, 2, 1), np.float32)

    answers = computed(open_device_network(line, line_weights(), device), dense, [rows])

    assert answers[0] == np.inf
    assert np.array_equal(answers, NumpyNetwork(line, line_weights())(dense, [rows]))


def test_a_weight_beyond_half_precision_is_refused_by_name(device, line):
    for weight in (65520, -np.inf, np.nan):
        with pytest.raises(ConfigError, match=r"line\.json: fc\.weight: a weight of magnitude .* for half precision"):
            open_device_network(line, line_weights(weight), device, "fp16")


@pytest.mark.parametrize("use_graphs", [True, False])
@pytest.mark.parametrize("in_one", [True, False])
def test_a_workspace_answers_batches_of_every_size(device, graph, weights, draw_inputs, use_graphs, in_one):
    network = open_device_network(graph, weights, device, use_graphs=use_graphs)
    served = Served(network, 20, in_one)

    for seed, samples in enumerate([3, 3, 8, 1, 20, 9, 2, 20, 1]):
        inputs = draw_inputs(graph, samples, seed)
        probabilities = served.answer(*inputs)
        assert (probabilities.shape, probabilities.dtype) == ((samples, 1), np.float32)
        np.testing.assert_allclose(probabilities, NumpyNetwork(graph, weights)(*inputs), rtol=FLOAT32_ROUNDING_RATIO)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_a_graph_gives_the_same_as_its_first_batch(device, family, scaled_weights, draw_inputs, precision, caplog):
    network = open_device_network(family, scaled_weights(family), device, precision)
    served, inputs = Served(network, 5), draw_inputs(family, 5)

    first, captured = (served.answer(*inputs) for _ in range(2))

    assert np.array_equal(first, captured)
    assert not caplog.records


def test_batches_run_without_graphs_if_nothing_can_be_captured(
    device, graph, weights, draw_inputs, monkeypatch, caplog
):
    def refuse(stream, function):
        raise KernelError("this work cannot be captured as a graph: out of memory")

    served = Served(open_device_network(graph, weights, device), 20)
    served.answer(*draw_inputs(graph, 8))
    monkeypatch.setattr(device, "capture", refuse)

    for samples in (3, 20, 8, 17, 1):
        inputs = draw_inputs(graph, samples)
        expected = NumpyNetwork(graph, weights)(*inputs)
        np.testing.assert_allclose(served.answer(*inputs), expected, rtol=FLOAT32_ROUNDING_RATIO)
    assert [record.message for record in caplog.records] == [
        "graph.json: no more CUDA graphs for this worker buffer: this work cannot be captured as a graph: out of memory"
    ]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_capture_is_tried_once_more(device, graph, weights, draw_inputs, monkeypatch, caplog, failing):
    tried, capture = [], device.capture

    def refuse_once(stream, function):
        tried.append(function)
        if len(tried) == failing:
            raise KernelError("this work cannot be captured as a graph: operation failed due to a previous error")
        return capture(stream, function)

    monkeypatch.setattr(device, "capture", refuse_once)
    served, inputs = Served(open_device_network(graph, weights, device), 20), draw_inputs(graph, 20)
    answers = [served.answer(*inputs) for _ in range(4)]

    assert len(tried) == failing + 2  # the lookup's graph and the network's
    assert all(np.array_equal(answer, answers[0]) for answer in answers)
    assert not caplog.records


def test_rows_left_over_from_a_larger_batch_do_not_affect_the_answer(device, graph, weights, draw_inputs):
    served = Served(open_device_network(graph, weights, device), 8)
    dense, embeddings = draw_inputs(graph, 2)
    clean = served.answer(dense, embeddings)

    served.answer(np.full((8, 2), np.nan, np.float32), [np.full((8, 4, 3), np.nan, np.float32)])

    assert np.array_equal(served.answer(dense, embeddings), clean)


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("requests", [1, 3])
def test_the_network_runs_again_after_missing_rows_arrive(device, graph, weights, draw_inputs, in_one, requests):
    served = Served(open_device_network(graph, weights, device), 8, in_one)
    dense, (rows,) = draw_inputs(graph, 6)

    for _ in range(requests):
        served.rows.load(dense, [np.zeros_like(rows)])
        served.work.begin(6)
        served.rows.stream.synchronize()
        served.rows.load(dense, [rows])
        served.rows.launch()
        served.work.again()
        answer = served.work.answer()

        np.testing.assert_allclose(answer, NumpyNetwork(graph, weights)(dense, [rows]), rtol=FLOAT32_ROUNDING_RATIO)


@pytest.mark.parametrize("in_one", [True, False])
def test_a_captured_batch_is_its_graphs_and_nothing_else(device, graph, weights, draw_inputs, monkeypatch, in_one):
    served, inputs = Served(open_device_network(graph, weights, device), 8, in_one), draw_inputs(graph, 8)
    expected = served.answer(*inputs)
    served.rows.load(*inputs)
    for name in ("upload", "download", "product", "empty"):
        monkeypatch.setattr(device, name, lambda *_, **__: pytest.fail("this belongs to the graph"))

    served.work.begin(8)

    assert np.array_equal(served.work.answer(), expected)


def test_a_dropped_workspace_frees_its_lookup_at_once(device, graph, weights, draw_inputs):
    served = Served(open_device_network(graph, weights, device), 8)
    for _ in range(2):
        served.answer(*draw_inputs(graph, 8))
    lookup = weakref.ref(served.rows)

    gc.disable()
    try:
        del served
        assert lookup() is None  # at once, because a larger workspace needs the memory
    finally:
        gc.enable()


def test_a_call_can_be_captured_so_it_never_waits(device, family, scaled_weights, draw_inputs, uploaded):
    network, stream = open_device_network(family, scaled_weights(family), device), device.stream()
    arguments = uploaded(*draw_inputs(family, 3))
    with device.using(stream):
        alone = device.to_host(network(*arguments, stream))

    captured = device.capture(stream, lambda: network(*arguments, stream))
    captured.launch(stream)

    with device.using(stream):
        assert np.array_equal(device.to_host(captured.result), alone)


def test_a_call_uploads_nothing(device, family, scaled_weights, draw_inputs, uploaded, monkeypatch):
    network, stream = open_device_network(family, scaled_weights(family), device, "fp16"), device.stream()
    arguments = uploaded(*draw_inputs(family, 3))
    monkeypatch.setattr(device, "upload", lambda *_: pytest.fail("weights and constants are on the device"))
    monkeypatch.setattr(device.xp, "asarray", lambda *_: pytest.fail("weights and constants are on the device"))

    network(*arguments, stream)

    stream.synchronize()


def test_threads_with_their_own_workspaces_get_the_answers_of_a_single_thread(device, graph, weights, draw_inputs):
    network = open_device_network(graph, weights, device)
    inputs = [draw_inputs(graph, 1 + seed % 9, seed) for seed in range(24)]

    def answer_all(first):
        served = Served(network, 9)
        return {seed: served.answer(*inputs[seed]) for seed in range(first, len(inputs), 3)}

    with ThreadPoolExecutor(3) as pool:
        answers = {seed: answer for part in pool.map(answer_all, range(3)) for seed, answer in part.items()}

    for seed, answer in answers.items():
        expected = NumpyNetwork(graph, weights)(*inputs[seed])
        np.testing.assert_allclose(answer, expected, rtol=FLOAT32_ROUNDING_RATIO)


@pytest.fixture(scope="module")
def mixing_line(line):
    """Return a graph whose layers look at the whole batch."""
    layers = [
        {"type": "Data", "label": {"label_dim": 1}, "dense": {"top": "dense", "dense_dim": 2}, "sparse": [KEYS]},
        {"type": "LocalizedSlotSparseEmbeddingHash", "bottom": "keys", "top": "rows", "sparse_embedding_hparam": ROWS},
        {"type": "InnerProduct", "name": "fc", "bottom": "dense", "top": "fc", "fc_param": {"num_output": 4}},
        {"type": "PReLU_Dice", "bottom": "fc", "top": "dice", "prelu_dice_param": {"alpha": 0.2, "eps": 1e-8}},
        {"type": "ReduceSum", "bottom": "dice", "top": "sum", "axis": 1},
        {"type": "Sigmoid", "bottom": "sum", "top": "clicks"},
    ]
    return parse_graph({"layers": layers}, "mixing.json")


def test_batches_are_not_padded_if_samples_mix(device, mixing_line, scaled_weights, draw_inputs):
    weights = scaled_weights(mixing_line)
    served = Served(open_device_network(mixing_line, weights, device), 64)

    assert mixing_line.mixes_samples
    for samples in (3, 3, 5):
        inputs = draw_inputs(mixing_line, samples)
        expected = NumpyNetwork(mixing_line, weights)(*inputs)
        np.testing.assert_allclose(served.answer(*inputs), expected, rtol=FLOAT32_ROUNDING_RATIO)


def test_no_samples_give_no_probabilities(device, graph, weights, draw_inputs, computed):
    network = open_device_network(graph, weights, device)

    assert computed(network, *draw_inputs(graph, 0)).shape == (0, 1)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        pytest.param(1, (1,), id="one"),
        pytest.param(8, (1, 8), id="a-class"),
        pytest.param(1000, (1, 8, 64, 128, 256, 512, 1000), id="between"),
        pytest.param(8192, CLASS_SAMPLES, id="the-last"),
        pytest.param(100_000, CLASS_SAMPLES, id="beyond-graphs"),
    ],
)
def test_size_classes_end_with_the_largest_batch(most, sizes):
    assert class_sizes(most) == sizes


@pytest.mark.parametrize("samples", [0, 5])
def test_a_batch_of_another_size_is_refused(device, graph, weights, samples):
    served = Served(open_device_network(graph, weights, device), 4)

    with pytest.raises(ValueError, match=f"expected 1 to 4 samples, got {samples}"):
        served.work.begin(samples)


def test_device_arrays_of_other_shapes_are_refused(device, graph, weights):
    network, stream = open_device_network(graph, weights, device), device.stream()
    dense, rows = device.zeros((3, 2), np.float32), device.zeros((3, 4, 3), np.float32)

    for arguments, message in [
        ((dense, []), "expected 1 embedding tensors, got 0"),
        ((dense, [rows[:2]]), "embedding1: expected float32 [3, 4, 3], got float32 [2, 4, 3]"),
        ((device.zeros((3, 2), np.float64), [rows]), "dense: expected float32 [3, 2], got float64 [3, 2]"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            network(*arguments, stream)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"buffers": ()}, "expected 1 embedding tensors, got 0", id="tables"),
        pytest.param({"buffers": ((4, 4, 2),)}, "expected float32 [4, 4, 3], got float32 [4, 4, 2]", id="D"),
        pytest.param({"dense": (4, 3)}, "dense: expected float32 [4, 2], got float32 [4, 3]", id="F"),
    ],
)
def test_a_lookup_of_another_model_is_refused(device, graph, weights, changes, message):
    rows = GivenRows(device, graph, 4)
    for name, shapes in changes.items():
        arrays = [device.zeros(shape, np.float32) for shape in ([shapes] if name == "dense" else shapes)]
        setattr(rows, name, arrays[0] if name == "dense" else tuple(arrays))

    network = open_device_network(graph, weights, device)
    with pytest.raises(ValueError, match=re.escape(message)):
        network.workspace(rows, 4)
    with pytest.raises(ValueError, match="max_samples: expected at least 1, got 0"):
        network.workspace(rows, 0)


def test_fewer_samples_than_a_graph_picks_are_refused(device, scaled_weights):
    layers = [
        {"type": "Data", "label": {"label_dim": 1}, "dense": {"top": "dense", "dense_dim": 2}, "sparse": [KEYS]},
        {"type": "LocalizedSlotSparseEmbeddingHash", "bottom": "keys", "top": "rows", "sparse_embedding_hparam": ROWS},
        {"type": "Gather", "bottom": "dense", "top": "picked", "indices": [2, 0]},
        {"type": "ReduceSum", "bottom": "picked", "top": "sum", "axis": 0},
        {"type": "Add", "bottom": ["dense", "dense"], "top": "both"},
        {"type": "InnerProduct", "name": "fc", "bottom": "both", "top": "fc", "fc_param": {"num_output": 1}},
    ]
    graph = parse_graph({"layers": layers}, "gather.json")
    served = Served(open_device_network(graph, scaled_weights(graph), device), 4)

    with pytest.raises(ValueError, match="expected at least 3 samples, because the graph picks rows, got 2"):
        served.work.begin(2)


def test_an_unknown_precision_is_refused(device, graph, weights):
    with pytest.raises(ValueError, match="expected precision fp32, tf32 or fp16, got 'bf16'"):
        open_device_network(graph, weights, device, "bf16")


def test_weights_of_another_graph_are_refused(device, graph, weights):
    with pytest.raises(ValueError, match=r"fc1\.bias: missing"):
        open_device_network(graph, {key: w for key, w in weights.items() if key != "fc1.bias"}, device)


def test_a_users_own_onnx_network_is_refused(device, tmp_path):
    with pytest.raises(ConfigError, match="an ONNX network runs on the CPU"):
        open_device_dense(tmp_path / "graph.json", tmp_path / "own.onnx", device)
