"""A Redis cluster before RocksDB, whose masters die one after the other: requests neither fail nor get a wrong row."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.redis_servers import wait_until
from serving.config import RedisConfig
from serving.parameter_server import ParameterServer
from serving.storage import RedisStore, RocksDbStore
from tests.serving.small_server import KEYS, ROWS, UNKNOWN, write_model
from tests.serving.storage.redis_stores import wait_for_master

READERS = 3


@contextmanager
def readers(server):
    """Threads that look up rows all the while; what goes wrong in one is raised at the end. Gives their counts."""
    stop, answered = threading.Event(), [0] * READERS
    all_keys = np.array([*KEYS, *UNKNOWN])
    expected = np.concatenate([ROWS, np.zeros((len(UNKNOWN), 3), dtype=np.float32)])

    def read(number):
        rng = np.random.default_rng(number)
        while not stop.is_set():
            places = rng.integers(0, all_keys.size, 8)
            rows, found = server.lookup("m.t", all_keys[places])
            assert found.tolist() == (places < len(KEYS)).tolist()
            assert rows.tobytes() == expected[places].tobytes()
            answered[number] += 1

    with ThreadPoolExecutor(READERS) as threads:
        reading = [threads.submit(read, number) for number in range(READERS)]
        try:
            yield answered
        finally:
            stop.set()
        for one in reading:
            one.result()


@pytest.mark.long
def test_no_request_fails_or_gets_a_wrong_row_while_each_master_dies_and_comes_back(own_cluster, tmp_path):
    config = write_model(tmp_path)
    redis = RedisStore(RedisConfig(addresses=tuple(node.address for node in own_cluster.nodes), timeout_ms=500))
    with ParameterServer([redis, RocksDbStore(tmp_path / "db", num_threads=1)]) as server:
        server.load_model(config)

        def redis_hits():
            return server.counters()["m.t"].hits.get("redis", 0)

        with readers(server) as answered:
            for pair in zip(own_cluster.nodes[:3], own_cluster.nodes[3:], strict=True):
                for dies, takes_over in (pair, reversed(pair)):  # so that the first is the master again
                    seen = list(answered)
                    dies.kill()
                    wait_until(lambda seen=seen: all(np.greater(answered, seen)), "requests are answered meanwhile")
                    wait_for_master(takes_over)
                    dies.start()
                    own_cluster.wait()
                    before = redis_hits()
                    wait_until(lambda before=before: redis_hits() > before, "Redis answers again")
        assert server.counters()["m.t"].tier_errors["redis"]
