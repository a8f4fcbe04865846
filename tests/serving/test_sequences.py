"""Slots that are not pooled: the network gets a row for each key of a sequence, and a mask."""

import json

import numpy as np
import pytest

from serving.batch import join_batches
from serving.config import read_inference_config
from serving.errors import ConfigError, RequestError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.model.graph import parse_graph
from serving.opening import Runtime, load_model
from serving.outputs import refuse_not_finite
from serving.parameter_server import ParameterServer
from serving.protocol.samples import decode_samples
from serving.reading import read_batch
from serving.repository import ModelRepository
from serving.session import InferenceSession
from serving.storage import MemoryStore
from tests.serving.frontend.app_client import Client
from tests.serving.lookup.cached import cached, with_cache
from tests.tools.sequence_model import SequenceModel
from tests.tools.tiny_model import flatten

ROUNDING = {"rtol": 1e-5, "atol": 1e-6}
MODELS = {
    "padding at the end": SequenceModel(),
    "padding at the start": SequenceModel(padding="start"),
    "no mask": SequenceModel(masked=False),
    "two sequences of one table": SequenceModel(most={"goods": (2, 5), "user": (3,)}, seed=1),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS, scope="module")
def model(request):
    return request.param


@pytest.fixture(scope="module")
def session(model, tmp_path_factory):
    with load_model(model.write(tmp_path_factory.mktemp("models")).parent) as session:
        yield session


def named(model, dense, bags):
    """A request by name."""
    columns = {name: [slots[slot] for slots in bags] for slot, name in enumerate(model.names)}
    return columns | {f"n{number}": dense[:, number].tolist() for number in range(model.dense_dim)}


def test_the_network_gets_the_row_of_each_key(model, session):
    dense, bags = model.sample_requests(40)
    expected = model.probabilities(dense, bags)

    np.testing.assert_allclose(session.predict(dense, *flatten(bags)), expected, **ROUNDING)
    np.testing.assert_allclose(session.predict(named(model, dense, bags)), expected, **ROUNDING)
    samples = [{"dense": one.tolist(), "keys": slots} for one, slots in zip(dense, bags, strict=True)]
    batch = decode_samples(json.dumps({"samples": samples}).encode(), session.config).batch
    np.testing.assert_allclose(session.predict_batch(batch).values, expected, **ROUNDING)


@pytest.mark.parametrize("engine", ["numpy", "onnx", "int8"])
def test_each_engine_answers(model, tmp_path, engine):
    version = model.write(tmp_path)
    dense, bags = model.sample_requests(40)
    keys, row_ptrs = flatten(bags)
    (version / "manifest.json").unlink()
    np.savez(version / "calibration.npz", DES=dense, CATCOLUMN=keys, ROWINDEX=row_ptrs)
    expected = model.probabilities(dense, bags)
    more = {"tolerance": 0.05} if engine == "int8" else {}

    with load_model(version.parent, engine=engine, **more) as session:
        answers = session.predict(dense, keys, row_ptrs)

    np.testing.assert_allclose(answers, expected, **(dict(atol=0.05) if engine == "int8" else ROUNDING))


def test_a_device_answers(model, tmp_path, device):
    config = read_inference_config(model.write(tmp_path) / "graph.json", "tiny")
    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config)
        config = with_cache(config, kind="dynamic", size_ratio=0.5)
        with cached(server, config, device) as lookup, InferenceSession(config, lookup.device_id, lookup) as session:
            for seed in range(3):
                dense, bags = model.sample_requests(30, seed)
                answers = session.predict(dense, *flatten(bags))
                np.testing.assert_allclose(answers, model.probabilities(dense, bags), **ROUNDING)
            shared = named(model, dense, [bags[0]]) | {"item": [slots[1] for slots in bags]}
            shared |= {f"n{number}": dense[:, number].tolist() for number in range(model.dense_dim)}
            expanded = [[slots[0], own[1], slots[2]] for own in bags for slots in [bags[0]]]
            answers = session.predict(shared)
            np.testing.assert_allclose(answers, model.probabilities(dense, expanded), **ROUNDING)


