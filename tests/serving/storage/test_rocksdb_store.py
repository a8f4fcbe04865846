import json
import logging
import struct
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest

from kernels.host import encode_rows, round_rows
from serving.errors import MissingExtraError, StoreError
from serving.storage import Marker, RocksDbStore, TableSpec
from serving.storage.rocksdb import sort as rocksdb_sort
from serving.storage.rocksdb import sorted_files
from serving.storage.rocksdb.database import Database
from serving.storage.rocksdb.engine import check_database
from serving.storage.store import Change

TABLE = "model.table"
TAG = "hps_et.model.table"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "db"


def open_store(path, dim=4, key_bytes=8, **options):
    store = RocksDbStore(path, num_threads=1, **options)
    store.table(TableSpec(TABLE, dim, key_bytes)).open(0)
    return store


def rows_of(keys, value=0.0):
    """float32[N, 4] that can be told from the key."""
    return (np.asarray(keys, dtype=np.float64)[:, None] % 1000 + value + np.arange(4)).astype(np.float32)


def load(store, keys, digest="digest", batch_rows=100, value=0.0, key_bytes=8, keep=False):
    keys = np.asarray(keys, dtype=np.int64)
    batches = (
        (keys[i : i + batch_rows], rows_of(keys[i : i + batch_rows], value)) for i in range(0, keys.size, batch_rows)
    )
    store.table(TableSpec(TABLE, 4, key_bytes)).load(batches, Marker(digest), keep=keep)


def fetch(store, keys):
    out = np.full((len(keys), 4), np.nan, dtype=np.float32)
    found = store.tables[TABLE].fetch(np.asarray(keys, dtype=np.int64), out)
    return out, found


