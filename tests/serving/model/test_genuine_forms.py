"""Small copies of forms found in HugeCTR's own files of several years, which keep their meaning.

Sources: the samples and test scripts of HugeCTR v2.0 to v24.06 and of its Triton backend, and the exporter's code.
"""

import dataclasses

import pytest

from serving.errors import ConfigError
from serving.model.graph import B, inference_document, parse_graph
from serving.model.records import Samples

DATA, EMBEDDING, RESHAPE, FC1, RELU = 0, 1, 2, 6, 7


def put(*path, **members):
    """Return a function that adds ``members`` to the object at ``path`` of a document's layers."""

    def change(document):
        node = document["layers"]
        for key in path:
            node = node[key]
        node |= members

    return change


def drop(*path):
    """Return a function that removes the member at ``path`` of a document's layers."""
    *parents, last = path

    def change(document):
        node = document["layers"]
        for key in parents:
            node = node[key]
        del node[last]

    return change


SAME_GRAPH = {
    "v2.0 counts the table's rows": put(EMBEDDING, "sparse_embedding_hparam", vocabulary_size=100, load_factor=0.75),
    "or their most": put(EMBEDDING, "sparse_embedding_hparam", max_vocabulary_size=100),
    "raw training data that threads read": put(
        DATA, format="RawAsync", num_iterations_statistics=20,
        async_param={"num_threads": 32, "num_batches_per_thread": 4, "io_block_size": 552960, "io_depth": 2},
    ),
    "v2.1 says the slots' sizes of raw data": put(DATA, format="Raw", slot_size=[30, 70], cache_eval_data=True),
    "and of a one-hot table": put(EMBEDDING, slot_size=[30, 70]),
    "a plan of the exchange between GPUs": put(EMBEDDING, plan_file="all2all_plan_bi_1.json"),
    "such a plan for each of two nodes": put(EMBEDDING, plan_file=["all2all_plan_bi_1.json", "all2all_plan_bi_1.json"]),
    "dense features aligned for mixed precision": put(DATA, "dense", aligned="Auto"),
    "raw training data": put(
        DATA, format="Raw", num_samples=4195196928, eval_num_samples=89137319, cache_eval_data=1613, num_workers=8,
        slot_size_array=[39884406, 39043, 17289, 7420], float_label_dense=True, source=["a", "b"],
    ),
    "an optimizer of the table's own": put(EMBEDDING, optimizer={"type": "SGD"}),
    "a regularizer of the loss": put(-1, regularizer="L2", **{"lambda": 0.0005}),
    "a hand-written Reshape lays rows flat": drop(RESHAPE, "leading_dim"),
}  # fmt: skip


@pytest.mark.parametrize("change", SAME_GRAPH.values(), ids=SAME_GRAPH.keys())
def test_members_that_only_training_needs_change_nothing(document, graph, change):
    change(document)

    for form in (document, inference_document(document)):
        found = parse_graph(form, "graph.json")
        assert dataclasses.replace(found, slot_sizes=None) == graph  # only exports shift keys by the slots' sizes


def test_the_model_name_of_an_exported_graph_is_ignored(document, graph):
    document["model_name"] = "dcn"

    assert parse_graph(document, "graph.json") == graph
    assert inference_document(document)["model_name"] == "dcn"


def with_layer(document, layer):
    """Return the document's graph with ``layer`` between fc1 and relu1, and the layer."""
    document["layers"].insert(RELU, {"name": "new", "bottom": "fc1", "top": "new", **layer})
    document["layers"][RELU + 1]["bottom"] = "new"
    graph = parse_graph(document, "graph.json")
    [new] = [one for one in graph.layers if one.name == "new"]
    return graph, new


_INIT = {"weight_init": "XavierUniform", "bias_init": "Zero"}
_NORM_INIT = {"gamma_init": "Uniform", "beta_init": "XavierNorm"}
_FLOAT32_POINT_9 = 0.8999999761581421  # how the exporter writes 0.9

