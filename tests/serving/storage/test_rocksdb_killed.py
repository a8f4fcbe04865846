"""A process that is killed while it writes: what it acknowledged is there, and nothing is there by half.

The processes print a line before each act and after it. What is found afterwards is held against these lines.
"""

import signal
import time
from pathlib import Path

import numpy as np
import pytest

from serving.config import MOST_ROCKSDB_BATCH_ROWS as MOST_BATCH_ROWS
from serving.storage import Marker, RocksDbStore, TableSpec
from tests.tools.warm import Warm

SPEC = TableSpec("model.table", 16)
# A call of insert is two whole batches and a part of one, and the log takes many writes of the system's for each.
CALL_ROWS = 2 * MOST_BATCH_ROWS + 1000
CALLS = 3  # calls of insert that have keys of their own
LOADED_ROWS = 20_000
LOADED_BATCHES = 20
FIRST_INSERTED = 1_000_000

BEGIN = f"""
import sys
from contextlib import contextmanager
import numpy as np
from serving.storage import Marker, RocksDbStore, TableSpec
from serving.storage.rocksdb import sort as rocksdb_sort
from serving.storage.rocksdb import table as rocksdb_table

def insert(number, version):
    first = {FIRST_INSERTED} + {CALL_ROWS} * number
    rows = np.full(({CALL_ROWS}, {SPEC.dim}), version, np.float32)
    print("inserts", number, version, flush=True)
    table.insert(np.arange(first, first + {CALL_ROWS}), rows)
    print("inserted", number, version, flush=True)

store = RocksDbStore(sys.argv[1], num_threads=1)
table = store.table(TableSpec({SPEC.name!r}, {SPEC.dim}))
table.open(0)
version = 0
"""
# Inserts the same keys again and again, with the number of the call in all its rows.
INSERTER = f"""{BEGIN}
while True:
    version += 1
    insert(version % {CALLS}, version)
"""
# Loads the table again and again, and inserts rows between; the number of the load is in all rows of both.
LOADER = f"""{BEGIN}
sorted_files = rocksdb_table.sorted_files

@contextmanager
def reported(*arguments):
    with sorted_files(*arguments) as written:
        print("written", version, flush=True)
        yield written

rocksdb_sort.RUN_BYTES = 72 * 4000
rocksdb_table.sorted_files = reported

def batches():
    for keys in np.array_split(np.arange({LOADED_ROWS}), {LOADED_BATCHES}):
        yield keys, np.full((keys.size, {SPEC.dim}), version, np.float32)
        print("batch", version, flush=True)

while True:
    version += 1
    print("begins", version, flush=True)
    table.load(batches(), Marker(str(version)), keep=False)
    print("loaded", version, flush=True)
    for number in range({CALLS}):
        insert(number, version)
"""


def run_until(program, path, word, times, wait_ratio=0.0):
    """Run a program until it has printed a line that begins with ``word`` so often, and kill it.

    Args:
        program: the source; it writes to the database at ``path`` and goes on until it is killed.
        wait_ratio: wait before it is killed, as a part of the time between the last two of those lines.

    Returns:
        the lines that it has printed, as tuples of a word and numbers.
    """
    said, came_s = [], []
    with Warm("-c", program, path) as writer:
        while len(came_s) < times:
            said.append(writer.stdout.readline())
            assert said[-1], "the program ended by itself"
            if said[-1].split()[0] == word:
                came_s.append(time.monotonic())
        while wait_ratio and time.monotonic() < came_s[-1] + wait_ratio * (came_s[-1] - came_s[-2]):
            pass  # a thread that sleeps may be woken when the act is over
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    lines = [line.split() for line in said if line.endswith("\n")]
    return [(first, *map(int, numbers)) for first, *numbers in lines]


def open_store(path):
    store = RocksDbStore(path, num_threads=1)
    store.table(SPEC).open(0)
    return store


def versions_of(store, first, rows):
    """The numbers in the rows of keys from ``first`` on, as a set; None stands for a key that is not there."""
    out = np.empty((rows, SPEC.dim), dtype=np.float32)
    found = store.tables[SPEC.name].fetch(np.arange(first, first + rows), out)
    return set(out[found].ravel().astype(int).tolist()) | ({None} if not found.all() else set())


