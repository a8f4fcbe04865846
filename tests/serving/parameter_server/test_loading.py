import json
import shutil
import threading
import time
from contextlib import closing, contextmanager
from unittest.mock import Mock

import numpy as np
import pytest

from kernels.host import lookup_threads, set_lookup_threads
from serving.config import read_inference_config, read_model_directory
from serving.config.row_dtypes import with_row_dtype
from serving.errors import (
    ConfigError,
    ModelFileError,
    StoreError,
    StoreFullError,
    StoreUnreachableError,
    UnknownModelError,
)
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer, TierSettings
from serving.parameter_server import models as served_models
from serving.storage import MemoryStore, RocksDbStore, TableSpec
from serving.storage.marker import Marker
from serving.storage.rocksdb.table import RocksDbTable
from tests.serving import small_server
from tests.serving.ps_files import listed
from tests.serving.small_server import HookedMemory

TABLE0 = TableSpec("dcn.table0", 4)


@pytest.fixture
def model(write_model):
    return write_model(write_model.table(rows=300), write_model.table(dim=6, rows=100))


def config_of(model, name="dcn"):
    return read_inference_config(model.config_file, name)


def assert_served(server, model, name="dcn"):
    for index, rows in enumerate(model.tables):
        answer, found = server.lookup(f"{name}.table{index}", np.array(list(rows), dtype=np.int64))
        assert found.all()
        assert answer.tobytes() == b"".join(row.tobytes() for row in rows.values())


def rocksdb(tmp_path, **options):
    return RocksDbStore(tmp_path / "db", num_threads=1, **options)


def test_a_memory_tier_holds_every_row_of_every_table(model):
    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config_of(model))

        assert_served(server, model)
        assert server.models() == (server.model("dcn"),)


def test_memory_alone_that_is_too_small_is_refused_before_anything_is_loaded(model):
    store = MemoryStore(capacity_rows=350)
    with ParameterServer([store]) as server:
        with pytest.raises(
            StoreFullError, match=r"'dcn\.table0': the model file has 300 rows, but there is room for 262"
        ) as caught:
            server.load_model(config_of(model))

        assert "capacity_rows" in str(caught.value)
        assert not store.tables
        assert server.models() == ()
        assert server.counters() == {}


def test_a_model_beyond_the_available_memory_is_refused_and_loads_once_there_is_memory(model, monkeypatch):
    with ParameterServer([MemoryStore()]) as server:
        with monkeypatch.context() as patch:
            patch.setattr("kernels.system_memory._SMALL_BYTES", 0)
            patch.setattr("kernels.system_memory.available_memory_bytes", lambda: 10_000)
            with pytest.raises(
                StoreError, match=r"needed, but 10,000 are available; bound .* volatile_db\.capacity_bytes"
            ):
                server.load_model(config_of(model))
        assert server.models() == ()

        server.load_model(config_of(model))

        assert_served(server, model)


def test_memory_that_is_just_large_enough_is_not_refused(model):
    with ParameterServer([MemoryStore(capacity_rows=400)]) as server:
        server.load_model(config_of(model))

        assert_served(server, model)


def test_models_that_are_announced_together_share_memory_in_proportion_to_their_rows(model, tmp_path):
    memory = MemoryStore(capacity_rows=80)
    first, second, late = (config_of(model).model_copy(update={"name": name}) for name in ("one", "two", "late"))
    with ParameterServer([memory, rocksdb(tmp_path)]) as server:
        server.share_bounds([first, second])
        for config in (first, second, late):
            server.load_model(config)

        rows = [[memory.tables[f"{name}.table{n}"].count() for n in (0, 1)] for name in ("one", "two", "late")]
        np.testing.assert_allclose(rows, [[30, 10], [30, 10], [0, 0]], atol=1.5)
        assert np.sum(rows[:2]) == 80


def test_tables_that_keep_the_names_of_an_earlier_release_get_one_share_of_the_memory(model, tmp_path):
    memory = MemoryStore(capacity_rows=80)
    earlier = config_of(model).model_copy(update={"version": 7, "table_tag": "7"})
    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(earlier)
    kept = earlier.model_copy(update={"table_tag": "7-0123abcd"})
    other = config_of(model, "other")
    with ParameterServer([memory, rocksdb(tmp_path)]) as server:
        server.share_bounds([kept, other])
        for config in (kept, other):
            server.load_model(config)

        rows = [[memory.tables[f"{name}.table{n}"].count() for n in (0, 1)] for name in ("dcn@7", "other")]
        np.testing.assert_allclose(rows, [[30, 10], [30, 10]], atol=1.5)


