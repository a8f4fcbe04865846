"""Answers that clients get while the disk under RocksDB hangs."""

import asyncio
import threading
import time

import httpx
import numpy as np
import pytest

from serving.frontend.front_end import FrontEnd, Settings
from serving.frontend.http.app import create_app
from serving.repository import ModelRepository
from serving.storage.rocksdb.table import RocksDbTable
from tests.serving.ps_files import write_ps
from tests.tools.tiny_model import TinyModel

WAIT_S = 60
HOT, COLD = [[1], [2], [3]], [[900], [2], [3]]  # user keys below 100 are in RAM, and so are item keys


@pytest.fixture
def disk(monkeypatch):
    """An event that lets reads of RocksDB through while it is set."""
    runs = threading.Event()
    runs.set()
    fetch = RocksDbTable.fetch

    def wait_and_fetch(*args):
        assert runs.wait(WAIT_S)
        return fetch(*args)

    monkeypatch.setattr(RocksDbTable, "fetch", wait_and_fetch)
    yield runs
    runs.set()


@pytest.fixture
def ask_all(tmp_path, disk):
    """Send requests for many samples at once; return the responses."""
    TinyModel().write(tmp_path)
    tiers = {
        "volatile_db": {"type": "hash_map", "capacity_rows_per_table": {"tiny.user": 100, "tiny.item": 1000}},
        "persistent_db": {"type": "rocks_db", "path": "db", "num_threads": 1, "timeout_ms": 1000},
    }
    write_ps(tmp_path, **tiers)
    with ModelRepository(tmp_path) as repository:
        repository.load()
        app = create_app(FrontEnd(repository, Settings(threads=2)))

        def ask_all(samples):
            async def exchange():
                transport = httpx.ASGITransport(app=app)
                async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=WAIT_S) as client:
                    bodies = [{"samples": [{"dense": [1, 2, 3], "keys": keys}]} for keys in samples]
                    return await asyncio.gather(*(client.post("/predict/tiny", json=body) for body in bodies))

            return asyncio.run(exchange())

        yield ask_all


def assert_right(response, keys):
    expected = TinyModel().probabilities([[1, 2, 3]], [keys])
    np.testing.assert_allclose(response.json()["predictions"], expected, atol=2e-6)


def until_answered(ask_all, keys):
    """Repeat a request until the tiers answer in time; return the response."""
    end = time.monotonic() + WAIT_S
    while (response := ask_all([keys])[0]).status_code == 503:
        assert time.monotonic() < end
    return response


def test_hot_keys_are_answered_and_other_keys_get_503_until_the_disk_is_back(ask_all, disk):
    for keys in (HOT, COLD):
        assert_right(until_answered(ask_all, keys), keys)

    disk.clear()
    responses = ask_all([COLD, HOT] * 20)
    assert [response.status_code for response in responses] == [503, 200] * 20
    assert "no answer within 1000 ms (timeout_ms)" in responses[0].text
    assert responses[0].headers["retry-after"] == "1"
    for response in responses[1::2]:
        assert_right(response, HOT)

    disk.set()
    assert_right(until_answered(ask_all, COLD), COLD)
