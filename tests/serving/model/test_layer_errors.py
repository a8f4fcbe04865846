"""Every wrong layer is refused. The message names the place, the value, and what was expected."""

import pytest

from serving.errors import ConfigError
from serving.model.graph import parse_graph
from tests.serving.model.layer_places import pattern_of

# What the layer under test may read: rows [B, 6], wide [B, 8], one [B, 1], emb [B, 4, 3], other [B, 4, 5],
# single [B, 1, 3], pair [B, 2, 3], heads [B, 2, 4, 3], joined [4B, 3].
INPUTS = [
    {
        "type": "Data",
        "label": {"label_dim": 1},
        "dense": {"top": "dense", "dense_dim": 24},
        "sparse": [{"top": name, "slot_num": slots, "nnz_per_slot": 1} for name, slots in (("ids", 4), ("id", 1))],
    },
    *(
        {
            "type": "DistributedSlotSparseEmbeddingHash", "bottom": bottom, "top": top,
            "sparse_embedding_hparam": {"embedding_vec_size": dim, "combiner": "sum"},
        }
        for bottom, top, dim in (("ids", "emb", 3), ("ids", "other", 5), ("id", "single", 3))
    ),
    {
        "type": "Slice", "bottom": "dense", "ranges": [[0, 6], [0, 8], [0, 1], [0, 24]],
        "top": ["rows", "wide", "one", "all"],
    },
    {"type": "Reshape", "bottom": "rows", "top": "pair", "leading_dim": 3, "time_step": 2},
    {"type": "Reshape", "bottom": "all", "top": "heads", "shape": [-1, 2, 4, 3]},
    {"type": "Reshape", "bottom": "emb", "top": "joined", "leading_dim": 3},
]  # fmt: skip
PLACE = f"layers[{len(INPUTS)}]"


def layer(kind, bottom, top="top", **members):
    return {"type": kind, "bottom": bottom, "top": top, **members}


