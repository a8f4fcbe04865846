"""What clients and load balancers of a server see of a Redis that is down when it starts, or later."""

import numpy as np
import pytest

from serving.frontend.front_end import FrontEnd
from serving.frontend.http.app import create_app
from serving.repository import ModelRepository
from tests.serving.frontend.app_client import Client
from tests.serving.ps_files import write_ps
from tests.tools.redis_servers import wait_until
from tests.tools.tiny_model import TinyModel

SAMPLE = {"dense": [1, 2, 3], "keys": [[1], [2], [999, 5000]]}


@pytest.fixture
def tiny_folder(own_server, tmp_path):
    """Write a repository of the model "tiny" with the test's own Redis, and RocksDB unless ``alone``."""

    def write(alone=False):
        TinyModel().write(tmp_path)
        tiers = {"volatile_db": {"type": "redis_cluster", "address": f"127.0.0.1:{own_server.port}"}}
        if not alone:
            tiers["persistent_db"] = {"type": "rocks_db", "path": "rows", "num_threads": 1}
        write_ps(tmp_path, **tiers)
        return tmp_path

    return write


def assert_predicts(client):
    response = client.post("/predict/tiny", json={"samples": [SAMPLE]})
    assert response.status_code == 200
    expected = TinyModel().probabilities([SAMPLE["dense"]], [SAMPLE["keys"]])
    np.testing.assert_allclose(response.json()["predictions"], expected, atol=2e-6)


def test_over_http_a_server_is_ready_and_exact_without_redis_and_with_it(late, tiny_folder):
    with ModelRepository(tiny_folder()) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        assert_predicts(client)
        assert client.get("/v2/health/ready").status_code == 200

        late.start()

        def redis_answers():
            assert_predicts(client)
            hits = [
                line
                for line in client.get("/metrics").text.splitlines()
                if "hits_total{" in line and 'tier="redis"' in line
            ]
            return len(hits) == 2 and not any(line.endswith(" 0.0") for line in hits)

        wait_until(redis_answers, "Redis answers about both tables")


def test_over_http_a_server_with_redis_alone_is_not_ready_while_that_is_down(own_server, tiny_folder):
    with ModelRepository(tiny_folder(alone=True)) as repository:
        repository.load()
        client = Client(create_app(FrontEnd(repository)))
        assert_predicts(client)

        own_server.kill()
        assert client.post("/predict/tiny", json={"samples": [SAMPLE]}).status_code == 503
        assert client.get("/v2/health/ready").status_code == client.get("/v2/models/tiny/ready").status_code == 503

        own_server.start()
        wait_until(lambda: client.get("/v2/health/ready").status_code == 200, "the server is ready again")
        assert_predicts(client)
