"""A database in a folder that may not be written to, and one whose files may not be read."""

import subprocess
import sys

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage import Marker, RocksDbStore, TableSpec
from serving.storage.rocksdb.engine import SETTINGS_FILE, check_database
from serving.storage.rocksdb.follower import verify_database
from tests.serving.ordinary_rights import ordinary_rights

SPEC = TableSpec("model.table", 4)
KEYS = np.arange(1000)
ROWS = np.random.default_rng(3).standard_normal((1000, 4), dtype=np.float32)


@pytest.fixture
def database(tmp_path):
    """A database of 1,000 rows, the last hundred of which are in the log alone; its folder."""
    store = RocksDbStore(tmp_path / "db", num_threads=1)
    store.table(SPEC).load(iter([(KEYS[:900], ROWS[:900])]), Marker("digest"), keep=False)
    store.tables[SPEC.name].insert(KEYS[900:], ROWS[900:])
    store.close()
    yield tmp_path / "db"
    (tmp_path / "db").chmod(0o700)


def assert_has_all_rows(store):
    out = np.empty_like(ROWS)
    assert store.tables[SPEC.name].fetch(KEYS, out).all()
    np.testing.assert_array_equal(out, ROWS)


def state_of(folder):
    return sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())


@pytest.mark.parametrize("protected", [".", SETTINGS_FILE])
def test_a_database_is_read_where_nothing_may_be_written(database, protected):
    before = state_of(database)
    (database / protected).chmod(0o555)

    with ordinary_rights():
        store = RocksDbStore(database, read_only=True, num_threads=1)
        store.table(SPEC).open(0)
        assert_has_all_rows(store)
        walked = np.concatenate([keys for keys, _ in store.tables[SPEC.name].items(300)])
        np.testing.assert_array_equal(np.sort(walked), KEYS)
        store.close()
        assert verify_database(database) == 1000
        check_database(database, read_only=True)

    assert state_of(database) == before


def test_a_user_without_the_right_to_write_follows_the_writer(database):
    writer = RocksDbStore(database, num_threads=1)
    writer.table(SPEC).open(0)
    database.chmod(0o555)
    with ordinary_rights():
        reader = RocksDbStore(database, read_only=True, num_threads=1)
        reader.table(SPEC).open(0)
    writer.tables[SPEC.name].insert(KEYS, -ROWS)

    with ordinary_rights():
        assert_has_all_rows(reader)
        reader.catch_up()
        out = np.empty_like(ROWS)
        assert reader.tables[SPEC.name].fetch(KEYS, out).all()

    np.testing.assert_array_equal(out, -ROWS)
    reader.close()
    writer.close()


def test_a_database_on_a_read_only_mount_is_read(database):
    script = f"""
from serving.storage import Marker, RocksDbStore, TableSpec
import numpy as np
store = RocksDbStore({str(database)!r}, read_only=True, num_threads=1)
store.table(TableSpec("model.table", 4)).open(0)
out = np.empty((1000, 4), np.float32)
print(store.tables["model.table"].fetch(np.arange(1000), out).sum())
"""
    mount = f"mount --bind {database} {database} && mount -o remount,bind,ro {database} && ! touch {database}/x"
    command = f"({mount}) 2>/dev/null || exit 77; exec {sys.executable} -c '{script.replace(chr(39), chr(34))}'"

    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=60)

    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this system lets nobody mount")
    assert (done.stdout, done.stderr) == ("1000\n", "")


@pytest.mark.parametrize("mode", [0, 0o444, 0o555], ids=oct)
def test_writing_where_one_may_not_is_an_error_that_names_the_path(database, mode):
    database.chmod(mode)

    with ordinary_rights():
        with pytest.raises(StoreError, match=r"/db.*[Pp]ermission denied"):
            RocksDbStore(database, num_threads=1)
        with pytest.raises(StoreError, match=r"/db: no permission to write to it"):
            check_database(database, read_only=False)


def test_a_folder_that_may_not_be_entered_and_a_file_that_may_not_be_read_are_named(database):
    table_file = next(database.glob("*.sst"))
    table_file.chmod(0)
    with ordinary_rights(), pytest.raises(StoreError, match=rf"{table_file.name}.*Permission denied"):
        RocksDbStore(database, read_only=True, num_threads=1)
    database.chmod(0)
    with ordinary_rights():
        with pytest.raises(StoreError, match=r"/db.*Permission denied"):
            RocksDbStore(database, read_only=True, num_threads=1)
        with pytest.raises(StoreError, match=r"/db.*Permission denied"):
            verify_database(database)
