"""Processes that share tables, started and killed: who writes, who waits, what is left."""

import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import SharedMemoryError
from kernels.host import HostTable
from kernels.shared import SharedTable
from serving.errors import StoreError, StoreFullError, StoreUnreachableError
from serving.parameter_server import ParameterServer, models, tier_table
from serving.storage import Marker, RocksDbStore, SharedMemoryStore, TableSpec
from serving.storage.rocksdb.table import RocksDbTable
from serving.storage.shared.folder import SHARED_MEMORY
from tests.serving.ps_files import listed, write_ps
from tests.serving.small_server import KEYS, NEW, DictStore, DurableDictStore, held_by, rows_of, serve, write_model
from tests.tools.redis_servers import wait_until
from tests.tools.warm import Warm

SPEC = TableSpec("m.t", 4)
ROWS = {key: np.full(4, key, dtype=np.float32) for key in range(100)}


def batches(rows=ROWS):
    yield np.array(list(rows), dtype=np.int64), np.array(list(rows.values()))


def load(store, digest="digest", rows=ROWS, spec=SPEC):
    """Fill the store as a cache of a truth of these rows; returns whether rows were loaded."""
    return store.table(spec).fill(DictTruth(digest, rows), starting=True)


class DictTruth:
    """A source of truth with the rows of a dict."""

    def __init__(self, digest, rows, **flags):
        self._marker, self._rows = Marker(digest, len(rows), **flags), rows

    def marker(self):
        return self._marker

    def batches(self):
        return batches(self._rows)

    def copy_to(self, cache):
        for keys, _ in cache.items():
            cache.evict(keys)
        for keys, rows in self.batches():
            cache.insert(keys, rows)


def values(store, keys):
    out = np.empty((len(keys), 4), dtype=np.float32)
    found = store.tables["m.t"].fetch(np.array(keys, dtype=np.int64), out)
    return [float(value) if is_found else None for value, is_found in zip(out[:, 0], found, strict=True)]


@pytest.fixture
def open_store(tmp_path):
    """Open a store in a folder of the test's own; all are closed at the end."""
    opened = []

    def open_(capacity_bytes=2**26, **options):
        opened.append(SharedMemoryStore("shared", capacity_bytes, folder=tmp_path, **options))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


def test_the_second_store_has_the_rows_of_the_first_and_sees_what_it_changes(open_store):
    first, second = open_store(), open_store()
    assert (first.writes, second.writes) == (True, False)

    assert load(first)
    assert not load(second)
    first.tables["m.t"].write_flags(changed=True, current_caches=())
    first.tables["m.t"].insert(np.array([7, 500]), np.full((2, 4), 0.5, np.float32))
    first.tables["m.t"].evict(np.array([8]))

    assert values(second, [6, 7, 8, 500]) == [6.0, 0.5, None, 0.5]
    assert second.tables["m.t"].marker() == Marker("digest", 100, changed=True)
    assert second.tables["m.t"].count() == 100


def test_the_error_of_a_reader_names_the_writer(open_store):
    first, second = open_store(), open_store()
    load(first)
    load(second)

    for change in (
        lambda: second.tables["m.t"].insert(np.array([1]), np.ones((1, 4), np.float32)),
        lambda: second.tables["m.t"].evict(np.array([1])),
        lambda: second.erase("m.t"),
        lambda: second.table(TableSpec("m.other", 4)).open(10),
    ):
        with pytest.raises(StoreError, match=r"only reads .*shared; process [0-9]+ writes: .* next process to start"):
            change()
    assert values(second, [1]) == [1.0]


def test_a_table_that_is_loaded_again_is_a_new_copy_and_readers_keep_theirs(open_store):
    first, second = open_store(), open_store()
    load(first)
    load(second)

    assert load(first, "of other files", {1: np.full(4, 9.0, np.float32)})

    assert values(first, [1, 2]) == [9.0, None]
    assert values(second, [1, 2]) == [1.0, 2.0]
    third = open_store()
    assert not load(third, "of other files")
    assert values(third, [1, 2]) == [9.0, None]


