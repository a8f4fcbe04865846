"""A pool lends each connection to one thread at a time, whatever redis-py does beside it."""

import threading

import pytest

from serving.config import RedisConfig
from serving.storage.redis.connection import within
from serving.storage.redis.pool import BusyError, pool_of


@pytest.fixture
def pool(redis_server):
    host, port = redis_server.address
    pool = pool_of(RedisConfig(num_node_connections=2), None, host=host, port=port, protocol=2)
    yield pool
    pool.disconnect_free_connections()


def borrowed(pool):
    with within(5):
        return pool.get_connection()


def in_another_thread(call):
    """What ``call`` returns there."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def answers(connection):
    with within(5):
        connection.send_command("PING")
        return connection.read_response() == b"PONG"


def test_a_connection_given_back_twice_is_not_lent_to_two_threads(pool):
    first = borrowed(pool)
    pool.release(first)
    assert in_another_thread(lambda: borrowed(pool)) is first

    pool.release(first)

    assert borrowed(pool) is not first
    with within(0.05), pytest.raises(BusyError, match="all 2 connections are busy"):
        pool.get_connection()


def test_no_connection_is_lost_by_giving_it_back_twice(pool):
    for _ in range(5):
        one, other = borrowed(pool), borrowed(pool)
        for connection in (one, one, other, other):
            pool.release(connection)

    assert {borrowed(pool), borrowed(pool)} == {one, other}


def test_closing_the_idle_connections_leaves_the_lent_ones_alone(pool, client):
    lent, idle = borrowed(pool), borrowed(pool)
    pool.release(idle)

    pool.disconnect_free_connections()

    assert not idle.is_connected
    assert answers(lent)
    assert borrowed(pool) is idle
    assert answers(idle)


def test_nobody_borrows_a_connection_while_it_is_closed(pool, monkeypatch):
    idle = borrowed(pool)
    pool.release(idle)
    lent = []

    def disconnect():
        def borrow():
            with within(0.05):
                return pool.get_connection()

        try:
            lent.append(borrow())
        except BusyError as err:
            lent.append(err)

    monkeypatch.setattr(idle, "disconnect", disconnect)
    pool.disconnect_free_connections()

    (one,) = lent
    assert isinstance(one, BusyError)
    monkeypatch.undo()
    assert borrowed(pool) is idle
