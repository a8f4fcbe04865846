"""Caches are filled before requests come, and refreshed from the tiers while they serve."""

import threading
import time

import numpy as np
import pytest

from gpu_cache.embedding_cache import EmbeddingCache
from gpu_cache.errors import CacheFullError
from serving.errors import ConfigError, DeviceMemoryError, StoreError
from serving.lookup import LookupSession, cache_plan, open_lookups
from serving.lookup.cache_plan import buffers_memory, caches_memory, check_memory, describe_caches, plan_caches
from serving.lookup.cached_session import CachedLookupSession, keys_to_fill
from serving.model.sparse_rows import row_dtype
from serving.parameter_server import FirstRows, ParameterServer, TierSettings
from serving.storage import MemoryStore
from tests.serving.lookup.cached import Sketch, cached, request, same, served, with_cache, write_model
from tests.serving.lookup.test_cached_session import counted, first_table, held
from tests.serving.small_server import DictStore

ONE_TABLE = (Sketch(4, slots=1),)
NEW = np.full((1, 4), 7.0, dtype=np.float32)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), ONE_TABLE, size_ratio=1.0, fills_at_start=True)


def test_a_cache_is_filled_with_the_first_rows_of_the_file(device, config):
    half = with_cache(config, size_ratio=0.5)

    with served(half) as server, cached(server, half, device) as lookup:
        assert held(lookup) <= set(range(0, 90, 3))
        assert len(held(lookup)) >= 15
        assert counted(lookup, "hits") == counted(lookup, "misses") == [0]
        assert server.counters()["m.t0"].keys == 0


def test_a_cache_is_filled_with_the_hottest_rows_if_they_are_known(device, config, tmp_path):
    hottest = np.array([3 * 59, 3 * 57, 999, 3 * 55, *range(60, 90, 3)], dtype=np.int64)
    np.save(tmp_path / "m.t0.npy", hottest)
    some = with_cache(config, size_ratio=0.2)
    settings = {"memory": TierSettings(first_rows=FirstRows(hot_keys=tmp_path))}

    with ParameterServer([MemoryStore()], settings=settings) as server:
        server.load_model(some)
        with cached(server, some, device) as lookup:
            assert held(lookup) == {*hottest.tolist(), 0, 3} - {999}  # its one line has room for 15


def test_hot_keys_come_first_and_in_order(tmp_path):
    config = write_model(tmp_path, [Sketch(4, slots=1, rows=3000)])
    hottest = np.array([*range(8997, 5000, -3), 8997, 7, 6], dtype=np.int64)  # key 7 is in no table
    np.save(tmp_path / "m.t0.npy", hottest)
    settings = {"memory": TierSettings(first_rows=FirstRows(hot_keys=tmp_path))}

    with ParameterServer([MemoryStore()], settings=settings) as server:
        server.load_model(config)
        parts = [part.tolist() for part in keys_to_fill(server, config, config.tables[0], 1400)]

    given = [key for part in parts for key in part]
    distinct = list(dict.fromkeys(hottest.tolist()))
    assert given[: len(distinct)] == distinct
    assert [len(part) for part in parts[:2]] == [1024, len(distinct) - 1024]
    assert given[len(distinct) :] == [key for key in range(0, 300, 3) if key != 6][: 1400 - len(distinct) + 1]


def test_a_cache_is_not_filled_if_the_configuration_says_so(device, config):
    empty = with_cache(config, fills_at_start=False)

    with served(empty) as server, cached(server, empty, device) as lookup:
        assert held(lookup) == set()


