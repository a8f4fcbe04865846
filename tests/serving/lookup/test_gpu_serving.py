"""From configuration files and calls to a model that is served through caches on devices."""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kernels.device import open_device
from kernels.errors import DeviceUnavailableError
from serving.config import read_inference_config
from serving.errors import ConfigError, DeviceMemoryError
from serving.hugectr import CreateEmbeddingCache, CreateParameterServer, InferenceSession
from serving.lookup import LookupSession
from serving.lookup.cached_session import CachedLookupSession
from serving.opening import Runtime, load_model
from serving.parameter_server import ParameterServer
from serving.reading import read_batch
from serving.repository import ModelRepository
from serving.storage import MemoryStore
from tests.serving.ps_files import listed, write_ps


@pytest.fixture
def model(write_model):
    return write_model(write_model.table(slots=3, dim=4, combiner=1), write_model.table(slots=2, dim=6))


def requests(model, count, unknown_ratio=0.1, samples=5):
    rng = np.random.default_rng(1)
    for _ in range(count):
        dense, bags = model.draw_request(rng, samples, unknown_ratio)
        keys, row_ptrs, _ = model.flatten(bags)
        yield dense, keys, row_ptrs


def ps_json(model, folder, tiers=None, **said):
    """Write a ps.json with the model, and what is said of its GPU cache and dense network."""
    is_int64 = model.key_type == "I64"
    return write_ps(folder, [listed(model.config_file, **said)], supportlonglong=is_int64, **(tiers or {}))


def caches(repository):
    return repository.session("dcn")._lookups


class TestHugectrCalls:
    @pytest.mark.parametrize("key_type", ["I32", "I64"])
    def test_a_gpu_cache_changes_no_answer(self, device, write_model, key_type):
        model = write_model(key_type=key_type)
        is_int64 = key_type == "I64"
        server = CreateParameterServer([model.config_file], ["dcn"], is_int64)
        plain = CreateEmbeddingCache(server, 0, False, 0.2, model.config_file, "dcn", is_int64)
        kind = device.name.partition(":")[0]
        cache = CreateEmbeddingCache(server, 0, True, 0.5, model.config_file, "dcn", is_int64, device=kind)

        session = InferenceSession(model.config_file, 0, cache, engine="numpy")
        expected = InferenceSession(model.config_file, 0, plain, engine="numpy")

        assert isinstance(cache, CachedLookupSession)
        assert cache.plans[0].capacity.rows == 30  # half of 50, in lines of 15
        assert (cache.config.gpu_cache.fill, cache.config.gpu_cache.hit_rate_threshold) == ("below_threshold", 0.5)
        for dense, keys, row_ptrs in requests(model, 4):
            answer = session.predict(dense, keys, row_ptrs, is_int64)
            assert answer.tobytes() == expected.predict(dense, keys, row_ptrs, is_int64).tobytes()
        cache.close()
        server.close()

    @pytest.mark.parametrize("bits", [64, 32])
    def test_the_largest_uint32_keys_are_no_others(self, device, write_model, bits):
        model = write_model(key_type="I32")
        model.document["inference"]["embedding_cache_key_bits"] = bits
        model.write_config()
        largest = 2**32 - 1
        server = CreateParameterServer([model.config_file], ["dcn"], False)
        kind = device.name.partition(":")[0]
        cache = CreateEmbeddingCache(server, 0, True, 1.0, model.config_file, "dcn", False, device=kind)
        assert cache.plans[0].capacity.layout.key_type == ("U32" if bits == 32 else "I64")
        batch = read_batch(cache.config, [[0.0, 0.0]], [largest, largest - 1, 0], [0, 1, 2, 3])

        for _ in range(2):
            answer = cache.lookup_pooled(batch)
            assert answer.defaulted_keys == 1
            assert answer.embeddings[0][0, 0].tolist() == model.tables[0][largest].tolist()
        cache.close()
        server.close()

    @pytest.mark.gpu
    def test_a_gpu_that_is_not_there_is_named(self, write_model):
        model = write_model()
        server = CreateParameterServer([model.config_file], ["dcn"], True)

        with pytest.raises(DeviceUnavailableError, match="cuda:99"):
            CreateEmbeddingCache(server, 99, True, 0.5, model.config_file, "dcn", True)
        server.close()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"device": "cpu"}, "device: expected cuda or runner"), ({"cache_size_percentage": 0.0}, "percentage. 0")],
    )
    def test_an_impossible_cache_is_refused(self, write_model, changes, message):
        model = write_model()
        server = CreateParameterServer([model.config_file], ["dcn"], True)
        arguments = {
            "parameter_server": server,
            "cuda_dev_id": 0,
            "use_gpu_embedding_cache": True,
            "cache_size_percentage": 0.5,
            "model_config_path": model.config_file,
            "model_name": "dcn",
            "i64_input_key": True,
            "device": "runner",
        }

        with pytest.raises(ConfigError, match=message):
            CreateEmbeddingCache(**arguments | changes)
        server.close()


