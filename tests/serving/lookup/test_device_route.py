"""A request on a device is one upload, one or two launches of graphs and one wait; and the answer is right."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from gpu_cache.workspace import Workspace
from serving.config import read_inference_config
from serving.parameter_server import ParameterServer
from serving.reading import read_batch
from serving.routes import open_routes
from serving.storage import MemoryStore
from tests.gpu_cache.bags import watch_waits
from tests.serving.lookup.cached import cached, with_cache

# Both in float32, with other orders of addition in sums of 26 products, and rows of up to four.
FLOAT32_ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture
def model(write_model):
    return write_model(write_model.table(slots=3, dim=4, combiner=1), write_model.table(slots=2, dim=6))


@pytest.fixture
def config(model):
    return read_inference_config(model.config_file, "dcn").model_copy(update={"max_batchsize": 16})


@pytest.fixture
def server(config):
    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config)
        yield server


@contextmanager
def opened(server, config, device, captures_graphs=True, **cache):
    """The model's route on the device; its caches have all rows, unless said otherwise."""
    network = config.gpu_network.model_copy(update={"captures_graphs": captures_graphs})
    config = with_cache(config.model_copy(update={"gpu_network": network}), **{"kind": "static"} | cache)
    with cached(server, config, device) as lookup:
        _, _, [route] = open_routes(config, [lookup], "auto", 1)
        yield route


@dataclass
class Asked:
    """A request, and what PyTorch makes of it in float64."""

    batch: object
    expected: np.ndarray

    @classmethod
    def of(cls, model, config, samples, seed=0, **drawn):
        dense, bags = model.draw_request(np.random.default_rng(seed), samples, **drawn)
        keys, row_ptrs, _ = model.flatten(bags)
        return cls(read_batch(config, dense, keys, row_ptrs), model.expected(dense, bags))

    def is_answered_by(self, route):
        answer = route.predict(self.batch).values
        np.testing.assert_allclose(answer, self.expected, **FLOAT32_ROUNDING)
        return answer


@pytest.fixture
def queued(device, monkeypatch):
    """What the host does with a workspace's stream from now on, in order; of a capture, what the graph has."""
    done, captured = [], []

    def noting(name, call, stream_of: Callable = lambda args: args[-1]):
        def note(*args, **kwargs):
            if id(stream_of(args)) in streams:
                (captured if capturing else done).append(name)
            return call(*args, **kwargs)

        return note

    streams, capturing, kept = set(), [], []
    stream, kernel, capture, reading = device.stream, device.kernel, device.capture, Workspace.reading

    def made_stream():
        made = stream()
        kept.append(made)
        watch_waits(monkeypatch, made, *(noting(name, int, lambda _: made) for name in ("misses", "wait")))
        return made

    def capture_noting(on, function):
        capturing.append(on)
        try:
            graph = capture(on, function)
        finally:
            capturing.pop()
        graph.launch = noting("graph", graph.launch)
        return graph

    @contextmanager
    def reading_noting(work):
        streams.add(id(work.stream))  # no stream but the workspaces' counts
        with reading(work):
            done.append("[")
            yield
            done.append("]")

    for name in ("upload", "download"):
        monkeypatch.setattr(device, name, noting(name, getattr(device, name)))
    product = device.product
    monkeypatch.setattr(device, "product", noting("product", product, lambda args: args[2]))
    monkeypatch.setattr(device, "stream", made_stream)
    monkeypatch.setattr(device, "kernel", lambda *args, **kwargs: noting("launch", kernel(*args, **kwargs)))
    monkeypatch.setattr(device, "capture", capture_noting)
    monkeypatch.setattr(Workspace, "reading", reading_noting)
    return done, captured


def test_a_request_is_one_upload_one_graph_and_one_wait(device, server, config, model, queued):
    done, captured = queued
    with opened(server, config, device) as route:
        Asked.of(model, config, 5).is_answered_by(route)
        assert captured[0] == "launch"
        assert (captured.count("launch"), captured.count("download"), captured.count("upload")) == (1, 1, 0)

        for samples in (5, 8, 2):  # of one class
            done.clear()
            Asked.of(model, config, samples, samples).is_answered_by(route)
            assert done == ["upload", "[", "graph", "]", "misses", "wait"]


