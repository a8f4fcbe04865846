"""A finalizer may ask an event of the runner whether it is done, in any thread and at any point."""

import threading

import pytest

from kernels.errors import DeviceFaultError

WAIT_S = 5


def test_is_done_does_not_wait_for_the_thread_that_is_setting_it(runner):
    """With a lock, two threads that collect garbage and ask for each other's events would deadlock."""
    event, answers = runner.stream().record(), []
    event.synchronize()
    asking = threading.Thread(target=lambda: answers.append(event.is_done()), daemon=True)

    with event._reached._condition:  # the future's lock, which its thread holds while it sets the result
        asking.start()
        asking.join(WAIT_S)

    assert answers == [True]


def test_an_event_after_a_fault_is_done(runner):
    def fail():
        raise ZeroDivisionError

    stream = runner.stream()
    stream.submit(fail)
    event = stream.record()

    with pytest.raises(DeviceFaultError, match="ZeroDivisionError"):
        event.synchronize()
    assert event.is_done()