@pytest.mark.parametrize(
    ("rows", "run_bytes", "file_bytes", "files"),
    [
        (200, 1, 1, 200),
        (1000, 24 * 250, 24 * 300, 3),
        (1000, 24 * 250, sorted_files.FILE_BYTES, 1),
        (1000, rocksdb_sort.RUN_BYTES, 1, 1),
    ],
)
def test_a_bulk_load_holds_exactly_the_rows_given_in_however_many_files(
    path, monkeypatch, rows, run_bytes, file_bytes, files
):
    monkeypatch.setattr(rocksdb_sort, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(sorted_files, "FILE_BYTES", file_bytes)
    keys = np.random.default_rng(0).permutation(np.arange(-rows // 2, rows // 2) * 257)
    with open_closing(path) as store:
        load(store, keys)

        out, found = fetch(store, [*keys, 13])

        assert found[:-1].all()
        assert not found[-1]
        assert (out[:-1] == rows_of(keys)).all()
        assert sum(batch.size for batch, _ in store.tables[TABLE].items()) == rows
        assert store.tables[TABLE].marker().digest == "digest"
        assert len(list(path.glob("*.sst"))) == files
        assert store.tables[TABLE].count() == rows
        assert not (path / "loading").exists()


def test_many_files_of_one_load_lie_side_by_side_so_that_none_need_be_merged(path, monkeypatch):
    import rocksdict

    monkeypatch.setattr(rocksdb_sort, "RUN_BYTES", 24 * 100)
    monkeypatch.setattr(sorted_files, "FILE_BYTES", 24 * 200)
    with open_closing(path) as store:
        load(store, np.random.default_rng(0).permutation(1000))
    options = rocksdict.Options(raw_mode=True)
    raw = rocksdict.Rdict(str(path), options, {"default": options, TAG: options}, rocksdict.AccessType.read_only(False))

    levels = [raw.get_column_family(TAG).property_value(f"rocksdb.num-files-at-level{level}") for level in range(7)]

    raw.close()
    assert levels[:6] == ["0"] * 6
    assert int(levels[6]) > 3


@pytest.mark.parametrize("run_bytes", [1, rocksdb_sort.RUN_BYTES])
def test_of_duplicates_in_a_bulk_load_the_last_wins(path, monkeypatch, run_bytes):
    monkeypatch.setattr(rocksdb_sort, "RUN_BYTES", run_bytes)
    with open_closing(path) as store:
        batches = [(np.array([7, 8, 7]), rows_of([1, 2, 3])), (np.array([8, 9]), rows_of([4, 5]))]

        store.table(TableSpec(TABLE, 4)).load(iter(batches), Marker("digest"), keep=False)

        assert (fetch(store, [7, 8, 9])[0] == rows_of([3, 4, 5])).all()


def test_a_bulk_load_replaces_what_the_table_held(path):
    with open_closing(path) as store:
        load(store, [1, 2, 3], "first")
        load(store, [3, 4], "second", value=0.5)

        out, found = fetch(store, [1, 2, 3, 4])

        assert found.tolist() == [False, False, True, True]
        assert (out[2:] == rows_of([3, 4], 0.5)).all()
        assert store.tables[TABLE].marker().digest == "second"


def test_an_empty_bulk_load_leaves_an_empty_table_that_counts_as_loaded(path):
    with open_closing(path) as store:
        load(store, [1, 2])
        store.table(TableSpec(TABLE, 4)).load(iter(()), Marker("nothing"), keep=False)

        assert not fetch(store, [1, 2])[1].any()
        assert store.tables[TABLE].marker().digest == "nothing"


def test_a_bulk_load_that_fails_halfway_leaves_the_old_rows_and_no_files(path, monkeypatch):
    monkeypatch.setattr(rocksdb_sort, "RUN_BYTES", 24 * 100)

    def batches():
        yield np.arange(500), rows_of(np.arange(500))
        raise StoreError("elsewhere", TABLE, "the file ends here")

    with open_closing(path) as store:
        load(store, [1], "before")
        with pytest.raises(StoreError, match="the file ends here"):
            store.table(TableSpec(TABLE, 4)).load(batches(), Marker("after"), keep=False)

        assert fetch(store, [1, 2])[1].tolist() == [True, False]
        assert store.tables[TABLE].marker().digest == "before"
        assert not (path / "loading").exists()


def test_the_old_rows_are_read_until_the_new_ones_are_whole(path):
    def batches():
        for key in (2, 3):
            seen.append((fetch(store, [1, 2])[1].tolist(), store.tables[TABLE].marker().digest))
            yield np.array([key]), rows_of([key])

    seen = []
    with open_closing(path) as store:
        load(store, [1], "before")

        store.table(TableSpec(TABLE, 4)).load(batches(), Marker("after"), keep=False)

        assert seen == [([True, False], "before")] * 2
        assert fetch(store, [1, 2, 3])[1].tolist() == [False, True, True]


def test_files_that_the_database_does_not_take_leave_an_empty_table_that_was_not_loaded(path, monkeypatch):
    def lose(self, table, files):
        raise StoreError("rocksdb", TABLE, "lost")

    with open_closing(path) as store:
        load(store, [1], "before")
        monkeypatch.setattr(Database, "ingest", lose)
        with pytest.raises(StoreError, match="lost"):
            load(store, [2], "after")
        assert not fetch(store, [1, 2])[1].any()
        store.tables[TABLE].insert(np.array([3]), rows_of([3]))
        assert fetch(store, [3])[1].all()
    with open_closing(path) as store:
        assert store.tables[TABLE].marker() is None


@pytest.mark.parametrize("key", [-1, 2**32])
def test_a_bulk_load_refuses_a_key_that_is_too_wide_and_leaves_the_old_rows(path, key):
    with open_closing(path, key_bytes=4) as store:
        load(store, [1], key_bytes=4)

        with pytest.raises(StoreError, match=f"key {key} does not fit 4 bytes"):
            load(store, [5, key], "other", key_bytes=4)

        assert fetch(store, [1, 5])[1].tolist() == [True, False]


def test_rows_of_other_tables_change_while_a_table_is_loaded_and_a_checkpoint_waits(path, tmp_path):
    def change():
        store.tables[TABLE].write_flags(changed=True)
        store.tables[TABLE].insert(np.array([3]), rows_of([3]))
        store.tables[TABLE].evict(np.array([1]))

    def batches():
        yield np.arange(500), rows_of(np.arange(500))
        changing.start()
        checkpointing.start()
        changing.join(60)
        seen.append(fetch(store, [1, 2, 3])[1].tolist())
        yield np.arange(500, 900), rows_of(np.arange(500, 900))

    seen = []
    with open_closing(path) as store:
        load(store, [1, 2], "digest")
        changing = threading.Thread(target=change)
        checkpointing = threading.Thread(target=store.checkpoint, args=(tmp_path / "copy",))

        store.table(TableSpec("model.other", 4)).load(batches(), Marker("other"), keep=False)
        checkpointing.join()

        assert seen == [[False, True, True]]
        assert store.tables[TABLE].marker() == Marker("digest", 2, changed=True)
    with open_closing(tmp_path / "copy", read_only=True) as copy:
        copy.table(TableSpec("model.other", 4)).open(0)
        assert copy.tables["model.other"].marker().digest == "other"
        assert sum(keys.size for keys, _ in copy.tables["model.other"].items()) == 900


def test_dropping_a_table_forgets_what_it_was_loaded_from(path):
    with open_closing(path) as store:
        load(store, [1])

        store.erase(TABLE)

        assert store.table(TableSpec(TABLE, 4)).marker() is None


def test_rows_and_the_record_of_the_load_survive_closing(path):
    with open_closing(path) as store:
        load(store, range(100))
        store.tables[TABLE].insert(np.array([100]), rows_of([100]))

    with open_closing(path) as store:
        assert fetch(store, range(101))[1].all()
        assert store.tables[TABLE].marker().digest == "digest"
        assert 100 <= store.tables[TABLE].count() <= 102


@pytest.mark.parametrize(("key_bytes", "code"), [(8, "<q"), (4, "<I")])
def test_keys_and_values_have_the_layout_of_hps(path, key_bytes, code):
    import rocksdict

    key = 2**32 - 2
    with open_closing(path, key_bytes=key_bytes) as store:
        load(store, [key], key_bytes=key_bytes)
        store.tables[TABLE].insert(np.array([3]), rows_of([3]))
    options = rocksdict.Options(raw_mode=True)
    raw = rocksdict.Rdict(str(path), options, {"default": options, TAG: options}, rocksdict.AccessType.read_only(False))

    content = dict(raw.get_column_family(TAG).items())

    raw.close()
    assert content == {struct.pack(code, number): struct.pack("<4f", *rows_of([number])[0]) for number in (key, 3)}


def test_a_database_that_hps_wrote_can_be_read(path):
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    raw = rocksdict.Rdict(str(path), options)
    raw.create_column_family(TAG, options)[struct.pack("<q", -5)] = struct.pack("<4f", 1, 2, 3, 4)
    raw.close()

    with open_closing(path, read_only=True) as store:
        out, found = fetch(store, [-5, 5])

    assert found.tolist() == [True, False]
    assert out[0].tolist() == [1, 2, 3, 4]


def test_a_key_that_is_no_uint32_is_absent_from_a_uint32_table_and_not_taken(path):
    with open_closing(path, key_bytes=4) as store:
        load(store, [2**32 - 1, 0], key_bytes=4)

        out, found = fetch(store, [-1, 2**32 - 1, 2**32, 0])

        assert found.tolist() == [False, True, False, True]
        assert (out[[0, 2]] == 0.0).all()
        with pytest.raises(StoreError, match="does not fit 4 bytes"):
            store.tables[TABLE].insert(np.array([-1]), rows_of([1]))
        store.tables[TABLE].evict(np.array([-1]))
        assert fetch(store, [2**32 - 1])[1].all()


def test_fetching_in_small_pieces_changes_nothing(path):
    with open_closing(path, max_batch_size=7) as store:
        load(store, range(0, 100, 2))

        out, found = fetch(store, range(100))

        assert found.tolist() == [True, False] * 50
        assert (out[::2] == rows_of(range(0, 100, 2))).all()


def test_a_second_writer_is_refused_with_the_folder(path):
    with open_closing(path), pytest.raises(StoreError, match="already open for writing") as caught:
        RocksDbStore(path)

    assert str(path) in str(caught.value)
    assert "in this process: close the other store first" in str(caught.value)


def test_a_walk_during_the_closing_ends_in_a_store_error_and_another_can_begin(path):
    store = open_store(path)
    load(store, range(100))
    walk = store.tables[TABLE].items(batch_rows=10)
    later = store.tables[TABLE].items()
    next(walk)
    store.close()

    assert sum(keys.size for keys, _ in walk) == 90  # what was begun keeps the database open
    with pytest.raises(StoreError, match="the store is closed"):
        next(later)

    open_store(path).close()


def test_a_read_that_meets_the_closing_ends_in_rows_or_a_store_error(path):
    store = open_store(path)
    load(store, range(5000))
    table = store.tables[TABLE]
    outcomes = []
    begun = threading.Event()

    def read():
        while len(outcomes) < 100_000:
            try:
                outcomes.append(bool(table.fetch(np.arange(2000), np.empty((2000, 4), np.float32)).all()))
            except StoreError:
                outcomes.append("closed")
                return
            finally:
                begun.set()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    begun.wait()
    store.close()
    for reader in readers:
        reader.join()

    assert set(outcomes) <= {True, False, "closed"}
    assert outcomes.count("closed") == 2
    open_store(path).close()  # the lock is free


def test_a_reader_opens_next_to_a_writer(path):
    with open_closing(path) as store:
        load(store, range(10))

        with open_closing(path, read_only=True) as reader:
            assert fetch(reader, range(10))[1].all()
            assert reader.tables[TABLE].marker().digest == "digest"


def test_a_read_only_store_takes_nothing(path):
    open_store(path).close()

    with open_closing(path, read_only=True) as store:
        for call in (
            lambda: store.tables[TABLE].insert(np.array([1]), rows_of([1])),
            lambda: store.tables[TABLE].evict(np.array([1])),
            lambda: load(store, [1]),
            lambda: store.table(TableSpec("model.other", 4)).open(0),
        ):
            with pytest.raises(StoreError, match="read-only"):
                call()
        with pytest.raises(StoreError, match="read-only"):
            store.erase(TABLE)

    with open_closing(path, read_only=True) as store:
        assert store.tables[TABLE].capacity_rows is None


def test_a_read_only_store_that_is_not_there_is_an_error_that_names_it(path):
    with pytest.raises(StoreError, match=str(path)):
        RocksDbStore(path, read_only=True)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damaged_files_are_an_error_that_names_the_file(path, damage):
    with open_closing(path) as store:
        load(store, range(2000))
    file = max(path.glob("*.sst"), key=lambda file: file.stat().st_size)
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.write_bytes(content[:200] + bytes([content[200] ^ 0xFF]) + content[201:])

    with pytest.raises(StoreError) as caught, open_closing(path) as store:
        fetch(store, range(2000))

    assert str(path) in str(caught.value)
    assert file.stem.lstrip("0") in str(caught.value)


def test_values_of_another_length_are_refused_by_their_key(path):
    import rocksdict

    with open_closing(path) as store:
        load(store, [1, 2])
    options = rocksdict.Options(raw_mode=True)
    raw = rocksdict.Rdict(str(path), options, {"default": options, TAG: options})
    raw.get_column_family(TAG)[(2).to_bytes(8, "little")] = b"x" * 12
    raw.close()

    with open_closing(path) as store, pytest.raises(StoreError, match="value of key 2 has 12 bytes, 4 floats are 16"):
        fetch(store, [1, 2])


def test_a_table_of_another_key_width_is_not_opened(path):
    with open_closing(path) as store:
        load(store, [1])

    with pytest.raises(StoreError, match="keys of 8 bytes, expected 4"), open_closing(path, key_bytes=4):
        pass


def test_reads_and_walks_go_on_during_inserts_and_the_load_of_another_table(path):
    store = open_store(path)
    load(store, range(3000))
    done, faults = threading.Event(), []

    def read():
        while not done.is_set():
            out, found = fetch(store, range(3000))
            if not found.all() or not (out[:, 1:] - out[:, :1] == [1, 2, 3]).all():
                faults.append("a row is absent, or of two writes")

    def walk():
        while not done.is_set():
            walked = np.concatenate([keys for keys, _ in store.tables[TABLE].items(500)])
            if walked.size != np.unique(walked).size or not np.isin(np.arange(3000), walked).all():
                faults.append("a key is met twice, or never")

    readers = [threading.Thread(target=work) for work in (read, walk)]
    for reader in readers:
        reader.start()
    for value in range(1, 20):
        store.tables[TABLE].insert(np.arange(3000 + value), rows_of(range(3000 + value), value))
        store.tables[TABLE].evict(np.array([3000 + value]))
    store.table(TableSpec("model.other", 4)).load(
        iter([(np.arange(5000), rows_of(range(5000)))]), Marker("other"), keep=False
    )
    done.set()
    for reader in readers:
        reader.join()

    assert not faults
    store.close()


def narrow_store(path, row_dtype="int8", **options):
    store = RocksDbStore(path, num_threads=1, row_dtype=row_dtype, **options)
    return store, TableSpec(TABLE, 4, row_dtype=row_dtype)


@pytest.mark.parametrize("row_dtype", ["fp16", "bf16", "int8", "uint8"])
def test_narrow_rows_are_kept_in_the_tables_form_and_come_as_it_rounds_them(path, row_dtype):
    keys = np.arange(300)
    rows = np.random.default_rng(0).standard_normal((300, 4), dtype=np.float32)
    expected = np.empty_like(rows)
    round_rows(rows, row_dtype, expected)
    store, spec = narrow_store(path, row_dtype)

    store.table(spec).load(iter([(keys[:200], rows[:200])]), Marker("digest"), keep=False)
    store.tables[TABLE].insert(keys[200:], rows[200:])

    out, found = fetch(store, keys)
    assert store.keeps_row_dtype
    assert found.all()
    assert out.tobytes() == expected.tobytes()
    walked = {
        int(key): row.tobytes()
        for part, values in store.tables[TABLE].items()
        for key, row in zip(part, values, strict=True)
    }
    assert walked == {key: row.tobytes() for key, row in enumerate(expected)}
    store.close()
    assert raw_values(path) == {encode_rows(row[None], row_dtype).tobytes() for row in rows}


def raw_values(path):
    """The values as rocksdict sees them."""
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    raw = rocksdict.Rdict(str(path), options, {"default": options, TAG: options}, rocksdict.AccessType.read_only(False))
    values = {bytes(value) for _, value in raw.get_column_family(TAG).items()}
    raw.close()
    return values


def test_a_narrow_value_of_another_length_is_refused_by_its_key(path):
    import rocksdict

    store, spec = narrow_store(path)
    store.table(spec).load(iter([(np.arange(3), rows_of(range(3)))]), Marker("digest"), keep=False)
    store.close()
    options = rocksdict.Options(raw_mode=True)
    raw = rocksdict.Rdict(str(path), options, {"default": options, TAG: options})
    raw.get_column_family(TAG)[(2).to_bytes(8, "little")] = b"x" * 16
    raw.close()
    store, spec = narrow_store(path)
    store.table(spec).open(0)

    with pytest.raises(StoreError, match="value of key 2 has 16 bytes, 4 floats as int8 are 8"):
        fetch(store, [1, 2])
    store.close()


def test_a_row_that_does_not_fit_the_form_is_refused_by_its_key_and_none_of_the_call_is_written(path):
    store, spec = narrow_store(path)
    store.table(spec).open(0)
    rows = np.ones((5000, 4), np.float32)
    rows[4000, 1] = np.nan

    with pytest.raises(StoreError, match="of key 4007: column 1 is nan, which int8 rows cannot hold"):
        store.tables[TABLE].insert(np.arange(7, 5007), rows)

    assert not fetch(store, range(5007))[1].any()
    store.close()


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), (None, "int8"), ("uint8", None)])
def test_rows_that_were_loaded_in_another_row_type_are_replaced_when_they_are_loaded_again(path, before, after):
    store = RocksDbStore(path, num_threads=1, row_dtype=before)
    spec = TableSpec(TABLE, 4, row_dtype=before or "fp32")
    store.table(spec).load(iter([(np.arange(3), rows_of(range(3)))]), Marker("digest"), keep=False)
    assert store.tables[TABLE].marker().digest == "digest"
    store.close()

    store = RocksDbStore(path, num_threads=1, row_dtype=after)
    spec = TableSpec(TABLE, 4, row_dtype=after or "fp32")
    assert store.table(spec).marker().row_dtype == (before or "fp32")
    store.table(spec).load(iter([(np.arange(3), rows_of(range(3)))]), Marker("digest"), keep=False)

    assert store.tables[TABLE].marker().digest == "digest"
    assert fetch(store, range(3))[1].all()
    store.close()


