"""Which rows RAM is filled with, where it does not get all of them: a share, the hottest, or the first of the file."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import read_inference_config
from serving.errors import ConfigError, StoreError
from serving.model.sparse_file import open_sparse, write_sparse_directory
from serving.parameter_server import ParameterServer, TierSettings
from serving.parameter_server.first_rows import FirstRows, RowChoice
from serving.storage import MemoryStore, RocksDbStore
from tests.serving.ordinary_rights import ordinary_rights


@pytest.fixture
def model(write_model):
    return write_model(write_model.table(rows=300), write_model.table(dim=6, rows=100))


def keys_of(model, index=0):
    return np.array(list(model.tables[index]), dtype=np.int64)


@pytest.fixture
def ten_rows(tmp_path):
    write_sparse_directory(tmp_path / "t", np.arange(10), np.ones((10, 3), dtype=np.float32))
    return open_sparse(tmp_path / "t", 3)


@pytest.fixture
def fill(model, tmp_path):
    """Load the model into RAM of these bounds before a database; returns the keys that RAM holds of each table."""

    def load(first_rows, **bounds):
        settings = {"memory": TierSettings(first_rows=first_rows)}
        stores = [MemoryStore(**bounds), RocksDbStore(tmp_path / "db", num_threads=1)]
        with ParameterServer(stores, settings=settings) as server:
            server.load_model(read_inference_config(model.config_file, "dcn"))
            for index, rows in enumerate(model.tables):
                answer, found = server.lookup(f"dcn.table{index}", keys_of(model, index))
                assert found.all()
                assert answer.tobytes() == b"".join(row.tobytes() for row in rows.values())
            names = [f"dcn.table{index}" for index in range(len(model.tables))]
            return [{key for keys, _ in stores[0].tables[name].items() for key in keys.tolist()} for name in names]

    return load


@pytest.mark.parametrize(("rate", "rows"), [(1.0, (300, 100)), (0.25, (75, 25)), (0.0, (0, 0))])
def test_the_initial_cache_rate_is_the_share_of_each_tables_rows_that_ram_starts_with(fill, rate, rows):
    assert tuple(map(len, fill(FirstRows(rate)))) == rows


def test_ram_takes_no_more_than_it_has_room_for_whatever_the_rate(fill):
    assert tuple(map(len, fill(FirstRows(0.5), capacity_rows_per_table={"dcn.table0": 40}))) == (40, 50)


def test_the_hottest_rows_go_into_ram_first_and_then_the_first_of_the_file(fill, model, tmp_path):
    keys = keys_of(model)
    hottest = keys[::-1][:60]
    (tmp_path / "hot").mkdir()
    np.save(tmp_path / "hot" / "dcn.table0.npy", hottest)
    first_rows = FirstRows(hot_keys=tmp_path / "hot")

    few, others = fill(first_rows, capacity_rows_per_table={"dcn.table0": 40, "dcn.table1": 10})
    more, _ = fill(first_rows, capacity_rows_per_table={"dcn.table0": 100})

    assert few == set(hottest[:40].tolist())
    assert others == set(keys_of(model, 1)[:10].tolist())
    assert more == set(hottest.tolist()) | set(keys[:40].tolist())


def test_hot_keys_that_the_model_does_not_have_take_no_rows_place(model, tmp_path):
    keys = keys_of(model)
    np.save(tmp_path / "dcn.table0.npy", np.concatenate([np.setdiff1d(np.arange(1, 500), keys), keys[::-1][:60]]))
    settings = {"memory": TierSettings(first_rows=FirstRows(hot_keys=tmp_path))}

    with ParameterServer([MemoryStore()], settings=settings) as server:
        server.load_model(read_inference_config(model.config_file, "dcn"))

        assert server.lookup("dcn.table0", keys)[1].all()


@settings(deadline=None)
@given(
    file_keys=st.lists(st.integers(0, 60), unique=True),
    hottest=st.lists(st.integers(0, 60), max_size=40),
    rows=st.integers(0, 60),
    batch=st.integers(1, 20),
)
def test_a_choice_is_the_same_whatever_the_batches(file_keys, hottest, rows, batch):
    held_hot = [key for key in dict.fromkeys(hottest) if key in file_keys]
    chosen = {*held_hot[:rows], *[key for key in file_keys if key not in held_hot][: max(rows - len(held_hot), 0)]}
    batches = [np.array(file_keys[start : start + batch], np.int64) for start in range(0, len(file_keys), batch)]
    choice = RowChoice(rows, np.array(hottest, dtype=np.int64), batches)

    taken = [key for keys in batches for key in keys[choice.take(keys)].tolist()]

    assert len(taken) == min(rows, len(file_keys))
    assert set(taken) == chosen
    assert choice.is_full == (len(taken) == rows)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (np.zeros((2, 2), np.int64), "expected int64\\[K\\], keys with the hottest first, got int64\\[2, 2\\]"),
        (np.zeros(2, np.float32), "got float32\\[2\\]"),
        (np.array([2**63 - 1]), "reserved"),
        (b"no array", "expected a NumPy file of int64 keys, found 8 bytes, which begin with b'no array'"),
        (b"", "expected a NumPy file of int64 keys, found an empty file"),
    ],
    ids=["2-D", "floats", "reserved", "junk", "empty"],
)
def test_hot_keys_that_are_no_list_of_keys_are_refused(ten_rows, tmp_path, content, reason):
    file = tmp_path / "m.t.npy"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.save(file, content)

    with pytest.raises(ConfigError, match=reason):
        FirstRows(hot_keys=tmp_path).choose("m.t", ten_rows, None)


def test_a_folder_of_hot_keys_that_is_absent_is_refused(ten_rows, tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        FirstRows(hot_keys=tmp_path / "absent").choose("m.t", ten_rows, None)


@pytest.mark.parametrize("protected", ["", "hot", "hot/m.t.npy"])
def test_hot_keys_that_may_not_be_read_are_refused(ten_rows, tmp_path, protected):
    (tmp_path / "hot").mkdir()
    np.save(tmp_path / "hot" / "m.t.npy", np.arange(3))
    (tmp_path / protected).chmod(0)

    with ordinary_rights(), pytest.raises(ConfigError, match=r"no such folder|cannot be read: Permission"):
        FirstRows(hot_keys=tmp_path / "hot").choose("m.t", ten_rows, None)
    (tmp_path / protected).chmod(0o700)


def test_a_row_that_the_row_type_cannot_hold_is_refused_wherever_the_hot_keys_put_it(model, tmp_path):
    config = read_inference_config(model.config_file, "dcn")
    rows = np.ones((10, 4), dtype=np.float32)
    rows[8, 2] = 70000.0
    write_sparse_directory(tmp_path / "t", np.arange(10), rows)
    change = {"file": tmp_path / "t", "row_dtype": "fp16"}
    tables = (config.tables[0].model_copy(update=change),)
    np.save(tmp_path / "dcn.table0.npy", np.arange(5))
    settings = {"memory": TierSettings(first_rows=FirstRows(hot_keys=tmp_path))}
    stores = [MemoryStore(capacity_rows=3), RocksDbStore(tmp_path / "db", num_threads=1)]
    with (
        ParameterServer(stores, settings=settings) as server,
        pytest.raises(StoreError, match="which fp16 rows cannot hold"),
    ):
        server.load_model(config.model_copy(update={"tables": tables}))
