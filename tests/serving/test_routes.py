"""Several routes through one model, and which route a request takes."""

import numpy as np
import pytest

from serving.config import read_inference_config
from serving.errors import ConfigError, UnknownModelError
from serving.lookup import LookupSession
from serving.lookup.cached_session import CachedLookupSession
from serving.parameter_server import ParameterServer
from serving.routes import LeastBusy
from serving.session import InferenceSession
from serving.storage import MemoryStore


def test_the_resource_with_the_fewest_users_is_chosen():
    things = LeastBusy(["a", "b", "c"])

    with things.one() as first, things.one() as second:
        assert [first, second] == ["a", "b"]
        with things.one() as third:
            assert third == "c"
        with things.one() as fourth:
            assert fourth == "c"
    with things.one() as free_again:
        assert free_again == "a"


def test_a_failed_use_no_longer_counts():
    things = LeastBusy(["a", "b"])

    with pytest.raises(ZeroDivisionError), things.one():
        raise ZeroDivisionError

    with things.one() as thing:
        assert thing == "a"


def test_an_unusable_resource_is_chosen_only_if_no_other_is_usable():
    usable = {"b"}
    things = LeastBusy(["a", "b"], lambda thing: thing in usable)

    with things.one() as first, things.one() as second:
        assert [first, second] == ["b", "b"]
    usable.clear()
    with things.one() as one, things.one() as other:
        assert [one, other] == ["a", "b"]


@pytest.fixture
def caches(write_model):
    """Two lookups of one model, and the model."""
    model = write_model()
    config = read_inference_config(model.config_file, "dcn")
    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config)
        yield [LookupSession(server, config), LookupSession(server, config)], model


def test_a_session_of_several_lookups_uses_them_all(caches, monkeypatch):
    lookups, model = caches
    session = InferenceSession(model.config_file, 0, lookups, engine="numpy")
    dense, bags = model.draw_request(np.random.default_rng(0), 3)
    keys, _, row_ptrs = model.flatten(bags)
    used = []
    second = lookups[1].lookup_pooled
    monkeypatch.setattr(lookups[1], "lookup_pooled", lambda batch: used.append("second") or second(batch))

    def lookup_first(batch, first=lookups[0].lookup_pooled):
        if not used:  # another request arrives while this request is in flight
            used.append("first")
            assert np.array_equal(session.predict(dense, keys, row_ptrs), expected)
        return first(batch)

    expected = InferenceSession(model.config_file, 0, lookups[1:], engine="numpy").predict(dense, keys, row_ptrs)
    used.clear()
    monkeypatch.setattr(lookups[0], "lookup_pooled", lookup_first)

    assert np.array_equal(session.predict(dense, keys, row_ptrs), expected)
    assert used == ["first", "second"]


def test_a_session_continues_with_its_open_caches(caches, device):
    lookups, model = caches
    config, server = lookups[0].config, lookups[0].server
    cached = [CachedLookupSession(server, config, device) for _ in range(2)]
    session = InferenceSession(model.config_file, 0, cached)
    dense, bags = model.draw_request(np.random.default_rng(0), 3)
    keys, _, row_ptrs = model.flatten(bags)
    expected = session.predict(dense, keys, row_ptrs)

    cached[0].close()

    assert np.array_equal(session.predict(dense, keys, row_ptrs), expected)
    assert session.is_answering
    cached[1].close()
    assert not session.is_answering
    with pytest.raises(UnknownModelError, match="is closed"):
        session.predict(dense, keys, row_ptrs)


@pytest.mark.parametrize("wrong", [[], [None], ["cache"]])
def test_a_session_without_lookups_is_refused(caches, wrong):
    with pytest.raises(ConfigError, match="embedding_cache: expected"):
        InferenceSession(caches[1].config_file, 0, wrong)
