"""`hotrow dump` and `hotrow load`: between files of each format and the tiers of a ps.json."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kernels.host import round_rows
from serving import dump_table, load_table
from serving.cli.main import main
from serving.config import read_repository
from serving.dumps import transfer
from serving.dumps.formats import open_dump, write_dump
from serving.errors import ConfigError, ModelFileError, OutputError, StoreError
from serving.model.sparse_writer import write_table_folders
from serving.parameter_server import ParameterServer
from serving.storage import MemoryStore, RocksDbStore, TableSpec
from serving.storage.marker import Marker
from serving.storage.redis.table import RedisTable
from serving.storage.rocksdb.engine import import_rocksdict, table_options
from tests.serving.table_names import full_name
from tests.tools import warm
from tests.tools.tiny_model import TinyModel
from tests.tools.warm import Warm

MODEL = TinyModel(rows=300)
USER, ITEM = full_name(MODEL, "user"), full_name(MODEL, "item")
SPEC = TableSpec(USER, 4)
FORMATS = ["t.sst", "t.bin", "t"]
ROCKSDB = {"volatile_db": {"type": "disabled"}, "persistent_db": {"type": "rocks_db", "path": "rows", "num_threads": 1}}
SNAPSHOTS = {"volatile_db": {"type": "snapshot", "path": "snapshots"}}
# Each store alone, and all together: tiers do not see the format of a file.
TIERS = ["rocksdb", "redis", "redis_cluster", "ram, redis and rocksdb"]
TIERS_AND_FORMATS = list(zip(TIERS, ["t.bin", "t", "t.sst", "t.sst"], strict=True))
IN_FRONT = {"volatile_db": {"type": "hash_map"}, "persistent_db": ROCKSDB["persistent_db"]}


@pytest.fixture
def write_ps(tmp_path):
    """Write the model as ``tiny``, and a ps.json of these tiers; the ps.json."""
    folder = tmp_path / "models"

    def write(model=MODEL, **tiers):
        if not folder.exists():
            model.write(folder, "tiny")
        document = {"supportlonglong": model.key_type == "I64", "models": [], **tiers}
        (folder / "ps.json").write_text(json.dumps(document))
        return folder / "ps.json"

    return write


@pytest.fixture(params=TIERS)
def tiers(request):
    """The clauses of a ps.json for each tier that outlives the process, and for two together behind RAM."""
    clauses = dict(ROCKSDB) if "rocksdb" in request.param else {}
    if request.param == "redis_cluster":
        return {"volatile_db": redis_tier(request.getfixturevalue("redis_cluster").nodes[0])}
    if "redis" in request.param:
        clauses["volatile_db"] = redis_tier(request.getfixturevalue("redis_server"))
    if "ram" in request.param:
        clauses["volatile_db"] = [{"type": "hash_map", "capacity_rows": 100}, clauses["volatile_db"]]
    return clauses


def redis_tier(server):
    return {"type": "redis_cluster", "address": "{}:{}".format(*server.address), "timeout_ms": 10_000}


@contextlib.contextmanager
def held_elsewhere(database):
    """Let another process hold the database open for writing."""
    program = "import sys; from serving.storage import RocksDbStore as Store; store = Store(sys.argv[1])"
    with Warm("-c", f"{program}; print(1, flush=True); sys.stdin.read()", database) as process:
        assert process.stdout.readline() == "1\n"
        yield


def rows_of_model(table="user", model=MODEL):
    return dict(enumerate(model.vectors(table).tolist()))


def rows_of_file(path, spec=SPEC):
    with open_dump(path, spec, "user") as dump:
        batches = list(dump.batches(64))
    return {key: row for keys, rows in batches for key, row in zip(keys.tolist(), rows.tolist(), strict=True)}


def write_rows(path, rows, spec=SPEC):
    keys, vectors = np.array(list(rows), np.int64), np.array(list(rows.values()), np.float32).reshape(-1, spec.dim)
    write_dump(path, spec, iter([(keys, vectors)]), in_key_order=False)
    return path


def served(ps, table=USER, extra=()):
    """What a parameter server answers for the model's keys and ``extra`` keys: rows by key, and the hits by tier."""
    keys = np.array([*range(MODEL.rows), *extra])
    with ParameterServer.from_config(read_repository(ps)) as server:
        rows, found = server.lookup(table, keys)
        hits = dict(server.counters()[table].hits)
    return dict(zip(keys[found].tolist(), rows[found].tolist(), strict=True)), hits


