"""Lookup where no GPU is used."""

import pytest

from serving.config import GpuCacheConfig
from serving.lookup import open_lookups, warn_of_idle_caches
from serving.storage import MemoryStore
from tests.serving.small_server import serve, write_model


@pytest.mark.parametrize("wanted", [None, False, True])
def test_a_missing_cache_is_logged_if_the_configuration_names_it(tmp_path, caplog, wanted):
    config = write_model(tmp_path).model_copy(update={"gpu_cache": GpuCacheConfig(wanted=wanted)})

    warn_of_idle_caches([(config, ())])
    with serve(config, MemoryStore()) as server:
        open_lookups(server, config, ())

    assert ("model 'm': gpucache is true, but no GPU is used" in caplog.text) == bool(wanted)


def test_missing_caches_are_logged_once_for_all_models(tmp_path, caplog, device):
    config = write_model(tmp_path).model_copy(update={"gpu_cache": GpuCacheConfig(wanted=True)})
    models = [
        (config.model_copy(update={"name": name}), used) for name, used in (("a", ()), ("b", [device]), ("c", ()))
    ]

    warn_of_idle_caches(models)

    (record,) = caplog.records
    assert record.getMessage() == "models 'a', 'c': gpucache is true, but no GPU is used: their tiers answer alone"
