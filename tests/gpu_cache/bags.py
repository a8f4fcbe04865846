"""Helpers for tests of groups: tables of rows, requests of bags, and the answers of the host's loops."""

import os
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest

from gpu_cache.cache_group import CacheGroup
from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.readers import Readers
from kernels.host import pool_rows, round_rows

TABLE_KEYS = 400
HELD_KEYS = 200  # the caches get 0 .. 199
#: Seeds of orders of threads; 0 is the fixed order. The race check finds a race in any order, and takes seconds for it.
ORDERS = [3] if os.environ.get("HOTROW_RUNNER_SANITIZER") == "thread" else [0, 3]

#: Key type, keys per line and memory of caches. The kernels are compiled again for each type of lines.
KINDS = [
    ("I64", 15, "dynamic"),
    *(
        pytest.param(kind, marks=pytest.mark.kernels)
        for kind in (("I64", 7, "static"), ("U32", 15, "dynamic"), ("I64", 15, "uvm"))
    ),
]
#: Options of caches whose lines or memory are not the usual ones.
LINES = [
    {"key_type": "U32"},
    *(
        pytest.param(options, marks=pytest.mark.kernels)
        for options in ({"line_keys": 7}, {"kind": "static"}, {"kind": "uvm"})
    ),
]


@dataclass(frozen=True)
class Bags:
    """One table's part of a request; see ``gpu_cache.request.TableBags``."""

    keys: np.ndarray
    row_ptrs: np.ndarray


class Tables:
    """Tables of float32 rows by key 0 .. 399, and caches that hold half of them.

    Args:
        device: of the caches.
        forms: row type and dim of each table.
        options: of every cache.
    """

    def __init__(self, device, forms, **options):
        self.device = device
        self.dims = [dim for _, dim in forms]
        readers = Readers()
        self.caches = [
            EmbeddingCache(dim, 2 * TABLE_KEYS, device, row_dtype, seed=t, readers=readers, **options)
            for t, (row_dtype, dim) in enumerate(forms)
        ]
        self.rows = [self._rows(cache, t) for t, cache in enumerate(self.caches)]

    def _rows(self, cache, t):
        """The table's rows as its cache returns them."""
        rng = np.random.default_rng(t)
        rows = rng.standard_normal((TABLE_KEYS, cache.layout.dim), dtype=np.float32)
        if cache.layout.row_dtype != "fp8":
            round_rows(rows, cache.layout.row_dtype, rows)
        cache.replace(np.arange(HELD_KEYS), rows[:HELD_KEYS])
        assert cache.stats().rows == HELD_KEYS
        if cache.layout.row_dtype in ("fp8", "uint8"):  # encoding a decoded row of these dtypes may change it
            keys, held = cache.dump(with_rows=True)
            rows[keys] = held
        return rows

    def group(self, slots, combiners, **options):
        return CacheGroup(self.caches, slots, combiners, **options)

    def fetch(self, missing):
        """The rows that a parameter server would return."""
        return [rows[of_table.keys] for rows, of_table in zip(self.rows, missing, strict=True)]


def random_request(rng, samples, slots, lengths, share_held=0.5, tables=None):
    """Bags of random keys; the caches got about ``share_held`` of them. A third of the tables have bags of one size."""
    request = []
    for of_table in slots:
        counts = rng.choice(lengths, samples * of_table)
        if rng.random() < 1 / 3:
            counts[:] = counts[0]
        row_ptrs = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        keys = rng.integers(0, HELD_KEYS, row_ptrs[-1])
        keys[rng.random(keys.size) >= share_held] += HELD_KEYS
        request.append(Bags(keys, row_ptrs))
    return request


def expected(rows, bags, combiner, weights=None):
    """float32[B * S, D] from the host's loops."""
    out = np.empty((bags.row_ptrs.size - 1, rows.shape[1]), dtype=np.float32)
    pool_rows(rows[bags.keys], bags.row_ptrs, out, combiner, weights)
    return out


def finish(work, tables):
    """Fetch and pool again until nothing is missing; return the number of rounds."""
    rounds = 0
    while missing := work.missing():
        assert rounds < 10, "fetched keys are missing again and again"
        work.complete(tables.fetch(missing))
        rounds += 1
    return rounds


def host_rows(device, pooled):
    """float32[B * S, D] of each table; the stream must have run."""
    return [device.to_host(array).reshape(-1, array.shape[2]) for array in pooled]


def scheduled(device, seed, os_threads=1):
    """A drawn order of threads, if the device supports it."""
    return device.scheduled(seed, os_threads) if hasattr(device, "scheduled") else nullcontext()


def watch_waits(monkeypatch, stream, on_event, on_stream):
    """Call ``on_event`` when the host waits for an event of the stream, and ``on_stream`` when it waits for all."""
    waiting, record = [], stream.record

    def watched(wait, note):
        def noted():
            if not waiting:  # a stream of the runner waits for an event
                note()
            waiting.append(wait)
            try:
                wait()
            finally:
                waiting.pop()

        return noted

    def record_watched():
        event = record()
        event.synchronize = watched(event.synchronize, on_event)
        return event

    monkeypatch.setattr(stream, "synchronize", watched(stream.synchronize, on_stream))
    monkeypatch.setattr(stream, "record", record_watched)