def test_a_reader_that_becomes_the_writer_keeps_its_copy_of_a_table_that_came_from_other_files(open_store):
    first, second = open_store(), open_store()
    load(first)
    load(second)
    load(first, "of other files", {1: np.full(4, 9.0, np.float32)})
    first.close()

    assert load(second, spec=TableSpec("m.other", 4))  # for which it takes the writer's place

    assert second.writes
    assert values(second, [1, 2]) == [1.0, 2.0]
    with pytest.raises(StoreError, match="load its model again"):
        second.tables["m.t"].insert(np.array([1]), np.ones((1, 4), np.float32))


def test_rows_that_had_changed_when_they_were_loaded_stay_called_so(open_store):
    store = open_store()

    store.table(SPEC).fill(DictTruth("digest", ROWS, changed=True, current_caches=()), starting=True)
    assert store.tables["m.t"].marker() == Marker("digest", 100, changed=True)
    store.tables["m.t"].write_flags(changed=True)

    assert store.tables["m.t"].marker() == Marker("digest", 100, changed=True)


def test_a_table_is_filled_again_where_the_truth_says_that_it_missed_a_write(open_store):
    store = open_store()
    load(store)

    assert not store.table(SPEC).fill(DictTruth("digest", {1: np.full(4, 9.0, np.float32)}), starting=True)
    assert values(store, [1, 2]) == [1.0, 2.0]
    dirty = DictTruth("digest", {1: np.full(4, 9.0, np.float32)}, current_caches=())
    assert store.table(SPEC).fill(dirty, starting=True)
    assert values(store, [1, 2]) == [9.0, None]


def test_the_processes_that_read_see_the_rows_of_a_refill(open_store):
    first, second = open_store(), open_store()
    load(first)
    load(second)
    new = DictTruth("digest", {1: np.full(4, 9.0, np.float32), 500: np.full(4, 8.0, np.float32)}, current_caches=())

    with pytest.raises(StoreUnreachableError, match="this process only reads"):
        second.table(SPEC).fill(new, starting=True)
    assert first.table(SPEC).fill(new, starting=True)

    assert [values(store, [1, 2, 500]) for store in (first, second)] == [[9.0, None, 8.0]] * 2
    first.close()
    newer = DictTruth("digest", {1: np.full(4, 7.0, np.float32)}, current_caches=("another cache",))
    assert second.table(SPEC).fill(newer, starting=True)
    assert second.writes
    assert values(second, [1, 500]) == [7.0, None]