class TestLoadModel:
    def test_a_model_is_served_through_caches(self, device, model):
        with load_model(model.config_file, engine="numpy") as plain:
            expected = [plain.predict(*request) for request in requests(model, 3)]

        with load_model(model.config_file, engine="numpy", device=device.name) as session:
            assert [cache.device for cache in session._lookups] == [device]
            for one, answer in zip(requests(model, 3), expected, strict=True):
                assert session.predict(*one).tobytes() == answer.tobytes()

    def test_what_another_process_changed_is_there_after_a_refresh(self, device, model):
        store = MemoryStore()
        keys = np.array(list(model.tables[0]))
        dense, request_keys, row_ptrs = next(requests(model, 1))

        server = ParameterServer([store])
        with server, load_model(model.config_file, server, engine="numpy", device=device.name) as session:
            before = session.predict(dense, request_keys, row_ptrs)
            store.tables[f"{session.config.name}.table0"].insert(keys, np.ones((keys.size, 4), dtype=np.float32))
            session.refresh_embedding_cache()
            after = session.predict(dense, request_keys, row_ptrs)
            expected = InferenceSession(session.config, 0, LookupSession(server, session.config), engine="numpy")

            assert after.tobytes() == expected.predict(dense, request_keys, row_ptrs).tobytes() != before.tobytes()

    def test_what_names_no_device_is_refused_before_anything_is_loaded(self, tmp_path):
        with pytest.raises(ConfigError, match="load_model: device: expected cpu, auto"):
            load_model(tmp_path / "nothing", device="gpu")


