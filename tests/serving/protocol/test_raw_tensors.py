"""Raw features as KServe tensors: every carrier gives the bits of the same values in Python."""

import json
import secrets
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from serving.config import ModelConfig, TableConfig
from serving.errors import RequestError
from serving.features import FeatureReader, open_features
from serving.protocol.ctr import batch_of, signature_of
from serving.protocol.infer import InferDecoder
from serving.protocol.shared_memory import SharedMemory
from tests.serving.protocol.raw_tensors import decode_grpc, decode_http, raw_bytes

FEATURES = [
    {"name": "user", "kind": "hash", "buckets": 1000},
    {"name": "age", "kind": "bucketize", "type": "integer", "boundaries": [18, 40]},
    {"name": "tags", "kind": "hash", "buckets": 50, "list": {}},
    {"name": "is_new", "kind": "identity", "type": "boolean"},
    {"name": "price", "kind": "dense", "missing": 1},
]
SLOTS = ("user", "age", "tags", "is_new")
VALUES = {
    "user": ["u1", "Zürich", ""],
    "age": [17, 40, 99],
    "tags": [["a", "bb"], [], ["ccc"]],
    "is_new": [True, False, True],
    "price": [0.5, float("nan"), 3.25],
}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "features.json").write_text(json.dumps({"format": 1, "features": FEATURES}))
    tables = tuple(TableConfig(name=name, dim=4, slots=1, combiner="sum", file=Path("x")) for name in SLOTS)
    return ModelConfig(
        name="m",
        graph_file=tmp_path / "graph.json",
        dense_file=Path("d"),
        tables=tables,
        key_type="I64",
        max_batchsize=8,
        dense_dim=1,
        label_dim=1,
    )


@pytest.fixture
def shared_texts():
    """A region that has the tensor of users."""
    content, regions = raw_bytes(*tensors()["user"]), SharedMemory()
    path = Path("/dev/shm") / f"hotrow-test-{secrets.token_hex(8)}"
    path.write_bytes(content)
    regions.register("raw", f"/{path.name}", 0, len(content))
    yield regions, content
    regions.unregister()
    path.unlink()


@pytest.fixture
def reader(config):
    return open_features(config)


def tensors(**changed):
    """The name, the datatype and the array of each tensor."""
    given = {
        "user": ("BYTES", np.array([text.encode() for text in VALUES["user"]], object)),
        "age": ("INT64", np.array(VALUES["age"])),
        "tags": ("BYTES", np.array([text.encode() for text in chain(*VALUES["tags"])], object)),
        "tags.offsets": ("INT32", np.array([0, 2, 2, 3], np.int32)),
        "is_new": ("BOOL", np.array(VALUES["is_new"])),
        "price": ("FP32", np.array(VALUES["price"], np.float32)),
        **changed,
    }
    return {name: tensor for name, tensor in given.items() if tensor is not None}


def bits(batch):
    return batch.dense.tobytes(), [(keys.tolist(), row_ptrs.tolist()) for keys, row_ptrs in batch.tables]


def expected_bits(reader, values):
    found = reader(values, len(values["user"]))
    bags = [bag.tolist() for bag in np.split(found.keys, found.row_ptrs[1:-1])]
    tables = [bags[slot :: len(SLOTS)] for slot in range(len(SLOTS))]
    row_ptrs = [np.cumsum([0, *map(len, of_table)]).tolist() for of_table in tables]
    return found.dense.tobytes(), list(zip([list(chain(*of_table)) for of_table in tables], row_ptrs, strict=True))


