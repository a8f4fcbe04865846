"""SageMaker's routes give the answers of the other routes."""

import numpy as np
import pytest
import tritonclient.http as triton

from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.repository import ModelRepository
from tests.e2e.kserve_requests import inputs_of, request_of
from tests.serving.frontend.app_client import Client
from tests.tools.tiny_model import TinyModel

MODEL = TinyModel()
SAMPLES = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], [3]]}]}


def client_of(folder, *names):
    for name in names:
        MODEL.write(folder, name)
    repository = ModelRepository(folder)
    repository.load()
    return repository, Client(create_app(FrontEnd(repository)))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    repository, client = client_of(tmp_path_factory.mktemp("one"), "tiny")
    with repository:
        yield client


def binary_request():
    """A request of Triton's client with binary tensors: its body, and the size of its JSON."""
    arrays, expected = request_of(MODEL, 2)
    inputs, outputs = inputs_of(arrays, triton), [triton.InferRequestedOutput("OUTPUT0", binary_data=True)]
    return *triton.InferenceServerClient.generate_request_body(inputs, outputs=outputs), expected


def test_a_ping_succeeds_while_the_server_is_ready(client, tmp_path):
    assert client.get("/ping").status_code == 200
    assert Client(create_app(FrontEnd(ModelRepository(tmp_path)))).get("/ping").status_code == 503


def test_an_invocation_is_a_predict_request_of_the_only_model(client):
    answer = client.post("/invocations", SAMPLES)

    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.content == client.post("/predict/tiny", SAMPLES).content
    assert 'hotrow_requests_total{code="200",model="tiny"} 2.0' in client.get("/metrics").text


def test_an_invocation_with_tritons_content_type_takes_and_gives_binary_tensors(client):
    body, json_bytes, expected = binary_request()
    headers = {"Content-Type": f"application/vnd.sagemaker-triton.binary+json;json-header-size={json_bytes}"}

    answer = client.ask("POST", "/invocations", content=body, headers=headers)

    assert answer.status_code == 200, answer.text
    kind, _, size = answer.headers["content-type"].partition(";json-header-size=")
    assert kind == "application/vnd.sagemaker-triton.binary+json"
    found = np.frombuffer(answer.content[int(size) :], np.float32)
    np.testing.assert_allclose(found, expected.reshape(-1), atol=2e-6)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("application/vnd.sagemaker-triton.binary+json;json-header-size=99", b"{}"),
        ("application/vnd.sagemaker-triton.binary+json;json-header-size=-1", b"{}"),
    ],
)
def test_a_wrong_invocation_is_refused(client, content_type, body):
    answer = client.ask("POST", "/invocations", content=body, headers={"Content-Type": content_type})

    assert answer.status_code == 400
    assert "error" in answer.json()


def test_a_server_with_several_models_says_that_an_invocation_needs_one(tmp_path):
    repository, client = client_of(tmp_path, "one", "two")
    with repository:
        answer = client.post("/invocations", SAMPLES)

    assert answer.status_code == 400
    assert answer.json() == {"error": "expected a server with one model, this server has 2: one, two"}
