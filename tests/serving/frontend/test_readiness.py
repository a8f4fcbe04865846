"""Readiness while tiers fail: the answers that a load balancer gets, and when they change."""

import time

import pytest

from benchmarks.tiny_model import TinyModel
from serving.errors import StoreError
from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.lookup import LookupSession
from serving.repository import ModelRepository
from serving.storage import RocksDbStore
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import write_ps

SAMPLE = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], [3]]}]}
MODEL, SERVER = "/v2/models/tiny/ready", "/v2/health/ready"
DEADLINE_S = 20


@pytest.fixture
def disk(monkeypatch):
    """The RocksDB tables that cannot be read."""
    broken, fetch = set(), RocksDbStore.fetch

    def fetch_unless_broken(store, table, keys, out):
        if table in broken:
            raise StoreError("rocksdb", table, "Input/output error")
        return fetch(store, table, keys, out)

    monkeypatch.setattr(RocksDbStore, "fetch", fetch_unless_broken)
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


def codes(client):
    return [client.get(path).status_code for path in (MODEL, SERVER)]


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


def test_a_model_whose_hot_rows_are_in_ram_stays_ready_when_the_disk_fails(clients, disk):
    client = clients({"type": "hash_map", "capacity_rows": 200})
    disk |= {"tiny@1.item", "tiny@1.user"}
    cold = {"samples": [{"dense": [1, 2, 3], "keys": [[900], [900], [900]]}]}

    assert client.post("/predict/tiny", json=cold).status_code == 503
    assert codes(client) == [200, 200]
    assert client.post("/predict/tiny", json=SAMPLE).status_code == 200


def test_the_server_is_not_ready_while_one_of_its_models_is_not(clients, disk):
    client = clients({"type": "disabled"}, names=("tiny", "other"))
    disk |= {"other@1.item"}
    assert client.post("/predict/other", json=SAMPLE).status_code == 503

    assert codes(client) == [200, 503]
    assert client.get("/v2/models/other/ready").status_code == 503


def test_a_missing_model_is_neither_ready_nor_unready(clients):
    assert clients({"type": "disabled"}).get("/v2/models/absent/ready").status_code == 404


def test_a_model_whose_device_failed_is_not_ready(clients, monkeypatch):
    client = clients({"type": "hash_map"})
    assert codes(client) == [200, 200]

    monkeypatch.setattr(LookupSession, "is_answering", False)

    assert codes(client) == [503, 503]
