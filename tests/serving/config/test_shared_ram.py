"""Which RAM the processes of one server share."""

import pytest

from serving.config import SharedMemoryConfig, read_ps_config, with_shared_ram
from tests.serving.ps_files import write_ps

ROCKSDB = {"type": "rocks_db", "path": "rows"}


def tiers_of(tmp_path, **said):
    ps = read_ps_config(write_ps(tmp_path, [], **said))
    return ps, with_shared_ram(ps, "one server")


@pytest.mark.parametrize("persistent", [None, ROCKSDB])
def test_ram_with_every_row_is_shared(tmp_path, persistent):
    said = {"persistent_db": persistent} if persistent else {}
    ps, shared = tiers_of(tmp_path, volatile_db={"type": "hash_map", "lookup_threads": 3}, **said)

    (tier,) = shared.volatile_tiers
    assert isinstance(tier, SharedMemoryConfig)
    assert tier.lookup_threads == 3
    assert tier.name == with_shared_ram(ps, "one server").volatile_tiers[0].name
    assert tier.name != with_shared_ram(ps, "another").volatile_tiers[0].name
    assert shared.persistent_db == ps.persistent_db


@pytest.mark.parametrize(
    "volatile",
    [
        {"type": "hash_map", "capacity_rows": 10},
        {"type": "hash_map", "overflow_margin": 10},
        {"type": "hash_map", "initialize_after_startup": False},
        {"type": "hash_map", "initial_cache_rate": 0.5},
        {"type": "multi_process_hash_map", "shared_memory_name": "own"},
        {"type": "disabled"},
        [{"type": "hash_map"}, {"type": "redis_cluster"}],
    ],
)
def test_other_tiers_stay_as_they_are(tmp_path, volatile):
    ps, shared = tiers_of(tmp_path, volatile_db=volatile, persistent_db=ROCKSDB)

    assert shared == ps
