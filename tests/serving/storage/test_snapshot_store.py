"""The snapshot tier: files that never change, what is changed over them, and the folder in which they are made."""

import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kernels.host import pool_rows, round_rows
from serving.errors import ModelFileError, StoreError, StoreFullError
from serving.model.snapshot_model import write_snapshot_file
from serving.model.sparse_file import open_sparse, write_sparse_directory
from serving.storage import (
    SnapshotReader,
    SnapshotStore,
    TableSpec,
    open_snapshot,
)
from tests.tools.warm import Warm

DIM = 4
TABLE = "model.table"
SPEC = TableSpec(TABLE, DIM)
SOURCE = "ab" * 32


def write_table(folder, keys=range(300), seed=0, dim=DIM):
    """A sparse model of random rows; returns its folder and its rows by key."""
    keys = np.array(keys, dtype=np.int64)
    rows = np.random.default_rng(seed).standard_normal((keys.size, dim), dtype=np.float32)
    write_sparse_directory(folder, keys, rows)
    return folder, dict(zip(keys.tolist(), rows.tolist(), strict=True))


def fetch(store, keys, table=TABLE, dim=DIM):
    out = np.full((len(keys), dim), np.nan, dtype=np.float32)
    found = store.tables[table].fetch(np.array(keys, dtype=np.int64), out)
    return out, found


def assert_holds(store, rows, absent=()):
    keys = [*rows, *absent]
    out, found = fetch(store, keys)
    assert found.tolist() == [True] * len(rows) + [False] * len(absent)
    assert out.tolist() == [*rows.values(), *([0.0] * DIM for _ in absent)]


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "table")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "snapshots"


def loaded(folder, path, spec=SPEC, **options):
    store = SnapshotStore(folder, **options)
    store.table(spec).serve_file(open_sparse(path, spec.dim))
    return store


def files_in(folder, table=TABLE):
    return sorted((folder / table).glob("*.snapshot"))


class OverlayMachine(RuleBasedStateMachine):
    """Random changes over a file must leave the store as they leave a dict of the file's rows."""

    KEYS = st.sampled_from([*range(12), -5, 2**62])

    @initialize(in_file=st.lists(KEYS, min_size=1, max_size=10, unique=True), dtype=st.sampled_from(["fp32", "fp16"]))
    def begin(self, in_file, dtype):
        self.folder = TemporaryDirectory()
        path, _ = write_table(Path(self.folder.name) / "t", in_file)
        spec = TableSpec(TABLE, DIM, row_dtype=dtype)
        self.store = loaded(Path(self.folder.name) / "s", path, spec, overlay_capacity_rows=100)
        [(keys, rows)] = open_sparse(path, DIM).batches(100)
        rounded = np.empty_like(rows)
        round_rows(rows, dtype, rounded)
        self.model = dict(zip(keys.tolist(), rounded.tolist(), strict=True))

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    @rule(changes=st.lists(st.tuples(KEYS, st.integers(1, 99)), max_size=6))
    def insert(self, changes):
        keys = np.array([key for key, _ in changes], dtype=np.int64)
        rows = np.array([[value] * DIM for _, value in changes], dtype=np.float32).reshape(-1, DIM)
        self.store.tables[TABLE].insert(keys, rows)
        self.model |= {key: [float(value)] * DIM for key, value in changes}

    @rule(keys=st.lists(KEYS, max_size=5))
    def evict(self, keys):
        self.store.tables[TABLE].evict(np.array(keys, dtype=np.int64))
        for key in keys:
            self.model.pop(key, None)

    @rule(keys=st.lists(KEYS, max_size=12))
    def fetch(self, keys):
        out, found = fetch(self.store, keys)
        assert found.tolist() == [key in self.model for key in keys]
        assert out.tolist() == [self.model.get(key, [0.0] * DIM) for key in keys]

    @rule(
        keys=st.lists(KEYS, max_size=12),
        combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
        offsets=st.sampled_from([np.int32, np.int64]),
        data=st.data(),
    )
    def fetch_pooled(self, keys, combiner, offsets, data):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=3)))
        row_ptrs = np.array([0, *cuts, len(keys)], dtype=offsets)
        weight = st.sampled_from([0.0, 1.0, -0.5, 3.25])
        weights = data.draw(st.none() | st.lists(weight, min_size=len(keys), max_size=len(keys)))
        weights = None if weights is None else np.array(weights, dtype=np.float32)
        rows = np.array([self.model.get(key, [0.0] * DIM) for key in keys], dtype=np.float32).reshape(-1, DIM)
        expected, pooled = (np.full((row_ptrs.size - 1, DIM), np.nan, np.float32) for _ in range(2))
        pool_rows(rows, row_ptrs, expected, combiner, weights)
        key_array = np.array(keys, dtype=np.int64)
        found = self.store.tables[TABLE].fetch_pooled(key_array, row_ptrs, pooled, combiner, weights)
        assert found.tolist() == [key in self.model for key in keys]
        assert pooled.tobytes() == expected.tobytes()

    @invariant()
    def items_and_count_are_the_dicts(self):
        if not hasattr(self, "store"):
            return
        seen = [
            (key, row)
            for keys, rows in self.store.tables[TABLE].items(3)
            for key, row in zip(keys.tolist(), rows.tolist(), strict=True)
        ]
        assert sorted(seen) == sorted(self.model.items())
        assert self.store.tables[TABLE].count() == len(self.model)


