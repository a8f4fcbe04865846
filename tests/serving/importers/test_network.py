import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto

from serving.errors import ConfigError, MissingExtraError, ModelFileError
from serving.importers.network import NetworkInput, read_network
from serving.model.records import Output


def run(content, *tensors):
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    [answer] = session.run(None, dict(zip((entry.name for entry in session.get_inputs()), tensors, strict=True)))
    return answer


TENSORS = [np.random.default_rng(1).normal(size=(2, *sizes)).astype(np.float32) for sizes in ((3,), (2, 4), (4,))]


def test_inputs_and_labels_are_read(network, sketch_of, tmp_path):
    assert read_network(network).inputs == (
        NetworkInput("dense", (3,)),
        NetworkInput("ads", (2, 4)),
        NetworkInput("users", (4,)),
    )
    assert read_network(network).label_dim == 1
    three = sketch_of({"ads": (2, 4)}, labels=3).write(tmp_path / "three.onnx")
    assert read_network(three).label_dim == 3
    flat = sketch_of({"ads": (2, 4)}).write(tmp_path / "flat.onnx", output_shape=["B"])
    assert read_network(flat).label_dim == 1


def test_weights_in_a_separate_file_are_included(sketch, tmp_path):
    path = tmp_path / "dense.onnx"
    onnx.save(sketch.model(), path, save_as_external_data=True, location="dense.onnx.data", size_threshold=0)
    assert (tmp_path / "dense.onnx.data").stat().st_size > 0

    answer = run(read_network(path).content(), *TENSORS)

    np.testing.assert_allclose(answer, sketch.probabilities(*TENSORS), atol=1e-6)


def test_weights_listed_as_inputs_are_not_inputs(sketch, tmp_path):
    model = sketch.model()
    weight = onnx.helper.make_tensor_value_info("weight", TensorProto.FLOAT, sketch.weight.shape)
    model.graph.input.append(weight)
    onnx.save(model, tmp_path / "old.onnx")

    assert [entry.name for entry in read_network(tmp_path / "old.onnx").inputs] == ["dense", "ads", "users"]


@pytest.mark.parametrize("taken", ["all", "probabilities"])
def test_logits_get_a_sigmoid_with_an_unused_name(sketch, tmp_path, taken):
    model = sketch.model(sigmoid=False)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [taken if name == "all" else name for name in names]
    onnx.save(model, tmp_path / "logits.onnx")

    answer = run(read_network(tmp_path / "logits.onnx", logits=True).content(), *TENSORS)

    np.testing.assert_allclose(answer, sketch.probabilities(*TENSORS), atol=1e-6)


@pytest.mark.parametrize("kind", ["Sigmoid", "HardSigmoid", "Softmax"])
@pytest.mark.parametrize("behind", [(), ("Identity",), ("Identity", "Flatten")], ids=len)
def test_logits_that_are_already_probabilities_are_refused(sketch, tmp_path, kind, behind):
    model = sketch.model()
    model.graph.node[-1].op_type = kind
    for number, op_type in enumerate(behind):
        output = model.graph.output[0].name
        model.graph.node.append(onnx.helper.make_node(op_type, [output], [f"same{number}"]))
        model.graph.output[0].name = f"same{number}"
    onnx.save(model, tmp_path / "dense.onnx")

    with pytest.raises(ModelFileError, match=rf"dense\.onnx: output '\w+' ends in a {kind}, .* remove --logits"):
        read_network(tmp_path / "dense.onnx", logits=True)
    assert read_network(tmp_path / "dense.onnx").label_dim == 1


def test_an_input_keeps_its_name_next_to_the_sigmoid(sketch_of, tmp_path):
    sketch = sketch_of({"probabilities": (2,)})
    path = sketch.write(tmp_path / "logits.onnx", sigmoid=False)

    network = read_network(path, logits=True)

    assert network.inputs == (NetworkInput("probabilities", (2,)),)
    np.testing.assert_allclose(
        run(network.content(), TENSORS[0][:, :2]), sketch.probabilities(TENSORS[0][:, :2]), atol=1e-6
    )


@pytest.mark.parametrize("logits", [False, True])
def test_inputs_that_no_node_reads_are_refused_by_name(sketch, tmp_path, logits):
    model = sketch.model(sigmoid=not logits)
    for name in ("clicks", "views"):
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 2]))
    onnx.save(model, tmp_path / "dense.onnx")

    with pytest.raises(ModelFileError, match=r"no node reads these inputs, .*: 'clicks', 'views'; remove them, or"):
        read_network(tmp_path / "dense.onnx", logits)


