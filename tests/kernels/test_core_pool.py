"""Big lookups on several cores answer like one thread, also while other threads look up, fork or exit."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.host import HostTable, lookup_threads, pool_rows, set_lookup_threads
from kernels.snapshot import Snapshot, write_snapshot

SHARED_KEYS = 16_384  # lookups from this size on use several threads
ROWS = 5_000


@pytest.fixture(autouse=True)
def four_threads():
    """Use four threads for a lookup, on any number of cores."""
    before = lookup_threads()
    set_lookup_threads(4)
    yield
    set_lookup_threads(before)


def table_and_rows(dim, row_dtype="fp32"):
    """A table of keys 0, 3, 6, ..., and its rows by key, with zeros for absent keys."""
    rows = np.zeros((3 * ROWS, dim), dtype=np.float32)
    rows[::3] = np.random.default_rng(dim).integers(-127, 128, (ROWS, dim))
    rows[::3, 0] = 127.0  # int8 keeps these unchanged
    table = HostTable(dim, ROWS, row_dtype)
    table.insert(np.arange(0, 3 * ROWS, 3), rows[::3].copy())
    return table, rows


def snapshot_of(table, folder):
    """The same rows in a snapshot."""
    with (folder / "t").open("wb") as file:
        write_snapshot(file.fileno(), table.dim, ROWS, table.row_dtype, table.items(), bytes(32))
    return Snapshot(folder / "t")


@pytest.mark.parametrize("kind", ["table", "snapshot"])
@pytest.mark.parametrize("row_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("dim", [3, 16, 32])
@pytest.mark.parametrize("count", [SHARED_KEYS - 1, SHARED_KEYS, SHARED_KEYS + 1, 10 * SHARED_KEYS + 777])
def test_a_shared_fetch_gives_the_rows_of_a_dict(count, dim, row_dtype, kind, tmp_path):
    table, rows = table_and_rows(dim, row_dtype)
    if kind == "snapshot":
        table = snapshot_of(table, tmp_path)
    keys = np.random.default_rng(count).integers(0, 3 * ROWS, count)
    guarded = np.full((count + 2, dim), -1.0, dtype=np.float32)

    found = table.fetch(keys, guarded[1:-1])

    np.testing.assert_array_equal(found, keys % 3 == 0)
    np.testing.assert_array_equal(guarded[1:-1], rows[keys])
    assert (guarded[[0, -1]] == -1.0).all()


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """By kind and dim, a table or a snapshot and its rows."""
    made = {("table", dim): table_and_rows(dim) for dim in (5, 16)}
    for dim in (5, 16):
        table, rows = made["table", dim]
        made["snapshot", dim] = (snapshot_of(table, tmp_path_factory.mktemp("snapshot")), rows)
    return made


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_shared_pooled_lookup_has_the_bits_of_rows_pooled_by_one_thread(tables, data):
    table, rows = tables[data.draw(st.sampled_from(["table", "snapshot"])), data.draw(st.sampled_from([5, 16]))]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = st.sampled_from([0, 1, 2, 7, 2047, 2048, 2049, 5000])
    few = np.array(data.draw(st.lists(lengths, min_size=1, max_size=8)))
    sizes = np.concatenate([few, rng.integers(0, 30, 2000), few[::-1]])
    row_ptrs = np.concatenate([[0], np.cumsum(sizes)])
    keys = rng.integers(0, 3 * ROWS, row_ptrs[-1])
    weights = rng.standard_normal(keys.size, dtype=np.float32) if data.draw(st.booleans()) else None
    combiner = data.draw(st.sampled_from(["sum", "mean", "sqrtn"]))
    out = np.full((sizes.size, table.dim), -1.0, dtype=np.float32)
    expected = np.empty_like(out)

    found = table.fetch_pooled(keys, row_ptrs, out, combiner, weights)

    pool_rows(rows[keys], row_ptrs, expected, combiner, weights)
    assert keys.size >= SHARED_KEYS
    np.testing.assert_array_equal(found, keys % 3 == 0)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("bags", [1, 100_000], ids=["one bag of all keys", "all bags but one empty"])
def test_bags_that_cannot_be_split_are_still_pooled(bags):
    table, rows = table_and_rows(8)
    keys = np.random.default_rng(1).integers(0, 3 * ROWS, 2 * SHARED_KEYS)
    row_ptrs = np.zeros(bags + 1, dtype=np.int64)
    row_ptrs[bags // 2 + 1 :] = keys.size
    out = np.full((bags, 8), -1.0, dtype=np.float32)

    assert table.fetch_pooled(keys, row_ptrs, out, "sum").any()

    # Whole numbers, whose float32 sums are exact.
    np.testing.assert_array_equal(out[bags // 2], rows[keys].sum(axis=0, dtype=np.float64))
    assert np.count_nonzero(out.any(axis=1)) == 1


def test_big_lookups_of_many_threads_share_one_pool_and_get_their_own_rows():
    table, rows = table_and_rows(16)

    def look_up(seed):
        keys = np.random.default_rng(seed).integers(0, 3 * ROWS, 3 * SHARED_KEYS)
        out = np.empty((keys.size, 16), dtype=np.float32)
        for _ in range(10):
            table.fetch(keys, out)
            np.testing.assert_array_equal(out, rows[keys])

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(look_up, seed) for seed in range(6)]:
            future.result()


def pool_threads():
    """The number of this process's threads that have the pool's name."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("this system does not show a process's threads")
    names = []
    for task in tasks.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since the list was read
            names.append((task / "comm").read_text().strip())
    return names.count("hotrow-lookup")


