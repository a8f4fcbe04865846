"""The model of ``small_server``, written once, and a server of it."""

import pytest

from serving.parameter_server import health
from serving.storage import MemoryStore
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
