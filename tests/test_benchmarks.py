"""Every CPU benchmark runs on small input."""

import json

import pytest

from tests.tools import warm

NAMES = [
    "batching",
    "cache_policy",
    "candidates",
    "eviction",
    "features",
    "fused_lookup",
    "host_table",
    "host_time",
    "offline",
    "persia",
    "predict",
    "redis_store",
    "rocksdb_load",
    "rocksdb_misses",
    "scale",
    "servers",
    "snapshot",
    "sok",
    "swaps",
    "tiers",
    "training",
    "training_data",
    "training_processes",
    "update_stream",
    "updates",
]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_small_input(name, tmp_path):
    file = tmp_path / "result.json"
    done = warm.run("-m", f"benchmarks.{name}", "--quick", "--json", file)

    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["records"]