def test_an_input_that_is_the_output_itself_is_read(tmp_path):
    entry = onnx.helper.make_tensor_value_info("click_rate", TensorProto.FLOAT, ["B", 1])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "same", [entry], [entry])), tmp_path / "same.onnx")

    assert read_network(tmp_path / "same.onnx").inputs == (NetworkInput("click_rate", (1,)),)


@pytest.mark.filterwarnings("ignore")  # the exporter warns of its own libraries
@pytest.mark.parametrize(
    ("examples", "unread"),
    [
        ([torch.zeros(2, 16)] * 4, r": '\w+', '\w+', '\w+'; remove .* as in \[torch\.zeros\(2, 16\)\] \* 4"),
        ([torch.zeros(2, 16) for _ in range(4)], None),
    ],
    ids=["one tensor for all", "a tensor for each"],
)
@pytest.mark.usefixtures("exporter")
def test_an_export_that_merged_its_inputs_is_refused(tmp_path, examples, unread):
    class Sum(torch.nn.Module):
        def forward(self, ads, users, pages, hours):
            return torch.sigmoid((ads + 2 * users + 3 * pages + 4 * hours).sum(1, keepdim=True))

    path, names = tmp_path / "sum.onnx", ["ads", "users", "pages", "hours"]
    torch.onnx.export(Sum(), tuple(examples), path, input_names=names, dynamic_shapes=({0: "B"},) * 4, verbose=False)

    if unread is None:
        assert [entry.name for entry in read_network(path).inputs] == names
        return
    with pytest.raises(ModelFileError, match=f"no node reads these inputs, so they have no effect.*{unread}"):
        read_network(path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": TensorProto.FLOAT16}, r"input 'dense' is float16 \[B, 3\], expected float \[B, F\]"),
        ({"dtype": TensorProto.INT64}, r"input 'dense' is int64 \[B, 3\]"),
        ({"samples": 1}, r"input 'dense' is float \[1, 3\], expected a free number of samples"),
        ({"output_shape": ["B", "L"]}, r"output 'answer' is float \[B, L\], expected a free number .* fixed sizes"),
        ({"output_shape": ["B", 1, 1]}, r"output 'answer' is float \[B, 1, 1\], expected float \[B, L\]"),
        ({"output_shape": ["B", None]}, r"output 'answer' is float \[B, \?\], expected a free"),
    ],
    ids=str,
)
def test_a_network_of_another_form_is_refused(sketch, tmp_path, changes, expected):
    with pytest.raises(ModelFileError, match=expected):
        read_network(sketch.write(tmp_path / "dense.onnx", **changes))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("S", 4), r"input 'ads' is float \[B, S, 4\], expected a free number of samples and fixed sizes"),
        ((2, 2, 4), r"input 'ads' is float \[B, 2, 2, 4\], expected float \[B, F\], \[B, S, D\] or \[B, S \* D\]"),
        ((), r"input 'ads' is float \[B\], expected float"),
    ],
)
def test_an_input_of_another_shape_is_refused(sketch, tmp_path, sizes, expected):
    sketch.inputs = {"ads": sizes}

    with pytest.raises(ModelFileError, match=expected):
        read_network(sketch.write(tmp_path / "dense.onnx"))


@pytest.mark.parametrize("content", [b"", b"not protobuf", b"\x08\x08"])
def test_a_file_that_is_not_a_network_is_refused(tmp_path, content):
    (tmp_path / "dense.onnx").write_bytes(content)

    with pytest.raises(ModelFileError, match=r"dense\.onnx: "):
        read_network(tmp_path / "dense.onnx")


def test_a_name_that_is_not_text_is_refused(network):
    network.write_bytes(network.read_bytes().replace(b"dense", b"\xffense"))

    with pytest.raises(ModelFileError, match=r"input b'\\xffense': expected a name in UTF-8"):
        read_network(network)


def test_an_unknown_number_type_is_refused(sketch, tmp_path):
    model = sketch.model()
    model.graph.input[0].type.tensor_type.elem_type = 999
    (tmp_path / "odd.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(ModelFileError, match=r"input 'dense' is of type 999 \[B, 3\], expected float"):
        read_network(tmp_path / "odd.onnx")


def test_a_network_too_large_for_one_file_is_refused(network, monkeypatch):
    monkeypatch.setattr("serving.dense.onnx_file._LARGEST_BYTES", 100)

    with pytest.raises(ModelFileError, match=r"dense\.onnx: it has \d+ bytes; the limit of an ONNX file is 100"):
        read_network(network).content()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"absent\.onnx: cannot be read: No such file"):
        read_network(tmp_path / "absent.onnx")


