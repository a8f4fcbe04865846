"""Loading, unloading and swapping models while a real server answers, with NVIDIA's clients."""

import json
import threading
import time

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.e2e.kserve_requests import inputs_of, request_of
from tests.tools.tiny_model import TinyModel

MODELS = {version: TinyModel(seed=version) for version in (1, 2)}


@pytest.fixture
def folder(tmp_path):
    MODELS[1].write(tmp_path / "models", "tiny", 1)
    return tmp_path / "models"


@pytest.fixture(params=["http", "grpc"])
def client_of(request):
    """Connect a client to a server; returns the client and the class of its tensors."""
    module = getattr(tritonclient, request.param)
    clients = []

    def connect(served):
        port = served.port
        if request.param == "grpc":
            port = int(served.printed.split("listening for gRPC on ")[1].split()[0].rsplit(":", 1)[1])
        clients.append(module.InferenceServerClient(f"{served.host}:{port}"))
        return clients[-1], module

    yield connect
    for client in clients:
        client.close()


def state_of(client):
    index = client.get_model_repository_index()
    models = index if isinstance(index, list) else index.models
    get = (lambda one, key: one.get(key, "")) if isinstance(index, list) else getattr
    return [tuple(get(model, key) for key in ("name", "version", "state")) for model in models]


def infer(client, module, version=""):
    """Ask for some samples; returns the version that answered, whose answer is checked."""
    arrays, _ = request_of(MODELS[1], 3)
    result = client.infer("tiny", inputs_of(arrays, module), model_version=version)
    response = result.get_response()
    answered = int(response["model_version"] if isinstance(response, dict) else response.model_version)
    np.testing.assert_allclose(result.as_numpy("OUTPUT0"), request_of(MODELS[answered], 3)[1], atol=2e-6)
    return answered


def test_a_client_loads_swaps_and_unloads_a_model(start, folder, client_of):
    client, module = client_of(start(folder, "--model-control-mode", "explicit", "--grpc-port", "0"))
    assert state_of(client) == [("tiny", "", "")]
    with pytest.raises(InferenceServerException, match="no model 'tiny' is served"):
        infer(client, module)

    client.load_model("tiny")
    assert infer(client, module) == 1
    MODELS[2].write(folder, "tiny", 2)
    client.load_model("tiny")
    assert infer(client, module) == 2
    with pytest.raises(InferenceServerException, match="no version '1' of model 'tiny' is served"):
        infer(client, module, "1")

    client.load_model("tiny", config=json.dumps({"version_policy": {"all": {}}}))
    assert [infer(client, module, version) for version in ("", "1", "2")] == [2, 1, 2]
    assert state_of(client) == [("tiny", "1", "READY"), ("tiny", "2", "READY")]
    metadata = client.get_model_metadata("tiny")
    assert (metadata["versions"] if isinstance(metadata, dict) else list(metadata.versions)) == ["1", "2"]

    with pytest.raises(InferenceServerException, match=r"no model '' is served|no such path"):
        client.unload_model("")
    client.unload_model("tiny")
    assert state_of(client) == [("tiny", "1", "UNAVAILABLE"), ("tiny", "2", "UNAVAILABLE")]


def test_models_on_the_command_line_replace_those_of_the_environment(start, folder, monkeypatch):
    monkeypatch.setenv("HOTROW_LOAD_MODEL", "broken")

    served = start(folder, "--model-control-mode", "explicit", "--load-model", "tiny")

    assert json.loads(served.ask("/v2/models/tiny")[2])["name"] == "tiny"
    assert served.ask("/v2/models/broken")[0] == 404


def test_a_client_may_send_back_the_configuration_that_it_read(explicit):
    with tritonclient.http.InferenceServerClient(f"{explicit.host}:{explicit.port}") as client:
        config = client.get_model_config("tiny")

        client.load_model("tiny", config=json.dumps({**config, "version_policy": {"specific": {"versions": [1]}}}))

        assert infer(client, tritonclient.http) == 1