TestOverlay = OverlayMachine.TestCase
TestOverlay.settings = settings(deadline=None, max_examples=15, stateful_step_count=15)


@pytest.mark.parametrize("row_dtype", ["fp32", "fp16", "bf16", "int8", "uint8"])
def test_rows_are_given_as_the_spec_says_they_are_kept(table, folder, row_dtype):
    path, rows = table
    expected = np.array(list(rows.values()), dtype=np.float32)
    round_rows(expected, row_dtype, expected)

    store = loaded(folder, path, TableSpec(TABLE, DIM, row_dtype=row_dtype))

    out, found = fetch(store, list(rows))
    assert found.all()
    assert (out == expected).all()
    assert store.tables[TABLE].count() == 300


def test_a_snapshot_is_made_once_and_found_by_the_next_store(table, folder):
    path, rows = table
    loaded(folder, path).close()
    [made] = files_in(folder)
    before = made.stat()

    store = loaded(folder, path)

    assert_holds(store, rows, absent=[1000])
    assert files_in(folder) == [made]
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_table_that_changed_is_made_again_and_the_old_file_removed_while_others_still_read_it(
    table, folder, tmp_path
):
    path, old = table
    reader = loaded(folder, path)
    before = files_in(folder)

    _, new = write_table(path, seed=1)
    store = loaded(folder, path)

    assert_holds(store, new)
    assert_holds(reader, old)
    assert len(files_in(folder)) == 1
    assert files_in(folder) != before


def test_another_row_type_or_the_same_rows_elsewhere_do_not_pass_for_the_table(table, folder, tmp_path):
    path, rows = table
    loaded(folder, path, TableSpec(TABLE, DIM, row_dtype="int8")).close()
    narrow = files_in(folder)

    assert_holds(loaded(folder, path), rows)

    assert files_in(folder) != narrow


def test_what_killed_writers_left_is_removed_and_never_read(table, folder):
    path, rows = table
    (folder / TABLE).mkdir(parents=True)
    left = folder / TABLE / ".0123456789abcdef.snapshot.0a0b0c0d.tmp"
    left.write_bytes(b"HRSNAP\r\n and half of the rest")

    assert_holds(loaded(folder, path), rows)

    assert not left.exists()


def test_a_truncated_file_in_the_folder_is_made_again(table, folder, caplog):
    path, rows = table
    loaded(folder, path).close()
    [made] = files_in(folder)
    os.truncate(made, made.stat().st_size - 1)

    assert_holds(loaded(folder, path), rows)

    assert "the snapshot is made again" in caplog.text
    assert files_in(folder) == [made]


