"""What one request may make the server build: every route refuses a request beyond it, and says which bound it is."""

import gzip
import json
import os
import secrets
from pathlib import Path

import numpy as np
import pytest

from serving.frontend.front_end import FrontEnd, Settings
from serving.frontend.http.app import create_app
from serving.frontend.limits import Limits
from serving.model.sparse_writer import write_sparse_directory
from serving.repository import ModelRepository
from serving.session import InferenceSession
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import KEYS, write_lookup_model
from tests.tools.tiny_model import TinyModel

ROUTES = [
    "/predict/tiny",
    "/v2/models/tiny/infer",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/repository/index",
    "/v2/repository/models/tiny/load",
    "/v2/systemsharedmemory/region/r/register",
]


def asking(folder, **limits):
    repository = ModelRepository(folder)
    repository.load()
    return repository, Client(create_app(FrontEnd(repository, Settings(limits=Limits(**limits))))).ask


@pytest.fixture
def ask_tiny(tmp_path):
    TinyModel().write(tmp_path)
    repository, ask = asking(tmp_path, max_json_values=1000, max_json_depth=10)
    with repository:
        yield ask


@pytest.fixture
def memory():
    """POSIX shared memory."""
    path = Path("/dev/shm") / f"hotrow-test-{secrets.token_hex(8)}"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def ask_rows(tmp_path):
    """Ask a model without a dense network for rows."""

    def opened(answer_bytes=1000, change=None):
        repository, ask = asking(write_lookup_model(tmp_path, change), max_answer_bytes=answer_bytes)
        repositories.append(repository)

        def rows(first, second, **parameters):
            keys, counts = [*first, *second], [len(first), len(second)]
            inputs = [
                {"name": "KEYS", "datatype": "INT64", "shape": [len(keys)], "data": [int(key) for key in keys]},
                {"name": "NUMKEYS", "datatype": "INT32", "shape": [2], "data": counts},
            ]
            return ask("POST", "/v2/models/hps_wdl/infer", json={"inputs": inputs, "parameters": parameters})

        return rows

    repositories = []
    yield opened
    for repository in repositories:
        repository.close()


@pytest.mark.parametrize("path", ROUTES)
def test_a_document_with_too_many_values_is_too_large_on_every_route(ask_tiny, path):
    body = b'{"x":[' + b"{}," * 2000 + b"{}]}"
    for headers, sent in (({}, body), ({"content-encoding": "gzip"}, gzip.compress(body))):
        response = ask_tiny("POST", path, content=sent, headers=headers)
        assert response.status_code == 413, response.text
        assert "more than the 1,000 values that the server accepts" in response.json()["error"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_document_that_is_nested_too_deep_is_refused_on_every_route(ask_tiny, path):
    response = ask_tiny("POST", path, content=b'{"parameters":' * 11 + b"1" + b"}" * 11)

    assert response.status_code == 400
    assert "nested more than 10 deep" in response.json()["error"]


@pytest.mark.parametrize("path", ROUTES[2:])
@pytest.mark.parametrize("encoded", [bytes, gzip.compress])
def test_only_predict_requests_may_have_large_bodies(ask_tiny, path, encoded):
    body = encoded(b'{"x": "%s"}' % (b"a" * (256 << 10)))
    response = ask_tiny(
        "POST", path, content=body, headers={"content-encoding": "gzip"} if encoded is not bytes else {}
    )

    assert (response.status_code, "262,144" in response.json()["error"]) == (413, True)


def test_two_of_the_largest_answers_may_always_wait_for_their_clients():
    assert Limits(max_answer_bytes=1 << 30).most_unread_bytes == 2 << 30
    assert Limits(max_answer_bytes=1).most_unread_bytes == Limits().max_unread_bytes


def test_the_configuration_in_a_load_is_a_document_too(tmp_path):
    TinyModel().write(tmp_path)
    with ModelRepository(tmp_path, control="explicit") as repository:
        repository.load()
        ask = Client(create_app(FrontEnd(repository))).ask
        body = {"parameters": {"config": '{"a":' * 65 + "1" + "}" * 65}}
        response = ask("POST", "/v2/repository/models/tiny/load", json=body)

    assert (response.status_code, "nested more than 64 deep" in response.text) == (400, True)


def test_an_answer_that_would_be_too_large_is_refused_before_it_is_made(ask_rows):
    rows = ask_rows(answer_bytes=1000)

    fits = rows([], [KEYS[0]] * 62, binary_data_output=True)
    refused = rows([], [KEYS[0]] * 63, binary_data_output=True)

    assert fits.status_code == 200
    assert refused.status_code == 413
    assert "252 numbers and needs about 1,008 bytes, but the server sends at most 1,000" in refused.json()["error"]


def test_an_answer_in_json_takes_four_times_as_much(ask_rows):
    rows = ask_rows(answer_bytes=1000)

    assert rows([], [KEYS[0]] * 15).status_code == 200
    assert rows([], [KEYS[0]] * 16).status_code == 413


def test_a_model_without_a_limit_of_keys_has_the_limit_of_answers(ask_rows):
    rows = ask_rows(answer_bytes=1000, change={"maxnum_catfeature_query_per_table_per_sample": None})

    assert rows([KEYS[0]] * 500, [], binary_data_output=True).status_code == 413


def test_the_answer_to_samples_has_the_limit_of_answers(tmp_path):
    TinyModel().write(tmp_path)
    repository, ask = asking(tmp_path, max_answer_bytes=16)
    sample = {"dense": [1, 2, 3], "keys": [[1], [2], []]}
    with repository:
        fits, refused = (ask("POST", "/predict/tiny", json={"samples": [sample] * count}) for count in (1, 2))

    assert fits.status_code == 200
    assert refused.status_code == 413
    reason = "samples: the answer has 2 numbers and needs about 32 bytes, but the server sends at most 16"
    assert refused.json() == {"error": reason}


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_number_that_json_does_not_have_is_an_error_instead_of_null(tmp_path, ask_rows, number):
    write_lookup_model(tmp_path)
    table = tmp_path / "hps_wdl" / "1" / "wdl0_sparse_2000.model"
    write_sparse_directory(table, KEYS, np.array([[0, 1], [2, number], [4, 5]], np.float32))
    rows = ask_rows()

    as_json = rows(KEYS, [])
    as_bytes = rows(KEYS, [], binary_data_output=True)

    assert as_json.status_code == 400
    assert f"OUTPUT0: number 3 of the answer is {np.float32(number)}, which JSON does not have" in as_json.text
    head = json.loads(as_bytes.content[: int(as_bytes.headers["inference-header-content-length"])])
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 24}
    np.testing.assert_array_equal(np.frombuffer(as_bytes.content[-24:], "<f4"), [0, 1, 2, number, 4, 5])


