"""Late streams: they show that a host forgot to wait."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.runner import streams
from kernels.runner.device import RunnerDevice
from kernels.runner.streams import Delays


class Clock:
    """Replaces the module ``time``: a sleep lasts until the test allows it to end, and its length is recorded."""

    def __init__(self):
        self.slept_s = []
        self.go_on = threading.Event()

    def sleep(self, seconds):
        self.slept_s.append(seconds)
        assert self.go_on.wait(60)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(streams, "time", SimpleNamespace(sleep=clock.sleep))
    yield clock
    clock.go_on.set()


@pytest.fixture
def late(runner, monkeypatch):
    """Open a runner whose streams are late by up to ``longest_ms`` milliseconds."""

    def late(delay_ms, seed=0):
        monkeypatch.setenv("HOTROW_RUNNER_DELAY_MS", str(delay_ms))
        monkeypatch.setenv("HOTROW_RUNNER_SEED", str(seed))
        return RunnerDevice("runner")

    return late


def download(device):
    """Queue copies of ones to the device and back; return the target and the stream."""
    stream, array, out = device.stream(), device.zeros(3, np.float32), device.pinned(3, np.float32)
    device.upload(np.ones(3, dtype=np.float32), array, stream)
    device.download(array, out, stream)
    return out, stream


def test_a_host_that_does_not_wait_for_a_late_stream_reads_old_values(late, clock):
    seed = next(seed for seed in range(100) if delays_of_streams(1, seed=seed)[0] is not int)

    out, stream = download(late(20, seed))

    assert out.tolist() == [0, 0, 0]
    event = stream.record()
    assert not event.is_done()
    clock.go_on.set()
    event.synchronize()
    assert out.tolist() == [1, 1, 1]


def delays_of_streams(count, longest_ms=20, seed=1):
    delays = Delays(longest_ms, seed)
    return [delays.of_stream() for _ in range(count)]


def test_about_half_of_the_streams_are_late(clock):
    clock.go_on.set()

    late_ones = [delay for delay in delays_of_streams(100) if delay is not int]
    for delay in late_ones:
        delay()

    assert 30 <= len(late_ones) <= 70
    assert len(set(clock.slept_s)) == len(late_ones)
    assert all(0 <= seconds <= 0.020 for seconds in clock.slept_s)


def test_a_seed_draws_the_same_delays_whichever_stream_runs_first(clock):
    clock.go_on.set()

    def slept_s(seed, first):
        delays = delays_of_streams(10, seed=seed)
        clock.slept_s = []
        for _ in range(first):
            delays[0]()
        for delay in delays[1:]:
            delay()
        return clock.slept_s[-4:]

    assert slept_s(1, first=1) == slept_s(1, first=5) != slept_s(2, first=1)


def test_streams_are_not_late_by_default(late, clock):
    out, stream = download(late(0))

    stream.synchronize()

    assert clock.slept_s == []
    assert out.tolist() == [1, 1, 1]


@pytest.mark.parametrize("delay_ms", [-1, "nan", "inf"])
def test_an_impossible_delay_is_refused(late, delay_ms):
    with pytest.raises(ValueError, match="a stream cannot be late by"):
        late(delay_ms)


def test_a_delay_that_is_not_a_number_is_refused(late):
    with pytest.raises(ValueError, match="soon"):
        late("soon")
