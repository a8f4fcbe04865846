"""NumPy, ONNX Runtime and PyTorch agree on whole graphs, including HugeCTR's own graphs."""

import json
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings

from serving.dense.network import open_network, run_graph
from serving.errors import ConfigError
from serving.model.graph import inference_document, parse_graph, read_graph
from serving.model.layer_types import LAYER_TYPES
from tests.serving.model.odd_documents import with_odd_value

torch = pytest.importorskip("torch")
pytest.importorskip("ndonnx")
pytest.importorskip("onnxruntime")
F = torch.nn.functional


def in_double(graph, weights, dense, embeddings):
    """Run a graph's layers on torch in float64."""
    tensors = {e.top: torch.tensor(x, dtype=torch.float64) for e, x in zip(graph.embeddings, embeddings, strict=True)}
    tensors[graph.dense_top] = torch.tensor(dense, dtype=torch.float64)
    doubles = {key: torch.tensor(w, dtype=torch.float64) for key, w in weights.items()}
    return run_graph(graph, doubles, tensors)[graph.output].numpy()


def check_engines(graph, weights, draw_inputs, sizes=(1, 3, 16)):
    networks = [open_network(graph, weights, engine) for engine in ("numpy", "onnx")]
    for samples in sizes:
        dense, embeddings = draw_inputs(graph, samples)
        inputs = np.abs(dense) + 1, embeddings  # lengths of at least 1: fully masked scores have few digits
        expected = in_double(graph, weights, *inputs)
        assert expected.shape == (samples, graph.label_dim)
        assert expected.std() > 1e-4 or samples == 1
        for network in networks:
            np.testing.assert_allclose(network(*inputs), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["dcn_train.json", "dlrm_kaggle_train.json", "simple_inference.json", "wdl_train.json"]
)
def test_a_genuine_graph_is_read_unchanged_and_the_engines_agree(name, genuine_config, scaled_weights, draw_inputs):
    graph = read_graph(genuine_config(name))

    check_engines(graph, scaled_weights(graph), draw_inputs)


@pytest.fixture
def din(genuine_config):
    """Return HugeCTR's DIN and its last Reshape, whose bottom and top are swapped."""
    document = json.loads(genuine_config("din_train.json").read_text())
    wrong = next(
        x for x in document["layers"] if x["bottom" if x["type"] != "Data" else "type"] == "reshape_reduce_item_his"
    )
    return document, wrong


def test_the_genuine_mistake_in_din_is_refused_by_name(din):
    document, _ = din

    with pytest.raises(ConfigError) as caught:
        parse_graph(document, "din_train.json")

    assert str(caught.value) == (
        "din_train.json: layers[22] \"reduce_item_his\".bottom: no layer above makes 'reshape_reduce_item_his', "
        "but its top 'reduce_item_his' is made above: are bottom and top swapped?"
    )


def din_in_pytorch(weights, user, good, cate):
    """DIN as one would write it in PyTorch, in float64."""
    w = {key: torch.tensor(array, dtype=torch.float64) for key, array in weights.items()}

    def fc(name, x):
        return F.linear(x, w[f"{name}.weight"].T, w[f"{name}.bias"])

    def dice(x):
        gate = torch.sigmoid((x - x.mean(dim=0)) / torch.sqrt(x.var(dim=0, correction=0) + 1e-8))
        return gate * x + (1 - gate) * 0.2 * x

    user, good, cate = (torch.tensor(x, dtype=torch.float64) for x in (user, good, cate))
    items = torch.cat([good, cate], dim=2)
    history, item = items[:, :10], items[:, 10]
    target = item[:, None].expand(-1, 10, -1)
    scores = fc("fc_att_i3", fc("fc_att_i2", torch.cat([target, history, target - history, target * history], dim=2)))
    attended = torch.softmax(scores[:, :, 0], dim=1)[:, :, None] * history
    interest = attended.sum(dim=(1, 2))[:, None]
    x = torch.cat([user.flatten(1), history.mean(dim=1), interest, item], dim=1)
    for name in ("fc_din_i1", "fc_din_i2"):
        x = dice(fc(name, x))
    return torch.sigmoid(fc("fc_din_i3", x)).numpy()


