"""Turns at what only so many may do at a time."""

import threading
import time

import pytest

from serving.lookup.turns import Turns


def test_who_gives_a_turn_back_and_asks_again_comes_after_those_who_wait():
    turns, order, threads = Turns(), [], []

    def take(name):
        with turns.turn():
            order.append(name)

    with turns.turn():
        for name in ("first", "second"):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            while len(turns._waiting) < len(threads):
                time.sleep(0.001)
    take("again")
    for thread in threads:
        thread.join()

    assert order == ["first", "second", "again"]


def test_so_many_have_a_turn_at_once_and_one_that_fails_gives_it_back():
    turns, both = Turns(2), threading.Barrier(2, timeout=30)

    def take():
        with turns.turn():
            both.wait()

    for _ in range(2):
        with pytest.raises(KeyError), turns.turn():
            raise KeyError
    other = threading.Thread(target=take)
    other.start()
    take()
    other.join()

    assert not both.broken
