"""A genuine ``ps.json`` of HPS, messages in HPS's format from a program that is not Hotrow, and a broker that hangs."""

import json
import struct
import sys
import time

import confluent_kafka
import numpy as np
import pytest

from serving.config import read_ps_config
from serving.errors import ConfigError, MissingExtraError
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer
from serving.parameter_server.updates import reader
from serving.stream import kafka
from tests.serving.small_server import KEYS, ROWS
from tests.tools.kafka_cluster import KafkaCluster

TOPIC = "hps_et.m.sparse_embedding0"


@pytest.fixture
def cluster():
    cluster = KafkaCluster()
    yield cluster
    cluster.kill()


def publish(cluster, *pairs):
    """Send rows as HPS's sink does: ``HCTR``, the bytes of a row, then keys and rows."""
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.addresses})
    producer.produce(TOPIC, struct.pack("<4sI", b"HCTR", 12))  # a beacon
    payload = struct.pack("<4sI", b"HCTR", 12) + b"".join(struct.pack("<q3f", key, *row) for key, row in pairs)
    producer.produce(TOPIC, payload)
    producer.flush(30)


def until(condition, limit_s=30.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.slow  # real brokers, and a broker that hangs is noticed after a second
def test_a_server_of_hps_configuration_follows_kafka_and_outlives_a_broker_that_hangs(
    tmp_path, cluster, caplog, monkeypatch
):
    monkeypatch.setattr(reader, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(kafka, "_SILENT_S", 0.1)
    write_sparse_directory(tmp_path / "t", np.array(KEYS), ROWS)
    document = {
        "supportlonglong": True,
        "models": [{"model": "m", "sparse_files": ["t"], "embedding_vecsize_per_table": [3]}],
        "volatile_db": {"type": "hash_map", "update_filters": [".+"]},
        "persistent_db": {"type": "rocks_db", "path": "db", "update_filters": [".+"]},
        "update_source": {
            "type": "kafka_message_queue",
            "brokers": cluster.addresses.replace(",", ";"),
            "metadata_refresh_interval_ms": 30000,
            "receive_buffer_size": 262144,
            "poll_timeout_ms": 100,
            "max_batch_size": 8192,
            "failure_backoff_ms": 50,
            "max_commit_interval": 32,
            "kafka": {"socket.timeout.ms": 1000},
        },
    }
    (tmp_path / "ps.json").write_text(json.dumps(document))
    expected = dict(zip(KEYS, ROWS.tolist(), strict=True)) | {1: [1, 2, 3], 777: [4, 5, 6]}
    publish(cluster, (1, [1, 2, 3]), (777, [4, 5, 6]))
    config = read_ps_config(tmp_path / "ps.json")
    with ParameterServer.from_config(config) as server:
        name = "m.sparse_embedding0"
        until(lambda: server.lookup(name, np.array([1, 777]))[0].tolist() == [[1, 2, 3], [4, 5, 6]])
        cluster.freeze()
        until(lambda: server.health("m").readiness().state == "degraded")
        assert server.lookup(name, np.array(KEYS[1:]))[0].tolist() == ROWS[1:].tolist()
        cluster.thaw()
        publish(cluster, (777, [7, 8, 9]))
        until(lambda: server.lookup(name, np.array([777]))[0].tolist() == [[7, 8, 9]])
        until(lambda: server.health("m").readiness().state == "ready")
    with ParameterServer.from_config(config) as server:  # the rows are there before anything is read
        keys, expected[777] = np.array([*KEYS, 777]), [7, 8, 9]
        assert server.lookup(name, keys)[0].tolist() == [expected[key] for key in keys.tolist()]
    assert caplog.text.count("model 'm' gets no updates") == caplog.text.count("model 'm' gets updates again") == 1


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        pytest.param({"fetch.min.byte": 1}, ConfigError, "No such configuration property", id="an unknown setting"),
        pytest.param({}, MissingExtraError, r"hotrow\[kafka\]", id="without the client"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(tmp_path, monkeypatch, settings, error, reason):
    if not settings:
        monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    source = {"type": "kafka", "brokers": "127.0.0.1:9", "kafka": settings}
    (tmp_path / "ps.json").write_text(json.dumps({"supportlonglong": True, "update_source": source}))
    with pytest.raises(error, match=reason):
        ParameterServer.from_config(tmp_path / "ps.json")
