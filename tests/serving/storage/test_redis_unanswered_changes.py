"""Changes that Redis does not answer: how long they wait, what they leave, and how what they left is mended."""

import json
import re
import time

import numpy as np
import pytest

from serving.errors import StoreTimeoutError, StoreUnreachableError
from serving.parameter_server import ParameterServer
from serving.storage import RedisStore
from serving.storage.redis.table import RedisTable
from tests.serving.storage.redis_stores import IMPATIENT, PATIENT, assert_served

TABLE = "dcn.table0"
ROW = np.full((1, 4), 7.0, dtype=np.float32)
TIMEOUT_S = IMPATIENT["timeout_ms"] / 1000
# So that a busy machine does not count; a call that waited as long as Redis is frozen would not end at all.
LONGEST_S = 25.0


@pytest.fixture
def impatient(own_server, ps_file):
    """Write a ps.json with the test's own Redis, loaded, and a short time-out, and RocksDB unless ``alone``."""

    def write(alone=False):
        file = ps_file(own_server.port, alone)
        ParameterServer.from_config(file).close()
        document = json.loads(file.read_text())
        document["volatile_db"] |= IMPATIENT
        file.write_text(json.dumps(document))
        return file

    return write


def thaw(redis, server):
    """Let Redis answer, as a moment later and however slowly."""
    redis.thaw()
    nodes = server.stores[0]._nodes
    nodes._paused.clear()
    nodes._timeout_s = PATIENT["timeout_ms"] / 1000


def change(server, verb, key):
    return server.insert(TABLE, key, ROW) if verb == "insert" else server.evict(TABLE, key)


def after(verb, before):
    """The rows of one key, and whether it was found, after a change."""
    return (ROW.tolist(), [True]) if verb == "insert" else (np.zeros_like(before).tolist(), [False])


def looked_up(server, key):
    rows, found = server.lookup(TABLE, key)
    return rows.tolist(), found.tolist()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_change_waits_for_a_frozen_redis_as_long_as_its_time_out_and_no_tier_has_it(
    own_server, model, impatient, verb, alone
):
    key, before = next((np.array([key]), row) for key, row in model.tables[0].items())
    with ParameterServer.from_config(impatient(alone)) as server:
        own_server.freeze()
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="no reply: timed out"):
            change(server, verb, key)
        assert TIMEOUT_S <= time.monotonic() - began < LONGEST_S
        if not alone:
            assert looked_up(server, key) == ([before.tolist()], [True])

        thaw(own_server, server)
        assert looked_up(server, key) == ([before.tolist()], [True])
        change(server, verb, key)
        assert looked_up(server, key) == after(verb, before[None])


@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_redis_that_freezes_during_a_change_holds_it_up_as_long_and_the_change_is_served(
    own_server, model, impatient, monkeypatch, verb
):
    key, before = next((np.array([key]), row) for key, row in model.tables[0].items())
    method = getattr(RedisStore, verb)

    def freeze(store, *arguments):
        own_server.freeze()
        method(store, *arguments)

    with ParameterServer.from_config(impatient()) as server:
        monkeypatch.setattr(RedisStore, verb, freeze)
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="no reply: timed out"):
            change(server, verb, key)
        assert time.monotonic() - began < LONGEST_S
        monkeypatch.undo()

        assert looked_up(server, key) == after(verb, before[None])
        thaw(own_server, server)
        assert looked_up(server, key) == after(verb, before[None])
        change(server, verb, key)
        assert looked_up(server, key) == after(verb, before[None])


@pytest.mark.parametrize("verb", ["insert", "evict"])
def test_a_change_that_redis_lacks_when_its_process_ends_is_in_redis_after_the_next_start(
    own_server, model, ps_file, monkeypatch, verb
):
    key, before = next((np.array([key]), row) for key, row in model.tables[0].items())
    other_key = np.array(list(model.tables[0])[1:2])
    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        server.insert(TABLE, other_key, ROW)  # so that Redis says of itself that it has changes
        method = getattr(RedisStore, verb)

        def die(store, *arguments):
            own_server.kill()
            method(store, *arguments)

        monkeypatch.setattr(RedisStore, verb, die)
        with pytest.raises(StoreUnreachableError):
            change(server, verb, key)
        monkeypatch.undo()
    own_server.start()

    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        assert looked_up(server, key) == after(verb, before[None])
        found = server.stores[0].fetch(TABLE, key, np.empty_like(ROW))
        assert found.tolist() == after(verb, before[None])[1]

    monkeypatch.setattr(RedisTable, "load", lambda *_, **__: pytest.fail("loaded again"))
    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        change(server, verb, other_key)
    ParameterServer.from_config(ps_file(own_server.port)).close()


def test_a_model_that_is_erased_while_redis_is_down_stays_there_as_the_error_says_until_it_is_erased_again(
    own_server, model, ps_file, write_model
):
    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        (config,) = server.models()
        own_server.kill()
        advice = "its rows stay there until a model of this name is loaded again, or loaded and erased"
        with pytest.raises(StoreUnreachableError, match=f"redis: .*Connection refused; {re.escape(advice)}$"):
            server.erase_model("dcn")
        assert server.models() == ()

        own_server.start()
        with own_server.client() as client:
            assert client.keys()
            server.load_model(config)
            server.erase_model("dcn")
            assert client.keys() == []


@pytest.mark.parametrize("files", ["the same", "others"])
def test_rows_that_redis_kept_of_an_erased_model_are_not_served_with_the_next_of_its_name(
    own_server, model, ps_file, write_model, files
):
    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        server.insert(TABLE, np.array([next(iter(model.tables[0]))]), ROW)
        own_server.kill()
        with pytest.raises(StoreUnreachableError):
            server.erase_model("dcn")
    own_server.start()
    if files == "others":
        model = write_model(write_model.table(rows=300), write_model.table(dim=6, rows=100), seed=9)

    with ParameterServer.from_config(ps_file(own_server.port)) as server:
        assert_served(server, model)
        assert server.counters()[TABLE].hits == {"redis": 300}
