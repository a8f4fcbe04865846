"""What runs on the event loop: short requests of models that cannot wait, and nothing else."""

import asyncio
import math
import secrets
import threading
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest

from serving.frontend import runner
from serving.frontend.front_end import FrontEnd, Settings
from serving.frontend.http.app import create_app
from serving.repository import ModelRepository
from serving.session import InferenceSession
from tests.serving.ps_files import write_ps
from tests.tools.tiny_model import TinyModel

SAMPLES = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], []]}]}
RAM = {"volatile_db": {"type": "hash_map"}}
BEHIND_RAM = {
    "volatile_db": {"type": "hash_map", "capacity_rows_per_table": {"tiny.user": 1000, "tiny.item": 1000}},
    "persistent_db": {"type": "rocks_db", "path": "db", "num_threads": 1},
}
SNAPSHOT = {"volatile_db": {"type": "snapshot", "path": "snapshots"}}


@pytest.fixture
def threads(monkeypatch):
    """The names of the threads that predict."""
    monkeypatch.setattr(runner, "INLINE_S", math.inf)  # every request is short, also on a busy machine
    names = []
    predict = InferenceSession.predict_batch

    def watched(self, batch):
        names.append(threading.current_thread().name)
        return predict(self, batch)

    monkeypatch.setattr(InferenceSession, "predict_batch", watched)
    return names


@pytest.fixture
def region():
    """POSIX shared memory with the dense features of ``SAMPLES``."""
    path = Path("/dev/shm") / f"hotrow-test-{secrets.token_hex(8)}"
    path.write_bytes(np.array([1, 2, 3], "<f4").tobytes())
    yield path
    path.unlink(missing_ok=True)


def ask_often(folder, threads, path, body, region=None):
    """Send the same request 20 times; the first one tells how long it takes. ``threads`` gets who answered."""

    async def exchange(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            if region is not None:
                await client.post("/v2/systemsharedmemory/region/r/register", json=region)
            for _ in range(20):
                response = await client.post(path, content=body if isinstance(body, bytes) else orjson.dumps(body))
                assert response.status_code == 200, response.text

    with ModelRepository(folder) as repository:
        repository.load()
        threads.clear()
        front = FrontEnd(repository, Settings())
        asyncio.run(exchange(create_app(front)))
        front.close()


@pytest.mark.parametrize(("tiers", "is_inline"), [(RAM, True), (BEHIND_RAM, False), (SNAPSHOT, False)])
def test_short_requests_run_on_the_event_loop_if_every_row_is_in_ram(tmp_path, threads, tiers, is_inline):
    TinyModel().write(tmp_path)
    write_ps(tmp_path, **tiers)

    ask_often(tmp_path, threads, "/predict/tiny", SAMPLES)

    assert ("MainThread" in threads) == is_inline
    assert len(threads) == 20


@pytest.mark.parametrize("letter", [b"s", rb"\u0073"])
def test_a_request_with_a_tensor_in_shared_memory_never_runs_on_the_event_loop(tmp_path, threads, region, letter):
    TinyModel().write(tmp_path)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
    inputs = [
        {"name": "DES", "datatype": "FP32", "shape": [1, 3], "parameters": place},
        {"name": "CATCOLUMN", "datatype": "INT64", "shape": [2], "data": [1, 2]},
        {"name": "ROWINDEX", "datatype": "INT32", "shape": [4], "data": [0, 1, 2, 2]},
    ]

    body = orjson.dumps({"inputs": inputs}).replace(b"shared_memory", letter + b"hared_memory")
    ask_often(tmp_path, threads, "/v2/models/tiny/infer", body, {"key": region.name, "byte_size": 12})

    assert threads
    assert "MainThread" not in threads


def test_loads_that_hang_leave_threads_for_other_work(tmp_path, monkeypatch):
    may_load = threading.Event()
    monkeypatch.setattr(ModelRepository, "load_model", lambda *_: may_load.wait(60))
    TinyModel().write(tmp_path)

    async def exchange(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            loading = [
                asyncio.ensure_future(client.post("/v2/repository/models/tiny/load", json={})) for _ in range(50)
            ]
            await asyncio.sleep(0.1)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 60) == "free"
            response = await client.post("/predict/tiny", json=SAMPLES)
            may_load.set()
            assert {one.status_code for one in await asyncio.gather(*loading)} == {200}
            return response.status_code

    with ModelRepository(tmp_path, control="explicit") as repository:
        repository.load()
        TinyModel().write(tmp_path, version=2)
        front = FrontEnd(repository, Settings())
        try:
            assert asyncio.run(exchange(create_app(front))) in (200, 404)
        finally:
            may_load.set()
            front.close()
