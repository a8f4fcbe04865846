"""The best candidates of each user: ``top_k`` in Python and on every wire."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

import hotrow
from serving.batch import Batch, Top
from serving.errors import RequestError
from serving.model.records import Output
from serving.outputs import ranking
from serving.reading import read_batch
from tests.tools.tiny_model import TinyModel, flatten
from tests.tools.two_towers import AGE, PRICE, expected

ITEMS, PRICES = [7, 8, 9, 7, 12], [1.0, 2.0, 3.0, 1.0, 0.25]
#: The first and the fourth candidate are equal.
CONTEXT, CANDIDATES = {"user": 3, AGE: 0.5}, [{"item": i, PRICE: p} for i, p in zip(ITEMS, PRICES, strict=True)]
DOCUMENT = {"context": CONTEXT, "candidates": CANDIDATES}
SCORES = expected([3] * 5, ITEMS, [[0.5, price] for price in PRICES])
BEST = sorted(range(5), key=lambda at: -round(SCORES["score"][at, 0], 6))
TWO_USERS = {"user": [3, 4], AGE: [0.5, 1.0], "item": ITEMS, PRICE: PRICES, "CANDIDATES": [2, 3]}
OF_TWO = expected(
    [3, 3, 4, 4, 4], ITEMS, [[age, price] for age, price in zip([0.5] * 2 + [1.0] * 3, PRICES, strict=True)]
)
BEST_OF_TWO = [
    sorted(range(2), key=lambda at: -OF_TWO["score"][at, 0])[:2],
    sorted(range(3), key=lambda at: -OF_TWO["score"][2 + at, 0])[:2],
]


def test_the_best_candidates_of_one_user_come_best_first(session):
    best = session.rank(DOCUMENT, 4, "score")

    assert (best.index.dtype, best.score.dtype) == (np.int32, np.float32)
    assert best.index.tolist() == [BEST[:4]]
    assert best.index.tolist()[0].index(0) + 1 == best.index.tolist()[0].index(3)  # equal values keep their order
    np.testing.assert_allclose(best.score, SCORES["score"][BEST[:4], 0][None], rtol=1e-5)


def test_each_of_several_users_has_its_own_best_candidates(session):
    best = session.rank(TWO_USERS, 2, "score")

    assert best.index.tolist() == BEST_OF_TWO
    assert session.rank(session.read(TWO_USERS), 2, "score").index.tolist() == BEST_OF_TWO


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_the_order_is_that_of_pythons_stable_sort(data):
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    numbers = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 1e30])
    scores = np.array(data.draw(st.lists(numbers, min_size=sum(counts), max_size=sum(counts))), np.float32)
    k = data.draw(st.integers(1, min(counts)))
    batch = Batch(np.zeros((scores.size, 0), np.float32), [], counts=np.array(counts))

    found = ranking(np.stack([-scores, scores], axis=1), batch, Top(k, Output("score", "score", 1, 1)))

    users = np.split(scores, np.cumsum(counts)[:-1])
    best = [sorted(range(user.size), key=lambda at, user=user: -user[at])[:k] for user in users]
    assert found.index.tolist() == best
    assert found.score.tolist() == [user[of_user].tolist() for user, of_user in zip(users, best, strict=True)]


def test_a_model_with_one_number_needs_no_name_of_an_output(folder):
    tiny = TinyModel()
    dense, bags = tiny.sample_requests(6, seed=1)
    with hotrow.load_model(folder / "tiny") as session:
        batch = read_batch(session.config, dense, *flatten(bags))
        best = session.rank(batch, 3)
        assert session.rank(batch, 3, "OUTPUT0").index.tolist() == best.index.tolist()
    right = np.argsort(-tiny.probabilities(dense, bags)[:, 0], kind="stable")[:3]
    assert best.index.tolist() == [right.tolist()]


REFUSED = {
    "none": (0, "score", "top_k: expected a whole number from 1, got 0"),
    "below none": (-1, "score", "top_k: expected a whole number from 1, got -1"),
    "true": (True, "score", "top_k: expected a whole number from 1, got True"),
    "nothing": (None, "score", "top_k: expected a whole number from 1, got None"),
    "a part": (1.5, "score", "top_k: expected a whole number from 1, got 1.5"),
    "too many": (6, "score", "top_k: expected at most 5, the number of candidates, got 6"),
    "no output": (1, "", "top_output: required; expected 'click' or 'score' or 'cosine'"),
    "a vector": (1, "user_vector", "top_output: 'user_vector' is a vector of 3; expected 'click' or 'score'"),
    "a misspelt output": (1, "scor", "top_output: the model has no output 'scor'; expected 'click' or 'score' or"),
    "a hint": (1, "scor", "did you mean 'score'?"),
}


@pytest.mark.parametrize(("top_k", "output", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_ranking_that_cannot_be_made_is_refused(session, top_k, output, reason):
    with pytest.raises(RequestError) as caught:
        session.rank(DOCUMENT, top_k, output)

    assert reason in str(caught.value)


def test_a_batch_that_was_read_for_other_outputs_is_not_ranked(session):
    batch = session.read(DOCUMENT, ["item_vector"])

    with pytest.raises(RequestError, match="the batch was read for other outputs; read it for 'score'"):
        session.rank(batch, 1, "score")
    assert session.rank(session.read(DOCUMENT), np.int64(1), "score").index.shape == (1, 1)


def test_a_user_with_too_few_candidates_is_named(session):
    with pytest.raises(RequestError, match="top_k: expected at most 2, the number of candidates of user 0, got 3"):
        session.rank(TWO_USERS, 3, "score")


def test_a_value_that_is_not_a_number_is_not_ranked(session):
    nobody = {"context": {"user": [], AGE: 0}, "candidates": CANDIDATES}

    with pytest.raises(RequestError, match="'cosine' is"):
        session.rank(nobody, 2, "cosine")
    assert session.rank(nobody, 2, "score").index.tolist() == [[0, 1]]


class TestPredict:
    """``/predict`` answers the best candidates with their ids."""

    def ask(self, client, **options):
        return client.post("/predict/towers", {**DOCUMENT, "top_k": 2, "top_output": "score", **options})

    def test_only_the_best_are_answered(self, client):
        document = self.ask(client).json()

        assert list(document) == ["top", "defaulted_keys", "model_version"]
        assert [entry["index"] for entry in document["top"]] == BEST[:2]
        assert list(document["top"][0]) == ["index", "score"]
        scores = [entry["score"] for entry in document["top"]]
        np.testing.assert_allclose(scores, SCORES["score"][BEST[:2], 0], rtol=1e-5)

    def test_candidates_get_their_ids_back(self, client):
        ids = ["a", 17, None, "日本", "e"]
        candidates = [{**one, "id": id} for one, id in zip(CANDIDATES, ids, strict=True)]

        document = self.ask(client, candidates=candidates).json()

        assert [entry["id"] for entry in document["top"]] == [ids[at] for at in BEST[:2]]

    def test_a_candidate_without_an_id_has_none(self, client):
        candidates = [*CANDIDATES[:-1], {**CANDIDATES[-1], "id": "e"}]

        document = self.ask(client, candidates=candidates, top_k=5).json()

        assert [entry["id"] for entry in document["top"]] == ["e" if at == 4 else None for at in BEST]

    def test_outputs_by_name_come_next_to_the_best(self, client):
        document = self.ask(client, outputs=["item_vector"]).json()

        assert [entry["index"] for entry in document["top"]] == BEST[:2]
        assert list(document["outputs"]) == ["item_vector"]
        np.testing.assert_allclose(document["outputs"]["item_vector"], SCORES["item_vector"], rtol=1e-5, atol=1e-6)

    def test_samples_are_candidates_of_one_user(self, client):
        dense, bags = TinyModel().sample_requests(4, seed=2)
        samples = [{"dense": row.tolist(), "keys": bag} for row, bag in zip(dense, bags, strict=True)]

        document = client.post("/predict/tiny", {"samples": samples, "top_k": 4}).json()

        right = np.argsort(-TinyModel().probabilities(dense, bags)[:, 0], kind="stable")
        assert [entry["index"] for entry in document["top"]] == right.tolist()

    def test_an_id_may_be_a_feature_too(self, client):
        candidates = [{"id": number, "size": number} for number in (4, 5)]
        body = {"context": {"user": 1, "item": 2, "age": 0, "price": 1}, "candidates": candidates, "top_k": 2}

        document = client.post("/predict/with_id", body).json()

        with_ids = [candidates[entry["index"]]["id"] for entry in document["top"]]
        assert [entry["id"] for entry in document["top"]] == with_ids
        without = {**body, "candidates": [{"size": candidate["size"]} for candidate in candidates]}
        scores = [
            {entry["index"]: entry["score"] for entry in client.post("/predict/with_id", one).json()["top"]}
            for one in (body, without)
        ]
        assert scores[0] != scores[1]

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"top_k": 0}, "top_k: expected a whole number from 1, got 0"),
            ({"top_k": 6}, "top_k: expected at most 5, the number of candidates, got 6"),
            ({"top_k": "2"}, "top_k: expected a whole number of at most 64 bits, but a string came"),
            ({"top_output": "user_vector"}, "top_output: 'user_vector' is a vector of 3"),
            ({"top_output": 3}, "top_output: expected a string, but the number 3 came"),
            (
                {"candidates": [{**CANDIDATES[0], "id": []}], "top_k": 1},
                "candidates[0].id: expected a string or a number, but",
            ),
            *(
                ({"candidates": [{**CANDIDATES[0], "id": value}], "top_k": 1}, f"candidates[0].id: expected a {reason}")
                for value, reason in (
                    (True, "string or a number, but true came"),
                    (2**70, "number of at most 64 bits; send a longer id as a string"),
                )
            ),
            ({"context": {**CONTEXT, "id": 3}}, "context.id: is not a feature"),
        ],
    )
    def test_wrong_rankings_are_refused(self, client, options, reason):
        answer = self.ask(client, **options)

        assert answer.status_code == 400
        assert reason in answer.json()["error"]

    def test_an_output_that_ranks_nothing_is_refused(self, client):
        answer = client.post("/predict/towers", {**DOCUMENT, "top_output": "score"})

        assert answer.json()["error"] == "top_output: needs top_k"


def tensors():
    types = {"user": "INT64", "item": "INT64", AGE: "FP32", PRICE: "FP32", "CANDIDATES": "INT32"}
    return [
        {"name": name, "shape": [len(values)], "datatype": types[name], "data": values}
        for name, values in TWO_USERS.items()
    ]


class TestKserve:
    """TOP_INDEX and TOP_SCORE, [U, k]."""

    def ask(self, client, names=(), model="towers", **parameters):
        body = {"inputs": tensors(), "outputs": [{"name": name} for name in names], "parameters": parameters}
        return client.post(f"/v2/models/{model}/infer", body)

    def test_a_request_that_names_no_outputs_gets_the_best_alone(self, client):
        index, score = self.ask(client, top_k=2, top_output="score").json()["outputs"]

        assert (index["name"], index["datatype"], index["shape"]) == ("TOP_INDEX", "INT32", [2, 2])
        assert (score["name"], score["datatype"], score["shape"]) == ("TOP_SCORE", "FP32", [2, 2])
        assert np.reshape(index["data"], (2, 2)).tolist() == BEST_OF_TWO
        right = [
            OF_TWO["score"][begin + np.array(of_user), 0] for begin, of_user in zip((0, 2), BEST_OF_TWO, strict=True)
        ]
        np.testing.assert_allclose(np.reshape(score["data"], (2, 2)), right, rtol=1e-5)

    def test_outputs_come_in_the_order_of_the_request(self, client):
        outputs = self.ask(client, ["item_vector", "TOP_INDEX"], top_k=2, top_output="score").json()["outputs"]

        assert [output["name"] for output in outputs] == ["item_vector", "TOP_INDEX"]
        assert outputs[0]["shape"] == [5, 3]
        assert np.reshape(outputs[1]["data"], (2, 2)).tolist() == BEST_OF_TWO

    def test_over_grpc(self, over_grpc):
        message = service_pb2.ModelInferRequest()
        for entry in tensors():
            tensor = message.inputs.add(name=entry["name"], datatype=entry["datatype"], shape=entry["shape"])
            fields = {"INT64": "int64_contents", "FP32": "fp32_contents", "INT32": "int_contents"}
            getattr(tensor.contents, fields[entry["datatype"]]).extend(entry["data"])
        message.parameters["top_k"].int64_param = 2
        message.parameters["top_output"].string_param = "score"

        written = over_grpc(message)

        assert [(output.name, output.datatype, list(output.shape)) for output in written.outputs] == [
            ("TOP_INDEX", "INT32", [2, 2]),
            ("TOP_SCORE", "FP32", [2, 2]),
        ]
        assert np.frombuffer(written.raw_output_contents[0], np.int32).reshape(2, 2).tolist() == BEST_OF_TWO

    @pytest.mark.parametrize(
        ("names", "parameters", "reason"),
        [
            (["TOP_INDEX"], {}, "outputs: TOP_INDEX and TOP_SCORE need parameters.top_k"),
            (["click"], {"top_k": 1}, "parameters.top_k: the outputs have neither TOP_INDEX nor TOP_SCORE"),
            ([], {"top_k": 0, "top_output": "score"}, "top_k: expected a whole number from 1, got 0"),
            (
                [],
                {"top_k": 3, "top_output": "score"},
                "top_k: expected at most 2, the number of candidates of user 0, got 3",
            ),
            ([], {"top_k": "1"}, "parameters.top_k: expected a whole number"),
            ([], {"top_k": 1}, "top_output: required; expected 'click'"),
            ([], {"top_k": 1, "top_output": "item_vector"}, "top_output: 'item_vector' is a vector of 3"),
            ([], {"top_output": "score"}, "top_output: needs top_k"),
            ([], {"top_k": 1, "top_output": 5}, "parameters.top_output: expected a string"),
        ],
    )
    def test_wrong_rankings_are_refused(self, client, names, parameters, reason):
        answer = self.ask(client, names, **parameters)

        assert answer.status_code == 400
        assert reason in answer.json()["error"]

    def test_metadata_is_that_of_before(self, client):
        outputs = client.get("/v2/models/tiny").json()["outputs"]

        assert outputs == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 1]}]


def test_a_ranking_may_be_larger_than_its_batch_and_is_logged_without_other_outputs(session):
    batch = session.read(DOCUMENT)

    assert batch.expanded().counts.tolist() == [5]
    assert json.dumps(session.rank(batch, 1, "click").index.tolist()) == f"[[{BEST[0]}]]"