def test_a_history_that_candidates_share_has_the_bits_of_one_that_is_repeated(model, session):
    dense, bags = model.sample_requests(12, seed=5)
    users = [bags[0], bags[1], bags[2]]
    counts = [5, 1, 6]
    expanded = [
        [user[0], own[1], user[2]]
        for user, own in zip(np.repeat(np.arange(3), counts), bags, strict=True)
        for user in [users[user]]
    ]
    shared = named(model, dense, expanded)
    shared |= {name: [user[slot] for user in users] for slot, name in ((0, "user"), (2, "seen"))}

    answers = session.predict({**shared, "CANDIDATES": counts})

    assert answers.tobytes() == session.predict(named(model, dense, expanded)).tobytes()
    np.testing.assert_allclose(answers, model.probabilities(dense, expanded), **ROUNDING)
    one_user = {**shared, "user": [users[0][0]], "seen": [users[0][2]]}
    answers = session.predict(one_user)
    again = [[users[0][0], own[1], users[0][2]] for own in expanded]
    np.testing.assert_allclose(answers, model.probabilities(dense, again), **ROUNDING)


def test_a_log_gets_the_keys_that_were_sent(model, session):
    dense, bags = model.sample_requests(6, seed=9)
    repeated = named(model, dense, [[bags[0][0], own[1], bags[0][2]] for own in bags])

    expanded = session.read({**repeated, "user": [bags[0][0]], "seen": [bags[0][2]]}).expanded()

    expected = session.read(repeated)
    for got, wanted in (
        *zip(expanded.tables, expected.tables, strict=True),
        *zip(expanded.sent.tables, expected.sent.tables, strict=True),
    ):
        assert [one.tolist() for one in got] == [one.tolist() for one in wanted]
    assert [of_table.row_ptrs.size - 1 for of_table in expanded.sent.tables] == [6, 12]
    assert expanded.dense.tobytes() == expected.dense.tobytes()


def test_an_answer_that_is_not_finite_names_the_empty_sequence(model, session):
    dense, _ = model.sample_requests(3)
    batch = session.read(named(model, dense, [[[1], [2], [3]], [[1], [2], []], [[1], [2], [3]]]))
    for sample, why in (
        (1, "the sample has no key in 'seen', and the network may divide by zero; or"),
        (2, "its dense"),
    ):
        values = np.zeros((3, 1), np.float32)
        values[sample] = np.nan
        with pytest.raises(RequestError, match=rf"sample {sample}: .* not a finite number: {why}"):
            refuse_not_finite(values, session.outputs, batch, session.config, session.features)


def test_merged_requests_are_answered_as_alone(model, session):
    requests = [model.sample_requests(count, seed=count) for count in (1, 7, 3)]
    batches = [read_batch(session.config, dense, *flatten(bags)) for dense, bags in requests]

    together = session.predict_batch(join_batches(batches)).values

    expected = np.concatenate([model.probabilities(dense, bags) for dense, bags in requests])
    np.testing.assert_allclose(together, expected, **ROUNDING)


def test_a_prediction_has_its_values_by_their_earlier_name_too(model, session):
    dense, bags = model.sample_requests(2)

    prediction = session.predict_batch(read_batch(session.config, dense, *flatten(bags)))

    assert prediction.probabilities is prediction.values


