"""A process that is killed while it writes: what it acknowledged is there, and half a load is never taken for whole."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from serving.storage import RocksDbStore, TableSpec

TABLE = "model.table"
LOADED_ROWS = 20_000
BATCH_ROWS = 100

# Prints a word and a number whenever something has been acknowledged; goes on until it is killed.
WRITER = f"""
import sys
import numpy as np
from serving.storage import RocksDbStore, TableSpec, rocksdb_sort

rocksdb_sort.RUN_BYTES = 24 * 4000
store = RocksDbStore(sys.argv[1], num_threads=1)
store.open_table(TableSpec({TABLE!r}, 4), 0)
keys = np.arange({LOADED_ROWS})

def batches(generation):
    for start in range(0, keys.size, 1000):
        yield keys[start : start + 1000], np.full((1000, 4), generation, np.float32)
        print("batch", start, flush=True)

generation = 0
while True:
    generation += 1
    print("begins", generation, flush=True)
    store.bulk_load(TableSpec({TABLE!r}, 4), batches(generation), str(generation))
    print("loaded", generation, flush=True)
    for number in range(5):
        first = 1_000_000 * generation + {BATCH_ROWS} * number
        new = np.arange(first, first + {BATCH_ROWS})
        store.insert({TABLE!r}, new, np.full((new.size, 4), generation, np.float32))
        print("inserted", first, flush=True)
"""


def run_until(path, lines):
    """Run the writer until it has printed ``lines`` lines, and kill it with no chance to tidy up."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        said = [writer.stdout.readline() for _ in range(lines)]
        writer.send_signal(signal.SIGKILL)
        said += writer.stdout.readlines()
    assert writer.returncode == -signal.SIGKILL
    return [tuple(line.split()) for line in said if line.endswith("\n")]


def fetch(store, keys):
    out = np.full((len(keys), 4), np.nan, dtype=np.float32)
    return out, store.fetch(TABLE, np.asarray(keys, dtype=np.int64), out)


LINES = np.random.default_rng(7).integers(1, 60, 50).tolist()


@pytest.mark.parametrize(
    "lines", [pytest.param(lines, marks=pytest.mark.long if at >= 6 else ()) for at, lines in enumerate(LINES)]
)
def test_acknowledged_writes_survive_sigkill_and_half_a_load_is_not_taken_for_whole(tmp_path: Path, lines: int):
    said = run_until(tmp_path / "db", lines)
    begun = max(int(number) for word, number in said if word == "begins")
    loaded = max((int(number) for word, number in said if word == "loaded"), default=0)

    store = RocksDbStore(tmp_path / "db", num_threads=1)
    store.open_table(TableSpec(TABLE, 4), 0)
    digest = store.loaded_from(TABLE)
    rows, found = fetch(store, np.arange(LOADED_ROWS))
    # Until a load has its rows on the disk, the ones before it are there; for a moment, none that count.
    assert digest in {str(loaded), str(begun), None} - {"0"} - ({None} if loaded == begun else set())
    if digest is not None:
        assert found.all()
        assert (rows == int(digest)).all()
        for first in inserted(said, int(digest)):
            new, new_found = fetch(store, np.arange(first, first + BATCH_ROWS))
            assert new_found.all()
            assert (new == int(digest)).all()
    store.close()


def inserted(said, generation):
    """The first keys of the batches that were acknowledged after the load ``generation``."""
    return [int(number) for word, number in said if word == "inserted" and int(number) // 1_000_000 == generation]


def test_a_killed_load_is_made_good_by_the_next_one(tmp_path):
    run_until(tmp_path / "db", 10)
    store = RocksDbStore(tmp_path / "db", num_threads=1)
    store.open_table(TableSpec(TABLE, 4), 0)
    assert store.loaded_from(TABLE) is None

    store.bulk_load(TableSpec(TABLE, 4), iter([(np.arange(10), np.ones((10, 4), np.float32))]), "again")

    assert fetch(store, range(11))[1].tolist() == [True] * 10 + [False]
    assert not (tmp_path / "db" / "loading").exists()
    assert store.loaded_from(TABLE) == "again"
    store.close()
