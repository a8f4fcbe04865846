"""Readiness while tiers fail: the answers that a load balancer gets, and when they change."""

import re
import time
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.errors import StoreError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.lookup import LookupSession
from serving.lookup.cached_session import CachedLookupSession
from serving.opening import Runtime
from serving.parameter_server import health
from serving.parameter_server import models as served_models
from serving.repository import ModelRepository
from serving.storage.rocksdb.table import RocksDbTable
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import write_lookup_model, write_ps
from tests.tools.tiny_model import TinyModel

SAMPLE = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], [3]]}]}
COLD = {"samples": [{"dense": [1, 2, 3], "keys": [[900], [900], [900]]}]}
BOUNDED_RAM = {"type": "hash_map", "capacity_rows": 200}
MODEL, SERVER = "/v2/models/tiny/ready", "/v2/health/ready"
DEADLINE_S = 20


@pytest.fixture
def disk(monkeypatch):
    """The RocksDB tables and keys that cannot be read."""
    broken, fetch = set(), RocksDbTable.fetch

    def fetch_unless_broken(table, keys, out):
        name = table.spec.name
        if re.sub("-[0-9a-f]{8}", "", name) in broken or not broken.isdisjoint(keys.tolist()):
            raise StoreError("rocksdb", name, "Input/output error")
        return fetch(table, keys, out)

    monkeypatch.setattr(RocksDbTable, "fetch", fetch_unless_broken)
    return broken


@pytest.fixture
def clients(tmp_path):
    """Make a client of a server with the models ``names`` in the given tiers."""
    opened = []

    def open_client(volatile, names=("tiny",)):
        for name in names:
            TinyModel().write(tmp_path, name)
        tiers = {"volatile_db": volatile, "persistent_db": {"type": "rocks_db", "path": "db", "num_threads": 1}}
        write_ps(tmp_path, **tiers)
        repository = ModelRepository(tmp_path)
        repository.load()
        opened.append(repository)
        return Client(create_app(FrontEnd(repository)))

    yield open_client
    for repository in opened:
        repository.close()


@pytest.fixture
def clock(monkeypatch):
    """The clock of outages and requests, which a test moves by hand."""
    now = [1000.0]
    monkeypatch.setattr(health, "now_s", lambda: now[0])
    return now


def codes(client):
    return [client.get(path).status_code for path in (MODEL, SERVER)]


def states(client):
    """The state of the server, and the state and the reason of its first version."""
    document = client.get("/status").json()
    [indexed] = client.post("/v2/repository/index", json={}).json()
    [version] = document["models"][0]["versions"]
    assert (indexed["state"], indexed.get("reason", "")) == (version["state"], version["reason"])
    return document["state"], version["state"], version["reason"]


