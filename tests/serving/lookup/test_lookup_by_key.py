"""Single-key lookups with and without caches: each key gets its row from any tier."""

import numpy as np
import pytest

from serving.errors import DeviceMemoryError, RequestError, UnknownModelError
from serving.lookup import LookupSession
from serving.lookup.cache_plan import SINGLE_KEYS
from serving.lookup.cached_session import parts_of
from serving.parameter_server import ParameterServer
from serving.session import LookupOnlySession
from tests.gpu_cache.bags import scheduled
from tests.serving.lookup.cached import UNKNOWN_KEYS, Sketch, cached, request, same, served, with_cache, write_model
from tests.serving.lookup.test_cached_session import counted, held
from tests.serving.lookup.test_device_health import no_memory_left


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(config):
    with served(config) as server:
        yield server


def random_keys(config, rng, most=60, **options):
    return [table.keys[: rng.integers(0, most)] for table in request(config, rng, samples=15, **options).tables]


def test_without_caches_each_table_answers(server, config):
    keys = random_keys(config, np.random.default_rng(0))

    answer = LookupSession(server, config).lookup(keys)

    tables = [server.lookup(f"m.t{t}", of_table) for t, of_table in enumerate(keys)]
    assert [rows.tobytes() for rows in answer.embeddings] == [rows.tobytes() for rows, _ in tables]
    assert answer.defaulted_keys == sum(np.isin(of_table, UNKNOWN_KEYS).sum() for of_table in keys) > 0


@pytest.mark.parametrize("kind", ["dynamic", "static", "uvm"])
@pytest.mark.parametrize("schedule", [0, 2])
def test_caches_answer_single_keys_as_the_tiers_do(device, server, config, kind, schedule):
    rng = np.random.default_rng(1)

    with scheduled(device, schedule, 2), cached(server, with_cache(config, kind=kind), device) as lookup:
        for hottest in (None, 3, 20, None):
            keys = random_keys(config, rng, hottest=hottest)
            assert same(lookup.lookup(keys), LookupSession(server, config).lookup(keys))


def test_rows_of_every_dtype_equal_the_rows_of_the_tiers(device, tmp_path):
    config = write_model(tmp_path, [Sketch(4, row_dtype=row_dtype) for row_dtype in ("fp16", "bf16", "int8", "uint8")])
    keys = random_keys(config, np.random.default_rng(2), hottest=10)

    with served(config) as server, cached(server, config, device) as lookup:
        for _ in range(2):
            assert same(lookup.lookup(keys), LookupSession(server, config).lookup(keys))
            assert lookup.wait_for_insertions(30)  # a slow device might not hold the rows yet
        assert all(counted(lookup, "hits"))


def test_lookups_of_keys_and_of_bags_fill_the_same_caches(device, server, config):
    batch = request(config, np.random.default_rng(3), unknown_ratio=0.0, hottest=4)
    keys = [table.keys for table in batch.tables]

    with cached(server, config, device) as lookup:
        lookup.lookup(keys)
        assert counted(lookup, "misses") == [of_table.size for of_table in keys]
        assert [held(lookup, place) for place in range(3)] == [set(of_table.tolist()) for of_table in keys]

        assert same(lookup.lookup_pooled(batch), LookupSession(server, config).lookup_pooled(batch))
        assert same(lookup.lookup(keys), LookupSession(server, config).lookup(keys))
        assert counted(lookup, "misses") == [of_table.size for of_table in keys]
        assert counted(lookup, "hits") == [2 * of_table.size for of_table in keys]


def test_a_request_of_cached_keys_is_one_copy_each_way(device, server, config, monkeypatch):
    copies = []

    def note(name, copy):
        return lambda *args: copies.append(name) or copy(*args)

    keys = random_keys(config, np.random.default_rng(4), unknown_ratio=0.0)
    with cached(server, with_cache(config, kind="static"), device) as lookup:
        for name in ("upload", "download"):
            monkeypatch.setattr(device, name, note(name, getattr(device, name)))
        answer = lookup.lookup(keys)

    assert copies == ["upload", "download"]
    assert same(answer, LookupSession(server, config).lookup(keys))