def test_a_static_cache_has_every_row_whatever_the_configuration_says_about_filling(device, config):
    static = with_cache(config, kind="static", fills_at_start=False)
    batch = request(static, np.random.default_rng(0), unknown_ratio=0.0)

    with served(static) as server, cached(server, static, device) as lookup:
        assert held(lookup) == set(range(0, 180, 3))
        assert same(lookup.lookup_pooled(batch), LookupSession(server, static).lookup_pooled(batch))
        assert counted(lookup, "misses") == [0]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_key_that_a_file_has_twice_is_cached_once_and_a_change_erases_it(device, tmp_path, kind):
    config = write_model(tmp_path, ONE_TABLE, kind=kind, size_ratio=1.0, fills_at_start=True)
    packed = np.zeros(20, row_dtype(4, "I64", "distributed"))  # in such a file the first row of a key counts
    packed["key"] = [5] * 4 + list(range(100, 116))
    packed["vector"] = np.arange(20)[:, None]
    file = tmp_path / "packed.model"
    file.write_bytes(packed.tobytes())
    config = config.model_copy(update={"tables": (config.tables[0].model_copy(update={"file": file}),)})

    with served(config) as server, cached(server, config, device) as lookup:
        assert sorted(lookup._caches[0].cache.dump()[0].tolist()) == [5, *range(100, 116)]
        server.insert("m.t0", np.array([5]), NEW)
        answer = lookup.lookup([np.array([5, 100])])

    assert answer.embeddings[0].tolist() == [[7.0] * 4, [4.0] * 4]


def test_a_static_cache_without_a_place_for_a_row_logs_it_and_stays_exact(device, config, monkeypatch, caplog):
    def replace(cache, *arguments, **options):
        raise CacheFullError(1, 59, 60)

    monkeypatch.setattr(EmbeddingCache, "replace", replace)
    static = with_cache(config, kind="static")
    batch = request(static, np.random.default_rng(0))

    with served(static) as server, cached(server, static, device) as lookup:
        assert same(lookup.lookup_pooled(batch), LookupSession(server, static).lookup_pooled(batch))
    assert "m.t0: its static cache has no room for some rows" in caplog.text


def test_a_static_cache_inserts_a_changed_row_again(device, config):
    static = with_cache(config, kind="static")
    batch = first_table(static, np.array([3], dtype=np.int64))

    with served(static) as server, cached(server, static, device) as lookup:
        server.insert("m.t0", np.array([3]), NEW)
        for _ in range(2):
            assert lookup.lookup_pooled(batch).embeddings[0].tolist() == [NEW.tolist()]

        assert counted(lookup, "misses") == [1]
        assert 3 in held(lookup)


def test_rows_beyond_a_static_cache_are_answered_by_the_tiers(device, config):
    static = with_cache(config, kind="static")
    added = np.arange(1, 400, 3)

    with served(static, DictStore()) as server, cached(server, static, device) as lookup:
        server.insert("m.t0", added, NEW.repeat(added.size, axis=0))
        batch = first_table(static, added)
        for _ in range(3):
            assert same(lookup.lookup_pooled(batch), LookupSession(server, static).lookup_pooled(batch))
        server.insert("m.t0", np.array([3]), NEW)
        batch = first_table(static, np.array([3], dtype=np.int64))
        assert same(lookup.lookup_pooled(batch), LookupSession(server, static).lookup_pooled(batch))
        assert 3 in held(lookup)  # the row is cached again


def test_rows_that_another_process_changed_are_answered_after_a_refresh(device, config):
    refreshed = with_cache(config, refresh_ratio=0.2)
    batch = first_table(refreshed, np.array([0, 3, 6], dtype=np.int64))
    store = DictStore()

    with served(refreshed, store) as server, cached(server, refreshed, device) as lookup:
        before = lookup.lookup_pooled(batch)
        store.tables["m.t0"].insert(np.array([3]), NEW)  # not through the server
        store.tables["m.t0"].evict(np.array([6]))
        assert same(lookup.lookup_pooled(batch), before)

        lookup.refresh()

        after = lookup.lookup_pooled(batch)
        assert same(after, LookupSession(server, refreshed).lookup_pooled(batch))
        assert after.defaulted_keys == 1
        assert 6 not in held(lookup)
        assert len(held(lookup)) >= 55


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_refresh_finds_keys_that_another_process_has_added(device, config, kind):
    config = with_cache(config, kind=kind)
    batch = first_table(config, np.array([1, 2, 3], dtype=np.int64))
    store = DictStore()

    with served(config, store) as server, cached(server, config, device) as lookup:
        assert [lookup.lookup_pooled(batch).defaulted_keys for _ in range(2)] == [2, 2]
        store.tables["m.t0"].insert(np.array([2]), NEW)  # not through the server
        assert lookup.lookup_pooled(batch).defaulted_keys == 2

        lookup.refresh()

        after = lookup.lookup_pooled(batch)
        assert same(after, LookupSession(server, config).lookup_pooled(batch))
        assert after.defaulted_keys == 1
        asked = store.calls["fetch"]
        assert lookup.lookup_pooled(batch).defaulted_keys == 1  # key 1 is still known to be absent
        assert store.calls["fetch"] == asked


