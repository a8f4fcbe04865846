"""A parameter server over RocksDB that keeps narrow rows, or follows the server of another process."""

import numpy as np
import pytest

from kernels.host import round_rows
from serving.parameter_server import ParameterServer
from serving.storage import MemoryStore, RocksDbStore
from tests.serving.small_server import KEYS, ROWS, keep, model_of, serve, write_model

WAIT_S = 60
NEW = np.array([[0.1, -7.0, 3.3]], dtype=np.float32)
CAN_BE_COPIED = [("bf16", True), ("int8", False), ("uint8", False)]


@pytest.fixture
def folder(tmp_path):
    write_model(tmp_path)
    return tmp_path


def rocksdb(folder, row_dtype=None, **options):
    return RocksDbStore(folder / "db", num_threads=1, row_dtype=row_dtype, **options)


def rounded(rows, row_dtype):
    out = np.empty_like(rows)
    round_rows(rows, row_dtype, out)
    return out


def answer(server, keys=KEYS):
    rows, found = server.lookup("m.t", np.array(keys))
    assert found.all()
    return rows.tobytes()


@pytest.mark.parametrize(("row_dtype", "is_copied"), CAN_BE_COPIED)
def test_narrow_rows_of_the_disk_are_promoted_unless_they_would_be_rounded_twice(folder, row_dtype, is_copied):
    expected = rounded(ROWS, row_dtype).tobytes()
    memory = MemoryStore()
    with serve(model_of(folder, row_dtype=row_dtype), memory, rocksdb(folder, row_dtype), promote=True) as server:
        from_memory = answer(server)
        keep(memory, [])

        from_disk = answer(server)
        assert server.wait_for_promotions(WAIT_S)

        assert from_memory == from_disk == answer(server) == expected
        assert memory.tables["m.t"].count() == (len(KEYS) if is_copied else 0)


@pytest.mark.parametrize(("row_dtype", "is_copied"), CAN_BE_COPIED)
def test_a_changed_narrow_table_has_the_same_answers_after_a_restart(folder, row_dtype, is_copied, caplog):
    config = model_of(folder, row_dtype=row_dtype)
    with serve(config, MemoryStore(), rocksdb(folder, row_dtype)) as server:
        server.insert("m.t", np.array([100]), NEW)
        before = answer(server, [*KEYS, 100])

    memory = MemoryStore()
    with serve(config, memory, rocksdb(folder, row_dtype)) as server:
        assert answer(server, [*KEYS, 100]) == before == rounded(np.vstack([ROWS, NEW]), row_dtype).tobytes()
        assert bool(memory.tables["m.t"].count()) == is_copied
    assert ("would be rounded twice" in caplog.text) != is_copied


def test_a_server_that_follows_another_serves_its_changes_and_its_loads(folder):
    config = model_of(folder)
    with serve(config, MemoryStore(), rocksdb(folder)) as writer:
        store = rocksdb(folder, read_only=True, catch_up_interval_ms=3_600_000)
        with ParameterServer([store]) as follower:
            follower.load_model(config)
            assert answer(follower) == ROWS.tobytes()

            writer.insert("m.t", np.array([100, KEYS[0]]), np.vstack([NEW, NEW]))
            store.catch_up()
            assert answer(follower, [100, KEYS[0], KEYS[1]]) == np.vstack([NEW, NEW, ROWS[1:2]]).tobytes()

            writer.erase_model("m")
            writer.load_model(config)
            store.catch_up()
            assert answer(follower) == ROWS.tobytes()
            assert not follower.lookup("m.t", np.array([100]))[1].any()
