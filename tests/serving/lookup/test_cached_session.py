"""A lookup through caches gives the same answers as the tiers, to the bit."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.batch import Batch, TableKeys
from serving.errors import RequestError, StoreError, UnknownModelError
from serving.lookup import LookupSession
from serving.storage import MemoryStore
from tests.gpu_cache.bags import scheduled
from tests.serving.lookup.cached import UNKNOWN_KEYS, Sketch, cached, request, same, served, with_cache, write_model
from tests.serving.small_server import DictStore, DurableDictStore


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(config):
    with served(config) as server:
        yield server


@settings(deadline=None, max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["dynamic", "static", "uvm"]),
    line_keys=st.sampled_from([7, 15]),
    size_ratio=st.sampled_from([0.05, 0.3, 1.0]),
    fill=st.sampled_from(["always", "below_threshold"]),
    fills_at_start=st.booleans(),
    hottest=st.sampled_from([3, 20, None]),
    unknown_ratio=st.sampled_from([0.0, 0.2, 1.0]),
    weighted=st.booleans(),
    is_backed=st.booleans(),
    schedule=st.integers(0, 3),
)
def test_any_mix_of_hits_misses_and_unknown_keys_gets_the_answers_of_the_tiers(
    device,
    config,
    servers,
    seed,
    kind,
    line_keys,
    size_ratio,
    fill,
    fills_at_start,
    hottest,
    unknown_ratio,
    weighted,
    is_backed,
    schedule,
):
    rng = np.random.default_rng(seed)
    server = servers[is_backed]
    said = {"kind": kind, "line_keys": line_keys, "size_ratio": size_ratio, "fill": fill}
    said["fills_at_start"] = fills_at_start
    expected = LookupSession(server, config)

    with scheduled(device, schedule), cached(server, with_cache(config, **said), device) as lookup:
        for _ in range(3):
            batch = request(config, rng, int(rng.integers(1, 9)), hottest=hottest, unknown_ratio=unknown_ratio)
            weights = (
                [rng.normal(0, 1, table.keys.size).astype(np.float32) for table in batch.tables] if weighted else None
            )
            assert same(lookup.lookup_pooled(batch, weights), expected.lookup_pooled(batch, weights))


@pytest.fixture(scope="module")
def servers(config):
    """Two servers: RAM alone, and a small RAM tier in front of a durable tier."""
    with served(config) as memory, served(config, MemoryStore(capacity_rows=64), DurableDictStore()) as both:
        yield {False: memory, True: both}


def test_rows_of_every_dtype_equal_the_rows_of_the_tiers(device, tmp_path):
    sketches = [Sketch(4, row_dtype=row_dtype) for row_dtype in ("fp16", "bf16", "int8", "uint8")]
    config = write_model(tmp_path, sketches)
    rng = np.random.default_rng(2)

    with served(config) as server, cached(server, config, device) as lookup:
        assert [plan.capacity.layout.row_dtype for plan in lookup.plans] == ["fp16", "bf16", "fp32", "fp32"]
        for _ in range(3):
            batch = request(config, rng, hottest=10)
            assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))
        assert all(counted(lookup, "hits"))


def counted(lookup, what):
    """Return the caches' counter ``what`` by table."""
    return [reading.value for reading in lookup.readings() if reading.name == f"hotrow_gpu_cache_{what}"]


def held(lookup, place=0):
    """Return the keys that a table's cache holds."""
    return set(lookup._caches[place].cache.dump()[0].tolist())


def test_rows_that_were_missed_are_found_the_next_time(device, server, config):
    batch = request(config, np.random.default_rng(3), unknown_ratio=0.0, hottest=4)

    with cached(server, config, device) as lookup:
        lookup.lookup_pooled(batch)
        missed = counted(lookup, "misses")
        lookup.lookup_pooled(batch)

        assert counted(lookup, "misses") == missed
        assert counted(lookup, "hits") == [table.keys.size for table in batch.tables]
        assert [held(lookup, place) for place in range(3)] == [set(table.keys.tolist()) for table in batch.tables]


def test_an_unknown_key_is_never_in_a_cache(device, server, config):
    batch = request(config, np.random.default_rng(4), unknown_ratio=0.5)

    with cached(server, config, device) as lookup:
        for _ in range(2):
            answer = lookup.lookup_pooled(batch)

        assert answer.defaulted_keys == sum(np.isin(table.keys, UNKNOWN_KEYS).sum() for table in batch.tables) > 0
        assert not any(held(lookup, place) & set(UNKNOWN_KEYS) for place in range(3))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_key_that_no_tier_holds_is_missed_once_and_found_when_it_is_inserted(device, tmp_path, kind):
    config = write_model(tmp_path, kind=kind, size_ratio=1.0, fill="below_threshold", hit_rate_threshold=0.0)
    unknown = np.array([*UNKNOWN_KEYS, UNKNOWN_KEYS[0]], dtype=np.int64)
    batch = first_table(config, unknown)
    row = np.full((1, 4), 3.0, dtype=np.float32)

    with served(config) as server, cached(server, config, device) as lookup:
        answers = [lookup.lookup_pooled(batch) for _ in range(3)]
        assert all(same(answer, LookupSession(server, config).lookup_pooled(batch)) for answer in answers)
        assert {answer.defaulted_keys for answer in answers} == {3}
        assert counted(lookup, "misses")[0] == 3

        server.insert("m.t0", unknown[:1], row)
        known = lookup.lookup_pooled(batch)
        assert same(known, LookupSession(server, config).lookup_pooled(batch))
        assert known.defaulted_keys == 1
        server.evict("m.t0", unknown[:1])
        assert same(lookup.lookup_pooled(batch), answers[0])


