"""Keys of all tables looked up in one launch, a row for each, against the gather and PyTorch's ``embedding``.

Each launch looks up the keys of one request, in all its tables. The gather copies as many rows of one table.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.byte_counts import query_bytes
from benchmarks.gpu.ceiling import KnownRows
from benchmarks.gpu.keys import FIRST_ABSENT_KEY, WrongAnswerError, check_rows, positions, rows_of
from benchmarks.gpu.queries import CEILING, KEYS_PER_ROUND, LEAST_CALLS, rates
from benchmarks.gpu.records import Record
from benchmarks.gpu.rounds import as_graph, take_turns
from benchmarks.gpu.tables import Tables, as_graphs, with_peer
from gpu_cache.layout import Layout

ABSENT_EVERY = 7  # keys of the request whose misses are checked


@dataclass(frozen=True)
class Request:
    """Keys int64[N] per table and their places in its population, which are their row numbers in PyTorch's table."""

    keys: list[np.ndarray]
    places: list[np.ndarray]

    @classmethod
    def of(cls, tables, drawn):
        """Share places between tables; the sizes differ by at most one."""
        places = np.array_split(drawn, len(tables.populations))
        return cls([of_table[part] for of_table, part in zip(tables.populations, places, strict=True)], places)


def measure(device, peer, why, sizes, gb_per_s):
    """Yield two records of each lookup, with its ratio to the gather and to PyTorch."""
    for dim in sizes.dims:
        known = KnownRows(device, Layout(dim), sizes.table_slots)
        for count in sizes.tables:
            tables = Tables(device, peer, dim, count, sizes.table_slots)
            for distribution in ("uniform", "zipf"):
                places = positions(distribution, tables.populations[0].size, sizes.pool_keys)
                for batch in sizes.looked_up:
                    calls = min(max(LEAST_CALLS, KEYS_PER_ROUND // batch), places.size // batch)
                    drawn = [places[n * batch : (n + 1) * batch] for n in range(calls)]
                    requests = [Request.of(tables, of_request) for of_request in drawn]
                    form = {"batch": batch, "distribution": distribution, "dim": dim, "dtype": "fp32"}
                    yield from by_peer(tables, known, requests, why, sizes.rounds, gb_per_s, form)
            tables.close()


def by_peer(tables, known, requests, why, rounds, gb_per_s, form):
    """Check, then time one launch per request against the gather and PyTorch."""
    device, batch = tables.device, form["batch"]
    works = [tables.group.workspace(1, batch, max_single_keys=batch) for _ in requests]
    check_misses(tables, works[0], requests[0])
    for work, request in zip(works, requests, strict=True):
        check(tables, work, request)
    ours = as_graphs(device, works, lambda work: work.queue_request())
    contenders, why = with_peer(ours, lambda: _rows_of_peer(tables, requests), why)
    times = take_turns([contenders[0], _gather(tables, known, requests), *contenders[1:]], rounds)
    bytes_per_key = query_bytes(tables.filled[0].cache.layout)
    details = {"hit_rate": 1.0, "tables": len(tables.filled), "bytes_per_key": bytes_per_key}
    peers = {
        "lookup": (CEILING, [of_round[:2] for of_round in times]),
        "lookup_plain": (f"torch embedding, {why}", [of_round[:1] + of_round[2:] for of_round in times]),
    }
    for name, (peer, of_peer) in peers.items():
        record = Record.of(name, of_peer, peer, **form, **details)
        record.details.update(rates(record.median_us, batch, bytes_per_key, gb_per_s))
        yield record


def check(tables, work, request):
    """Look up a request whose keys are all cached and compare with NumPy; the request stays loaded.

    Raises:
        WrongAnswerError: a row differs, or a key was missed.
    """
    rows = work.lookup(request.keys)
    if work.missing():
        raise WrongAnswerError("lookup: keys that the caches hold were missed")
    for of_table, keys in zip(rows, request.keys, strict=True):
        check_rows(tables.device, "lookup", keys, of_table, "fp32")


def check_misses(tables, work, request):
    """The same with some unknown keys: they are reported, and their rows appear once they are inserted.

    Raises:
        WrongAnswerError: other keys were reported, or a row differs.
    """
    asked = [keys.copy() for keys in request.keys]
    for keys in asked:
        keys[::ABSENT_EVERY] = FIRST_ABSENT_KEY + np.arange(keys[::ABSENT_EVERY].size)
    rows = work.lookup(asked)
    reported = [of_table.keys for of_table in work.missing()]
    if [keys.tolist() for keys in reported] != [keys[::ABSENT_EVERY].tolist() for keys in asked]:
        raise WrongAnswerError("lookup: the reported missing keys are not the unknown keys")
    work.complete([rows_of(np, keys, tables.dim, "fp32") for keys in reported])
    work.stream.synchronize()
    for of_table, keys in zip(rows, asked, strict=True):
        check_rows(tables.device, "lookup", keys, of_table, "fp32")


def _gather(tables, known, requests):
    """As many rows with known slots, checked."""
    device, stream = tables.device, tables.device.stream()
    sizes = [population.size for population in tables.populations]
    firsts = np.cumsum([0, *sizes[:-1]])
    numbers = [
        known.numbers(np.concatenate([first + part for first, part in zip(firsts, request.places, strict=True)]))
        for request in requests
    ]
    out = device.empty((numbers[0].size, tables.dim), np.float32)
    known.queue(numbers[0], out, stream)
    stream.synchronize()
    known.check(numbers[0], out)

    def gather():
        for of_request in numbers:
            known.queue(of_request, out, stream)

    return as_graph(device, stream, gather, len(numbers))


def _rows_of_peer(tables, requests):
    peer = tables.peer
    indices = [[peer.indices(places) for places in request.places] for request in requests]
    for of_table, keys, weights in zip(indices[0], requests[0].keys, tables.weights, strict=True):
        found = peer.host(peer.embedding(weights, of_table[:4096]))
        if not np.array_equal(found, rows_of(np, keys[:4096], tables.dim, "fp32")):
            raise WrongAnswerError("embedding: rows differ from NumPy's")

    def work():
        for request in indices:
            for of_table, weights in zip(request, tables.weights, strict=True):
                peer.embedding(weights, of_table)

    return peer.contender(work, len(requests))