def test_a_file_in_the_folder_of_something_else_is_made_again(table, folder, tmp_path):
    path, rows = table
    loaded(folder, path).close()
    [made] = files_in(folder)
    other, _ = write_table(tmp_path / "other", seed=5)
    write_snapshot_file(made, open_sparse(other, DIM), "fp32", SOURCE)

    assert_holds(loaded(folder, path), rows)


def test_a_table_whose_file_is_a_snapshot_is_served_from_it(table, tmp_path):
    path, rows = table
    write_snapshot_file(tmp_path / "t.snapshot", open_sparse(path, DIM), "fp32", SOURCE)

    store = loaded(None, tmp_path / "t.snapshot")

    assert_holds(store, rows, absent=[-1])


def test_a_narrow_snapshot_is_served_as_it_is_or_made_again_where_a_row_type_is_asked_for(table, folder, tmp_path):
    path, rows = table
    narrow = tmp_path / "t.snapshot"
    write_snapshot_file(narrow, open_sparse(path, DIM), "int8", SOURCE)
    expected = np.array(list(rows.values()), dtype=np.float32)
    round_rows(expected, "int8", expected)

    as_it_is = fetch(loaded(folder, narrow), list(rows))[0]
    assert not folder.exists()
    again = fetch(loaded(folder, narrow, TableSpec(TABLE, DIM, row_dtype="fp16")), list(rows))[0]

    assert (as_it_is == expected).all()
    round_rows(expected, "fp16", expected)
    assert (again == expected).all()
    assert len(files_in(folder)) == 1


def test_without_a_folder_other_tables_are_refused_by_name(table, tmp_path):
    path, _ = table
    write_snapshot_file(tmp_path / "t.snapshot", open_sparse(path, DIM), "fp32", SOURCE)

    with pytest.raises(StoreError, match=r"'model\.table': .*/table: it is not a snapshot, .* set volatile_db\.path"):
        loaded(None, path)
    with pytest.raises(StoreError, match=r"its rows are to be int8, .* set volatile_db\.path"):
        loaded(None, tmp_path / "t.snapshot", TableSpec(TABLE, DIM, row_dtype="int8"))