def test_a_load_that_fails_gives_its_share_of_the_memory_back(model, tmp_path):
    memory = MemoryStore(capacity_rows=80)
    folder = shutil.copytree(model.config_file.parent, tmp_path / "failing")
    failing = read_inference_config(folder / model.config_file.name, "failing")
    with ParameterServer([memory, rocksdb(tmp_path)]) as server:
        server.share_bounds([failing])
        shutil.rmtree(folder)
        with pytest.raises(ModelFileError):
            server.load_model(failing)

        server.load_model(config_of(model))

        assert sum(table.count() for table in memory.tables.values()) == 80


def test_announcing_a_model_whose_file_is_missing_is_refused_and_announces_nothing(model):
    config = config_of(model)
    gone = config.tables[1].model_copy(update={"file": config.tables[1].file.parent / "gone"})
    memory = MemoryStore(capacity_rows=400)
    with ParameterServer([memory]) as server:
        with pytest.raises(ModelFileError, match="gone"):
            server.share_bounds([config, config.model_copy(update={"name": "b", "tables": (gone,)})])

        server.load_model(config)

        assert [memory.tables[f"dcn.table{index}"].capacity_rows for index in range(2)] == [300, 100]


def test_before_a_durable_tier_memory_takes_the_first_rows_that_fit(model, tmp_path):
    memory = MemoryStore(capacity_rows=320)
    with ParameterServer([memory, rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))

        assert [memory.tables["dcn.table0"].count(), memory.tables["dcn.table1"].count()] == [239, 81]
        assert_served(server, model)
        assert server.counters()["dcn.table1"].hits == {"memory": 81, "rocksdb": 19}


def test_a_row_that_does_not_fit_the_row_type_is_refused_at_loading_wherever_it_would_lie(model, tmp_path):
    config = config_of(model)
    rows = np.ones((10, 4), dtype=np.float32)
    rows[8, 2] = 70000.0
    write_sparse_directory(tmp_path / "t", np.arange(10), rows)
    change = {"file": tmp_path / "t", "row_dtype": "fp16"}
    config = config.model_copy(update={"tables": (config.tables[0].model_copy(update=change),)})
    for capacity_rows in (None, 3, 9):
        with ParameterServer([MemoryStore(capacity_rows), rocksdb(tmp_path)]) as server:
            with pytest.raises(StoreError, match="of key 8: column 2 is 70000, which fp16 rows cannot hold"):
                server.load_model(config)
            assert not server.models()


def test_a_durable_tier_keeps_float32_whatever_the_row_type(model, tmp_path):
    config = config_of(model)
    narrow = [table.model_copy(update={"row_dtype": "int8"}) for table in config.tables]
    with ParameterServer([MemoryStore(capacity_rows=320), rocksdb(tmp_path)]) as server:
        server.load_model(config.model_copy(update={"tables": tuple(narrow)}))
        assert server.counters().keys() == {"dcn.table0", "dcn.table1"}
    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(config)

        assert_served(server, model)


def test_a_durable_tier_is_not_loaded_again_from_the_same_files(model, tmp_path, monkeypatch):
    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))
    monkeypatch.setattr(RocksDbTable, "load", lambda *_, **__: pytest.fail("loaded again"))

    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))

        assert_served(server, model)


def test_a_durable_tier_is_loaded_again_from_other_files_even_of_another_dimension(write_model, tmp_path):
    old = write_model(write_model.table(dim=4), folder="old")
    new = write_model(write_model.table(dim=8), folder="new", seed=1)
    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(config_of(old))
    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(config_of(new))

        assert_served(server, new)


def test_a_read_only_durable_tier_must_already_hold_the_same_rows(write_model, tmp_path):
    old, new = write_model(folder="old"), write_model(folder="new", seed=1)
    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(config_of(old))
    with ParameterServer([rocksdb(tmp_path, read_only=True)]) as server:
        server.load_model(config_of(old))
        assert_served(server, old)
    with ParameterServer([rocksdb(tmp_path, read_only=True)]) as server, pytest.raises(StoreError, match="read-only"):
        server.load_model(config_of(new))