@pytest.mark.parametrize(("tiers", "name"), TIERS_AND_FORMATS, indirect=["tiers"])
def test_what_was_dumped_is_loaded_and_served_again(write_ps, tiers, tmp_path, name):
    ps = write_ps(**tiers)
    ParameterServer.from_config(read_repository(ps)).close()

    assert dump_table(ps, "tiny.user", tmp_path / name) == MODEL.rows
    assert rows_of_file(tmp_path / name) == rows_of_model()
    changed = {key: [value * 2 for value in row] for key, row in rows_of_model().items() if key % 3} | {7777: [1.0] * 4}
    write_rows(tmp_path / f"changed_{name}", changed)

    assert load_table(ps, "tiny.user", tmp_path / f"changed_{name}") == len(changed)
    assert served(ps, extra=[7777])[0] == rows_of_model() | changed
    assert load_table(ps, "tiny.user", tmp_path / f"changed_{name}", replace=True) == len(changed)
    assert served(ps, extra=[7777])[0] == changed
    assert load_table(ps, "tiny.user", tmp_path / name) == MODEL.rows
    assert served(ps, extra=[7777])[0] == changed | rows_of_model()
    assert served(ps, ITEM)[0] == rows_of_model("item")


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), key_bytes=st.sampled_from([4, 8]))
def test_files_of_all_formats_and_stores_hold_the_same_rows(tmp_path_factory, data, key_bytes):
    largest = 2**32 - 1 if key_bytes == 4 else 2**63 - 3
    smallest = 0 if key_bytes == 4 else -(2**63) + 2
    edges = st.sampled_from([smallest, 0, 1, 255, 256, 65536, largest])
    drawn = st.dictionaries(edges | st.integers(smallest, largest), st.floats(width=32, allow_nan=False), min_size=1)
    rows = {key: [value] * 4 for key, value in data.draw(drawn).items()}
    spec, folder = TableSpec(USER, 4, key_bytes), tmp_path_factory.mktemp("formats")
    path = write_rows(folder / "first.bin", rows, spec)

    for number, name in enumerate(data.draw(st.permutations(["sst", "folder", "bin", "rocksdb", "memory"]))):
        with open_dump(path, spec, "t") as dump:
            batches = dump.batches(data.draw(st.integers(1, 50)))
            if name in ("rocksdb", "memory"):
                store = RocksDbStore(folder / "db", num_threads=1) if name == "rocksdb" else MemoryStore()
                store.table(spec).open(dump.rows)
                for keys, vectors in batches:
                    store.tables[spec.name].insert(keys, vectors)
                batches = store.tables[spec.name].items(7)
            path = folder / (f"{number}" if name == "folder" else f"{number}.{'sst' if name == 'sst' else 'bin'}")
            write_dump(path, spec, batches, in_key_order=name == "rocksdb")

    assert rows_of_file(path, spec) == rows


@pytest.mark.parametrize("tier", [{"type": "hash_map"}, SNAPSHOTS["volatile_db"]], ids=["memory", "snapshot"])
def test_a_tier_that_ends_with_its_process_is_dumped_as_it_holds_the_rows(write_ps, tmp_path, tier):
    ps = write_ps(volatile_db=tier | {"row_dtype": "int8"})
    expected = MODEL.vectors("user")
    round_rows(expected, "int8", expected)

    dump_table(ps, "tiny.user", tmp_path / "t.bin")
    with ParameterServer.from_config(read_repository(ps)) as server:
        dump_table(server, USER, tmp_path / "live.bin")

    assert rows_of_file(tmp_path / "t.bin") == rows_of_file(tmp_path / "live.bin") == dict(enumerate(expected.tolist()))