def test_a_row_that_the_row_type_cannot_hold_is_refused_and_leaves_no_file(folder, tmp_path):
    rows = np.ones((10, DIM), dtype=np.float32)
    rows[7, 1] = np.inf
    write_sparse_directory(tmp_path / "t", np.arange(10), rows)

    with pytest.raises(ModelFileError, match="of key 7: column 1 is inf, which int8 rows cannot hold"):
        loaded(folder, tmp_path / "t", TableSpec(TABLE, DIM, row_dtype="int8"))

    assert [file.name for file in (folder / TABLE).iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_made_is_named(table, tmp_path):
    path, _ = table
    (tmp_path / "file").touch()

    with pytest.raises(StoreError, match=r"snapshot: .*file/snapshots: cannot be created: Not a directory"):
        SnapshotStore(tmp_path / "file" / "snapshots")
    store = SnapshotStore(tmp_path / "snapshots")
    (tmp_path / "snapshots").touch()
    with pytest.raises(
        StoreError, match=r"'model\.table': .*snapshots/model\.table: cannot be written: Not a directory"
    ):
        store.table(SPEC).serve_file(open_sparse(path, DIM))


def test_changes_beyond_the_overlays_room_are_refused_whole(table, folder):
    path, rows = table
    store = loaded(folder, path, overlay_capacity_rows=10)
    assert store.tables[TABLE].capacity_rows == 310

    advice = r"table is full: it holds 0 of 10 rows.*; raise volatile_db\.overlay_capacity_rows$"
    with pytest.raises(StoreFullError, match=rf"'model\.table': the overlay: {advice}"):
        store.tables[TABLE].insert(np.arange(295, 306), np.ones((11, DIM), np.float32))
    with pytest.raises(StoreFullError, match=f"evicted keys of the file: {advice}"):
        store.tables[TABLE].evict(np.arange(11))
    assert_holds(store, rows, absent=[300, 305])

    store.tables[TABLE].insert(np.arange(295, 305), np.ones((10, DIM), np.float32))
    store.tables[TABLE].evict(np.arange(10))
    assert store.tables[TABLE].count() == 295


def test_without_room_for_changes_nothing_can_be_changed(table, folder):
    path, rows = table
    store = loaded(folder, path, overlay_capacity_rows=0)

    for change in (
        lambda: store.tables[TABLE].insert(np.array([1]), np.ones((1, DIM), np.float32)),
        lambda: store.tables[TABLE].evict(np.array([1])),
    ):
        with pytest.raises(StoreFullError, match="overlay_capacity_rows is 0"):
            change()
    store.tables[TABLE].evict(np.array([1000]))
    assert_holds(store, rows)
    for rows in (-1, 3_500_000_001):
        with pytest.raises(ValueError, match=rf"overlay_capacity_rows: expected 0 to 3500000000, got {rows}"):
            SnapshotStore(folder, overlay_capacity_rows=rows)


def test_an_overlay_beyond_the_available_memory_is_refused(table, folder, monkeypatch):
    path, rows = table
    store = loaded(folder, path, overlay_capacity_rows=1_000_000)
    monkeypatch.setattr("kernels.system_memory.available_memory_bytes", lambda: 20_000_000)

    numbers = "the overlay of 1,000,000 rows: [0-9,]+ bytes of memory are needed, but 20,000,000 are available"
    with pytest.raises(StoreError, match=rf"'model\.table': {numbers}; lower volatile_db\.overlay_capacity_rows$"):
        store.tables[TABLE].insert(np.array([1]), np.ones((1, DIM), np.float32))

    assert_holds(store, rows)


def test_a_value_that_the_row_type_cannot_hold_is_not_inserted(table, folder):
    path, _ = table
    store = loaded(folder, path, TableSpec(TABLE, DIM, row_dtype="fp16"))

    with pytest.raises(StoreError, match="which fp16 rows cannot hold"):
        store.tables[TABLE].insert(np.array([5, 2000]), np.full((2, DIM), 1e6, np.float32))
    with pytest.raises(StoreError, match="reserved"):
        store.tables[TABLE].insert(np.array([2**63 - 1]), np.ones((1, DIM), np.float32))

    assert not fetch(store, [2000])[1].any()
    assert store.tables[TABLE].count() == 300


def test_a_closed_table_keeps_its_file_and_an_erased_one_does_not(table, folder, tmp_path):
    path, rows = table
    store = loaded(folder, path)
    store.tables[TABLE].insert(np.array([5]), np.ones((1, DIM), np.float32))

    store.tables[TABLE].close()
    assert TABLE not in store.tables
    assert len(files_in(folder)) == 1
    store.table(SPEC).serve_file(open_sparse(path, DIM))
    assert_holds(store, rows)  # without what was changed

    store.erase(TABLE)
    assert (dict(store.tables), files_in(folder)) == ({}, [])
    assert path.exists()
    store.erase("model.unknown")


def test_a_snapshot_that_is_given_is_not_erased(table, folder, tmp_path):
    path, _ = table
    write_snapshot_file(tmp_path / "t.snapshot", open_sparse(path, DIM), "fp32", SOURCE)
    store = loaded(folder, tmp_path / "t.snapshot")

    store.erase(TABLE)

    assert (tmp_path / "t.snapshot").exists()


def test_an_open_table_is_not_opened_as_another(table, folder):
    path, _ = table
    store = loaded(folder, path)

    store.table(SPEC).open(10)
    with pytest.raises(StoreError, match="is open with 4 floats of fp32, but 4 floats of int8 were asked for"):
        store.table(TableSpec(TABLE, DIM, row_dtype="int8")).open(10)


def test_a_file_that_is_cut_short_makes_the_tier_fail_and_not_the_process(table, folder):
    path, rows = table
    store = loaded(folder, path)
    os.truncate(files_in(folder)[0], 5000)

    for call in (
        lambda: fetch(store, list(rows)),
        lambda: store.tables[TABLE].fetch_pooled(np.arange(3), np.array([0, 3]), np.empty((1, DIM), np.float32), "sum"),
        lambda: list(store.tables[TABLE].items()),
    ):
        with pytest.raises(StoreError, match=r"snapshot: table 'model\.table': .* to 5000 bytes while it was open"):
            call()


def test_readers_next_to_a_writer_see_each_key_as_it_was_or_is(table, folder, monkeypatch):
    monkeypatch.setattr("serving.storage.snapshot.overlay._FIRST_CHANGED_KEYS", 1)
    path, rows = table
    store = loaded(folder, path, overlay_capacity_rows=100)
    keys, stop = np.arange(100), threading.Event()
    original = np.array([rows[key] for key in keys.tolist()], dtype=np.float32)

    def write():
        try:
            for value in range(1, 60):
                for part in np.array_split(keys, 1 + value % 7):
                    store.tables[TABLE].insert(part, np.full((part.size, DIM), value, np.float32))
                if value % 3 == 0:
                    store.tables[TABLE].evict(keys)
        finally:
            stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    was_changed = np.zeros(100, dtype=bool)
    for reads in itertools.count():
        if stop.is_set():
            break
        if reads % 2:
            out, found = fetch(store, keys)
        else:
            out = np.empty((100, DIM), np.float32)
            found = store.tables[TABLE].fetch_pooled(keys, np.arange(101), out, "sum")
        is_original = found & (out == original).all(axis=1)
        assert ((out == out[:, :1]).all(axis=1) | is_original).all()  # no torn row
        assert not out[~found].any()
        assert not (was_changed & is_original).any()  # what the file has of a changed key never comes back
        was_changed |= ~is_original
    writer.join()

    assert fetch(store, keys)[0].tolist() == [[59.0] * DIM] * 100


def run_at_once(script, count, *arguments):
    """Run ``script`` in processes that start together; their outputs."""
    running = [Warm("-c", textwrap.dedent(script), *arguments) for _ in range(count)]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0] * count
    return outputs


