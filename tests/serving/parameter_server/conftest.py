"""The model of ``small_server``, written once, and a server of it."""

import pytest

from serving.storage import MemoryStore
from tests.serving.small_server import DictStore, serve, write_model


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(config):
    """RAM, and a slower tier behind it; both have all rows."""
    with serve(config, MemoryStore(), DictStore("slow"), promote=True) as server:
        yield server
