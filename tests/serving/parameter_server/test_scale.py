"""Tables of millions of rows: each row is served as it was written, in the memory that was planned."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from benchmarks.scale import anonymous_bytes, keys_of, tiers_file, vectors_of, why_not, written
from kernels.host import HostTable
from serving.parameter_server import ParameterServer
from serving.parameter_server.promotion import MOST_WAITING_BYTES
from serving.planner import table_sizes

MIB = 2**20
BATCH_KEYS = 2**17


@pytest.fixture
def folder():
    """A folder that does not outlive the test, as pytest's would: tables take gigabytes."""
    with TemporaryDirectory() as path:
        yield Path(path)


def skip_unless_there_is_room(folder, dim, rows):
    reason = why_not(folder, dim, rows)
    if reason:
        pytest.skip(f"{rows:,} rows of dim {dim}: {reason}")


def assert_served(server, keys, dim):
    rows, found = server.lookup("m.t", keys)
    assert found.all()
    assert (rows == vectors_of(keys, dim)).all()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rows", "dim"), [(1_000_000, 128), (10_000_000, 32), (30_000_000, 16)])
def test_every_row_of_a_table_in_ram_is_served_and_takes_the_memory_that_was_planned(folder, rows, dim):
    skip_unless_there_is_room(folder, dim, rows)
    with written(folder, dim, rows) as config, ParameterServer.from_config(tiers_file(folder)) as server:
        before = anonymous_bytes()
        server.load_model(config)
        taken = anonymous_bytes() - before
        (planned,) = table_sizes([config])

        for begin in range(0, rows, BATCH_KEYS):
            assert_served(server, keys_of(begin, min(begin + BATCH_KEYS, rows)), dim)
        absent, found = server.lookup("m.t", keys_of(rows, rows + BATCH_KEYS))
        assert not found.any()
        assert not absent.any()

    assert (
        0.95 * planned.ram_bytes < taken < 1.01 * planned.ram_bytes + 16 * MIB
    )  # what loading leaves to the allocator


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_table_four_times_its_ram_is_served_from_rocksdb_in_the_memory_of_the_ram(folder):
    """Rows in RAM and on their way there are bounded; RocksDB's lie in mapped files, which are not the process's."""
    rows, ram_rows, dim = 4_000_000, 1_000_000, 32
    skip_unless_there_is_room(folder, dim, rows)
    memory = {"type": "hash_map", "overflow_margin": ram_rows // 16, "num_partitions": 16}
    memory |= {"overflow_policy": "evict_least_used", "cache_missed_embeddings": True}
    tiers = {"volatile_db": memory, "persistent_db": {"type": "rocks_db", "path": "rows", "num_threads": 2}}
    every_key, rng = keys_of(0, rows), np.random.default_rng(0)
    before = anonymous_bytes()
    with written(folder, dim, rows) as config, ParameterServer.from_config(tiers_file(folder, **tiers)) as server:
        server.load_model(config)
        ram, rocksdb = server.stores
        heights = []
        for _ in range(100):
            numbers = (rows * rng.random(BATCH_KEYS // 4) ** 2).astype(np.int64)
            assert_served(server, every_key[numbers], dim)
            assert server.wait_for_promotions(60)
            assert ram.tables["m.t"].count() <= ram_rows
            heights.append(anonymous_bytes() - before)
        hits = server.counters()["m.t"].hits

        assert min(hits["memory"], hits["rocksdb"], ram.tables["m.t"].evicted_rows) > ram_rows
        assert rocksdb.tables["m.t"].count() == rows
    of_ram = HostTable.memory_bytes(dim, ram_rows, overflow_policy="evict_least_used")
    assert max(heights) < of_ram + MOST_WAITING_BYTES
