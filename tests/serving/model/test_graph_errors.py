"""Every wrong graph is refused, and the message names the place."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.model.graph import parse_graph
from tests.serving.model.layer_places import pattern_of
from tests.serving.model.odd_documents import with_odd_value

DATA, EMBEDDING, RESHAPE, CONCAT, SLICE, CROSS, FC1, RELU, DROPOUT, CONCAT2, FC2, LOSS = range(12)


def put(*place, value):
    """Return an edit that sets the value at ``place`` under layers. The value ``...`` deletes it."""

    def edit(document):
        node = document["layers"]
        for step in place[:-1]:
            node = node[step]
        if value is ...:
            del node[place[-1]]
        else:
            node[place[-1]] = value

    return edit


REJECTED = {
    "misspelt key of a parameter block": (
        put(FC1, "fc_param", value={"num_outputs": 8}),
        "layers[6].fc_param.num_outputs: unknown key; did you mean 'num_output'?",
    ),
    "unknown key of a layer": (
        put(RELU, "slope", value=1),
        "layers[7].slope: unknown key; expected one of bottom, name, top, type",
    ),
    "misspelt key of Data": (put(DATA, "sparce", value=[]), "layers[0].sparce: unknown key; did you mean 'sparse'?"),
    "unknown key of the label": (put(DATA, "label", "dim", value=1), "layers[0].label.dim: unknown key"),
    "unknown key of a sparse input": (put(DATA, "sparse", 0, "slots", value=1), "layers[0].sparse[0].slots: unknown"),
    "second plan of an embedding": (
        put(EMBEDDING, "plan_file1", value="all2all_plan.json"),
        "layers[1].plan_file1: HugeCTR reads only plan_file; remove this key, or call it plan_file",
    ),
    "unknown key of an embedding": (
        put(EMBEDDING, "tops", value="a"),
        "layers[1].tops: unknown key; did you mean 'top'?",
    ),
    "unknown key of the table": (
        put(EMBEDDING, "sparse_embedding_hparam", "vec_size", value=1),
        "layers[1].sparse_embedding_hparam.vec_size: unknown key; did you mean 'embedding_vec_size'?",
    ),
    "unknown key of the loss": (put(LOSS, "scale", value=1), "layers[11].scale: unknown key"),
    "unknown layer type": (put(RELU, "type", value="LSTM"), "layers[7].type: layer type LSTM is not supported"),
    "recurrent layer": (
        put(RELU, "type", value="GRU"),
        "layers[7].type: layer type GRU is not supported: its weights are one block in a layout that only cuDNN knows",
    ),
    "misspelt layer type": (
        put(RELU, "type", value="InnerProdukt"),
        "layers[7].type: layer type InnerProdukt is not supported; did you mean InnerProduct?",
    ),
    "missing layer type": (put(RELU, "type", value=...), "layers[7].type: missing"),
    "missing bottom": (put(RELU, "bottom", value=...), "layers[7].bottom: missing"),
    "missing parameter block": (put(FC1, "fc_param", value=...), "layers[6].fc_param: missing"),
    "missing parameter": (put(FC1, "fc_param", value={}), "layers[6].fc_param.num_output: missing"),
    "missing vector size": (
        put(EMBEDDING, "sparse_embedding_hparam", "embedding_vec_size", value=...),
        "layers[1].sparse_embedding_hparam.embedding_vec_size: missing",
    ),
    "vectors longer than a host table takes": (
        put(EMBEDDING, "sparse_embedding_hparam", "embedding_vec_size", value=65_537),
        "layers[1].sparse_embedding_hparam.embedding_vec_size: expected an integer from 1 to 65536, got 65537",
    ),
    "default value beyond float32": (
        put(EMBEDDING, "sparse_embedding_hparam", "default_emb_vec_value", value=1e39),
        "layers[1].sparse_embedding_hparam.default_emb_vec_value: expected a number within float32, got 1e+39",
    ),
    "missing combiner": (
        put(EMBEDDING, "sparse_embedding_hparam", "combiner", value=...),
        "layers[1].sparse_embedding_hparam.combiner: missing",
    ),
    "text for an integer": (
        put(FC1, "fc_param", "num_output", value="8"),
        'layers[6].fc_param.num_output: expected an integer, got "8"',
    ),
    "float for an integer": (put(FC1, "fc_param", "num_output", value=8.0), "expected an integer, got 8.0"),
    "truth value for an integer": (put(FC1, "fc_param", "num_output", value=True), "expected an integer, got true"),
    "null for an integer": (put(FC1, "fc_param", "num_output", value=None), "expected an integer, got null"),
    "zero outputs": (put(FC1, "fc_param", "num_output", value=0), "expected an integer from 1 to 2147483647, got 0"),
    "negative outputs": (put(FC1, "fc_param", "num_output", value=-8), "expected an integer from 1"),
    "more outputs than an int32 counts": (put(FC1, "fc_param", "num_output", value=2**31), "to 2147483647, got"),
    "list for an object": (put(FC1, "fc_param", value=[8]), "layers[6].fc_param: expected an object, got a list"),
    "number for a name": (put(RELU, "bottom", value=7), "layers[7].bottom: expected a name, got 7"),
    "empty name": (put(RELU, "name", value=""), 'layers[7].name: expected a name, got ""'),
    "no bottoms": (put(CONCAT, "bottom", value=[]), "layers[3].bottom: expected at least one name"),
    "object among the bottoms": (put(CONCAT, "bottom", value=["dense", {}]), "layers[3].bottom[1]: expected a name"),
    "bottom that no layer makes": (
        put(RELU, "bottom", value="fc_1"),
        "layers[7].bottom: no layer above makes 'fc_1'; did you mean 'fc1'?",
    ),
    "bottom made only later": (
        put(FC1, "bottom", value="concat2"),
        "layers[6].bottom: no layer above makes 'concat2'; there is a cycle: fc1 <- concat2 <- dropout1 <- relu1",
    ),
    "bottom of a layer further down": (
        put(CROSS, "bottom", value="relu1"),
        "layers[5].bottom: no layer above makes 'relu1'; layers[7] below makes it, but layers must be in the order",
    ),
    "layer that reads itself": (
        put(RELU, "bottom", value="relu1"),
        "layers[7].bottom: no layer above makes 'relu1'; there is a cycle: relu1 <- relu1",
    ),
    "bottom and top exchanged": (
        put(RELU, value={"type": "ReLU", "bottom": "rectified", "top": "fc1"}),
        "layers[7].bottom: no layer above makes 'rectified', but its top 'fc1' is made above: are bottom and top",
    ),
    "label as a bottom": (put(RELU, "bottom", value="label"), "'label' is an input that a ReLU layer cannot read"),
    "keys as a bottom": (put(RELU, "bottom", value="data1"), "'data1' is an input that a ReLU layer cannot read"),
    "top made twice": (
        put(RELU, "top", value="fc1"),
        "layers[7].top: the tensor 'fc1' is made twice, first by layers[6]",
    ),
    "top that hides an input": (put(RELU, "top", value="dense"), "layers[7].top: the tensor 'dense' is made twice"),
    "two tops of one name": (put(SLICE, "top", value=["a", "a"]), "layers[4].top: the tensor 'a' is made twice"),
    "dense input called as the label": (
        put(DATA, "dense", "top", value="label"),
        "layers[0].dense.top: the tensor 'label' is made twice",
    ),
    "embedding named like Data": (put(EMBEDDING, "name", value="data"), "layers[1].name: two layers are called"),
    "table name with a slash": (put(EMBEDDING, "name", value="../x"), "layers[1].name: a table's name has letters"),
    "embedding that reads no sparse input": (
        put(EMBEDDING, "bottom", value="dense"),
        "layers[1].bottom: expected a sparse input (data1), got 'dense'",
    ),
    "misspelt combiner": (
        put(EMBEDDING, "sparse_embedding_hparam", "combiner", value="maen"),
        'combiner: expected one of 0, 1, "sum", "mean", "sqrtn", got "maen"; did you mean "mean"?',
    ),
    "truth value as combiner": (put(EMBEDDING, "sparse_embedding_hparam", "combiner", value=True), "got true"),
    "misspelt sparse type": (
        put(DATA, "sparse", 0, "type", value="DistributedSlots"),
        'layers[0].sparse[0].type: expected one of "DistributedSlot", "LocalizedSlot", got "DistributedSlots"',
    ),
    "misspelt initializer": (
        put(FC1, "fc_param", "weight_init", value="XavierNormal"),
        'got "XavierNormal"; did you mean "XavierNorm"?',
    ),
    "number as is_fixed_length": (put(DATA, "sparse", 0, "is_fixed_length", value=1), "expected one of true, false"),
    "text as default vector": (
        put(EMBEDDING, "sparse_embedding_hparam", "default_emb_vec_value", value="0"),
        'default_emb_vec_value: expected a number, got "0"',
    ),
    "no slots": (put(DATA, "sparse", 0, "slot_num", value=0), "layers[0].sparse[0].slot_num: expected an integer"),
    "negative dense features": (put(DATA, "dense", "dense_dim", value=-1), "dense_dim: expected an integer from 0"),
    "no sparse inputs": (put(DATA, "sparse", value=[]), "layers[0].sparse: expected a list of objects"),
    "both key limits": (
        put(DATA, "sparse", 0, "nnz_per_slot", value=1),
        "layers[0].sparse[0]: expected either max_feature_num_per_sample or nnz_per_slot",
    ),
    "no key limit": (put(DATA, "sparse", 0, "max_feature_num_per_sample", value=...), "expected either"),
    "key limits for other slots": (
        put(DATA, "sparse", 0, value={"top": "data1", "slot_num": 4, "nnz_per_slot": [1, 2]}),
        "layers[0].sparse[0].nnz_per_slot: expected 4 numbers, one per slot, got 2",
    ),
    "wrong key limit of a slot": (
        put(DATA, "sparse", 0, value={"top": "data1", "slot_num": 1, "nnz_per_slot": [0]}),
        "layers[0].sparse[0].nnz_per_slot[0]: expected an integer from 1",
    ),
    "wrong max_nnz": (put(DATA, "sparse", 0, "max_nnz", value="2"), "max_nnz: expected an integer"),
    "sparse inputs of one name": (
        put(DATA, "sparse", value=[{"top": "data1", "slot_num": 1, "nnz_per_slot": 1}] * 2),
        "layers[0].sparse: two sparse inputs have the same top",
    ),
    "sparse input that no layer reads": (
        put(
            DATA,
            "sparse",
            value=[{"top": top, "slot_num": 4, "nnz_per_slot": 1} for top in ("data1", "data2")],
        ),
        "layers[0].sparse[1].top: no embedding reads 'data2'",
    ),
    "concat of one": (put(CONCAT, "bottom", value="reshape1"), "layers[3].bottom: expected at least 2, got 1"),
    "concat of other ranks": (
        put(CONCAT, "bottom", value=["embedding1", "dense"]),
        "layers[3].bottom: shapes [B, 4, 3] and [B, 2] differ outside axis 1",
    ),
    "concat over samples": (put(CONCAT, "axis", value=0), "layers[3].axis: expected an integer from 1"),
    "concat beyond the last axis": (put(CONCAT, "axis", value=2), "layers[3].axis: expected an axis below 2, got 2"),
    "ranges for other tops": (
        put(SLICE, "ranges", value=[[0, 14]]),
        "layers[4].ranges: expected a list of 2 ranges, one per top, got 1",
    ),
    "range without a list": (put(SLICE, "ranges", value=[[0, 14], 14]), "layers[4].ranges[1]: expected [begin, end]"),
    "range of three": (put(SLICE, "ranges", value=[[0, 14, 1], [0, 14]]), "layers[4].ranges[0]: expected [begin, end]"),
    "range beyond the columns": (
        put(SLICE, "ranges", value=[[0, 14], [0, 15]]),
        "layers[4].ranges[1]: expected begin < end <= 14, the bottom's columns, got [0, 15]",
    ),
    "empty range": (put(SLICE, "ranges", value=[[0, 14], [3, 3]]), "layers[4].ranges[1]: expected begin < end"),
    "negative range": (put(SLICE, "ranges", value=[[-1, 3], [0, 14]]), "layers[4].ranges[0][0]: expected an integer"),
    "no ranges": (put(SLICE, "ranges", value=...), "layers[4].ranges: missing"),
    "no cross layers": (put(CROSS, "mc_param", "num_layers", value=0), "layers[5].mc_param.num_layers: expected"),
    "negative projection": (put(CROSS, "mc_param", "projection_dim", value=-1), "projection_dim: expected an integer"),
    "cross of three dimensions": (
        put(CROSS, "bottom", value="embedding1"),
        "layers[5].bottom: expected a tensor of two dimensions, got [B, 4, 3]",
    ),
    "two bottoms for a product": (
        put(FC1, "bottom", value=["dense", "slice12"]),
        "layers[6].bottom: expected exactly 1",
    ),
    "two tops for a product": (put(FC1, "top", value=["a", "b"]), "layers[6].top: expected exactly 1, got 2"),
    "dropout of everything": (put(DROPOUT, "rate", value=1), "layers[8].rate: expected a number from 0 to below 1"),
    "dropout of text": (put(DROPOUT, "rate", value="half"), 'layers[8].rate: expected a number, got "half"'),
    "add of other shapes": (
        put(CONCAT2, value={"type": "Add", "bottom": ["fc1", "dense"], "top": "concat2"}),
        "layers[9].bottom: shapes [B, 8] and [B, 2] differ",
    ),
    "output of another width": (
        put(FC2, "fc_param", "num_output", value=2),
        "layers[11].bottom: expected shape [B, 1] from label_dim, got [B, 2]",
    ),
    "loss without a label": (put(LOSS, "bottom", value="fc2"), "layers[11].bottom: expected exactly 2, got 1"),
    "loss on another label": (
        put(LOSS, "bottom", value=["fc2", "dense"]),
        "layers[11].bottom: expected the label 'label' second, got 'dense'",
    ),
    "label without a top": (put(DATA, "label", "top", value=...), "layers[0].label.top: missing; the loss needs it"),
    "other last layer": (
        put(LOSS, value={"type": "Slice", "bottom": "fc2", "top": ["a", "b"], "ranges": [[0, 1], [0, 1]]}),
        "layers[11].top: the last layer must have one top, got 2",
    ),
    "unknown last layer": (put(LOSS, "type", value="HingeLoss"), "layers[11].type: layer type HingeLoss is not"),
    "first layer is not Data": (put(DATA, "type", value="Dada"), "layers[0].type: the first layer must be Data"),
    "layer that is not an object": (put(RELU, value="ReLU"), 'layers[7]: expected an object, got "ReLU"'),
}


@pytest.mark.parametrize(("edit", "message"), REJECTED.values(), ids=REJECTED.keys())
def test_a_wrong_graph_is_refused_and_the_place_is_named(document, edit, message):
    edit(document)

    with pytest.raises(ConfigError, match=pattern_of(message)) as caught:
        parse_graph(document, "graph.json")

    assert str(caught.value).startswith("graph.json: layers")


def test_a_product_of_no_columns_is_refused(document):
    document["layers"][DATA]["dense"]["dense_dim"] = 0
    document["layers"][FC1]["bottom"] = "dense"

    with pytest.raises(ConfigError, match=pattern_of("layers[4].ranges[0]: expected begin < end <= 12")):
        parse_graph(document, "graph.json")

    document["layers"][SLICE]["ranges"] = [[0, 12], [0, 12]]
    with pytest.raises(ConfigError, match=pattern_of("layers[6].bottom: the tensor has no columns")):
        parse_graph(document, "graph.json")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        pytest.param([], "graph.json: expected an object, got an empty list", id="list"),
        pytest.param({}, "graph.json: layers: missing", id="no-layers"),
        pytest.param({"layers": []}, "graph.json: layers: expected a list of objects, got an empty list", id="empty"),
        pytest.param({"layers": {}}, "graph.json: layers: expected a list of objects, got an object", id="object"),
        pytest.param({"layer": []}, "graph.json: layer: unknown key; did you mean 'layers'?", id="misspelt"),
    ],
)
def test_a_document_without_layers_is_refused(document, message):
    with pytest.raises(ConfigError, match=pattern_of(message)):
        parse_graph(document, "graph.json")


def test_a_message_names_the_layer_and_its_place(document):
    document["layers"][SLICE]["name"] = "slice1"
    del document["layers"][RELU]["top"], document["layers"][SLICE]["bottom"]

    with pytest.raises(ConfigError, match=r'graph\.json: layers\[4\] "slice1"\.bottom: missing'):
        parse_graph(document, "graph.json")


def test_data_without_other_layers_is_not_a_graph(document):
    del document["layers"][1:]

    with pytest.raises(ConfigError, match=r"graph\.json: layers: expected more layers after Data"):
        parse_graph(document, "graph.json")


ODD_VALUES = [None, True, 0, 1, -1, 2.5, 2**40, "", "dense", "concat1", [], {}, ["dense"], [[0, 1]], {"top": "dense"}]


@settings(deadline=None, max_examples=133)
@given(data=st.data())
def test_a_graph_with_any_odd_value_is_either_read_or_refused(base_document, data):
    document = data.draw(with_odd_value([base_document], ODD_VALUES))

    with suppress(ConfigError):
        graph = parse_graph(document, "graph.json")
        assert graph.output in graph.shapes


def test_a_graph_with_thousands_of_labels_and_losses_is_read(document):
    layers = document["layers"]
    logits = layers[LOSS]["bottom"][0]
    names = [f"label{number}" for number in range(2000)]
    layers[DATA]["label"] = {"top": names, "label_dim": [1] * len(names)}
    layers[LOSS:] = [
        {"type": "BinaryCrossEntropyLoss", "bottom": [logits, name], "top": f"loss_of_{name}"} for name in names
    ]

    assert parse_graph(document, "graph.json").label_dim == 2000


def test_a_cycle_of_thousands_of_layers_is_named(document):
    count = 5000
    chain = [{"type": "ReLU", "bottom": f"t{(place + 1) % count}", "top": f"t{place}"} for place in range(count)]
    document["layers"][RELU:RELU] = chain

    with pytest.raises(ConfigError, match=r"no layer above makes 't1'; there is a cycle: t0 <- t1 <- t2 .*t0$"):
        parse_graph(document, "graph.json")


def test_a_layer_type_of_a_million_letters_is_refused_in_one_line(document):
    document["layers"][RELU]["type"] = "R" * 1_000_000

    with pytest.raises(ConfigError, match=r"type: expected a name of at most 4,096 characters, got 1,000,000$"):
        parse_graph(document, "graph.json")