def test_a_v3_cache_inserts_missed_rows_only_below_the_threshold(device, server, config):
    said = {"fill": "below_threshold", "hit_rate_threshold": 0.5}
    keys = [np.array(some, dtype=np.int64) for some in ([0, 3, 6], [0, 3, 9, 27], [0, 3, 12, 15, 18])]

    with cached(server, with_cache(config, **said), device) as lookup:
        held_after = []
        for some in keys:
            lookup.lookup_pooled(first_table(config, some))
            held_after.append(held(lookup))

    # The hit rates are 0 of 3, then 2 of 4, then 2 of 5.
    assert held_after == [{0, 3, 6}, {0, 3, 6}, {0, 3, 6, 12, 15, 18}]


def first_table(config, keys):
    """A batch of one sample with keys of the first table only, which has one slot."""
    tables = [TableKeys(keys, np.array([0, keys.size], dtype=np.int32))]
    for table in config.tables[1:]:
        tables.append(TableKeys(keys[:0], np.zeros(table.slots + 1, dtype=np.int32)))
    return Batch(np.zeros((1, 0), dtype=np.float32), tuple(tables))


def test_a_batch_of_more_keys_than_expected_is_answered(device, server, config):
    tables = [table.model_copy(update={"max_keys_per_sample": 1}) for table in config.tables]
    small = config.model_copy(update={"tables": tuple(tables), "max_batchsize": 2})
    batch = request(config, np.random.default_rng(5), samples=2, longest=40)

    with cached(server, small, device) as lookup:
        assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))


def test_a_batch_of_more_samples_than_the_model_takes_is_refused(device, server, config):
    with cached(server, config, device) as lookup, pytest.raises(RequestError, match=r"17 samples, .* at most 16"):
        lookup.lookup_pooled(request(config, np.random.default_rng(5), samples=17))


def test_weights_that_do_not_fit_are_refused(device, server, config):
    batch = request(config, np.random.default_rng(6))
    wrong = [None, np.ones(1000, dtype=np.float32), None]

    with cached(server, config, device) as lookup:
        with pytest.raises(RequestError, match="weights of 3 tables, got 1"):
            lookup.lookup_pooled(batch, [None])
        with pytest.raises(RequestError, match=r"table 'm\.t1': expected weights of float32.*, got float32\[1000\]"):
            lookup.lookup_pooled(batch, wrong)


def test_a_model_that_was_unloaded_is_not_answered_from_its_caches(device, tmp_path):
    config = write_model(tmp_path)
    batch = request(config, np.random.default_rng(7), unknown_ratio=0.0, hottest=4)

    with served(config) as server, cached(server, config, device) as lookup:
        lookup.lookup_pooled(batch)
        assert held(lookup)  # waits for the rows
        server.unload_model("m")

        for again in (batch, request(config, np.random.default_rng(7), unknown_ratio=1.0)):
            with pytest.raises(UnknownModelError, match=r"table 'm\.t0' was unloaded with its model"):
                lookup.lookup_pooled(again)


def test_an_outage_is_an_error_and_the_next_request_is_answered(device, config):
    store = DictStore()
    batch = request(config, np.random.default_rng(8))

    with served(config, store) as server, cached(server, config, device) as lookup:
        store.is_down = True
        for _ in range(3):  # more than there are workspaces
            with pytest.raises(StoreError, match="no answer"):
                lookup.lookup_pooled(batch)
        store.is_down = False
        assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))


def test_many_threads_are_answered_and_each_row_is_whole_while_rows_change(device, tmp_path):
    config = with_cache(write_model(tmp_path, [Sketch(4, rows=30, slots=1)]), worker_buffers=2, size_ratio=1.0)
    keys = np.arange(30) * 3
    batch = first_table(config, keys)
    batch = Batch(np.zeros((16, 0), dtype=np.float32), (TableKeys(keys[:16], np.arange(17, dtype=np.int32)),))
    versions = [np.full((30, 4), float(number), dtype=np.float32) for number in range(6)]
    faults = []

    with served(config) as server, cached(server, config, device) as lookup:
        server.insert("m.t0", keys, versions[0])
        told = [0]

        def ask():
            for _ in range(8):
                least = told[0]
                rows = lookup.lookup_pooled(batch).embeddings[0].reshape(16, 4)
                if (rows != rows[:, :1]).any() or rows.min() < least or rows.max() > told[0] + 1:
                    faults.append((least, rows[:, 0].tolist()))

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        for number, rows in enumerate(versions[1:], 1):
            server.insert("m.t0", keys, rows)
            told[0] = number
        for asker in askers:
            asker.join()
        last = lookup.lookup_pooled(batch).embeddings[0]

    assert not faults
    assert (last == 5.0).all()


