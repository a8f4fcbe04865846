import copy

import pytest

from serving.model.graph import B, Embedding, SparseInput, WeightSpec, inference_document, parse_graph, read_graph


def by_weight(graph):
    return {f"{spec.layer}.{spec.name}": spec.shape for spec in graph.weights}


def test_a_training_graph_becomes_records(graph):
    assert (graph.dense_top, graph.dense_dim, graph.label_dim) == ("dense", 2, 1)
    assert graph.sparse == (SparseInput("data1", slots=4, max_keys_per_sample=6),)
    assert graph.embeddings == (Embedding("ad_id", "data1", "embedding1", 4, 3, "sum", "distributed"),)
    assert [layer.name for layer in graph.layers[:-1]] == [
        "reshape1", "concat1", "slice1", "multicross1", "fc1", "relu1", "dropout1", "concat2", "fc2",
    ]  # fmt: skip
    assert graph.layers[3].params == {"num_layers": 3, "projection_dim": None}
    assert graph.layers[3].path == "layers[5]"


def test_a_loss_becomes_its_activation(graph):
    last = graph.layers[-1]

    assert (last.type, last.bottoms, last.tops) == ("Sigmoid", ("fc2",), (graph.output,))
    assert graph.logits == "fc2"
    assert graph.shapes[graph.output] == (B, 1)


def test_every_tensor_has_a_shape(graph):
    assert graph.shapes == {
        "dense": (B, 2),
        "embedding1": (B, 4, 3),
        "reshape1": (B, 12),
        "concat1": (B, 14),
        "slice11": (B, 14),
        "slice12": (B, 14),
        "multicross1": (B, 14),
        "fc1": (B, 8),
        "relu1": (B, 8),
        "dropout1": (B, 8),
        "concat2": (B, 22),
        "fc2": (B, 1),
        "probabilities": (B, 1),
    }


def test_weights_come_in_the_order_of_the_dense_file(graph):
    assert graph.weights == (
        WeightSpec("multicross1", "weight0", (14,)),
        WeightSpec("multicross1", "bias0", (14,)),
        WeightSpec("multicross1", "weight1", (14,)),
        WeightSpec("multicross1", "bias1", (14,)),
        WeightSpec("multicross1", "weight2", (14,)),
        WeightSpec("multicross1", "bias2", (14,)),
        WeightSpec("fc1", "weight", (14, 8)),
        WeightSpec("fc1", "bias", (8,)),
        WeightSpec("fc2", "weight", (22, 1)),
        WeightSpec("fc2", "bias", (1,)),
    )


def test_low_rank_cross_layers_own_two_matrices_and_a_bias(document):
    document["layers"][5]["mc_param"] = {"num_layers": 1, "projection_dim": 5}

    weights = by_weight(parse_graph(document, "graph.json"))

    assert weights["multicross1.u0"] == (14, 5)
    assert weights["multicross1.v0"] == (5, 14)
    assert weights["multicross1.bias0"] == (14,)


def test_parsing_leaves_the_document_unchanged(document):
    before = copy.deepcopy(document)

    parse_graph(document, "graph.json")
    inference_document(document)

    assert document == before


def test_the_inference_document_makes_the_same_records(document, graph):
    inference = inference_document(document)

    assert "solver" not in inference
    assert "source" not in inference["layers"][0]
    assert inference["layers"][0]["label"] == {"top": "label", "label_dim": 1}
    assert inference["layers"][-1]["type"] == "Sigmoid"
    assert parse_graph(inference, "graph.json") == graph


def test_an_inference_document_stays_as_it_is(document):
    inference = inference_document(document)

    assert inference_document(inference) == inference


def test_the_name_of_the_activation_avoids_used_names(document):
    document["layers"][-2]["name"] = "probabilities"

    graph = parse_graph(document, "graph.json")

    assert graph.output == "probabilities_"
    assert parse_graph(inference_document(document), "graph.json") == graph


def test_an_exported_graph_without_names_takes_them_from_the_tops(document):
    for layer in document["layers"]:
        del layer["name"]
    document["layers"][1]["sparse_embedding_hparam"] = {
        "workspace_size_per_gpu_in_mb": 10,
        "max_vocabulary_size_global": 100,
        "embedding_vec_size": 3,
        "combiner": "mean",
    }
    document["layers"][1]["optimizer"] = {"type": "Adam", "update_type": "Local"}
    document["layers"][2]["time_step"] = 0
    document["layers"][3]["axis"] = 1
    document["layers"][6]["fc_param"] |= {"weight_init": "XavierNorm", "bias_init": "Zero"}

    graph = parse_graph(document, "graph.json")

    assert graph.embeddings == (Embedding("embedding1", "data1", "embedding1", 4, 3, "mean", "distributed"),)
    assert graph.layers[4].name == "fc1"
    assert graph.layers[4].params == {"num_output": 8, "weight_init": "XavierNorm", "bias_init": "Zero"}


