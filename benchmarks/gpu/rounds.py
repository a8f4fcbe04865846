"""Timing on a device: contenders take turns, and each round gives one time per contender."""

from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent / "known_rows.cu"
PAUSE_US = 200
WARM_UPS = 4  # until the counters of all rows are at their maximum: a cache in use writes few counters


def take_turns(contenders, rounds):
    """Time contenders.

    Args:
        contenders: functions of no arguments that return microseconds.
        rounds: how often each contender runs, after a warm-up; another contender begins each round.

    Returns:
        for each round, the times in the order of the contenders.
    """
    for contender in contenders:
        for _ in range(WARM_UPS):
            contender()
    places = range(len(contenders))
    return [
        tuple(us for _, us in sorted((place, contenders[place]()) for place in (places if turn % 2 else places[::-1])))
        for turn in range(rounds)
    ]


def on_stream(device, stream, launch, calls, *, prepare=None, pause_us=PAUSE_US):
    """A contender that queues ``launch`` on the stream and times it there; one launch is ``calls`` calls.

    The device pauses first, so that the host has queued everything before the timed work begins. ``prepare`` is queued
    before the pause.
    """
    timer, rest = device.timer(stream), device.kernel(SOURCE, "rest_stream", ROW_UNITS=1, OUT_UNITS=1)
    rest_us = np.uint32(pause_us if device.name.startswith("cuda:") else 0)

    def run_us():
        if prepare is not None:
            prepare()
        rest((1,), (1,), (rest_us,), stream)
        timer.start()
        launch()
        timer.stop()
        return timer.elapsed_us() / calls

    return run_us


def as_graph(device, stream, queue, calls):
    """A contender that replays a graph of ``queue``, without any host time."""
    queue()  # the first call compiles and loads, which is not possible during a capture
    stream.synchronize()
    graph = device.capture(stream, queue)
    return on_stream(device, stream, lambda: graph.launch(stream), calls)
