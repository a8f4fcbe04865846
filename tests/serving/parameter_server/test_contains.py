"""Whether tiers hold a key, asked by Hotrow itself and not by a client."""

import numpy as np
import pytest

from serving.errors import UnknownModelError
from serving.parameter_server import ParameterServer
from tests.serving.ps_files import KEYS, write_lookup_model

ROCKSDB = {
    "volatile_db": {"type": "hash_map", "capacity_rows": 2},
    "persistent_db": {"type": "rocks_db", "path": "rows"},
}


def test_keys_of_every_tier_are_found_and_nothing_is_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ParameterServer.from_config(write_lookup_model(tmp_path, **ROCKSDB)) as server:
        [name, _] = sorted(server.counters())
        keys = np.array([KEYS[0], 8, KEYS[2], KEYS[1], 9])

        assert server.contains(name, keys).tolist() == [True, False, True, True, False]

        assert server.counters()[name].keys == 0
        with pytest.raises(UnknownModelError):
            server.contains("no.table", keys)