def test_a_running_server_is_dumped_with_what_came_since_it_started(write_ps, tmp_path):
    with ParameterServer.from_config(read_repository(write_ps())) as server:
        server.stores[0].tables[USER].insert(np.array([5, 999]), np.full((2, 4), 2.5, np.float32))

        assert dump_table(server, USER, tmp_path / "t.bin") == MODEL.rows + 1

    assert rows_of_file(tmp_path / "t.bin") == rows_of_model() | {5: [2.5] * 4, 999: [2.5] * 4}


def test_a_table_is_dumped_while_others_serve_it(write_ps, tmp_path, redis_server):
    for number, tiers in enumerate((IN_FRONT, {"volatile_db": redis_tier(redis_server)})):
        ps = write_ps(**tiers)
        with ParameterServer.from_config(read_repository(ps)) as server:
            server.stores[-1].tables[USER].insert(np.array([5]), np.full((1, 4), 2.5, np.float32))

            dump_table(ps, "tiny.user", tmp_path / f"{number}.bin")

        assert rows_of_file(tmp_path / f"{number}.bin") == rows_of_model() | {5: [2.5] * 4}


def test_ram_in_front_starts_with_the_rows_that_were_loaded_and_not_with_the_files(write_ps, tmp_path):
    ps = write_ps(**IN_FRONT)
    assert served(ps)[1] == {"memory": MODEL.rows}
    changes = {key: [0.5] * 4 for key in range(0, 300, 7)}

    load_table(ps, "tiny.user", write_rows(tmp_path / "t.bin", changes))

    assert served(ps) == (rows_of_model() | changes, {"memory": MODEL.rows})
    load_table(ps, "tiny.user", tmp_path / "t.bin", replace=True)
    assert served(ps) == (changes, {"memory": len(changes)})


def test_a_cache_that_a_replacement_did_not_reach_is_filled_from_the_last_tier(
    write_ps, tmp_path, redis_server, monkeypatch
):
    ps = write_ps(volatile_db=redis_tier(redis_server), persistent_db=ROCKSDB["persistent_db"])
    load_table(ps, "tiny.user", write_rows(tmp_path / "t.bin", {5: [0.5] * 4}))

    def lose(*_, **__):
        raise StoreError("redis", USER, "lost")

    with monkeypatch.context() as patch:
        patch.setattr(RedisTable, "load", lose)
        with pytest.raises(StoreError, match="lost"):
            load_table(ps, "tiny.user", write_rows(tmp_path / "t.bin", {7: [1.5] * 4}), replace=True)

    assert served(ps) == ({7: [1.5] * 4}, {"redis": 1})


LOAD_AND_DIE = """
import os, signal, sys
from serving.dumps import transfer
from serving.storage import RocksDbStore
from serving.storage.redis.table import RedisTable

target, name = {"redis": (RedisTable, "insert"), "rocksdb": (RocksDbStore, "write")}[sys.argv[1]]
ps, file, when = *sys.argv[2:4], int(sys.argv[4])
write, calls = getattr(target, name), []

def die(*given):
    calls.append(1)
    if len(calls) == when:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*given)

setattr(target, name, die)
transfer.LOAD_BATCH_ROWS = 100
transfer.load_table(ps, "tiny.user", file)
"""


@pytest.mark.parametrize(("store", "when"), [("redis", 1), ("redis", 3), ("rocksdb", 2)])
def test_after_a_load_that_was_killed_redis_has_what_rocksdb_has(write_ps, tmp_path, redis_server, store, when):
    ps = write_ps(volatile_db=redis_tier(redis_server), persistent_db=ROCKSDB["persistent_db"])
    load_table(ps, "tiny.user", write_rows(tmp_path / "one.bin", dict.fromkeys(range(300), [1.0] * 4)))
    file = write_rows(tmp_path / "two.bin", dict.fromkeys(range(300), [2.0] * 4))

    died = warm.run("-c", LOAD_AND_DIE, store, ps, file, when, timeout=60)

    assert died.returncode == -signal.SIGKILL
    dump_table(ps, "tiny.user", tmp_path / "held.bin")
    taken = 100 * (when if store == "redis" else when - 1)
    expected = {key: [2.0 if key < taken else 1.0] * 4 for key in range(300)}
    assert rows_of_file(tmp_path / "held.bin") == expected
    assert served(ps) == (expected, {"redis": 300})


