"""The log of the newest rows after a kill: what is damaged or lost of it is told, but for a last write cut short."""

import shutil

import numpy as np
import pytest

from serving.errors import StoreError
from serving.storage import Marker, RocksDbStore, TableSpec, recover_database

TABLE = "model.table"
SPEC = TableSpec(TABLE, 16)


@pytest.fixture
def path(tmp_path):
    """What a killed process leaves: a database of 2000 loaded rows, and 10 that are in its log only."""
    store = RocksDbStore(tmp_path / "db", num_threads=1)
    store.table(SPEC).load(iter([(np.arange(2000), np.ones((2000, 16), np.float32))]), Marker("digest"), keep=False)
    for key in range(2000, 2010):
        store.tables[TABLE].insert(np.array([key]), np.ones((1, 16), np.float32))
    shutil.copytree(tmp_path / "db", tmp_path / "killed")
    store.close()
    return tmp_path / "killed"


@pytest.fixture
def log(path):
    return max(path.glob("*.log"), key=lambda log: log.stat().st_size)


def found_rows(path, read_only):
    store = RocksDbStore(path, num_threads=1, read_only=read_only)
    try:
        store.table(SPEC).open(0)
        out = np.empty((2010, 16), np.float32)
        found = store.tables[TABLE].fetch(np.arange(2010), out)
        assert (out[found] == 1).all()
        return int(found.sum())
    finally:
        store.close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_log_damaged_before_its_end_is_an_error_that_names_it(path, log, part, read_only):
    content = bytearray(log.read_bytes())
    content[int(part * len(content))] ^= 1
    log.write_bytes(content)

    with pytest.raises(StoreError, match=rf"rocksdb: {log}: .*checksum mismatch.*restore a checkpoint"):
        found_rows(path, read_only)

    assert log.read_bytes() == content


def test_a_recovered_database_has_the_writes_before_the_damage_and_is_sound_from_then_on(path, log):
    content = bytearray(log.read_bytes())
    content[int(0.99 * len(content))] ^= 1
    log.write_bytes(content)

    recover_database(path)

    assert found_rows(path, read_only=True) == 2009
    assert found_rows(path, read_only=False) == 2009


def test_where_there_is_no_database_none_is_recovered(tmp_path):
    with pytest.raises(StoreError, match="there is no database"):
        recover_database(tmp_path / "none")

    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_without_its_log_is_refused_until_it_gets_an_empty_log(path, log, read_only):
    log.unlink()

    with pytest.raises(StoreError, match=rf"{path}: no log \(\*\.log\).*touch 000000\.log"):
        found_rows(path, read_only)

    (path / "000000.log").touch()
    store = RocksDbStore(path, num_threads=1, read_only=read_only)
    assert store.table(SPEC).marker() is None  # for that was in the log, too
    store.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_log_whose_last_write_was_cut_short_has_the_writes_before_it(path, log, read_only):
    log.write_bytes(log.read_bytes()[:-3])

    assert found_rows(path, read_only) == 2009


@pytest.mark.parametrize("read_only", [False, True])
def test_a_checkpoint_has_a_log_and_can_be_opened(tmp_path, path, read_only):
    store = RocksDbStore(path, num_threads=1)
    store.table(SPEC).open(0)
    store.checkpoint(tmp_path / "copy")
    store.close()

    assert found_rows(tmp_path / "copy", read_only) == 2010
