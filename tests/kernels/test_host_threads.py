"""HostTable with Python threads: it releases the GIL, and readers see whole rows of the right key."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kernels.host import HostTable, KeyIndex

DIM = 32
LASTING = 2000  # keys 0 .. LASTING - 1 are never evicted


def rows_of(keys, version):
    """Even columns hold the key, odd columns the version."""
    rows = np.empty((len(keys), DIM), np.float32)
    rows[:, 0::2] = np.asarray(keys)[:, None]
    rows[:, 1::2] = version
    return rows


def check(keys, rows):
    """Check that every row belongs to its key and has one version."""
    assert (rows[:, 0::2] == np.asarray(keys)[:, None]).all()
    assert (rows[:, 1::2] == rows[:, 1:2]).all()


def run_during_writes(table, read, rounds, writers=2):
    """Run ``read(reader)`` ``rounds`` times in each of three threads while writers replace, evict and re-insert."""
    stop = threading.Event()

    def write(writer):
        rng = np.random.default_rng(writer)
        version = 0
        while not stop.is_set():
            version = (version + 1) % 10_000
            lasting = rng.integers(0, LASTING, size=500)
            passing = np.arange(500) + LASTING + 500 * writer
            table.insert(lasting, rows_of(lasting, version))
            table.insert(passing, rows_of(passing, version))
            table.evict(passing)
        return version

    with ThreadPoolExecutor(writers + 3) as pool:
        writing = [pool.submit(write, writer) for writer in range(writers)]
        reading = [pool.submit(lambda reader=reader: [read(reader) for _ in range(rounds)]) for reader in range(3)]
        try:
            for future in reading:
                future.result()
        finally:
            stop.set()
        assert all(future.result() > 0 for future in writing), "a writer made no progress"


@pytest.fixture
def table():
    table = HostTable(DIM, LASTING + 1000)
    table.insert(np.arange(LASTING), rows_of(np.arange(LASTING), 0))
    return table


@pytest.mark.parametrize("batch", [26, 5000])
def test_fetch_during_writes_returns_whole_rows_of_the_right_keys(table, batch):
    out = [np.empty((batch, DIM), np.float32) for _ in range(3)]
    rngs = [np.random.default_rng(10 + reader) for reader in range(3)]

    def read(reader):
        keys = rngs[reader].integers(0, LASTING + 1000, size=batch)
        found = table.fetch(keys, out[reader])
        assert found[keys < LASTING].all(), "a key that is always there was not found"
        check(keys[found], out[reader][found])
        assert not out[reader][~found].any()

    run_during_writes(table, read, rounds=200)
    assert len(table) == LASTING


def test_pooling_during_writes_adds_whole_rows_of_the_right_keys(table):
    row_ptrs = np.arange(0, 4001, 2)
    rngs = [np.random.default_rng(20 + reader) for reader in range(3)]

    def read(reader):
        keys = rngs[reader].integers(0, LASTING, size=4000)
        out = np.empty((2000, DIM), np.float32)
        assert table.fetch_pooled(keys, row_ptrs, out, "sum").all()
        assert (out[:, 0::2] == (keys[0::2] + keys[1::2])[:, None]).all()
        assert (out[:, 1::2] == out[:, 1:2]).all()

    run_during_writes(table, read, rounds=100)


def test_items_during_writes_returns_each_lasting_key_once(table):
    def read(_reader):
        met = []
        for keys, rows in table.items(batch_rows=333):
            check(keys, rows)
            met.extend(keys[keys < LASTING].tolist())
        assert sorted(met) == list(range(LASTING))

    run_during_writes(table, read, rounds=20)


def test_more_readers_than_one_block_of_slots_can_read():
    table = HostTable(DIM, 20_000)
    keys = np.arange(20_000)
    table.insert(keys, rows_of(keys, 1))
    together = threading.Barrier(100)

    def read():
        out = np.empty((len(keys), DIM), np.float32)
        together.wait(timeout=60)
        assert table.fetch(keys, out).all()
        check(keys, out)

    with ThreadPoolExecutor(100) as pool:
        for future in [pool.submit(read) for _ in range(100)]:
            future.result()


def test_threads_that_number_the_same_keys_agree():
    index = KeyIndex(1)
    together = threading.Barrier(4)

    def number(thread):
        keys = np.random.default_rng(thread).permutation(20_000).astype(np.int64)
        together.wait(timeout=60)
        return [(part, index.find_or_insert(part)) for part in np.split(keys, 20)]

    with ThreadPoolExecutor(4) as pool:
        answers = [future.result() for future in [pool.submit(number, thread) for thread in range(4)]]

    by_row = index.keys()
    assert sorted(by_row.tolist()) == list(range(20_000))
    for parts in answers:
        for keys, rows in parts:
            assert np.array_equal(by_row[rows], keys)


CHANGE_KEYS_DURING_CALLS = """
import threading
import numpy as np
from kernels.errors import ReservedKeyError
from kernels.host import HostTable, KeyIndex

N = 60_000
fresh = np.arange(N)
reserved_at_the_end = np.where(fresh < N // 2, fresh, -(2**63))
rows, out = np.ones((N, 8), np.float32), np.empty((N, 8), np.float32)

def call_while_keys_change(call):
    keys, stop = fresh.copy(), threading.Event()

    def change():
        while not stop.is_set():
            keys[...] = reserved_at_the_end
            keys[...] = fresh

    changing = threading.Thread(target=change)
    changing.start()
    for _ in range(400):
        try:
            call(keys)
        except ReservedKeyError:
            pass
    stop.set()
    changing.join()

table, index = HostTable(8, 2 * N), KeyIndex(1)
untouched = table.stats()
table.insert(fresh[::2].copy(), rows[::2].copy())
for call in (
    lambda keys: table.fetch(keys, out),
    lambda keys: table.insert(keys, rows),
    lambda keys: table.evict(keys),
    index.find,
    index.find_or_insert,
):
    call_while_keys_change(call)
assert sorted(key for part, _ in table.items() for key in part.tolist()) == fresh[table.fetch(fresh, out)].tolist()
assert sorted(index.keys()) == list(range(len(index)))
table.evict(fresh)
assert table.stats() == untouched
"""


def test_keys_that_another_thread_changes_during_a_call_do_not_damage_the_table():
    # In a separate process: if this fails, it crashes or never ends.
    subprocess.run([sys.executable, "-c", CHANGE_KEYS_DURING_CALLS], check=True, timeout=120)
