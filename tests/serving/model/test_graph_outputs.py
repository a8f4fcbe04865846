"""Losses, activations and labels: the output of a graph."""

import pytest

from serving.errors import ConfigError
from serving.model.graph import B, inference_document, parse_graph
from serving.model.records import Output, default_outputs
from tests.serving.model.layer_places import pattern_of


def data(label, dense_dim=4, **more):
    return {
        **more,
        "type": "Data",
        "label": label,
        "dense": {"top": "dense", "dense_dim": dense_dim},
        "sparse": [{"top": "keys", "slot_num": 2, "nnz_per_slot": 1}],
    }


EMBEDDING = {
    "type": "HybridSparseEmbedding", "bottom": "keys", "top": "emb",
    "sparse_embedding_hparam": {"embedding_vec_size": 2, "combiner": "mean"},
}  # fmt: skip


def fc(top, outputs):
    return {"type": "InnerProduct", "bottom": "dense", "top": top, "fc_param": {"num_output": outputs}}


def loss(kind, prediction, label, top):
    return {"type": kind, "bottom": [prediction, label], "top": top}


def parse(label, *layers, **more):
    return parse_graph({"layers": [data(label, **more), EMBEDDING, *layers]}, "graph.json")


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("BinaryCrossEntropyLoss", "Sigmoid"),
        ("CrossEntropyLoss", "Softmax"),
        ("MultiCrossEntropyLoss", "Sigmoid"),
        ("MeanSquaredErrorLoss", "Denormalize"),
    ],
)
def test_a_loss_becomes_an_activation_of_all_columns(kind, activation):
    graph = parse({"top": "y", "label_dim": 3}, fc("logits", 3), loss(kind, "logits", "y", "loss"))

    assert (graph.layers[-1].type, graph.logits, graph.label_dim) == (activation, "logits", 3)
    assert graph.shapes[graph.output] == (B, 3)


def test_the_label_of_a_cross_entropy_may_be_the_number_of_a_class():
    graph = parse({"top": "y", "label_dim": 1}, fc("logits", 5), loss("CrossEntropyLoss", "logits", "y", "loss"))

    assert graph.label_dim == 5


def test_a_graph_that_ends_without_an_activation_answers_with_its_last_layers_values():
    graph = parse({"label_dim": 2}, fc("hidden", 3), {"type": "Sigmoid", "bottom": "hidden", "top": "p"}, fc("a", 2))

    assert (graph.output, graph.logits, graph.label_dim) == ("a", "a", 2)


TWO = {"top": ["click", "buy"], "label_dim": [1, 2]}
TWO_TASKS = [
    fc("a", 1),
    loss("BinaryCrossEntropyLoss", "a", "click", "probabilities"),
    fc("b", 2),
    loss("CrossEntropyLoss", "b", "buy", "loss2"),
]


def test_the_columns_of_several_losses_are_concatenated():
    graph = parse(TWO, *TWO_TASKS)

    assert [layer.type for layer in graph.layers] == ["InnerProduct"] * 2 + ["Sigmoid", "Softmax", "Concat", "Concat"]
    assert graph.label_dim == 3
    assert graph.shapes[graph.output] == graph.shapes[graph.logits] == (B, 3)
    joined = {layer.tops[0]: layer.bottoms for layer in graph.layers}
    assert joined[graph.logits] == ("a", "b")
    assert joined[graph.output] == tuple(layer.tops[0] for layer in graph.layers[2:4])


def test_the_inference_form_of_several_losses_makes_the_same_records():
    document = {"layers": [data(TWO), EMBEDDING, *TWO_TASKS]}
    inference = inference_document(document)

    assert [layer["type"] for layer in inference["layers"][2:]] == ["InnerProduct"] * 2 + ["Sigmoid", "Softmax"]
    assert parse_graph(inference, "graph.json") == parse_graph(document, "graph.json")
    assert inference_document(inference) == inference


def test_the_inference_form_of_a_regression_has_its_mean_and_deviation():
    squared = {**loss("MeanSquaredErrorLoss", "b", "buy", "loss2"), "mean": [1, 2.5], "std": [2, 3]}
    document = {"layers": [data(TWO), EMBEDDING, *TWO_TASKS[:3], squared]}
    inference = inference_document(document)

    assert inference["layers"][-1] == {
        "name": "scores2", "type": "Denormalize", "bottom": "b", "top": "scores2", "mean": [1, 2.5], "std": [2, 3],
    }  # fmt: skip
    graph = parse_graph(inference, "graph.json")
    assert graph == parse_graph(document, "graph.json")
    assert graph.label_kinds == ("probability", "score", "score")
    assert inference_document(inference) == inference