@pytest.mark.parametrize("stores", ["memory", "both"])
def test_a_model_that_fails_to_load_leaves_the_server_without_it(write_model, tmp_path, stores):
    good, bad = write_model(folder="good"), write_model(write_model.table(), write_model.table(), folder="bad", seed=1)
    damaged = bad.config_file.with_name("1_sparse_10.model")
    content = bytearray(damaged.read_bytes())
    content[:8] = (2**63 - 1).to_bytes(8, "little")
    damaged.write_bytes(content)
    memory = MemoryStore()
    with ParameterServer([memory] if stores == "memory" else [memory, rocksdb(tmp_path)]) as server:
        server.load_model(config_of(good, "good"))

        with pytest.raises(ModelFileError, match=r"1_sparse_10\.model: row 0"):
            server.load_model(config_of(bad, "bad"))

        assert memory.tables["good.table0"].capacity_rows
        assert "bad.table0" not in memory.tables
        assert_served(server, good, "good")
        with pytest.raises(UnknownModelError):
            server.lookup("bad.table0", np.array([0]))
        write_model(write_model.table(), write_model.table(), folder="bad", seed=1)
        server.load_model(config_of(bad, "bad"))
        assert_served(server, bad, "bad")


def test_a_tier_that_cannot_clear_up_after_a_load_that_failed_hides_no_error(write_model):
    class Silent(HookedMemory):
        is_silent = True

        def on_close(self, table):
            super().on_close(table)
            if self.is_silent:
                raise StoreError("memory", table.spec.name, "no answer")

    damaged = write_model(folder="damaged")
    file = damaged.config_file.with_name("0_sparse_10.model")
    file.write_bytes((2**63 - 1).to_bytes(8, "little") + file.read_bytes()[8:])

    store = Silent()
    with ParameterServer([store]) as server:
        with pytest.raises(ModelFileError, match=r"0_sparse_10\.model: row 0"):
            server.load_model(config_of(damaged))
        store.is_silent = False


def test_a_damaged_file_does_not_cost_a_durable_tier_the_rows_it_holds(write_model, tmp_path):
    old, damaged = write_model(folder="old"), write_model(folder="damaged", seed=1)
    file = damaged.config_file.with_name("0_sparse_10.model")
    file.write_bytes((2**63 - 1).to_bytes(8, "little") + file.read_bytes()[8:])
    durable = rocksdb(tmp_path)
    with ParameterServer([durable]) as server:
        server.load_model(config_of(old))
        server.unload_model("dcn")
        marker = durable.table(TABLE0).marker()

        with pytest.raises(ModelFileError, match="row 0: key"):
            server.load_model(config_of(damaged))

        assert marker == durable.table(TABLE0).marker()
        server.load_model(config_of(old))
        assert durable.tables["dcn.table0"].count() == 50


def test_a_missing_file_is_found_before_anything_is_opened(model):
    config_of(model).tables[1].file.unlink()
    memory = MemoryStore()
    with ParameterServer([memory]) as server, pytest.raises(ModelFileError, match=r"1_sparse_10\.model: no such file"):
        server.load_model(config_of(model))

    with ParameterServer([MemoryStore()]) as server:
        assert server.models() == ()


def test_a_model_is_not_loaded_twice(model):
    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config_of(model))

        with pytest.raises(ConfigError, match="model 'dcn' is already loaded, in version 0"):
            server.load_model(config_of(model))
        assert_served(server, model)


def test_two_versions_of_a_repositorys_model_are_loaded_side_by_side_in_every_tier(write_model, tmp_path):
    models = {version: write_model(folder=f"dcn/{version}", seed=version) for version in (1, 2)}
    for model in models.values():
        model.config_file.rename(model.config_file.with_name("graph.json"))
    memory, durable = MemoryStore(), rocksdb(tmp_path)
    with ParameterServer([memory, durable]) as server:
        for version in (1, 2):
            server.load_model(read_model_directory(tmp_path / "dcn" / str(version)))
        assert server.model("dcn").version == 2
        for version, model in models.items():
            assert_served(server, model, f"dcn@{version}")

        server.unload_model("dcn", 1)

        assert_served(server, models[2], "dcn@2")
        with pytest.raises(UnknownModelError, match="version 1"):
            server.model("dcn", 1)


