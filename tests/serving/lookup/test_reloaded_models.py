"""A session of a model that was loaded again is refused, because its caches get no reports of later changes."""

import numpy as np
import pytest

from serving.batch import Batch, TableKeys
from serving.errors import UnknownModelError
from serving.lookup import LookupSession
from serving.parameter_server import ParameterServer
from tests.serving.lookup.cached import Sketch, cached, served, write_model


@pytest.fixture
def config(tmp_path):
    return write_model(tmp_path, [Sketch(4, rows=30, slots=1)], size_ratio=1.0)


@pytest.mark.parametrize("forget", [ParameterServer.unload_model, ParameterServer.erase_model])
def test_a_session_from_before_a_reload_is_refused_even_with_the_same_configuration(device, config, forget):
    keys = np.array([6, 9])
    batch = Batch(np.zeros((1, 0), dtype=np.float32), (TableKeys(keys, np.array([0, 2], dtype=np.int32)),))

    with served(config) as server, cached(server, config, device) as lookup:
        sessions = lookup, LookupSession(server, config)
        for session in sessions:
            session.lookup([keys])
        lookup.wait_for_insertions()
        forget(server, "m")
        server.load_model(config)
        server.insert("m.t0", keys[:1], np.full((1, 4), 9, np.float32))
        server.evict("m.t0", keys[1:])

        for session in sessions:
            with pytest.raises(
                UnknownModelError,
                match=r"'m\.t0' was unloaded .* open a new session",
            ):
                session.lookup([keys])
            with pytest.raises(
                UnknownModelError,
                match=r"'m\.t0' was unloaded .* open a new session",
            ):
                session.lookup_pooled(batch)
        assert LookupSession(server, config).lookup([keys]).embeddings[0].tolist() == [[9] * 4, [0] * 4]


def test_each_load_has_its_own_record(config):
    with served(config) as server:
        first = server.model("m")
        server.unload_model("m")
        server.load_model(config)

        assert server.model("m") is not first
        assert server.model("m") == first == config