class TestRepository:
    def test_a_ps_json_says_what_caches_are_like(self, device, model, tmp_path):
        said = {"gpucacheper": 0.25, "embedding_cache_type": "uvm", "hit_rate_threshold": 0.5}
        plain, cached = ps_json(model, tmp_path, gpucache=False), tmp_path / "cached"
        with ModelRepository(plain, Runtime("numpy")) as repository:
            repository.load()
            expected = [repository.session("dcn").predict(*request) for request in requests(model, 3)]

        cached.mkdir()
        with ModelRepository(ps_json(model, cached, **said), Runtime("numpy", device=device.name)) as repository:
            repository.load()
            for one, answer in zip(requests(model, 3), expected, strict=True):
                assert repository.session("dcn").predict(*one).tobytes() == answer.tobytes()
            (cache,) = caches(repository)
            assert [(plan.capacity.kind, plan.capacity.rows) for plan in cache.plans] == [("uvm", 15), ("uvm", 15)]
            shown = {reading.name for reading in repository.readings()}

        assert {"hotrow_gpu_cache_hits", "hotrow_gpu_cache_bytes", "hotrow_lookup_keys"} <= shown

    def test_each_gpu_of_the_list_has_caches_and_all_answer_alike(self, model, tmp_path):
        file = ps_json(model, tmp_path, deployed_device_list=[0, 1], gpucacheper=1.0)

        with ModelRepository(file, Runtime("numpy", device="runner")) as repository:
            repository.load()
            session = repository.session("dcn")
            assert [cache.device.name for cache in session._lookups] == ["runner", "runner:1"]
            for one in requests(model, 2):
                batch = read_batch(session.config, *one)
                first, second = (cache.lookup_pooled(batch) for cache in session._lookups)
                assert [of.tobytes() for of in first.embeddings] == [of.tobytes() for of in second.embeddings]
            devices = {dict(reading.labels).get("device") for reading in repository.readings()}

        assert devices == {None, "runner", "runner:1"}

    def test_a_change_reaches_the_caches_of_every_gpu(self, model, tmp_path):
        file = ps_json(model, tmp_path, deployed_device_list=[0, 1], gpucacheper=1.0)
        new = np.full((1, 4), 3.0, dtype=np.float32)

        with ModelRepository(file, Runtime("numpy", device="runner")) as repository:
            repository.load()
            session = repository.session("dcn")
            key = next(iter(model.tables[0]))
            batch = read_batch(session.config, [[0.0, 0.0]], [key], [0, 1, 1, 1, 0, 0, 0])
            repository._loader.server.insert(session.config.full_name(session.config.tables[0]), np.array([key]), new)

            for cache in session._lookups:
                assert cache.lookup_pooled(batch).embeddings[0][0, 0].tolist() == [3.0] * 4

    def test_a_model_that_wants_no_cache_has_none(self, model, tmp_path):
        file = ps_json(model, tmp_path, gpucache=False)

        with ModelRepository(file, Runtime("numpy", device="runner")) as repository:
            repository.load()
            assert not any(isinstance(cache, CachedLookupSession) for cache in caches(repository))

    def test_the_memory_of_caches_is_logged_before_it_is_taken(self, model, tmp_path, caplog):
        with (
            caplog.at_level(logging.INFO),
            ModelRepository(ps_json(model, tmp_path), Runtime(device="runner")) as repository,
        ):
            repository.load()

        assert "model dcn: caches on runner take 0.0 MiB of " in caplog.text
        assert "GPU kernels run on the CPU, thousands of times slower; this is for tests" in caplog.text

    def test_caches_that_do_not_fit_stop_the_load_and_leave_nothing_open(self, model, tmp_path, monkeypatch):
        monkeypatch.setattr(open_device("runner"), "memory", lambda: (10, 100))

        with (
            ModelRepository(ps_json(model, tmp_path), Runtime(device="runner")) as repository,
            pytest.raises(DeviceMemoryError, match=r"the dynamic caches of model .* 10 are free"),
        ):
            repository.load()
        assert not repository.models()

    def test_a_network_that_does_not_fit_next_to_the_caches_stops_the_load_too(self, model, tmp_path, monkeypatch):
        monkeypatch.setattr(open_device("runner"), "memory", lambda: (60 << 20, 100 << 20))  # cuBLAS alone takes 2 x 32

        with (
            ModelRepository(ps_json(model, tmp_path), Runtime(device="runner")) as repository,
            pytest.raises(
                DeviceMemoryError, match=r"the dense network of model .* with 2 worker buffers, but 62,914,560 are"
            ),
        ):
            repository.load()
        assert not repository.models()

    def test_a_gpu_that_is_not_there_is_named_before_a_table_is_loaded(self, model, tmp_path, monkeypatch):
        monkeypatch.setattr(ParameterServer, "load_model", None)
        with pytest.raises(DeviceUnavailableError, match="cuda:99"):
            load_model(model.config_file, device="cuda:99")
        with (
            ModelRepository(ps_json(model, tmp_path), Runtime(device="cuda:99")) as repository,
            pytest.raises(DeviceUnavailableError, match="cuda:99"),
        ):
            repository.load()


def test_a_uint32_model_has_int64_lines(model):
    """They hold more of what is asked for: docs/gpu_cache.md, "Lines of 32-bit keys"."""
    from serving.lookup.cache_plan import plan_caches

    plans = plan_caches(read_inference_config(model.config_file, "dcn"))

    assert {plan.capacity.layout.key_type for plan in plans} == {"I64"}


def test_a_uint32_model_is_served_through_lines_of_32_bit_keys_where_ps_json_says_so(device, write_model, tmp_path):
    model = write_model(write_model.table(slots=3), write_model.table(slots=2, dim=6), key_type="I32")
    largest = 2**32 - 1
    assert largest in model.tables[0]
    with load_model(model.config_file, engine="numpy") as session:
        expected = [session.predict(*request) for request in requests(model, 3)]

    file = ps_json(model, tmp_path, embedding_cache_key_bits=32, gpucacheper=1.0)
    with ModelRepository(file, Runtime("numpy", device=device.name)) as repository:
        repository.load()
        session = repository.session("dcn")
        (lookup,) = caches(repository)
        assert {plan.capacity.layout.key_type for plan in lookup.plans} == {"U32"}
        assert largest not in lookup._caches[0].cache.dump()[0]
        for one, answer in zip(requests(model, 3), expected, strict=True):
            assert session.predict(*one).tobytes() == answer.tobytes()