def test_a_version_that_is_loaded_cannot_be_loaded_again(write_model, tmp_path):
    model = write_model(folder="dcn/1")
    model.config_file.rename(model.config_file.with_name("graph.json"))
    config = read_model_directory(tmp_path / "dcn" / "1")
    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config)

        with pytest.raises(ConfigError, match="model 'dcn' is already loaded, in version 1"):
            server.load_model(config)


def test_another_version_is_refused_even_if_its_tables_have_other_names(model):
    config = config_of(model)
    renamed = tuple(table.model_copy(update={"name": f"new_{table.name}"}) for table in config.tables)
    with ParameterServer([MemoryStore()]) as server:
        server.load_model(config)

        with pytest.raises(ConfigError, match="model 'dcn' is already loaded"):
            server.load_model(config.model_copy(update={"version": 2, "tables": renamed}))
        assert server.models() == (config,)


@pytest.mark.parametrize("is_erased", [False, True])
def test_an_unloaded_model_stays_in_durable_tiers_and_an_erased_one_in_none(model, tmp_path, is_erased):
    durable = rocksdb(tmp_path)
    with ParameterServer([MemoryStore(), durable]) as server:
        server.load_model(config_of(model))

        (server.erase_model if is_erased else server.unload_model)("dcn")

        assert server.models() == ()
        assert not any(store.tables for store in server.stores)
        assert (durable.table(TABLE0).marker() is None) == is_erased


def test_erasing_a_model_from_a_database_that_is_only_read_says_that_its_rows_stay(model, tmp_path):
    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))
    durable = rocksdb(tmp_path, read_only=True)
    with ParameterServer([MemoryStore(), durable]) as server:
        server.load_model(config_of(model))

        with pytest.raises(StoreError, match=r"'dcn\.table0': .* read-only.* its rows stay; a later erasure"):
            server.erase_model("dcn")

        assert server.models() == ()
        assert durable.table(TABLE0).marker() is not None


@pytest.fixture
def full_disk(monkeypatch):
    """A context in which RocksDB cannot drop a table."""

    @contextmanager
    def full_disk():
        with monkeypatch.context() as patch:
            full = StoreError("rocksdb", "dcn.table0", "No space left on device")
            patch.setattr("serving.storage.rocksdb.database.Database.drop_family", Mock(side_effect=full))
            with pytest.raises(StoreError, match="No space left on device; its rows stay; a later erasure"):
                yield

    return full_disk


def test_an_erasure_that_a_full_disk_stopped_is_ended_by_a_later_one(model, tmp_path, full_disk):
    with ParameterServer([MemoryStore(), durable := rocksdb(tmp_path)]) as server:
        for name in ("dcn", "other"):
            server.load_model(config_of(model, name))
        with full_disk():
            server.erase_model("dcn")

        server.erase_model("other")

        assert durable.kept_tables() == []


def test_an_erasure_that_failed_does_not_keep_tables_of_other_dimensions_out(write_model, tmp_path, full_disk):
    wide, narrow = (write_model(write_model.table(dim=dim), folder=f"of_{dim}") for dim in (6, 4))
    with ParameterServer([rocksdb(tmp_path)]) as server:
        server.load_model(config_of(wide))
        with full_disk():
            server.erase_model("dcn")

        server.load_model(config_of(narrow))

        assert_served(server, narrow)


@pytest.mark.parametrize("is_loaded_again", [False, True])
def test_an_erased_model_keeps_its_rows_in_the_last_tier_until_a_cache_that_did_not_answer_does(
    model, tmp_path, is_loaded_again
):
    class Silent(MemoryStore):
        is_silent = True

        def erase(self, table):
            if self.is_silent:
                raise StoreError("memory", table, "no answer")
            super().erase(table)

    durable, cache = rocksdb(tmp_path), Silent()
    with ParameterServer([cache, durable]) as server:
        server.load_model(config_of(model))

        with pytest.raises(StoreError, match=r"'dcn\.table0': no answer; its rows stay; a later erasure"):
            server.erase_model("dcn")

        assert server.models() == ()
        assert all(durable.tables[f"dcn.table{index}"].marker().current_caches == () for index in (0, 1))
        with pytest.raises(UnknownModelError):
            server.erase_model("dcn")

        cache.is_silent = False
        if is_loaded_again:
            server.load_model(config_of(model))
            server.unload_model("dcn")
        server.load_model(config_of(model, "other"))
        server.erase_model("other")
        assert sorted(durable.kept_tables()) == (["dcn.table0", "dcn.table1"] if is_loaded_again else [])


