"""Graphs with several tables, empty slots, bags of many keys and two labels, served over HTTP."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from tests.e2e.conftest import serving
from training.model.ctr_model import CtrModel
from training.model.document import open_document
from training.model.export import export_model
from training.model.trainer import predict_logits, train
from training.synthetic.generator import generate_for


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """DIN and MMoE in one repository, with twenty samples of each and their trainer's predictions."""
    repository, asked = tmp_path_factory.mktemp("families"), {}
    for name in ("din", "mmoe"):
        document = open_document(name)
        samples = generate_for(document.graph, 500, seed=0).samples
        model = CtrModel(document.graph, seed=0)
        list(train(model, samples, samples, epochs=1, batch_size=50, schedule=document.schedule, seed=0))
        export_model(model, document.document, repository, name)
        asked[name] = samples[:20], 1 / (1 + np.exp(-predict_logits(model, samples[:20]).astype(np.float64)))
    return repository, asked


@pytest.fixture(scope="module")
def served(trained, tmp_path_factory):
    """A server of both models, and what is asked."""
    repository, asked = trained
    with serving(repository, tmp_path_factory.mktemp("log") / "stderr") as served:
        yield served, asked


def test_a_server_answers_samples_with_a_list_of_keys_per_slot(served):
    served, asked = served

    for name, (samples, expected) in asked.items():
        ends = iter(np.split(samples.bags.keys, samples.bags.row_ptrs[1:-1]))
        entries = [
            {"dense": dense.tolist(), "keys": [next(ends).tolist() for _ in range(samples.bags.slots)]}
            for dense in samples.dense
        ]
        assert [] in entries[0]["keys"] + entries[1]["keys"]
        status, _, body = served.ask(f"/predict/{name}", {"samples": entries})

        answer = json.loads(body)
        assert (status, answer["defaulted_keys"]) == (200, 0)
        np.testing.assert_allclose(answer["predictions"], expected, atol=1e-5)


def test_a_server_answers_the_request_on_the_page(served):
    served, _ = served
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    blocks = re.findall(r"^```json\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    [block] = [block for block in blocks if "samples" in block]

    status, _, body = served.ask("/predict/mmoe", block.encode())

    assert status == 200
    assert np.shape(json.loads(body)["predictions"]) == (2, 2)


def test_a_client_sends_the_bags_of_training(served):
    served, asked = served

    with tritonclient.http.InferenceServerClient(f"{served.host}:{served.port}") as client:
        for name, (samples, expected) in asked.items():
            inputs = []
            for tensor, array, datatype in (
                ("DES", samples.dense, "FP32"),
                ("CATCOLUMN", samples.bags.keys, "INT64"),
                ("ROWINDEX", samples.bags.row_ptrs.astype(np.int32), "INT32"),
            ):
                inputs.append(tritonclient.http.InferInput(tensor, [1, array.size], datatype))
                inputs[-1].set_data_from_numpy(array.reshape(1, -1))

            np.testing.assert_allclose(client.infer(name, inputs).as_numpy("OUTPUT0"), expected, atol=1e-5)
