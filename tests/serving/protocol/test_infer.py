"""KServe v2 infer: requests that are read, requests that are refused, and answers."""

import json

import numpy as np
import pytest

from serving.errors import RequestError
from serving.protocol.infer import InferDecoder, InferRequest, OutputRequest, encode_infer
from serving.protocol.tensors import Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(
        TensorSpec("DES", ("FP32",), (-1, 2)),
        TensorSpec("CATCOLUMN", ("INT64", "UINT32"), (-1,)),
        TensorSpec("ROWINDEX", ("INT32",), (-1,), optional=True),
    ),
    outputs=(TensorSpec("OUTPUT0", ("FP32",), (-1, 1)), TensorSpec("LOGITS", ("FP32",), (-1, 1))),
)


def tensor(name, datatype, shape, **rest):
    return {"name": name, "datatype": datatype, "shape": shape, **rest}


def des(data=(0.5, 1.5), shape=(1, 2), **rest):
    return tensor("DES", "FP32", list(shape), data=list(data), **rest)


def catcolumn(data=(7, 8), shape=(2,), datatype="INT64"):
    return tensor("CATCOLUMN", datatype, list(shape), data=list(data))


def decode(document, tail=b"", header_bytes="exact"):
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    if header_bytes == "exact":
        header_bytes = str(len(head)) if tail else None
    return InferDecoder(SIGNATURE).decode(head + tail, header_bytes)


def refused(document, tail=b"", header_bytes="exact"):
    with pytest.raises(RequestError) as caught:
        decode(document, tail, header_bytes)
    return str(caught.value)


def binary(name, datatype, shape, size):
    return tensor(name, datatype, shape, parameters={"binary_data_size": size})


class TestAcceptedRequests:
    def test_json_numbers_become_arrays_of_the_named_datatype(self):
        request = decode({"id": "a1", "inputs": [des(), catcolumn()]})

        assert request.id == "a1"
        assert request.inputs["DES"].dtype == np.float32
        assert request.inputs["DES"].tolist() == [[0.5, 1.5]]
        assert request.inputs["CATCOLUMN"].dtype == np.int64
        assert request.inputs["CATCOLUMN"].tolist() == [7, 8]

    def test_json_numbers_may_be_nested_like_the_shape(self):
        request = decode({"inputs": [des([[1, 2], [3, 4]], (2, 2)), catcolumn([[5, 6]], (1, 2))]})

        assert request.inputs["DES"].tolist() == [[1, 2], [3, 4]]
        assert request.inputs["CATCOLUMN"].tolist() == [[5, 6]]

    def test_int64_keys_above_2_to_53_keep_every_digit(self):
        request = decode({"inputs": [des(), catcolumn([2**63 - 3, -(2**63) + 2])]})

        assert request.inputs["CATCOLUMN"].tolist() == [2**63 - 3, -(2**63) + 2]

    @pytest.mark.parametrize("padding", range(8))
    def test_binary_tensors_follow_the_json_in_their_order_and_are_aligned(self, padding):
        dense, keys = np.array([[0.25, -1]], np.float32), np.array([2**40, 3], np.int64)
        document = {
            "id": "x" * padding,
            "inputs": [binary("DES", "FP32", [1, 2], 8), binary("CATCOLUMN", "INT64", [2], 16)],
        }

        inputs = decode(document, dense.tobytes() + keys.tobytes()).inputs

        assert (inputs["DES"] == dense).all()
        assert (inputs["CATCOLUMN"] == keys).all()
        assert inputs["CATCOLUMN"].flags.aligned

    def test_one_request_may_mix_json_and_binary_tensors(self):
        keys = np.array([4_000_000_000], np.uint32)

        inputs = decode({"inputs": [binary("CATCOLUMN", "UINT32", [1], 4), des()]}, keys.tobytes()).inputs

        assert inputs["CATCOLUMN"].dtype == np.uint32
        assert inputs["CATCOLUMN"].tolist() == [4_000_000_000]
        assert inputs["DES"].tolist() == [[0.5, 1.5]]

    def test_an_empty_tensor_has_no_numbers(self):
        assert decode({"inputs": [des([], (0, 2)), catcolumn([], (0,))]}).inputs["DES"].shape == (0, 2)

    def test_without_outputs_every_output_is_answered_as_the_request_parameter_says(self):
        inputs = [des(), catcolumn()]

        as_json = decode({"inputs": inputs}).outputs
        as_binary = decode({"inputs": inputs, "parameters": {"binary_data_output": True}}).outputs

        assert as_json == (OutputRequest("OUTPUT0", False), OutputRequest("LOGITS", False))
        assert as_binary == (OutputRequest("OUTPUT0", True), OutputRequest("LOGITS", True))

    def test_an_outputs_own_binary_data_wins_over_the_requests(self):
        outputs = [{"name": "LOGITS", "parameters": {"binary_data": False}}, {"name": "OUTPUT0"}]

        request = decode(
            {"inputs": [des(), catcolumn()], "outputs": outputs, "parameters": {"binary_data_output": True}}
        )

        assert request.outputs == (OutputRequest("LOGITS", False), OutputRequest("OUTPUT0", True))

    def test_parameters_of_other_extensions_are_left_alone(self):
        decode({"inputs": [des(parameters={"note": 1}), catcolumn()], "parameters": {"priority": 1}})


