"""A pool lends each connection to one thread at a time, whatever else redis-py does."""

import threading

import pytest

from serving.config import RedisConfig
from serving.storage.redis.connection import BusyError, pool_of


@pytest.fixture
def pool(redis_server):
    host, port = redis_server.address
    pool = pool_of(RedisConfig(num_node_connections=2, timeout_ms=5000), None, host=host, port=port, protocol=2)
    yield pool
    pool.disconnect_free_connections()


def in_another_thread(call):
    """What ``call`` returns there."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def answers(connection):
    connection.send_command("PING")
    return connection.read_response() == b"PONG"


def test_a_connection_given_back_twice_is_not_lent_to_two_threads(pool):
    first = pool.get_connection()
    pool.release(first)
    assert in_another_thread(pool.get_connection) is first

    pool.release(first)

    assert pool.get_connection() is not first
    pool.timeout = 0.05
    with pytest.raises(BusyError, match="all 2 connections are busy"):
        pool.get_connection()


def test_no_connection_is_lost_by_giving_it_back_twice(pool):
    for _ in range(5):
        first, second = pool.get_connection(), pool.get_connection()
        for connection in (first, first, second, second):
            pool.release(connection)

    assert {pool.get_connection(), pool.get_connection()} == {first, second}


def test_closing_the_idle_connections_leaves_the_lent_ones_alone(pool, client):
    lent, idle = pool.get_connection(), pool.get_connection()
    pool.release(idle)

    pool.disconnect_free_connections()

    assert not idle.is_connected
    assert answers(lent)
    assert pool.get_connection() is idle
    assert answers(idle)


def test_nobody_borrows_a_connection_while_it_is_closed(pool, monkeypatch):
    idle = pool.get_connection()
    pool.release(idle)
    lent = []

    def disconnect():
        try:
            lent.append(pool.get_connection())
        except BusyError as err:
            lent.append(err)

    monkeypatch.setattr(pool, "timeout", 0.05)
    monkeypatch.setattr(idle, "disconnect", disconnect)
    pool.disconnect_free_connections()

    (error,) = lent
    assert isinstance(error, BusyError)
    monkeypatch.undo()
    assert pool.get_connection() is idle
