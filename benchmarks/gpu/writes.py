"""Queries during insertions on another stream, against the same queries alone."""

import numpy as np

from benchmarks.gpu.keys import FIRST_ABSENT_KEY, WrongAnswerError, check_rows, filled_cache, pool_of, rows_of
from benchmarks.gpu.records import Record
from benchmarks.gpu.rounds import on_stream, take_turns

QUERIES = 16  # per round
PAUSE_US = 5000  # time for the host to queue them
QUERIES_PER_INSERTION = 4
KEYS_PER_WRITTEN_ROW = 8  # keys of a query for each row of an insertion


def measure(device, sizes, places):
    """Yield records of queries during insertions; the peer is the same queries alone."""
    for dim in sizes.dims:
        for batch in sizes.write_batches:
            for distribution, drawn in places.items():
                yield beside_insertions(device, sizes, dim, batch, distribution, drawn)


def beside_insertions(device, sizes, dim, batch, distribution, drawn):
    """Insertions bring new keys, so that rows are replaced all the time."""
    filled, offered = filled_cache(device, sizes.slots, dim), batch // KEYS_PER_WRITTEN_ROW
    cache = filled.cache
    pool = pool_of(device, filled.population, drawn, distribution, 1.0)
    slices = pool.batches(batch, QUERIES)
    reader, writer = device.stream(), device.stream()
    answer = cache.answer(batch, reader)
    insertions = 0
    keys, rows, misses = _new_rows(device, offered, dim)

    def ask(writes):
        nonlocal insertions, keys
        if writes:
            writer.wait(reader.record())  # begin together
        for number in range(QUERIES):
            if writes and number % QUERIES_PER_INSERTION == 0:
                with device.using(writer):
                    keys += offered
                cache.replace(keys, rows, misses=misses, stream=writer)
                insertions += 1
            cache.query(slices[number % len(slices)], out=answer, stream=reader)

    before = cache.stats()
    contenders = [
        on_stream(device, reader, lambda writes=writes: ask(writes), QUERIES, pause_us=PAUSE_US)
        for writes in (True, False)
    ]
    times = take_turns(contenders, sizes.rounds)
    writer.synchronize()
    _check(device, pool, answer, batch, cache, reader, slices[0])
    stats = cache.stats()
    written = stats.inserted_rows + stats.replaced_rows - before.inserted_rows - before.replaced_rows
    cache.close()
    if not written:
        raise WrongAnswerError("writes: nothing was written during the queries")
    return Record.of(
        "query_beside_writes", times, "the same queries alone", dim=dim, dtype="fp32", batch=batch,
        distribution=distribution, hit_rate=1.0, offered_rows=insertions * offered, written_rows=written,
    )  # fmt: skip


def _new_rows(device, count, dim):
    """Unknown keys, each missed twice, so that no key needs a second offer. No query contains them."""
    keys = device.xp.arange(FIRST_ABSENT_KEY, FIRST_ABSENT_KEY + count, dtype=np.int64)
    return keys, rows_of(device.xp, keys, dim, "fp32"), device.xp.asarray(np.full(count, 2, np.uint32))


def _check(device, pool, answer, batch, cache, reader, keys):
    """After all writes, hits are right and replaced keys are reported as missing."""
    cache.query(keys, out=answer, stream=reader)
    reader.synchronize()
    missing = np.zeros(batch, bool)
    missing[device.to_host(answer.missing_positions[: int(answer.missing_count[0])])] = True
    check_rows(device, "query during writes", pool.host_keys[:batch], answer.rows[:batch], "fp32", missing)