def test_a_missing_weight_file_is_named(sketch, tmp_path):
    path = tmp_path / "dense.onnx"
    onnx.save(sketch.model(), path, save_as_external_data=True, location="dense.onnx.data", size_threshold=0)
    (tmp_path / "dense.onnx.data").unlink()

    with pytest.raises(ModelFileError, match=r"dense\.onnx.data"):
        read_network(path)


def test_without_onnx_the_extra_is_named(network, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)

    with pytest.raises(MissingExtraError, match=r"needs the package 'onnx': pip install 'hotrow\[onnx\]'"):
        read_network(network)


class TestSeveralOutputs:
    """Several outputs become the columns of one answer."""

    @pytest.fixture
    def path(self, sketch, tmp_path):
        return sketch.write(tmp_path / "dense.onnx", outputs=["answer", "logits"])

    def columns(self, sketch):
        probabilities = sketch.probabilities(*TENSORS)
        return probabilities, np.log(probabilities) - np.log1p(-probabilities)

    def test_all_are_probabilities_unless_their_kinds_are_given(self, path, sketch):
        network = read_network(path)

        assert network.outputs == (Output("answer", "probability", 1, 0), Output("logits", "probability", 1, 1))
        np.testing.assert_allclose(run(network.content(), *TENSORS), np.hstack(self.columns(sketch)), atol=1e-5)

    def test_the_outputs_with_a_kind_come_first_and_others_may_be_omitted(self, path, sketch):
        network = read_network(path, kinds={"logits": "score"})

        assert network.outputs == (Output("logits", "score", 1, 0), Output("answer", "probability", 1, 1))
        np.testing.assert_allclose(run(network.content(), *TENSORS), np.hstack(self.columns(sketch)[::-1]), atol=1e-5)
        alone = read_network(path, kinds={"logits": "score", "answer": "omit"})
        assert alone.outputs == (Output("logits", "score"),)
        np.testing.assert_allclose(run(alone.content(), *TENSORS), self.columns(sketch)[1], atol=1e-5)

    def test_only_probabilities_get_a_sigmoid(self, sketch, tmp_path):
        path = sketch.write(tmp_path / "logits.onnx", outputs=["all", "logits"], sigmoid=False)
        model = onnx.load(path)
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 3 + 8 + 4
        onnx.save(model, path)

        network = read_network(path, logits=True, kinds={"all": "vector", "logits": "probability"})

        answer = run(network.content(), *TENSORS)
        np.testing.assert_allclose(answer[:, -1:], sketch.probabilities(*TENSORS), atol=1e-6)
        assert answer[:, :-1].tobytes() == np.hstack([one.reshape(2, -1) for one in TENSORS]).tobytes()

    def test_a_kind_that_nobody_can_squash_is_refused_with_logits(self, path):
        with pytest.raises(ModelFileError, match="none of its outputs is a probability; remove --logits"):
            read_network(path, logits=True, kinds={"logits": "score", "answer": "score"})

    def test_one_probability_of_several_that_is_none_is_refused_as_logits(self, path):
        with pytest.raises(ModelFileError, match="output 'answer' ends in a Sigmoid, so its answers are not logits"):
            read_network(path, logits=True)

    @pytest.mark.parametrize(
        ("kinds", "reason"),
        [
            ({"logit": "score"}, "it has no output 'logit'; did you mean 'logits'?; it has 'answer', 'logits'"),
            (
                {"logits": "scores"},
                "'logits': expected one of probability, score, vector, omit, got 'scores'; did you mean",
            ),
            ({}, "expected a dictionary of names and kinds, got {}"),
            ({"logits": "score", "TOP_SCORE": "score"}, "the name 'TOP_SCORE' is reserved in answers"),
            ({"logits": "score", "OUTPUT0": "score"}, "OUTPUT0 has all columns, so there are no other outputs"),
        ],
    )
    def test_wrong_kinds_are_refused(self, path, kinds, reason):
        with pytest.raises(ConfigError) as caught:
            read_network(path, kinds=kinds)

        assert reason in str(caught.value)

    def test_a_network_without_outputs_is_refused(self, sketch, tmp_path):
        model = sketch.model()
        del model.graph.output[:]
        onnx.save(model, tmp_path / "none.onnx")

        with pytest.raises(ModelFileError, match="expected an output, found none"):
            read_network(tmp_path / "none.onnx")
