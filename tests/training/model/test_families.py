"""Every built-in graph, from training to serving. A new graph is tested automatically, by `make test-long`."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import serving
from training.built_in import built_in_graphs
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.export import export_model
from training.model.trainer import predict_logits, train
from training.samples import Bags
from training.synthetic.generator import generate_for

ROWS, CUT = 12_000, 10_000
ROOT = Path(__file__).parents[3]
# Somewhat less than two epochs were seen to reach; an untrained model has 0.5.
LEAST_AUC = {"bst": 0.62, "din": 0.67, "mmoe": 0.63, "ncf": 0.64}
# Lists of keys with attention. All others have their formulas tested as well, and tests/e2e/test_families.py trains and
# serves one with several labels.
IN_EVERY_RUN = ("din",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.long) for name in built_in_graphs()],
)
def family(request, tmp_path_factory):
    """A graph with generated samples, trained for two epochs and exported."""
    document = open_document(request.param)
    data = generate_for(document.graph, ROWS, seed=0)
    model = CtrModel(document.graph, seed=0, rule=document.rule, label_weights=document.label_weights)
    samples, held_out = data.samples[:CUT], data.samples[CUT:]
    *_, result = train(model, samples, held_out, epochs=2, batch_size=128, schedule=document.schedule, seed=0)
    repository = tmp_path_factory.mktemp("models")
    version = export_model(model, document.document, repository, request.param, calibration=held_out[-512:])
    return SimpleNamespace(
        name=request.param,
        graph=document.graph,
        data=data,
        model=model,
        auc=tuple(figures["auc"] for figures in result.figures),
        version=version,
    )


@pytest.fixture
def asked(family):
    """Fifty held-out samples. Training has not seen a seventh of their keys."""
    samples = family.data.samples[CUT : CUT + 50]
    keys = samples.bags.keys.copy()
    keys[::7] += 2**50
    return dataclasses.replace(samples, bags=Bags(keys, samples.bags.row_ptrs, samples.bags.slots))


@pytest.fixture
def expected(family, asked):
    """The trainer's predictions for them: float64[50, L] probabilities."""
    return 1 / (1 + np.exp(-predict_logits(family.model, asked).astype(np.float64)))


def test_a_family_comes_close_to_the_best_known_auc(family):
    best = [family.data.best_known_auc(slice(CUT, None), label) for label in range(family.graph.label_dim)]

    assert len(family.auc) == len(best)
    for reached, reachable in zip(family.auc, best, strict=True):
        assert LEAST_AUC.get(family.name, 0.7) < reached < reachable


def test_a_family_starts_near_even_odds(family):
    logits = predict_logits(CtrModel(family.graph, seed=0), family.data.samples[CUT:])

    assert logits.std() < 0.5  # logits far from 0 would waste the first epoch


@pytest.mark.parametrize("engine", ["numpy", "onnx"])
def test_a_served_family_predicts_what_the_trainer_predicts(family, asked, expected, engine):
    with serving.load_model(family.version, engine=engine) as session:
        predictions = session.predict(asked.dense, asked.bags.keys, asked.bags.row_ptrs)

    assert predictions.shape == (50, family.graph.label_dim)
    np.testing.assert_allclose(predictions, expected, rtol=0, atol=1e-5)
    assert (np.ptp(predictions, axis=0) > 0.1).all()


def test_a_served_family_predicts_nearly_the_same_on_integers(family, asked, expected):
    with serving.load_model(family.version, engine="int8") as session:
        predictions = session.predict(asked.dense, asked.bags.keys, asked.bags.row_ptrs)

    record = session.quantization
    assert record.quantized >= 1
    assert 0 < record.max_error <= 0.01
    assert record.samples == 512
    # a seventh of these keys is unknown, unlike in the calibration
    assert 1e-5 < np.abs(predictions - expected).max() < 0.05


def test_an_answer_does_not_depend_on_the_other_samples_of_its_request(family, asked, expected):
    assert not family.graph.mixes_samples
    with serving.load_model(family.version) as session:
        alone = session.predict(asked[7:8].dense, asked[7:8].bags.keys, asked[7:8].bags.row_ptrs)

    np.testing.assert_allclose(alone, expected[7:8], rtol=0, atol=1e-5)


def test_a_familys_graph_opens_through_hugectrs_calls(family, asked, expected):
    file = family.version / "graph.json"

    with serving.CreateParameterServer([file], [family.name], True) as server:
        cache = serving.CreateEmbeddingCache(server, 0, False, 0.2, file, family.name, True)
        session = serving.InferenceSession(file, 0, cache)
        predictions = session.predict(asked.dense, asked.bags.keys, asked.bags.row_ptrs, True)

    np.testing.assert_allclose(predictions, expected, rtol=0, atol=1e-5)


def test_the_documentation_of_a_family_is_correct(family):
    page = (ROOT / "docs" / "models.md").read_text().partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    described = {cells[0].strip(" `"): [cell.strip() for cell in cells[2:4]] for cells in rows}

    dims = ", ".join(str(embedding.dim) for embedding in family.graph.embeddings)
    dense_weights = sum(math.prod(spec.shape) for spec in family.graph.weights)
    assert described[family.name] == [dims, f"{dense_weights:,}"]


def test_a_family_asks_for_each_key_once(family):
    assert [embedding.bottom for embedding in family.graph.embeddings] == [entry.top for entry in family.graph.sparse]


def test_the_graphs_are_among_the_examples(family):
    example = ROOT / "examples" / "graphs" / f"{family.name}.json"

    assert example.read_text() == built_in_graphs()[family.name].read_text()