def pool_comes_to(count):
    """Whether the pool has this many threads; the system may show a thread for a moment after it was joined."""
    end = time.monotonic() + 30
    while pool_threads() != count and time.monotonic() < end:
        time.sleep(0.001)
    return pool_threads() == count


def test_big_lookups_of_a_snapshot_use_the_pool(tmp_path):
    table, _ = table_and_rows(4)
    snapshot = snapshot_of(table, tmp_path)
    keys, out = np.zeros(SHARED_KEYS, dtype=np.int64), np.empty((SHARED_KEYS, 4), dtype=np.float32)

    snapshot.fetch(keys[1:], out[1:])
    assert pool_comes_to(0)
    snapshot.fetch(keys, out)
    assert pool_comes_to(3)


def test_the_pool_starts_with_the_first_big_lookup_and_ends_when_one_thread_is_set():
    table, _ = table_and_rows(4)
    keys = np.zeros(SHARED_KEYS, dtype=np.int64)
    out = np.empty((SHARED_KEYS, 4), dtype=np.float32)

    table.fetch(keys[1:], out[1:])
    assert pool_comes_to(0)
    table.fetch(keys, out)
    assert pool_comes_to(3)
    set_lookup_threads(1)
    table.fetch(keys, out)
    assert pool_comes_to(0)


# Forked children leave by os._exit: coverage, pytest and the like must not end twice.
def test_a_forked_child_looks_up_with_its_own_threads():
    table, rows = table_and_rows(8)
    keys = np.random.default_rng(2).integers(0, 3 * ROWS, 4 * SHARED_KEYS)
    out = np.empty((keys.size, 8), dtype=np.float32)
    table.fetch(keys, out)

    child = os.fork()
    if child == 0:
        out[...] = -1.0
        inherited = pool_threads()
        table.fetch(keys, out)
        os._exit(0 if inherited == 0 and pool_threads() == 3 and np.array_equal(out, rows[keys]) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool_comes_to(3)


EXIT_AFTER_LOOKUPS = """
import numpy as np
from kernels.host import HostTable, set_lookup_threads

set_lookup_threads(3)
HostTable(8, 10).fetch(np.arange(200_000), np.empty((200_000, 8), np.float32))
"""


def test_a_process_with_a_pool_ends_by_itself():
    subprocess.run([sys.executable, "-c", EXIT_AFTER_LOOKUPS], check=True, timeout=60)


EXIT_BESIDE_LOOKUPS = """
import threading
import numpy as np
from kernels.host import HostTable

table = HostTable(8, 10)
looks_up = threading.Event()

def look_up(count):
    keys, out = np.arange(count), np.empty((count, 8), np.float32)
    while True:
        table.fetch(keys, out)
        looks_up.set()

for count in (100, 10_000, 20_000):  # the last one with the pool's threads
    threading.Thread(target=look_up, args=(count,), daemon=True).start()
looks_up.wait()
"""


def test_a_process_ends_by_itself_while_daemon_threads_look_up():
    result = subprocess.run([sys.executable, "-c", EXIT_BESIDE_LOOKUPS], capture_output=True, text=True, timeout=60)

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("threads", [0, -1, 65])
def test_a_number_of_threads_out_of_range_is_refused(threads):
    with pytest.raises(ValueError, match=rf"threads: expected 1 to 64, got {threads}"):
        set_lookup_threads(threads)
    assert lookup_threads() == 4


SHOW_THREADS = "from kernels.host import lookup_threads; print(lookup_threads())"


def ask_with(**environment):
    return subprocess.run(
        [sys.executable, "-c", SHOW_THREADS], env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_the_environment_sets_the_number_of_threads():
    assert ask_with(HOTROW_LOOKUP_THREADS="5").stdout == "5\n"


@pytest.mark.parametrize("said", ["", "0", "65", "many", "2.5"])
def test_a_wrong_number_of_threads_in_the_environment_is_refused(said):
    assert f"HOTROW_LOOKUP_THREADS: expected 1 to 64, got {said!r}" in ask_with(HOTROW_LOOKUP_THREADS=said).stderr