class TestRefusedRequests:
    @pytest.mark.parametrize(
        ("document", "expected"),
        [
            pytest.param(b"", "the body is not JSON", id="an empty body"),
            pytest.param(
                b'{"\xff": 1}', "the body is not JSON: not UTF-8: byte 2 is 0xff", id="bytes that are no text"
            ),
            pytest.param(b'{"inputs": [}', "the body is not JSON", id="broken JSON"),
            pytest.param(b'{"a": "\xc3\xa9", "b": [NaN]}', "(char 17); a missing value is null", id="not a number"),
            pytest.param(b"[" * 64, "the body is not JSON", id="lists without an end"),
            pytest.param(b"[1]", "must be a JSON object, but a list came", id="a list"),
            pytest.param({}, "inputs: missing", id="no inputs"),
            pytest.param({"inputs": [], "output": []}, "output: unknown; expected id, inputs, outputs", id="misspelt"),
            pytest.param({"inputs": [{"nam": "DES"}]}, "inputs[0].nam: unknown; expected data", id="misspelt input"),
            pytest.param(
                {"inputs": [des(), catcolumn()], "outputs": [{"name": "OUTPUT0", "binary": True}]},
                "outputs[0].binary: unknown; expected name, parameters",
                id="misspelt output",
            ),
            pytest.param({"inputs": 3}, "inputs: expected a list, but the number 3 came", id="inputs no list"),
            pytest.param({"inputs": [None]}, "inputs[0]: expected an object, but null came", id="an input no object"),
            pytest.param({"inputs": [{}]}, "inputs[0].name: missing", id="no name"),
            pytest.param({"inputs": [{"name": 5}]}, "inputs[0].name: expected a string", id="a name no string"),
            pytest.param({"id": 5, "inputs": []}, "id: expected a string", id="an id no string"),
            pytest.param({"inputs": [], "parameters": []}, "parameters: expected an object", id="parameters no object"),
            pytest.param(
                {"inputs": [], "parameters": {"binary_data_output": 1}},
                "parameters.binary_data_output: expected true or false, but the number 1 came",
                id="binary_data_output no boolean",
            ),
            pytest.param({"inputs": [des()]}, "inputs: missing 'CATCOLUMN'", id="a missing input"),
            pytest.param({"inputs": [des(), des()]}, "inputs[1].name: tensor 'DES' came twice", id="an input twice"),
        ],
    )
    def test_a_document_of_another_form(self, document, expected):
        assert expected in refused(document)

    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            pytest.param(
                tensor("DENSE", "FP32", [1]),
                "inputs[0].name: the model has no input 'DENSE'; it has 'DES', 'CATCOLUMN', 'ROWINDEX'",
                id="an unknown name",
            ),
            pytest.param(
                tensor("CATCOLUMN", "FP32", [1], data=[1]),
                "CATCOLUMN (inputs[0].datatype): expected INT64 or UINT32, but 'FP32' came",
                id="another datatype",
            ),
            pytest.param(tensor("DES", "FP32", 2), "DES (inputs[0].shape): expected a list", id="a shape no list"),
            pytest.param(
                tensor("DES", "FP32", []), "DES (inputs[0].shape): expected 1 to 8 extents", id="an empty shape"
            ),
            pytest.param(
                tensor("DES", "FP32", [-1]),
                "shape[0]): expected a whole number from 0 to 2147483647, but the number -1",
                id="-1 extent",
            ),
            pytest.param(
                tensor("DES", "FP32", [1, True]),
                "DES (inputs[0].shape[1]): expected a whole number from 0 to 2147483647, but true came",
                id="an extent no number",
            ),
            pytest.param(
                tensor("DES", "FP32", [2**31]), "DES (inputs[0].shape[0]): expected", id="an extent too large"
            ),
            pytest.param(
                tensor("DES", "FP32", [1]),
                "DES (inputs[0]): expected data or parameters.binary_data_size, but neither came",
                id="no data",
            ),
            pytest.param(
                des(parameters={"shared_memory_region": "r"}), "shared_memory_byte_size): missing", id="shared memory"
            ),
            pytest.param(
                des(parameters={"binary_data_size": 8}),
                "expected data or parameters.binary_data_size, but both came",
                id="data twice",
            ),
            pytest.param(
                des([1.0]), "DES (inputs[0].data): shape [1, 2] needs 2 numbers, but 1 came", id="too few numbers"
            ),
            pytest.param(des([1, 2, 3]), "needs 2 numbers, but 3 came", id="too many numbers"),
            pytest.param(des([1, None]), "DES (inputs[0].data[1]): expected a number, but null came", id="null"),
            pytest.param(
                des([1, "NaN"]), "DES (inputs[0].data[1]): expected a number, but a string came", id="a string"
            ),
            pytest.param(des([True, 1]), "DES (inputs[0].data[0]): expected a number, but true came", id="a boolean"),
            pytest.param(
                des([1, 1e39]), "DES (inputs[0].data[1]): 1e+39 is too large for a float32", id="beyond float32"
            ),
            pytest.param(
                des([1, [2]]), "DES (inputs[0].data[1]): expected a number, but a list came", id="half nested"
            ),
            pytest.param(
                des([[1], [2]]),
                "DES (inputs[0].data): the shape needs a list of 1, but a list of 2 came",
                id="other way",
            ),
            pytest.param(
                des([[1, 2, 3]]),
                "DES (inputs[0].data[0]): the shape needs a list of 2, but a list of 3 came",
                id="a longer list",
            ),
            pytest.param(
                des([[1, 2], 3], (2, 2)),
                "data[1]): the shape needs a list of 2, but the number 3 came",
                id="nested at first only",
            ),
            pytest.param(
                catcolumn([1, 2.5]),
                "CATCOLUMN (inputs[0].data[1]): expected a whole number from -9223372036854775808 to "
                "9223372036854775807, but the number 2.5 came",
                id="a fraction for a key",
            ),
            pytest.param(
                catcolumn([1, 2**63]), "CATCOLUMN (inputs[0].data[1]): 9223372036854775808 is not a int64", id="2^63"
            ),
            pytest.param(
                catcolumn([-(2**63) - 1, 1]),
                "expected a whole number from -9223372036854775808 to 9223372036854775807, but the number -9.22",
                id="-2^63-1",
            ),
            pytest.param(catcolumn([1, -1], datatype="UINT32"), "data[1]): -1 is not a uint32", id="-1 for UINT32"),
        ],
    )
    def test_a_tensor_of_another_form(self, entry, expected):
        assert expected in refused({"inputs": [entry]})

    @pytest.mark.parametrize("text", ["name", "datatype"])
    def test_text_that_a_client_made_up_is_cut_in_messages(self, text):
        assert len(refused({"inputs": [des() | {text: "x" * 100_000}]})) < 300

    @pytest.mark.parametrize("token", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
    def test_numbers_that_json_does_not_have(self, token):
        text = b'{"inputs": [{"name": "DES", "datatype": "FP32", "shape": [1], "data": [%s]}]}' % token

        assert "JSON" in refused(text) or "too large" in refused(text)

    @pytest.mark.parametrize(
        ("size", "tail", "expected"),
        [
            pytest.param(7, b"1234567", "shape [1, 2] of FP32 needs 8 bytes, but 7 are announced", id="short"),
            pytest.param(8, b"1234567", "DES (inputs[1]): 8 bytes are announced, but 7 are left", id="cut"),
            pytest.param(8, b"123456789", "1 bytes follow the last tensor's data", id="trailing bytes"),
            pytest.param(
                -8,
                b"",
                "DES (inputs[1].parameters.binary_data_size): shape [1, 2] of FP32 needs 8 bytes, but -8 are",
                id="negative",
            ),
            pytest.param("8", b"12345678", "binary_data_size): expected a whole number", id="a string"),
            pytest.param(
                True,
                b"12345678",
                "binary_data_size): expected a whole number of at most 64 bits, but true came",
                id="true",
            ),
        ],
    )
    def test_binary_data_of_another_length(self, size, tail, expected):
        document = {"inputs": [catcolumn(), binary("DES", "FP32", [1, 2], size)]}

        assert expected in refused(document, tail)

    @pytest.mark.parametrize("header", ["-1", "", "1.5", "abc", "²", "9" * 30, "1_0", " 2"])
    def test_a_header_length_that_is_not_a_number(self, header):
        assert "Inference-Header-Content-Length: expected a number of bytes" in refused(b"{}", header_bytes=header)

    def test_a_header_length_beyond_the_body(self):
        assert "Inference-Header-Content-Length: 3 bytes, but the body has 2" in refused(b"{}", header_bytes="3")

    def test_a_header_length_inside_the_json(self):
        assert "the body is not JSON" in refused({"inputs": [des(), catcolumn()]}, header_bytes="5")

    @pytest.mark.parametrize(
        ("outputs", "expected"),
        [
            pytest.param({}, "outputs: expected a list", id="outputs no list"),
            pytest.param(
                [{"name": "Y"}], "outputs[0].name: the model has no output 'Y'; it has 'OUTPUT0'", id="unknown"
            ),
            pytest.param([{"name": "OUTPUT0"}] * 2, "outputs[1].name: output 'OUTPUT0' is requested twice", id="twice"),
            pytest.param(
                [{"name": "OUTPUT0", "parameters": {"binary_data": "yes"}}],
                "outputs[0].parameters.binary_data: expected true or false",
                id="binary_data no boolean",
            ),
            pytest.param(
                [{"name": "OUTPUT0", "parameters": {"classification": 3}}],
                "outputs[0].parameters.classification: not supported",
                id="classification",
            ),
        ],
    )
    def test_outputs_that_cannot_be_answered(self, outputs, expected):
        assert expected in refused({"inputs": [des(), catcolumn()], "outputs": outputs})


class TestAnswers:
    PROBABILITIES = np.array([[0.25], [0.5]], np.float32)

    def encode(self, *outputs, request_id=""):
        request = InferRequest(request_id, {}, outputs, {})
        arrays = {"OUTPUT0": self.PROBABILITIES, "LOGITS": -self.PROBABILITIES}
        return encode_infer(request, "dcn", "3", arrays, {"defaulted_keys": 4})

    def test_json_answers_are_one_document(self):
        answer = self.encode(OutputRequest("OUTPUT0", False), request_id="r7")

        assert answer.json_bytes is None
        assert json.loads(answer.body) == {
            "model_name": "dcn",
            "model_version": "3",
            "id": "r7",
            "parameters": {"defaulted_keys": 4},
            "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [2, 1], "data": [0.25, 0.5]}],
        }

    def test_an_id_that_was_not_sent_is_not_answered(self):
        assert "id" not in json.loads(self.encode(OutputRequest("OUTPUT0", False)).body)

    def test_binary_answers_follow_the_document_in_the_order_asked(self):
        answer = self.encode(OutputRequest("LOGITS", True), OutputRequest("OUTPUT0", False))
        document, tail = json.loads(answer.body[: answer.json_bytes]), answer.body[answer.json_bytes :]

        assert [output["name"] for output in document["outputs"]] == ["LOGITS", "OUTPUT0"]
        assert document["outputs"][0]["parameters"] == {"binary_data_size": 8}
        assert "data" not in document["outputs"][0]
        assert document["outputs"][1]["data"] == [0.25, 0.5]
        assert np.frombuffer(tail, np.float32).tolist() == [-0.25, -0.5]


class TestRememberedHeads:
    """One decoder reads many requests; earlier requests must never affect later requests."""

    HEAD = json.dumps(
        {"inputs": [binary("DES", "FP32", [1, 2], 8), binary("CATCOLUMN", "INT64", [2], 16)]},
    ).encode()

    def decode(self, decoder, dense, keys, head=HEAD):
        return decoder.decode(head + np.float32(dense).tobytes() + np.int64(keys).tobytes(), str(len(head)))

    def test_the_same_json_part_with_other_bytes_makes_other_arrays(self):
        decoder = InferDecoder(SIGNATURE)

        first = self.decode(decoder, [1, 2], [3, 4])
        second = self.decode(decoder, [5, 6], [7, 8])

        assert (first.inputs["DES"].tolist(), first.inputs["CATCOLUMN"].tolist()) == ([[1, 2]], [3, 4])
        assert (second.inputs["DES"].tolist(), second.inputs["CATCOLUMN"].tolist()) == ([[5, 6]], [7, 8])

    @pytest.mark.parametrize("tail", [b"", bytes(23), bytes(25)])
    def test_a_known_json_part_does_not_excuse_bytes_of_another_length(self, tail):
        decoder = InferDecoder(SIGNATURE)
        self.decode(decoder, [1, 2], [3, 4])

        with pytest.raises(RequestError, match=r"are left|follow the last"):
            decoder.decode(self.HEAD + tail, str(len(self.HEAD)))

    def test_numbers_in_json_are_read_for_every_request(self):
        decoder = InferDecoder(SIGNATURE)
        body = json.dumps({"inputs": [des(), catcolumn()]}).encode()

        first = decoder.decode(body, None).inputs["DES"]
        first[:] = 0

        assert decoder.decode(body, None).inputs["DES"].tolist() == [[0.5, 1.5]]

    def test_memory_stays_bounded_whatever_clients_send(self):
        decoder = InferDecoder(SIGNATURE)
        for number in range(1000):
            head = self.HEAD.replace(b'{"inputs"', b'{"parameters": {"note": %d}, "inputs"' % number)
            assert self.decode(decoder, [1, 2], [number, 4], head).inputs["CATCOLUMN"][0] == number

        assert len(decoder._heads) <= 64
