"""A failed request leaves nothing in memory: the garbage collector finds none of its frames.

A frame that only the collector frees keeps a request's body until the oldest generation is collected.
"""

import asyncio
import gc
import json
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import httpx
import pytest

import serving
from serving.errors import DeadlineError, OverloadedError, StoreError, StoreTimeoutError
from serving.frontend.batcher import Batching
from serving.frontend.front_end import FrontEnd, Settings
from serving.frontend.http.app import create_app
from serving.frontend.http.listening import listen
from serving.frontend.http.server import Server, Stop
from serving.frontend.limits import Limits
from serving.repository import ModelRepository
from serving.session import InferenceSession
from serving.storage.memory import MemoryTable
from serving.storage.rocksdb.table import RocksDbTable
from tests.serving.ps_files import write_ps
from tests.tools.tiny_model import TinyModel

PREDICT, INFER = "/predict/tiny", "/v2/models/tiny/infer"
SAMPLES = {"samples": [{"dense": [1, 2, 3], "keys": [[1], [2], []]}]}
TENSORS = {
    "DES": {"datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]},
    "CATCOLUMN": {"datatype": "INT64", "shape": [2], "data": [1, 2]},
    "ROWINDEX": {"datatype": "INT32", "shape": [4], "data": [0, 1, 2, 2]},
}
LIMITS = Limits(max_body_bytes=10_000)


def infer(**changes):
    """A request for one sample; ``changes`` are made to its tensors."""
    return {"inputs": [{"name": name, **tensor, **changes.get(name, {})} for name, tensor in TENSORS.items()]}


def text(document):
    return json.dumps(document).encode()


BAD_BODIES = {
    "not JSON": (PREDICT, b"{" * 50, {}),
    "no object": (INFER, b"[]", {}),
    "an unknown field": (PREDICT, text({**SAMPLES, "strange": [{}] * 10}), {}),
    "a wrong datatype": (INFER, text(infer(DES={"datatype": "INT64"})), {}),
    "a wrong shape": (INFER, text(infer(DES={"shape": [7]})), {}),
    "a wrong number": (INFER, text(infer(CATCOLUMN={"data": [1, "x"]})), {}),
    "wrong offsets": (INFER, text(infer(ROWINDEX={"data": [0, 2, 1, 2]})), {}),
    "not gzip": (PREDICT, b"0123456789", {"content-encoding": "gzip"}),
    "too large": (PREDICT, b" " * 20_000, {}),
    "no encoding": (PREDICT, b"{}", {"content-encoding": "zstd"}),
    "no timeout": (INFER, text(infer()), {"x-envoy-expected-rq-timeout-ms": "x"}),
    "an unknown model": ("/predict/other", text(SAMPLES), {}),
    "log settings": ("/v2/logging", text({"log_info": [1]}), {}),
    "a region": ("/v2/systemsharedmemory/region/r/register", text({"key": "/hotrow-none", "byte_size": 1}), {}),
    "a load": ("/v2/repository/models/tiny/load", text({"parameters": {"x": [1]}}), {}),
}


@pytest.fixture
def repository(tmp_path):
    TinyModel().write(tmp_path)
    with ModelRepository(tmp_path) as repository:
        repository.load()
        yield repository


@asynccontextmanager
async def served(repository, settings):
    """Serve in this process; yields a client."""
    front = FrontEnd(repository, settings)
    with listen("127.0.0.1", 0) as listener:
        server = Server(create_app(front), ready=lambda: None, stop=Stop(10))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                yield http
        finally:
            server.should_exit = True
            await serving
            front.close()


def frames_left_by(repository, acts, **settings):
    """Run ``acts`` with clients of a running server.

    Returns:
        by the name of the act, where the frames are that only the collector can free.
    """
    left = {}

    async def run():
        async with served(repository, Settings(limits=LIMITS, **settings)) as http:
            for act in acts.values():
                await act(http)  # what happens once, such as an import, is no leak
            gc.collect()
            gc.freeze()  # the collections below are quick; to unfreeze would make those of all later tests slow
            gc.disable()
            try:
                for name, act in acts.items():
                    await act(http)
                    await asyncio.sleep(0.05)  # the server has forgotten the request, too
                    gc.set_debug(gc.DEBUG_SAVEALL)
                    gc.collect()
                    gc.set_debug(0)
                    left[name] = places_of(gc.garbage)
                    gc.garbage.clear()
            finally:
                gc.enable()

    asyncio.run(run())
    return {name: places for name, places in left.items() if places}


def places_of(garbage):
    folder = str(Path(serving.__file__).parent)
    frames = [one for one in garbage if isinstance(one, FrameType) and one.f_code.co_filename.startswith(folder)]
    return [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_qualname}" for frame in frames]


def posting(path, body, headers=(), code=None):
    async def act(http):
        response = await http.post(path, content=body, headers=dict(headers))
        assert response.status_code >= 400 if code is None else response.status_code == code, response.text

    return act


def test_bad_requests_are_forgotten(repository):
    bodies = {name: posting(*request) for name, request in BAD_BODIES.items()}

    assert frames_left_by(repository, bodies) == {}


ERRORS = {
    503: lambda: StoreError("redis", "t", "no answer"),
    429: lambda: OverloadedError("full"),
    504: lambda: DeadlineError("late"),
    500: lambda: ValueError("a fault of the server"),
}


def test_answers_that_fail_are_forgotten(repository, monkeypatch):
    codes = []  # of the next failures

    def fail(_self, _batch):
        raise ERRORS[codes[0]]()

    monkeypatch.setattr(InferenceSession, "predict_batch", fail)

    def failing_with(code, path, body):
        async def act(http):
            codes[:] = [code]
            await posting(path, text(body), code=code)(http)

        return act

    requests = {"predict": (PREDICT, SAMPLES), "infer": (INFER, infer())}
    acts = {f"{name} {code}": failing_with(code, *request) for code in ERRORS for name, request in requests.items()}
    assert frames_left_by(repository, acts) == {}


def test_a_batch_that_fails_as_a_whole_is_forgotten(repository, monkeypatch):
    def fail(_self, _batches):
        raise StoreError("redis", "t", "no answer")

    monkeypatch.setattr(InferenceSession, "predict_batches", fail)

    async def act(http):
        bodies = [text(SAMPLES), text(SAMPLES), b"{}"]
        responses = await asyncio.gather(*(http.post(PREDICT, content=body) for body in bodies))
        assert [response.status_code for response in responses] == [200, 200, 400]

    assert frames_left_by(repository, {"a batch": act}, batching=Batching(max_delay_s=0.1)) == {}


def test_a_request_whose_client_leaves_is_forgotten(repository, monkeypatch):
    began, has_left = threading.Event(), threading.Event()

    def fail(_self, _batch):
        began.set()
        has_left.wait(60)
        raise StoreError("redis", "t", "no answer")

    monkeypatch.setattr(InferenceSession, "predict_batch", fail)

    async def act(http):
        began.clear(), has_left.clear()
        asking = asyncio.ensure_future(http.post(PREDICT, content=text(SAMPLES)))
        await asyncio.to_thread(began.wait, 60)
        asking.cancel()
        await asyncio.wait([asking])
        has_left.set()

    assert frames_left_by(repository, {"a request": act}) == {}


@pytest.mark.parametrize("budget", [{}, {"timeout_ms": 1000}], ids=["without a time budget", "with a time budget"])
def test_an_outage_of_a_tier_is_forgotten(tmp_path, monkeypatch, budget):
    TinyModel().write(tmp_path)
    write_ps(
        tmp_path,
        volatile_db={"type": "hash_map", "capacity_rows_per_table": {"tiny.user": 100, "tiny.item": 1000}},
        persistent_db={"type": "rocks_db", "path": "db", "num_threads": 1, **budget},
    )
    cold = text({"samples": [{"dense": [1, 2, 3], "keys": [[900], [2], [3]]}]})

    def fail(*_arguments):
        raise StoreTimeoutError("db", "t", "no answer")

    with ModelRepository(tmp_path) as repository:
        repository.load()
        with monkeypatch.context() as rocksdb:
            rocksdb.setattr(RocksDbTable, "fetch", fail)
            assert frames_left_by(repository, {"no answer": posting(PREDICT, cold, code=503)}) == {}
        monkeypatch.setattr(MemoryTable, "fetch", fail)  # so that RocksDB answers instead
        monkeypatch.setattr(MemoryTable, "fetch_pooled", fail)
        assert frames_left_by(repository, {"a slower tier": posting(PREDICT, cold, code=200)}) == {}
