"""Requests that say once what samples share get the bits of the requests that repeat it for each sample."""

import json
import struct
from contextlib import ExitStack, closing

import numpy as np
import pyarrow.parquet as pq
import pytest
import tritonclient.http
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

import hotrow
from serving.errors import RequestError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.opening import Runtime
from serving.outputs import refuse_not_finite
from serving.protocol.ctr import batch_of, signature_of
from serving.protocol.infer import InferDecoder
from serving.protocol.messages import MessageDecoder, read_message
from serving.repository import ModelRepository
from serving.request_log import RequestLog
from tests.serving.frontend.app_client import Client
from tests.tools.tiny_model import NamedModel, TinyModel

USERS, ITEMS, AGES = ["u1", "u2", "Zürich", None, ""], [1, 2, 3, 900, 2000, None], [0.5, 1, 2.25]
RAW = TinyModel(tables={"both": 4, "user_only": 1, "item_only": 2, "spread": 2, "crossed": 1}, dense_dim=2, rows=1000)
ITEM = {"kind": "identity", "offset": 303, "size": 3000}  # the table has keys below 1000, so some are unknown
FEATURES = [
    {"name": "user", "kind": "hash", "buckets": 300, "slot": "both[0]"},
    {"name": "item", **ITEM, "slot": "both[1]", "missing": 7},
    {"name": "country", "kind": "vocabulary", "values": ["de", "fr"], "slot": "both[2]", "offset": 300},
    {"name": "clicked", **ITEM, "slot": "both[3]", "shares": "item", "list": {"most": 3, "keep": "last"}},
    {"name": "tags", "kind": "hash", "buckets": 900, "slot": "user_only", "list": {}},
    {"name": "brand", "kind": "hash", "buckets": 900, "slot": "item_only[0]"},
    {
        "name": "hour",
        "kind": "bucketize",
        "type": "integer",
        "boundaries": [6, 18],
        "slot": "item_only[1]",
        "offset": 900,
    },
    {"name": "steps", "kind": "identity", "size": 900, "slot": "spread[0:2]", "list": {"most": 2, "keep": "first"}},
    {"name": "crossed", "kind": "cross", "of": ["user", "item"], "buckets": 999},
    {"name": "age", "kind": "dense", "missing": 3},
    {"name": "price", "kind": "dense", "log1p": True},
]
VALUES = {
    "user": st.sampled_from(USERS),
    "item": st.sampled_from(ITEMS),
    "country": st.sampled_from(["de", "fr", "xx", None]),
    "clicked": st.lists(st.sampled_from([1, 2, 3, 2500]), max_size=5),
    "tags": st.lists(st.sampled_from(["a", "bb", ""]), max_size=3),
    "brand": st.sampled_from(["x", "y", None]),
    "hour": st.sampled_from([3, 12, 23, None]),
    "steps": st.lists(st.integers(0, 899), max_size=3),
    "age": st.sampled_from([*AGES, None]),
    "price": st.sampled_from(AGES),
}
SLOTS = ("user", "item", "clicked", "last")
NAMED_VALUES = {
    "user": st.lists(st.integers(0, 1200), max_size=3),
    "item": st.lists(st.integers(0, 1200), min_size=1, max_size=2),
    "clicked": st.lists(st.integers(0, 1200), max_size=3),
    "last": st.lists(st.integers(0, 1200), max_size=1),
    "age": st.sampled_from(AGES),
    "price": st.sampled_from(AGES),
}


NAMED = NamedModel(tables={"person": 2, "thing": 1, "last": 1}, dense_dim=2, names=SLOTS, dense_names=("age", "price"))


