"""`from_torch` of bags of any length that have weights or a maximum. Requests have weights next to keys."""

import copy
import re
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from serving.errors import ConfigError, RequestError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.importers import from_torch
from serving.opening import Runtime, load_model
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.serving.importers.torch_modules import draw_bags, request, with_offsets
from training import EmbeddingBagCollection, EmbeddingBagConfig

pytestmark = pytest.mark.usefixtures("exporter")
SEEN, CLICKED, B = 30, 20, 40
WEIGHTS = ("how_long", "how_often")
MOST = {"weighted": 4, "largest": 3}


class Bags(nn.Module):
    """Sums with two kinds of weights, and the maximum and the mean of the same bags. The key 0 is padding."""

    def __init__(self, mode="max"):
        super().__init__()
        self.weighted = nn.EmbeddingBag(SEEN, 3, mode="sum", padding_idx=0)
        self.largest = nn.EmbeddingBag(CLICKED, 4, mode=mode, include_last_offset=True)
        self.mean = nn.EmbeddingBag(CLICKED, 2)
        self.out = nn.Linear(10, 1)

    def forward(self, how_long, seen, seen_at, how_often, clicked, clicked_at, price):
        weighted = self.weighted(seen, seen_at, how_long.exp()) - self.weighted(seen, seen_at, how_often)
        pooled = self.largest(clicked, clicked_at), self.mean(clicked, clicked_at[:-1])
        return torch.sigmoid(self.out(torch.cat([weighted, *pooled, price[:, None]], 1)))


def example():
    seen, clicked = with_offsets([[1, 2], [3]]), with_offsets([[4], [5, 6]], with_last=True)
    return torch.ones(3), *seen, torch.ones(3), *clicked, torch.zeros(2)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Bags()


@pytest.fixture(scope="module")
def imported(module, tmp_path_factory):
    return from_torch(module, example(), tmp_path_factory.mktemp("models"), "bags", most_keys=MOST)


def drawn(samples=B, seed=0):
    """A request. Some bags are empty, and some are full."""
    rng = np.random.default_rng(seed)
    seen = [np.maximum(np.array(bag, int) - 4, 0).tolist() for bag in draw_bags(rng, SEEN, samples, MOST["weighted"])]
    return {
        **{name: [rng.normal(size=len(bag)).astype(np.float32).tolist() for bag in seen] for name in WEIGHTS},
        "seen": seen,
        "clicked": draw_bags(rng, CLICKED, samples, MOST["largest"]),
        "price": rng.normal(size=samples).astype(np.float32).tolist(),
    }


def in_float64(module, given):
    long, often = (torch.tensor([*chain.from_iterable(given[name])], dtype=torch.float64) for name in WEIGHTS)
    clicked, price = with_offsets(given["clicked"], with_last=True), torch.tensor(given["price"], dtype=torch.float64)
    with torch.no_grad():
        answer = copy.deepcopy(module).double()(long, *with_offsets(given["seen"]), often, *clicked, price)
    assert answer.std() > 0.01
    return answer.numpy()


def test_weights_and_maxima_of_bags_are_served(module, imported):
    given = drawn()
    expected = in_float64(module, given)
    assert imported.names == (*WEIGHTS, "price", "seen", "clicked")

    with load_model(imported.path) as session:
        for form in (given, pa.table(given)):
            np.testing.assert_allclose(session.predict(form), expected, atol=1e-6)
        padded = [[bag + [0.0] * (MOST["weighted"] - len(bag)) for bag in given[name]] for name in WEIGHTS]
        dense = np.concatenate([*padded, np.array(given["price"])[:, None]], axis=1).astype(np.float32)
        slots = [given[name] for _, name in imported.slots]
        np.testing.assert_allclose(session.predict(dense, *request(*slots)), expected, atol=1e-6)
        user = {"seen": [[7, 8, 9]], "how_long": [[0.5, -1.0, 2.0]], "how_often": [[3.0, 0.0, 1.0]], "price": [1.0]}
        repeated = {name: values * B for name, values in user.items()}
        answers = [session.predict({**columns, "clicked": given["clicked"]}) for columns in (user, repeated)]
        assert answers[0].tobytes() == answers[1].tobytes()


