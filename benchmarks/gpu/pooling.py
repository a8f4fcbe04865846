"""Lookups fused with pooling against PyTorch's ``embedding_bag``, and without pooling against its ``embedding``.

PyTorch gets row numbers, the caches get keys. Both hold the same rows and must give the same answers.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.byte_counts import pool_bytes, query_bytes
from benchmarks.gpu.keys import FIRST_ABSENT_KEY, WrongAnswerError, positions, rows_of
from benchmarks.gpu.queries import LEAST_CALLS, BareQuery, rates
from benchmarks.gpu.records import Record
from benchmarks.gpu.rounds import as_graph, take_turns
from benchmarks.gpu.tables import Tables, as_graphs, with_peer

WORKSPACES = 4  # requests in turn, so that each touches other rows than the request before
CHECKED_SAMPLES = 256


@dataclass(frozen=True)
class Bags:
    """One table's part of a request, the row numbers in PyTorch's table, and the keys that the cache misses."""

    keys: np.ndarray
    row_ptrs: np.ndarray
    places: np.ndarray
    missing: np.ndarray


def measure(device, peer, why, sizes, gb_per_s):
    """Yield records of pooled and of plain lookups."""
    for dim in sizes.dims:
        for count in sizes.tables:
            tables = Tables(device, peer, dim, count, sizes.table_slots)
            for distribution in ("uniform", "zipf"):
                places = positions(distribution, tables.populations[0].size, sizes.pool_keys)
                if count == 1:
                    yield plain(tables, why, distribution, places, sizes, gb_per_s)
                for samples in sizes.samples:
                    for bag in sizes.bags:
                        yield pooled(tables, why, distribution, places, (samples, bag, 1.0), sizes.rounds, gb_per_s)
            tables.close()


def measure_forms(device, peer, why, sizes, gb_per_s):
    """Yield records of pooled lookups by form of rows and hit rate."""
    for dim in sizes.dims:
        for row_dtype in sizes.row_dtypes:
            tables = Tables(device, peer, dim, max(sizes.tables), sizes.form_slots, row_dtype)
            for distribution in ("uniform", "zipf"):
                places = positions(distribution, tables.populations[0].size, sizes.pool_keys)
                for hit_rate in sizes.hit_rates:
                    bags = sizes.form_samples, sizes.form_bag, hit_rate
                    yield pooled(tables, why, distribution, places, bags, sizes.rounds, gb_per_s)
            tables.close()


def plain(tables, why, distribution, places, sizes, gb_per_s):
    """A query against ``embedding``."""
    batch = max(sizes.batches)
    [filled] = tables.filled
    calls = min(LEAST_CALLS, places.size // batch)
    host_keys = filled.population[places]
    keys = tables.device.xp.asarray(host_keys)
    slices = [slice(n * batch, (n + 1) * batch) for n in range(calls)]
    query = BareQuery(filled.cache, batch)
    query.check(host_keys[:batch], keys[:batch], np.zeros(batch, bool))

    def ask():
        for part in slices:
            query.queue(keys[part])

    contenders, why = with_peer(
        as_graph(tables.device, query.stream, ask, calls), lambda: _rows_of_peer(tables, host_keys, places, slices), why
    )
    form = {"dim": tables.dim, "dtype": "fp32", "distribution": distribution, "hit_rate": 1.0}
    bytes_per_key = query_bytes(filled.cache.layout)
    record = Record.of(
        "query_plain", take_turns(contenders, sizes.rounds), f"torch embedding, {why}", batch=batch, **form,
        bytes_per_key=bytes_per_key,
    )  # fmt: skip
    record.details.update(rates(record.median_us, batch, bytes_per_key, gb_per_s))
    return record


def pooled(tables, why, distribution, places, bags, rounds, gb_per_s):
    """All tables' bags in one launch, against one ``embedding_bag`` per table that holds all rows.

    ``bags`` gives the samples, the keys per bag and the share of keys that hit. The launch includes the listing of
    missing keys. A request with missing keys is uploaded again before it is timed.
    """
    samples, bag, hit_rate = bags
    requests = [request_of(tables, places, samples, bag, number, hit_rate) for number in range(WORKSPACES)]
    keys_of_call = sum(of_table.keys.size for of_table in requests[0])
    works = [tables.group.workspace(samples, keys_of_call) for _ in requests]
    for work, request in zip(works, requests, strict=True):
        check(tables, work, request, bag)

    def load():
        for work, request in zip(works, requests, strict=True):
            work.load(request)
            work.stream.synchronize()

    prepare = load if hit_rate < 1.0 else None
    ours = as_graphs(tables.device, works, lambda work: work.queue(samples), prepare)
    contenders, why = with_peer(ours, lambda: _bags_of_peer(tables, requests, bag), why)
    bytes_per_key = pool_bytes(tables.filled[0].cache.layout, bag, hit_rate)
    record = Record.of(
        "pool", take_turns(contenders, rounds), f"torch embedding_bag, {why}", dim=tables.dim, dtype=tables.row_dtype,
        batch=samples, distribution=distribution, hit_rate=hit_rate, tables=len(tables.filled), bag=bag,
        bytes_per_key=bytes_per_key,
    )  # fmt: skip
    record.details.update(rates(record.median_us, keys_of_call, bytes_per_key, gb_per_s))
    return record


def check(tables, work, request, bag):
    """Pool a request and compare the missing keys and the first bags' sums with NumPy.

    Raises:
        WrongAnswerError: other keys were reported, or a sum differs.
    """
    rows = work.pool(request)
    reported = [of_table.keys for of_table in work.missing()] or [np.empty(0, np.int64)] * len(request)
    for keys, bags in zip(reported, request, strict=True):
        if not np.array_equal(keys, bags.keys[bags.missing]):
            raise WrongAnswerError(f"pool: {keys.size} keys reported as missing, expected {int(bags.missing.sum())}")
    for of_table, bags in zip(rows, request, strict=True):
        sums = tables.device.to_host(of_table[:CHECKED_SAMPLES, 0])
        _check_sums(sums, bags.keys, bag, tables.row_dtype, "pool", bags.missing)


def _rows_of_peer(tables, host_keys, places, slices):
    peer, [weights] = tables.peer, tables.weights
    indices = peer.indices(places)
    if not np.array_equal(
        peer.host(peer.embedding(weights, indices[:4096])), rows_of(np, host_keys[:4096], tables.dim, "fp32")
    ):
        raise WrongAnswerError("embedding: rows differ from NumPy's")
    return peer.contender(lambda: [peer.embedding(weights, indices[part]) for part in slices], len(slices))


def _bags_of_peer(tables, requests, bag):
    peer, offsets = tables.peer, tables.peer.indices(requests[0][0].row_ptrs)
    indices = [[peer.indices(bags.places) for bags in request] for request in requests]
    parts = zip(indices[0], requests[0], tables.weights, tables.populations, strict=True)
    for of_table, bags, weights, population in parts:
        sums = peer.host(peer.embedding_bag(weights, of_table, offsets)[:CHECKED_SAMPLES])
        _check_sums(sums, population[bags.places], bag, tables.row_dtype, "embedding_bag")

    def work():
        for request in indices:
            for of_table, weights in zip(request, tables.weights, strict=True):
                peer.embedding_bag(weights, of_table, offsets)

    return peer.contender(work, len(requests))


def request_of(tables, places, samples, bag, number, hit_rate):
    """Each request and table begins at another place. Some keys, at random, are replaced by unknown keys."""
    count, rng = samples * bag, np.random.default_rng(number)
    row_ptrs = np.arange(0, count + 1, bag, dtype=np.int32)
    request = []
    for table, population in enumerate(tables.populations):
        first = (number * count + table * 7919) % (places.size - count + 1)
        drawn = places[first : first + count]
        keys, missing = population[drawn], rng.random(count) >= hit_rate
        keys[missing] = FIRST_ABSENT_KEY + np.arange(int(missing.sum()))
        request.append(Bags(keys, row_ptrs, drawn, missing))
    return request


def _check_sums(found, keys, bag, row_dtype, what, missing=None):
    """Sums of whole numbers, exact in any order. Missing rows are zeros."""
    samples, dim = found.shape
    rows = rows_of(np, keys[: samples * bag], dim, row_dtype)
    if missing is not None:
        rows[missing[: samples * bag]] = 0.0
    if not np.array_equal(found, rows.reshape(samples, bag, dim).sum(axis=1)):
        raise WrongAnswerError(f"{what}: sums differ from NumPy's")
