"""A table of ten million rows, loaded into RocksDB from files that are sorted first."""

import numpy as np
import pytest

from serving.storage import Marker, RocksDbStore, TableSpec

SPEC = TableSpec("model.table", 16)
ROWS, BATCH_ROWS = 10_000_000, 65536
STEP = 7_000_003  # shares no divisor with ROWS: its multiples pass every key once, in no order


def keys_at(places):
    """int64[N]: the keys of a table that are given at these places; neighbours are far apart, half are negative."""
    return (places * STEP % ROWS - ROWS // 2) * 1_000_003


def rows_of(keys):
    """float32[N, 16] in which all bits of a key below 2**48 are to be seen."""
    parts = np.stack([keys % 4096, keys // 4096 % 4096, keys // 4096**2 % 4096, keys // 4096**3], axis=1)
    return np.tile(parts, 4).astype(np.float32)


def batches():
    for start in range(0, ROWS, BATCH_ROWS):
        keys = keys_at(np.arange(start, min(start + BATCH_ROWS, ROWS)))
        yield keys, rows_of(keys)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_million_rows_of_a_bulk_load_are_read_back_also_after_reopening(tmp_path):
    store = RocksDbStore(tmp_path / "db", num_threads=2)
    store.table(SPEC).load(batches(), Marker("digest"), keep=False)

    check_samples(store)
    assert store.tables[SPEC.name].count() == ROWS
    store.close()
    store = RocksDbStore(tmp_path / "db", read_only=True, num_threads=2)
    store.table(SPEC).open(0)
    check_samples(store)
    assert sum(keys.size for keys, _ in store.tables[SPEC.name].items()) == ROWS
    assert store.tables[SPEC.name].marker().digest == "digest"
    store.close()


def check_samples(store):
    """A hundredth of the keys, with the first and the last, and as many neighbours that are in no row."""
    places = np.random.default_rng(1).integers(0, ROWS, ROWS // 100)
    places[:4] = [0, 1, ROWS - 2, ROWS - 1]
    keys = keys_at(places)
    asked = np.concatenate([keys, keys + 1])
    out = np.full((asked.size, SPEC.dim), np.nan, dtype=np.float32)

    found = store.tables[SPEC.name].fetch(asked, out)

    assert found[: keys.size].all()
    assert not found[keys.size :].any()
    np.testing.assert_array_equal(out[: keys.size], rows_of(keys))
    assert not out[keys.size :].any()
