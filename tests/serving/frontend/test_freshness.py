"""What people and clients see of a model's updates: the status document and the parameters of answers."""

import copy
import re
import time
from pathlib import Path

import numpy as np
import pytest

from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.frontend.status import merged_status
from serving.repository import ModelRepository
from serving.stream.folder import FolderSink
from serving.stream.message import Kind, UpdateMessage, encode
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import write_ps
from tests.tools.tiny_model import TinyModel

METRICS_PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
SAMPLES = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [1], []]}]}
TENSORS = {
    "inputs": [
        {"name": "DES", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]},
        {"name": "CATCOLUMN", "shape": [2], "datatype": "INT64", "data": [1, 1]},
        {"name": "ROWINDEX", "shape": [4], "datatype": "INT32", "data": [0, 1, 2, 2]},
    ]
}


def message(table="user", **other):
    rows = np.ones((1, 4), np.float32)
    return encode(UpdateMessage(Kind.UPSERT, "ctr", table, np.array([1]), rows, **other))


@pytest.fixture
def log(tmp_path):
    return FolderSink(tmp_path / "log")


@pytest.fixture
def served(tmp_path, log):
    """A repository with one model, whose updates come from a folder."""
    repository = tmp_path / "models"
    TinyModel().write(repository, "ctr", 3)
    write_ps(repository, update_source={"type": "folder", "path": str(tmp_path / "log"), "poll_timeout_ms": 20})
    with ModelRepository(repository) as opened:
        opened.load()
        yield Client(create_app(FrontEnd(opened)))


def until(condition, limit_s=10.0):
    """Return whether the condition holds within a time."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def status(client):
    return client.get("/status").json()


def reader_after(client, messages):
    """The status of the updates once so many messages were read."""
    assert until(lambda: reader_of(status(client))["partitions"] == [at(messages)])
    return reader_of(status(client))


def reader_of(document):
    [version] = document["models"][0]["versions"]
    [reader] = version["updates"]
    return reader


def at(position):
    return {"name": "folder", "position": str(position), "lag_messages": 0}


def test_the_status_has_a_reader_of_updates(served, log):
    log.send(message(step=7, time_ms=1_000), 0)
    log.send(message("item", time_ms=5_000), 0)
    log.send(message("no"), 0)
    log.send(b"other bytes", 0)
    log.send(encode(UpdateMessage(Kind.DELETE, "another", "user", np.array([1]), None)), 0)

    reader = reader_after(served, 5)

    assert sum(reader.pop("visible_times")["counts"]) == 2
    assert reader.pop("lag_s") >= 0
    assert reader == {
        "worker": 0,
        "fault": "",
        "lag_messages": 0,
        "applied": {"upsert": 2},
        "skipped": {"model": 1},
        "rejected": {"table": 1, "format": 1},
        "tables": [{"name": "item", "step": None, "time_ms": 5_000}, {"name": "user", "step": 7, "time_ms": 1_000}],
        "partitions": [at(5)],
    }


def test_the_status_has_the_fault_of_the_updates_without_folders(served, tmp_path):
    (tmp_path / "log").rename(tmp_path / "moved")

    assert until(lambda: reader_of(status(served))["fault"])

    fault = reader_of(status(served))["fault"]
    assert fault == "log: cannot be listed: No such file or directory"
    [version] = status(served)["models"][0]["versions"]
    assert version["reason"] == f"no updates: {fault}"


def test_each_worker_has_its_own_reader(served):
    one, two = status(served), status(served)
    reader_of(two)["worker"] = 1

    both = merged_status(copy.deepcopy([one, two]))

    [version] = both["models"][0]["versions"]
    assert version["updates"] == [reader_of(one), reader_of(two)]


def test_the_metrics_are_documented(served, log):
    log.send(message(step=7, time_ms=1_000), 0)
    log.send(b"other bytes", 0)
    log.send(encode(UpdateMessage(Kind.DELETE, "another", "user", np.array([1]), None)), 0)
    reader_after(served, 3)

    page = served.get("/metrics").text
    names = set(re.findall(r"^(hotrow_update\w*?)(?:_bucket|_count|_sum)?\{", page, flags=re.MULTILINE))

    assert len(names) == 10
    assert [name for name in sorted(names) if f"`{name}`" not in METRICS_PAGE] == []


def test_an_answer_says_how_new_the_rows_are_if_the_request_asks(served, log):
    log.send(message(step=7, time_ms=1_000), 0)
    log.send(message("item", step=6, time_ms=5_000), 0)
    reader_after(served, 2)
    asked = {"newest_step": 7, "newest_time_ms": 5_000, "lag_messages": 0, "lag_ms": 0}

    by_tensors = [
        served.post("/v2/models/ctr/infer", TENSORS | {"parameters": parameters}).json()["parameters"]
        for parameters in ({}, {"freshness": False}, {"freshness": True})
    ]
    by_samples = [
        served.post("/predict/ctr", SAMPLES | question).json().get("freshness")
        for question in ({}, {"freshness": False}, {"freshness": True})
    ]

    assert by_tensors == [{"defaulted_keys": 0}, {"defaulted_keys": 0}, {"defaulted_keys": 0, **asked}]
    assert by_samples == [None, None, asked]


def test_a_model_without_updates_has_no_freshness(tmp_path):
    TinyModel().write(tmp_path, "ctr", 3)
    with ModelRepository(tmp_path) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))

        answer = client.post("/v2/models/ctr/infer", TENSORS | {"parameters": {"freshness": True}}).json()
        predictions = client.post("/predict/ctr", SAMPLES | {"freshness": True}).json()
        [version] = status(client)["models"][0]["versions"]

    assert (answer["parameters"], predictions["freshness"], version["updates"]) == ({"defaulted_keys": 0}, {}, [])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/models/ctr/infer", TENSORS | {"parameters": {"freshness": 1}}),
        ("/predict/ctr", SAMPLES | {"freshness": 1}),
    ],
)
def test_freshness_must_be_a_boolean(served, path, body):
    answer = served.post(path, body)

    assert answer.status_code == 400
    assert "freshness: expected true or false, but the number 1 came" in answer.json()["error"]


def test_the_settings_of_the_command_replace_those_of_the_file(tmp_path):
    TinyModel().write(tmp_path, "ctr", 3)
    source = {"type": "folder", "path": "log", "max_staleness_s": 1000, "rejected_file": "first"}
    write_ps(tmp_path, update_source=source)
    settings = {"max_staleness_s": 0.0, "rejected_file": tmp_path / "second"}

    with ModelRepository(tmp_path, update_settings=settings) as repository:
        repository.load()

        assert until(lambda: repository.readiness_of_all().state == "not ready")  # the log is absent
        assert "older than max_staleness_s, 0" in repository.readiness_of_all().reason
    assert ((tmp_path / "first").exists(), (tmp_path / "second").exists()) == (False, True)