def test_a_load_succeeds_without_room_in_redis_and_fills_it_at_the_next_start(write_ps, tmp_path, redis_server, client):
    ps = write_ps(volatile_db=redis_tier(redis_server), persistent_db=ROCKSDB["persistent_db"])
    load_table(ps, "tiny.user", write_rows(tmp_path / "one.bin", dict.fromkeys(range(300), [1.0] * 4)))
    client.config_set("maxmemory", 1)
    try:
        load_table(ps, "tiny.user", write_rows(tmp_path / "two.bin", dict.fromkeys(range(300), [2.0] * 4)))
    finally:
        client.config_set("maxmemory", 0)

    dump_table(ps, "tiny.user", tmp_path / "held.bin")
    expected = dict.fromkeys(range(300), [2.0] * 4)
    assert rows_of_file(tmp_path / "held.bin") == expected
    assert served(ps) == (expected, {"redis": 300})


def test_a_load_succeeds_if_redis_refuses_a_part_and_redis_is_filled_at_the_next_start(
    write_ps, tmp_path, redis_server, monkeypatch
):
    ps = write_ps(volatile_db=redis_tier(redis_server), persistent_db=ROCKSDB["persistent_db"])
    monkeypatch.setattr(transfer, "LOAD_BATCH_ROWS", 100)
    insert, calls = RedisTable.insert, []

    def refuse_the_second(*given):
        calls.append(1)
        if len(calls) == 2:
            raise StoreError("redis", USER, "lost")
        insert(*given)

    with monkeypatch.context() as patch:
        patch.setattr(RedisTable, "insert", refuse_the_second)
        load_table(ps, "tiny.user", write_rows(tmp_path / "t.bin", dict.fromkeys(range(300), [2.0] * 4)))

    assert len(calls) == 2  # and no more: Redis is bypassed
    assert served(ps) == (dict.fromkeys(range(300), [2.0] * 4), {"redis": 300})


def test_rows_that_were_replaced_and_then_changed_stay_changed(write_ps, tmp_path, redis_server):
    for tiers in ({"volatile_db": redis_tier(redis_server) | {"row_dtype": "int8"}}, ROCKSDB):
        ps = write_ps(**tiers)
        load_table(ps, "tiny.user", write_rows(tmp_path / "t.bin", {7: [1.5] * 4}), replace=True)
        with ParameterServer.from_config(read_repository(ps)) as server:
            server.insert(USER, np.array([8]), np.full((1, 4), 2.5, np.float32))
            assert server.stores[0].tables[USER].marker().changed

        assert served(ps)[0] == {7: [1.5] * 4, 8: [2.5] * 4}


def test_shared_memory_is_dumped_as_it_is_while_a_process_has_it_and_then_as_the_file_is(write_ps, tmp_path):
    name = f"hotrow_test_{secrets.token_hex(4)}"
    ps = write_ps(volatile_db={"type": "multi_process_hash_map", "shared_memory_name": name, "row_dtype": "int8"})
    rounded = MODEL.vectors("user")
    round_rows(rounded, "int8", rounded)
    expected = dict(enumerate(rounded.tolist()))
    with ParameterServer.from_config(read_repository(ps)) as server:
        server.insert(USER, np.array([5]), np.zeros((1, 4), np.float32))

        dump_table(ps, "tiny.user", tmp_path / "served.bin")
    dump_table(ps, "tiny.user", tmp_path / "later.bin")

    assert rows_of_file(tmp_path / "served.bin") == expected | {5: [0.0] * 4}
    assert rows_of_file(tmp_path / "later.bin") == expected