def batches_of_call(store, number):
    """``versions_of`` each batch of the keys that the calls of insert with this number have."""
    begin, end = FIRST_INSERTED + CALL_ROWS * number, FIRST_INSERTED + CALL_ROWS * (number + 1)
    starts = range(begin, end, MOST_BATCH_ROWS)
    return [versions_of(store, start, min(MOST_BATCH_ROWS, end - start)) for start in starts]


def numbers_after(said, *words):
    """The last number of each line that begins with these words."""
    return [line[-1] for line in said if line[: len(words)] == words]


# When a writer is killed. The first few belong to every run of the tests, the others to `make test-long`.
def points(drawn, quick):
    return [pytest.param(*point, marks=pytest.mark.long if at >= quick else ()) for at, point in enumerate(drawn)]


draw = np.random.default_rng(7)
IN_INSERTS = [(int(draw.integers(2, 12)), round(draw.uniform(0.05, 0.95), 2)) for _ in range(36)]
# Most while rows are read or, behind the last batch, written to files; the others in the instant when these replace
# the old ones, or later. The first load of a table is among them.
IN_LOADS = [("batch", 2 * LOADED_BATCHES), ("written", 2), ("batch", 47)]
IN_LOADS += [("batch", int(draw.integers(1, 80))) for _ in range(8)]
IN_LOADS += [("written", times) for times in (1, 3, 4, 5)] + [("batch", LOADED_BATCHES * times) for times in (1, 3)]
IN_LOADS += [(word, times) for word in ("loaded", "inserts", "inserted") for times in (1, 5)]


@pytest.mark.parametrize(("times", "wait_ratio"), points(IN_INSERTS, quick=4))
def test_a_batch_whose_insert_was_killed_is_whole_or_absent_and_acknowledged_ones_are_whole(
    tmp_path, times, wait_ratio
):
    said = run_until(INSERTER, tmp_path / "db", "inserts", times, wait_ratio)

    store = open_store(tmp_path / "db")
    for number in range(CALLS):
        acknowledged = max(numbers_after(said, "inserted", number), default=None)
        begun = max(numbers_after(said, "inserts", number), default=None)
        for versions in batches_of_call(store, number):
            assert versions in ({acknowledged}, {begun})
    store.close()


@pytest.mark.parametrize(("word", "times"), points(IN_LOADS, quick=3))
def test_a_table_whose_load_was_killed_has_all_its_old_rows_or_all_the_new_ones(tmp_path: Path, word: str, times: int):
    said = run_until(LOADER, tmp_path / "db", word, times)
    begun = max(numbers_after(said, "begins"))
    loaded = max(numbers_after(said, "loaded"), default=None)
    replaces = begun != loaded and begun in numbers_after(said, "written")

    store = open_store(tmp_path / "db")
    marker = store.tables[SPEC.name].marker()
    if marker is None and replaces:  # killed in the instant between: a server loads the table again
        rows = np.full((LOADED_ROWS, SPEC.dim), begun, dtype=np.float32)
        store.table(SPEC).load(iter([(np.arange(LOADED_ROWS), rows)]), Marker(str(begun)), keep=True)
        marker = store.tables[SPEC.name].marker()
        assert not marker.changed
    assert marker is None or marker.rows == LOADED_ROWS
    is_from = marker and int(marker.digest)
    assert is_from in ({loaded, begun} if replaces else {loaded})
    assert versions_of(store, 0, LOADED_ROWS) == {is_from}
    for number in range(CALLS):
        acknowledged = is_from in numbers_after(said, "inserted", number)
        begun_too = is_from in numbers_after(said, "inserts", number)
        for versions in batches_of_call(store, number):
            assert versions in ([{is_from}] if acknowledged else [{None}, {is_from}] if begun_too else [{None}])
    store.close()


def test_a_killed_load_is_made_good_by_the_next_one(tmp_path):
    run_until(LOADER, tmp_path / "db", "batch", 10)
    store = open_store(tmp_path / "db")
    assert store.tables[SPEC.name].marker() is None

    store.table(SPEC).load(iter([(np.arange(10), np.ones((10, SPEC.dim), np.float32))]), Marker("again"), keep=True)

    assert versions_of(store, 0, 10) == {1}
    assert versions_of(store, 10, LOADED_ROWS) == {None}
    assert not (tmp_path / "db" / "loading").exists()
    assert store.tables[SPEC.name].marker() == Marker("again", 10)
    store.close()
