"""Timing on a device: contenders take turns, round by round, and each round gives a time of each."""

from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent / "known_rows.cu"
PAUSE_US = 200
WARM_UPS = 4  # so often that the counters of all rows are at their most: a cache in use writes hardly any


def take_turns(contenders, rounds):
    """Time contenders.

    Args:
        contenders: functions of no arguments that return microseconds.
        rounds: how many times each is asked, after a warm-up; who begins changes from round to round.

    Returns:
        per round, the times in the order of the contenders.
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
    """A contender that queues ``launch`` on the stream, which does the work ``calls`` times, and times it there.

    A pause comes before: while the device rests, the host queues all the rest, and is not timed with it. ``prepare`` is
    queued before the pause.
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
    """A contender that replays what ``queue`` queues on the stream: no time of the host is in it."""
    queue()  # what is compiled and loaded at the first call cannot be while a graph is captured
    stream.synchronize()
    graph = device.capture(stream, queue)
    return on_stream(device, stream, lambda: graph.launch(stream), calls)