def test_several_labels_need_no_names_in_an_inference_graph():
    sigmoids = [{"type": "Sigmoid", "bottom": name, "top": f"p{name}"} for name in "ab"]

    graph = parse({"label_dim": [1, 2]}, fc("a", 1), fc("b", 2), *sigmoids)

    assert graph.label_dim == 3
    assert graph.shapes[graph.output] == (B, 3)


def test_an_activation_in_the_middle_is_not_an_output():
    graph = parse(
        {"label_dim": 1},
        {"type": "Sigmoid", "bottom": "dense", "top": "gate"},
        {"type": "ElementwiseMultiply", "bottom": ["dense", "gate"], "top": "gated"},
        {"type": "InnerProduct", "bottom": "gated", "top": "logit", "fc_param": {"num_output": 1}},
        {"type": "Sigmoid", "bottom": "logit", "top": "p"},
    )

    assert graph.output == "p"


@pytest.mark.parametrize(
    ("label", "layers", "message"),
    [
        pytest.param(
            {"top": ["a", "b"], "label_dim": [1]}, [], "layers[0].label.label_dim: expected 2 dimensions", id="dims"
        ),
        pytest.param({"top": ["a"], "label_dim": [0]}, [], "layers[0].label.label_dim[0]: expected an", id="zero"),
        pytest.param(
            {"top": ["a", "a"], "label_dim": [1, 1]},
            [fc("x", 1)],
            "layers[0].label.top: the tensor 'a' is made twice",
            id="same-label",
        ),
        pytest.param(TWO, TWO_TASKS[:2], "layers[0].label.top: no loss reads 'buy'", id="label-without-a-loss"),
        pytest.param(
            TWO,
            [*TWO_TASKS, loss("BinaryCrossEntropyLoss", "a", "click", "loss3")],
            "layers[6].bottom: two losses read the label 'click'",
            id="label-of-two-losses",
        ),
        pytest.param(
            TWO,
            [fc("a", 1), loss("BinaryCrossEntropyLoss", "a", "sell", "loss")],
            "layers[3].bottom: expected the label 'click', 'buy' second, got 'sell'",
            id="unknown-label",
        ),
        pytest.param(
            TWO,
            [fc("a", 1), loss("BinaryCrossEntropyLoss", "a", "buy", "loss")],
            "layers[3].bottom: expected shape [B, 2] from label_dim, got [B, 1]",
            id="label-of-another-width",
        ),
        pytest.param(
            TWO,
            [*TWO_TASKS, fc("c", 1)],
            "layers[6].type: the last layer must be one of Sigmoid, Softmax, Denormalize, Binary",
            id="product-after-the-losses",
        ),
        pytest.param(
            {"label_dim": 3}, [fc("a", 2)], "layers[2].bottom: expected shape [B, 3] from label_dim", id="raw-columns"
        ),
        pytest.param(
            {"label_dim": 2},
            [fc("a", 2), EMBEDDING | {"top": "last"}],
            "layers[3].type: the last layer must be one of the network, got HybridSparseEmbedding",
            id="embedding-at-the-end",
        ),
        pytest.param(
            {"label_dim": 2},
            [{"type": "Slice", "bottom": "dense", "top": ["a", "b"], "ranges": [[0, 2], [2, 4]]}],
            "layers[2].top: the last layer must have one top, got 2",
            id="last-layer-with-two-tops",
        ),
        pytest.param(
            {"label_dim": 3},
            [fc("a", 1), fc("b", 1), *({"type": "Sigmoid", "bottom": x, "top": f"p{x}"} for x in "ab")],
            "layers[5].bottom: expected shape [B, 3] from label_dim, got [B, 1] and [B, 1]",
            id="too-few-columns",
        ),
        pytest.param(
            {"label_dim": 2},
            [{"type": "Sigmoid", "bottom": "emb", "top": "p"}],
            "layers[2].bottom: expected shape [B, L], got [B, 2, 2]",
            id="three-dimensions",
        ),
        pytest.param(
            {"top": "y", "label_dim": 1},
            [fc("a", 1), {**loss("BinaryCrossEntropyLoss", "a", "y", "loss"), "target_wieght": [1]}],
            "layers[3].target_wieght: unknown key; did you mean 'target_weight'?",
            id="misspelt-key",
        ),
    ],
)
def test_a_wrong_output_is_refused_and_the_place_is_named(label, layers, message):
    with pytest.raises(ConfigError, match=pattern_of(f"graph.json: {message}")):
        parse(label, *layers)


def test_dense_layers_may_have_one_name_twice():
    layers = [
        {**fc("a", 1), "name": "fc"},
        {**fc("b", 1), "name": "fc"},
        {"type": "Sigmoid", "bottom": "b", "top": "p"},
    ]

    graph = parse({"label_dim": 1}, *layers)

    assert [spec.layer for spec in graph.weights] == ["fc", "fc", "b", "b"]


