"""Which predict requests run on the event loop."""

import itertools

import pytest

from serving.errors import RequestError
from serving.frontend import runner as runner_module
from serving.frontend.runner import Runner


@pytest.fixture
def runner():
    runner = Runner(threads=2)
    yield runner
    runner.close()


def run_for(runner, monkeypatch, seconds):
    """Run a request that takes ``seconds`` of the processor."""
    ticks = itertools.cycle([0.0, seconds])
    monkeypatch.setattr(runner_module, "thread_time", lambda: next(ticks))
    return runner.run("m", 100, lambda: "done")


def test_a_kind_of_requests_is_short_once_one_of_them_was(runner):
    assert not runner.is_short("m", 100)
    runner.took("m", 100, processor_s=0.0001)
    assert runner.is_short("m", 100)


def test_short_requests_are_learnt_per_model_and_size(runner):
    runner.took("m", 100, processor_s=0.0001)

    assert not runner.is_short("other", 100)
    assert not runner.is_short("m", 100_000)


def test_a_short_request_runs_at_once(runner, monkeypatch):
    runner.took("m", 100, processor_s=0.0001)

    assert run_for(runner, monkeypatch, 0.0001) == "done"


def test_requests_that_turn_out_slow_go_to_the_pool(runner, monkeypatch):
    runner.took("m", 100, processor_s=0.0001)
    run_for(runner, monkeypatch, 1.0)

    assert not runner.is_short("m", 100)


def test_one_hiccup_of_a_few_milliseconds_does_not_drive_short_requests_off_the_event_loop(runner, monkeypatch):
    runner.took("m", 100, processor_s=0.0001)
    run_for(runner, monkeypatch, 0.005)

    assert runner.is_short("m", 100)


def test_time_in_which_another_process_has_the_processor_does_not_count(runner, monkeypatch):
    runner.took("m", 100, processor_s=0.0001)
    ticks = itertools.count()
    monkeypatch.setattr(runner_module, "perf_counter", lambda: next(ticks))
    runner.run("m", 100, lambda: None)

    assert runner.is_short("m", 100)
    assert runner.short_s > 0


@pytest.mark.parametrize(("processor_s", "comes_back"), [(0.0001, True), (0.01, False)])
def test_slow_requests_are_measured_again_now_and_then(runner, monkeypatch, processor_s, comes_back):
    runner.took("m", 100, processor_s=0.0001)
    run_for(runner, monkeypatch, 1.0)

    for _ in range(99):
        runner.took("m", 100, processor_s)
        assert not runner.is_short("m", 100)
    runner.took("m", 100, processor_s)

    assert runner.is_short("m", 100) is comes_back


def test_an_error_is_raised(runner):
    runner.took("m", 100, processor_s=0.0001)

    def refuse():
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        runner.run("m", 100, refuse)
