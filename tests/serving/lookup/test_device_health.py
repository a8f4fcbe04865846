"""After a fault of its device a lookup refuses requests and names the fault."""

from contextlib import contextmanager

import numpy as np
import pytest

from kernels.device import open_device
from kernels.errors import DeviceFaultError
from serving.errors import DeviceMemoryError
from serving.lookup import LookupSession
from serving.lookup.cache_plan import ERASED_AT_ONCE
from serving.lookup.device_workspace import DeviceWorkspace
from serving.routes import HostRoute, LeastBusy
from tests.serving.lookup.cached import cached, request, same, served, with_cache, write_model


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(config):
    with served(config) as server:
        yield server


@pytest.fixture
def lookup(server, config):
    with cached(server, config, open_device("runner")) as lookup:
        yield lookup


@pytest.fixture
def batch(config):
    return request(config, np.random.default_rng(1))


def fail(stream):
    def kernel():
        raise DeviceFaultError("pool: an illegal address")

    stream.submit(kernel)


def fail_in_a_request(lookup, batch):
    with pytest.raises(DeviceFaultError, match="illegal address"):
        run_a_failing_request(lookup, batch)


def run_a_failing_request(lookup, batch):
    with lookup.request(batch) as request:
        fail(request.work.stream)
        request.rows()


def test_after_a_device_fault_a_lookup_refuses_all_requests(lookup, batch):
    assert lookup.is_answering

    fail_in_a_request(lookup, batch)

    assert not lookup.is_answering
    with pytest.raises(
        DeviceFaultError, match=r"model 'm' on runner: not used after a fault: pool: an illegal address"
    ):
        lookup.lookup_pooled(batch)
    with pytest.raises(DeviceFaultError, match="not used after a fault"):
        lookup.refresh()


def test_the_metrics_of_other_models_can_be_read_after_a_fault(lookup, batch):
    assert list(lookup.readings())

    fail_in_a_request(lookup, batch)

    assert list(lookup.readings()) == []


def test_a_change_succeeds_after_a_device_fault_and_old_rows_are_not_answered(lookup, server, config, batch):
    table = config.full_name(config.tables[0])
    keys = np.array([0], dtype=np.int64)
    rows = np.full((1, config.tables[0].dim), 8.0, dtype=np.float32)
    fail(lookup._caches[0].cache.stream)

    server.insert(table, keys, rows)

    assert np.array_equal(server.lookup(table, keys)[0], rows)
    with pytest.raises(DeviceFaultError):
        lookup.lookup_pooled(batch)


def test_requests_go_to_a_device_that_did_not_fail(server, config, batch):
    with cached(server, config, open_device("runner")) as one, cached(server, config, open_device("runner:1")) as other:
        routes = LeastBusy([HostRoute(one, None), HostRoute(other, None)], lambda route: route.is_answering)
        fail_in_a_request(one, batch)

        with routes.one() as first, routes.one() as second:
            assert first is second
            assert first.is_answering
        assert same(other.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))


def test_a_request_without_device_memory_is_refused_and_later_requests_are_answered(lookup, config, batch, monkeypatch):
    def no_room(work, group, max_samples, max_keys, dense_dim):
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceWorkspace, "__init__", no_room)
        large = request(config, np.random.default_rng(2), samples=16, longest=400)
        with pytest.raises(DeviceMemoryError, match=r"runner: no memory for requests of [\d,]+ keys to model 'm'"):
            lookup.lookup_pooled(large)
    assert same(lookup.lookup_pooled(batch), lookup.lookup_pooled(batch))


@contextmanager
def no_memory_left(device):
    """Make every allocation fail, on the device and page-locked."""

    def no_room(shape, dtype):
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "empty", no_room)
        patched.setattr(device, "pinned", no_room)
        yield


@pytest.mark.parametrize("count", [1, ERASED_AT_ONCE + 1])
def test_changed_rows_are_erased_even_without_free_memory(lookup, server, config, batch, count, monkeypatch):
    table = config.full_name(config.tables[0])
    keys = np.resize(batch.tables[0].keys, count)
    lookup.lookup_pooled(batch)
    assert lookup._caches[0].cache.stats().rows

    monkeypatch.setattr(lookup.device, "kernel", lambda *_, **__: pytest.fail("a kernel's code takes memory"))
    with no_memory_left(lookup.device):
        server.evict(table, keys[::-1])

    assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))


def test_rows_are_inserted_without_free_memory(lookup, server, config, batch):
    expected = LookupSession(server, config).lookup_pooled(batch)
    lookup.lookup_pooled(batch)  # its buffers are allocated now
    for cache in lookup._caches:
        cache.cache.erase(cache.cache.dump()[0])
        cache.wait()

    with no_memory_left(lookup.device):
        assert same(lookup.lookup_pooled(batch), expected)

    assert lookup._caches[0].cache.stats().rows
    assert same(lookup.lookup_pooled(batch), expected)


def test_rows_that_are_inserted_later_are_logged_once_without_memory_for_them(server, config, batch, caplog):
    config = with_cache(config, mode="asynchronous", hit_rate_threshold=0.0)
    with cached(server, config, open_device("runner")) as lookup:
        with no_memory_left(lookup.device):
            for _ in range(2):
                assert lookup.lookup_pooled(batch).defaulted_keys
                lookup._insertions.wait()

        told = "missing rows were not inserted into its GPU cache: no room"
        assert sorted(record.getMessage() for record in caplog.records) == [f"m.t{table}: {told}" for table in range(3)]
        assert lookup._caches[0].cache.stats().rows == 0
        lookup.lookup_pooled(batch)
        assert lookup.wait_for_insertions(30)
        assert lookup._caches[0].cache.stats().rows
