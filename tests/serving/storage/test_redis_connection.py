"""Connections to a node: replies however the network cuts them, deadlines, and the node's identity."""

import gc
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager
from types import FrameType
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from serving.config import RedisConfig
from serving.storage.redis.commands import Command, RedisUnreachableError
from serving.storage.redis.connection import RowConnection
from serving.storage.redis.nodes import RedisNodes

VALUE_BYTES = 8
INFO = b"# Server\r\nredis_version:6.2.14\r\nrun_id:abc123\r\ntcp_port:7000\r\n"
INFO_REPLY = b"$%d\r\n%s\r\n" % (len(INFO), INFO)


class ScriptedSocket:
    """Gives what a node would send, in the pieces in which it would come."""

    def __init__(self, pieces):
        self.pieces = [piece for piece in pieces if piece]
        self.is_closed = False

    def settimeout(self, _):
        pass

    def setsockopt(self, *_):
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

    def shutdown(self, _):
        pass

    def close(self):
        self.is_closed = True


def connection_to(host="10.0.0.1", port=7000, **timeouts):
    options = {"connect_timeout_s": 60} | timeouts
    return RowConnection(host=host, port=port, protocol=2, driver_info=None, tls=None, tls_name="", **options)


def connected(pieces, info=INFO_REPLY):
    script = ScriptedSocket([info, *pieces])
    connection = connection_to()
    with mock.patch("redis.connection.Connection._connect", return_value=script):
        connection.connect()
    return connection, script


def expired(connection):
    """The connection, whose deadline has passed."""
    connection.expire_at(time.monotonic())
    return connection


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


@settings(deadline=None, max_examples=50)
@given(st.lists(REPLY, min_size=1, max_size=4), st.lists(st.integers(0, 10**6), max_size=30))
def test_replies_are_read_in_their_order_however_they_are_cut(replies, places):
    data = b"".join(map(encoded, replies))
    connection, _ = connected(cut(data, places))

    for reply in replies:
        if isinstance(reply, str):
            with pytest.raises(MovedError) as caught:
                connection.read_values(3, VALUE_BYTES)
            assert str(caught.value) == reply
            assert (caught.value.slot_id, caught.value.host, caught.value.port) == (1, "10.0.0.2", 7000)
        else:
            values = connection.read_values(len(reply), VALUE_BYTES)
            assert (values.tolist() if isinstance(values, np.ndarray) else values) == reply
    assert not connection._parser._reader.has_data()


@settings(deadline=None)
@given(st.lists(VALUE, min_size=1, max_size=12), st.lists(st.integers(0, 10**6), max_size=9), st.integers(1, 10**6))
def test_a_reply_that_ends_early_is_an_error(reply, places, missing):
    data = encoded(reply)
    connection, _ = connected(cut(data[: -1 - missing % len(data)], places))

    with pytest.raises((TimeoutError, RedisTimeoutError)):
        connection.read_values(len(reply), VALUE_BYTES)


def test_values_of_one_size_are_not_parsed():
    connection, _ = connected([encoded([b"12345678"] * 100)])

    with mock.patch.object(connection._parser, "_reader", wraps=connection._parser._reader) as reader:
        values = connection.read_values(100, VALUE_BYTES)

    assert values.tolist() == [b"12345678"] * 100
    reader.feed.assert_not_called()


@pytest.mark.parametrize(
    "read", [lambda opened: opened.read_values(3, VALUE_BYTES), lambda opened: opened.read_response()]
)
def test_a_node_that_hangs_up_is_an_error(read):
    connection, script = connected([])
    script.recv_into = lambda room: 0

    with pytest.raises(RedisConnectionError, match="closed"):
        read(connection)


@pytest.mark.parametrize(
    "operation",
    [
        lambda opened: opened.send_packed_command([b"PING"]),
        lambda opened: opened.read_response(),
        lambda opened: opened.read_values(1, VALUE_BYTES),
    ],
)
def test_nothing_is_waited_for_after_the_deadline(operation):
    connection, script = connected([b"+OK\r\n"])
    script.settimeout = lambda _: pytest.fail("waited")

    with pytest.raises((TimeoutError, RedisTimeoutError)):
        operation(expired(connection))


def test_a_connection_knows_the_identity_of_its_node():
    connection, _ = connected([])

    assert connection.run_id == "abc123"


@pytest.mark.parametrize("info", [b"$8\r\n# Server\r\n", b"$-1\r\n"])
def test_a_node_without_an_identity_is_an_error(info):
    with pytest.raises(RedisConnectionError, match="INFO server reports no run_id"):
        connected([], info)