def test_shared_memory_that_was_left_behind_is_filled_again_after_a_load(write_ps, tmp_path):
    name = f"hotrow_test_{secrets.token_hex(4)}"
    clause = {"type": "multi_process_hash_map", "shared_memory_name": name, "shared_memory_auto_remove": False}
    ps = write_ps(volatile_db=clause, persistent_db=ROCKSDB["persistent_db"])
    with ParameterServer.from_config(read_repository(ps)) as server:
        server.insert(USER, np.array([5]), np.full((1, 4), 2.5, np.float32))

    load_table(ps, "tiny.user", write_rows(tmp_path / "t.bin", {5: [0.5] * 4}))
    assert served(ps) == (rows_of_model() | {5: [0.5] * 4}, {"shared_memory": MODEL.rows})
    load_table(ps, "tiny.user", tmp_path / "t.bin", replace=True)
    assert served(ps)[0] == {5: [0.5] * 4}
    ps = write_ps(volatile_db=clause)
    with pytest.raises(ConfigError, match="no tier outlives the process"):
        load_table(ps, "tiny.user", tmp_path / "t.bin")
    write_ps(volatile_db=clause | {"shared_memory_auto_remove": True})
    served(ps)


def test_a_running_server_takes_the_rows_of_a_file_into_every_tier(write_ps, tmp_path):
    changes = {5: [0.5] * 4, 7777: [1.5] * 4}
    path = write_rows(tmp_path / "t.bin", changes)
    ps = write_ps(**IN_FRONT)
    with ParameterServer.from_config(read_repository(ps)) as server:
        assert load_table(server, USER, path) == 2

        for store in server.stores:
            out = np.empty((2, 4), np.float32)
            assert store.tables[USER].fetch(np.array(list(changes)), out).all()
            assert out.tolist() == list(changes.values())
        with pytest.raises(ValueError, match="cannot be replaced, only changed"):
            load_table(server, USER, path, replace=True)
    assert served(ps, extra=[7777])[0] == rows_of_model() | changes


def test_rows_that_a_running_server_was_given_are_in_ram_after_a_restart(write_ps):
    ps = write_ps(**IN_FRONT)
    with ParameterServer.from_config(read_repository(ps)) as server:
        server.insert(USER, np.array([5]), np.full((1, 4), 2.5, np.float32))
        server.evict(USER, np.array([6]))

    expected = rows_of_model() | {5: [2.5] * 4}
    del expected[6]
    assert served(ps) == (expected, {"memory": MODEL.rows - 1})


def test_a_tier_that_is_not_to_be_initialized_is_not_loaded_with_the_model_either(write_ps, tmp_path):
    path = write_rows(tmp_path / "t.bin", {5: [0.5] * 4})
    ps = write_ps(**IN_FRONT | {"persistent_db": ROCKSDB["persistent_db"] | {"initialize_after_startup": False}})

    with pytest.raises(StoreError, match="initialize_after_startup is false"):
        load_table(ps, "tiny.user", path)
    load_table(ps, "tiny.user", path, replace=True)

    assert dump_table(ps, "tiny.user", tmp_path / "again.bin") == 1


def test_a_model_that_was_never_loaded_is_loaded_before_the_rows_of_a_file(write_ps, tiers, tmp_path):
    ps = write_ps(**tiers)

    load_table(ps, "tiny.user", write_rows(tmp_path / "t.bin", {5: [0.5] * 4}))

    assert served(ps)[0] == rows_of_model() | {5: [0.5] * 4}


def test_other_model_files_replace_rows_that_were_loaded(write_ps, tiers, tmp_path):
    ps = write_ps(**tiers)
    load_table(ps, "tiny.user", write_rows(tmp_path / "t.bin", {5: [0.5] * 4}))
    newer = TinyModel(rows=300, seed=1)
    shutil.rmtree(ps.parent / "tiny" / "1")
    newer.write(ps.parent, "tiny")

    assert served(ps, full_name(newer, "user"))[0] == rows_of_model(model=newer)