def test_pooled_lookups_follow_thousands_of_changes(tmp_path, folder):
    path, rows = write_table(tmp_path / "t", range(6000))
    store = loaded(folder, path, overlay_capacity_rows=10_000)
    model, keys = dict(rows), np.arange(9000)
    for version in range(1, 8):
        some = np.arange(900 * version, 900 * version + 1500)
        store.tables[TABLE].insert(some, np.full((some.size, DIM), version, np.float32))
        gone = np.arange(700 * version, 700 * version + 300)
        store.tables[TABLE].evict(gone)
        model |= dict.fromkeys(some.tolist(), [float(version)] * DIM)
        model = {key: row for key, row in model.items() if key not in set(gone.tolist())}
        expected, out = (np.empty((4500, DIM), np.float32) for _ in range(2))
        gathered = np.array([model.get(key, [0.0] * DIM) for key in keys.tolist()], np.float32)
        pool_rows(gathered, np.arange(0, 9001, 2), expected, "sum")

        found = store.tables[TABLE].fetch_pooled(keys, np.arange(0, 9001, 2), out, "sum")

        assert found.tolist() == [key in model for key in keys.tolist()]
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("changed", [False, True])
def test_a_table_without_a_file_pools_its_changes(changed):
    store = SnapshotStore(overlay_capacity_rows=10)
    store.table(SPEC).open(10)
    if changed:
        store.tables[TABLE].insert(np.array([3, 4]), np.array([[1.0] * DIM, [2.0] * DIM], np.float32))
    out = np.full((2, DIM), np.nan, np.float32)

    found = store.tables[TABLE].fetch_pooled(np.array([3, 4, 5, 3]), np.array([0, 3, 4]), out, "sum")

    assert found.tolist() == [changed, changed, False, changed]
    assert out.tolist() == [[3.0 * changed] * DIM, [1.0 * changed] * DIM]


