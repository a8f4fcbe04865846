"""How old the rows of a model may be, by a clock that the test moves."""

import pytest

from serving.parameter_server.updates import counters
from serving.parameter_server.updates.counters import UpdateCounters
from serving.stream import Record

HOUR_S = 3600.0


class Clock:
    """The machine's two clocks."""

    def __init__(self):
        self.passed_s = 0.0
        self.is_off_s = 0.0

    def monotonic(self):
        return 50.0 + self.passed_s

    def time(self):
        return 1_700_000_000.0 + self.passed_s + self.is_off_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(counters, "time", clock)
    return clock


@pytest.fixture
def counted(clock):
    return UpdateCounters(max_staleness_s=HOUR_S / 2)


def record(clock, age_s, partition="p/0"):
    return Record(partition, "1", b"", None, "p", round(1000 * (clock.time() - age_s)))


def test_rows_of_a_busy_log_are_as_old_as_its_last_record_although_records_always_wait(clock, counted):
    for _ in range(1000):
        clock.passed_s += 1.0
        counted.reached(record(clock, age_s=0.25))
        counted.lag({"p/0": 7})
        assert counted.staleness_s == pytest.approx(0.25)


def test_a_quiet_log_makes_rows_no_older(clock, counted):
    counted.reached(record(clock, age_s=0.0))
    clock.passed_s = 24 * HOUR_S
    counted.lag({"p/0": 0})
    clock.passed_s += 2.0
    counted.lag({"p/0": 1})
    counted.fault = "the truth does not take the new record"

    assert counted.staleness_s == 2.0
    assert counted.readiness().state == "degraded"


def test_the_partition_that_is_furthest_behind_decides(clock, counted):
    counted.reached(record(clock, HOUR_S, "p/0"))
    counted.reached(record(clock, 1.0, "p/1"))
    counted.lag({"p/0": 1000, "p/1": 3})

    assert counted.staleness_s == pytest.approx(HOUR_S)
    assert counted.readiness().state == "not ready"

    counted.lag({"p/0": 0, "p/1": 3})
    assert counted.staleness_s == pytest.approx(1.0)


@pytest.mark.parametrize("of_record_s", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])
def test_rows_get_older_during_a_fault_although_a_clock_is_wrong_or_jumps(clock, counted, of_record_s):
    counted.lag({"p/0": 0})
    counted.reached(record(clock, -of_record_s))
    counted.fault = "the log does not answer"
    clock.passed_s, clock.is_off_s = 10.0, -of_record_s
    assert counted.staleness_s == pytest.approx(10.0)


def test_a_record_without_a_time_says_nothing(clock, counted):
    counted.reached(Record("p/0", "1", b"", None, "p", 0))
    clock.passed_s = 3.0
    counted.lag({"p/0": 1})
    assert counted.staleness_s == 3.0
