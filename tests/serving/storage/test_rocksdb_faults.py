"""A disk that is full or damaged: errors name the file, and what was there before can still be read."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage import Marker, RocksDbStore, TableSpec
from serving.storage.rocksdb.file_checks import whole_entries_bytes

TABLE = "model.table"
SPEC = TableSpec(TABLE, 16)

# Fills the disk on which the database lies: by a load, then by inserts. Prints what it was told, and what is left. Then
# there is room again, and the database is opened anew while the errors are still there.
FILLER = f"""
import sys
from pathlib import Path
import numpy as np
from serving.errors import StoreError
from serving.storage import Marker, RocksDbStore, TableSpec

ballast = Path(sys.argv[1]).parent / "ballast"
ballast.write_bytes(bytes(17 * 2**20))
errors = []
spec = TableSpec({TABLE!r}, 256)  # few rows fill the disk
store = RocksDbStore(sys.argv[1], num_threads=1)
table, other = store.table(spec), store.table(TableSpec("model.other", 256))
keys = np.arange(1000)
table.load(iter([(keys, np.full((1000, 256), 1, np.float32))]), Marker("digest"), keep=False)

def batches():
    for first in range(0, 10**6, 1000):
        yield keys + first, np.full((1000, 256), 2, np.float32)

for write in (lambda: other.load(batches(), Marker("never"), keep=False), lambda: insert_all()):
    def insert_all():
        for new, rows in batches():
            table.insert(new + 1000, rows)
    try:
        write()
        print("not full")
    except StoreError as err:
        print(err)
        errors.append(err)