# Every member that graph_to_json of v3.1 to v24.06 can write besides type, bottom and top (add_dense_layer.cpp).
EXPORTED = [
    {"type": "BatchNorm", "bn_param": {"factor": _FLOAT32_POINT_9, "eps": 9.999999747378752e-06, **_NORM_INIT}},
    {"type": "LayerNorm", "ln_param": {"eps": 9.999999747378752e-06, **_NORM_INIT}},
    {"type": "Dropout", "rate": 0.5},
    {"type": "ELU", "elu_param": {"alpha": 1.0}},
    {"type": "InnerProduct", "fc_param": {"num_output": 4, **_INIT}},
    {
        "type": "FusedInnerProduct", "position": "None", "activation": "Relu", "fc_param": {"num_output": 4, **_INIT},
    },
    {
        "type": "MLP",
        "mlp_param": {"num_output": 1, "num_outputs": [4, 2], "use_bias": True, "activation": "Relu", **_INIT},
    },
    {
        "type": "MLP",
        "mlp_param": {
            "num_output": 1, "num_outputs": [4, 2], "biases": [True, False], "activations": ["Relu", "None"], **_INIT,
        },
    },
    {"type": "MultiCross", "mc_param": {"num_layers": 2, **_INIT}},
    {"type": "Reshape", "leading_dim": 8, "time_step": 0},
    {"type": "Reshape", "leading_dim": 4, "time_step": 2},
    {"type": "Reshape", "bottom": "embedding1", "selected": [0, 2]},
    {"type": "Concat", "bottom": ["fc1", "fc1"], "axis": 1},
    {"type": "Slice", "ranges": [[0, 8]]},
    {"type": "WeightMultiply", "weight_dims": [8, 2], "weight_init": "Uniform"},
    {"type": "FmOrder2", "out_dim": 4},
    {"type": "ReduceSum", "axis": 1},
    {"type": "ReduceMean", "axis": 1},
    {"type": "Gather", "indices": [1, 0]},
    {"type": "PReLU_Dice", "prelu_dice_param": {"alpha": 0.20000000298023224, "eps": 9.99999993922529e-09}},
    {"type": "Scale", "scale_param": {"axis": 0, "factor": 10.0}},
    {"type": "Softmax", "factor": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("layer", EXPORTED, ids=lambda layer: layer["type"])
def test_every_member_that_the_exporter_writes_is_read(document, layer):
    entry = {"bottom": "fc1", "top": "new", **layer}
    document["layers"].insert(RELU, entry)
    document["layers"].insert(RELU + 1, {"type": "Reshape", "bottom": "fc1", "top": "fc1_again"})
    document["layers"][RELU + 2]["bottom"] = "fc1_again"

    graph = parse_graph(document, "graph.json")

    [new] = [one for one in graph.layers if one.tops == ("new",)]
    assert new.type == layer["type"]


@pytest.mark.parametrize("alpha", ["alpha", "elu_alpha"])
@pytest.mark.parametrize("epsilon", ["eps", "epsilon"])
def test_dice_has_two_names_for_each_of_its_numbers(document, alpha, epsilon):
    _, dice = with_layer(document, {"type": "PReLU_Dice", "prelu_dice_param": {alpha: 0.2, epsilon: 1e-8}})

    assert dice.params == {"alpha": 0.2, "eps": 1e-8}


def test_dot_product_is_the_old_name_of_elementwise_multiply(document):
    graph, new = with_layer(document, {"type": "DotProduct", "bottom": ["fc1", "fc1"]})

    assert new.bottoms == ("fc1", "fc1")
    assert graph.shapes["new"] == graph.shapes["fc1"]


def test_one_bottom_may_be_a_list(document, graph):
    document["layers"][FC1]["bottom"] = [document["layers"][FC1]["bottom"]]

    assert parse_graph(document, "graph.json") == graph


def test_the_multi_layer_perceptron_of_mixed_precision_is_a_chain(document):
    """MLPerf's DLRM: the backward pass has the tensors after the first."""
    four = ["x", "mask", "dRelu", "db"]
    document["layers"][FC1 : RELU + 1] = [
        {
            "type": "FusedInnerProduct", "position": "Head", "bottom": "slice12", "top": four,
            "fc_param": {"num_output": 8},
        },
        {
            "type": "FusedInnerProduct", "position": "Tail", "activation": "None", "bottom": four,
            "top": "relu1", "fc_param": {"num_output": 8},
        },
    ]  # fmt: skip

    graph = parse_graph(document, "graph.json")

    head, tail = (layer for layer in graph.layers if layer.type == "FusedInnerProduct")
    assert (head.params["activation"], tail.params["activation"]) == ("Relu", "None")
    assert [spec.shape for spec in graph.weights[6:10]] == [(14, 8), (8,), (8, 8), (8,)]


def test_a_collection_of_embeddings_is_refused_by_name(document):
    document["layers"][EMBEDDING] |= {"type": "EmbeddingCollection", "bottom": ["data1", "data2"]}

    with pytest.raises(ConfigError) as caught:
        parse_graph(document, "graph.json")

    assert str(caught.value) == (
        'graph.json: layers[1] "ad_id".type: layer type EmbeddingCollection is not supported: '
        "HugeCTR's own inference reads none either; give each table an embedding layer"
    )


def test_a_reshape_that_mixes_slots_and_samples_is_refused_by_the_label(document):
    """HugeCTR's criteo_parquet_multi_slots.json makes 26 rows per sample, but has one label per sample."""
    document["layers"][RESHAPE]["leading_dim"] = 3
    document["layers"][3:-2] = []
    document["layers"][-2]["bottom"] = "reshape1"

    with pytest.raises(ConfigError) as caught:
        parse_graph(document, "graph.json")

    assert str(caught.value) == 'graph.json: layers[4] "loss".bottom: expected shape [B, 1] from label_dim, got [4B, 1]'


def test_a_reshape_without_a_size_keeps_the_rows(document):
    del document["layers"][RESHAPE]["leading_dim"]
    document["layers"][3:3] = [
        {"type": "Reshape", "bottom": "reshape1", "top": "slots", "leading_dim": 3},
        {"type": "Reshape", "bottom": "slots", "top": "same"},
        {"type": "Reshape", "bottom": "same", "top": "flat", "leading_dim": 12},
    ]
    document["layers"][6]["bottom"] = ["flat", "dense"]

    graph = parse_graph(document, "graph.json")

    assert graph.shapes["reshape1"] == (B, 12)
    assert graph.shapes["same"] == (Samples(4), 3)


def test_a_loss_of_classes_is_a_softmax_and_one_of_bits_a_sigmoid(document, graph):
    """The last HugeCTR with inference does this. v3.1 made a CrossEntropyLoss a Sigmoid."""
    document["layers"][-1]["type"] = "CrossEntropyLoss"

    classes = parse_graph(document, "graph.json")

    assert classes.layers[-1] == dataclasses.replace(graph.layers[-1], type="Softmax")
