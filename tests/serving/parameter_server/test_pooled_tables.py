"""Several tables in one call give the answers, errors and counts of one lookup after the other."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.batch import Batch, TableKeys
from serving.errors import RequestError, StoreError, UnknownModelError
from serving.parameter_server import ParameterServer, TierSettings
from serving.storage import MemoryStore, SnapshotStore
from serving.storage.memory import MemoryTable
from tests.serving.lookup.cached import Sketch, request, write_model
from tests.serving.small_server import DictStore, HookedMemory

SKETCHES = (
    Sketch(4, slots=1),
    Sketch(7, rows=90, slots=3, combiner="mean", default_value=0.25, row_dtype="fp16"),
    Sketch(4, rows=40, combiner="sqrtn", row_dtype="int8"),
    Sketch(4, rows=40, combiner="sum", default_value=-1.0),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), SKETCHES)


def serve(config, *stores, **options):
    server = ParameterServer(stores, **options)
    server.load_model(config)
    return server


def names(config):
    return [config.full_name(table) for table in config.tables]


def one_by_one(server, config, batch, weights=None):
    """The answer of ``lookup_pooled`` for each table: the embeddings, and the number of defaulted keys."""
    embeddings, defaulted_keys = [], 0
    for place, (table, keys) in enumerate(zip(config.tables, batch.tables, strict=True)):
        of_keys = weights and weights[place]
        pooled, found = server.lookup_pooled(config.full_name(table), *keys, table.combiner, of_keys)
        embeddings.append(pooled.reshape(batch.samples, table.slots, table.dim))
        defaulted_keys += int((~found).sum())
    return embeddings, defaulted_keys


def assert_same(answer, expected):
    assert answer[1] == expected[1]
    for ours, theirs in zip(answer[0], expected[0], strict=True):
        assert (ours.shape, ours.dtype, ours.tobytes()) == (theirs.shape, theirs.dtype, theirs.tobytes())
        assert ours.flags.c_contiguous


def counted(server):
    """Every count of every table; of the times their number."""
    return {
        name: (
            counters.keys,
            counters.defaulted_keys,
            [
                (tier.tier, tier.asked_keys, tier.hits, tier.errors, sum(tier.fetch_times.counts))
                for tier in counters.tiers
            ],
        )
        for name, counters in server.counters().items()
    }


def partial_memory(config, folder):
    """RAM that holds half of the keys, and a slower tier that holds all."""
    stores = MemoryStore(), DictStore("slow")
    server = serve(config, *stores)
    for table in config.tables:
        stores[0].tables[config.full_name(table)].evict(np.arange(0, 300, 6))
    return server


TIERS = {
    "RAM": lambda config, folder: serve(config, MemoryStore()),
    "half in RAM": partial_memory,
    "no tier that pools": lambda config, folder: serve(config, DictStore()),
    "snapshot": lambda config, folder: serve(config, SnapshotStore(folder)),
    "time budget": lambda config, folder: serve(
        config, MemoryStore(), settings={"memory": TierSettings(timeout_ms=60_000)}
    ),
    "one table has no room": lambda config, folder: serve(
        config,
        MemoryStore(capacity_rows_per_table={name: 0 if name == "m.t1" else 100 for name in names(config)}),
        DictStore("slow"),
    ),
}


@pytest.fixture(scope="module", params=TIERS)
def two_servers(request, config, tmp_path_factory):
    """Two servers with the same tiers."""
    folder = tmp_path_factory.mktemp("snapshots")
    return [TIERS[request.param](config, folder) for _ in range(2)]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    unknown_ratio=st.sampled_from([0.0, 0.05, 0.5]),
    samples=st.integers(1, 12),
    weighted=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_answers_and_counts_are_those_of_single_lookups(two_servers, config, seed, unknown_ratio, samples, weighted):
    together, single = two_servers
    rng = np.random.default_rng(seed)
    batch = request(config, rng, samples, unknown_ratio=unknown_ratio)
    weights = [
        rng.standard_normal(table.keys.size).astype(np.float32) if is_weighted else None
        for table, is_weighted in zip(batch.tables, weighted, strict=True)
    ]
    weights = weights if any(weighted) else None

    answer = together.pooled_tables(config).lookup_pooled(batch, weights)

    assert_same(answer, one_by_one(single, config, batch, weights))
    assert counted(together) == counted(single)


def test_single_keys_are_answered_and_counted_as_by_single_lookups(two_servers, config):
    together, single = two_servers
    keys = [np.arange(-5, 200)[place::2] for place in range(len(config.tables))]  # parts of other arrays

    rows, defaulted_keys, incomplete = together.pooled_tables(config).lookup(keys)
    expected = [single.lookup(name, of_table) for name, of_table in zip(names(config), keys, strict=True)]

    assert [of_table.tobytes() for of_table in rows] == [of_table.tobytes() for of_table, _ in expected]
    assert defaulted_keys == sum(int((~found).sum()) for _, found in expected)
    masks = {place: found.tolist() for place, (_, found) in enumerate(expected) if not found.all()}
    assert {place: found.tolist() for place, found in incomplete} == masks
    assert counted(together) == counted(single)


def test_missing_rows_are_promoted(config):
    server = serve(config, MemoryStore(), DictStore("slow"), promote=True)
    keys = np.arange(0, 60, 3)
    for name in names(config):
        server.stores[0].tables[name].evict(keys)
    batch = request(config, np.random.default_rng(1), unknown_ratio=0.0, hottest=20)

    server.pooled_tables(config).lookup_pooled(batch)
    server.wait_for_promotions()

    for name, table in zip(names(config), batch.tables, strict=True):
        keys_in_ram = {int(key) for part, _ in server.stores[0].tables[name].items() for key in part}
        assert set(table.keys.tolist()) <= keys_in_ram
        assert server.counters()[name].tiers[0].promoted_rows == np.unique(table.keys).size


@pytest.mark.parametrize("store", [MemoryStore, "snapshot"])
def test_a_lookup_after_a_change_sees_it(config, tmp_path, store):
    server = serve(config, MemoryStore() if store is MemoryStore else SnapshotStore(tmp_path))
    tables = server.pooled_tables(config)
    batch = request(config, np.random.default_rng(2), unknown_ratio=0.0)
    before = tables.lookup_pooled(batch)

    server.insert(
        "m.t0", np.unique(batch.tables[0].keys), np.ones((np.unique(batch.tables[0].keys).size, 4), np.float32)
    )
    server.evict("m.t3", batch.tables[3].keys)

    after = tables.lookup_pooled(batch)
    sizes = np.diff(batch.tables[0].row_ptrs)
    np.testing.assert_array_equal(after[0][0].reshape(-1, 4), np.repeat(sizes[:, None], 4, axis=1))
    assert after[1] == batch.tables[3].keys.size
    for place in (1, 2):
        assert after[0][place].tobytes() == before[0][place].tobytes()
    assert_same(after, one_by_one(server, config, batch))


def test_a_cache_that_missed_a_change_is_not_asked(config):
    class Refusing(HookedMemory):
        def on_evict(self, table, keys):
            raise StoreError("memory", table.spec.name, "takes nothing")

    server = serve(config, Refusing(), DictStore("slow"))
    tables = server.pooled_tables(config)
    batch = request(config, np.random.default_rng(3), unknown_ratio=0.0)
    tables.lookup_pooled(batch)

    server.evict("m.t0", batch.tables[0].keys)

    answer = tables.lookup_pooled(batch)
    assert answer[1] == batch.tables[0].keys.size
    assert not answer[0][0].any()
    assert_same(answer, one_by_one(server, config, batch))


def test_a_snapshot_that_cannot_be_read_is_bypassed_for_its_table_alone(config, tmp_path):
    """The error names the table, and is counted as a single lookup's."""
    server = serve(config, SnapshotStore(tmp_path))
    batch = request(config, np.random.default_rng(4), unknown_ratio=0.0)
    tables = server.pooled_tables(config)
    tables.lookup_pooled(batch)
    (file,) = (path for path in (tmp_path / "m.t1").iterdir() if path.stat().st_size > 8192)
    with file.open("r+b") as opened:
        opened.truncate(8192)

    with pytest.raises(StoreError, match=r"m\.t1") as raised:
        tables.lookup_pooled(batch)

    assert raised.value.table == "m.t1"
    assert [counters.tiers[0].errors for counters in server.counters().values()] == [0, 1, 0, 0]
    assert [sum(counters.tiers[0].fetch_times.counts) for counters in server.counters().values()] == [2, 1, 2, 2]