def test_a_table_of_another_row_type_than_the_stores_is_not_opened(path):
    with open_closing(path, row_dtype="fp32") as store:
        with pytest.raises(StoreError, match="a table of int8 rows in a store that keeps fp32 rows"):
            store.table(TableSpec("model.narrow", 4, row_dtype="int8")).open(0)
        with pytest.raises(StoreError, match="a table of int8 rows"):
            store.table(TableSpec(TABLE, 4, row_dtype="int8")).load(iter(()), Marker("digest"), keep=False)

        assert store.tables[TABLE].capacity_rows is None


@pytest.mark.parametrize("read_only", [False, True])
def test_a_path_that_is_a_file_is_refused(tmp_path, read_only):
    file = tmp_path / "file"
    file.write_text("")

    for open_ in (lambda: RocksDbStore(file, read_only, num_threads=1), lambda: check_database(file, read_only)):
        with pytest.raises(StoreError, match=r"file: is a file; expected a folder, which is created if it is absent"):
            open_()


def test_without_rocksdict_the_error_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rocksdict", None)

    with pytest.raises(MissingExtraError, match=r"pip install 'hotrow\[rocksdb\]'"):
        RocksDbStore(path)


def test_rocksdict_is_imported_only_when_a_database_is_opened():
    code = "import sys, serving.storage; print('rocksdict' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