def test_din_works_once_the_mistake_is_fixed(din, scaled_weights, draw_inputs):
    document, wrong = din
    wrong["bottom"], wrong["top"] = wrong["top"], wrong["bottom"]

    graph = parse_graph(document, "din_train.json")
    weights = scaled_weights(graph)
    dense, embeddings = draw_inputs(graph, 7)

    assert graph.mixes_samples
    assert len({layer.name for layer in graph.layers}) == len(graph.layers)
    check_engines(graph, weights, draw_inputs)
    np.testing.assert_allclose(
        open_network(graph, weights, "numpy")(dense, embeddings), din_in_pytorch(weights, *embeddings), rtol=1e-5
    )


def embedding(bottom, top, dim):
    return {
        "type": "LocalizedSlotSparseEmbeddingHash",
        "bottom": bottom,
        "top": top,
        "sparse_embedding_hparam": {
            "workspace_size_per_gpu_in_mb": 75,
            "max_vocabulary_size_global": 100,
            "embedding_vec_size": dim,
            "combiner": "sum",
        },
    }


def layer(kind, bottom, top, **members):
    return {"type": kind, "bottom": bottom, "top": top, **members}


MULTI_TASK = [
    {
        "type": "Data",
        "label": {"top": ["click", "buy"], "label_dim": [1, 2]},
        "dense": {"top": "dense", "dense_dim": 3},
        "sparse": [{"top": "keys", "slot_num": 4, "nnz_per_slot": [1, 2, 1, 1], "is_fixed_length": False}],
    },
    embedding("keys", "emb", 5),
    layer("Reshape", "emb", "flat", leading_dim=20, time_step=0),
    layer("Concat", ["flat", "dense"], "features", axis=1),
    layer("BatchNorm", "features", "normal", bn_param={"factor": 0.9, "eps": 1e-4}),
    layer("Slice", "normal", ["s1", "s2", "s3"], ranges=[[0, 23]] * 3),
    layer(
        "MLP",
        "s1",
        "expert1",
        mlp_param={"num_output": 1, "num_outputs": [8, 6], "activation": "Relu", "use_bias": True},
    ),
    layer("MLP", "s2", "expert2", mlp_param={"num_outputs": [6], "activations": ["None"], "biases": [False]}),
    layer("InnerProduct", "s3", "gate_logits", fc_param={"num_output": 2}),
    layer("Softmax", "gate_logits", "gate", factor=1.0),
    layer("Slice", "gate", ["g1", "g2"], ranges=[[0, 1], [1, 2]]),
    layer("Scale", "g1", "g1_wide", scale_param={"axis": 0, "factor": 6.0}),
    layer("Scale", "g2", "g2_wide", scale_param={"axis": 0, "factor": 6.0}),
    layer("ElementwiseMultiply", ["expert1", "g1_wide"], "part1"),
    layer("ElementwiseMultiply", ["expert2", "g2_wide"], "part2"),
    layer("Add", ["part1", "part2"], "mixed"),
    layer("LayerNorm", "mixed", "shared", ln_param={"eps": 1e-3}),
    layer("FusedInnerProduct", "shared", "tower1", fc_param={"num_output": 4}),
    layer("InnerProduct", "tower1", "click_logit", fc_param={"num_output": 1}),
    layer("ELU", "shared", "tower2", elu_param={"alpha": 1.0}),
    layer("InnerProduct", "tower2", "buy_logits", fc_param={"num_output": 2}),
    layer("BinaryCrossEntropyLoss", ["click_logit", "click"], "loss1"),
    layer("MultiCrossEntropyLoss", ["buy_logits", "buy"], "loss2", target_weight=[1.0, 0.5]),
]