def test_a_changed_row_is_answered_as_soon_as_the_change_is_reported(device, tmp_path):
    config = write_model(tmp_path, size_ratio=1.0)
    batch = first_table(config, np.array([0, 3, 6], dtype=np.int64))
    new = np.full((1, 4), 7.0, dtype=np.float32)

    with served(config) as server, cached(server, config, device) as lookup:
        lookup.lookup_pooled(batch)
        assert held(lookup) == {0, 3, 6}
        server.insert("m.t0", np.array([3]), new)
        server.evict("m.t0", np.array([6]))

        answer = lookup.lookup_pooled(batch)

        assert same(answer, LookupSession(server, config).lookup_pooled(batch))
        assert answer.defaulted_keys == 1
        assert held(lookup) == {0, 3}


def test_a_change_waits_until_the_caches_have_erased_the_row(device, tmp_path):
    config = write_model(tmp_path, [Sketch(4, slots=1, rows=3000)], size_ratio=1.0)
    batch = first_table(config, np.array([3], dtype=np.int64))

    with served(config) as server, cached(server, config, device) as lookup:
        lookup.lookup_pooled(batch)
        cache = lookup._caches[0].cache
        for begin in range(6000, 9000, 1500):  # keeps the stream of the caches' writers busy
            cache.replace(np.arange(begin, begin + 1500), np.zeros((1500, 4), dtype=np.float32))
        server.evict("m.t0", np.array([3]))

        assert lookup.lookup_pooled(batch).defaulted_keys == 1


def test_a_closed_lookup_refuses_requests_and_gets_no_changes(device, tmp_path):
    config = write_model(tmp_path)
    with served(config) as server:
        with cached(server, config, device) as lookup:
            pass
        lookup.close()

        server.insert("m.t0", np.array([3]), np.ones((1, 4), dtype=np.float32))
        with pytest.raises(UnknownModelError, match="closed"):
            lookup.lookup_pooled(request(config, np.random.default_rng(9)))


def test_rows_are_inserted_while_other_rows_are_written(device, tmp_path):
    class AskingStore(DictStore):
        def insert(self, table, keys, rows):
            super().insert(table, keys, rows)
            if keys.tolist() == [9]:
                lookup.lookup_pooled(batch)

    config = write_model(tmp_path, size_ratio=1.0)
    batch = first_table(config, np.array([0, 3, 6], dtype=np.int64))

    with served(config, AskingStore()) as server, cached(server, config, device) as lookup:
        server.insert("m.t0", np.array([9]), np.ones((1, 4), dtype=np.float32))

        assert held(lookup) == {0, 3, 6}


def test_cache_counters_are_labelled_with_model_device_and_table(device, server, config):
    with cached(server, config, device) as lookup:
        lookup.lookup_pooled(request(config, np.random.default_rng(10)))
        readings = list(lookup.readings())

    labels = [("model", "m"), ("version", "0"), ("device", device.name), ("table", "t1")]
    of_table = {
        reading.name.removeprefix("hotrow_gpu_cache_"): reading.value
        for reading in readings
        if list(reading.labels) == labels
    }
    reasons = {dict(reading.labels).get("reason") for reading in readings}
    assert of_table["hits"] == 0
    assert of_table["misses"] > 0
    assert of_table["hit_ratio"] == 0.0
    assert of_table["rows"] == of_table["admitted_rows"] > 0
    assert of_table["capacity_rows"] == 45
    assert of_table["bytes"] == lookup.plans[1].capacity.device_bytes
    assert of_table["evicted_rows"] == of_table["erased_rows"] == of_table["updated_rows"] == 0
    assert reasons == {None, "first_miss", "cap", "counters", "no_slot", "unfit"}


def test_each_model_has_its_own_caches(device, tmp_path):
    first, second = (
        write_model(tmp_path / name, [Sketch(4, rows=rows)], name) for name, rows in (("a", 20), ("b", 30))
    )
    with served(first) as server:
        server.load_model(second)
        with cached(server, first, device) as one, cached(server, second, device) as other:
            for lookup, config in ((one, first), (other, second)) * 2:
                batch = request(config, np.random.default_rng(12))
                assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))


def test_a_request_of_several_tables_is_one_copy_each_way(device, server, config, monkeypatch):
    copies = []

    def counted(name, copy):
        return lambda *args: copies.append(name) or copy(*args)

    with cached(server, with_cache(config, kind="static"), device) as lookup:
        batch = request(config, np.random.default_rng(3), unknown_ratio=0.0)
        for name in ("upload", "download"):
            monkeypatch.setattr(device, name, counted(name, getattr(device, name)))
        answer = lookup.lookup_pooled(batch)

    assert copies == ["upload", "download"]
    assert same(answer, LookupSession(server, config).lookup_pooled(batch))
