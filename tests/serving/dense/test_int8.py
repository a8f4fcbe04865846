"""The engine int8 on networks written here with onnx.helper, and on the small DCN."""

import logging
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.dense.calibration import Calibration
from serving.dense.network import open_network
from serving.dense.onnx import OnnxNetwork, build_onnx
from serving.errors import ConfigError, MissingExtraError
from serving.model.graph import parse_graph

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from serving.dense import quantizing  # noqa: E402  needs both packages
from serving.dense.int8 import open_int8  # noqa: E402

FEATURES, SLOTS, DIM = 6, 2, 4
INPUTS = {
    "layers": [
        {
            "type": "Data",
            "label": {"label_dim": 1},
            "dense": {"top": "dense", "dense_dim": FEATURES},
            "sparse": [{"top": "keys", "slot_num": SLOTS, "nnz_per_slot": 1}],
        },
        {
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": "keys",
            "top": "user",
            "sparse_embedding_hparam": {"embedding_vec_size": DIM, "combiner": "sum"},
        },
    ]
}
GRAPH = parse_graph(INPUTS, "graph.json", inputs_only=True)


def node(kind, inputs, outputs, **attributes):
    return onnx.helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def network_of(nodes, arrays):
    """Return the ONNX model of ``nodes``, from dense and user to clicks."""
    shapes = {"dense": ["B", FEATURES], "user": ["B", SLOTS, DIM], "clicks": ["B", 1]}
    values = {name: onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()}
    constants = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = onnx.helper.make_graph(nodes, "own", [values["dense"], values["user"]], [values["clicks"]], constants)
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])


def draw(samples, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(samples, FEATURES), (samples, SLOTS, DIM)]
    dense, user = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return dense, [user]


def open_both(model, samples=None, tolerance=0.01):
    """Return the float32 network and the int8 network."""
    content = model if isinstance(model, bytes) else model.SerializeToString()
    exact = OnnxNetwork(GRAPH, content)
    calibration = Calibration(*(samples or draw(256)), tolerance)
    return exact, open_int8(GRAPH, exact, content, calibration, 1, "net.onnx")


RNG = np.random.default_rng(3)
W1, W2, B1 = (RNG.normal(0, 0.3, shape).astype(np.float32) for shape in [(FEATURES, 16), (16, 1), (16,)])
W_USER = RNG.normal(0, 0.3, (DIM, 16)).astype(np.float32)
ENDING = [node("Relu", "a", "h"), node("MatMul", "h w2", "logit"), node("Sigmoid", "logit", "clicks")]
ARRAYS = {"w1": W1, "b1": B1, "w2": W2, "w1_t": W1.T, "w_user": W_USER, "slots": np.array([1])}
TWO_LAYERS = network_of([node("Gemm", "dense w1 b1", "a"), *ENDING], ARRAYS)

SHAPES = {
    "a Gemm with a bias": ([node("Gemm", "dense w1 b1", "a")], 2),
    "a Gemm of PyTorch, whose weight is transposed": ([node("Gemm", "dense w1_t b1", "a", transB=1)], 2),
    "a Gemm without a bias": ([node("Gemm", "dense w1", "a")], 2),
    "a MatMul and an Add": ([node("MatMul", "dense w1", "p"), node("Add", "p b1", "a")], 2),
    "two products of one input": (
        [node("MatMul", "dense w1", "p"), node("Gemm", "dense w1 b1", "q"), node("Add", "p q", "a")],
        3,
    ),
    "a product of three dimensions": (
        [
            node("MatMul", "user w_user", "u"),
            node("ReduceMean", "u slots", "s", keepdims=0),
            node("Gemm", "dense w1 b1", "p"),
            node("Add", "p s", "a"),
        ],
        3,
    ),
}