@pytest.mark.parametrize(
    ("entry", "max_keys"),
    [
        pytest.param({"max_feature_num_per_sample": 30}, 30, id="v3.0-per-sample"),
        pytest.param({"max_feature_num_per_sample": 30, "max_nnz": 3}, 30, id="v3.0-max-nnz"),
        pytest.param({"nnz_per_slot": 2, "is_fixed_length": False}, 8, id="v3.1-one-number"),
        pytest.param({"nnz_per_slot": [1, 2, 3, 4], "is_fixed_length": True}, 10, id="v3.1-per-slot"),
    ],
)
def test_the_most_keys_of_a_sample_are_read_in_either_form(document, entry, max_keys):
    document["layers"][0]["sparse"] = [{"top": "data1", "slot_num": 4} | entry]

    assert parse_graph(document, "graph.json").sparse[0].max_keys_per_sample == max_keys


@pytest.mark.parametrize(
    ("kind", "row_layout"),
    [
        ("DistributedSlotSparseEmbeddingHash", "distributed"),
        ("LocalizedSlotSparseEmbeddingHash", "localized"),
        ("LocalizedSlotSparseEmbeddingOneHot", "localized"),
        ("HybridSparseEmbedding", "distributed"),
    ],
)
def test_the_type_of_an_embedding_determines_its_row_layout(document, kind, row_layout):
    document["layers"][1]["type"] = kind

    assert parse_graph(document, "graph.json").embeddings[0].row_layout == row_layout


def test_training_keys_of_an_exported_hybrid_embedding_are_ignored(document):
    document["layers"][1]["type"] = "HybridSparseEmbedding"
    document["layers"][1]["sparse_embedding_hparam"] |= {
        "max_num_frequent_categories": 1, "max_num_infrequent_samples": -1, "p_dup_max": 0.01,
        "max_all_reduce_bandwidth": 1.3e11, "max_all_to_all_bandwidth": 1.9e11, "efficiency_bandwidth_ratio": 1.0,
        "communication_type": "NVLink_SingleNode", "hybrid_embedding_type": "Distributed",
    }  # fmt: skip

    assert parse_graph(document, "graph.json").embeddings[0].row_layout == "distributed"


def test_an_unknown_keys_vector_may_differ_from_zero(document):
    document["layers"][1]["sparse_embedding_hparam"]["default_emb_vec_value"] = 0.5

    assert parse_graph(document, "graph.json").embeddings[0].default_value == 0.5


def test_a_model_may_have_no_dense_features(document):
    document["layers"][0]["dense"]["dense_dim"] = 0
    document["layers"][4]["ranges"] = [[0, 12], [0, 12]]

    assert parse_graph(document, "graph.json").shapes["concat1"] == (B, 12)


def test_reshape_makes_three_dimensions_from_a_time_step(document):
    document["layers"][2] |= {"leading_dim": 6, "time_step": 2}
    document["layers"][3:4] = [
        {"type": "Reshape", "bottom": "reshape1", "top": "flat", "leading_dim": 12},
        {"type": "Concat", "bottom": ["flat", "dense"], "top": "concat1"},
    ]

    assert parse_graph(document, "graph.json").shapes["reshape1"] == (B, 2, 6)


def test_the_genuine_inference_config_is_read_unchanged(genuine_config):
    graph = read_graph(genuine_config("simple_inference.json"))

    assert graph.embeddings[0].combiner == "mean"
    assert (graph.dense_dim, graph.sparse[0].slots, graph.sparse[0].max_keys_per_sample) == (13, 26, 30)
    assert by_weight(graph)["fc1.weight"] == (429, 200)
    assert (graph.logits, graph.output) == ("fc4", "sigmoid")


def test_the_genuine_dcn_config_is_read_unchanged(genuine_config):
    graph = read_graph(genuine_config("dcn_train.json"))

    assert graph.shapes["concat2"] == (B, 1024 + 429)
    assert len(graph.weights) == 12 + 6
    assert by_weight(graph)["fc4.weight"] == (1453, 1)


def test_the_genuine_wide_and_deep_config_has_two_tables(genuine_config):
    graph = read_graph(genuine_config("wdl_train.json"))

    assert [(e.table, e.slots, e.dim) for e in graph.embeddings] == [
        ("sparse_embedding2", 1, 1),
        ("sparse_embedding1", 26, 16),
    ]
