"""Where a predict request runs."""

import asyncio
import itertools
import threading

import pytest

from serving.errors import RequestError
from serving.frontend import runner as runner_module
from serving.frontend.runner import Runner


@pytest.fixture
def runner():
    runner = Runner(threads=2)
    yield runner
    runner.close()


def run(runner, work, model="m", body_bytes=100):
    return asyncio.run(runner.run(model, body_bytes, work))


def test_the_first_request_of_a_kind_goes_to_the_pool_and_short_ones_then_stay_on_the_event_loop(runner):
    assert run(runner, threading.get_ident) != threading.get_ident()
    assert run(runner, threading.get_ident) == threading.get_ident()


def test_short_requests_are_learnt_per_model_and_size(runner):
    run(runner, threading.get_ident)

    assert run(runner, threading.get_ident, model="other") != threading.get_ident()
    assert run(runner, threading.get_ident, body_bytes=100_000) != threading.get_ident()


def test_pooled_work_never_runs_on_the_event_loop(runner):
    threads = {asyncio.run(runner.run_pooled(threading.get_ident)) for _ in range(9)}

    assert threading.get_ident() not in threads


def clock_of(monkeypatch, clock, seconds):
    """Make ``perf_counter`` or ``thread_time`` report ``seconds`` for any work."""
    ticks = itertools.cycle([0.0, seconds])
    monkeypatch.setattr(runner_module, clock, lambda: next(ticks))


def test_requests_that_turn_out_slow_on_the_event_loop_go_to_the_pool(runner, monkeypatch):
    run(runner, threading.get_ident)
    clock_of(monkeypatch, "perf_counter", 1.0)
    assert run(runner, threading.get_ident) == threading.get_ident()

    assert run(runner, threading.get_ident) != threading.get_ident()


def test_one_hiccup_of_a_few_milliseconds_does_not_drive_short_requests_off_the_event_loop(runner, monkeypatch):
    run(runner, threading.get_ident)
    clock_of(monkeypatch, "perf_counter", 0.005)
    run(runner, threading.get_ident)
    monkeypatch.undo()

    assert run(runner, threading.get_ident) == threading.get_ident()


@pytest.mark.parametrize(("processor_s", "comes_back"), [(0.0001, True), (0.01, False)])
def test_slow_requests_are_measured_again_now_and_then(runner, monkeypatch, processor_s, comes_back):
    run(runner, threading.get_ident)
    clock_of(monkeypatch, "perf_counter", 1.0)
    clock_of(monkeypatch, "thread_time", processor_s)
    run(runner, threading.get_ident)  # runs in the pool from now on

    inline = [run(runner, threading.get_ident) == threading.get_ident() for _ in range(101)]

    assert inline == [False] * 100 + [comes_back]


def test_the_event_loop_answers_while_the_pool_works(runner):
    async def both():
        release = threading.Event()
        slow = asyncio.ensure_future(runner.run("slow", 1, release.wait))
        quick = await runner.run("quick", 1, lambda: "quick")
        release.set()
        return quick, await slow

    assert asyncio.run(both()) == ("quick", True)


def test_no_more_than_the_given_threads_work_at_once(runner):
    async def many():
        barrier = threading.Barrier(3)
        futures = [asyncio.ensure_future(runner.run(f"m{number}", 1, barrier.wait)) for number in range(3)]
        done, _ = await asyncio.wait(futures, timeout=0.2)
        barrier.abort()
        results = await asyncio.gather(*futures, return_exceptions=True)
        return done, results

    done, results = asyncio.run(many())

    assert not done
    assert all(isinstance(result, threading.BrokenBarrierError) for result in results)


def refuse():
    raise RequestError("no")


@pytest.mark.parametrize("earlier_requests", [0, 1])
def test_an_error_is_raised_from_the_loop_and_from_the_pool(runner, earlier_requests):
    for _ in range(earlier_requests):
        run(runner, lambda: None)

    with pytest.raises(RequestError, match="no"):
        run(runner, refuse)