class open_closing:  # noqa: N801 - reads as a function
    """``with open_closing(path) as store``: open the one table, close the store at the end."""

    def __init__(self, path, **options):
        self.options = (path, options)

    def __enter__(self):
        path, options = self.options
        self.store = open_store(path, **options)
        return self.store

    def __exit__(self, *_):
        self.store.close()


@pytest.mark.parametrize(("before", "after"), [("fp16", "bf16"), ("int8", "uint8"), ("uint8", "int8")])
def test_rows_of_another_row_type_and_the_same_length_are_not_misread(path, before, after):
    store, spec = narrow_store(path, before)
    store.table(spec).load(iter([(np.arange(3), rows_of(np.arange(3)))]), Marker("digest"), keep=False)
    store.close()

    store, spec = narrow_store(path, after)
    with pytest.raises(StoreError, match=f"holds rows of {before}, expected {after}"):
        store.table(spec).open(0)

    assert store.table(spec).marker().row_dtype == before
    store.table(spec).load(iter([(np.arange(3), rows_of(np.arange(3)))]), Marker("digest"), keep=False)
    store.table(spec).open(0)
    store.close()


def test_a_read_only_database_that_was_loaded_otherwise_says_from_what_and_how(path):
    spec = TableSpec(TABLE, 4, row_dtype="fp16")
    RocksDbStore(path, num_threads=1).close()
    for expected in ("has no record of a completed load", "was loaded from before as fp16"):
        store = RocksDbStore(path, read_only=True, num_threads=1, row_dtype="fp16")
        with pytest.raises(StoreError, match=f"{expected}.*, expected after as fp16; the database is open read-only"):
            store.table(spec).load(iter(()), Marker("after"), keep=False)
        store.close()
        store = RocksDbStore(path, num_threads=1, row_dtype="fp16")
        store.table(spec).load(iter(()), Marker("before"), keep=False)
        store.close()


