"""Shared RAM as the last tier of models with updates: one process writes, and a change survives its death."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.errors import RequestError, StoreError, StoreFullError
from serving.storage import SharedMemoryStore
from serving.storage.marker import Marker
from serving.storage.shared import store as shared_store
from serving.storage.shared.redo import RedoLog
from serving.storage.store import Change, Reached, TableSpec
from serving.stream.folder import FolderSink
from serving.stream.log_state import LogState
from serving.stream.message import Kind
from tests.serving.parameter_server.stream import (
    MESSAGES,
    STARTED,
    change_dict,
    message,
    messages_of,
    send,
    serving,
    until,
    write_streamed_model,
)
from tests.serving.small_server import KEYS, ROWS, held_by

SPEC = TableSpec("m.t", 3)


def store_in(folder, capacity_bytes=2**24, **options):
    return SharedMemoryStore("shared", capacity_bytes, folder=folder, **options)


def at(position):
    return LogState(position).write()


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MESSAGES, st.integers(1, 8), st.booleans())
def test_all_processes_have_the_rows_and_the_next_writer_goes_on(tmp_path_factory, drawn, stop, repeats):
    folder = tmp_path_factory.mktemp("stream")
    model = write_streamed_model(folder)
    (folder / "log").mkdir()
    log, (sent, expected) = FolderSink(folder / "log"), messages_of(drawn)

    def is_at_the_end(server):
        last = len(list((folder / "log").iterdir()))
        return until(lambda: server.updates(model).positions == {"folder": str(last)})

    with (
        serving(model, folder / "log", store_in(folder, auto_remove=False)) as first,
        serving(model, folder / "log", store_in(folder, auto_remove=False)) as second,
    ):
        assert [server.stores[0].writes for server in (first, second)] == [True, False]
        send(log, *sent[:stop])
        assert is_at_the_end(first)
        assert is_at_the_end(second)
        assert held_by(second.stores[0]) == held_by(first.stores[0])
    send(log, *(sent if repeats else sent[stop:]))
    with serving(model, folder / "log", store_in(folder)) as next_one:
        assert is_at_the_end(next_one)
        assert held_by(next_one.stores[0]) == expected


@pytest.fixture
def writer(tmp_path):
    """A store that has loaded the table."""
    store = store_in(tmp_path)
    store.table(SPEC).load(iter([(np.array(KEYS), ROWS)]), Marker("files", len(KEYS)), keep=True)
    yield store
    store.close()


@pytest.fixture
def reader(writer, tmp_path):
    store = store_in(tmp_path)
    store.table(SPEC).open(0)
    yield store
    store.close()


def write(store, keys, rows, position, **options):
    rows = None if rows is None else np.array(rows, np.float32).reshape(len(keys), 3)
    change = Change(store.tables["m.t"], np.array(keys, dtype=np.int64), rows, **options)
    store.write([change], Reached("log/0", at(position)))


@pytest.mark.parametrize("step", ["write", "insert", "made"])
@pytest.mark.parametrize("kind", [Kind.UPSERT, Kind.DELETE, Kind.ACCUMULATE])
def test_a_writer_that_ends_in_the_middle_of_a_change_leaves_nothing_or_all_of_it(
    tmp_path, writer, reader, monkeypatch, step, kind
):
    """``reader`` keeps the tables, as it does when the writer is killed."""
    rows = None if kind is Kind.DELETE else np.ones((2, 3))
    with monkeypatch.context() as patch:

        def end(*_):
            raise OSError("the process ends here")

        if step == "insert":
            patch.setattr(shared_store.SharedMemoryTable, "_insert_into", end)
            patch.setattr(shared_store.SharedTable, "evict", end)
        else:
            patch.setattr(RedoLog, step, end)
        with pytest.raises(StoreError, match="the process ends here"):
            write(writer, [1, 77], rows, "7", adds=kind is Kind.ACCUMULATE)
    assert reader.tables["m.t"].reached() == {}
    writer.close()
    after = store_in(tmp_path)
    try:
        after.table(SPEC).open(0)
        reached = after.tables["m.t"].reached()
        assert reached == ({} if step == "write" else {"log/0": at("7")})
        write(after, [1, 77], rows, "7", adds=kind is Kind.ACCUMULATE)
        expected = {key: np.float32(row) for key, row in STARTED.items()}
        change_dict(expected, kind, [1, 77], 1)
        assert held_by(after) == {key: row.tolist() for key, row in expected.items()}
    finally:
        after.close()


def test_a_reader_waits_until_the_writer_has_made_the_change(writer, reader, monkeypatch):
    monkeypatch.setattr(shared_store, "_WRITER_S", 0.01)
    with pytest.raises(StoreError, match=r"the writer, process \d+, is behind the update log"):
        write(reader, [1], [[1, 1, 1]], "7")
    write(writer, [1], [[1, 1, 1]], "8")
    write(reader, [1], [[1, 1, 1]], "7")
    assert held_by(reader)[1] == [1, 1, 1]


def test_a_full_table_keeps_the_change_until_there_is_room(tmp_path, writer, reader):
    table = writer.tables["m.t"]
    many = np.arange(1000, 1000 + table._rows.capacity_rows)
    for _ in range(2):
        with pytest.raises(StoreFullError):
            write(writer, many, np.ones((many.size, 3)), "7")
        assert table.reached() == {}
    table.evict(np.array(KEYS))
    write(writer, many, np.ones((many.size, 3)), "7")
    assert table.reached() == {"log/0": at("7")}
    assert held_by(reader) == {key: [1, 1, 1] for key in many.tolist()}
    assert table.used_ratio == 1.0


@pytest.mark.parametrize(("ratio", "used"), [(1.0, 0.5), (0.25, 0.8)])
def test_a_table_has_room_for_new_keys(tmp_path, ratio, used):
    with closing(store_in(tmp_path, headroom_ratio=ratio)) as store:
        keys = np.arange(1000)
        store.table(SPEC).load(iter([(keys, np.zeros((1000, 3), np.float32))]), Marker("files", 1000), keep=False)
        assert store.tables["m.t"].used_ratio == used


def test_a_sum_that_is_infinite_changes_nothing(writer):
    write(writer, [5], [[3e38, 0, 0]], "7")
    with pytest.raises(RequestError, match=r"table 'm\.t': .*key 5.*inf"):
        write(writer, [1, 5], [[1, 1, 1], [3e38, 0, 0]], "8", adds=True)
    assert held_by(writer) == STARTED | {5: [np.float32(3e38), 0, 0]}


def test_a_table_of_other_files_and_an_erased_table_forget_the_logs(writer):
    table = writer.tables["m.t"]
    write(writer, [1], [[1, 1, 1]], "7")
    table.load(iter([(np.array(KEYS), ROWS)]), Marker("new files", len(KEYS)), keep=False)
    assert (table.reached(), held_by(writer)) == ({}, STARTED)
    write(writer, [1], [[1, 1, 1]], "7")
    writer.erase("m.t")
    table = writer.table(SPEC)
    table.open(10)
    assert (table.reached(), table.count()) == ({}, 0)


def test_copies_in_a_process_that_reads_are_dropped(tmp_path, model, log):
    """A GPU's cache is such a copy."""
    with (
        serving(model, tmp_path / "log", store_in(tmp_path)) as first,
        serving(model, tmp_path / "log", store_in(tmp_path)) as second,
    ):
        dropped = {server: [] for server in (first, second)}
        for server in (first, second):
            server.copies("m.t", dropped[server].append)
        send(log, message(Kind.ACCUMULATE, [1, 77], np.ones((2, 3))))
        for server in (first, second):
            assert until(lambda server=server: [keys.tolist() for keys in dropped[server]] == [[1, 77]])
            assert server.lookup("m.t", np.array([77]))[0].tolist() == [[1, 1, 1]]
