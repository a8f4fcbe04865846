"""Redis Streams as a log: trimmed streams, several streams, users, entries that other programs wrote."""

import threading
import time

import pytest

from serving.errors import ConfigError, PositionLostError, SinkError, SourceUnreachableError
from serving.stream import open_sink, open_source
from serving.stream.redis_stream import RedisAddress, RedisStreamSource
from serving.stream.source import MOST_POLL_BYTES
from tests.serving.stream.test_log_contract import numbered, read, send

KEY = "hotrow.dcn"


@pytest.fixture
def client(server):
    with server.client() as client:
        client.flushall()
        yield client
        client.flushall()


@pytest.fixture
def url(server, client):
    return f"redis://127.0.0.1:{server.port}/0/{KEY}"


@pytest.fixture
def source(url):
    source = open_source(url)
    source.start({})
    yield source
    source.close()


@pytest.fixture
def sink(url):
    sink = open_sink(url)
    yield sink
    sink.close()


def test_an_entry_has_one_field(client, sink):
    end = send(sink, [b"message"])

    assert client.xrange(KEY) == [(end[KEY].encode(), {b"payload": b"message"})]


def test_an_entry_without_a_payload_is_an_empty_record(client, source):
    client.xadd(KEY, {"other": "field"}, id="5-7")

    [record] = read(source, 1)

    assert record == (KEY, "5-7", b"", None, KEY, 5)


def test_a_stream_may_be_trimmed_up_to_the_position(client, sink, source):
    send(sink, numbered(5))
    read(source, 5)
    client.xtrim(KEY, maxlen=1, approximate=False)
    send(sink, [b"next"])

    assert [record.payload for record in read(source, 1)] == [b"next"]


def test_a_stream_whose_newest_entry_was_read_may_be_trimmed_to_nothing(client, sink, source):
    send(sink, numbered(5))
    read(source, 5)
    client.xtrim(KEY, maxlen=0, approximate=False)

    assert source.poll(0.0) == []
    assert source.lag() == {KEY: 0}


def test_entries_that_are_trimmed_while_a_source_lags_are_an_error(client, sink, source):
    send(sink, numbered(100))
    read(source, 16)
    client.xtrim(KEY, maxlen=10, approximate=False)

    with pytest.raises(PositionLostError, match=f"partition {KEY}: the records after position"):
        source.poll(0.0)


def test_a_deleted_entry_at_the_position_is_an_error(client, sink, source):
    end = send(sink, numbered(1))
    read(source, 1)
    send(sink, numbered(1))
    client.xdel(KEY, end[KEY])

    with pytest.raises(PositionLostError):
        source.poll(0.0)


def test_a_deleted_stream_is_an_error(client, sink, source):
    send(sink, numbered(1))
    read(source, 1)
    client.delete(KEY)

    with pytest.raises(PositionLostError, match="the log is empty"):
        source.poll(0.0)


def test_several_streams_are_read_and_a_stream_that_appears_later_too(url, client):
    tags = ["hps_et.dcn.user", "hps_et.dcn.item"]
    source = open_source(url, tags)
    source.start({})
    sink = open_sink(url)
    sink.send(b"user", 0, tags[0])
    sink.flush()

    assert [(record.topic, record.payload) for record in read(source, 1)] == [(tags[0], b"user")]

    sink.send(b"item", 0, tags[1])
    ends = sink.flush()

    assert [(record.topic, record.payload) for record in read(source, 1)] == [(tags[1], b"item")]
    assert sorted(ends) == sorted(tags)
    source.close()
    sink.close()


def test_a_poll_returns_a_bounded_number_of_bytes(sink, source):
    """Also if large messages follow many small messages."""
    send(sink, [*numbered(500), *[bytes(1_000_000)] * 30])

    polled = []
    while sum(map(len, polled)) < 530:
        polled.append(source.poll(0.0))

    assert max(sum(len(record.payload) for record in records) for records in polled) <= 2 * MOST_POLL_BYTES


def test_lag_is_estimated_by_the_times_of_entries(client, source):
    for number in range(1, 101):
        client.xadd(KEY, {"payload": "x"}, id=f"{number}-0")
    source.start({KEY: "1-0"})
    source.poll(0.0)

    assert 80 <= source.lag()[KEY] <= 87


def test_a_key_of_another_type_is_an_error(client, source, sink):
    client.set(KEY, "text")

    with pytest.raises(SourceUnreachableError, match="WRONGTYPE"):
        source.poll(0.0)
    with pytest.raises(SinkError, match="WRONGTYPE"):
        send(sink, [b"message"])


def test_a_sink_that_failed_takes_nothing_more(client, sink):
    send(sink, numbered(1))
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(SinkError, match="maxmemory"):
            send(sink, numbered(2))
    finally:
        client.config_set("maxmemory", 0)

    for call in (lambda: sink.send(b"next", 0), sink.flush):
        with pytest.raises(SinkError):
            call()
    assert client.xlen(KEY) == 1


def test_users_have_passwords_that_are_in_no_text(client, server, url):
    client.acl_setuser("trainer", enabled=True, passwords=["+hunter2"], keys=["hotrow.*"], commands=["+@all"])
    try:
        named = f"redis://trainer:hunter2@127.0.0.1:{server.port}/0/{KEY}"
        send(open_sink(named), [b"message"])
        source = open_source(url, settings={"username": "trainer", "password": "hunter2"})
        source.start({})
        assert len(read(source, 1)) == 1

        refused = open_source(named.replace("hunter2", "hunter3"))
        refused.start({})
        with pytest.raises(SourceUnreachableError, match="invalid username-password pair") as caught:
            refused.poll(0.0)
    finally:
        client.acl_deluser("trainer")

    for text in (str(caught.value), repr(source)):
        assert "hunter" not in text


def test_a_server_that_is_not_there_is_an_error():
    source = open_source("redis://127.0.0.1:1/0/hotrow.dcn")
    source.start({})

    with pytest.raises(SourceUnreachableError, match=r"redis://127\.0\.0\.1:1/0: .*refused"):
        source.poll(0.0)


def test_close_does_not_wait_for_a_server_that_hangs(server, source):
    source.poll(0.0)
    server.freeze()
    try:
        ended = []
        waiting = threading.Thread(target=lambda: ended.append(source.poll(0.0)))
        waiting.start()
        waiting.join(0.2)
        begin = time.monotonic()
        source.close()
        waiting.join()
        assert (ended, time.monotonic() - begin < 2.0) == ([[]], True)
    finally:
        server.thaw()


def test_a_server_without_tls_is_an_error(server):
    address = RedisAddress(*server.address, tls=True, timeout_s=0.3)
    source = RedisStreamSource(address, [KEY])
    source.start({})

    with pytest.raises(SourceUnreachableError, match="rediss://"):
        source.poll(0.0)


def test_a_sink_needs_a_stream(url):
    with pytest.raises(SinkError, match="neither the URL nor the call names a stream"):
        open_sink(url.removesuffix(f"/{KEY}")).send(b"message", 0)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis:///0/stream", "expected redis://host:port/database/stream"),
        ("redis://host:port/0/stream", "expected redis://host:port/database/stream"),
        ("redis://:hunter2@host/x/stream", "expected redis://host:port/database/stream"),
        ("redis://:hunter2@host/0", "expected a topic or a stream"),
        ("redis://:hunter2@host/0/stream?passwort=1", "passwort: unknown setting; did you mean 'password'"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url, text):
    with pytest.raises(ConfigError, match=text) as caught:
        open_source(url)
    assert "hunter2" not in str(caught.value)