@pytest.mark.parametrize(("nodes", "products"), SHAPES.values(), ids=SHAPES.keys())
def test_every_form_of_a_product_with_a_weight_runs_on_integers_and_is_nearly_exact(nodes, products):
    exact, network = open_both(network_of([*nodes, *ENDING], ARRAYS), tolerance=0.05)

    samples = draw(200, seed=1)
    errors = np.abs(network(*samples) - exact(*samples))
    assert (network.engine, exact.engine, exact.quantization) == ("int8", "onnx", None)
    assert (network.quantization.quantized, network.quantization.products) == (products, products)
    assert 0 < errors.max() < 0.05


def test_the_record_reports_the_measurement(caplog):
    samples = draw(256)
    with caplog.at_level(logging.INFO, "serving.dense.int8"):
        exact, network = open_both(TWO_LAYERS, samples)

    errors = np.abs(network(*samples) - exact(*samples))
    record = network.quantization
    assert (record.max_error, record.mean_error, record.samples) == (errors.max(), errors.mean(), 256)
    assert f"net.onnx: {record}" in caplog.text
    assert "int8 in 2 of 2 products; on 256 samples a probability is off by 0.0" in str(record)


def quantized_model(model):
    folded = quantizing.fold_constants(model.SerializeToString())
    products = quantizing.weight_products(folded)
    dense, (user,) = draw(64)
    scales = quantizing.column_scales(folded, products, {"dense": dense, "user": user})
    return onnx.load_model_from_string(quantizing.quantize(folded, products, scales))