@pytest.mark.parametrize(
    ("path", "body", "code", "reason"),
    [
        ("models/tinny/load", {}, 404, "no model 'tinny' is in the repository; did you mean 'tiny'"),
        ("models/tinny/unload", {}, 404, "no model 'tinny' is served"),
        ("models/broken/load", {}, 400, "failed to load: model 'broken': "),
        ("models/tiny/load", {"parameters": {"config": "{"}}, 400, "parameters.config is not JSON: "),
        ("models/tiny/load", {"parameters": {"config": 1}}, 400, "parameters.config: expected a string"),
        (
            "models/tiny/load",
            {"parameters": {"config": '{"max_batch_size": 7}'}},
            400,
            "parameters.config.max_batch_size: unknown; expected version_policy",
        ),
        (
            "models/tiny/load",
            {"parameters": {"config": '{"version_policy": {"specific": {"versions": [9]}}}'}},
            400,
            "version 9 is not there; the versions are 1",
        ),
        ("models/tiny/load", {"parameters": {"file:1/model.py": ""}}, 400, "file:1/model.py: files cannot be sent"),
        ("models/tiny/load", {"parameters": {"confg": ""}}, 400, "parameters.confg: unknown; expected config"),
        ("models/tiny/load", {"config": ""}, 400, "config: unknown; expected parameters"),
        ("models/tiny/unload", {"parameters": {"all": True}}, 400, "parameters.all: unknown"),
    ],
)
def test_a_request_that_cannot_be_followed_is_refused_and_changes_nothing(explicit, path, body, code, reason):
    status, _, answer = explicit.ask(f"/v2/repository/{path}", body, method="POST")

    assert (status, reason in json.loads(answer)["error"]) == (code, True), answer
    assert explicit.ask("/v2/models/tiny/ready")[0] == 200


@pytest.fixture(scope="module")
def explicit(tmp_path_factory):
    """A server whose models are loaded explicitly; one of them is broken."""
    from tests.e2e.conftest import serving

    folder = tmp_path_factory.mktemp("explicit")
    MODELS[1].write(folder / "models", "tiny", 1)
    broken = MODELS[1].write(folder / "models", "broken", 1)
    (broken / "dense.model").write_bytes(b"1234")
    options = ("--model-control-mode", "explicit", "--load-model", "tiny")
    with serving(folder / "models", folder / "stderr", *options) as served:
        yield served


def test_models_cannot_be_loaded_unless_the_server_allows_it(served):
    for act in ("load", "unload"):
        status, _, answer = served.ask(f"/v2/repository/models/tiny/{act}", {}, method="POST")
        assert status == 400
        assert "--model-control-mode none, not explicit" in json.loads(answer)["error"]


def test_no_request_fails_while_a_model_is_swapped(start, folder):
    served = start(folder, "--model-control-mode", "explicit", "--load-model", "*", "--grpc-port", "0")
    grpc_port = int(served.printed.split("listening for gRPC on ")[1].split()[0].rsplit(":", 1)[1])
    MODELS[2].write(folder, "tiny", 2)
    answered, errors, stop = {tritonclient.http: set(), tritonclient.grpc: set()}, [], threading.Event()

    def ask(module, port):
        with module.InferenceServerClient(f"{served.host}:{port}") as client:
            while not stop.is_set():
                try:
                    answered[module].add(infer(client, module))
                except (InferenceServerException, AssertionError) as err:
                    errors.append(err)

    clients = [(tritonclient.http, served.port), (tritonclient.grpc, grpc_port)] * 2
    threads = [threading.Thread(target=ask, args=client) for client in clients]
    for thread in threads:
        thread.start()
    with tritonclient.http.InferenceServerClient(f"{served.host}:{served.port}") as client:
        for number in range(4):
            policy = {"version_policy": {"specific": {"versions": [2 - number % 2]}}}
            client.load_model("tiny", config=json.dumps(policy))
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert list(answered.values()) == [{1, 2}] * 2


def test_a_server_that_polls_serves_a_new_version(start, folder):
    served = start(folder, "--model-control-mode", "poll", "--repository-poll-secs", "1")
    MODELS[2].write(folder, "tiny", 2)

    with tritonclient.http.InferenceServerClient(f"{served.host}:{served.port}") as client:
        while infer(client, tritonclient.http) == 1:  # the time limit of tests ends it
            time.sleep(0.02)
        assert state_of(client) == [("tiny", "2", "READY")]