SEQUENCE = [
    {
        "type": "Data",
        "label": {"top": "label", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 2},
        "sparse": [
            {"top": "history", "slot_num": 5, "nnz_per_slot": 1},
            {"top": "target", "slot_num": 1, "nnz_per_slot": 1},
        ],
    },
    embedding("history", "seq", 8),
    embedding("target", "item", 8),
    layer("Concat", ["seq", "item"], "places", axis=1),
    layer("Slice", "dense", ["length", "weight"], ranges=[[0, 1], [1, 2]]),
    layer("SequenceMask", ["length", "length"], "mask", max_sequence_len_from=6, max_sequence_len_to=6),
    *(layer("InnerProduct", "places", name, fc_param={"num_output": 8}) for name in ("q", "k", "v")),
    layer("MultiHeadAttention", ["q", "k", "v", "mask"], "attended", num_attention_heads=2, transpose_b=False),
    layer("Add", ["attended", "places"], "residual"),
    layer("LayerNorm", "residual", "steady", ln_param={"eps": 1e-5}),
    layer("MultiHeadAttention", ["q", "k", "v"], ["scores", "split_v"], num_attention_heads=4, transpose_b=True),
    layer("SequenceMask", "length", "old_mask", max_sequence_len=6),
    layer("Softmax", ["scores", "old_mask"], "probabilities"),
    layer("MultiHeadAttention", ["probabilities", "split_v"], "old_attended"),
    layer("Sub", ["steady", "old_attended"], "difference"),
    layer("Reshape", "difference", "picked", selected=[0, 5, 2]),
    layer("Select", "steady", "last", dim=1, index=[5]),
    layer("ReduceMean", "steady", "average", axis=1),
    layer("MatrixMultiply", ["last", "transposed"], "dots"),
    layer("Reshape", "dots", "dots_flat", shape=[-1, 1]),
    layer("Reshape", "average", "flat_average", leading_dim=8),
    layer("Interaction", ["flat_average", "seq"], "pairs"),
    layer("WeightMultiply", "weight", "vector", weight_dims=[1, 8]),
    layer("FmOrder2", "picked", "order2", out_dim=8),
    layer("Concat", ["picked", "flat_average", "pairs", "vector", "order2", "dots_flat"], "all"),
    layer("LayerNorm", "all", "level", ln_param={"eps": 1e-5}),
    layer("InnerProduct", "level", "logit", fc_param={"num_output": 1}),
    layer("BinaryCrossEntropyLoss", ["logit", "label"], "loss"),
]
SEQUENCE.insert(
    [x["top"] for x in SEQUENCE if x["type"] != "Data"].index("dots") + 1,
    layer("Reshape", "average", "transposed", leading_dim=1, time_step=8),
)

ROWS = [
    {
        "type": "Data",
        "label": {"label_dim": 2},
        "dense": {"top": "dense", "dense_dim": 4},
        "sparse": [{"top": "keys", "slot_num": 3, "nnz_per_slot": 1}],
    },
    embedding("keys", "emb", 4),
    layer("Gather", "dense", "anchors", indices=[0, 2, 1, 0]),
    layer("MatrixMultiply", ["dense", "anchors"], "nearness"),
    layer("FusedReshapeConcat", ["emb", "emb"], ["others", "last"]),
    layer("FusedReshapeConcatGeneral", "emb", "rows"),
    layer("Scale", "last", "last_twice", scale_param={"axis": 1, "factor": 2}),
    layer("Sub", ["others", "last_twice"], "apart"),
    layer("PReLU_Dice", "apart", "bent", prelu_dice_param={"alpha": 0.2, "eps": 1e-3}),
    layer("Reshape", "bent", "bent_flat", leading_dim=16),
    layer("Reshape", "rows", "rows_flat", leading_dim=12),
    layer("Concat", ["nearness", "bent_flat", "rows_flat"], "all"),
    layer("InnerProduct", "all", "logits", fc_param={"num_output": 2}),
    layer("Softmax", "logits", "classes"),
]