def test_tensors_in_shared_memory_have_the_limit_of_bodies(tmp_path, memory):
    TinyModel().write(tmp_path)
    repository, ask = asking(tmp_path, max_body_bytes=1000)
    with repository:
        os.truncate(memory, 1 << 40)  # it has no pages
        ask("POST", "/v2/systemsharedmemory/region/r/register", json={"key": memory.name, "byte_size": 1 << 40})
        answers = []
        for samples in (80, 90, 100_000_000):
            part = {"shared_memory_region": "r", "shared_memory_byte_size": 12 * samples}
            inputs = [
                {"name": "DES", "datatype": "FP32", "shape": [samples, 3], "parameters": part},
                {"name": "CATCOLUMN", "datatype": "INT64", "shape": [0], "data": []},
                {"name": "ROWINDEX", "datatype": "INT32", "shape": [1], "data": [0]},
            ]
            answers.append(ask("POST", "/v2/models/tiny/infer", json={"inputs": inputs}))

    assert [answer.status_code for answer in answers] == [400, 413, 413]  # the first has no offsets
    assert "1,200,000,000 bytes, but the server accepts 1,000" in answers[2].text


@pytest.mark.parametrize("shape", [[0, 2**31 - 1, 2**31 - 1, 2**31 - 1], [2**31 - 1, 2], [0] * 8, [1] * 7 + [2**31]])
def test_a_shape_that_no_array_has_is_refused(ask_tiny, shape):
    inputs = [{"name": name, "datatype": "FP32", "shape": shape, "data": []} for name in ("DES", "CATCOLUMN")]

    assert ask_tiny("POST", "/v2/models/tiny/infer", json={"inputs": inputs}).status_code == 400


def test_a_request_that_finds_no_memory_is_refused_and_the_server_continues(ask_tiny, monkeypatch):
    samples = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], []]}]}

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr(InferenceSession, "predict_batch", fail)
        response = ask_tiny("POST", "/predict/tiny", json=samples)

    assert (response.status_code, "too little free memory" in response.text) == (429, True)
    assert ask_tiny("POST", "/predict/tiny", json=samples).status_code == 200
