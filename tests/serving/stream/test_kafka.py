"""Kafka as a log: partitions, topics that appear later, HPS's topics, settings, secrets, brokers that are away."""

import builtins
import uuid

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from serving.errors import ConfigError, MissingExtraError, PositionLostError, SinkError
from serving.stream import open_sink, open_source
from serving.stream.kafka import KafkaSource
from tests.serving.stream.logs import IMPATIENT
from tests.serving.stream.test_log_contract import read, send


@pytest.fixture
def topic():
    return f"hotrow.{uuid.uuid4().hex}"


@pytest.fixture
def brokers(cluster):
    return f"kafka://{cluster.addresses}"


@pytest.fixture
def producer(cluster):
    """A client of librdkafka's, to write what no sink writes."""
    return Producer({"bootstrap.servers": cluster.addresses, "log_level": 0})


def opened(url, *arguments):
    source = open_source(url, *arguments)
    source.start({})
    return source


def test_a_key_group_stays_in_its_partition(brokers, topic):
    sink = open_sink(f"{brokers}/{topic}")
    for number in range(16):
        sink.send(b"%d" % number, number % 8)
    ends = sink.flush()
    source = opened(f"{brokers}/{topic}")

    records = read(source, 16)

    for partition in range(4):
        numbers = [int(record.payload) for record in records if record.partition == f"{topic}/{partition}"]
        assert numbers == [partition, partition + 4, partition + 8, partition + 12]
    assert ends == {f"{topic}/{partition}": "4" for partition in range(4)}
    source.close()


def test_the_first_topic_is_read_soon_after_it_appears(cluster, brokers, topic):
    source = KafkaSource(cluster.addresses, [topic])
    source.start({})
    assert source.poll(0.1) == []

    send(open_sink(f"{brokers}/{topic}"), [b"first"])

    assert [record.payload for record in read(source, 1)] == [b"first"]
    source.close()


def test_a_topic_that_appears_later_is_read_from_its_beginning(cluster, brokers, topic):
    send(open_sink(f"{brokers}/{topic}"), [b"first"])
    source = KafkaSource(cluster.addresses, [topic, topic + ".later"], refresh_s=0.1)
    source.start({})
    read(source, 1)

    sink = open_sink(f"{brokers}/{topic}.later")
    sink.send(b"later", 1)
    sink.flush()

    assert [(record.topic, record.payload) for record in read(source, 1)] == [(topic + ".later", b"later")]
    source.close()


def test_messages_go_to_the_topic_that_the_call_names(brokers, topic):
    tags = [f"hps_et.{topic.partition('.')[2]}.{table}" for table in ("user", "item")]
    sink = open_sink(brokers)
    for tag in tags:
        sink.send(tag.encode(), 0, tag)
    sink.flush()
    source = opened(brokers.replace(",", ";"), tags)

    assert {record.topic: record.payload for record in read(source, 2)} == {tag: tag.encode() for tag in tags}
    source.close()


def test_message_keys_and_messages_without_payload_are_passed_on(producer, brokers, topic):
    producer.produce(topic, None, key=b"k", partition=0, timestamp=1_700_000_000_123)
    producer.produce(topic, b"payload", partition=0)
    producer.flush()
    source = opened(f"{brokers}/{topic}")

    gone, whole = read(source, 2)

    assert (gone.payload, gone.message_key, gone.time_ms) == (b"", b"k", 1_700_000_000_123)
    assert (whole.payload, whole.message_key, whole.position) == (b"payload", None, "2")
    source.close()


def test_a_partition_that_the_log_does_not_have_is_an_error(brokers, topic):
    send(open_sink(f"{brokers}/{topic}"), [b"first"])
    source = open_source(f"{brokers}/{topic}")
    source.start({f"{topic}/0": "0", f"{topic}/9": "7"})

    with pytest.raises(PositionLostError, match=rf"partition {topic}/9: the records after position 7 are gone"):
        read(source, 1)
    source.close()


def test_a_poll_returns_a_bounded_number_of_bytes(brokers, topic):
    sink = open_sink(f"{brokers}/{topic}")
    for group in range(4):
        for _ in range(4):
            sink.send(bytes(900_000), group)
    sink.flush()
    source = opened(f"{brokers}/{topic}?queued.min.messages=1")

    sizes = []
    while sum(sizes) < 16:
        sizes.append(len(source.poll(1.0)))

    assert sum(sizes) == 16
    assert max(sizes) < 16
    source.close()