def test_a_pooled_lookup_reads_only_the_bags_with_changed_keys_again(table, folder, monkeypatch):
    path, rows = table
    store = loaded(folder, path, overlay_capacity_rows=10)
    store.tables[TABLE].insert(np.array([7]), np.ones((1, DIM), np.float32))
    store.tables[TABLE].evict(np.array([30]))
    gathered = []
    fetch = SnapshotReader.fetch
    monkeypatch.setattr(SnapshotReader, "fetch", lambda *args: gathered.append(args[1].tolist()) or fetch(*args))
    out = np.empty((4, DIM), np.float32)

    store.tables[TABLE].fetch_pooled(np.array([1, 2, 7, 8, 9, 30, 31]), np.array([0, 2, 4, 5, 7]), out, "sum")

    assert gathered == [[8, 30, 31]]  # the row of 7 comes from the overlay
    assert out[2].tolist() == rows[9]


@pytest.mark.slow
def test_a_walk_meets_no_key_twice_though_it_changes_meanwhile(table, folder):
    path, rows = table
    store = loaded(folder, path, overlay_capacity_rows=100)
    store.tables[TABLE].insert(np.array([290, 1000]), np.zeros((2, DIM), np.float32))
    store.tables[TABLE].evict(np.array([291]))
    walk = store.tables[TABLE].items(50)
    met = next(walk)[0].tolist()

    store.tables[TABLE].insert(np.array([met[0], 200, 291, 1001]), np.ones((4, DIM), np.float32))
    store.tables[TABLE].evict(np.array([met[1], 201]))
    for keys, _ in walk:
        met += keys.tolist()

    assert len(met) == len(set(met))
    assert set(met) | {201, 291, 1001} == {*rows, 1000, 1001}


def test_of_processes_that_start_together_one_makes_the_snapshot(tmp_path, folder):
    path, rows = write_table(tmp_path / "table", range(50_000))
    script = """
        import json, logging, sys
        from pathlib import Path
        import numpy as np
        from serving.model.sparse_file import open_sparse
        from serving.storage import SnapshotStore, TableSpec
        written = []
        logging.getLogger("serving.storage.snapshot.folder").setLevel(logging.INFO)
        logging.getLogger("serving.storage.snapshot.folder").addFilter(lambda record: written.append(1) or True)
        store = SnapshotStore(Path(sys.argv[2]))
        store.table(TableSpec("model.table", 4)).serve_file(open_sparse(sys.argv[1], 4))
        out = np.empty((50_000, 4), np.float32)
        assert store.tables["model.table"].fetch(np.arange(50_000), out).all()
        print(json.dumps([len(written), out[49_999].tolist()]))
    """

    outputs = [json.loads(output) for output in run_at_once(script, 4, path, folder)]

    assert sum(written for written, _ in outputs) == 1
    assert all(row == rows[49_999] for _, row in outputs)
    assert len(files_in(folder)) == 1


@pytest.mark.slow
def test_processes_read_one_file_while_it_is_replaced(tmp_path):
    """Each opening sees one version whole, and keeps it."""
    file, keys = tmp_path / "t.snapshot", np.arange(2000)

    def replace(version):
        write_sparse_directory(tmp_path / "table", keys, np.full((2000, DIM), version, np.float32))
        write_snapshot_file(file, open_sparse(tmp_path / "table", DIM), "fp32", SOURCE)

    replace(0)
    script = """
        import sys
        import numpy as np
        import serving
        seen, keys, out = set(), np.arange(2000), np.empty((2000, 4), np.float32)
        while len(seen) < 4:
            with serving.open_snapshot(sys.argv[1]) as snapshot:
                versions = set()
                for _ in range(5):
                    assert snapshot.fetch(keys, out).all()
                    versions |= set(out.ravel().tolist())
                assert len(versions) == 1
                seen |= versions
    """
    with ExitStack() as stack:
        readers = [stack.enter_context(Warm("-c", textwrap.dedent(script), file)) for _ in range(3)]
        for reader in readers:
            stack.callback(reader.kill)
        version = 0
        while any(reader.poll() is None for reader in readers):
            version += 1
            replace(version)

    assert [reader.returncode for reader in readers] == [0] * 3


