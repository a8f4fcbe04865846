"""In the asynchronous mode a request does not wait for missing rows."""

import threading

import numpy as np
import pytest

from serving.lookup import LookupSession
from tests.serving.lookup.cached import Sketch, cached, request, same, served, write_model
from tests.serving.lookup.test_cached_session import counted, first_table, held
from tests.serving.small_server import DictStore

TWO_TABLES = (Sketch(4, slots=1, default_value=0.5), Sketch(4, slots=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def config(folder):
    """Return a function that gives the model's configuration with another threshold."""
    return lambda threshold: write_model(folder, TWO_TABLES, mode="asynchronous", hit_rate_threshold=threshold)


def test_missing_rows_count_as_defaults_and_are_inserted_later(device, config):
    config = config(0.0)
    keys = np.array([0, 3, 3, 777], dtype=np.int64)
    batch = first_table(config, keys)

    with served(config) as server, cached(server, config, device) as lookup:
        exact = LookupSession(server, config).lookup_pooled(batch)
        early = lookup.lookup_pooled(batch)
        assert lookup.wait_for_insertions(30)
        held_later = held(lookup)
        later = lookup.lookup_pooled(batch)
        assert counted(lookup, "late_keys") == [4]  # three keys and the unknown key, which is then known to be absent
        assert counted(lookup, "dropped_insertions") == [0]

    assert early.embeddings[0].tolist() == [[[2.0] * 4]]
    assert early.defaulted_keys == 4
    assert held_later == {0, 3}
    assert same(later, exact)
    assert later.defaulted_keys == 1


def test_a_request_waits_below_the_threshold_and_not_at_it(device, config):
    config = config(0.5)

    with served(config) as server, cached(server, config, device) as lookup:
        answers = []
        for keys in ([0, 3, 6], [0, 3, 9], [0, 3, 12, 15], [0, 3, 18, 21, 24]):
            batch = first_table(config, np.array(keys, dtype=np.int64))
            exact = LookupSession(server, config).lookup_pooled(batch)
            answers.append((lookup.lookup_pooled(batch).defaulted_keys, exact.defaulted_keys))
            assert lookup.wait_for_insertions(30)

    # The hit rates are 0 of 3, then 2 of 3, then 2 of 4, then 2 of 5.
    assert answers == [(0, 0), (1, 0), (2, 0), (0, 0)]


def test_each_table_decides_for_itself(device, config):
    config = config(0.5)
    with served(config) as server, cached(server, config, device) as lookup:
        lookup.lookup_pooled(first_table(config, np.array([0, 3], dtype=np.int64)))
        assert counted(lookup, "rows") == [2, 0]
        batch = request(config, np.random.default_rng(0), samples=1, unknown_ratio=0.0)
        first, second = batch.tables
        first = type(first)(np.array([0, 3, 9], dtype=np.int64), np.array([0, 3], dtype=np.int32))
        second = type(second)(np.array([6, 9], dtype=np.int64), np.array([0, 2], dtype=np.int32))
        batch = type(batch)(batch.dense, (first, second))
        exact = LookupSession(server, config).lookup_pooled(batch)
        known = LookupSession(server, config).lookup_pooled(first_table(config, np.array([0, 3], dtype=np.int64)))
        answer = lookup.lookup_pooled(batch)

    assert answer.defaulted_keys == 1
    assert answer.embeddings[0].tolist() == (known.embeddings[0] + np.float32(0.5)).tolist()
    assert answer.embeddings[1].tobytes() == exact.embeddings[1].tobytes()


def test_a_threshold_of_one_makes_every_answer_exact(device, config):
    config = config(1.0)
    rng = np.random.default_rng(1)

    with served(config) as server, cached(server, config, device) as lookup:
        for _ in range(4):
            batch = request(config, rng, hottest=10)
            assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))


def test_a_row_that_changes_while_it_waits_to_be_inserted_is_not_stale(device, config, monkeypatch):
    config = config(0.0)
    batch = first_table(config, np.array([3], dtype=np.int64))
    was_read, go_on = threading.Event(), threading.Event()

    with served(config) as server, cached(server, config, device) as lookup:
        copies = lookup._caches[0].copies
        read = copies.read

        def read_slowly(keys):
            rows = read(keys)
            was_read.set()
            assert go_on.wait(30)
            return rows

        monkeypatch.setattr(copies, "read", read_slowly)
        lookup.lookup_pooled(batch)
        assert was_read.wait(30)
        server.insert("m.t0", np.array([3]), np.full((1, 4), 9.0, dtype=np.float32))
        go_on.set()
        assert lookup.wait_for_insertions(30)

        assert held(lookup) == set()


def test_an_outage_fails_no_request_and_the_rows_are_inserted_after_it(device, config, caplog):
    config, store = config(0.0), DictStore()
    batch = first_table(config, np.array([0, 3], dtype=np.int64))

    with served(config, store) as server, cached(server, config, device) as lookup:
        store.is_down = True
        assert lookup.lookup_pooled(batch).defaulted_keys == 2
        assert lookup.wait_for_insertions(30)
        assert counted(lookup, "dropped_insertions") == [2]
        assert lookup.lookup_pooled(batch).defaulted_keys == 2
        assert lookup.wait_for_insertions(30)
        assert caplog.text.count("rows are not inserted into the GPU cache") == 1
        store.is_down = False
        lookup.lookup_pooled(batch)
        assert lookup.wait_for_insertions(30)

        assert lookup.lookup_pooled(batch).defaulted_keys == 0


@pytest.mark.parametrize(
    ("said", "is_warned"),
    [
        ({"mode": "asynchronous", "size_ratio": 1.0}, True),
        ({"mode": "asynchronous", "size_ratio": 1.0, "kind": "uvm"}, True),
        ({"mode": "asynchronous", "size_ratio": 0.9}, False),
        ({"mode": "exact", "size_ratio": 1.0}, False),
    ],
)
def test_a_full_size_cache_that_drops_keys_is_logged_in_the_asynchronous_mode(
    device, tmp_path, caplog, said, is_warned
):
    config = write_model(tmp_path, TWO_TABLES, **said)

    with served(config) as server, cached(server, config, device):
        pass

    warned = [record.getMessage() for record in caplog.records if "gpucacheper 1" in record.getMessage()]
    assert len(warned) == is_warned
    assert all("model 'm': " in line and "about 10 % of a table's keys" in line for line in warned)