out = np.empty((1000, 256), np.float32)
found = table.fetch(keys, out)
print(bool(found.all() and (out == 1).all()), table.marker().digest, other.marker())
store.close()
ballast.unlink()
store = RocksDbStore(sys.argv[1], num_threads=1)
print(store.table(spec).marker().digest, len(errors))
store.close()
"""


@pytest.fixture
def small_disk():
    """Run the filler with the database on a disk of 32 MiB."""
    mounted = "mount -t tmpfs -o size=32m tmpfs"

    def run(folder):
        disk = folder / "disk"
        disk.mkdir()
        script = f"{mounted} {disk} && exec {sys.executable} -c '{FILLER.replace(chr(39), chr(34))}' {disk}/db"
        return subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120)

    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) to mount a small disk with")
    tried = subprocess.run(["unshare", "-rm", "sh", "-c", f"{mounted} /mnt"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {tried.stderr.strip()}")
    return run


def test_a_full_disk_is_an_error_with_the_path_and_old_rows_stay_readable(small_disk, tmp_path):
    done = small_disk(tmp_path)

    assert done.returncode == 0, done.stderr
    load, insert, left, opened_anew = done.stdout.splitlines()
    for message in (load, insert):
        assert str(tmp_path / "disk" / "db") in message
        assert "No space left on device" in message
    assert load.startswith("rocksdb: table 'model.other': ")
    assert left == "True digest None"
    assert opened_anew == "digest 2"


@pytest.fixture
def path(tmp_path):
    """A database of 2000 loaded rows, and 10 that were inserted."""
    store = RocksDbStore(tmp_path / "db", num_threads=1)
    store.table(SPEC).load(iter([(np.arange(2000), np.ones((2000, 16), np.float32))]), Marker("digest"), keep=False)
    store.tables[TABLE].insert(np.arange(2000, 2010), np.ones((10, 16), np.float32))
    store.close()
    return tmp_path / "db"


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_a_folder_that_goes_away_under_an_open_database_is_an_error(path, tmp_path, replaced):
    """RocksDB itself writes on to the files that nobody will read."""
    store = RocksDbStore(path, num_threads=1)
    table = store.table(SPEC)
    table.open(0)
    shutil.copytree(path, tmp_path / "other")
    shutil.rmtree(path)
    if replaced:
        (tmp_path / "other").rename(path)

    for write in (store.sync, lambda: table.insert(np.array([7]), np.ones((1, 16), np.float32))):
        with pytest.raises(StoreError, match=f"{path}: the folder was removed, moved or replaced while it was open"):
            write()
    store.close()


def read_all(path, **options):
    store = RocksDbStore(path, num_threads=1, **options)
    try:
        store.table(SPEC).open(0)
        out = np.empty((2010, 16), np.float32)
        found = store.tables[TABLE].fetch(np.arange(2010), out)
        walked = sum(keys.size for keys, _ in store.tables[TABLE].items())
        return int(found.sum()), walked, bool((out[found] == 1).all())
    finally:
        store.close()


def read_first(store):
    return store.tables[TABLE].fetch(np.arange(2000), np.empty((2000, 16), np.float32))


def damage(file, how):
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        at = len(content) // 3
        file.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])


def test_without_damage_every_row_is_read(path):
    assert read_all(path) == (2010, 2010, True)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("pattern", ["*.sst", "MANIFEST-*", "CURRENT"])
def test_a_damaged_file_is_an_error_that_names_it(path, pattern, how, read_only):
    file = max(path.glob(pattern), key=lambda file: file.stat().st_size)
    damage(file, how)

    with pytest.raises(StoreError) as caught:
        read_all(path, read_only=read_only)

    assert str(path) in str(caught.value)
    assert file.stem.lstrip("0") in str(caught.value)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")], ids=["pipe", "endless"])
@pytest.mark.parametrize("name", ["IDENTITY", "CURRENT", "MANIFEST-*", "*.log", "*.sst"])
def test_a_file_that_is_not_a_regular_file_is_an_error_at_once(path, name, make, read_only):
    file = next(path.glob(name))
    file.unlink()
    make(file)

    with pytest.raises(StoreError, match=f"{re.escape(str(file))}: is not a regular file"):
        RocksDbStore(path, read_only=read_only, num_threads=1)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["IDENTITY", "CURRENT", "MANIFEST-*", "*.log"])
def test_a_file_that_is_too_large_to_read_is_an_error_at_once(path, name, read_only):
    file = next(path.glob(name))
    os.truncate(file, 1 << 40)

    with pytest.raises(StoreError, match=f"{re.escape(str(file))}: expected at most 8,589,934,592 bytes"):
        RocksDbStore(path, read_only=read_only, num_threads=1)


@pytest.mark.parametrize("read", [read_first, lambda store: list(store.tables[TABLE].items())])
def test_an_error_that_somebody_keeps_does_not_keep_the_database_locked(path, read):
    damage(max(path.glob("*.sst"), key=lambda file: file.stat().st_size), "flipped")
    store = RocksDbStore(path, num_threads=1, warm_up=False)
    store.table(SPEC).open(0)
    with pytest.raises(StoreError, match="checksum") as kept:
        read(store)
    store.close()

    RocksDbStore(path, num_threads=1).close()
    assert kept.tb is not None  # which has the variables of the calls that failed


def test_a_log_that_ends_in_a_half_written_record_loses_that_record_only(tmp_path):
    store = RocksDbStore(tmp_path / "db", num_threads=1)
    store.table(SPEC).load(iter([(np.arange(2000), np.ones((2000, 16), np.float32))]), Marker("digest"), keep=False)
    for key in (2000, 2001):
        store.tables[TABLE].insert(np.array([key]), np.ones((1, 16), np.float32))
    shutil.copytree(tmp_path / "db", tmp_path / "killed")
    store.close()
    (log,) = (tmp_path / "killed").glob("*.log")
    log.write_bytes(log.read_bytes()[:-3])

    assert read_all(tmp_path / "killed") == (2001, 2001, True)


def test_every_cut_of_the_list_of_files_is_noticed_but_those_between_its_entries(path):
    (manifest,) = path.glob("MANIFEST-*")
    content = manifest.read_bytes()
    ends = {whole_entries_bytes(content[:size]) for size in range(len(content) + 1)}

    assert whole_entries_bytes(content) == len(content)
    assert 5 < len(ends) < 40
    for end in sorted(ends - {0}):
        assert whole_entries_bytes(content[: end - 1]) < end - 1


def test_entries_longer_than_a_block_are_whole_with_their_last_piece():
    def record(kind, length):
        return b"crc!" + length.to_bytes(2, "little") + bytes([kind]) + b"x" * length

    first, last, short = record(2, 32768 - 7), record(4, 100), record(1, 5)

    assert whole_entries_bytes(first + last + short) == len(first + last + short)
    assert whole_entries_bytes(first + last[:50]) == 0
    assert whole_entries_bytes(first) == 0
    assert whole_entries_bytes(record(1, 32768 - 7 - 3) + b"\0\0\0" + short) == 32768 + len(short)
    assert whole_entries_bytes(short + bytes(1000)) == len(short) + 1000


def test_after_damage_a_checkpoint_brings_the_rows_back(path, tmp_path):
    store = RocksDbStore(path, num_threads=1)
    store.checkpoint(tmp_path / "copy")
    store.close()
    damage(max(path.glob("MANIFEST-*")), "truncated")
    shutil.rmtree(path)

    shutil.copytree(tmp_path / "copy", path)

    assert read_all(path) == (2010, 2010, True)