def test_weights_of_keys_come_in_every_protocol(module, imported):
    given = drawn(3, seed=1)
    expected = in_float64(module, given)

    def flat(name, datatype):
        values, ends = with_offsets(given[name], with_last=True)
        offsets = {"name": f"{name}.offsets", "datatype": "INT32", "shape": [4], "data": ends.tolist()}
        return {"name": name, "datatype": datatype, "shape": [len(values)], "data": values.tolist()}, offsets

    floats = chain.from_iterable(flat(name, "FP32") for name in WEIGHTS)
    lists = [*floats, *flat("seen", "INT64"), *flat("clicked", "INT64")]
    inputs = [*lists, {"name": "price", "datatype": "FP32", "shape": [3], "data": given["price"]}]
    samples = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    with ModelRepository(imported.path.parent.parent, Runtime()) as models:
        models.load()
        client = Client(create_app(FrontEnd(models)))
        answer = client.post("/predict/bags", {"samples": samples}).json()["predictions"]
        kserve = client.post("/v2/models/bags/infer", {"inputs": inputs}).json()["outputs"][0]["data"]
        wrong = client.post("/predict/bags", {"samples": [samples[0], {**samples[1], "seen": [5], "how_long": []}]})
    np.testing.assert_allclose(answer, expected, atol=1e-6)
    np.testing.assert_allclose(kserve, expected[:, 0], atol=1e-6)
    assert wrong.status_code == 400
    expected_error = "samples[1].how_long: expected 1 weight, one for each key of 'seen', got 0"
    assert wrong.json()["error"] == expected_error


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"how_long": [[0.5, 1.0], [1.0] * 3]},
            "how_long of sample 1: expected 1 weight, one for each key of 'seen', got 3",
        ),
        ({"how_long": [[0.5, None], [1.0]]}, "how_long of sample 0: value 1: is missing"),
        ({"how_long": [[0.5, np.inf], [1.0]]}, "how_long of sample 0: value 1: expected a finite number, got inf"),
        ({"how_long": None}, "how_long of sample 0: expected 2 weights, one for each key of 'seen', got 0"),
        ({"how_long": [0.5, 1.0]}, "how_long of sample 0: expected 2 weights, one for each key of 'seen', got 1"),
        ({"seen": [[1] * 5, [3]]}, "seen of sample 0: has 5 values, but at most 4 are allowed"),
    ],
)
def test_wrong_weights_are_named(imported, changes, text):
    weights = {name: [[0.5, 1.0], [1.0]] for name in WEIGHTS}
    given = {"seen": [[1, 2], [3]], **weights, "price": [1.0, 2.0], **changes}

    with load_model(imported.path) as session, pytest.raises(RequestError, match=re.escape(text)):
        session.predict({name: values for name, values in given.items() if values is not None})


@pytest.mark.parametrize(
    ("mode", "most", "text"),
    [
        (
            "max",
            {"weighted": 4},
            "Bags: largest: pools with mode='max' and offsets, so the network pools; expected most",
        ),
        (
            "max",
            {"largest": 4},
            "is called with per_sample_weights and offsets, so the network pools; expected most_keys=",
        ),
        ("max", {**MOST, "largest": 1}, "Bags: largest: expected at most 1 keys in a bag, as most_keys says, got 2"),
        (
            "max",
            {**MOST, "largst": 1},
            "most_keys: there is no table 'largst'; did you mean 'largest'?; it has weighted",
        ),
        ("max", {**MOST, "largest": 0}, "most_keys: expected 1 to 65536 keys of 'largest', got 0"),
        ("max", [4], "most_keys: expected {table: most keys of a bag}, got [4]"),
        ("sum", MOST, "most_keys: 'largest' needs no number: it has no bags with offsets and mode='max' or weights"),
    ],
)
def test_most_keys_must_fit_the_tables(tmp_path, mode, most, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        from_torch(Bags(mode), example(), tmp_path, "bags", most_keys=most)


class Collection(nn.Module):
    def __init__(self, combiner="sum"):
        super().__init__()
        self.tables = EmbeddingBagCollection({"user": EmbeddingBagConfig(2, combiner=combiner)})

    def forward(self, ids, offsets, weights):
        return torch.sigmoid(self.tables({"user": (ids, offsets, weights)})["user"].sum(1))


def test_a_trained_collection_takes_weights(tmp_path):
    module, bags = Collection(), [[3, 1, 2], [], [2, 4]]
    given = *with_offsets(bags, with_last=True), torch.tensor([0.5, 2.0, -1.0, 3.0, 0.25])
    expected = module(*given).detach().numpy()  # in training mode, which makes the rows

    imported = from_torch(module, given, tmp_path, "collection", most_keys={"user": 3})

    with load_model(imported.path) as session:
        answer = session.predict({"ids": bags, "weights": [[0.5, 2.0, -1.0], [], [3.0, 0.25]]})
    np.testing.assert_allclose(answer[:, 0], expected, atol=1e-6)
    mean = Collection("mean")
    mean(*given)
    with pytest.raises(ConfigError, match="user: expected the combiner sum for keys with weights, got mean"):
        from_torch(mean, given, tmp_path, "other", most_keys={"user": 3})
