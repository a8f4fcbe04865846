"""Small batches, where launches cost more than memory: a lookup or a query in a graph, the host's part of a launch."""

import itertools
import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.gpu.keys import WrongAnswerError, check_rows, filled_cache, pool_of
from benchmarks.gpu.queries import BareQuery
from benchmarks.gpu.records import Record
from benchmarks.gpu.rounds import SOURCE, on_stream, take_turns
from gpu_cache.cache_group import CacheGroup


@dataclass(frozen=True)
class Bags:
    """Keys of one table, and their CSR offsets."""

    keys: np.ndarray
    row_ptrs: np.ndarray


def measure(device, sizes, places):
    """Yield records of single queries, and of the host's time per launch."""
    dim = sizes.dims[0]
    filled = filled_cache(device, sizes.slots, dim)
    for distribution, drawn in places.items():
        pool = pool_of(device, filled.population, drawn, distribution, 1.0)
        for batch in sizes.small_batches:
            for uploads in (False, True):
                yield one_query(device, filled.cache, pool, batch, sizes, uploads=uploads)
            for name in ("pool", "lookup"):
                yield one_lookup(device, filled.cache, pool, batch, sizes, name)
    pool = pool_of(device, filled.population, places["uniform"], "uniform", 1.0)
    yield from host_times(device, filled.cache, pool, min(sizes.small_batches), sizes)
    filled.close()


def one_query(device, cache, pool, batch, sizes, *, uploads):
    """A graph of a query against a graph of an empty kernel; the keys are on the device or come from the host."""
    query = BareQuery(cache, batch)
    stream, nothing = query.stream, device.kernel(SOURCE, "nothing", ROW_UNITS=1, OUT_UNITS=1)
    host_keys, keys = device.pinned(batch, np.int64), device.empty(batch, np.int64)
    parts = [pool.host_keys[first : first + batch] for first in range(0, pool.host_keys.size - batch + 1, batch)]
    turns = itertools.count()

    def prepare():
        host_keys[:] = parts[next(turns) % len(parts)]
        device.upload(host_keys, keys, stream)

    def work():
        if uploads:
            device.upload(host_keys, keys, stream)
        query.queue(keys)

    def do_nothing():
        nothing((1,), (1,), (), stream)

    prepare()
    query.check(parts[0], keys, np.zeros(batch, bool))
    do_nothing()
    stream.synchronize()
    graph, floor = device.capture(stream, work), device.capture(stream, do_nothing)
    contenders = [
        on_stream(device, stream, lambda: graph.launch(stream), 1, prepare=prepare),
        on_stream(device, stream, lambda: floor.launch(stream), 1),
    ]
    times = take_turns(contenders, 10 * sizes.rounds)
    wall = [_wall_us(lambda: (graph.launch(stream), stream.synchronize())) for _ in range(10 * sizes.rounds)]
    return Record.of(
        "query_graph_upload" if uploads else "query_graph", times, "a graph of a kernel that does nothing",
        dim=cache.layout.dim, dtype="fp32", batch=batch, distribution=pool.distribution, hit_rate=1.0,
        host_round_trip_us=median(wall),
    )  # fmt: skip


def one_lookup(device, cache, pool, batch, sizes, name):
    """A graph of what serving launches, a key per bag or a row per key, against a graph of an empty kernel."""
    work = CacheGroup([cache], (1,), ("sum",)).workspace(batch, batch, max_single_keys=batch)
    nothing = device.kernel(SOURCE, "nothing", ROW_UNITS=1, OUT_UNITS=1)
    parts = [pool.host_keys[first : first + batch] for first in range(0, pool.host_keys.size - batch + 1, batch)]
    row_ptrs, turns = np.arange(batch + 1, dtype=np.int32), itertools.count()

    def load(keys):
        if name == "pool":
            work.load([Bags(keys, row_ptrs)])
        else:
            work.load_keys([keys])

    def do_nothing():
        nothing((1,), (1,), (), work.stream)

    load(parts[0])
    work.launch()
    if work.missing():
        raise WrongAnswerError(f"{name}: keys that the cache holds were missed")
    check_rows(device, name, parts[0], work.rows[0].reshape(batch, cache.layout.dim), "fp32")
    do_nothing()
    work.stream.synchronize()
    queue = work.queue_request if name == "lookup" else lambda: work.queue(batch)
    graph, floor = device.capture(work.stream, queue), device.capture(work.stream, do_nothing)
    contenders = [
        on_stream(
            device, work.stream, lambda: graph.launch(work.stream), 1,
            prepare=lambda: load(parts[next(turns) % len(parts)]),
        ),
        on_stream(device, work.stream, lambda: floor.launch(work.stream), 1),
    ]  # fmt: skip
    return Record.of(
        f"{name}_graph", take_turns(contenders, 10 * sizes.rounds), "a graph of a kernel that does nothing",
        dim=cache.layout.dim, dtype="fp32", batch=batch, distribution=pool.distribution, hit_rate=1.0,
    )  # fmt: skip


def host_times(device, cache, pool, batch, sizes):
    """The host's time to queue a kernel, a graph or a cache's query, against an array operation."""
    stream, keys = device.stream(), pool.keys[:batch]
    answer, one = cache.answer(batch, stream), device.zeros(1, np.float32)
    nothing = device.kernel(SOURCE, "nothing", ROW_UNITS=1, OUT_UNITS=1)

    def launch():
        nothing((1,), (1,), (), stream)

    def add():
        with device.using(stream):
            one.fill(0)

    launch()
    stream.synchronize()
    graph = device.capture(stream, launch)
    calls = {
        "host_launch": launch,
        "host_graph": lambda: graph.launch(stream),
        "host_query": lambda: cache.query(keys, out=answer, stream=stream),
    }
    for name, call in calls.items():
        contenders = [lambda call=call: _queue_us(call, stream, sizes.host_calls) for call in (call, add)]
        times = take_turns(contenders, sizes.rounds)
        yield Record.of(name, times, "array.fill on the same stream", batch=batch if name == "host_query" else 1)


def _queue_us(call, stream, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    us = (time.perf_counter() - begin) * 1e6 / calls
    stream.synchronize()
    return us


def _wall_us(call):
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6