def test_tensors_of_mixed_precision_training_are_ignored():
    """HugeCTR's DLRM samples have the tensors of the backward pass after the first tensor."""
    first, second = [f"fc1{i}" for i in range(1, 5)], [f"fc2{i}" for i in range(1, 5)]

    graph = parse(
        {"label_dim": 1},
        {**fc(first, 8), "type": "FusedInnerProduct", "position": "Head"},
        {**fc(second, 2), "type": "FusedInnerProduct", "position": "Body", "bottom": first},
        {**fc("fc3", 2), "type": "FusedInnerProduct", "position": "Tail", "bottom": second, "activation": "None"},
        {"type": "Interaction", "bottom": ["fc3", "emb"], "top": ["pairs", "pairs_grad"]},
        {"type": "MLP", "bottom": ["pairs", "pairs_grad"], "top": "mlp", "mlp_param": {"num_outputs": [3, 1]}},
        {"type": "Sigmoid", "bottom": "mlp", "top": "p"},
    )

    shapes = [spec.shape for spec in graph.weights]
    assert shapes == [(4, 8), (8,), (8, 2), (2,), (2, 2), (2,), (6, 3), (3,), (3, 1), (1,)]


def test_all_columns_are_output0_and_each_of_several_labels_is_an_output_by_its_name():
    graph = parse(TWO, *TWO_TASKS)

    assert graph.outputs == (
        Output("OUTPUT0", "probability", 3),
        Output("click", "probability", 1, 0),
        Output("buy[0]", "probability", 1, 1),
        Output("buy[1]", "probability", 1, 2),
    )
    assert default_outputs(graph.outputs) == graph.outputs[:1]


@pytest.mark.parametrize(
    "label",
    [
        {"label_dim": 2},
        {"label_dim": 2, "names": ["same", "same"]},
        {"label_dim": 2, "names": ["click", "OUTPUT0"]},
        {"label_dim": 2, "names": ["TOP_INDEX", "click"]},
    ],
    ids=["no names", "the same name twice", "the name of all columns", "a name of answers"],
)
def test_labels_whose_names_cannot_be_asked_for_are_columns_of_output0_alone(label):
    assert parse(label, fc("a", 2)).outputs == (Output("OUTPUT0", "probability", 2),)


def test_a_graph_states_the_outputs_of_its_columns():
    stated = [{"name": "rating", "kind": "score"}, {"name": "place", "kind": "vector", "width": 2}]
    graph = parse({"label_dim": 3}, fc("a", 3), outputs=stated)

    assert graph.outputs == (Output("rating", "score", 1, 0), Output("place", "vector", 2, 1))
    assert default_outputs(graph.outputs) == graph.outputs


def test_all_columns_may_be_scores():
    graph = parse({"label_dim": 3}, fc("a", 3), outputs=[{"name": "OUTPUT0", "kind": "score", "width": 3}])

    assert graph.outputs == (Output("OUTPUT0", "score", 3, 0),)


SCORE = {"name": "a", "kind": "score"}


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        pytest.param([], "outputs: expected a list of objects, got an empty list", id="none"),
        pytest.param([SCORE], "outputs: expected widths that add up to the 2 columns of the answer, got 1", id="few"),
        pytest.param([SCORE, SCORE], "outputs[1].name: two outputs are called 'a'", id="the same name twice"),
        pytest.param([SCORE, SCORE | {"name": "TOP_INDEX"}], "[1].name: the name 'TOP_INDEX' is reserved", id="TOP"),
        pytest.param(
            [SCORE, SCORE | {"name": "OUTPUT0"}], "[1].name: OUTPUT0 has all columns", id="OUTPUT0 and others"
        ),
        pytest.param([SCORE | {"name": "OUTPUT0"}, SCORE], "[1].name: OUTPUT0 has all columns", id="OUTPUT0 first"),
        pytest.param([{"name": "a", "kind": "scores"}], 'kind: expected one of "probability", "score"', id="a kind"),
        pytest.param([{"name": "a", "kind": "scores"}], 'did you mean "score"?', id="a misspelt kind"),
        pytest.param([SCORE | {"width": 0}], "[0].width: expected an integer from 1", id="no columns"),
        pytest.param([{"kind": "score"}], "outputs[0].name: missing", id="no name"),
        pytest.param([SCORE | {"dim": 2}], "outputs[0].dim: unknown key", id="an unknown key"),
    ],
)
def test_wrong_outputs_are_refused_with_their_place(outputs, reason):
    with pytest.raises(ConfigError) as caught:
        parse({"label_dim": 2}, fc("a", 2), outputs=outputs)

    assert str(caught.value).startswith("graph.json: layers[0].outputs")
    assert reason in str(caught.value)
