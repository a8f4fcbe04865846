"""A database that several processes have open, and copies of one."""

import errno
import re
import shutil
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage import Marker, RocksDbStore, TableSpec
from serving.storage.marker import NOT_LOADED
from serving.storage.rocksdb.database import Database
from tests.tools.warm import Warm

TABLE = "model.table"
NEVER_MS = 3_600_000  # the tests say themselves when to catch up, but for the one of the thread

# Does what each line says, and answers with a line.
WRITER = f"""
import sys
import numpy as np
from serving.storage import Marker, RocksDbStore, TableSpec

store = RocksDbStore(sys.argv[1], num_threads=1)
table = store.table(TableSpec({TABLE!r}, 4))
table.open(0)
print("open", flush=True)

def pieces(keys, value):
    for piece in np.array_split(keys, 2):
        yield piece, np.full((piece.size, 4), value, np.float32)
        print("half", flush=True)
        sys.stdin.readline()

for line in sys.stdin:
    verb, first, last, value = line.split()
    keys = np.arange(int(first), int(last))
    if verb == "insert":
        table.insert(keys, np.full((keys.size, 4), float(value), np.float32))
    elif verb == "load":  # other rows in the place of those of the same files
        table.load(pieces(keys, float(value)), Marker("files", changed=True), keep=False)
    elif verb == "retrain":
        table.load(pieces(keys, float(value)), Marker(value), keep=False)
    elif verb == "drop":
        store.erase({TABLE!r})
    elif verb == "checkpoint":
        store.checkpoint(value)
    print("done", flush=True)
"""