def test_changed_rows_outlive_the_server_and_fill_memory_at_the_next_start(model, tmp_path):
    memory, row = MemoryStore(), np.full((1, 4), 7.0, dtype=np.float32)
    changed, gone, *_ = (int(key) for key in model.tables[0])
    with ParameterServer([MemoryStore(), rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))
        server.insert("dcn.table0", np.array([changed]), row)
        server.evict("dcn.table0", np.array([gone]))

    with ParameterServer([memory, rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))

        rows, found = server.lookup("dcn.table0", np.array([changed, gone]))
        assert found.tolist() == [True, False]
        assert rows[0].tolist() == row[0].tolist()
        assert memory.tables["dcn.table0"].count() == 299


class Cache(RocksDbStore):
    """A durable store before another, as Redis is before RocksDB."""

    name = "cache"


def refuse_loads_of_cache(monkeypatch):
    load = RocksDbTable.load

    def refuse(table, *args, **named):
        assert not isinstance(table.store, Cache), "filled again"
        return load(table, *args, **named)

    monkeypatch.setattr(RocksDbTable, "load", refuse)


def cache(folder):
    return Cache(folder / "cache", num_threads=1)


def test_a_durable_cache_that_was_lost_is_filled_with_the_changed_rows_of_the_tier_behind_it(model, tmp_path):
    row = np.full((1, 4), 7.0, dtype=np.float32)
    changed, gone, *_ = (int(key) for key in model.tables[0])
    with ParameterServer([cache(tmp_path), rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))
        server.insert("dcn.table0", np.array([changed, 4711]), row.repeat(2, axis=0))
        server.evict("dcn.table0", np.array([gone]))
    shutil.rmtree(tmp_path / "cache")

    with ParameterServer([cache(tmp_path), rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))
        rows, found = server.lookup("dcn.table0", np.array([changed, 4711, gone]))
        assert server.counters()["dcn.table0"].hits == {"cache": 2}

    assert found.tolist() == [True, True, False]
    assert (rows[:2] == row).all()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_durable_cache_is_not_filled_again_with_the_changes_it_has(model, tmp_path, monkeypatch, is_shared):
    with ParameterServer([cache(tmp_path), rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))
        server.insert("dcn.table0", np.array([4711]), np.ones((1, 4), dtype=np.float32))
    if is_shared:  # another process's database has no changes
        shutil.rmtree(tmp_path / "db")
    refuse_loads_of_cache(monkeypatch)

    with ParameterServer([cache(tmp_path), rocksdb(tmp_path)]) as server:
        server.load_model(config_of(model))

        assert server.lookup("dcn.table0", np.array([4711]))[1].all()


def test_a_durable_cache_gets_no_rows_that_would_be_rounded_twice(model, tmp_path):
    def databases():
        return cache(tmp_path), RocksDbStore(tmp_path / "db", num_threads=1, row_dtype="int8")

    config = with_row_dtype(config_of(model), "int8", "test")
    keys = np.array(list(model.tables[0]), dtype=np.int64)
    with ParameterServer(databases()) as server:
        server.load_model(config)
        server.insert("dcn.table0", np.array([4711]), np.ones((1, 4), dtype=np.float32))
        expected, _ = server.lookup("dcn.table0", keys)
    shutil.rmtree(tmp_path / "cache")

    for _ in range(2):
        with ParameterServer(databases()) as server:
            server.load_model(config)
            assert server.lookup("dcn.table0", keys)[0].tobytes() == expected.tobytes()
            assert server.counters()["dcn.table0"].hits == {"rocksdb": 300}


class UnreachableStore(small_server.DurableDictStore):
    """A store that cannot be reached while it is down."""

    def fetch(self, table, keys, out):
        if self.is_down:
            raise StoreUnreachableError(self.name, table, "no route")
        return super().fetch(table, keys, out)