def test_committed_positions_are_those_of_the_group(cluster, brokers, topic):
    end = send(open_sink(f"{brokers}/{topic}"), [b"first", b"second"])
    source = opened(f"{brokers}/{topic}?group.id={topic}")
    read(source, 2)
    source.commit(end)
    watching = Consumer({"bootstrap.servers": cluster.addresses, "group.id": topic, "log_level": 0})

    for _ in range(200):
        source.poll(0.02)
        [committed] = watching.committed([TopicPartition(topic, 0)], timeout=5)
        if committed.offset == 2:
            break

    assert committed.offset == 2
    watching.close()
    source.close()


def test_a_sink_whose_brokers_are_away_fails_and_takes_nothing_more(cluster, brokers, topic):
    sink = open_sink(f"{brokers}/{topic}?{IMPATIENT}&message.timeout.ms=2000")
    send(sink, [b"first"])
    cluster.freeze()
    try:
        sink.send(b"lost", 0)
        with pytest.raises(SinkError, match=topic):
            sink.flush()
    finally:
        cluster.thaw()

    for call in (lambda: sink.send(b"next", 0), sink.flush):
        with pytest.raises(SinkError, match=topic):
            call()
    sink.close()


def test_a_message_that_is_too_large_for_kafka_is_an_error(brokers, topic):
    with pytest.raises(SinkError, match="Message size too large"):
        open_sink(f"{brokers}/{topic}").send(bytes(2_000_000), 0)


def test_a_sink_needs_a_topic(brokers):
    with pytest.raises(SinkError, match="neither the URL nor the call names a topic"):
        open_sink(brokers).send(b"message", 0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("no.such=1", "no.such"),
        ("socket.timeout.ms=soon", "socket.timeout.ms"),
        ("enable.auto.commit=true", "enable.auto.commit: Hotrow decides"),
        ("auto.offset.reset=latest", "auto.offset.reset: Hotrow decides"),
        ("bootstrap.servers=x", "bootstrap.servers: Hotrow decides"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(settings, text):
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        open_source(f"kafka://127.0.0.1:1/topic?{settings}")


def test_a_sink_has_settings_of_its_own():
    with pytest.raises(ConfigError, match=r"enable\.idempotence: Hotrow decides"):
        open_sink("kafka://127.0.0.1:1/topic?enable.idempotence=false")


def test_a_setting_may_be_named_a_secret():
    with pytest.raises(ConfigError) as caught:
        KafkaSource("127.0.0.1:1", ["t"], {"security.protocol": "hunter2"}, secrets=["security.protocol"])

    assert "***" in str(caught.value)
    assert "hunter" not in f"{caught.value} {caught.value.__cause__!r}"


@pytest.mark.parametrize("open_log", [open_source, open_sink])
def test_secrets_are_in_no_text(open_log):
    secrets = {"sasl.username": "trainer", "sasl.password": "hunter2", "ssl.key.password": "hunter3"}
    url = "kafka://127.0.0.1:1/topic"
    with pytest.raises(ConfigError) as caught:
        open_log(f"{url}?security.protocol=hunter2", settings=secrets)
    log = open_log(url, settings=secrets)

    for text in (str(caught.value), repr(caught.value.__cause__), repr(log)):
        assert "hunter" not in text
    log.close()


@pytest.mark.parametrize("open_log", [open_source, open_sink])
def test_without_the_package_the_error_names_the_extra(open_log, monkeypatch):
    imported = builtins.__import__

    def without_kafka(name, *arguments, **options):
        if name == "confluent_kafka":
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_kafka)

    with pytest.raises(MissingExtraError, match=r"hotrow\[kafka\]"):
        open_log("kafka://127.0.0.1:1/topic")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("kafka:///topic", "expected kafka://host:port/topic"),
        ("kafka://user:hunter2@host/topic", "sasl.username"),
        ("kafka://host:9092/topic?x", "expected [?]name=value"),
        ("kafka://host:9092/topic?a=1&a=2", "a setting appears twice"),
        ("kafka://host:9092/topic#x", "write # in a URL as %23"),
        ("kafka://host:9092", "expected a topic or a stream"),
        ("kafak://host:9092/topic", "did you mean 'kafka'"),
        ("kafka://[host/topic", "not a URL"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url, text):
    with pytest.raises(ConfigError, match=text) as caught:
        open_source(url)
    assert "hunter2" not in str(caught.value)