def test_lookups_of_many_threads_are_all_counted(config):
    server = serve(config, MemoryStore())
    tables = server.pooled_tables(config)
    batch = request(config, np.random.default_rng(5), unknown_ratio=0.0)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(lambda: [tables.lookup_pooled(batch) for _ in range(250)]) for _ in range(4)]:
            future.result()

    for counters, table in zip(server.counters().values(), batch.tables, strict=True):
        memory = counters.tiers[0]
        assert (counters.keys, memory.asked_keys, memory.hits) == (1000 * table.keys.size,) * 3
        assert sum(memory.fetch_times.counts) == 1000
        assert memory.fetch_times.sum_s > 0


def test_an_unloaded_model_is_refused_and_its_memory_is_free(config):
    server = serve(config, MemoryStore())
    tables = server.pooled_tables(config)
    batch = request(config, np.random.default_rng(6), unknown_ratio=0.0)
    expected = tables.lookup_pooled(batch)
    memory = [weakref.ref(server.stores[0].tables[name].native) for name in names(config)]

    server.unload_model("m")

    gc.collect()
    assert [reference() for reference in memory] == [None] * 4
    with pytest.raises(UnknownModelError, match=r"'m\.t0' was unloaded with its model"):
        tables.lookup_pooled(batch)
    server.load_model(config)
    with pytest.raises(UnknownModelError, match=r"'m\.t0' was unloaded with its model"):
        tables.lookup_pooled(batch)
    assert_same(server.pooled_tables(config).lookup_pooled(batch), expected)
    assert server.counters()["m.t0"].keys == batch.tables[0].keys.size


