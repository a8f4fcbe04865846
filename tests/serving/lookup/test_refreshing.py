"""Caches are refreshed by the clock."""

import logging
import threading

import pytest

from serving.errors import StoreError
from serving.lookup.refreshing import Refreshing

LONG_S = 3600.0


class Refreshes:
    """Counts refreshes, and lets a test wait for so many."""

    def __init__(self, fault=None):
        self.fault = fault
        self.count = 0
        self.condition = threading.Condition()

    def __call__(self, closing):
        with self.condition:
            self.count += 1
            self.condition.notify_all()
        if self.fault is not None:
            raise self.fault

    def reach(self, count):
        with self.condition:
            return self.condition.wait_for(lambda: self.count >= count, 30)


@pytest.mark.parametrize(("delay_s", "interval_s"), [(0.001, 0.001), (0.0, 0.001)])
def test_an_interval_brings_refresh_after_refresh(delay_s, interval_s):
    refreshes = Refreshes()

    refreshing = Refreshing(refreshes, delay_s, interval_s, "m")

    assert refreshes.reach(3)
    refreshing.close()


def test_a_delay_alone_brings_one_refresh():
    refreshes = Refreshes()

    refreshing = Refreshing(refreshes, 0.001, 0.0, "m")
    assert refreshes.reach(1)
    refreshing._thread.join(30)

    assert not refreshing._thread.is_alive()
    assert refreshes.count == 1
    refreshing.close()


def test_closing_does_not_wait_for_the_clock():
    refreshes = Refreshes()

    Refreshing(refreshes, LONG_S, LONG_S, "m").close()

    assert refreshes.count == 0


def test_a_refresh_is_told_that_all_is_closed():
    entered, ended = threading.Event(), threading.Event()

    def refresh(closing):
        entered.set()
        if closing.wait(30):
            ended.set()

    refreshing = Refreshing(refresh, 0.001, LONG_S, "m")
    assert entered.wait(30)
    refreshing.close()

    assert ended.wait(30)


@pytest.mark.parametrize("fault", [StoreError("slow", "m.t", "no answer"), ZeroDivisionError("oh")])
def test_a_refresh_that_fails_is_logged_and_the_next_comes(caplog, fault):
    refreshes = Refreshes(fault)

    with caplog.at_level(logging.WARNING):
        refreshing = Refreshing(refreshes, 0.001, 0.001, "m")
        assert refreshes.reach(2)
        refreshing.close()

    assert "the GPU cache of m was not refreshed" in caplog.text
