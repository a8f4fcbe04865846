"""A timer measures the work of its stream between start and stop."""

import time
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import KernelError

FLAGS = Path(__file__).parent / "flags.cu"


def test_a_timer_spans_the_work_between_start_and_stop(device):
    stream, other = device.stream(), device.stream()
    flag, empty, filled = device.pinned(1, np.int32), device.timer(stream), device.timer(stream)
    array = device.zeros(1 << 16, np.float32)
    with device.using(other):
        array += 1.0  # loaded now: nothing can be loaded while the kernel waits for the flag

    begun = time.perf_counter()
    empty.start()
    empty.stop()
    filled.start()
    stream.record().synchronize()  # otherwise a slow stream might start it after all later work
    device.kernel(FLAGS, "await_flag")((1,), (1,), (device.device_view(flag),), stream)
    filled.stop()
    opened = device.timer(other)  # time that passes while the stream waits
    opened.start()
    with device.using(other):
        array += 1.0
    opened.stop()
    least_us = opened.elapsed_us()
    time.sleep(0.02)
    flag[0] = 1
    filled_us, empty_us = filled.elapsed_us(), empty.elapsed_us()
    whole_us = (time.perf_counter() - begun) * 1e6

    assert filled_us > least_us >= 0
    assert filled_us >= 20_000
    assert empty_us >= 0
    assert empty_us + filled_us <= whole_us  # one follows the other even on a busy machine


def test_a_timer_can_be_used_again(device):
    stream = device.stream()
    timer = device.timer(stream)

    taken = []
    for _ in range(3):
        timer.start()
        timer.stop()
        taken.append(timer.elapsed_us())

    assert min(taken) >= 0


def test_a_timer_that_was_not_stopped_raises_an_error(device):
    stream = device.stream()
    timer = device.timer(stream)
    timer.start()

    with pytest.raises(ValueError, match="started and stopped"):
        timer.elapsed_us()


def test_a_timer_is_refused_during_a_capture(device):
    stream = device.stream()
    timer = device.timer(stream)

    with pytest.raises(KernelError, match="cannot time work while a graph is captured"):
        device.capture(stream, timer.start)


def test_a_device_describes_itself(device):
    assert device.properties()["name"]
