"""``hit_rate_threshold`` of a ``ps.json``: which rows a cache is given, in the mode that answers exactly."""

import numpy as np
import pytest

from serving.opening import Runtime
from serving.repository import ModelRepository
from tests.serving.ps_files import listed, write_ps

KEYS_PER_REQUEST, FIRST, SECOND, THIRD = 4, [0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6, 7]  # then 3 and 1 of 4 are found


@pytest.fixture
def rows_held(device, write_model, tmp_path):
    """A function: which of the model's keys its cache holds after each of the three requests."""
    model = write_model(write_model.table(slots=KEYS_PER_REQUEST, dim=4), features=2)
    known = list(model.tables[0])

    def serve(**said):
        file = write_ps(tmp_path, [listed(model.config_file, gpucacheper=1.0, init_ec=False, **said)])
        with ModelRepository(file, Runtime("numpy", device=device.name)) as repository:
            repository.load()
            session = repository.session("dcn")
            held = []
            for places in (FIRST, SECOND, THIRD):
                keys = np.array([known[place] for place in places])
                session.predict(np.zeros((1, 2), dtype=np.float32), keys, np.arange(keys.size + 1, dtype=np.int32))
                (cached,) = session._lookups
                held.append({known.index(key) for key in cached._caches[0].cache.dump()[0].tolist()})
        return held

    return serve


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param({"hit_rate_threshold": 0.0}, [set(), set(), set()], id="0: never"),
        pytest.param(
            {"hit_rate_threshold": 0.5}, [{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3, 5, 6, 7}], id="0.5: at 0 and 1/4"
        ),
        pytest.param(
            {"hit_rate_threshold": 0.75}, [{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3, 5, 6, 7}], id="3/4 is not below 3/4"
        ),
        pytest.param(
            {"hit_rate_threshold": 1.0}, [{0, 1, 2, 3}, {0, 1, 2, 3, 4}, set(range(8))], id="1: whenever one lacked"
        ),
        pytest.param({}, [{0, 1, 2, 3}, {0, 1, 2, 3, 4}, set(range(8))], id="absent: always"),
    ],
)
def test_an_exact_cache_is_given_what_it_lacked_where_its_hit_rate_was_below(rows_held, said, expected):
    assert rows_held(**said) == expected