def test_a_request_of_more_keys_than_expected_or_of_none_is_answered(device, server, config):
    rng = np.random.default_rng(5)
    small = config.model_copy(update={"max_batchsize": 2})
    many = [rng.integers(0, 120, 700) for _ in config.tables]
    none = [np.empty(0, np.int64)] * 3

    with cached(server, small, device) as lookup:
        for keys in (none, many, none):
            assert same(lookup.lookup(keys), LookupSession(server, config).lookup(keys))


def test_a_request_of_many_keys_is_answered_in_parts_that_fit(device, server, config):
    rng = np.random.default_rng(8)
    known = [rng.integers(0, 40, count) * 3 for count in (SINGLE_KEYS - 5, 30, SINGLE_KEYS + 7)]
    of_one = [known[0][:0], np.resize(known[1], 2 * SINGLE_KEYS + 1), known[0][:0]]
    unknown = [*known[:2], np.append(known[2], UNKNOWN_KEYS)]

    with cached(server, with_cache(config, kind="static"), device) as lookup:
        for keys in (known, of_one, unknown):
            assert same(lookup.lookup(keys), LookupSession(server, config).lookup(keys))


@pytest.mark.parametrize("most", [1, 4, 100])
def test_parts_have_all_keys_in_order_and_fit_the_limit(most):
    keys = [np.arange(size) for size in (0, 7, 1, 0, 9)]

    parts = list(parts_of(keys, most))

    sizes = [sum(of_table.size for of_table in part) for part in parts]
    assert all(size == most for size in sizes[:-1])
    assert 1 <= sizes[-1] <= most
    for t, of_table in enumerate(keys):
        assert np.concatenate([part[t] for part in parts]).tolist() == of_table.tolist()


@pytest.fixture
def asked(monkeypatch):
    """The tables whose keys are looked for in the tiers."""
    tables, contains = [], ParameterServer.contains

    def recorded(server, table, keys):
        tables.append(table)
        return contains(server, table, keys)

    monkeypatch.setattr(ParameterServer, "contains", recorded)
    return tables


@pytest.mark.parametrize("most", [SINGLE_KEYS, 2])
def test_merged_requests_look_only_for_the_keys_of_tables_with_defaults(
    device, server, config, asked, monkeypatch, most
):
    monkeypatch.setattr("serving.lookup.cached_session.SINGLE_KEYS", most)
    requests = [[[0, 3], [3], [6]], [[0], [UNKNOWN_KEYS[0], 6, UNKNOWN_KEYS[1]], [3]]]
    requests = [[np.array(keys) for keys in of_tables] for of_tables in requests]

    with cached(server, config, device) as lookup:
        for _ in range(2):  # the caches miss the unknown keys, and then know them to be absent
            answers = LookupOnlySession([lookup]).lookup_together(requests)
            assert [answer.defaulted_keys for answer in answers] == [0, 2]

    assert asked == ["m.t1", "m.t1"]


def test_merged_requests_do_not_look_for_late_keys(device, server, config, asked):
    requests = [[np.array([0, 3])] * 3, [np.array([6])] * 3]

    with cached(server, with_cache(config, mode="asynchronous", hit_rate_threshold=0.0), device) as lookup:
        answers = LookupOnlySession([lookup]).lookup_together(requests)
        assert counted(lookup, "late_keys") == [9]

    assert [answer.defaulted_keys for answer in answers] == [0, 0]
    assert not asked


def test_a_request_of_cached_rows_allocates_no_memory(device, server, config):
    keys = [np.arange(size) % 40 * 3 for size in (SINGLE_KEYS, 500, SINGLE_KEYS)]

    with cached(server, with_cache(config, kind="static"), device) as lookup, no_memory_left(device):
        answer = lookup.lookup(keys)

    assert same(answer, LookupSession(server, config).lookup(keys))