OLDER = [
    {
        "type": "Data",
        "label": {"top": "label", "label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 4},
        "sparse": [{"top": "keys", "type": "LocalizedSlot", "slot_num": 3, "max_feature_num_per_sample": 6}],
    },
    embedding("keys", "emb", 4),
    layer("Reshape", "emb", "flat"),
    layer("Cast", "dense", "cast"),
    layer("Slice", "cast", ["d1", "d2"], ranges=[[0, 4]] * 2),
    layer("Multiply", "d1", "wide", weight_dims=[4, 3]),
    layer("DotProduct", ["wide", "flat"], "dot"),
    layer("Concat", ["dot", "d2"], "features"),
    layer("MultiCross", "features", "cross", mc_param={"num_layers": 2}),
    layer("MultiCross", "features", "low_rank", mc_param={"num_layers": 2, "projection_dim": 3}),
    layer("Add", ["cross", "low_rank"], "crossed"),
    layer("InnerProduct", "crossed", "fc1", fc_param={"num_output": 6}),
    layer("ReLU", "fc1", "relu1"),
    layer("Dropout", "relu1", "dropout1", rate=0.5),
    layer("Sigmoid", "dropout1", "gate"),
    layer("ReduceSum", "gate", "total"),
    layer("Concat", ["gate", "total"], "deep"),
    layer("InnerProduct", "deep", "logit", fc_param={"num_output": 1}),
    layer("BinaryCrossEntropyLoss", ["logit", "label"], "loss"),
]

SCORE = [*OLDER[:-1], layer("MeanSquaredErrorLoss", ["logit", "label"], "loss", mean=[3.5], std=[1.1])]

GRAPHS = {"several tasks": MULTI_TASK, "sequences": SEQUENCE, "rows of a batch": ROWS, "older layers": OLDER}
GRAPHS |= {"a score": SCORE}


def test_every_layer_type_is_part_of_a_graph_that_every_engine_runs():
    documents = [inference_document({"layers": layers}) for layers in GRAPHS.values()]
    types = {layer["type"] for document in documents for layer in document["layers"]}

    assert LAYER_TYPES.keys() <= types


@pytest.mark.parametrize("layers", GRAPHS.values(), ids=GRAPHS.keys())
def test_a_graph_reports_whether_it_mixes_samples(layers, scaled_weights, draw_inputs):
    graph = parse_graph({"layers": layers}, "graph.json")
    network = open_network(graph, scaled_weights(graph), "numpy")
    dense, embeddings = draw_inputs(graph, 6)

    together = network(dense, embeddings)
    half = [network(dense[part], [e[part] for e in embeddings]) for part in (slice(0, 3), slice(3, 6))]

    assert np.allclose(np.concatenate(half), together, rtol=1e-5) is not graph.mixes_samples


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        pytest.param(OLDER, (1, 3, 16), id="older layers"),
        pytest.param(SCORE, (1, 3, 16), id="a score"),
        pytest.param(MULTI_TASK, (1, 3, 16), id="several tasks"),
        pytest.param(SEQUENCE, (1, 3, 16), id="sequences"),
        pytest.param(ROWS, (3, 4, 16), id="rows of a batch"),
    ],
)
def test_a_graph_of_all_layers_gives_the_same_on_every_engine(layers, sizes, scaled_weights, draw_inputs):
    graph = parse_graph({"layers": layers}, "graph.json")

    check_engines(graph, scaled_weights(graph), draw_inputs, sizes)


def test_every_task_has_its_columns_in_document_order(scaled_weights, draw_inputs):
    graph = parse_graph({"layers": MULTI_TASK}, "graph.json")
    weights = scaled_weights(graph)
    dense, embeddings = draw_inputs(graph, 5)

    tensors = run_graph(graph, weights, {"dense": dense, "emb": embeddings[0]})
    probabilities = open_network(graph, weights, "numpy")(dense, embeddings)

    logits = np.concatenate([tensors["click_logit"], tensors["buy_logits"]], axis=1)
    assert graph.label_dim == 3
    assert np.array_equal(tensors[graph.logits], logits)
    np.testing.assert_allclose(probabilities, 1 / (1 + np.exp(-logits.astype(float))), rtol=1e-6)


@pytest.mark.parametrize("engine", ["numpy", "onnx"])
def test_a_batch_too_small_for_the_rows_that_are_picked_is_refused(engine, scaled_weights, draw_inputs):
    graph = parse_graph({"layers": ROWS}, "graph.json")
    network = open_network(graph, scaled_weights(graph), engine)

    with pytest.raises(ValueError, match="expected at least 3 samples, because the graph picks rows, got 2"):
        network(*draw_inputs(graph, 2))
    assert network(*draw_inputs(graph, 0)).shape == (0, 2)


ODD_VALUES = [
    None, True, 0, 1, -1, 2.5, 3.0, 2**40, 1e39, "", "dense", "emb", "seq", [], {}, ["dense"], ["emb", "emb"], [[0, 1]],
    {"top": "dense"}, [0], [1, 2, 3], "Sigmoid", "Softmax", "Gather", "MultiHeadAttention", "ReduceSum",
]  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(document=with_odd_value([{"layers": layers} for layers in GRAPHS.values()], ODD_VALUES))
def test_a_graph_with_any_odd_value_is_either_read_or_refused(document):
    with suppress(ConfigError):
        graph = parse_graph(document, "graph.json")
        assert parse_graph(inference_document(document), "graph.json") == graph