def wait_for_state(server, model, state):
    end = time.monotonic() + 60
    while server.health(model).readiness().state != state:
        assert time.monotonic() < end
        time.sleep(0.01)


class TestTiersThatAreNotInitialized:
    KEPT = TierSettings(fills_at_start=False)

    def test_memory_starts_empty_and_is_filled_by_promotion(self, model, tmp_path):
        memory = MemoryStore()
        settings = {"memory": self.KEPT}
        with ParameterServer([memory, rocksdb(tmp_path)], promote=True, settings=settings) as server:
            server.load_model(config_of(model))
            assert memory.tables["dcn.table0"].count() == 0

            assert_served(server, model)
            assert server.wait_for_promotions(60)

            assert [memory.tables["dcn.table0"].count(), memory.tables["dcn.table1"].count()] == [300, 100]
            assert_served(server, model)
            assert server.counters()["dcn.table0"].hits == {"memory": 300, "rocksdb": 300}

    def test_a_database_is_served_as_it_is_and_fills_memory(self, model, write_model, tmp_path, monkeypatch):
        other = write_model(write_model.table(rows=300), write_model.table(dim=6, rows=100), folder="other", seed=1)
        keys = np.array(list(model.tables[0]), dtype=np.int64)
        with ParameterServer([rocksdb(tmp_path)]) as server:
            server.load_model(config_of(model))
        monkeypatch.setattr(RocksDbTable, "load", lambda *_, **__: pytest.fail("loaded"))

        memory = MemoryStore()
        with ParameterServer([memory, rocksdb(tmp_path)], settings={"rocksdb": self.KEPT}) as server:
            server.load_model(config_of(other))

            assert_served(server, model)  # and not the rows of the files
            assert memory.tables["dcn.table0"].count() == np.isin(keys, list(other.tables[0])).sum() > 0

    @pytest.mark.parametrize("read_only", [False, True])
    def test_a_database_keeps_its_rows_when_as_many_keys_are_evicted_that_it_never_had(
        self, model, tmp_path, read_only
    ):
        with ParameterServer([rocksdb(tmp_path)]) as server:
            server.load_model(config_of(model))
            absent = np.setdiff1d(np.arange(1000), list(model.tables[0]))
            server.evict("dcn.table0", absent)

        stores = [rocksdb(tmp_path, read_only=read_only)]
        with ParameterServer(stores, settings={"rocksdb": self.KEPT}) as server:
            server.load_model(config_of(model))

            assert_served(server, model)

    def test_a_cache_that_is_not_used_has_no_outage(self, tmp_path, monkeypatch):
        monkeypatch.setattr(served_models, "WATCH_INTERVAL_S", 0.01)
        stale = small_server.write_model(tmp_path)
        current = stale.model_copy(update={"name": "current"})
        cache, truth = UnreachableStore("cache"), small_server.DurableDictStore("truth")
        small_server.serve(stale, truth).load_model(current)
        cache.rows, cache.markers = {table: dict(rows) for table, rows in truth.rows.items()}, dict(truth.markers)
        truth.tables["m.t"].write_flags(current_caches=())
        truth.tables["current.t"].write_flags(current_caches=(cache.identity,))

        with small_server.serve(stale, cache, truth, settings={"cache": self.KEPT}) as server:
            server.load_model(current)
            cache.is_down = True
            wait_for_state(server, "current", "degraded")
            cache.is_down = False
            wait_for_state(server, "current", "ready")

            assert server.health("m").readiness().state == "ready"

    @pytest.mark.parametrize("digest", ["another digest", None])
    def test_a_durable_cache_is_filled_once_from_a_database_that_is_served_as_it_is(
        self, model, write_model, tmp_path, monkeypatch, digest
    ):
        other = write_model(write_model.table(rows=300), write_model.table(dim=6, rows=100), folder="other", seed=1)
        with closing(rocksdb(tmp_path)) as database:
            for index, rows in enumerate(model.tables):
                spec = TableSpec(f"dcn.table{index}", 4 + 2 * index)
                batch = np.array(list(rows), dtype=np.int64), np.stack(list(rows.values()))
                if digest is None:
                    database.table(spec).open(0)
                    database.tables[spec.name].insert(*batch)
                else:
                    database.table(spec).load(iter([batch]), Marker(digest), keep=False)

        for _ in range(2):
            stores = cache(tmp_path), rocksdb(tmp_path)
            with ParameterServer(stores, settings={"rocksdb": self.KEPT}) as server:
                server.load_model(config_of(other))
                assert_served(server, model)
                assert server.counters()["dcn.table0"].hits == {"cache": 300}
            refuse_loads_of_cache(monkeypatch)

    def test_a_database_without_the_table_is_refused(self, model, tmp_path):
        with ParameterServer([MemoryStore(), rocksdb(tmp_path)], settings={"rocksdb": self.KEPT}) as server:
            with pytest.raises(StoreError, match=r"'dcn\.table0'.*has no rows, and initialize_after_startup is false"):
                server.load_model(config_of(model))
            assert server.models() == ()

    def test_a_durable_cache_before_another_may_start_empty(self, model, tmp_path):
        stores = cache(tmp_path), rocksdb(tmp_path)
        with ParameterServer(stores, promote=True, settings={"cache": self.KEPT}) as server:
            server.load_model(config_of(model))

            for hits in ({"rocksdb": 300}, {"cache": 300, "rocksdb": 300}):
                assert_served(server, model)
                assert server.wait_for_promotions(60)
                assert server.counters()["dcn.table0"].hits == hits