def test_in_the_asynchronous_mode_missing_rows_are_defaults_and_are_inserted_later(device, tmp_path):
    sketches = (Sketch(4, default_value=0.5), Sketch(4))
    config = write_model(tmp_path, sketches, mode="asynchronous", hit_rate_threshold=0.5)
    known, none = np.array([0, 3], dtype=np.int64), np.empty(0, np.int64)
    both = np.array([0, 9, 3], dtype=np.int64)

    with served(config) as server, cached(server, config, device) as lookup:
        exact = LookupSession(server, config).lookup([both, none])
        lookup.lookup([known, none])  # waits, because its hit rate is below the threshold
        assert lookup.wait_for_insertions(30)  # a slow device might not hold their rows yet
        answer = lookup.lookup([both, none])
        assert lookup.wait_for_insertions(30)
        later = lookup.lookup([both, none])

    want = exact.embeddings[0].copy()
    want[1] = 0.5
    assert answer.embeddings[0].tobytes() == want.tobytes()
    assert answer.defaulted_keys == 1
    assert same(later, exact)


def test_a_changed_row_is_answered_as_soon_as_the_change_is_reported(device, tmp_path):
    config = write_model(tmp_path, size_ratio=1.0)
    keys = [np.array([0, 3, 6], dtype=np.int64), *[np.empty(0, np.int64)] * 2]

    with served(config) as server, cached(server, config, device) as lookup:
        lookup.lookup(keys)
        server.insert("m.t0", np.array([3]), np.full((1, 4), 7.0, dtype=np.float32))
        server.evict("m.t0", np.array([6]))
        answer = lookup.lookup(keys)

        assert answer.embeddings[0][1].tolist() == [7.0] * 4
        assert answer.defaulted_keys == 1
        assert same(answer, LookupSession(server, config).lookup(keys))


def test_wrong_keys_are_refused(device, server, config):
    good = np.array([0, 3], dtype=np.int64)
    wrong = [
        ([good], "expected keys of 3 tables, got 1"),
        ([good, good.astype(np.int32), good], r"table 'm\.t1': expected keys of int64\[N\], got int32\[2\]"),
        ([good, [0, 3], good], r"table 'm\.t1': expected keys of int64\[N\], got a list"),
        ([good, good, good.reshape(1, 2)], r"table 'm\.t2': expected keys of int64\[N\], got int64\[1, 2\]"),
        ([np.array([3, 2**63 - 1]), good, good], r"table 'm\.t0': key 9223372036854775807 at position 1"),
    ]
    with cached(server, config, device) as lookup:
        for session in (lookup, LookupSession(server, config)):
            for keys, message in wrong:
                with pytest.raises(RequestError, match=message):
                    session.lookup(keys)


def test_a_request_without_device_memory_is_refused_and_the_next_request_is_answered(
    device, server, config, monkeypatch
):
    def no_room(shape, dtype):
        raise MemoryError("no room")

    keys = random_keys(config, np.random.default_rng(6))
    with cached(server, config, device) as lookup:
        with monkeypatch.context() as patched:
            patched.setattr(device, "empty", no_room)
            with pytest.raises(DeviceMemoryError, match=r"keys to model 'm'"):
                lookup.lookup(keys)
        assert same(lookup.lookup(keys), LookupSession(server, config).lookup(keys))


def test_a_model_that_was_unloaded_is_not_answered(device, tmp_path):
    config = write_model(tmp_path)
    keys = [np.array([0], dtype=np.int64)] * 3

    with served(config) as server, cached(server, config, device) as lookup:
        lookup.lookup(keys)
        sessions = lookup, LookupSession(server, config)
        server.unload_model("m")
        for session in sessions:
            with pytest.raises(UnknownModelError):
                session.lookup(keys)
