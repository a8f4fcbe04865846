"""Every graph that comes with the package, from training to serving: a new one is tested by being there."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import serving
from training.built_in import built_in_graphs
from training.ctr_model import CtrModel
from training.document import open_document
from training.export import export_model
from training.synthetic import generate
from training.trainer import predict_logits, train

ROWS, CUT = 24_000, 20_000
MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(scope="module")
def data():
    return generate(ROWS, seed=0)


@pytest.fixture(scope="module", params=built_in_graphs())
def family(request, data, tmp_path_factory):
    """A graph, trained for one epoch and exported."""
    document = open_document(request.param)
    model = CtrModel(document.graph, seed=0, adam=document.adam)
    samples, held_out = data.samples[:CUT], data.samples[CUT:]
    (result,) = train(model, samples, held_out, epochs=1, batch_size=256, schedule=document.schedule, seed=0)
    version = export_model(model, document.document, tmp_path_factory.mktemp("models"), request.param)
    return SimpleNamespace(name=request.param, graph=document.graph, model=model, auc=result.auc, version=version)


@pytest.fixture
def request_tensors(family, data):
    """Fifty held-out samples, some of whose keys training never saw, as a client sends them."""
    samples = data.samples[CUT : CUT + 50]
    trained_keys = data.samples.keys[:CUT]
    assert not np.isin(samples.keys, trained_keys).all()
    return samples.dense, samples.keys.reshape(-1), np.arange(samples.keys.size + 1)


@pytest.fixture
def expected(family, data):
    """What the trainer predicts for them: float64[50, 1] probabilities."""
    logits = predict_logits(family.model, data.samples[CUT : CUT + 50]).astype(np.float64)
    return 1 / (1 + np.exp(-logits[:, None]))


def test_a_family_learns_what_the_data_has_to_teach(family, data):
    best = data.best_known_auc(slice(CUT, None))

    assert 0.7 < family.auc < best  # 0.78 to 0.80 was seen; an untrained model has 0.5


def test_a_family_starts_near_even_odds(family, data):
    logits = predict_logits(CtrModel(family.graph, seed=0), data.samples[CUT:])

    assert logits.std() < 0.5  # what starts far from 0 spends its first epoch coming back


@pytest.mark.parametrize("engine", ["numpy", "onnx"])
def test_a_served_family_predicts_what_the_trainer_predicts(family, request_tensors, expected, engine):
    with serving.load_model(family.version, engine=engine) as session:
        predictions = session.predict(*request_tensors)

    np.testing.assert_allclose(predictions, expected, rtol=0, atol=1e-5)
    assert np.ptp(predictions) > 0.1


def test_a_familys_graph_opens_through_hugectrs_calls(family, request_tensors, expected):
    file = family.version / "graph.json"

    with serving.CreateParameterServer([file], [family.name], True) as server:
        cache = serving.CreateEmbeddingCache(server, 0, False, 0.2, file, family.name, True)
        predictions = serving.InferenceSession(file, 0, cache).predict(*request_tensors, True)

    np.testing.assert_allclose(predictions, expected, rtol=0, atol=1e-5)


def test_a_family_is_described_as_it_is(family):
    rows = [line.split("|")[1:-1] for line in MODELS_PAGE.read_text().splitlines() if line.startswith("| `")]
    described = {cells[0].strip(" `"): [cell.strip() for cell in cells[2:4]] for cells in rows}

    dense_weights = sum(math.prod(spec.shape) for spec in family.graph.weights)
    assert described[family.name] == [str(family.graph.embeddings[0].dim), f"{dense_weights:,}"]


def test_a_family_asks_for_each_key_once(family):
    assert [embedding.slots for embedding in family.graph.embeddings] == [26]