@pytest.mark.parametrize(("tiers", "name"), [*TIERS_AND_FORMATS, (TIERS[-1], "reserved.bin")], indirect=["tiers"])
def test_a_damaged_file_is_refused_before_a_row_is_touched(write_ps, tiers, tmp_path, name):
    ps = write_ps(**tiers)
    ParameterServer.from_config(read_repository(ps)).close()
    path = write_rows(tmp_path / name, {key: [0.5] * 4 for key in range(20_000)})
    spoilt = path / "key" if name == "t" else path
    content = bytearray(spoilt.read_bytes())
    if name == "t.bin":
        content = content[:-1]
    elif name == "t.sst":
        content[len(content) // 2] ^= 1
    else:  # the last key
        at = len(content) - (8 if name == "t" else 24)
        content[at : at + 8] = (2**63 - 1).to_bytes(8, "little")
    spoilt.write_bytes(content)

    for replace in (False, True):
        with pytest.raises(ModelFileError, match=rf"{name}\b.*(offset|damaged|reserved)"):
            load_table(ps, "tiny.user", path, replace)

    assert served(ps)[0] == rows_of_model()


@pytest.mark.parametrize(("name", "value"), [("t.sst", np.nan), ("t.bin", -np.inf), ("t", np.nan)])
def test_a_row_that_is_not_finite_is_refused_by_its_key_before_a_row_is_touched(write_ps, tmp_path, name, value):
    ps = write_ps(**ROCKSDB)
    path = write_rows(tmp_path / name, {0: [1.0] * 4, 1: [1.0, value, 1.0, 1.0]})
    before = served(ps)

    for replace in (False, True):
        with pytest.raises(ModelFileError, match=rf"{name}: the row of key 1 has values that are NaN or infinite"):
            load_table(ps, "tiny.user", path, replace)
    with (
        ParameterServer.from_config(read_repository(ps)) as server,
        pytest.raises(ModelFileError, match="the row of key 1 has"),
    ):
        load_table(server, USER, path)

    assert served(ps) == before


def test_a_value_that_the_row_type_cannot_hold_is_refused_before_a_row_is_touched(write_ps, tmp_path):
    ps = write_ps(volatile_db={"type": "hash_map", "row_dtype": "fp16"}, persistent_db=ROCKSDB["persistent_db"])
    path = write_rows(tmp_path / "t.bin", {0: [1.0] * 4, 1: [1.0, 70_000.0, 1.0, 1.0]})
    before = served(ps)

    with pytest.raises(StoreError, match=r"t\.bin: .*key 1: column 1 is 70000, which fp16 rows cannot hold"):
        load_table(ps, "tiny.user", path)

    assert served(ps) == before


@pytest.mark.parametrize(
    ("table", "name", "tiers", "error", "reason"),
    [
        ("tiny.users", "t.bin", ROCKSDB, ConfigError, "no table 'tiny.users'; the tables are 'tiny.item', 'tiny.user'"),
        (USER, "absent.csv", ROCKSDB, ModelFileError, r"absent\.csv: no such file or folder"),
        (USER, "t.csv", ROCKSDB, ModelFileError, r"t\.csv: expected \.bin, \.sst, \.npy, \.npz, \.safetensors"),
        (USER, "t.bin", {}, ConfigError, "no tier outlives the process, as Redis and RocksDB do"),
        (USER, "t.bin", SNAPSHOTS, ConfigError, "no tier outlives the process, as Redis and RocksDB do"),
        (USER, "absent.bin", ROCKSDB, ModelFileError, r"absent\.bin: cannot be read"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(write_ps, tmp_path, table, name, tiers, error, reason):
    ps = write_ps(**tiers)
    write_rows(tmp_path / "t.bin", {1: [1.0] * 4})
    (tmp_path / "t.csv").touch()

    with pytest.raises(error, match=reason):
        load_table(ps, table, tmp_path / name)


def write_tfra(folder, keys, rows):
    folder.mkdir()
    keys.tofile(folder / "user_mht_1of1-keys")
    rows.tofile(folder / "user_mht_1of1-values")


def write_pair(folder, keys, rows):
    folder.mkdir()
    np.save(folder / "k.npy", keys)
    np.save(folder / "v.npy", rows)


SOURCES = {
    "HugeCTR": ("t", lambda path, keys, rows: write_table_folders(path, {"user": [(keys, rows)]})),
    "TFRA": ("t", write_tfra),
    "two files": ("t/k.npy,{}/t/v.npy", lambda path, keys, rows: write_pair(path.parent, keys, rows)),
    "a tensor": ("t.safetensors#x", lambda path, keys, rows: save_file({"x": rows}, path)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_tables_of_other_systems_are_loaded(write_ps, tmp_path, source):
    ps, (name, write) = write_ps(**ROCKSDB), SOURCES[source]
    keys, rows = np.arange(3), np.arange(12, dtype=np.float32).reshape(3, 4)
    write(tmp_path / name.split("#")[0].split(",")[0], keys, rows)

    assert load_table(ps, "tiny.user", f"{tmp_path}/{name.format(tmp_path)}") == 3

    assert served(ps)[0] == rows_of_model() | dict(enumerate(rows.tolist()))


@pytest.mark.parametrize(
    ("keys", "dim", "reason"),
    [
        ([1, 2], 3, "t.npz#vectors: expected rows of 4 floats, found rows of 3"),
        ([2, 2], 4, "t.npz#keys: key 2 is in row 0 and again in row 1"),
    ],
)
def test_a_table_of_another_system_that_does_not_fit_is_refused(write_ps, tmp_path, keys, dim, reason):
    ps = write_ps(**ROCKSDB)
    np.savez(tmp_path / "t.npz", keys=np.array(keys), vectors=np.ones((2, dim), np.float32))

    with pytest.raises(ModelFileError, match=reason):
        load_table(ps, "tiny.user", tmp_path / "t.npz")


def test_keys_of_another_system_must_fit_the_models(write_ps, tmp_path):
    ps = write_ps(TinyModel(rows=3, key_type="I32"), **ROCKSDB)
    np.savez(tmp_path / "t.npz", keys=np.array([-1]), vectors=np.ones((1, 4), np.float32))

    with pytest.raises(ModelFileError, match="row 0: key -1 is not a uint32"):
        load_table(ps, "tiny.user", tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("table", "name", "error", "reason"),
    [
        ("user", "t.bin", ConfigError, "no table 'user'"),
        (USER, "t.csv", OutputError, r"expected a file that ends in \.bin"),
        (USER, "absent/t.bin", OutputError, "there is no folder"),
        (USER, "t.bin", StoreError, "rows: there is no database; loading models creates it"),
    ],
)
def test_a_dump_that_makes_no_sense_is_refused_and_leaves_nothing(write_ps, tmp_path, table, name, error, reason):
    ps = write_ps(**ROCKSDB)  # in which no model was loaded

    with pytest.raises(error, match=reason):
        dump_table(ps, table, tmp_path / name)

    assert os.listdir(tmp_path) == ["models"]


def test_a_redis_without_the_table_is_not_dumped_as_an_empty_one(write_ps, tmp_path, redis_server):
    ps = write_ps(volatile_db=redis_tier(redis_server))

    with pytest.raises(StoreError, match="no such table"):
        dump_table(ps, "tiny.user", tmp_path / "t.bin")


def test_rows_without_a_marker_are_dumped_with_a_warning(write_ps, tmp_path, redis_server, client, caplog):
    ps = write_ps(volatile_db=redis_tier(redis_server))
    ParameterServer.from_config(read_repository(ps)).close()
    client.delete(*client.keys("*.hotrow"))

    assert dump_table(ps, "tiny.user", tmp_path / "t.bin") == MODEL.rows

    assert f"table {USER} has no marker: HPS filled it, or a load did not end" in caplog.text


def test_rows_without_a_marker_are_dumped_even_if_absent_keys_were_evicted(write_ps, tmp_path):
    ps = write_ps(**ROCKSDB)
    store = RocksDbStore(ps.parent / "rows", num_threads=1)
    store.table(SPEC).open(0)
    store.tables[SPEC.name].insert(np.arange(100), np.ones((100, 4), dtype=np.float32))
    store.tables[SPEC.name].evict(np.arange(1000, 2000))
    store.close()

    assert dump_table(ps, SPEC.name, tmp_path / "t.bin") == 100


def test_deletions_in_an_sst_file_do_not_count_as_rows(write_ps, tmp_path):
    rocksdict = import_rocksdict()
    writer = rocksdict.SstFileWriter(table_options(rocksdict, 1))
    writer.open(str(tmp_path / "t.sst"))
    for key in range(100):
        if key % 3:
            del writer[key.to_bytes(8, "little")]
        else:
            writer[key.to_bytes(8, "little")] = np.full(4, key, dtype=np.float32).tobytes()
    writer.finish()

    assert load_table(write_ps(**ROCKSDB), SPEC.name, tmp_path / "t.sst") == 34


def test_a_block_that_was_damaged_on_the_disk_is_no_end_of_the_table(write_ps, tmp_path):
    model = TinyModel(rows=20_000)
    ps = write_ps(model, **ROCKSDB)
    ParameterServer.from_config(read_repository(ps)).close()
    file = max((ps.parent / "rows").glob("*.sst"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    def dump_both():
        for table in ("user", "item"):
            dump_table(ps, f"tiny.{table}", tmp_path / "t.bin")

    with pytest.raises(StoreError, match=rf"block checksum mismatch.*{file.name}"):
        dump_both()


def test_the_commands_say_what_they_did_and_show_no_bar_in_a_log(write_ps, tmp_path, capsys):
    ps = write_ps(**ROCKSDB)
    ParameterServer.from_config(read_repository(ps)).close()
    arguments = [str(ps), "tiny.user", str(tmp_path / "t.bin")]

    codes = [main(["dump", *arguments]), main(["load", *arguments]), main(["load", "--replace", *arguments])]

    captured = capsys.readouterr()
    assert codes == [0, 0, 0]
    assert captured.out.splitlines() == [
        f"{tmp_path}/t.bin: 300 rows of tiny.user",
        f"tiny.user: inserted 300 rows of {tmp_path}/t.bin",
        f"tiny.user: replaced by 300 rows of {tmp_path}/t.bin",
    ]
    assert captured.err == ""
    assert main(["load", str(ps), "tiny.user", str(tmp_path / "no.bin")]) == 1
    assert "hotrow load: " in capsys.readouterr().err


def test_on_a_terminal_every_step_has_a_bar(write_ps, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ps = write_ps(**ROCKSDB)
    ParameterServer.from_config(read_repository(ps)).close()

    main(["dump", str(ps), "tiny.user", str(tmp_path / "t.bin")])
    main(["load", str(ps), "tiny.user", str(tmp_path / "t.bin")])

    shown = capsys.readouterr().err
    for what in ("tiny.user to t.bin: 100%", "checking t.bin: 100%", f"t.bin to {USER}: 100%"):
        assert what in shown
    assert "300/300" in shown


def test_tables_that_an_earlier_release_filled_are_dumped_and_loaded_if_the_database_is_served_as_it_is(
    write_ps, tmp_path
):
    kept = {**ROCKSDB["persistent_db"], "initialize_after_startup": False}
    ps = write_ps(volatile_db={"type": "disabled"}, persistent_db=kept)
    with contextlib.closing(RocksDbStore(tmp_path / "models" / "rows", num_threads=1)) as store:
        for table in ("user", "item"):
            spec = TableSpec(f"tiny@1.{table}", 4)
            rows = [(np.array([1, 2]), np.ones((2, 4), np.float32))]
            store.table(spec).load(rows, Marker("of other files", 2), keep=False)

    assert dump_table(ps, "tiny.user", tmp_path / "t.bin") == 2
    assert load_table(ps, "tiny.user", tmp_path / "t.bin", replace=False) == 2


def test_a_database_that_another_process_writes_is_refused_with_what_to_do(write_ps, tmp_path, capfd):
    ps = write_ps(**ROCKSDB)
    dump_table(write_ps(), "tiny.user", tmp_path / "t.bin")
    write_ps(**ROCKSDB)
    database = ps.parent / "rows"
    refused = f"rocksdb: persistent_db.path: {database}: already open for writing, by another process, such as "
    refused += "`hotrow serve` or Triton: stop it first"

    with held_elsewhere(database):
        assert main(["load", str(ps), "tiny.user", str(tmp_path / "t.bin")]) == 1
        assert capfd.readouterr().err == f"hotrow load: {refused}, and start it again after the load\n"
        assert main(["serve", str(ps), "--http-port", "0"]) == 2
        expected = f"hotrow serve: {refused}, or set persistent_db.read_only to serve without writing\n"
        assert capfd.readouterr().err.endswith(expected)
