"""The model of ``small_server``, written once, and a server of it."""

import pytest

from serving.parameter_server import health
from serving.parameter_server.updates import reader
from serving.storage import MemoryStore
from serving.stream.folder import FolderSink
from tests.serving.parameter_server.stream import write_streamed_model
from tests.serving.small_server import DictStore, serve, write_model


@pytest.fixture(autouse=True)
def outages_end_at_once(monkeypatch):
    """Outages end with the first answer, so that their end needs no wait."""
    monkeypatch.setattr(health, "QUIET_S", 0.0)


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(config):
    """RAM, and a slower tier behind it; both have all rows."""
    with serve(config, MemoryStore(), DictStore("slow"), promote=True) as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(reader, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(reader, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(reader, "SYNC_INTERVAL_S", 0.02)


@pytest.fixture
def model(tmp_path):
    """The model of ``small_server``, whose manifest names a training run."""
    (tmp_path / "model").mkdir()
    return write_streamed_model(tmp_path / "model")


@pytest.fixture
def log(tmp_path):
    """A folder of messages."""
    (tmp_path / "log").mkdir()
    return FolderSink(tmp_path / "log")
