"""The asynchronous insert queue."""

import logging
import threading

import numpy as np
import pytest

from serving.errors import StoreError, UnknownModelError
from serving.lookup.insertions import InsertQueue


def keys(*values):
    return np.array(values, dtype=np.int64)


@pytest.fixture
def inserted():
    return []


@pytest.fixture
def opened():
    """Return a function that makes insert queues; all are closed at the end."""
    made = []

    def make(*arguments, **options):
        made.append(InsertQueue(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_offered_keys_are_inserted_by_another_thread(opened, inserted):
    insertions = opened(lambda table, of: inserted.append((table, of.tolist(), threading.current_thread())), 2, 2)

    insertions.offer(1, keys(5, 3))
    assert insertions.wait(30)

    ((table, of, thread),) = inserted
    assert (table, of) == (1, [3, 5])
    assert thread is not threading.current_thread()


def test_keys_that_wait_are_inserted_together_and_once(opened, inserted):
    entered, go_on = threading.Event(), threading.Event()

    def insert(table, of):
        inserted.append((table, of.tolist()))
        entered.set()
        assert go_on.wait(30)

    insertions = opened(insert, 2, 1)
    insertions.offer(0, keys(1))
    assert entered.wait(30)
    for more in (keys(7, 8), keys(8, 9), keys(7)):
        insertions.offer(0, more)
    go_on.set()
    assert insertions.wait(30)

    assert inserted == [(0, [1]), (0, [7, 8, 9])]


def test_two_tables_are_inserted_in_parallel_and_a_single_table_is_not(opened):
    both = threading.Barrier(2, timeout=30)
    at_work = []

    def insert(table, of):
        assert table not in at_work
        at_work.append(table)
        both.wait()
        at_work.remove(table)

    insertions = opened(insert, 2, 4)
    for table in (0, 1):
        insertions.offer(table, keys(1))

    assert insertions.wait(30)


def test_keys_beyond_the_capacity_are_dropped_and_counted(opened, inserted):
    entered, go_on = threading.Event(), threading.Event()

    def insert(table, of):
        inserted.extend(of.tolist())
        entered.set()
        assert go_on.wait(30)

    insertions = opened(insert, 2, 1, most_keys=3)
    insertions.offer(0, keys(1))
    assert entered.wait(30)
    insertions.offer(0, keys(2, 3))
    insertions.offer(1, keys(4, 5))
    insertions.offer(1, keys(6))
    go_on.set()
    assert insertions.wait(30)

    assert inserted == [1, 2, 3, 4]
    assert insertions.dropped_keys == 2


@pytest.mark.parametrize("fault", [StoreError("slow", "m.t", "no answer"), ZeroDivisionError("oh")])
def test_a_failure_is_logged_and_the_next_keys_are_inserted(opened, inserted, caplog, fault):
    def insert(table, of):
        if table == 0:
            raise fault
        inserted.append(of.tolist())

    insertions = opened(insert, 2, 1)
    insertions.offer(0, keys(1))
    insertions.offer(1, keys(2))
    with caplog.at_level(logging.WARNING):
        assert insertions.wait(30)

    assert inserted == [[2]]
    assert str(fault) in caplog.text


def test_a_failure_after_a_close_is_not_logged(opened, caplog):
    entered, go_on = threading.Event(), threading.Event()

    def insert(_table, _of):
        entered.set()
        assert go_on.wait(30)
        raise UnknownModelError("the GPU cache is closed")

    with caplog.at_level(logging.WARNING):
        insertions = opened(insert, 2, 1)
        insertions.offer(0, keys(1))
        assert entered.wait(30)
        insertions.close()
        go_on.set()
        assert insertions.wait(30)

    assert not caplog.messages


def test_closing_drops_waiting_and_later_keys(opened, inserted):
    insertions = opened(lambda table, of: inserted.append(table), 1, 1)

    insertions.close()
    insertions.offer(0, keys(1))

    assert insertions.wait(30)
    assert not inserted
    assert insertions.dropped_keys == 1