def test_a_reader_whose_shared_memory_missed_a_write_bypasses_it_until_it_can_be_filled(
    open_store, tmp_path, monkeypatch
):
    monkeypatch.setattr(models, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(tier_table, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(tier_table, "LONGEST_PAUSE_S", 0.02)
    config = write_model(tmp_path)
    other = serve(config, open_store(), DurableDictStore("other"))
    truth = DurableDictStore("slow")
    with serve(config, truth) as server:
        server.insert("m.t", np.array([1]), NEW)
    expected = held_by(truth)

    with serve(config, open_store(), truth) as server:  # the other process writes to the shared memory
        for key in (2, 3):
            assert rows_of(server) == expected
            assert "shared_memory" not in server.counters()["m.t"].hits
            server.insert("m.t", np.array([key]), NEW)
            expected = held_by(truth)
        other.close()
        shared = server.stores[0]
        wait_until(lambda: shared.tables and held_by(shared) == expected, "this process has filled the shared memory")
        wait_until(lambda: rows_of(server) == expected and "shared_memory" in server.counters()["m.t"].hits, "used")


def test_a_load_that_keeps_rows_has_room_for_both_and_inserts_over_them(open_store):
    store = open_store()
    store.table(SPEC).open(10)
    store.tables["m.t"].insert(np.array([1, 500]), np.full((2, 4), 0.5, np.float32))
    assert store.tables["m.t"].marker() is None

    store.table(SPEC).load(batches(), Marker("digest", len(ROWS)), keep=True)

    assert values(store, [1, 2, 500]) == [1.0, 2.0, 0.5]
    assert store.tables["m.t"].marker() == Marker("digest", 101, changed=True)


@pytest.mark.parametrize(
    ("digest", "spec"), [("digest", TableSpec("m.t", 4, row_dtype="bf16")), ("of other files", TableSpec("m.t", 2))]
)
def test_a_table_of_another_form_is_loaded_again(open_store, digest, spec):
    first = open_store(auto_remove=False)
    load(first)
    first.close()
    again = open_store()
    rows = {key: row[: spec.dim].copy() for key, row in ROWS.items()}

    assert load(again, digest, rows, spec)

    out = np.empty((1, spec.dim), dtype=np.float32)
    assert again.tables["m.t"].fetch(np.array([7]), out).all()
    assert (out == 7.0).all()


def test_a_table_whose_source_has_a_damaged_name_is_loaded_again_and_readers_get_an_error(open_store, tmp_path):
    first = open_store(auto_remove=False)
    load(first)
    first.close()
    with (tmp_path / "shared" / "m.t.table").open("r+b") as file:
        file.seek(48)
        file.write(b"\xff")

    heir = open_store()
    reader = open_store(wait_ms=0)
    with pytest.raises(StoreError, match=r"m\.t\.table: is damaged: the name of its source is not text"):
        load(reader)
    assert load(heir)
    assert values(heir, [1]) == [1.0]


def test_a_load_that_fails_leaves_the_old_rows_and_no_file(open_store, tmp_path):
    store = open_store()
    load(store)
    files = sorted(file.name for file in (tmp_path / "shared").iterdir())

    def failing():
        yield from batches()
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        store.table(SPEC).load(failing(), Marker("of other files", len(ROWS)), keep=False)

    assert (values(store, [1]), store.tables["m.t"].marker()) == ([1.0], Marker("digest", 100))
    assert sorted(file.name for file in (tmp_path / "shared").iterdir()) == files


def test_tables_beyond_the_size_are_refused(open_store):
    store = open_store(capacity_bytes=2**20)

    with pytest.raises(
        StoreFullError, match=r"1,000,000 rows, but volatile_db\.shared_memory_size, 1,048,576 bytes .* for [0-9]"
    ):
        store.table(SPEC).load(batches(), Marker("digest", 1_000_000), keep=False)


def test_a_closed_table_is_unmapped_and_opens_with_its_rows(open_store, tmp_path):
    def is_mapped():
        return str(tmp_path / "shared" / "m.t.table") in Path("/proc/self/maps").read_text(encoding="utf-8")

    for store in (open_store(), open_store()):
        load(store)
        assert is_mapped()

        store.tables["m.t"].close()

        assert not is_mapped()
        assert "m.t" not in store.tables
        assert not load(store)
        assert values(store, [1]) == [1.0]
        store.tables["m.t"].close()


def test_a_closed_table_takes_memory_until_it_is_dropped(open_store):
    size_bytes = HostTable.memory_bytes(4, 1000)
    store, other = open_store(size_bytes), TableSpec("m.other", 4)
    load(store)
    store.tables["m.t"].close()

    with pytest.raises(StoreFullError, match=r"leaves room for .*; `hotrow check` says how much is needed"):
        store.table(other).load(batches(), Marker("digest", 1000), keep=False)

    load(store)
    store.erase("m.t")
    store.table(other).load(batches(), Marker("digest", 100), keep=False)
    assert store.tables["m.other"].count() == 100


def test_a_table_beyond_the_available_memory_is_refused_and_leaves_no_file(open_store, tmp_path, monkeypatch):
    monkeypatch.setattr("kernels.system_memory.available_memory_bytes", lambda: 20_000_000)
    store = open_store(capacity_bytes=2**40)

    reason = r"needed, but 20,000,000 are available; volatile_db\.shared_memory_size is 1,099,511,627,776"
    with pytest.raises(StoreError, match=rf"'m\.t': .*table\.new: [0-9,]+ bytes of memory are {reason}"):
        store.table(SPEC).load(batches(), Marker("digest", 1_000_000), keep=False)

    assert not list((tmp_path / "shared").glob("*.table*"))


def test_what_to_run_for_huge_pages_is_logged_once(open_store, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("serving.storage.shared.store.huge_page_advice", lambda folder: f"mount {folder}")
    caplog.set_level("INFO")

    for _ in range(2):
        open_store()

    messages = [record.getMessage() for record in caplog.records]
    advice = f"to allow them, run: mount {tmp_path}"
    assert messages == [f"shared memory without huge pages makes lookups slower; {advice}"]


def test_a_write_that_a_stopped_reader_blocks_is_a_store_error(open_store, monkeypatch):
    store = open_store()
    load(store)

    def stuck(*_):
        raise SharedMemoryError("table", "process 7 has been in the middle of a read for seconds")

    monkeypatch.setattr(SharedTable, "insert", stuck)

    with pytest.raises(StoreError, match=r"shared_memory: .*'m\.t': table: process 7 has been"):
        store.tables["m.t"].insert(np.array([1]), np.ones((1, 4), np.float32))


@pytest.mark.parametrize("loaded", [None, "digest"])
def test_the_error_of_a_process_that_waits_too_long_names_the_process_it_waits_for(open_store, loaded):
    first = open_store()
    if loaded:
        load(first, loaded)

    with pytest.raises(StoreError, match=r"process [0-9]+, which writes, has not loaded it within 0.05 s"):
        load(open_store(wait_ms=50), "of other files")


def test_a_process_that_starts_waits_until_the_writer_has_loaded_its_files_over_older_ones(open_store):
    first, second = open_store(), open_store()
    load(first, "of older files", {1: np.zeros(4, np.float32)})
    began = threading.Event()

    def batches_once_the_second_waits():
        began.wait()
        yield from batches()

    def load_second():
        assert second.table(SPEC).marker().digest == "of older files"
        began.set()
        second.table(SPEC).load(batches(), Marker("digest", len(ROWS)), keep=False)

    with ThreadPoolExecutor() as pool:
        loaded = pool.submit(load_second)
        first.table(SPEC).load(batches_once_the_second_waits(), Marker("digest", len(ROWS)), keep=False)
        loaded.result(timeout=60)

    assert values(second, [1, 99]) == [1.0, 99.0]
    assert not second.writes


def test_a_reader_that_loads_its_model_again_gets_the_new_copy(open_store):
    first, second = open_store(), open_store()
    load(first)
    load(second)
    load(first, "of other files", {1: np.full(4, 9.0, np.float32)})
    assert values(second, [1, 2]) == [1.0, 2.0]

    assert not load(second, "of other files")

    assert values(second, [1, 2]) == [9.0, None]


def test_the_next_writer_reads_what_the_last_writer_removed_and_can_load_it_again(open_store):
    first, second = open_store(), open_store()
    load(first)
    load(second)
    first.erase("m.t")
    first.close()

    assert second.table(TableSpec("m.other", 4)).marker() is None

    assert second.writes
    assert values(second, [1]) == [1.0]
    with pytest.raises(StoreError, match=r"the writer removed or replaced it.*load its model again"):
        second.tables["m.t"].insert(np.array([1]), np.ones((1, 4), np.float32))
    assert load(second)
    second.tables["m.t"].insert(np.array([1]), np.full((1, 4), 0.5, np.float32))
    assert values(second, [1]) == [0.5]


def test_a_table_has_room_for_the_rows_that_came_into_rocksdb_since_its_files_were_written(open_store, tmp_path):
    model = write_model(tmp_path)
    with serve(model, DictStore(), RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        new = np.arange(1000, 1500)  # more than the headroom
        server.insert("m.t", new, np.ones((new.size, 3), dtype=np.float32))

    shared = open_store()
    with serve(model, shared, RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        assert server.lookup("m.t", new)[1].all()
        assert shared.tables["m.t"].count() == len(KEYS) + new.size


@pytest.mark.parametrize("read_only", [False, True])
def test_a_table_has_room_for_the_rows_of_rocksdb_though_absent_keys_were_evicted_there(
    open_store, tmp_path, read_only
):
    model = write_model(tmp_path)
    new = np.arange(1000, 3000)
    with serve(model, DictStore(), RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        server.insert("m.t", new, np.ones((new.size, 3), dtype=np.float32))
        server.evict("m.t", new + 10_000)

    shared = open_store()
    with serve(model, shared, RocksDbStore(tmp_path / "db", read_only, num_threads=1)) as server:
        assert server.lookup("m.t", new)[1].all()
        assert shared.tables["m.t"].count() == len(KEYS) + new.size


@pytest.mark.parametrize("read_only", [False, True])
def test_a_table_takes_no_room_for_rows_of_rocksdb_that_were_overwritten(open_store, tmp_path, read_only):
    model = write_model(tmp_path)
    new = np.arange(1000, 3000)
    for value in range(3):  # each opening brings the rows of the log into a file of their own
        with serve(model, DictStore(), RocksDbStore(tmp_path / "db", num_threads=1)) as server:
            server.insert("m.t", new, np.full((new.size, 3), value, dtype=np.float32))

    shared = open_store(HostTable.memory_bytes(3, 3000))
    with serve(model, shared, RocksDbStore(tmp_path / "db", read_only, num_threads=1)) as server:
        assert (server.lookup("m.t", new)[0] == 2).all()
        assert shared.tables["m.t"].count() == len(KEYS) + new.size


def test_the_rows_of_rocksdb_are_not_counted_where_the_table_is_there_already(open_store, tmp_path, monkeypatch):
    model = write_model(tmp_path)
    with serve(model, open_store(auto_remove=False), RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        server.insert("m.t", np.array([1000]), np.ones((1, 3), dtype=np.float32))
    monkeypatch.setattr(RocksDbTable, "count", lambda *_: pytest.fail("counted"))

    with serve(model, open_store(), RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        assert server.lookup("m.t", np.array([1000]))[1].all()


def test_a_store_is_not_closed_while_it_is_written(open_store):
    first = open_store(auto_remove=False)
    load(first)
    stop = threading.Event()
    written = []

    def write():
        with suppress(StoreError):
            while not stop.is_set():
                first.tables["m.t"].insert(np.array([1]), np.full((1, 4), 7.0, np.float32))
                written.append(first.writes)

    with ThreadPoolExecutor() as pool:
        writing = pool.submit(write)
        while not written:
            assert not writing.done()
        first.close()
        writing.result(timeout=60)
        stop.set()

    heir = open_store()
    assert heir.writes
    assert not load(heir, "digest")


def test_a_folder_of_another_user_or_a_link_is_refused(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "shared").mkdir(mode=0o777)

    with pytest.raises(StoreError, match=r"link: is not a folder of this user; choose another shared_memory_name"):
        SharedMemoryStore("link", 2**20, folder=tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match=r"shared: is not a folder of this user"):
        SharedMemoryStore("shared", 2**20, folder=tmp_path)


def in_a_child(work):
    """Call ``work`` in a forked child; 0 if it was true there, else 1 if it raised or 2."""
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            code = 0 if work() else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_that_closes_the_store_takes_nothing_from_its_parent(open_store, tmp_path):
    store = open_store()
    load(store)

    def close():
        store.close()
        return not store.writes

    assert in_a_child(close) == 0
    assert (tmp_path / "shared" / "m.t.table").exists()
    assert not open_store().writes


def test_only_its_user_can_read_what_is_shared(open_store, tmp_path):
    load(open_store())

    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o700
    for file in (tmp_path / "shared").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_place_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "shared").write_text("")

    with pytest.raises(StoreError, match=r"shared: .*choose another shared_memory_name"):
        SharedMemoryStore("shared", 2**20, folder=tmp_path)
    with pytest.raises(StoreError, match="there is no such folder"):
        SharedMemoryStore("shared", 2**20, folder=tmp_path / "nowhere")


def test_the_last_to_leave_removes_the_tables(open_store, tmp_path):
    first, second = open_store(), open_store()
    load(first)

    first.close()
    assert (tmp_path / "shared" / "m.t.table").exists()
    second.close()
    assert not (tmp_path / "shared").exists()


def test_without_auto_remove_the_tables_stay(open_store):
    first = open_store(auto_remove=False)
    load(first)
    first.close()

    assert not load(open_store())


SERVE = """
import sys
from serving.parameter_server import ParameterServer
with ParameterServer.from_config(sys.argv[1]) as server:
    print(server.stores[0].writes, flush=True)
    for line in sys.stdin:
        key = int(line)
        import numpy as np
        rows, found = server.lookup("dcn.table0", np.array([key]))
        print(found[0], rows[0].tolist(), flush=True)
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, config):
        self._process = Warm("-c", SERVE, config)

    def writes(self):
        return self._process.stdout.readline() == "True\n"

    def ask(self, key):
        self._process.stdin.write(f"{key}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=60)

    def end(self):
        self._process.communicate(timeout=60)
        return self._process.returncode


@pytest.fixture
def config(write_model, tmp_path, shared_memory_name):
    """A model, and a ps.json of it that shares memory; no process that it starts outlives the test."""
    model = write_model(write_model.table(rows=300))
    tier = {
        "type": "multi_process_hash_map",
        "shared_memory_name": shared_memory_name,
        "shared_memory_size": 2**26,
    }
    file = write_ps(tmp_path, [listed(model.config_file, gpucache=False)], volatile_db=tier)
    processes = []

    def start():
        processes.append(Process(file))
        return processes[-1]

    yield model, start, SHARED_MEMORY / shared_memory_name
    for process in processes:
        process.kill()


@pytest.mark.slow
def test_servers_answer_alike_through_the_end_of_every_one_of_them(config):
    model, start, folder = config
    key, row = next(iter(model.tables[0].items()))
    answer = f"True {row.tolist()}\n"
    writer = start()
    assert writer.writes()
    reader = start()
    assert not reader.writes()
    assert writer.ask(key) == reader.ask(key) == answer
    file = (folder / "dcn.table0.table").stat()

    writer.kill()
    assert reader.ask(key) == answer
    heir = start()
    assert heir.writes()
    assert heir.ask(key) == reader.ask(key) == answer
    assert (folder / "dcn.table0.table").stat().st_ino == file.st_ino  # nothing was loaded again

    reader.kill()
    assert heir.ask(key) == answer
    assert heir.ask(10**15).startswith("False")
    assert heir.end() == 0
    assert not folder.exists()


JOIN_AND_LOAD_NOTHING = """
import sys
from serving.storage import SharedMemoryStore
store = SharedMemoryStore(sys.argv[1], 2**26)
print(store.writes, flush=True)
sys.stdin.read()
"""


FORK_AND_DIE = """
import os, signal, sys
from serving.parameter_server import ParameterServer
server = ParameterServer.from_config(sys.argv[1])
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""


@pytest.mark.slow
def test_a_child_that_outlives_its_writer_keeps_nobody_from_writing(config, tmp_path):
    _, start, _ = config
    parent = Warm("-c", FORK_AND_DIE, tmp_path / "ps.json")
    assert parent.stdout.readline() == "forked\n"
    parent.kill()
    parent.wait(timeout=60)

    assert start().writes()
    parent.communicate(timeout=60)


LOAD_AND_LEAVE_OPEN = """
import sys
from serving.parameter_server import ParameterServer
server = ParameterServer.from_config(sys.argv[1])
print(server.stores[0].writes, flush=True)
"""


def test_a_process_that_ends_without_closing_its_server_leaves_nothing(config, tmp_path):
    _, _, folder = config

    command = [sys.executable, "-c", LOAD_AND_LEAVE_OPEN, tmp_path / "ps.json"]
    ended = subprocess.run(command, capture_output=True, text=True)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")
    assert not folder.exists()


@pytest.mark.slow
def test_a_process_that_waits_loads_the_table_itself_when_its_writer_is_killed(config):
    model, start, folder = config
    key, row = next(iter(model.tables[0].items()))
    idle = Warm("-c", JOIN_AND_LOAD_NOTHING, folder.name)
    assert idle.stdout.readline() == "True\n"
    waiting = start()

    idle.kill()
    idle.communicate(timeout=60)

    assert waiting.writes()
    assert waiting.ask(key) == f"True {row.tolist()}\n"


def test_a_server_shares_its_memory_under_the_name_of_its_ps_json(config, tmp_path):
    model, _, folder = config

    with ParameterServer.from_config(tmp_path / "ps.json") as server:
        assert [store.name for store in server.stores] == ["shared_memory"]
        rows, found = server.lookup("dcn.table0", np.array(list(model.tables[0]), dtype=np.int64))
        assert found.all()
        assert rows.tobytes() == b"".join(row.tobytes() for row in model.tables[0].values())
        assert (folder / "dcn.table0.table").exists()
    assert not folder.exists()