def test_the_public_reader_answers_checks_and_closes(table, tmp_path):
    path, _ = table
    write_snapshot_file(tmp_path / "t.snapshot", open_sparse(path, DIM), "int8", SOURCE)
    out = np.empty((2, DIM), np.float32)

    with open_snapshot(tmp_path / "t.snapshot") as snapshot:
        assert (snapshot.rows, snapshot.dim, snapshot.row_dtype, snapshot.source) == (300, DIM, "int8", SOURCE)
        assert snapshot.fetch(np.array([5, 1000]), out).tolist() == [True, False]
        assert sum(keys.size for keys, _ in snapshot.items(100)) == 300
        snapshot.check()
        snapshot.check(full=True)
    snapshot.close()

    for call in (lambda: snapshot.fetch(np.array([5, 6]), out), snapshot.check, lambda: snapshot.rows):
        with pytest.raises(StoreError, match="the snapshot is closed"):
            call()


def test_the_public_reader_names_a_file_that_is_none(tmp_path):
    with pytest.raises(StoreError, match=r"snapshot: .*absent: cannot be opened: No such file or directory"):
        open_snapshot(tmp_path / "absent")


def test_a_store_warms_up_files_that_fit_and_says_of_others_that_it_does_not(table, folder, caplog, monkeypatch):
    path, rows = table
    caplog.set_level("INFO")
    started = []
    monkeypatch.setattr(SnapshotReader, "warm_up_beside", lambda reader: started.append(reader))

    assert_holds(loaded(folder, path, warm_up=True), rows)
    monkeypatch.setattr("serving.storage.snapshot.store.available_memory_bytes", lambda: 10_000)
    assert_holds(loaded(folder, path, warm_up=True), rows)
    monkeypatch.undo()

    assert len(started) == 1
    assert "is not read ahead: 10000 bytes of memory are available" in caplog.text


def test_a_warm_up_ends_with_its_reader(table, tmp_path):
    path, _ = table
    write_snapshot_file(tmp_path / "t.snapshot", open_sparse(path, DIM), "fp32", SOURCE)
    snapshot = open_snapshot(tmp_path / "t.snapshot")

    thread = snapshot.warm_up_beside()
    thread.join(timeout=60)
    snapshot.warm_up()
    snapshot.close()

    assert not thread.is_alive()
    with pytest.raises(StoreError, match="closed"):
        snapshot.warm_up()


def test_a_process_that_ends_while_it_warms_up_ends_well(tmp_path):
    write_table(tmp_path / "table", range(300_000), dim=DIM)
    write_snapshot_file(tmp_path / "t.snapshot", open_sparse(tmp_path / "table", DIM), "fp32", SOURCE)
    script = """
        import sys
        import kernels.snapshot
        import serving
        kernels.snapshot._WARM_UP_BYTES = 1  # so that there is much left to do, however late this thread has its turn
        reader = serving.open_snapshot(sys.argv[1])
        thread = reader.warm_up_beside()
        assert thread.is_alive()
    """

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "t.snapshot"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_a_folder_that_does_not_let_go_of_old_files_is_named(table, folder):
    path, _ = table
    loaded(folder, path)
    (folder / TABLE / "old.snapshot").mkdir()  # no file, so that even root cannot remove it as one

    with pytest.raises(StoreError, match=f"{folder / TABLE}: cannot be written: "):
        loaded(folder, path).erase(TABLE)