def test_the_network_waits_for_the_misses_until_misses_are_rare(device, server, config, model, queued):
    done, _ = queued
    with opened(server, config, device, kind="dynamic", size_ratio=1.0, fills_at_start=False) as route:
        asked = Asked.of(model, config, 8)
        ways = []
        for _ in range(40):
            done.clear()
            asked.is_answered_by(route)
            ways.append(list(done))

        one_by_one = ["[", "graph", "]", "misses", "graph", "wait"]
        at_once = ["[", "graph", "]", "graph", "misses", "wait"]
        assert all(way[-6:] == one_by_one for way in ways[2:20])
        assert all(way[-6:] == at_once for way in ways[35:])
        for seed in range(1, 5):
            Asked.of(model, config, 8, seed, unknown_ratio=0.5).is_answered_by(route)
        done.clear()
        asked.is_answered_by(route)
        assert done[-6:] == one_by_one


def test_missing_rows_are_one_upload_and_one_launch_before_the_networks_graph(device, server, config, model, queued):
    done, captured = queued
    never_kept = {"kind": "dynamic", "fills_at_start": False, "fill": "below_threshold", "hit_rate_threshold": 0.0}
    with opened(server, config, device, **never_kept) as route:
        first, *others = (Asked.of(model, config, 8, seed, unknown_ratio=0.1) for seed in range(3))
        first.is_answered_by(route)

        for asked in others:
            done.clear()
            asked.is_answered_by(route)
            again = ["upload", "[", "launch", "]", "graph", "misses", "wait"]
            assert done == ["launch", "upload", "[", "graph", "]", "misses", *again]  # the first one empties a list

    assert captured.count("download") == 1


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_a_graph_gives_the_bits_of_its_launches(device, server, config, model, ratio):
    asked = [Asked.of(model, config, samples, unknown_ratio=ratio) for samples in (1, 8, 16) for _ in range(3)]
    said = {"kind": "dynamic", "fills_at_start": False}

    with opened(server, config, device, **said) as graphs, opened(server, config, device, False, **said) as launches:
        for one in asked:
            assert one.is_answered_by(graphs).tobytes() == one.is_answered_by(launches).tobytes()


@pytest.mark.parametrize("features", [0, 3])
@pytest.mark.parametrize("captures_graphs", [True, False])
def test_requests_of_all_sizes_are_answered_one_after_the_other(device, write_model, features, captures_graphs):
    model = write_model(write_model.table(slots=2, dim=3), write_model.table(slots=1, dim=5), features=features)
    config = read_inference_config(model.config_file, "dcn").model_copy(update={"max_batchsize": 16})
    sizes = [(16, 9), (1, 0), (3, 9), (16, 1), (1, 9), (8, 0), (7, 3), (16, 9), (2, 1)]
    asked = [Asked.of(model, config, *size, max_hotness=most, unknown_ratio=0.1) for *size, most in _seeded(sizes)]

    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config)
        with opened(server, config, device, captures_graphs, kind="dynamic", size_ratio=0.4) as route:
            for one in asked:
                one.is_answered_by(route)


def _seeded(sizes):
    return [(samples, seed, most) for seed, (samples, most) in enumerate(sizes)]


def test_a_request_of_more_keys_than_expected_is_answered_from_larger_buffers(device, server, config, model):
    tables = [table.model_copy(update={"max_keys_per_sample": 1}) for table in config.tables]
    few, many = (Asked.of(model, config, 8, max_hotness=most) for most in (0, 9))

    with opened(server, config.model_copy(update={"tables": tuple(tables)}), device) as route:
        for asked in (few, few, many, many, few):
            asked.is_answered_by(route)


def test_rows_that_change_between_two_launches_of_a_graph_are_in_the_answer(device, server, config, model):
    rng = np.random.default_rng(3)
    with opened(server, config, device, kind="dynamic", size_ratio=1.0) as route:
        for _ in range(4):
            asked = Asked.of(model, config, 8, seed=1)
            asked.is_answered_by(route)
            keys = asked.batch.tables[0].keys[:5]
            rows = rng.normal(0, 1, (keys.size, 4)).astype(np.float32)
            model.tables[0].update(zip(keys.tolist(), rows, strict=True))
            server.insert("dcn.table0", keys, np.array([model.tables[0][key] for key in keys.tolist()]))
        changed = Asked.of(model, config, 8, seed=1)

        assert np.abs(changed.expected - asked.expected).max() > 1e-3
        changed.is_answered_by(route)


def test_requests_at_a_time_have_buffers_and_graphs_of_their_own(device, server, config, model):
    asked = [Asked.of(model, config, 1 + seed % 9, seed, unknown_ratio=0.1) for seed in range(12)]

    said = {"kind": "dynamic", "size_ratio": 0.4, "worker_buffers": 3}
    with opened(server, config, device, **said) as route, ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            list(pool.map(lambda one: one.is_answered_by(route), asked))
