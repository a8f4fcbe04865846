"""What one worker asks the others, and what it does if they do not answer."""

import asyncio
import os
import socket
import threading
from contextlib import closing, contextmanager

import pytest

from serving.errors import ModelFileError, RequestError, StoreError, UnknownModelError, WorkerError
from serving.frontend.front_end import FrontEnd
from serving.frontend.workers import Siblings, WorkerPlace, WorkerServer
from serving.metrics import Metrics, RequestMetrics, merged_page
from serving.repository import ModelRepository
from tests.tools.tiny_model import TinyModel


@pytest.fixture
def siblings(tmp_path):
    """The view of one of three workers."""

    def see(number, *, rereads=False):
        place = WorkerPlace(number, 3, -1, None, str(tmp_path), "test", os.getppid(), rereads)
        return Siblings(place)

    return see


@pytest.fixture
def front(tmp_path):
    TinyModel().write(tmp_path / "models")
    with ModelRepository(tmp_path / "models", control="explicit", startup=["*"]) as repository:
        repository.load()
        front = FrontEnd(repository)
        yield front
        front.close()


@contextmanager
def answering(siblings, front):
    """Run a worker's server in a thread."""
    loop = asyncio.new_event_loop()
    loop.add_signal_handler = lambda *_: None  # signals reach the main thread only
    server = WorkerServer(siblings, front, [])
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(1), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def test_a_worker_starts_with_the_versions_of_the_first_worker_that_answers(siblings, front):
    with answering(siblings(2), front):
        assert siblings(1).versions() == {"tiny": {"1": front.repository.loaded("tiny").config.digest}}
        assert siblings(0).versions() == {"tiny": {"1": front.repository.loaded("tiny").config.digest}}
        assert siblings(0, rereads=True).versions() is None


def test_the_first_worker_starts_alone_and_the_others_do_not(siblings):
    assert siblings(0).versions() is None
    with pytest.raises(WorkerError, match="worker 0: is not running; the server is starting it again"):
        siblings(1).versions()


def test_every_worker_gives_the_same_index(siblings, front):
    folder = front.repository.path
    with answering(siblings(0), front), ModelRepository(folder, control="explicit", peers=siblings(1)) as repository:
        repository.load()
        with closing(FrontEnd(repository, siblings=siblings(1))) as other:
            (TinyModel().write(folder, "broken") / "dense.model").write_bytes(b"1234")
            with pytest.raises(ModelFileError):
                front.repository.load_model("broken")
            index = asyncio.run(other.control.index())

    assert index == asyncio.run(front.control.index())
    assert [(one["name"], one["state"]) for one in index] == [("broken", "UNAVAILABLE"), ("tiny", "READY")]


def test_a_swap_waits_for_a_worker_that_starts(siblings, front):
    starting, swapped = siblings(1), threading.Event()
    with answering(siblings(0), front):
        starting.versions()
    swap = threading.Thread(target=lambda: (siblings(0).follow({}), swapped.set()))
    swap.start()

    assert not swapped.wait(0.2)
    starting.joined()

    assert swapped.wait(60)
    swap.join()


def test_the_error_names_the_worker_that_did_not_follow_and_the_others_follow(siblings, front, monkeypatch):
    followed = []

    def fail(versions):
        followed.append(versions)
        raise StoreError("redis", "", "no answer")

    monkeypatch.setattr(front.repository, "follow", fail)
    with (
        answering(siblings(1), front),
        answering(siblings(2), front),
        pytest.raises(WorkerError, match=r"^worker 1: redis: no answer$"),
    ):
        siblings(0).follow({"tiny": (2,)})

    assert followed == [{"tiny": [2]}, {"tiny": [2]}]


def test_a_worker_that_does_not_run_need_not_follow(siblings):
    siblings(0).follow({"tiny": (1,)})


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (UnknownModelError("no model"), UnknownModelError, "no model"),
        (RequestError("failed to load"), RequestError, "failed to load"),
        (StoreError("redis", "", "no answer"), WorkerError, "worker 0: redis: no answer"),
        (ValueError("a bug"), WorkerError, "worker 0: internal error; see the server's log"),
    ],
)
def test_a_client_gets_the_error_of_the_first_worker(siblings, front, monkeypatch, error, raised, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(front.control, "load", fail)
    with answering(siblings(0), front), pytest.raises(raised) as caught:
        siblings(1).lead("load", "tiny", {})

    assert (type(caught.value), str(caught.value)) == (raised, message)


def test_no_model_is_loaded_while_the_first_worker_is_not_running(siblings):
    with pytest.raises(WorkerError, match="worker 0: is not running; the server is starting it again"):
        siblings(1).lead("load", "tiny", {})


def test_a_worker_that_does_not_answer_is_absent_from_metrics_and_status(siblings, front):
    own = RequestMetrics()
    own.predicted("tiny", 7)
    with answering(siblings(2), front):
        page = merged_page(siblings(0).of_all("metrics", Metrics(own, list).record())).decode()
        documents = siblings(0).of_all("status", {"own": 1})

    assert 'hotrow_samples_total{model="tiny",worker="0"} 7.0' in page
    assert 'hotrow_requests_in_flight{worker="2"} 0.0' in page
    assert 'worker="1"' not in page
    assert list(documents) == [0, 2]
    assert documents[0] == {"own": 1}
    assert [model["name"] for model in documents[2]["models"]] == ["tiny"]


def test_a_worker_that_starts_does_without_shared_memory_that_is_gone(siblings, front, monkeypatch):
    monkeypatch.setattr(front.control, "changes", lambda: [["register", "gone", "/none", 0, 8], ["unregister", ""]])
    with answering(siblings(0), front), answering(siblings(1), front):
        assert front.control.regions.status() == []


def test_a_stopped_worker_delays_only_one_call(siblings, front, monkeypatch):
    asking, stopped = siblings(1), siblings(2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(stopped.address)
        listener.listen()
        monkeypatch.setattr("serving.frontend.workers._ANSWER_TIMEOUT_S", 0.01)
        assert asking.of_all("versions", {}) == {1: {}}
        monkeypatch.setattr("serving.frontend.workers._ANSWER_TIMEOUT_S", 3600)

        for _ in range(3):
            assert asking.of_all("versions", {}) == {1: {}}

    os.unlink(stopped.address)
    with answering(stopped, front):
        assert set(asking.of_all("versions", {})) == {1, 2}
        assert set(asking.of_all("versions", {})) == {1, 2}
