"""What a node sends, however the network cuts it, against a list of what it meant."""

import socket
import time
from unittest import mock

import hiredis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import RedisConfig, RedisTlsConfig
from serving.storage import redis_connection
from serving.storage.redis_connection import Address, RedisConnection, RedisNodeError, tls_context
from serving.storage.redis_pool import NodePool

VALUE_BYTES = 8
NODE = Address("10.0.0.1", 7000)


class ScriptedSocket:
    """Gives what a node would send, in the pieces in which it would come."""

    def __init__(self, pieces):
        self.pieces = [piece for piece in pieces if piece]
        self.is_closed = False

    def settimeout(self, _):
        pass

    def sendall(self, _):
        pass

    def recv_into(self, room):
        if not self.pieces:
            raise TimeoutError("timed out")
        piece = self.pieces.pop(0)
        taken, rest = piece[: len(room)], piece[len(room) :]
        room[: len(taken)] = taken
        if rest:
            self.pieces.insert(0, rest)
        return len(taken)

    def close(self):
        self.is_closed = True


def connected(pieces):
    script = ScriptedSocket(pieces)
    with mock.patch.object(redis_connection, "_connected", return_value=script):
        return RedisConnection(NODE, RedisConfig(), None, soon()), script


def soon():
    return time.monotonic() + 60


def encoded(values):
    """The reply to HMGET, None for an absent value; a string is an error."""
    if isinstance(values, str):
        return f"-{values}\r\n".encode()
    parts = [b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value) for value in values]
    return b"*%d\r\n" % len(values) + b"".join(parts)


def cut(data, places):
    ends = [*sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# Values that look like parts of the protocol, too.
VALUE = st.one_of(
    st.binary(min_size=VALUE_BYTES, max_size=VALUE_BYTES),
    st.sampled_from([b"\r\n$-1\r\n\0", b"$8\r\n\0\0\0\0", b"*1\r\n$8\r\n"]),
)
ODD_VALUE = st.one_of(st.none(), st.binary(max_size=VALUE_BYTES + 3))
REPLY = st.one_of(
    st.lists(VALUE, min_size=1, max_size=12),
    st.lists(st.one_of(VALUE, VALUE, VALUE, ODD_VALUE), min_size=1, max_size=12),
    st.just("MOVED 1 10.0.0.2:7000"),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(REPLY, min_size=1, max_size=4), st.lists(st.integers(0, 10**6), max_size=30))
def test_replies_are_read_in_their_order_however_they_are_cut(replies, places):
    data = b"".join(map(encoded, replies))
    connection, _ = connected(cut(data, places))
    connection.send([b""] * len(replies), soon())

    for reply in replies:
        assert not connection.is_reusable
        count = 3 if isinstance(reply, str) else len(reply)
        values = connection.read_values(count, VALUE_BYTES, soon())
        if isinstance(reply, str):
            assert isinstance(values, hiredis.ReplyError)
            assert str(values) == reply
        else:
            assert (values.tolist() if isinstance(values, np.ndarray) else values) == reply

    assert connection.is_reusable


@settings(deadline=None)
@given(st.lists(VALUE, min_size=1, max_size=12), st.lists(st.integers(0, 10**6), max_size=9), st.integers(1, 10**6))
def test_a_reply_that_ends_early_is_an_error_and_the_connection_is_not_used_again(reply, places, missing):
    data = encoded(reply)
    connection, script = connected(cut(data[: -1 - missing % len(data)], places))
    connection.send([b""], soon())

    with pytest.raises(RedisNodeError, match=r"10\.0\.0\.1:7000: no reply: timed out"):
        connection.read_values(len(reply), VALUE_BYTES, soon())

    assert not connection.is_reusable
    assert script.is_closed


def test_values_of_one_size_are_not_parsed():
    connection, _ = connected([encoded([b"12345678"] * 100)])
    connection.send([b""], soon())

    with mock.patch.object(connection, "_reader", wraps=connection._reader) as reader:
        values = connection.read_values(100, VALUE_BYTES, soon())

    assert values.tolist() == [b"12345678"] * 100
    reader.feed.assert_not_called()


def test_a_node_that_hangs_up_is_an_error():
    connection, _ = connected([])
    connection._socket.recv_into = lambda room: 0
    connection.send([b""], soon())

    with pytest.raises(RedisNodeError, match="closed the connection"):
        connection.read_reply(soon())


@pytest.mark.parametrize(
    "operation", [lambda one: one.send([b""], time.monotonic()), lambda one: one.read_reply(time.monotonic())]
)
def test_nothing_is_waited_for_after_the_deadline(operation):
    connection, script = connected([b"+OK\r\n"])

    with pytest.raises(RedisNodeError, match="timed out"):
        operation(connection)

    assert script.is_closed


def test_an_ipv6_address_stands_in_brackets():
    assert str(Address("::1", 7000)) == "[::1]:7000"


class TestPool:
    @pytest.fixture
    def silent(self):
        """A port on which connections are accepted by the system, and nobody says a word of TLS."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield listener

    def test_a_node_that_keeps_silent_does_not_hold_up_every_caller(self, silent):
        config = RedisConfig(connect_timeout_ms=500, tls=RedisTlsConfig())
        pool = NodePool(Address(*silent.getsockname()), config, tls_context(config.tls))

        with pytest.raises(RedisNodeError, match=r"cannot connect: .*timed out"):
            pool.take(soon())
        with pytest.raises(RedisNodeError, match=r"cannot connect: .*timed out, a moment ago") as caught:
            pool.take(soon())

        assert caught.value.is_unreachable
        silent.accept()[0].close()
        silent.settimeout(0)
        with pytest.raises(BlockingIOError):  # the second caller did not even try
            silent.accept()

    def test_a_sound_connection_is_kept_and_a_broken_one_takes_the_idle_ones_with_it(self, redis_server):
        pool = NodePool(Address(*redis_server.address), RedisConfig(), None)
        first, second, third = (pool.take(soon()) for _ in range(3))
        pool.give_back(first)
        assert pool.take(soon()) is first
        pool.give_back(first)
        pool.give_back(second)

        third.send([b"PING\r\n"], soon())
        pool.give_back(third)  # with its reply outstanding

        assert not any(one.is_reusable for one in (first, second, third))
        fresh = pool.take(soon())
        assert fresh.is_reusable
        pool.close()
        pool.give_back(fresh)
        assert not fresh.is_reusable