class TestDenseNetworkOnTheDevice:
    @pytest.mark.parametrize("captures_graphs", [True, False])
    def test_probabilities_are_those_of_numpy(self, device, model, tmp_path, captures_graphs):
        file = ps_json(model, tmp_path, use_cuda_graph=captures_graphs, gpucacheper=1.0)
        # A class of batches runs by itself, then as a graph.
        asked = [request for samples in (1, 5, 5, 8, 3) for request in requests(model, 2, samples=samples)]
        with load_model(model.config_file, engine="numpy") as session:
            expected = [session.predict(*one) for one in asked]

        with ModelRepository(file, Runtime(device=device.name)) as repository:
            repository.load()
            session = repository.session("dcn")
            assert session.engine == device.name.partition(":")[0]
            for one, answer in zip(asked, expected, strict=True):
                # Both in float32, with other orders of addition in sums of 26 products.
                np.testing.assert_allclose(session.predict(*one), answer, rtol=2e-5, atol=2e-6)

    def test_rows_that_were_missing_are_in_the_answer(self, device, model, tmp_path):
        empty = ps_json(model, tmp_path, init_ec=False, gpucacheper=1.0)

        with ModelRepository(empty, Runtime(device=device.name)) as repository:
            repository.load()
            session = repository.session("dcn")
            for dense, keys, row_ptrs in requests(model, 3):
                first, again = (session.predict(dense, keys, row_ptrs) for _ in range(2))
                assert first.tobytes() == again.tobytes()

    def test_many_threads_have_workspaces_of_their_own(self, device, model, tmp_path):
        file = ps_json(model, tmp_path, gpucacheper=1.0, num_of_worker_buffer_in_pool=2, init_ec=False)

        with ModelRepository(file, Runtime(device=device.name)) as repository:
            repository.load()
            session = repository.session("dcn")
            asked = list(requests(model, 6))
            expected = [session.predict(*one).tobytes() for one in asked]
            with ThreadPoolExecutor(4) as pool:
                for _ in range(2):
                    assert [
                        answer.tobytes() for answer in pool.map(lambda one: session.predict(*one), asked)
                    ] == expected

    def test_half_precision_is_near(self, device, model, tmp_path):
        (one,) = requests(model, 1)
        with load_model(model.config_file, engine="numpy") as session:
            expected = session.predict(*one)

        with ModelRepository(
            ps_json(model, tmp_path, use_mixed_precision=True), Runtime(device=device.name)
        ) as repository:
            repository.load()
            answer = repository.session("dcn").predict(*one)

        assert 1e-7 < np.abs(answer - expected).max() < 0.02

    @pytest.mark.parametrize(("said", "is_tf32"), [({}, False), ({"enable_tf32_compute": True}, True)])
    def test_products_are_computed_in_tf32_only_where_that_is_asked_for(
        self, device, model, tmp_path, monkeypatch, said, is_tf32
    ):
        multiply, asked = device.product, set()

        def product(x, y, stream, *, is_tf32):
            asked.add((x.dtype.name, is_tf32))
            return multiply(x, y, stream, is_tf32=is_tf32)

        monkeypatch.setattr(device, "product", product)
        (one,) = requests(model, 1)
        with load_model(model.config_file, engine="numpy") as session:
            expected = session.predict(*one)

        with ModelRepository(ps_json(model, tmp_path, **said), Runtime(device=device.name)) as repository:
            repository.load()
            answer = repository.session("dcn").predict(*one)

        assert asked == {("float32", is_tf32)}
        np.testing.assert_allclose(answer, expected, atol=2e-3 if is_tf32 else 2e-6)  # 10 bits behind the point

    def test_another_engine_that_is_asked_for_runs_on_the_cpu(self, device, model):
        with load_model(model.config_file, engine="numpy", device=device.name) as session:
            assert session.engine == "numpy"