@pytest.mark.parametrize("reloaded", [False, True], ids=["unloaded", "unloaded and loaded again"])
def test_a_lookup_that_meets_the_unloading_fails_and_calls_no_key_unknown(config, reloaded):
    class UnloadingTable(MemoryTable):
        @property
        def native(self):
            if self.store.is_armed:
                self.store.is_armed = False
                server.unload_model("m")
                if reloaded:
                    server.load_model(config)
            return self.host_table

        @native.setter
        def native(self, host_table):
            self.host_table = host_table

    class Unloading(MemoryStore):
        is_armed = False

        def _new_table(self, spec):
            return UnloadingTable(self, spec)

    server = serve(config, Unloading())
    tables = server.pooled_tables(config)
    batch = request(config, np.random.default_rng(7))
    tables.lookup_pooled(batch)
    server.stores[0].is_armed = True

    with pytest.raises(UnknownModelError, match=r"'m\.t0' was unloaded with its model"):
        tables.lookup_pooled(batch)


def test_another_model_may_be_loaded_and_unloaded_meanwhile(config, tmp_path):
    other = write_model(tmp_path / "other", SKETCHES[:1], name="other")
    server = serve(config, MemoryStore())
    tables = server.pooled_tables(config)
    batch = request(config, np.random.default_rng(8), unknown_ratio=0.0)
    expected = tables.lookup_pooled(batch)
    stop = threading.Event()

    def load_and_unload():
        while not stop.is_set():
            server.load_model(other)
            server.unload_model("other")

    thread = threading.Thread(target=load_and_unload)
    thread.start()
    try:
        for _ in range(200):
            assert_same(tables.lookup_pooled(batch), expected)
    finally:
        stop.set()
        thread.join()


def test_a_model_that_is_not_loaded_has_no_tables(config):
    with pytest.raises(UnknownModelError, match=r"no loaded model has a table 'm\.t0'"):
        ParameterServer([MemoryStore()]).pooled_tables(config)


def test_a_closed_server_is_refused(config):
    server = serve(config, MemoryStore())
    tables = server.pooled_tables(config)
    batch = request(config, np.random.default_rng(9))
    tables.lookup_pooled(batch)
    server.close()

    with pytest.raises(UnknownModelError):
        tables.lookup_pooled(batch)


def test_weights_that_are_not_one_float32_per_key_are_refused_by_table(config):
    server = serve(config, MemoryStore())
    batch = request(config, np.random.default_rng(10))
    weights = [None, np.ones(batch.tables[1].keys.size + 1, np.float32), None, None]

    with pytest.raises(RequestError, match=r"table 'm\.t1': expected weights of float32"):
        server.pooled_tables(config).lookup_pooled(batch, weights)


def test_neighbours_of_the_same_size_and_of_another_get_memory_of_their_own(tmp_path):
    config = write_model(tmp_path / "m", [Sketch(3), Sketch(3), Sketch(5), Sketch(3), Sketch(16), Sketch(16)])
    server = serve(config, MemoryStore())
    batch = request(config, np.random.default_rng(11), samples=7, unknown_ratio=0.0)

    answer = server.pooled_tables(config).lookup_pooled(batch)

    assert_same(answer, one_by_one(server, config, batch))
    for place, part in enumerate(answer[0]):
        others = [vectors.tobytes() for vectors in answer[0][place + 1 :]]
        part[...] = np.nan
        assert [vectors.tobytes() for vectors in answer[0][place + 1 :]] == others


def test_an_empty_bag_is_zeros(config):
    server = serve(config, MemoryStore())
    empty = [TableKeys(np.empty(0, np.int64), np.zeros(table.slots + 1, np.int32)) for table in config.tables]

    batch = Batch(np.zeros((1, 0), np.float32), empty)
    embeddings, defaulted_keys, _ = server.pooled_tables(config).lookup_pooled(batch)

    assert defaulted_keys == 0
    assert not any(vectors.any() for vectors in embeddings)