MOST = 100
CONTEXT = {"user": [3, 4], "last": [2000], "age": 0.5, "clicked": []}
ITEMS_OF_USER = [{"item": [number, number + 1], "price": number / 4} for number in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A repository of two models."""
    folder = tmp_path_factory.mktemp("models")
    version = RAW.write(folder, "raw")
    (version / "manifest.json").unlink()
    (version / "features.json").write_text(json.dumps({"format": 1, "features": FEATURES}))
    NAMED.write(folder, "named")
    return folder


@pytest.fixture(scope="module")
def client(folder):
    with ModelRepository(folder, Runtime(max_candidates=MOST)) as models:
        models.load()
        yield Client(create_app(FrontEnd(models)))


@pytest.fixture(scope="module")
def sessions(folder):
    """Sessions by kind of the model and engine."""
    with ExitStack() as opened:
        yield {
            (kind, engine): opened.enter_context(hotrow.load_model(folder / kind, engine=engine))
            for kind in ("raw", "named")
            for engine in ("numpy", "onnx")
        }


@st.composite
def requests(draw, values):
    """A request with counts, or None; its columns, some of which have fewer rows; and the same columns for each."""
    has_counts = draw(st.booleans())
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) if has_counts else [draw(st.integers(1, 5))]
    samples, users = sum(counts), len(counts)
    rows = {1: [0] * samples, users: np.repeat(np.arange(users), counts).tolist(), samples: list(range(samples))}
    shared, expanded = {}, {}
    for name, of_feature in values.items():
        if name not in ("price", "age") and draw(st.integers(0, 5)) == 0:
            continue  # absent
        size = draw(st.sampled_from(sorted({1, users, samples}) if has_counts else [1, samples]))
        shared[name] = draw(st.lists(of_feature, min_size=size, max_size=size))
        expanded[name] = [shared[name][row] for row in rows[size]]
    if not has_counts and all(len(column) < samples for column in shared.values()):
        shared["price"] = expanded["price"]
    return counts if has_counts else None, shared, expanded


def test_an_answer_that_is_not_finite_names_a_list_over_several_slots_only_if_it_has_no_key(sessions):
    session = sessions["raw", "numpy"]
    given = {"user": USERS[:1], "country": ["de"], "clicked": [[1]], "tags": [["a"]], "brand": ["x"], "hour": [3]}
    batch = session.read({**given, "item": [2, 3], "price": [1.0, 1.0], "steps": [[5], []]})
    for sample, why in ((0, "its dense"), (1, "the sample has no key in 'steps', and")):
        values = np.zeros((2, 1), np.float32)
        values[sample] = np.nan
        with pytest.raises(RequestError, match=rf"sample {sample}: .* not a finite number: {why}"):
            refuse_not_finite(values, session.outputs, batch, session.config, session.features)


@pytest.mark.parametrize("engine", ["numpy", "onnx"])
@pytest.mark.parametrize(("kind", "values"), [("raw", VALUES), ("named", NAMED_VALUES)], ids=["raw", "named"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_answer_has_the_bits_of_the_expanded_request(sessions, kind, values, engine, data):
    session = sessions[kind, engine]
    counts, shared, expanded = data.draw(requests(values))

    batch = session.read(shared if counts is None else {**shared, "CANDIDATES": counts})
    wanted = session.read(expanded)

    answers = [session.predict_batch(one) for one in (batch, wanted)]
    assert answers[0].values.tobytes() == answers[1].values.tobytes()
    assert_same_samples(batch.expanded(), wanted)
    assert batch.joined.keys.size <= wanted.joined.keys.size


def assert_same_samples(batch, other):
    assert batch.dense.tobytes() == other.dense.tobytes()
    for (keys, row_ptrs), (other_keys, other_row_ptrs) in zip(batch.tables, other.tables, strict=True):
        assert (keys.tolist(), row_ptrs.tolist()) == (other_keys.tolist(), other_row_ptrs.tolist())


def binary_body(columns, counts, integers):
    """Columns as binary tensors, with null as the empty text, 0 or NaN; and the length of the JSON part."""
    tensors = {}
    for name, values in columns.items():
        if isinstance(values[0], list):
            lengths = [len(row) for row in values]
            tensors[f"{name}.offsets"] = np.cumsum([0, *lengths], dtype=np.int32)
            values = [value for row in values for value in row]
        if name in ("user", "country", "tags", "brand") and not any(isinstance(value, int) for value in values):
            tensors[name] = [(value or "").encode() for value in values]
        elif name in ("age", "price"):
            tensors[name] = np.array([np.nan if value is None else value for value in values], np.float32)
        else:
            tensors[name] = np.array([value or 0 for value in values], integers)
    if counts is not None:
        tensors["CANDIDATES"] = np.array(counts, np.int32)
    inputs, tail = [], b""
    for name, values in tensors.items():
        is_text = isinstance(values, list)
        data = b"".join(struct.pack("<I", len(text)) + text for text in values) if is_text else values.tobytes()
        datatype = "BYTES" if is_text else {"float32": "FP32"}.get(values.dtype.name, values.dtype.name.upper())
        parameters = {"binary_data_size": len(data)}
        inputs.append({"name": name, "datatype": datatype, "shape": [len(values)], "parameters": parameters})
        tail += data
    head = json.dumps({"inputs": inputs}).encode()
    return head + tail, str(len(head))


@pytest.mark.parametrize(("kind", "values"), [("raw", VALUES), ("named", NAMED_VALUES)], ids=["raw", "named"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_body_is_read_in_native_code_as_its_tensors_are_one_by_one(sessions, kind, values, data):
    session = sessions[kind, "numpy"]
    counts, shared, _ = data.draw(requests(values))
    body = binary_body(shared, counts, data.draw(st.sampled_from([np.int64, np.int32, np.uint32])))
    inputs = InferDecoder(signature_of(session.config, session.features)).decode(*body).inputs

    def outcome(given):
        try:
            batch = batch_of(session.config, given, session.features, MOST)
        except RequestError as err:
            return str(err)
        bags = None if batch.bags is None else [None if bag is None else bag.tolist() for bag in batch.bags]
        return batch.dense.tobytes(), batch.joined.keys.tolist(), batch.joined.row_ptrs.tolist(), bags

    assert outcome(inputs) == outcome(dict(inputs))


def expanded_columns(context=CONTEXT, candidates=ITEMS_OF_USER):
    samples = [{**context, **candidate} for candidate in candidates]
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def test_a_document_in_python_and_over_http_is_the_expanded_request(sessions, client):
    document, session = {"context": CONTEXT, "candidates": ITEMS_OF_USER}, sessions["named", "onnx"]
    samples = [{**CONTEXT, **candidate} for candidate in ITEMS_OF_USER]
    answers = [client.post("/predict/named", json=body).json() for body in (document, {"samples": samples})]

    assert session.predict(document).tobytes() == session.predict(expanded_columns()).tobytes()
    assert answers[0]["predictions"] == answers[1]["predictions"]
    assert (answers[0]["defaulted_keys"], answers[1]["defaulted_keys"]) == (1, 5)  # as sent


def tensors_of_users():
    """Two users with 2 and 3 candidates: values by name, the lists as values and offsets."""
    return {
        "user": ("INT64", [3, 4, 5]),
        "user.offsets": ("INT32", [0, 1, 3]),
        "item": ("INT64", [1, 2, 3, 4, 5]),
        "last": ("INT64", [7]),
        "age": ("FP32", [0.5, 2.0]),
        "price": ("FP32", [1, 2, 3, 4, 5]),
        "CANDIDATES": ("INT32", [2, 3]),
    }


EXPANDED_USERS = {
    "user": [[3], [3], [4, 5], [4, 5], [4, 5]],
    "item": [[1], [2], [3], [4], [5]],
    "last": [[7]] * 5,
    "age": [0.5, 0.5, 2.0, 2.0, 2.0],
    "price": [1, 2, 3, 4, 5],
}
COLUMNS_OF_USERS = {
    "user": [[3], [4, 5]],
    "item": [[1], [2], [3], [4], [5]],
    "last": [[7]],
    "age": [0.5, 2.0],
    "price": [1, 2, 3, 4, 5],
    "CANDIDATES": [2, 3],
}
DTYPES = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_over_http_have_the_candidates_of_several_users(sessions, client, binary):
    inputs = []
    for name, (datatype, values) in tensors_of_users().items():
        tensor = tritonclient.http.InferInput(name, [len(values)], datatype)
        tensor.set_data_from_numpy(np.array(values, DTYPES[datatype]), binary_data=binary)
        inputs.append(tensor)
    output = tritonclient.http.InferRequestedOutput("OUTPUT0", binary_data=False)
    body, length = tritonclient.http.InferenceServerClient.generate_request_body(inputs, [output])
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    answer = client.ask("POST", "/v2/models/named/infer", content=body, headers=headers).json()

    wanted = sessions["named", "onnx"].predict(EXPANDED_USERS)
    assert np.array(answer["outputs"][0]["data"], np.float32).tolist() == wanted.reshape(-1).tolist()


def test_tensors_over_grpc_have_the_candidates_of_several_users(sessions):
    session, message = sessions["named", "numpy"], service_pb2.ModelInferRequest(model_name="named")
    for name, (datatype, values) in tensors_of_users().items():
        message.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        message.raw_input_contents.append(np.array(values, DTYPES[datatype]).tobytes())
    decoder = MessageDecoder(signature_of(session.config, session.features))
    inputs = decoder.decode(read_message(message.SerializeToString())).inputs

    batch = batch_of(session.config, inputs, session.features, session.max_candidates)
    assert session.predict_batch(batch).values.tobytes() == session.predict(EXPANDED_USERS).tobytes()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"CANDIDATES": []}, "CANDIDATES: expected a count for each user, got none"),
        ({"CANDIDATES": [5, 0]}, "CANDIDATES: expected counts of 1 to 4096, got 0 at position 1"),
        ({"CANDIDATES": [-1, 6]}, "CANDIDATES: expected counts of 1 to 4096, got -1 at position 0"),
        ({"CANDIDATES": [2, 2**40]}, f"CANDIDATES: expected counts of 1 to 4096, got {2**40} at position 1"),
        ({"CANDIDATES": [4000, 97]}, "CANDIDATES: 4097 candidates, but the model takes at most 4096"),
        ({"CANDIDATES": [2, 2]}, "price: expected 2 or 4 samples, got 5; CANDIDATES adds up to 4"),
        ({"CANDIDATES": [2, 2, 1]}, "user: expected 3 or 5 samples, got 2; CANDIDATES adds up to 5"),
        ({"CANDIDATES": [2.5, 2.5]}, "CANDIDATES: expected integers, got a value of type float at position 0"),
        ({"CANDIDATES": 5}, "CANDIDATES: expected a list or an array, got a value of type int"),
        ({"price": [1, 2, 3]}, "price: expected 2 or 5 samples, got 3; CANDIDATES adds up to 5"),
        ({"price": []}, "price: expected a value for each sample, got none"),
        ({"age": None}, "age: expected a list with a value for each sample, got None"),
        ({"user": [[2**63 - 1], [3]]}, f"user of user 0: value 0: the key is reserved, got {2**63 - 1}"),
        ({"last": [[1, 2**63 - 1]]}, f"last of sample 0: value 1: the key is reserved, got {2**63 - 1}"),
    ],
)
def test_counts_and_columns_that_do_not_fit_are_refused(sessions, changed, message):
    columns = {"user": [[3], [4, 5]], "last": [[7]], "age": [0.5], "item": [[1]] * 5, "price": [1, 2, 3, 4, 5]}
    with pytest.raises(RequestError) as refused:
        sessions["named", "numpy"].predict({**columns, "CANDIDATES": [2, 3], **changed})
    assert str(refused.value) == message


def test_an_absent_number_of_the_user_is_an_error(sessions):
    with pytest.raises(RequestError, match="age of sample 0: is missing, and the feature has no value for missing"):
        sessions["named", "numpy"].predict({"user": [[3]], "item": [[1]] * 5, "price": [1, 2, 3, 4, 5]})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"context": CONTEXT}, "candidates: expected a list with the features of each candidate"),
        ({"candidates": ITEMS_OF_USER}, "context: expected the features that all candidates share, by name"),
        ({"context": [], "candidates": []}, "context: expected the features that all candidates share, by name"),
        ({"context": CONTEXT, "candidates": []}, f"candidates: 0 candidates, but the model takes 1 to {MOST}"),
        (
            {"context": CONTEXT, "candidates": ITEMS_OF_USER * 21},
            f"candidates: 105 candidates, but the model takes 1 to {MOST}",
        ),
        ({"context": CONTEXT, "candidates": [[]]}, "candidates[0]: expected the features of a candidate by name"),
        (
            {"context": CONTEXT, "candidates": ITEMS_OF_USER, "samples": []},
            "samples: expected context and candidates, and nothing else",
        ),
        (
            {"context": CONTEXT, "candidates": [*ITEMS_OF_USER, {"item": [], "age": 3, "price": 1}]},
            "candidates[5].age: is in context, too",
        ),
        (
            {"context": {**CONTEXT, "usr": 3}, "candidates": ITEMS_OF_USER},
            "context.usr: is not a feature; did you mean 'user'? If not, leave it out",
        ),
        (
            {"context": CONTEXT, "candidates": [*ITEMS_OF_USER, {"itm": 3, "price": 1}]},
            "candidates[5].itm: is not a feature; did you mean 'item'? If not, leave it out",
        ),
        (
            {"context": {**CONTEXT, "age": "old"}, "candidates": ITEMS_OF_USER},
            "context.age: expected a number, got 'old'",
        ),
        (
            {"context": CONTEXT, "candidates": [*ITEMS_OF_USER, {"item": [1, "x"], "price": 1}]},
            "candidates[5].item: value 1: expected an integer, got 'x'",
        ),
        (
            {"context": CONTEXT, "candidates": [*ITEMS_OF_USER, {"item": [1]}]},
            "candidates[5].price: is missing, and the feature has no value for missing",
        ),
        (
            {"context": {"user": [3]}, "candidates": ITEMS_OF_USER},
            "age: is missing, and the feature has no value for missing",
        ),
    ],
)
def test_a_document_of_another_form_is_refused_with_its_path(client, document, message):
    answer = client.post("/predict/named", json=document)
    assert (answer.status_code, answer.json()["error"]) == (400, message)


def test_candidates_without_a_context_are_refused_in_python_too(sessions):
    with pytest.raises(RequestError, match=r"^context: expected the features that all candidates share, by name$"):
        sessions["named", "numpy"].predict({"candidates": ITEMS_OF_USER})


def test_a_model_without_names_takes_no_context(tmp_path):
    TinyModel().write(tmp_path, "plain")
    with ModelRepository(tmp_path) as models:
        models.load()
        client = Client(create_app(FrontEnd(models)))
        answer = client.post("/predict/plain", json={"context": {}, "candidates": [{}]})
        names = [tensor["name"] for tensor in client.get("/v2/models/plain").json()["inputs"]]
    message = "context: the model's slots have no names, so each of the samples has its own keys"
    assert (answer.status_code, answer.json()["error"]) == (400, message)
    assert names == ["DES", "CATCOLUMN", "ROWINDEX"]


@pytest.mark.parametrize("device", ["cpu", "runner"])
def test_more_candidates_than_a_batch_has_are_answered_in_parts(folder, device):
    count, most = 150, NAMED.max_batchsize
    items, prices = [[number] for number in range(count)], [number / 4 for number in range(count)]

    def columns(users, part):
        context = {name: [value] * users for name, value in CONTEXT.items()}
        return {**context, "item": items[part], "price": prices[part]}

    with hotrow.load_model(folder / "named", device=device) as session:
        batch = session.read(columns(1, slice(count)))
        answer = session.predict_batch(batch)
        expanded = [
            session.predict(columns(min(most, count - begin), slice(begin, begin + most)))
            for begin in range(0, count, most)
        ]
        whole = columns(count, slice(count))
        of_whole = session.predict({**whole, "CANDIDATES": [count]})
        with pytest.raises(RequestError, match="150 samples, but the model takes 1 to 64"):
            session.predict(whole)
    assert answer.values.tobytes() == np.concatenate(expanded).tobytes() == of_whole.tobytes()
    assert (batch.samples, answer.defaulted_keys) == (count, 1)


def test_merged_requests_get_the_answers_that_they_get_alone(sessions):
    session = sessions["named", "numpy"]
    batches = [
        session.read({"context": CONTEXT, "candidates": ITEMS_OF_USER}),
        session.read(EXPANDED_USERS),
        session.read(COLUMNS_OF_USERS),
        session.read({**EXPANDED_USERS, "age": [3.0]}),
    ]
    together = session.predict_batches(batches)
    for prediction, batch in zip(together, batches, strict=True):
        alone = session.predict_batch(batch)
        np.testing.assert_allclose(prediction.values, alone.values, atol=1e-6)
        assert prediction.defaulted_keys == alone.defaulted_keys


@pytest.mark.parametrize(
    ("kind", "columns", "expanded"),
    [
        (
            "raw",
            {"user": ["u1", "ü"], "tags": [["a", "b"]], "item": [1, 2, None], "price": [1, 2, 3], "CANDIDATES": [1, 2]},
            {"user": ["u1", "ü", "ü"], "tags": [["a", "b"]] * 3, "item": [1, 2, None], "price": [1, 2, 3]},
        ),
        ("named", COLUMNS_OF_USERS, EXPANDED_USERS),
    ],
    ids=["raw features", "keys by name"],
)
def test_the_request_log_has_each_candidate_with_all_its_features(sessions, tmp_path, kind, columns, expanded):
    session, logged = sessions[kind, "numpy"], []
    for request in (columns, expanded):
        folder = tmp_path / str(len(logged))
        with closing(RequestLog(folder, 1.0, 1 << 30)) as log:
            batch = session.read(request)
            log.log(session, batch, session.predict_batch(batch), "a7")
        (file,) = folder.rglob("*.parquet")
        logged.append(pq.read_table(file).drop_columns(["request_time", "defaulted_keys"]))
    assert logged[0].num_rows == len(expanded["item"])
    assert logged[0].equals(logged[1])


def test_values_that_would_be_too_many_for_each_sample_are_refused_before_they_are_made(sessions):
    batch = sessions["raw", "numpy"].read({"clicked": [[1] * 20_000], "item": [1] * 900, "price": [1]})
    assert batch.samples == 900
    with pytest.raises(RequestError, match="repeated for each sample, one feature or table has 18,000,000 values"):
        batch.expanded()


def test_a_sample_has_no_more_keys_of_a_table_than_it_may_have(sessions):
    columns = {"user": [[1] * 20], "item": [[1] * 12, [1] * 13], "age": [1], "price": [1]}
    with pytest.raises(RequestError, match="sample 1 has 33 keys, but table 'person' takes at most 32 per sample"):
        sessions["named", "numpy"].predict(columns)
    assert len(sessions["named", "numpy"].predict({**columns, "item": [[1] * 12] * 2})) == 2