CARRIERS = {
    "http binary": lambda *arguments: decode_http(*arguments, binary=True),
    "grpc raw": lambda *arguments: decode_grpc(*arguments, raw=True),
    "grpc contents": lambda *arguments: decode_grpc(*arguments, raw=False),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_carrier_gives_the_same_bits(config, reader, carrier):
    assert isinstance(reader, FeatureReader)
    assert bits(CARRIERS[carrier](config, reader, tensors())) == expected_bits(reader, VALUES)


def test_json_tensors_give_the_same_bits(config, reader):
    given = tensors(price=("FP32", np.array([0.5, 1, 3.25], np.float32)))
    assert bits(decode_http(config, reader, given, binary=False)) == expected_bits(reader, VALUES)


def test_a_tensor_in_shared_memory_gives_the_same_bits(config, reader, shared_texts):
    regions, content = shared_texts
    parameters = {"shared_memory_region": "raw", "shared_memory_byte_size": len(content)}
    others = [
        {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.tolist()}
        for name, (datatype, array) in tensors(user=None, tags=None, price=None).items()
        if name != "tags.offsets"
    ]
    user = {"name": "user", "datatype": "BYTES", "shape": [3], "parameters": parameters}
    decoder = InferDecoder(signature_of(config, reader), regions)
    request = decoder.decode(json.dumps({"inputs": [user, *others]}).encode(), None)
    values = {**VALUES, "tags": [[]] * 3, "price": [None] * 3}
    assert bits(batch_of(config, request.inputs, reader)) == expected_bits(reader, values)


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
def test_the_values_of_samples_may_be_in_a_row_or_a_column(config, reader, shape):
    given = {
        name: (datatype, array if name.startswith("tags") else array.reshape(shape))
        for name, (datatype, array) in tensors().items()
    }
    assert bits(decode_http(config, reader, given)) == expected_bits(reader, VALUES)


def test_a_list_of_fixed_length_needs_no_offsets(config, reader):
    tags = np.array([[b"a", b"b"], [b"c", b""], [b"d", b"e"]], object)
    given = {**tensors(tags=("BYTES", tags)), "tags.offsets": None}
    batch = decode_http(config, reader, {name: tensor for name, tensor in given.items() if tensor})
    assert bits(batch) == expected_bits(reader, {**VALUES, "tags": [["a", "b"], ["c"], ["d", "e"]]})


def test_texts_are_cut_into_lists_at_the_separator(config, tmp_path):
    features = [{**one, "list": {"separator": "|"}} if one["name"] == "tags" else one for one in FEATURES]
    (tmp_path / "features.json").write_text(json.dumps({"format": 1, "features": features}))
    reader = open_features(config)
    given = {**tensors(tags=("BYTES", np.array([b"a|bb", b"", b"ccc"], object))), "tags.offsets": None}
    given = {name: tensor for name, tensor in given.items() if tensor}
    for carrier in CARRIERS.values():
        assert bits(carrier(config, reader, given)) == expected_bits(reader, VALUES)


def test_absent_features_are_missing_and_integers_may_be_text(config, reader):
    given = {"age": ("BYTES", np.array([b"17", b"40.0", b""], object)), "user": ("INT64", np.array([5, -6, 7]))}
    values = {"user": [5, -6, 7], "age": [17, 40, None], "tags": [[]] * 3, "is_new": [None] * 3, "price": [None] * 3}
    assert bits(decode_http(config, reader, given)) == expected_bits(reader, values)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"CATCOLUMN": ("INT64", np.array([1]))}, "inputs: 'CATCOLUMN' and the raw feature 'user'; a request has keys"),
        (
            {
                **dict.fromkeys(("user", "age", "tags", "tags.offsets", "is_new", "price")),
                "CATCOLUMN": ("INT64", np.array([1])),
                "CANDIDATES": ("INT32", np.array([3], np.int32)),
            },
            "CANDIDATES: needs values by name, but 'CATCOLUMN' came",
        ),
        ({"tags": None}, "inputs: tags.offsets came without tags"),
        (
            {"tags.offsets": None},
            r"tags: expected the shape \[B, n\], or tags.offsets, because it is a list; got \[3\]",
        ),
        ({"tags.offsets": ("INT32", np.array([0, 2, 1, 3], np.int32))}, "tags.offsets: expected offsets from 0 to 3"),
        (
            {"tags.offsets": ("INT64", np.array([0, 2**63 - 1, -2, 3]))},  # their differences are not negative in int64
            "tags.offsets: expected offsets from 0 to 3",
        ),
        (
            {"tags": ("BYTES", np.empty((2**31 - 1, 0), object)), "tags.offsets": None},
            "tags: 2,147,483,647 samples, but the model takes at most 4,096",
        ),
        ({"tags.offsets": ("INT32", np.array([0, 4], np.int32))}, "tags.offsets: expected offsets from 0 to 3"),
        ({"age": ("INT64", np.array([1, 2]))}, "age: expected 3 samples, got 2"),
        (
            {"age": ("INT64", np.ones((3, 2), np.int64))},
            r"age: expected one value .* shape \[B\], \[B, 1\] or \[1, B\], got \[3, 2\]",
        ),
        (
            {"age": ("INT64", np.ones((3, 1), np.int64)), "is_new": ("BOOL", np.ones((1, 3), bool))},
            r"is_new: expected \[B\] or \[B, 1\], because age is \[3, 1\], got \[1, 3\]",
        ),
        (
            {
                "tags": ("BYTES", np.full((3, 2), b"a", object)),
                "tags.offsets": None,
                "age": ("INT64", np.ones((1, 3), np.int64)),
            },
            r"age: expected \[B\] or \[B, 1\], because tags is \[3, 2\], got \[1, 3\]",
        ),
        ({"age": ("BYTES", np.array([b"1", b"x", b"2"], object))}, "age of sample 1: expected an integer, got 'x'"),
        ({"age": ("FP32", np.array([1, 2, 3], np.float32))}, "age .*: expected INT64 or INT32 or .*, but 'FP32' came"),
        ({"user": ("BYTES", np.array([b"a", b"\xff", b"b"], object))}, "user of sample 1: expected text in UTF-8"),
        ({"userr": ("INT64", np.array([1]))}, "the model has no input 'userr'; it has "),
    ],
)
def test_a_wrong_tensor_is_named(config, reader, changed, text):
    with pytest.raises(RequestError, match=text):
        decode_http(config, reader, tensors(**changed))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_undefined_tensors_are_ignored_and_counted_if_the_definition_says_so(config, carrier):
    ignoring = {"format": 1, "unknown_features": "ignore", "features": FEATURES}
    config.graph_file.with_name("features.json").write_text(json.dumps(ignoring))
    reader = open_features(config)
    others = {"city": ("BYTES", np.array([b"x"], object)), "age.offsets": ("INT32", np.array([7], np.int32))}
    assert bits(CARRIERS[carrier](config, reader, others | tensors())) == expected_bits(reader, VALUES)
    assert [sample.value for sample in reader.readings(())] == [2]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\1\0\0\0", "needs 1 strings, but the bytes end after 0"),
        (b"\0\0\0\0x", "needs 1 strings, but more bytes follow"),
        (b"\xff\xff\xff\xffx", "needs 1 strings, but the bytes end after 0"),
        (b"", "needs 1 strings, but the bytes end after 0"),
    ],
)
def test_bytes_that_are_no_strings_are_refused(config, reader, data, text):
    head = {"name": "user", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [head]}).encode()
    decoder = InferDecoder(signature_of(config, reader))
    with pytest.raises(RequestError, match=f"user .inputs.0..: .*{text}"):
        decoder.decode(head + data, str(len(head)))


@pytest.mark.parametrize("data", [[1], ["a", None], "a", [["a"], "b"]])
def test_json_that_is_no_strings_is_refused(config, reader, data):
    shape = [len(data) if isinstance(data, list) else 1]
    body = json.dumps({"inputs": [{"name": "user", "datatype": "BYTES", "shape": shape, "data": data}]}).encode()
    with pytest.raises(RequestError, match=r"user .inputs"):
        InferDecoder(signature_of(config, reader)).decode(body, None)


def test_a_request_without_tensors_is_refused(config, reader):
    with pytest.raises(RequestError, match=r"inputs: expected CATCOLUMN or raw features: user, age, tags"):
        batch_of(config, {}, reader)
