"""Queries by form, batch, distribution and hit rate, against the gather of rows whose slots are known."""

import numpy as np

from benchmarks.gpu.byte_counts import gather_bytes, query_bytes
from benchmarks.gpu.ceiling import KnownRows
from benchmarks.gpu.keys import FIRST_ABSENT_KEY, WrongAnswerError, check_rows, filled_cache, pool_of
from benchmarks.gpu.records import Record
from benchmarks.gpu.rounds import as_graph, take_turns
from gpu_cache.device_table import CacheKernels
from gpu_cache.layout import TABLE_BYTES, Layout

CEILING = "the gather of rows with known slots"
LEAST_CALLS = 4
KEYS_PER_ROUND = 1 << 20  # their lines are twice as large as an H200's L2 cache


class BareQuery:
    """The query kernel on its own stream, without the cache's protection from concurrent writers."""

    def __init__(self, cache, max_keys):
        self.cache, self.device, self.stream = cache, cache.device, cache.device.stream()
        self.answer = cache.answer(max_keys, self.stream)
        self._table = self.device.empty((1, TABLE_BYTES), np.uint8)
        cache.describe(self._table, 0, 0, 0.0, self.stream)
        self._kernels = CacheKernels(self.device, cache.layout)

    def queue(self, keys):
        self._kernels.query(self._table, keys, self.answer.arguments(), self.stream)

    def check(self, host_keys, keys, missing):
        """Query once and compare the answer with NumPy.

        Raises:
            WrongAnswerError: the answer differs.
        """
        layout, answer = self.cache.layout, self.answer
        self.queue(keys)
        self.stream.synchronize()
        listed = int(answer.missing_count[0])
        positions = self.device.to_host(answer.missing_positions[:listed])
        if not np.array_equal(np.sort(positions), np.flatnonzero(missing)):
            raise WrongAnswerError(f"query: {listed} misses were listed, {int(missing.sum())} keys are missing")
        if not np.array_equal(self.device.to_host(answer.missing_keys[:listed]), host_keys[positions]):
            raise WrongAnswerError("query: a key that was listed does not stand at its position")
        check_rows(self.device, "query", host_keys, answer.rows[: keys.size], layout.row_dtype, missing)


def measure(device, sizes, places, gb_per_s):
    """Yield records of gather and query for every form."""
    for dim in sizes.dims:
        for row_dtype in sizes.row_dtypes:
            known = KnownRows(device, Layout(dim, row_dtype), sizes.slots)
            for line_keys in (15, 7) if row_dtype == "fp32" else (15,):
                filled = filled_cache(device, sizes.slots, dim, row_dtype, line_keys)
                for distribution, drawn in places.items():
                    for hit_rate in sizes.hit_rates:
                        pool = pool_of(device, filled.population, drawn, distribution, hit_rate)
                        numbers = known.numbers(drawn)
                        yield from by_batch(filled.cache, known, pool, numbers, sizes, gb_per_s)
                filled.close()


def by_batch(cache, known, pool, numbers, sizes, gb_per_s):
    """Yield a record of the query for each batch, and one of the gather for all lines and hit rates."""
    device, layout = cache.device, cache.layout
    query = BareQuery(cache, max(sizes.batches))
    missing = np.zeros(pool.host_keys.size, bool) if pool.hit_rate == 1.0 else pool.host_keys >= FIRST_ABSENT_KEY
    form = {"dim": layout.dim, "dtype": layout.row_dtype, "distribution": pool.distribution}
    for batch in sizes.batches:
        slices = pool.batches(batch, max(LEAST_CALLS, KEYS_PER_ROUND // batch))
        known_slices = [numbers[n * batch : (n + 1) * batch] for n in range(len(slices))]
        known.queue(known_slices[0], query.answer.rows, query.stream)
        query.stream.synchronize()
        known.check(known_slices[0], query.answer.rows[:batch])
        query.check(pool.host_keys[:batch], slices[0], missing[:batch])

        def ask(slices=slices):
            for keys in slices:
                query.queue(keys)

        def gather(slices=known_slices):
            for rows in slices:
                known.queue(rows, query.answer.rows, query.stream)

        contenders = [as_graph(device, query.stream, queue, len(slices)) for queue in (ask, gather)]
        times = take_turns(contenders, sizes.rounds)
        if layout.line_keys == 15 and pool.hit_rate == 1.0:
            limits = [(us, batch * gather_bytes(layout) / gb_per_s / 1e3) for _, us in times]
            yield Record.of("gather", limits, "copy bandwidth", batch=batch, **form, bytes_per_key=gather_bytes(layout))
        bytes_per_key = query_bytes(layout, pool.hit_rate)
        record = Record.of(
            "query", times, CEILING, batch=batch, hit_rate=pool.hit_rate, **form,
            line_keys=layout.line_keys, bytes_per_key=bytes_per_key,
        )  # fmt: skip
        record.details.update(rates(record.median_us, batch, bytes_per_key, gb_per_s))
        # Of the gather's speed, the share that the bytes of the lines leave: 1 if only bytes count.
        record.details["gather_share"] = record.ratio * bytes_per_key / gather_bytes(layout)
        yield record


def rates(median_us, keys, bytes_per_key, gb_per_s):
    """Keys per second, and their share of the byte limit at the measured copy bandwidth."""
    return {
        "gkeys_per_s": keys / median_us / 1e3,
        "byte_limit_gkeys_per_s": gb_per_s / bytes_per_key,
        "byte_limit_ratio": keys * bytes_per_key / median_us / 1e3 / gb_per_s,
    }