REJECTED = {
    "fused product at an unknown position": (
        layer("FusedInnerProduct", "rows", fc_param={"num_output": 2}, position="Neck"),
        'position: expected one of "Head", "Body", "Tail", "Isolated", "None", got "Neck"',
    ),
    "fused product with another activation": (
        layer("FusedInnerProduct", "rows", fc_param={"num_output": 2}, activation="Tanh"),
        'activation: expected one of "Relu", "None", got "Tanh"',
    ),
    "fused product of five tops": (
        layer("FusedInnerProduct", "rows", list("abcde"), fc_param={"num_output": 2}),
        "top: expected at most 4, got 5",
    ),
    "mlp without outputs": (
        layer("MLP", "rows", mlp_param={"num_outputs": []}),
        "mlp_param.num_outputs: expected a list",
    ),
    "mlp of zero outputs": (
        layer("MLP", "rows", mlp_param={"num_outputs": [4, 0]}),
        "mlp_param.num_outputs[1]: expected an integer from 1",
    ),
    "mlp with too few activations": (
        layer("MLP", "rows", mlp_param={"num_outputs": [4, 2], "activations": ["Relu"]}),
        "mlp_param.activations: expected 2 items, one per entry of num_outputs, got 1",
    ),
    "mlp with an unknown activation": (
        layer("MLP", "rows", mlp_param={"num_outputs": [4], "activations": ["relu"]}),
        'mlp_param.activations[0]: expected one of "Relu", "None", got "relu"; did you mean "Relu"?',
    ),
    "mlp with a number as bias": (
        layer("MLP", "rows", mlp_param={"num_outputs": [4], "biases": [1]}),
        "mlp_param.biases[0]: expected one of true, false, got 1",
    ),
    "mlp with one activation and many": (
        layer("MLP", "rows", mlp_param={"num_outputs": [4], "activation": "Relu", "activations": ["Relu"]}),
        "mlp_param.activations: expected either activation or activations",
    ),
    "weight multiply of other slots": (
        layer("WeightMultiply", "rows", weight_dims=[4, 3]),
        "weight_dims: 4 slots, but the bottom [B, 6] has 6 columns",
    ),
    "weight multiply of three sizes": (
        layer("Multiply", "rows", weight_dims=[6, 3, 1]),
        "weight_dims: expected two sizes, slots and vector, got 3",
    ),
    "weight multiply of three dimensions": (
        layer("WeightMultiply", "emb", weight_dims=[4, 3]),
        "bottom: expected a tensor of two dimensions, got [B, 4, 3]",
    ),
    "interaction of other widths": (
        layer("Interaction", ["rows", "emb"]),
        "bottom: expected [B, D] and [B, S, D], a vector and an embedding with the same columns, got [B, 6] and [B, 4",
    ),
    "interaction the other way around": (layer("Interaction", ["emb", "rows"]), "bottom: expected [B, D] and"),
    "factorization of parts of a vector": (
        layer("FmOrder2", "rows", out_dim=4),
        "out_dim: expected a divisor of 6, the bottom's columns, got 4",
    ),
    "product of two batches": (
        layer("MatrixMultiply", ["rows", "wide"]),
        "bottom: [B, 6] and [B, 8] fit only for one number of samples",
    ),
    "product that does not fit": (
        layer("MatrixMultiply", ["emb", "other"]),
        "bottom: expected [..., m, n] and [..., n, k], got [B, 4, 3] and [B, 4, 5]",
    ),
    "product of three and two dimensions": (
        layer("MatrixMultiply", ["emb", "rows"]),
        "bottom: expected as many dimensions, or two and three, got [B, 4, 3] and [B, 6]",
    ),
    "sub of three": (layer("Sub", ["rows"] * 3), "bottom: expected exactly 2, got 3"),
    "sub of other shapes": (layer("Sub", ["rows", "wide"]), "bottom: shapes [B, 6] and [B, 8] differ"),
    "sub of other rows": (layer("Sub", ["joined", "pair"]), "bottom: shapes [4B, 3] and [B, 2, 3] differ"),
    "multiply of other shapes": (layer("ElementwiseMultiply", ["rows", "wide"]), "bottom: shapes [B, 6] and [B, 8]"),
    "elu without alpha": (layer("ELU", "rows", elu_param={}), "elu_param.alpha: missing"),
    "batch norm of three dimensions": (
        layer("BatchNorm", "emb", bn_param={"factor": 0.9, "eps": 1e-5}),
        "bottom: expected a tensor of two dimensions, got [B, 4, 3]",
    ),
    "batch norm of another factor": (
        layer("BatchNorm", "rows", bn_param={"factor": 1.5}),
        "bn_param.factor: expected a number from 0 to 1, got 1.5",
    ),
    "batch norm without an epsilon": (
        layer("BatchNorm", "rows", bn_param={"eps": 0}),
        "bn_param.eps: expected a number above 0 and below 1, got 0.0",
    ),
    "batch norm with an unknown initializer": (
        layer("BatchNorm", "rows", bn_param={"gamma_init": "One"}),
        'bn_param.gamma_init: expected one of "Default", "Uniform", "XavierNorm", "XavierUniform", "Zero", got "One"',
    ),
    "layer norm with text": (
        layer("LayerNorm", "rows", ln_param={"eps": "1e-5"}),
        'ln_param.eps: expected a number, got "1e-5"',
    ),
    "dice with two alphas": (
        layer("PReLU_Dice", "rows", prelu_dice_param={"alpha": 0.2, "elu_alpha": 0.2, "eps": 1e-8}),
        "prelu_dice_param.elu_alpha: expected either alpha or elu_alpha",
    ),
    "dice of two epsilons": (
        layer("PReLU_Dice", "rows", prelu_dice_param={"alpha": 0.2, "eps": 1e-8, "epsilon": 1e-8}),
        "prelu_dice_param.epsilon: expected either eps or epsilon",
    ),
    "dice of a large epsilon": (
        layer("PReLU_Dice", "rows", prelu_dice_param={"alpha": 0.2, "epsilon": 1}),
        "prelu_dice_param.epsilon: expected a number above 0 and below 1, got 1",
    ),
    "product element by element of other shapes": (
        layer("DotProduct", ["rows", "wide"]),
        "bottom: shapes [B, 6] and [B, 8] differ",
    ),
    "dice of three dimensions": (
        layer("PReLU_Dice", "emb", prelu_dice_param={"alpha": 0.2}),
        "bottom: expected a tensor of two dimensions, got [B, 4, 3]",
    ),
    "softmax with another mask": (
        layer("Softmax", ["heads", "emb"]),
        "bottom: expected a mask that broadcasts to the scores [B, 2, 4, 3], got [B, 4, 3]",
    ),
    "softmax with a factor of text": (layer("Softmax", "rows", factor="1"), 'factor: expected a number, got "1"'),
    "mask of several lengths": (
        layer("SequenceMask", "rows", max_sequence_len=4),
        "bottom: expected lengths of shape [B, 1], got [B, 6]",
    ),
    "mask of one length for two sides": (
        layer("SequenceMask", "one", max_sequence_len_from=4, max_sequence_len_to=4),
        "bottom: expected max_sequence_len and one bottom, or max_sequence_len_from and _to and two",
    ),
    "mask of both forms": (
        layer("SequenceMask", "one", max_sequence_len=4, max_sequence_len_to=4),
        "max_sequence_len: leave the other length keys out",
    ),
    "mask without a length": (layer("SequenceMask", ["one", "one"]), "max_sequence_len_from: missing"),
    "attention of two tensors": (
        layer("MultiHeadAttention", ["emb", "emb"]),
        "bottom: expected queries, keys and values of three dimensions, got [B, 4, 3], [B, 4, 3]",
    ),
    "attention of other widths": (
        layer("MultiHeadAttention", ["emb", "other", "other"]),
        "bottom: expected [B, F, H*D], [B, T, H*D] and [B, T, H*D], got [B, 4, 3], [B, 4, 5], [B, 4, 5]",
    ),
    "attention of heads that do not divide": (
        layer("MultiHeadAttention", ["emb"] * 3, num_attention_heads=2),
        "num_attention_heads: expected a divisor of 3, the columns, got 2",
    ),
    "attention with another mask": (
        layer("MultiHeadAttention", ["emb"] * 3 + ["heads"]),
        "bottom: expected a mask that broadcasts to the scores [B, 1, 4, 4], got [B, 2, 4, 3]",
    ),
    "attention scores with a mask": (
        layer("MultiHeadAttention", ["emb"] * 3 + ["heads"], ["a", "b"]),
        "bottom: two tops, scores and values, need three bottoms, got 4",
    ),
    "attention of three split tensors": (
        layer("MultiHeadAttention", ["heads"] * 3),
        "bottom: expected exactly 2 bottoms of four dimensions, got 3",
    ),
    "attention of two split tensors into two": (
        layer("MultiHeadAttention", ["heads"] * 2, ["a", "b"], transpose_b=True),
        "top: expected exactly 1, got 2",
    ),
    "attention values that do not fit": (
        layer("MultiHeadAttention", ["heads"] * 2),
        "bottom: expected [B, H, F, T] and [B, H, T, D], got [B, 2, 4, 3], [B, 2, 4, 3]",
    ),
    "attention of four and three dimensions": (
        layer("MultiHeadAttention", ["heads", "emb"], transpose_b=True),
        "bottom: expected a tensor of four dimensions, got [B, 4, 3]",
    ),
    "attention with a number for a truth value": (
        layer("MultiHeadAttention", ["heads"] * 2, transpose_b=1),
        "transpose_b: expected one of true, false, got 1",
    ),
    "reshape to rows of parts of samples": (
        layer("Reshape", "emb", leading_dim=13),
        "leading_dim: the bottom [B, 4, 3] has 12 floats per row, which cannot be divided into rows of 13",
    ),
    "reshape of rows into larger ones": (
        layer("Reshape", "joined", leading_dim=24),
        "leading_dim: the bottom [4B, 3] has 3 floats per row, which cannot be divided into rows of 24",
    ),
    "reshape with another time step": (
        layer("Reshape", "emb", leading_dim=12, time_step=2),
        "leading_dim: the bottom [B, 4, 3] has 12 floats per row, which cannot be divided into rows of 2 x 12",
    ),
    "reshape of two kinds": (
        layer("Reshape", "emb", leading_dim=12, selected=[0]),
        "leading_dim: expected leading_dim, with or without time_step, or selected, or shape",
    ),
    "reshape to a time step of unknown width": (
        layer("Reshape", "emb", time_step=2),
        "leading_dim: expected leading_dim, with or without time_step, or selected, or shape",
    ),
    "reshape to a slot too far": (
        layer("Reshape", "emb", selected=[3, 4]),
        "selected: expected numbers below 4, the bottom's slots, got 4",
    ),
    "reshape to no slots": (layer("Reshape", "emb", selected=[]), "selected: expected a list, got an empty list"),
    "reshape of a matrix to slots": (
        layer("Reshape", "rows", selected=[0]),
        "bottom: expected a tensor of three dimensions, got [B, 6]",
    ),
    "reshape to a fixed number of rows": (
        layer("Reshape", "emb", shape=[4, 3]),
        "shape: expected -1, then sizes from 1, got [4, 3]",
    ),
    "reshape to unknown columns": (layer("Reshape", "emb", shape=[-1, -1]), "shape: expected -1, then sizes from 1"),
    "select of samples": (layer("Select", "emb", dim=0, index=[0]), "dim: expected an integer from 1"),
    "select beyond the last dimension": (
        layer("Select", "emb", dim=3, index=[0]),
        "dim: expected a dimension below 3, got 3",
    ),
    "select of a row too far": (
        layer("Select", "emb", dim=2, index=[0, 3]),
        "index: expected numbers below 3, the bottom's size in dimension 2, got 3",
    ),
    "gather of nothing": (layer("Gather", "rows", indices=[]), "indices: expected a list, got an empty list"),
    "gather of a negative row": (layer("Gather", "rows", indices=[-1]), "indices[0]: expected an integer from 0"),
    "scale by half": (
        layer("Scale", "rows", scale_param={"axis": 0, "factor": 1.5}),
        "scale_param.factor: expected an integer, got 1.5",
    ),
    "scale along depth": (
        layer("Scale", "rows", scale_param={"axis": 2, "factor": 2}),
        "scale_param.axis: expected one",
    ),
    "scale of three dimensions": (
        layer("Scale", "emb", scale_param={"axis": 0, "factor": 2}),
        "bottom: expected a tensor of two dimensions, got [B, 4, 3]",
    ),
    "joining other slots": (
        layer("FusedReshapeConcat", ["emb", "pair"], ["a", "b"]),
        "bottom: shapes [B, 4, 3] and [B, 2, 3] differ outside axis 2",
    ),
    "joining one slot": (
        layer("FusedReshapeConcat", ["single"], ["a", "b"]),
        "bottom: expected at least two slots: the last slot and others, got [B, 1, 3]",
    ),
    "joining into one top": (layer("FusedReshapeConcat", ["emb", "emb"]), "top: expected exactly 2, got 1"),
    "joining matrices": (
        layer("FusedReshapeConcatGeneral", ["rows", "wide"]),
        "bottom: expected a tensor of three dimensions, got [B, 6]",
    ),
    "sum along an axis too far": (layer("ReduceSum", "rows", axis=2), "axis: expected an axis below 2, got 2"),
    "mean along a negative axis": (layer("ReduceMean", "rows", axis=-1), "axis: expected an integer from 0"),
    "concat of other rows": (
        layer("Concat", ["joined", "rows"]),
        "bottom: shapes [4B, 3] and [B, 6] differ outside axis 1",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), REJECTED.values(), ids=REJECTED.keys())
def test_a_wrong_layer_is_refused_and_the_place_is_named(wrong, message):
    with pytest.raises(ConfigError, match="^" + pattern_of(f"graph.json: {PLACE}.{message}")):
        parse_graph({"layers": [*INPUTS, wrong]}, "graph.json")


def test_the_layers_above_are_right():
    product = layer("InnerProduct", "rows", "logits", fc_param={"num_output": 1})

    graph = parse_graph({"layers": [*INPUTS, product, layer("Sigmoid", "logits")]}, "graph.json")

    assert graph.label_dim == 1