def test_integer_products_replace_all_float_products():
    model = quantized_model(TWO_LAYERS)

    kinds = Counter(one.op_type for one in model.graph.node)
    assert (kinds["MatMulInteger"], kinds["DynamicQuantizeLinear"]) == (2, 2)
    assert not kinds.keys() & {"MatMul", "Gemm"}
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(("saturates", "largest"), [(False, 127), (True, 63)])
def test_weights_have_seven_bits_if_sums_of_eight_bit_products_are_clipped(monkeypatch, saturates, largest):
    monkeypatch.setattr(quantizing, "products_saturate", lambda: saturates)

    model = quantized_model(TWO_LAYERS)

    weights = [onnx.numpy_helper.to_array(one) for one in model.graph.initializer if one.name.endswith("/weight")]
    assert [weight.dtype for weight in weights] == [np.int8, np.int8]
    assert all((np.abs(weight.astype(int)).max(axis=0) == largest).all() for weight in weights)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    magnitudes=st.lists(st.floats(-2, 3), min_size=FEATURES, max_size=FEATURES),
    samples=st.integers(2, 40),
)
def test_a_product_is_off_by_no_more_than_half_steps(seed, magnitudes, samples):
    """The bound is half a step of each factor times the other factor; the steps are of the balanced columns."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(0, 1, (FEATURES, 1)).astype(np.float32)
    dense = (rng.normal(0, 1, (samples, FEATURES)) * 10.0 ** np.array(magnitudes)).astype(np.float32)
    folded = quantizing.fold_constants(
        network_of([node("MatMul", "dense w", "clicks")], {"w": weight}).SerializeToString()
    )
    products = quantizing.weight_products(folded)
    feeds = {"dense": dense, "user": np.zeros((samples, SLOTS, DIM), np.float32)}
    scales = quantizing.column_scales(folded, products, feeds)
    network = OnnxNetwork(GRAPH, quantizing.quantize(folded, products, scales))

    answer = network(dense, [feeds["user"]])

    left, right = dense.astype(np.float64) / scales["dense"], weight * scales["dense"].astype(np.float64)[:, None]
    left_step = (max(left.max(), 0) - min(left.min(), 0)) / 255
    right_step = np.abs(right).max() / (63 if quantizing.products_saturate() else 127)
    # The zero of the left side is rounded to a step too, so the ends of its range are off by a whole step.
    bound = left_step * np.abs(right).sum() + right_step / 2 * (np.abs(left).sum(axis=1) + FEATURES * left_step)
    exact = dense.astype(np.float64) @ weight
    assert (np.abs(answer - exact)[:, 0] <= bound * 1.001 + 1e-6 * np.abs(exact).max()).all()


def test_columns_of_very_different_sizes_are_balanced():
    """A column is a hundred times as large as the others, like counts next to embeddings: 256 steps are too few."""
    sizes = np.array([100, 1, 1, 1, 1, 1], np.float32)
    model = network_of([node("MatMul", "dense w1", "a"), *ENDING], {**ARRAYS, "w1": W1 / sizes[:, None]})
    dense, tables = draw(256)

    _, network = open_both(model, (dense * sizes, tables), tolerance=0.02)

    assert network.quantization.quantized == 2


@pytest.mark.parametrize("first", [0, 1], ids=["seen", "not seen"])
def test_every_second_sample_is_left_out_of_the_balancing(first, monkeypatch):
    dense, tables = draw(10)
    dense[:, 0] = 0
    dense[first::2, 0] = 100
    seen = []
    monkeypatch.setattr(
        quantizing, "column_scales", lambda *given, own=quantizing.column_scales: seen.append(given[2]) or own(*given)
    )

    _, network = open_both(TWO_LAYERS, (dense, tables), tolerance=1)

    assert seen[0]["dense"][:, 0].tolist() == [0 if first else 100] * 5
    assert network.quantization.samples == 10


FAR = {
    "a feature of a thousand": (0, 1e3),
    "a feature of minus a thousand": (0, -1e3),
    "a feature that the calibration leaves at 0": (1, 0.5),
    "a row of a thousand": ("user", 1e3),
    "a row of minus a thousand": ("user", -1e3),
    "a row that is infinite": ("user", np.inf),
    "a row that is NaN": ("user", np.nan),
}


@pytest.mark.parametrize(("column", "value"), FAR.values(), ids=FAR.keys())
def test_a_batch_unlike_the_calibration_is_answered_in_float32(column, value, caplog):
    """In integers one such sample would reduce the precision of the others, and a NaN would get an ordinary answer."""
    nodes, _ = SHAPES["a product of three dimensions"]
    dense, tables = draw(256)
    dense[:, 1] = 0
    exact, network = open_both(network_of([*nodes, *ENDING], ARRAYS), (dense, tables), tolerance=0.05)
    dense, tables = draw(8, seed=1)
    dense[:, 1] = 0
    assert not np.array_equal(network(dense, tables), exact(dense, tables))
    assert "float32" not in caplog.text

    if column == "user":
        tables[0][3, 1, 2] = value
    else:
        dense[3, column] = value

    for _ in range(2):
        assert np.array_equal(network(dense, tables), exact(dense, tables), equal_nan=True)
    assert (
        caplog.text.count("net.onnx: a batch has values far from the calibration's; such batches run in float32") == 1
    )


def in_outliers(nodes, **arrays):
    """Return a model and samples; one sample is ten thousand times as large as the others in every column."""
    dense, tables = draw(64)
    dense[0] = 1e4
    return network_of(nodes, {**ARRAYS, **arrays}), (dense, tables)


def test_a_network_beyond_the_tolerance_is_refused_with_its_error():
    model, samples = in_outliers([node("MatMul", "dense w", "logit"), ENDING[-1]], w=np.ones((FEATURES, 1), np.float32))

    with pytest.raises(ConfigError) as caught:
        open_both(model, samples)

    assert "net.onnx: engine int8: int8 in 1 of 1 products; on 64 samples a probability is off by 0." in str(
        caught.value
    )
    assert str(caught.value).endswith("on average; the tolerance is 0.01")


def test_a_product_with_too_large_an_error_stays_in_float32():
    nodes = [
        node("MatMul", "dense w", "outliers"),
        node("ReduceMean", "user axes", "mean", keepdims=0),
        node("MatMul", "mean w_mean", "others"),
        node("Add", "outliers others", "logit"),
        ENDING[-1],
    ]
    arrays = {
        "w": np.ones((FEATURES, 1), np.float32),
        "axes": np.array([1]),
        "w_mean": np.full((DIM, 1), 0.5, np.float32),
    }
    model, samples = in_outliers(nodes, **arrays)

    exact, network = open_both(model, samples)

    assert (network.quantization.quantized, network.quantization.products) == (1, 2)
    assert network.quantization.max_error <= 0.01
    assert np.abs(network(*samples) - exact(*samples)).max() == network.quantization.max_error


def test_a_large_product_beyond_the_tolerance_does_not_take_a_small_product_with_it():
    columns = 4096  # so its error per multiplication is smaller than the small product's
    nodes = [
        node("MatMul", "dense w", "wide"),
        node("ReduceMean", "wide axes", "outliers", keepdims=1),
        node("ReduceMean", "user axes", "mean", keepdims=0),
        node("MatMul", "mean w_mean", "others"),
        node("Add", "outliers others", "logit"),
        ENDING[-1],
    ]
    arrays = {
        "w": np.ones((FEATURES, columns), np.float32),
        "axes": np.array([1]),
        "w_mean": np.full((DIM, 1), 0.5, np.float32),
    }
    model, samples = in_outliers(nodes, **arrays)

    _, network = open_both(model, samples)

    assert (network.quantization.quantized, network.quantization.products) == (1, 2)
    assert network.quantization.max_error <= 0.01


@pytest.mark.parametrize(
    ("nodes", "products"),
    [
        ([node("ReduceMean", "dense one_axis", "mean", keepdims=1), node("Sigmoid", "mean", "clicks")], 0),
        (
            [
                node("Transpose", "user", "turned", perm=[0, 2, 1]),
                node("MatMul", "user turned", "gram"),
                node("ReduceMean", "gram two_axes", "mean", keepdims=0),
                node("Unsqueeze", "mean one_axis", "column"),
                node("Sigmoid", "column", "clicks"),
            ],
            1,
        ),
    ],
    ids=["no product", "a product of two inputs"],
)
def test_a_network_without_a_product_with_a_weight_is_refused(nodes, products):
    model = network_of(nodes, {"one_axis": np.array([1]), "two_axes": np.array([1, 2])})

    with pytest.raises(ConfigError, match=f"engine int8: the network has {products} matrix products, but none with a"):
        open_both(model)


def test_a_network_whose_answers_are_nan_is_refused():
    model = network_of([node("Gemm", "dense w1 b1", "a"), *ENDING], {**ARRAYS, "w2": np.full_like(W2, np.nan)})

    with pytest.raises(ConfigError, match="an answer to the calibration's samples is not a finite"):
        open_both(model)


@pytest.fixture
def network_file(tmp_path):
    """Return a function that opens a network whose weights are in a file next to it."""
    file = tmp_path / "net.onnx"
    copy = onnx.load_model_from_string(TWO_LAYERS.SerializeToString())  # saving moves the weights out
    onnx.save(copy, file, save_as_external_data=True, location="net.weights", size_threshold=0)
    return file, OnnxNetwork(GRAPH, file)


def test_weights_in_a_file_next_to_the_network_are_found(network_file):
    file, exact = network_file

    network = open_int8(GRAPH, exact, file, Calibration(*draw(256), 0.05), 1, str(file))

    assert network.quantization.quantized == 2


def test_a_network_too_large_for_one_file_is_refused(network_file, monkeypatch):
    file, exact = network_file
    monkeypatch.setattr("serving.dense.onnx_file._LARGEST_BYTES", 500)

    with pytest.raises(
        ConfigError, match=r"cannot be quantized: it has [\d,]+ bytes; the limit of an ONNX file is 500"
    ):
        open_int8(GRAPH, exact, file, Calibration(*draw(256), 0.05), 1, str(file))


def test_operators_that_are_too_old_are_refused():
    model = network_of([node("Gemm", "dense w1 b1", "a"), *ENDING], ARRAYS)
    model.opset_import[0].version = 9

    with pytest.raises(ConfigError, match="engine int8: expected operators of opset 11 or newer, got 9"):
        open_both(model)


def test_a_product_without_columns_or_with_infinities_stays_in_float32():
    """A network may compute finite answers from infinite values, as in 1 / inf, but integers have no infinity."""
    nodes = [
        node("Slice", "dense zero_1 zero_1 one_1", "none"),
        node("MatMul", "none w_none", "nothing"),
        node("Div", "dense zero_f", "infinite"),
        node("MatMul", "infinite w_inf", "far"),
        node("Reciprocal", "far", "near"),
        node("Gemm", "dense w1 b1", "b"),
        node("Sum", "nothing near b", "a"),
        *ENDING,
    ]
    arrays = {
        **ARRAYS,
        "zero_1": np.array([0]),
        "one_1": np.array([1]),
        "w_none": np.ones((0, 16), np.float32),
        "w_inf": np.ones((FEATURES, 16), np.float32),
        "zero_f": np.float32(0),
    }
    dense, tables = draw(64)

    _, network = open_both(network_of(nodes, arrays), (np.abs(dense), tables), tolerance=0.05)

    assert (network.quantization.quantized, network.quantization.products) == (2, 4)


def test_many_threads_get_the_answers_of_a_single_thread():
    _, network = open_both(TWO_LAYERS, tolerance=0.05)
    requests = [draw(1 + seed % 9, seed) for seed in range(40)]
    alone = [network(*request) for request in requests]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda request: network(*request), requests))

    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    assert network(*draw(0)).shape == (0, 1)


@pytest.fixture
def needs_ndonnx():
    pytest.importorskip("ndonnx")


@pytest.mark.usefixtures("needs_ndonnx")
@pytest.mark.parametrize("is_stored", [True, False])
def test_layers_and_weights_run_on_integers_too(graph, weights, draw_inputs, tmp_path, is_stored):
    file = tmp_path / "dense.onnx"
    if is_stored:
        file.write_bytes(build_onnx(graph, weights))
    calibration = Calibration(*draw_inputs(graph, 256), 0.1)  # drawn weights are steeper than trained weights

    network = open_network(graph, weights, "int8", file, calibration=calibration)

    samples = draw_inputs(graph, 64, seed=9)
    errors = np.abs(network(*samples) - open_network(graph, weights, "numpy")(*samples))
    assert (network.quantization.quantized, network.quantization.products) == (3, 3)
    assert 0 < errors.max() < 0.1


@pytest.mark.usefixtures("needs_ndonnx")
def test_a_graph_that_mixes_samples_is_refused(document, draw_weights, draw_inputs):
    """For two similar samples PReLU_Dice divides by almost 0, and the error would be eight times as large."""
    dice = {"type": "PReLU_Dice", "bottom": "dense", "top": "dice", "prelu_dice_param": {"alpha": 0.2, "eps": 1e-8}}
    graph = parse_graph({"layers": [*document["layers"][:-1], dice, document["layers"][-1]]}, "graph.json")

    with pytest.raises(
        ConfigError, match=r"graph\.json: engine int8: the answer to a sample depends on the other samples"
    ):
        open_network(graph, draw_weights(graph), "int8", calibration=Calibration(*draw_inputs(graph, 64)))


@pytest.mark.usefixtures("needs_ndonnx")
def test_int8_needs_a_calibration(graph, weights):
    with pytest.raises(ValueError, match="the engine int8 needs a calibration"):
        open_network(graph, weights, "int8")


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "serving.dense.quantizing")
    monkeypatch.setitem(sys.modules, "onnx", None)

    with pytest.raises(
        MissingExtraError, match=r"the engine int8 needs the package 'onnx': pip install 'hotrow\[onnx\]'"
    ):
        open_both(TWO_LAYERS)


def test_without_onnx_runtime_its_extra_is_named(graph, weights, draw_inputs, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(MissingExtraError, match=r"'onnxruntime': pip install 'hotrow\[onnx\]'"):
        open_network(graph, weights, "int8", calibration=Calibration(*draw_inputs(graph, 8)))