class Writer:
    """A process that writes."""

    def __init__(self, path):
        self.process = Warm("-c", WRITER, path)
        assert self.process.stdout.readline() == "open\n"

    def say(self, line="on"):
        """Say one line; return the answer."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "db"


@pytest.fixture
def writer(path):
    writer = Writer(path)
    yield writer
    writer.close()


@pytest.fixture
def opened():
    """Open a store of the one table; closed at the end."""
    stores = []

    def open_store(path, **options):
        stores.append(RocksDbStore(path, read_only=True, num_threads=1, **options))
        stores[-1].table(TableSpec(TABLE, 4)).open(0)
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def values_of(store, keys):
    """The rows that the store has of ``keys``, each by its one value, None where it has none."""
    out = np.full((len(keys), 4), np.nan, dtype=np.float32)
    found = store.tables[TABLE].fetch(np.array(keys, dtype=np.int64), out)
    assert (out == out[:, :1]).all()
    return [value if is_found else None for value, is_found in zip(out[:, 0].tolist(), found.tolist(), strict=True)]


def test_a_follower_sees_after_catching_up_what_another_process_has_written(writer, path, opened):
    writer.say("insert 0 10 1")
    follower = opened(path, catch_up_interval_ms=NEVER_MS)
    fixed = opened(path)

    writer.say("insert 5 12 2")
    before = values_of(follower, [4, 5, 11, 12])
    follower.catch_up()

    assert before == [1, 1, None, None]
    assert values_of(follower, [4, 5, 11, 12]) == [1, 2, 2, None]
    assert values_of(fixed, [4, 5, 11, 12]) == [1, 1, None, None]


def test_a_follower_keeps_the_old_rows_until_a_load_is_whole(writer, path, opened):
    assert [writer.say("load 0 1000 1"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower = opened(path, catch_up_interval_ms=NEVER_MS)

    answers = [writer.say("load 500 1500 2"), writer.say()]
    follower.catch_up()
    between = values_of(follower, [0, 500, 1000]), follower.tables[TABLE].marker()
    answers.append(writer.say())
    follower.catch_up()

    assert answers == ["half", "half", "done"]
    assert between == ([1, 1, None], Marker("files", 1000, changed=True))
    assert values_of(follower, [0, 500, 1000]) == [None, 2, 2]
    assert follower.tables[TABLE].marker() == Marker("files", 1000, changed=True)


def test_a_follower_keeps_the_rows_of_its_network_when_the_writer_loads_other_files(writer, path, opened, caplog):
    assert [writer.say("load 0 1000 1"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower = opened(path, catch_up_interval_ms=NEVER_MS)

    assert [writer.say("retrain 0 1000 2"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower.catch_up()
    writer.say("insert 0 10 3")
    follower.catch_up()

    assert values_of(follower, [0, 999, 1000]) == [1, 1, None]
    (told,) = [record.message for record in caplog.records]
    assert re.search("model.table.*from other files, 2; this process uses files: restart it", told)
    follower.table(TableSpec(TABLE, 4)).open(0)  # as a server does that loads its model again
    follower.catch_up()
    assert values_of(follower, [0, 999]) == [3, 2]
    assert [writer.say("load 0 1000 1"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower.catch_up()
    assert values_of(follower, [0, 999]) == [3, 2]


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_of_a_load_that_was_killed_between_the_old_rows_and_the_new_a_follower_keeps_the_old(
    writer, path, opened, is_made_anew
):
    assert [writer.say("load 0 1000 1"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower = opened(path, catch_up_interval_ms=NEVER_MS)
    writer.close()
    database = Database(path, 1, read_only=False)
    database.begin_load(TABLE, keep=False)
    if not is_made_anew:  # killed right before
        database._remove_family(TABLE)
    database.close()

    follower.catch_up()

    assert values_of(follower, [0, 999, 1000]) == [1, 1, None]
    assert follower.tables[TABLE].marker() is None


def test_a_table_that_the_writer_dropped_holds_no_keys_until_it_is_loaded_again(writer, path, opened, caplog):
    assert [writer.say("load 0 1000 1"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower = opened(path, catch_up_interval_ms=NEVER_MS)

    writer.say("drop 0 0 0")
    follower.catch_up()
    dropped = values_of(follower, [1])
    assert writer.say("load 0 1000 2") == "half"
    follower.catch_up()
    between = values_of(follower, [1])
    assert [writer.say(), writer.say()] == ["half", "done"]
    follower.catch_up()

    assert dropped == between == [None]
    assert values_of(follower, [1, 1000]) == [2, None]
    (told,) = [record.message for record in caplog.records]
    assert re.search("model.table.*the writer has dropped it; its keys are unknown until it is back", told)


def test_of_a_dropped_table_the_follower_does_not_take_the_rows_of_another_network(writer, path, opened, caplog):
    assert [writer.say("load 0 1000 1"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower = opened(path, catch_up_interval_ms=NEVER_MS)

    writer.say("drop 0 0 0")
    follower.catch_up()
    assert [writer.say("retrain 0 1000 2"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower.catch_up()

    assert values_of(follower, [1]) == [None]
    assert "from other files, 2; this process uses files: restart it" in caplog.records[-1].message


def test_a_table_that_the_follower_has_let_go_of_does_not_come_back(writer, path, opened):
    assert [writer.say("load 0 1000 1"), writer.say(), writer.say()] == ["half", "half", "done"]
    follower = opened(path, catch_up_interval_ms=NEVER_MS)
    follower.tables[TABLE].close()

    writer.say("insert 0 10 3")
    follower.catch_up()

    assert TABLE not in follower.tables


def test_a_follower_catches_up_by_itself_and_reads_go_on_meanwhile(writer, path, opened):
    writer.say("insert 0 1000 1")
    follower = opened(path, catch_up_interval_ms=1)
    deadline = time.monotonic() + 60

    for value in range(2, 12):
        writer.say(f"insert 0 1000 {value}")
        while (rows := values_of(follower, [0, 999])) != [value, value]:
            assert set(rows) <= {value - 1, value}
            assert time.monotonic() < deadline


def test_a_running_read_outlives_the_reopening_of_its_table(writer, path, opened):
    writer.say("load 0 3000 1")
    writer.say()
    writer.say()
    follower = opened(path, catch_up_interval_ms=1)
    walk = follower.tables[TABLE].items(100)
    seen = [next(walk)[1][0, 0]]

    writer.say("load 0 3000 2")
    writer.say()
    writer.say()
    follower.catch_up()
    seen += [rows[0, 0] for _, rows in walk]

    assert seen == [1.0] * 30
    assert values_of(follower, [7]) == [2]


def test_a_follower_whose_database_is_gone_says_so_and_goes_on_with_what_it_saw(writer, path, opened):
    writer.say("load 0 1000 1")
    writer.say()
    writer.say()
    follower = opened(path, catch_up_interval_ms=NEVER_MS)
    writer.close()
    shutil.rmtree(path)

    with pytest.raises(StoreError, match=str(path)):
        follower.catch_up()

    assert values_of(follower, [1, 1000]) == [1, None]


def test_a_follower_whose_disk_does_not_answer_says_so_and_follows_again_when_it_does(
    writer, path, opened, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    writer.say("insert 0 10 1")
    follower = opened(path, catch_up_interval_ms=NEVER_MS)
    writer.say("insert 0 10 2")

    for method in ("glob", "exists", "read_bytes"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            with pytest.raises(StoreError, match=f"{path}.*: Stale file handle"):
                follower.catch_up()
        assert values_of(follower, [1]) == [1]
    follower.catch_up()

    assert values_of(follower, [1]) == [2]


@pytest.mark.parametrize("options", [{"catch_up_interval_ms": 5}, {"read_only": True, "catch_up_interval_ms": 0}])
def test_a_writer_follows_no_other_process(path, options):
    with pytest.raises(ValueError, match="catch_up_interval_ms"):
        RocksDbStore(path, **options)


def test_a_follower_of_nothing_is_refused_and_leaves_no_thread(path):
    before = set(threading.enumerate())

    with pytest.raises(StoreError, match=str(path)):
        RocksDbStore(path, read_only=True, catch_up_interval_ms=1)

    assert set(threading.enumerate()) <= before  # of which some may end meanwhile


def test_a_checkpoint_is_the_database_as_it_was_then(writer, path, opened, tmp_path):
    writer.say("load 0 1000 1")
    writer.say()
    writer.say()
    writer.say("insert 1000 1010 2")

    assert writer.say(f"checkpoint 0 0 {tmp_path / 'copy'}") == "done"

    writer.say("insert 0 1010 3")
    copy = opened(tmp_path / "copy")
    assert values_of(copy, [0, 999, 1009, 1010]) == [1, 1, 2, None]
    assert copy.tables[TABLE].marker().digest == "files"


def test_a_checkpoint_asks_for_caches_to_be_refilled_and_the_database_itself_does_not(path, tmp_path):
    specs = marked, stale, unmarked = [TableSpec(name, 4) for name in (TABLE, "model.stale", "model.unmarked")]
    with closing(RocksDbStore(path, num_threads=1)) as store:
        for spec in (marked, stale):
            store.table(spec).load(iter([(np.arange(3), np.ones((3, 4), np.float32))]), Marker("files"), keep=False)
        store.table(unmarked).open(0)
        store.tables[stale.name].write_flags(current_caches=())
    with closing(RocksDbStore(path, num_threads=1)) as store:  # none of the tables is open
        store.checkpoint(tmp_path / "copy")
        (tmp_path / "taken").touch()
        with pytest.raises(StoreError, match="exists"):
            store.checkpoint(tmp_path / "taken")
        loaded = Marker("files", 3)
        expected = [loaded, replace(loaded, current_caches=()), None]
        assert [store.table(spec).marker() for spec in specs] == expected
    with closing(RocksDbStore(tmp_path / "copy", num_threads=1)) as copy:
        assert [copy.table(spec).marker() for spec in (marked, stale)] == [Marker("files", 3, current_caches=())] * 2
        assert copy.table(unmarked).marker() == Marker(NOT_LOADED, changed=True, current_caches=())


def test_a_copied_checkpoint_replaces_a_lost_database(writer, path, tmp_path):
    writer.say("insert 0 10 1")
    writer.say(f"checkpoint 0 0 {tmp_path / 'copy'}")
    writer.close()
    shutil.rmtree(path)

    shutil.copytree(tmp_path / "copy", path)
    restored = Writer(path)

    assert restored.say("insert 10 11 2") == "done"
    restored.close()
    store = RocksDbStore(path, num_threads=1)
    store.table(TableSpec(TABLE, 4)).open(0)
    assert values_of(store, [0, 9, 10]) == [1, 1, 2]
    store.close()


def test_a_checkpoint_is_not_made_over_something_nor_of_a_database_that_is_only_read(path, tmp_path):
    (tmp_path / "taken").mkdir()
    store = RocksDbStore(path, num_threads=1)
    with pytest.raises(StoreError, match=f"{tmp_path / 'taken'}.*exists"):
        store.checkpoint(tmp_path / "taken")
    with pytest.raises(StoreError, match=str(tmp_path / "no" / "folder")):
        store.checkpoint(tmp_path / "no" / "folder")
    store.close()
    store = RocksDbStore(path, read_only=True, num_threads=1)
    with pytest.raises(StoreError, match="read-only"):
        store.checkpoint(tmp_path / "copy")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.checkpoint(tmp_path / "copy")

    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("new", [TableSpec(TABLE, 2), TableSpec(TABLE, 8, row_dtype="fp16")], ids=["dim", "form"])
def test_a_table_of_another_shape_stops_no_other_table_of_a_follower_and_can_be_opened_again(path, new):
    other = TableSpec("model.other", 4)
    with closing(RocksDbStore(path, num_threads=1)) as store:
        store.table(TableSpec(TABLE, 4)).load(
            iter([(np.arange(3), np.ones((3, 4), np.float32))]), Marker("old"), keep=False
        )
        store.table(other).load(iter([(np.arange(3), np.ones((3, 4), np.float32))]), Marker("old"), keep=False)
    with closing(RocksDbStore(path, read_only=True, num_threads=1, catch_up_interval_ms=NEVER_MS)) as follower:
        follower.table(TableSpec(TABLE, 4)).open(0)
        follower.table(other).open(0)
        with closing(RocksDbStore(path, num_threads=1, row_dtype=new.row_dtype)) as store:
            store.table(new).load(
                iter([(np.arange(3), np.full((3, new.dim), 2, np.float32))]), Marker("new"), keep=False
            )
        with closing(RocksDbStore(path, num_threads=1)) as store:
            store.table(other).load(iter([(np.arange(3), np.full((3, 4), 2, np.float32))]), Marker("old"), keep=False)

        follower.catch_up()

        out = np.empty((1, 4), np.float32)
        assert follower.tables[other.name].fetch(np.array([1]), out).all()
        assert (out == 2).all()
        assert values_of(follower, [1]) == [1]
        if new.row_dtype == "fp32":
            follower.tables[TABLE].close()
            follower.table(new).open(0)
            out = np.empty((1, new.dim), np.float32)
            assert follower.tables[TABLE].fetch(np.array([1]), out).all()
            assert (out == 2).all()