TOO_LONG = [[3], [1], [1, 2, 3, 4, 5]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with load_model(SequenceModel().write(tmp_path_factory.mktemp("plain")).parent) as session:
        yield session


def test_a_sequence_that_is_too_long_is_named(plain):
    dense, bags = np.zeros((2, 2), np.float32), [[[1], [2], []], TOO_LONG]
    message = "sample 1 has 5 keys in the sequence 'seen', at most 4 are allowed"

    with pytest.raises(RequestError, match=message):
        plain.predict(dense, *flatten(bags))
    samples = [{"dense": [0, 0], "keys": slots} for slots in bags]
    with pytest.raises(RequestError, match=message):
        decode_samples(json.dumps({"samples": samples}).encode(), plain.config)
    request = named(SequenceModel(), dense, bags)
    with pytest.raises(RequestError, match="seen of sample 1: has 5 values, but at most 4 are allowed"):
        plain.predict(request)
    with pytest.raises(RequestError, match="seen of sample 0: has 5 values, but at most 4 are allowed"):
        plain.predict({**request, "seen": [TOO_LONG[2]]})


def test_a_server_takes_sequences_by_name_and_names_a_longer_one(tmp_path):
    model = SequenceModel()
    model.write(tmp_path, "seen")
    context, candidates = {"user": [1], "seen": [3, 4], "n0": 0.5, "n1": 1}, [{"item": 5}, {"item": 6}]
    tensors = {"user": [1], "item": [5, 6], "seen": [3, 4], "seen.offsets": [0, 2], "n0": [0.5], "n1": [1.0]}
    types = {"seen.offsets": "INT32", "n0": "FP32", "n1": "FP32"}
    inputs = [
        {"name": name, "shape": [len(data)], "datatype": types.get(name, "INT64"), "data": data}
        for name, data in tensors.items()
    ]
    expected = model.probabilities([[0.5, 1]] * 2, [[[1], [5], [3, 4]], [[1], [6], [3, 4]]])

    with ModelRepository(tmp_path, Runtime()) as models:
        models.load()
        client = Client(create_app(FrontEnd(models)))
        answered = client.post("/predict/seen", {"context": context, "candidates": candidates}).json()
        by_name = client.post("/v2/models/seen/infer", {"inputs": inputs}).json()["outputs"][0]
        longer = client.post("/predict/seen", {"context": {**context, "seen": [1] * 5}, "candidates": candidates})

    np.testing.assert_allclose(answered["predictions"], expected, **ROUNDING)
    np.testing.assert_allclose(by_name["data"], expected[:, 0], **ROUNDING)
    assert longer.status_code == 400
    assert "context.seen: has 5 values, but at most 4 are allowed" in longer.json()["error"]


def test_features_cut_a_history_by_their_rule(tmp_path):
    model = SequenceModel(names=())
    version = model.write(tmp_path)
    (version / "manifest.json").unlink()
    kind = {"kind": "identity", "size": 50}
    features = [
        {"name": "user", **kind},
        {"name": "item", **kind, "slot": "goods[0]"},
        {"name": "seen", **kind, "slot": "goods[1]", "shares": "item", "list": {"most": 3, "keep": "last"}},
        {"name": "a", "kind": "dense"},
        {"name": "b", "kind": "dense"},
    ]
    (version / "features.json").write_text(json.dumps({"format": 1, "features": features}))
    given = {"user": [1, 2], "item": [3, None], "seen": [[4, 5, 6, 7, 8], []], "a": [0, 1], "b": [2, 0.5]}

    with load_model(version.parent) as session:
        answers = session.predict(given)

    bags = [[[1], [3], [6, 7, 8]], [[2], [], []]]
    np.testing.assert_allclose(answers, model.probabilities([[0, 2], [1, 0.5]], bags), **ROUNDING)
    features[2]["list"]["most"] = 5
    (version / "features.json").write_text(json.dumps({"format": 1, "features": features}))
    reason = r"features\[2\].list.most: 5, but the sequence 'goods\[1\]' of the model has at most 4 keys"
    with pytest.raises(ConfigError, match=reason):
        load_model(version.parent)


def data_layer(**changes):
    document = SequenceModel().graph()
    document["layers"][0]["sparse"][1]["sequence"] |= changes
    return document


REFUSED = {
    "no length": ({"most": 0}, "most: expected an integer from 1 to 65536, got 0"),
    "another number of slots": ({"most": [4]}, r"most: expected 2 numbers, one per slot and some of them not 0, got"),
    "no sequence": ({"most": [0, 0]}, "one per slot and some of them not 0, got [0, 0]"),
    "too long": ({"most": 10**6}, "most: expected an integer from 1 to 65536, got 1000000"),
    "padding": ({"padding": "left"}, "padding: expected one of"),
    "a mask with a taken name": ({"mask": "dense"}, "the tensor 'dense' is made twice"),
    "an unknown key": ({"length": 3}, "length: unknown key"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_sequence_is_refused(changes, message):
    with pytest.raises(ConfigError) as refused:
        parse_graph(data_layer(**changes), "graph.json")
    assert message in str(refused.value)


def test_sequences_of_two_tables_need_two_inputs():
    document = data_layer()
    second = {**document["layers"][2], "name": "again", "top": "again"}
    document["layers"].insert(3, second)

    with pytest.raises(ConfigError, match="two layers read the sequences of 'goods_keys'"):
        parse_graph(document, "graph.json")