def tiers_up(client):
    """``hotrow_tier_up`` by tier, of the table where it is higher."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "hotrow_tier_up"]
    return {sample.labels["tier"]: sample.value for sample in sorted(samples, key=lambda one: one.value)}


def wait_until_ready(client):
    """Ask for readiness only, as a load balancer does, without predict requests."""
    end = time.monotonic() + DEADLINE_S
    while codes(client) != [200, 200]:
        assert time.monotonic() < end


def test_a_model_is_not_ready_until_one_of_its_tiers_answers(clients, disk):
    client = clients({"type": "disabled"})
    assert codes(client) == [200, 200]

    disk |= {"tiny@1.item"}
    assert client.post("/predict/tiny", json=SAMPLE).status_code == 503
    for _ in range(3):
        assert codes(client) == [503, 503]
    assert client.get("/v2/health/live").status_code == 200
    assert client.get("/v2/models/tiny/versions/1/ready").status_code == 503

    disk.clear()
    wait_until_ready(client)
    assert client.post("/predict/tiny", json=SAMPLE).status_code == 200


def test_a_request_that_is_answered_makes_the_model_ready_at_once(clients, disk):
    client = clients({"type": "disabled"})
    disk |= {"tiny@1.item"}
    client.post("/predict/tiny", json=SAMPLE)
    disk.clear()

    assert client.post("/predict/tiny", json=SAMPLE).status_code == 200
    assert codes(client) == [200, 200]


def test_a_model_is_degraded_while_most_requests_succeed_and_not_ready_while_most_fail(clients, disk):
    client = clients(BOUNDED_RAM)
    disk |= {"tiny@1.item", "tiny@1.user"}

    assert client.post("/predict/tiny", json=SAMPLE).status_code == 200
    assert client.post("/predict/tiny", json=COLD).status_code == 503
    assert codes(client) == [200, 200]
    assert states(client) == ("degraded", "READY", "tier rocksdb answers with errors")

    assert client.post("/predict/tiny", json=COLD).status_code == 503
    assert codes(client) == [503, 503]
    reason = "2 of 3 requests in a minute failed: tier rocksdb answers with errors"
    assert states(client) == ("not ready", "UNAVAILABLE", reason)

    assert client.post("/predict/tiny", json=SAMPLE).status_code == 200
    assert codes(client) == [200, 200]


def test_a_model_without_requests_is_ready_again_only_when_its_tier_answers(clients, disk, clock):
    client = clients(BOUNDED_RAM)
    disk |= {"tiny@1.item", "tiny@1.user"}
    for _ in range(3):
        assert client.post("/predict/tiny", json=COLD).status_code == 503

    clock[0] += 3600.0
    assert codes(client) == [503, 503]

    disk.clear()
    end = time.monotonic() + DEADLINE_S
    while client.get("/status").json()["state"] != "ready":  # degraded between the answers to two probes
        clock[0] += 0.1
        assert time.monotonic() < end
    assert codes(client) == [200, 200]
    assert states(client) == ("ready", "READY", "")


def test_a_disk_that_is_damaged_in_part_has_one_outage_which_ends_when_the_damaged_rows_are_read(
    clients, disk, clock, caplog
):
    client = clients({"type": "disabled"})
    disk |= {900}
    for _ in range(3):
        assert client.post("/predict/tiny", json=COLD).status_code == 503
        for _ in range(2):
            assert client.post("/predict/tiny", json=SAMPLE).status_code == 200
        clock[0] += 10.0
        assert states(client) == ("degraded", "READY", "tier rocksdb answers with errors")

    disk.clear()
    assert client.post("/predict/tiny", json=COLD).status_code == 200
    clock[0] += 10.0
    wait_until_ready(client)
    assert [record.levelname for record in caplog.records if record.name == health.__name__] == ["ERROR", "WARNING"]


def test_old_requests_leave_the_last_minute_while_a_disk_that_is_damaged_in_part_answers(
    clients, disk, clock, monkeypatch
):
    monkeypatch.setattr(served_models, "WATCH_INTERVAL_S", 0.01)
    client = clients({"type": "disabled"})
    disk |= {900}
    assert client.post("/predict/tiny", json=COLD).status_code == 503
    assert codes(client) == [503, 503]

    clock[0] += 61.0

    wait_until_ready(client)
    assert states(client) == ("degraded", "READY", "tier rocksdb answers with errors")


def test_requests_older_than_a_minute_do_not_affect_readiness(clients, clock, monkeypatch):
    client = clients(BOUNDED_RAM)
    monkeypatch.setattr(RocksDbTable, "fetch", Mock(side_effect=ZeroDivisionError))
    assert client.post("/predict/tiny", json=COLD).status_code == 500
    assert codes(client) == [503, 503]
    assert states(client) == ("not ready", "UNAVAILABLE", "1 of 1 requests in a minute failed")

    clock[0] += 61.0

    assert codes(client) == [200, 200]


def test_bad_requests_leave_a_model_ready(clients):
    client = clients(BOUNDED_RAM)
    for bad in ({"samples": []}, {"samples": [{"dense": [1], "keys": [[1], [2], [3]]}]}):
        assert client.post("/predict/tiny", json=bad).status_code == 400

    assert states(client) == ("ready", "READY", "")


def test_an_outage_is_found_without_a_request_and_its_metric_is_0(clients, disk, monkeypatch):
    monkeypatch.setattr(served_models, "INTERVALS_OF_A_BEAT", 1)
    monkeypatch.setattr(served_models, "WATCH_INTERVAL_S", 0.01)
    client = clients(BOUNDED_RAM)
    assert tiers_up(client) == {"memory": 1.0, "rocksdb": 1.0}

    disk |= {"tiny@1.item", "tiny@1.user"}
    end = time.monotonic() + DEADLINE_S
    while tiers_up(client) != {"memory": 1.0, "rocksdb": 0.0}:
        assert time.monotonic() < end

    assert states(client)[0] == "degraded"
    for table in client.get("/status").json()["models"][0]["versions"][0]["tables"]:
        assert [(tier["name"], tier["is_up"], tier["errors"]) for tier in table["tiers"]] == [
            ("memory", True, 0),
            ("rocksdb", False, 0),
        ]
    assert client.post("/predict/tiny", json=SAMPLE).status_code == 200


def test_the_log_has_an_outages_effect_its_duration_and_the_failed_requests(clients, disk, clock, caplog):
    client = clients(BOUNDED_RAM)
    disk |= {"tiny@1.item"}
    for sample in (COLD, SAMPLE, COLD):
        client.post("/predict/tiny", json=sample)
        clock[0] += 5.0

    disk.clear()
    assert client.post("/predict/tiny", json=COLD).status_code == 200
    starts, ends = [record for record in caplog.records if record.name == health.__name__]
    assert starts.levelname == "ERROR"
    assert re.sub("-[0-9a-f]{8}", "", starts.getMessage()) == (
        "tier rocksdb answers with errors, model 'tiny' version 1: Input/output error (table 'tiny@1.item'): "
        "requests fail with 503, unless memory has all of their rows"
    )
    end = "tier rocksdb answers again, model 'tiny' version 1: after 15.0 s and 2 failed requests"
    assert ends.getMessage() == end


def test_the_server_is_not_ready_while_one_of_its_models_is_not(clients, disk):
    client = clients({"type": "disabled"}, names=("tiny", "other"))
    disk |= {"other@1.item"}
    assert client.post("/predict/other", json=SAMPLE).status_code == 503

    assert codes(client) == [200, 503]
    assert client.get("/v2/models/other/ready").status_code == 503


def test_a_missing_model_is_neither_ready_nor_unready(clients):
    assert clients({"type": "disabled"}).get("/v2/models/absent/ready").status_code == 404


@pytest.mark.parametrize(
    ("device", "code", "state", "follows"),
    [
        pytest.param("cpu", 503, "not ready", "every request fails with 503", id="no cache"),
        pytest.param(
            "runner",
            200,
            "degraded",
            "requests get default values for rows that the GPU caches miss, or fail with 503",
            id="a GPU cache that answers before its rows are there",
        ),
    ],
)
def test_a_model_without_a_network_answers_as_its_cache_allows(tmp_path, disk, caplog, device, code, state, follows):
    cache = {"gpucache": True, "embedding_cache_mode": "asynchronous", "hit_rate_threshold": 0.0, "init_ec": False}
    tiers = {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "rocks_db", "path": "db", "num_threads": 1}}
    with ModelRepository(write_lookup_model(tmp_path, cache, **tiers), Runtime(device=device)) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        disk |= {"hps_wdl.embedding_table1", "hps_wdl.embedding_table2"}
        tensors = [
            {"name": "KEYS", "datatype": "INT64", "shape": [2], "data": [3, 7]},
            {"name": "NUMKEYS", "datatype": "INT32", "shape": [2], "data": [1, 1]},
        ]
        answer = client.post("/v2/models/hps_wdl/infer", {"inputs": tensors})
        end = time.monotonic() + DEADLINE_S
        while states(client)[0] == "ready":  # the rows are read in the background
            assert time.monotonic() < end

        assert (answer.status_code, states(client)[0]) == (code, state)
        assert code == 503 or answer.json()["parameters"]["defaulted_keys"] == 2
        [starts] = [record.getMessage() for record in caplog.records if record.name == health.__name__]
        assert starts.startswith("tier rocksdb answers with errors, model 'hps_wdl': Input/output error (table 'hps_")
        assert starts.endswith(f": {follows}")


def test_a_server_that_waits_for_its_first_model_is_ready(tmp_path):
    TinyModel().write(tmp_path)
    with ModelRepository(tmp_path, control="explicit") as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        assert client.get(SERVER).status_code == 200
        assert client.get("/status").json()["state"] == "ready"
        assert client.get(MODEL).status_code == 404
    assert client.get(SERVER).status_code == 503


def test_a_model_whose_device_failed_is_not_ready(clients, monkeypatch):
    client = clients({"type": "hash_map"})
    assert codes(client) == [200, 200]

    monkeypatch.setattr(LookupSession, "is_answering", False)

    assert codes(client) == [503, 503]
    assert states(client) == ("not ready", "UNAVAILABLE", "CPU failed")


def test_a_model_that_has_lost_one_of_its_devices_is_degraded(tmp_path, monkeypatch):
    failed = set()
    with ModelRepository(
        write_lookup_model(tmp_path, {"gpucache": True, "deployed_device_list": [0, 1]}), Runtime(device="runner")
    ) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        works = property(lambda lookup: lookup.device.name not in failed)
        monkeypatch.setattr(CachedLookupSession, "is_answering", works)

        assert states(client) == ("ready", "READY", "")
        failed |= {"runner:1"}
        assert states(client) == ("degraded", "READY", "runner:1 failed")
        failed |= {"runner"}
        assert states(client) == ("not ready", "UNAVAILABLE", "runner and runner:1 failed")