@pytest.fixture
def write_raw(path):
    """Write values by key with rocksdict alone, as HPS and other programs do."""
    import rocksdict

    def write(rows, family=TAG):
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        names = rocksdict.Rdict.list_cf(str(path)) if path.exists() else ["default"]
        raw = rocksdict.Rdict(str(path), options, {name: options for name in names})
        table = raw.get_column_family(family) if family in names else raw.create_column_family(family, options)
        for key, value in rows.items():
            table[key] = value
        raw.close()

    return write


def test_rows_that_another_program_wrote_are_kept_where_the_files_do_not_have_them(path, write_raw, caplog):
    caplog.set_level(logging.INFO)
    write_raw({struct.pack("<q", key): struct.pack("<4f", *rows_of([key], 0.5)[0]) for key in range(10)})

    with open_closing(path) as store:
        assert store.tables[TABLE].marker() is None
        load(store, [5, 6, 20], keep=True)

        out, found = fetch(store, [*range(10), 20, 21])
        expected = np.concatenate([rows_of(range(5), 0.5), rows_of([5, 6]), rows_of(range(7, 10), 0.5), rows_of([20])])
        assert found.tolist() == [True] * 11 + [False]
        assert (out[:-1] == expected).all()
        assert store.tables[TABLE].marker() == Marker("digest", 11, changed=True)
        (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert told.message == (
            f"table {TABLE!r}: {path} holds rows that Hotrow did not load; the files' rows are inserted over them and "
            "every other row is kept"
        )
        load(store, [1], "other", keep=True)  # rows that Hotrow did load are no news
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1
    with open_closing(path) as store:
        assert fetch(store, [0, 6, 9, 20])[1].all()
        assert store.tables[TABLE].marker() == Marker("other", 11, changed=True, current_caches=())


def test_a_load_that_keeps_rows_keeps_those_that_are_only_in_the_log(path):
    with open_closing(path) as store:
        store.tables[TABLE].insert(np.arange(10), rows_of(range(10), 0.5))
        load(store, [5, 20], keep=True)

        assert (fetch(store, [4, 5, 20])[0] == np.concatenate([rows_of([4], 0.5), rows_of([5, 20])])).all()
        store.tables[TABLE].insert(np.array([5]), rows_of([5], 0.25))
        assert (fetch(store, [5])[0] == rows_of([5], 0.25)).all()


def test_a_load_that_keeps_rows_of_an_empty_table_has_nothing_to_keep_or_to_log(path, caplog):
    with open_closing(path) as store:
        load(store, range(7), keep=True)

        assert store.tables[TABLE].marker() == Marker("digest", 7)
        assert not caplog.records


def test_rows_of_another_length_are_not_mixed_with_the_rows_of_a_load(path, write_raw):
    write_raw({struct.pack("<q", 1): b"x" * 12})
    store = RocksDbStore(path, num_threads=1)

    with pytest.raises(StoreError, match="values of 12 bytes, 4 floats are 16"):
        load(store, [5], keep=True)

    assert store.table(TableSpec(TABLE, 4)).marker() is None
    store.close()
    with pytest.raises(StoreError, match="values of 12 bytes"), open_closing(path):
        pass


@pytest.mark.parametrize("keep", [False, True])
def test_a_load_killed_before_its_marker_is_repaired_and_logs_rows_only_where_it_kept_some(
    path, monkeypatch, caplog, keep
):
    def die(self, table, marker):
        raise StoreError("rocksdb", table, "killed")

    with open_closing(path) as store:
        store.tables[TABLE].insert(np.array([1]), rows_of([1]))
        with monkeypatch.context() as patch:
            patch.setattr("serving.storage.rocksdb.database.Database.end_load", die)
            with pytest.raises(StoreError, match="killed"):
                load(store, [2, 3], keep=keep)
    caplog.clear()

    with open_closing(path) as store:
        assert store.tables[TABLE].marker() is None
        load(store, [3, 4], "other", keep=True)

        assert fetch(store, [1, 2, 3, 4])[1].tolist() == [keep, keep, True, True]
        assert store.tables[TABLE].marker() == Marker("other", 4 if keep else 2, changed=keep, current_caches=())
    assert len(caplog.records) == keep


def test_rows_written_after_a_killed_load_are_kept_by_the_next_load(path, monkeypatch):
    def die(self, table, marker):
        raise StoreError("rocksdb", table, "killed")

    with open_closing(path) as store, monkeypatch.context() as patch:
        patch.setattr("serving.storage.rocksdb.database.Database.end_load", die)
        with pytest.raises(StoreError, match="killed"):
            load(store, [2, 3], keep=False)
    with open_closing(path) as store:
        store.tables[TABLE].write_flags(changed=True)
        store.tables[TABLE].insert(np.array([7]), rows_of([7]))
        assert store.tables[TABLE].marker() is None
    with open_closing(path) as store:
        load(store, [3, 4], "other", keep=True)

        assert fetch(store, [3, 4, 7])[1].all()


@pytest.mark.parametrize(
    "raw",
    [
        b"no JSON",
        b"[]",
        b"\xff",
        json.dumps({"format": 2, "digest": "digest"}).encode(),
        json.dumps({"format": 1, "rows": 1}).encode(),
    ],
    ids=["no JSON", "a list", "no text", "another format", "no digest"],
)
def test_a_damaged_marker_is_an_error_that_names_the_table_and_the_folder(path, write_raw, raw):
    with open_closing(path) as store:
        load(store, [1])
    write_raw({f"hotrow.table.{TABLE}".encode(): raw}, "default")
    store = RocksDbStore(path, num_threads=1)

    for call in (
        lambda: store.table(TableSpec(TABLE, 4)).marker(),
        lambda: store.table(TableSpec(TABLE, 4)).open(0),
        lambda: load(store, [2], keep=True),
    ):
        with pytest.raises(StoreError, match=rf"table 'model\.table'.*{path}: the table's marker is damaged"):
            call()
    store.erase(TABLE)
    load(store, [2])
    assert store.tables[TABLE].marker() == Marker("digest", 1)
    store.close()


def test_flags_survive_closing_and_come_with_the_next_rows(path):
    with open_closing(path) as store:
        load(store, [1])
        store.tables[TABLE].write_flags(changed=True, current_caches=())
        store.tables[TABLE].insert(np.array([2]), rows_of([2]))
        store.tables[TABLE].write_flags()
    with open_closing(path) as store:
        assert store.tables[TABLE].marker() == Marker("digest", 1, changed=True, current_caches=())
        store.tables[TABLE].write_flags(current_caches=("redis", "shared_memory"))
        assert store.tables[TABLE].marker() == Marker(
            "digest", 1, changed=True, current_caches=("redis", "shared_memory")
        )
    with open_closing(path, read_only=True) as store:  # whose writer refills the caches
        assert store.tables[TABLE].marker() == Marker("digest", 1, changed=True)
        store.tables[TABLE].write_flags(changed=False)
        assert store.tables[TABLE].marker() == Marker("digest", 1, changed=True)


def test_flags_are_written_without_a_flush_of_their_own_and_unchanged_flags_not_at_all(path, monkeypatch):
    flushes = []
    with open_closing(path) as store:
        load(store, [1])
        monkeypatch.setattr(store._database, "_flush_log", lambda **_: flushes.append(1))
        written = store._database._handle.latest_sequence_number()

        store.tables[TABLE].write_flags(current_caches=())
        store.tables[TABLE].write_flags(current_caches=())

        assert store._database._handle.latest_sequence_number() == written + 1
        assert not flushes
        store.tables[TABLE].insert(np.array([2]), rows_of([2]))
        assert len(flushes) == 1
        store.tables[TABLE].insert(np.array([], dtype=np.int64), rows_of([]))
        assert len(flushes) == 1
        monkeypatch.undo()


@pytest.mark.parametrize(("max_batch_size", "batches"), [(65536, [2048, 2048, 4]), (100, [100] * 41), (65536, [1])])
def test_an_insert_is_one_write_batch_per_batch_size_and_one_flush(path, monkeypatch, max_batch_size, batches):
    class Handle:
        def __init__(self, handle):
            self.handle, self.calls = handle, []

        def write(self, batch):
            self.calls.append(len(batch))
            self.handle.write(batch)

        def flush_wal(self, sync):
            self.calls.append("flush")
            self.handle.flush_wal(sync)

        def __getattr__(self, name):
            return getattr(self.handle, name)

    with open_closing(path, max_batch_size=max_batch_size) as store:
        counted = Handle(store._database._handle)
        monkeypatch.setattr(store._database, "_handle", counted)

        store.tables[TABLE].insert(np.arange(sum(batches)), rows_of(range(sum(batches))))

        assert counted.calls == [*batches, "flush"]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_table_that_is_closed_keeps_its_rows(path, read_only):
    with open_closing(path) as store:
        load(store, [1, 2])
    with open_closing(path, read_only=read_only) as store:
        store.tables[TABLE].close()
        assert store.table(TableSpec(TABLE, 4)).marker() == Marker("digest", 2)

        store.table(TableSpec(TABLE, 4)).open(0)

        assert fetch(store, [1, 2])[1].all()


@pytest.mark.parametrize("batch_rows", [1, 3, 100])
def test_changes_of_several_tables_are_made_whatever_the_size_of_a_batch(tmp_path, batch_rows):
    rng = np.random.default_rng(batch_rows)
    with closing(RocksDbStore(tmp_path / "db", num_threads=1, max_batch_size=batch_rows)) as store:
        tables = [store.table(TableSpec(f"m.t{number}", 2)) for number in range(3)]
        rows_by_table = [{} for _ in tables]
        for table in tables:
            table.open(0)
        for _ in range(5):
            changes = []
            for number in rng.integers(0, 3, size=4):
                keys = rng.integers(0, 6, size=rng.integers(0, 5))
                rows = rng.random((keys.size, 2), dtype=np.float32) if rng.random() < 0.7 else None
                changes.append(Change(tables[number], keys, rows))
                for place, key in enumerate(keys.tolist()):
                    rows_by_table[number].pop(key, None)
                    if rows is not None:
                        rows_by_table[number][key] = rows[place].tolist()
            store.write(changes)
            for table, expected in zip(tables, rows_by_table, strict=True):
                found = {
                    key: row.tolist()
                    for keys, rows in table.items()
                    for key, row in zip(keys.tolist(), rows, strict=True)
                }
                assert found == expected


def test_one_change_that_is_refused_stops_all_changes_of_a_call(tmp_path):
    with closing(RocksDbStore(tmp_path / "db", num_threads=1)) as store:
        tables = [store.table(TableSpec(f"m.t{number}", 2)) for number in range(2)]
        for table in tables:
            table.open(0)
        right = Change(tables[0], np.array([1]), np.zeros((1, 2), np.float32))
        wrong = Change(tables[1], np.array([1]), np.zeros((1, 3), np.float32))

        with pytest.raises(StoreError, match=r"'m\.t1': .*holds vectors of 2 floats, but 3 came"):
            store.write([right, wrong])

        assert tables[0].count() == 0