def test_an_update_hides_about_a_thousand_rows_from_requests_next_to_it(runner, tmp_path):
    config = write_model(tmp_path, [Sketch(4, slots=1, rows=3000)], kind="static")
    keys, released = np.arange(0, 9000, 3), threading.Event()

    with served(config) as server, cached(server, config, runner) as lookup:
        cache = lookup._caches[0].cache
        long, short = runner.stream(), runner.stream()
        answer = cache.answer(keys.size, short)
        with cache.readers.reading(long):
            long.submit(released.wait)
        refreshing = threading.Thread(target=lookup.refresh)
        refreshing.start()
        while not cache.readers._hiding:
            time.sleep(0.001)
        cache.query(keys, answer, short)
        short.synchronize()
        missed = int(answer.missing_count[0])
        released.set()
        refreshing.join()
        cache.query(keys, answer, short)
        short.synchronize()

    assert 0 < missed <= 1024
    assert answer.missing_count[0] == 0


class WatchedStore(DictStore):
    """A store that signals reads of rows."""

    def __init__(self):
        super().__init__()
        self.is_asked = threading.Event()

    def fetch(self, table, keys, out):
        self.is_asked.set()
        return super().fetch(table, keys, out)


def test_the_refresh_interval_starts_refreshes(device, config):
    often, store = with_cache(config, refresh_ratio=1.0, refresh_interval_s=0.001), WatchedStore()

    with served(often, store) as server, cached(server, often, device):
        for _ in range(3):
            store.is_asked.clear()
            assert store.is_asked.wait(30)


def test_a_refresh_delay_alone_starts_one_refresh(device, config):
    once, store = with_cache(config, refresh_ratio=1.0, refresh_delay_s=0.2), WatchedStore()

    with served(once, store) as server, cached(server, once, device):
        store.is_asked.clear()
        assert store.is_asked.wait(30)
        time.sleep(0.3)  # the rest of that refresh
        store.is_asked.clear()
        assert not store.is_asked.wait(1.0)


def test_refresh_times_without_a_refresh_percentage_are_warned_about(device, config, caplog):
    never = with_cache(config, refresh_ratio=0.0, refresh_interval_s=0.001)

    with served(never) as server, cached(server, never, device):
        assert "no effect without a cache_refresh_percentage_per_iteration" in caplog.text


def test_a_refresh_during_an_outage_does_not_change_rows(device, config):
    store = DictStore()

    with served(config, store) as server, cached(server, config, device) as lookup:
        rows = held(lookup)
        store.is_down = True
        with pytest.raises(StoreError, match="no answer"):
            lookup.refresh()
        assert held(lookup) == rows


def test_the_number_of_devices_refreshed_at_a_time_is_limited(device, config):
    turns = threading.Semaphore()
    done = threading.Event()

    with served(config) as server:
        lookup = CachedLookupSession(server, config, device, refreshing=turns)
        with turns:
            refreshing = threading.Thread(target=lambda: (lookup.refresh(), done.set()))
            refreshing.start()
            assert not done.is_set()
        assert done.wait(30)
        refreshing.join()
        lookup.close()