class TestFromConfig:
    @pytest.fixture
    def ps_file(self, model, tmp_path):
        document = {
            "supportlonglong": True,
            "models": [listed(model.config_file, gpucache=False)],
            "volatile_db": {"type": "hash_map", "capacity_rows": 100},
            "persistent_db": {"type": "rocks_db", "path": "ps_db", "num_threads": 1},
        }

        def write(change=lambda document: None):
            change(document)
            (tmp_path / "ps.json").write_text(json.dumps(document))
            return tmp_path / "ps.json"

        return write

    def test_the_tiers_of_a_ps_json_are_opened_and_its_models_loaded(self, model, ps_file):
        with ParameterServer.from_config(ps_file()) as server:
            assert [store.name for store in server.stores] == ["memory", "rocksdb"]
            assert_served(server, model)
            assert server.counters()["dcn.table0"].hits == {"memory": 74, "rocksdb": 226}

    def test_a_ps_json_says_how_its_tiers_are_filled_and_how_long_they_are_waited_for(self, model, ps_file):
        def change(document):
            document["volatile_db"] |= {"cache_missed_embeddings": True, "initialize_after_startup": False}
            document["persistent_db"]["timeout_ms"] = 60_000

        with ParameterServer.from_config(ps_file(change)) as server:
            assert server.stores[0].tables["dcn.table0"].count() == 0
            assert_served(server, model)
            assert server.wait_for_promotions(60)
            assert server.stores[0].tables["dcn.table0"].count() == 74
            assert "hotrow-rocksdb" in {thread.name for thread in threading.enumerate()}

    @pytest.mark.parametrize(("disabled", "left"), [("volatile_db", ["rocksdb"]), ("persistent_db", ["memory"])])
    def test_a_disabled_tier_is_not_opened(self, model, ps_file, disabled, left):
        def change(document):
            document["volatile_db"] = {"type": "hash_map"}
            document[disabled] = {"type": "disabled"}

        with ParameterServer.from_config(ps_file(change)) as server:
            assert [store.name for store in server.stores] == left
            assert_served(server, model)

    @pytest.mark.parametrize("tier", ["hash_map", "snapshot"])
    def test_the_threads_of_a_lookup_are_set_for_the_process(self, ps_file, tier, tmp_path):
        own = {"path": str(tmp_path / "snapshots")} if tier == "snapshot" else {}

        def change(document):
            document["volatile_db"] = {"type": tier, "lookup_threads": 7, **own}
            document["persistent_db"] = {"type": "disabled"}

        before = lookup_threads()
        try:
            with ParameterServer.from_config(ps_file(change)):
                assert lookup_threads() == 7
        finally:
            set_lookup_threads(before)

    def test_a_model_that_cannot_be_loaded_closes_what_was_opened(self, ps_file, tmp_path):
        file = ps_file()
        (tmp_path / "model" / "1_sparse_10.model").unlink()

        with pytest.raises(ModelFileError):
            ParameterServer.from_config(file)

        RocksDbStore(tmp_path / "ps_db", num_threads=1).close()  # its lock is free