def test_a_user_who_may_not_ask_for_the_identity_learns_which_right_is_missing():
    refusal = b"-NOPERM this user has no permissions to run the 'info' command\r\n"

    with pytest.raises(NoPermissionError, match=r"NOPERM.*'info'.*the right \+info"):
        connected([], refusal)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("ERR Error running script (call to f_18cb): @user_script:1: WRONGTYPE Not a hash", "WRONGTYPE Not a hash"),
        ("ERR Error running script (call to f_18cb): @user_script:1: @user_script: 1: -OOM No room.", "OOM No room."),
        ("ERR Error running script (call to f_18cb): @user_script:1: user_script:1: bad argument", "bad argument"),
        ("OOM No room. script: 18cb, on @user_script:3.", "OOM No room."),
        ("WRONGTYPE Not a hash script: 18cb, on @user_script:3.", "WRONGTYPE Not a hash"),
        ("OOM No room.", "OOM No room."),
    ],
)
def test_the_error_of_a_script_is_the_servers_reason_alone(reply, reason):
    connection, _ = connected([f"-{reply}\r\n".encode()])
    with pytest.raises(ResponseError) as refused:
        connection.read_response()

    assert str(refused.value) == reason


def test_a_connection_that_redis_py_opens_again_learns_the_new_identity():
    connection, _ = connected([])
    connection.disconnect()
    restarted = ScriptedSocket([INFO_REPLY.replace(b"abc123", b"def456"), b"+OK\r\n"])

    with mock.patch("redis.connection.Connection._connect", return_value=restarted):
        connection.send_command("PING")

    assert connection.read_response() == b"OK"
    assert connection.run_id == "def456"


def test_a_refused_connection_is_not_taken_for_an_open_one():
    script = ScriptedSocket([b"-NOPERM no\r\n"])
    connection = connection_to()

    with mock.patch("redis.connection.Connection._connect", return_value=script), pytest.raises(NoPermissionError):
        connection.connect()

    assert script.is_closed
    assert not connection.is_connected


@contextmanager
def silent_node(*replies):
    """A node that accepts one connection, sends ``replies``, and then nothing; gives its address and the connection."""
    with socket.create_server(("127.0.0.1", 0)) as node:
        accepted = []

        def accept():
            accepted.append(node.accept()[0])
            for reply in replies:
                accepted[0].recv(1000)
                accepted[0].sendall(reply)

        thread = threading.Thread(target=accept)
        thread.start()
        yield node.getsockname(), accepted
        thread.join()
        accepted[0].close()


def test_a_node_that_never_sends_its_identity_costs_the_connect_timeout():
    with silent_node() as ((host, port), _):
        began = time.monotonic()
        with pytest.raises((TimeoutError, RedisTimeoutError)):
            connection_to(host, port, connect_timeout_s=0.5).connect()
        assert 0.5 <= time.monotonic() - began < 1  # once


def test_a_node_that_never_sends_its_identity_costs_no_more_than_the_deadline():
    with silent_node() as ((host, port), _):
        connection = connection_to(host, port)
        began = time.monotonic()
        connection.expire_at(began + 0.2)
        with pytest.raises((TimeoutError, RedisTimeoutError)):
            connection.connect()
        assert 0.2 <= time.monotonic() - began < 5


def test_what_a_node_has_not_received_when_its_connection_is_given_up_is_not_sent_any_more():
    with silent_node(INFO_REPLY) as ((host, port), accepted):
        connection = connection_to(host, port)
        connection.connect()
        (received,) = accepted
        received.settimeout(60)
        connection.expire_at(time.monotonic() + 0.05)
        with pytest.raises(RedisTimeoutError):
            connection.send_packed_command([bytes(1 << 26)])  # more than the system takes while nobody reads

        # Else all that the system took would come, and then an end.
        with pytest.raises(ConnectionResetError):
            deque(iter(lambda: received.recv(1 << 20), b""), maxlen=0)


def test_a_refused_connection_leaves_no_frames_for_the_garbage_collector():
    """Such a frame would keep the whole request: its callers' variables too."""
    command = Command("GET", b"a", b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n")
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        nodes = RedisNodes(RedisConfig(type="redis_cluster", address=f"127.0.0.1:{unheard.getsockname()[1]}"))

        def refused():
            with pytest.raises(RedisUnreachableError):
                nodes.run([command, command])

        refused()  # what happens once is no leak
        gc.collect()
        gc.disable()
        try:
            refused()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [frame.f_code.co_qualname for frame in gc.garbage if isinstance(frame, FrameType)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    assert left == []