def test_caches_without_a_row_are_refused(device, config):
    with (
        served(config) as server,
        pytest.raises(ConfigError, match=r"gpucacheper \(cache_size_percentage\) 0: a cache has at least one row"),
    ):
        CachedLookupSession(server, with_cache(config, size_ratio=0.0), device)


class SmallDevice:
    """A device with little free memory."""

    name = "cuda:9"

    def __init__(self, free_bytes=100, uses_host_memory=False):
        self._free_bytes = free_bytes
        self.uses_host_memory = uses_host_memory

    def memory(self):
        return self._free_bytes, 8000


@pytest.mark.parametrize(("kind", "advice"), [("dynamic", "set gpucacheper lower"), ("static", "the type dynamic")])
def test_caches_that_do_not_fit_the_device_are_refused_with_their_bytes(config, kind, advice):
    free_bytes = buffers_memory(config).device_bytes
    with served(config) as server, pytest.raises(DeviceMemoryError) as caught:
        CachedLookupSession(server, with_cache(config, kind=kind), SmallDevice(free_bytes))

    assert f"cuda:9: the {kind} caches of model 'm' take " in str(caught.value)
    assert f"for 2 worker buffers of max_batch_size 16, but {free_bytes:,} are free" in str(caught.value)
    assert advice in str(caught.value)


def test_batches_that_do_not_fit_the_device_are_refused(config):
    with pytest.raises(DeviceMemoryError, match="of max_batch_size 16, but 100 are free; set max_batch_size lower"):
        check_memory(config, plan_caches(config), SmallDevice())


def test_page_locked_memory_that_does_not_fit_the_host_is_refused(config, monkeypatch):
    free_bytes = buffers_memory(config).host_bytes
    monkeypatch.setattr(cache_plan, "available_memory_bytes", lambda: free_bytes)
    check_memory(config, plan_caches(config), SmallDevice(2**40))

    uvm = with_cache(config, kind="uvm")
    needed_bytes = free_bytes + plan_caches(uvm)[0].capacity.host_bytes
    with pytest.raises(DeviceMemoryError, match=f"take {needed_bytes:,} bytes of page-locked host memory"):
        check_memory(uvm, plan_caches(uvm), SmallDevice(2**40))


def test_device_and_page_locked_memory_count_together_if_the_device_is_the_host(config):
    needed_bytes = sum(sum(part) for part in (caches_memory(plan_caches(config)), buffers_memory(config)))

    check_memory(config, plan_caches(config), SmallDevice(needed_bytes, uses_host_memory=True))
    with pytest.raises(DeviceMemoryError, match=f"take {needed_bytes:,} bytes, "):
        check_memory(config, plan_caches(config), SmallDevice(needed_bytes - 1, uses_host_memory=True))


def test_fp8_rows_are_near_the_rows_of_the_tiers(device, config):
    narrow = with_cache(config, kind="static", fp8_rows=True)
    batch = first_table(narrow, np.array([0], dtype=np.int64))

    with served(narrow) as server, cached(server, narrow, device) as lookup:
        (near,) = lookup.lookup_pooled(batch).embeddings[:1]
        (exact,) = LookupSession(server, narrow).lookup_pooled(batch).embeddings[:1]

    assert near.tobytes() != exact.tobytes()
    assert np.abs(near - exact).max() <= np.abs(exact).max() / 16  # E4M3 has a mantissa of 3 bits


def test_the_memory_of_a_cache_is_logged_before_it_is_allocated(config):
    (line,) = describe_caches("m", plan_caches(with_cache(config, size_ratio=0.25)), [SmallDevice()])

    taken = "model m: caches on cuda:9 take 0.0 MiB of 0.0 MiB free: "
    assert line == taken + "t0 dynamic 15 of 60 rows fp32, 0.0 MiB"


def test_if_one_device_is_full_the_caches_on_other_devices_are_freed(device, config):
    with served(config) as server:
        with pytest.raises(DeviceMemoryError, match="cuda:9"):
            open_lookups(server, config, [device, SmallDevice()])

        server.evict("m.t0", np.array([3]))  # would fail if a closed cache still got changes
