"""A stream of updates that is interrupted goes on exactly where it was, in every process."""

import time

import numpy as np
import pytest

from serving.config.models import StreamStart
from serving.errors import SourceUnreachableError
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer
from serving.parameter_server.updates import UpdateStream
from serving.parameter_server.updates import reader as updates
from serving.storage import MemoryStore, RocksDbStore
from serving.stream.folder import FolderSource
from serving.stream.message import Kind
from tests.serving.parameter_server.stream import RUN, after, message, samples_of, send, serving, until
from tests.serving.small_server import KEYS, ROWS

ONES = [[1, 1, 1]]


@pytest.fixture
def two_tables(model):
    """The model with another table, which gets no messages."""
    [table] = model.tables
    return model.model_copy(update={"tables": (table, table.model_copy(update={"name": "u"}))})


class HesitantSource(FolderSource):
    """A log that answers late: at first it has nothing to say."""

    def __init__(self, folder):
        super().__init__(folder)
        self._begins_s = time.monotonic() + 0.2

    def poll(self, timeout_s):
        if time.monotonic() < self._begins_s:
            time.sleep(0.01)
            return []
        return super().poll(timeout_s)


def starting_at(model, position):
    start = StreamStart(run=RUN, positions=(("folder", position),))
    return model.model_copy(update={"stream": start})


def test_a_table_that_is_ahead_after_a_crash_takes_no_record_twice(tmp_path, two_tables, log, monkeypatch):
    send(log, *[message(Kind.ACCUMULATE, [77], ONES)] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(updates, "SYNC_INTERVAL_S", 60.0)  # as if the process were killed before
        with serving(two_tables, tmp_path / "log", RocksDbStore(tmp_path / "db", num_threads=1)) as server:
            assert after(server, two_tables, tmp_path / "log")[77] == [3, 3, 3]
    stream = UpdateStream(lambda _: HesitantSource(tmp_path / "log"), poll_s=0.02)
    with ParameterServer([RocksDbStore(tmp_path / "db", num_threads=1)], updates=stream) as server:
        server.load_model(two_tables)
        assert after(server, two_tables, tmp_path / "log")[77] == [3, 3, 3]


def test_a_log_that_was_away_is_not_read_again(tmp_path, two_tables, log):
    """It need not have the records that were read before."""
    model, is_away = starting_at(two_tables, "0"), []

    class Source(FolderSource):
        def poll(self, timeout_s):
            if is_away:
                raise SourceUnreachableError("log", "away")
            return super().poll(timeout_s)

    send(log, message(Kind.ACCUMULATE, [77], ONES), b"other bytes", message(Kind.ACCUMULATE, [77], ONES))
    stream = UpdateStream(lambda _: Source(tmp_path / "log"), poll_s=0.02)
    with ParameterServer([MemoryStore()], updates=stream) as server:
        server.load_model(model)
        after(server, model, tmp_path / "log")
        for name in ("0000000001.update", "0000000002.update"):
            (tmp_path / "log" / name).unlink()
        is_away.append(True)
        health = server.health("m")
        assert until(lambda: health.readiness().state == "degraded")
        is_away.clear()
        assert until(lambda: health.readiness().state == "ready")
        send(log, message(Kind.ACCUMULATE, [77], ONES))
        assert after(server, model, tmp_path / "log")[77] == [3, 3, 3]
        assert samples_of(server, model, "hotrow_update_rejected") == {"format": 1}


def test_a_rejected_message_is_rejected_once_while_the_truth_is_full(tmp_path, model, log):
    opened = []

    def source(_):
        opened.append(True)
        return FolderSource(tmp_path / "log")

    with ParameterServer([MemoryStore(capacity_rows=13)], updates=UpdateStream(source, poll_s=0.02)) as server:
        server.load_model(model)
        send(log, b"other bytes", message(Kind.UPSERT, np.arange(100, 130), np.ones((30, 3))))
        assert until(lambda: len(opened) > 3)
        assert samples_of(server, model, "hotrow_update_rejected") == {"format": 1}


def test_a_position_that_is_none_is_an_error_that_is_logged_once(tmp_path, model, log, caplog):
    model = starting_at(model, "latest")
    with serving(model, tmp_path / "log", MemoryStore()) as server:
        health = server.health("m")
        assert until(lambda: health.readiness().state == "degraded")
        assert "the records after position 'latest' are gone" in health.readiness().reason
    assert caplog.text.count("gets no updates") == 1
    assert "Traceback" not in caplog.text


def test_a_log_that_comes_back_empty_is_another_fault(tmp_path, model, log, caplog):
    send(log, message(Kind.ACCUMULATE, [1], ONES))
    with serving(model, tmp_path / "log", MemoryStore()) as server:
        after(server, model, tmp_path / "log")
        (tmp_path / "log").rename(tmp_path / "moved")
        assert until(lambda: server.health("m").readiness().state == "degraded")
        (tmp_path / "log").mkdir()
        assert until(lambda: "serve a version whose manifest states a position that the log has" in caplog.text)
    assert caplog.text.count("gets no updates") == 2


def test_a_value_that_the_row_type_cannot_hold_is_a_bad_message(tmp_path, model, log):
    [table] = model.tables
    write_sparse_directory(table.file, np.array(KEYS), np.ones_like(ROWS))
    narrow = model.model_copy(update={"tables": (table.model_copy(update={"row_dtype": "fp16"}),)})
    send(log, message(Kind.UPSERT, [77], [[1e6, 0, 0]]), message(Kind.UPSERT, [78], ONES))
    with serving(narrow, tmp_path / "log", MemoryStore()) as server:
        rows = after(server, narrow, tmp_path / "log")
        assert (rows.get(77), rows.get(78)) == (None, [1, 1, 1])
        assert samples_of(server, narrow, "hotrow_update_rejected") == {"row": 1}


def test_a_reader_of_the_database_waits_for_the_process_that_writes(tmp_path, model, log, monkeypatch):
    monkeypatch.setattr(updates, "MANY_SHOWN_BYTES", 200)
    monkeypatch.setattr(updates, "MOST_SHOWN_BYTES", 400)
    monkeypatch.setattr(updates, "SYNC_INTERVAL_S", 0.2)
    with (
        serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", num_threads=1)) as writer,
        serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", read_only=True)) as reader,
    ):
        send(log, *(message(Kind.UPSERT, [1000 + number], ONES) for number in range(100)))
        after(writer, model, tmp_path / "log")
        assert until(lambda: reader.updates(model).positions == {"folder": "100"})
        assert reader.health("m").readiness().state == "ready"


def test_a_process_that_writes_and_stops_is_a_fault_of_its_readers(tmp_path, model, log, monkeypatch):
    monkeypatch.setattr(updates, "MOST_SHOWN_BYTES", 400)
    monkeypatch.setattr(updates, "WRITER_S", 0.1)
    with serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", num_threads=1)):
        pass
    with serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", read_only=True)) as reader:
        send(log, *(message(Kind.UPSERT, [1000 + number], ONES) for number in range(30)))
        assert until(lambda: "is 400 bytes of rows behind the update log" in reader.health("m").readiness().reason)


def test_ram_in_front_of_a_database_misses_no_change_during_the_load(tmp_path, model, log):
    with serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", num_threads=1)) as writer:
        store = RocksDbStore(tmp_path / "db", read_only=True)
        stream = UpdateStream(lambda _: FolderSource(tmp_path / "log"))

        def change_row(*_):
            send(log, message(Kind.UPSERT, [1], ONES))
            after(writer, model, tmp_path / "log")
            store.catch_up()

        with ParameterServer([MemoryStore(), store], updates=stream) as reader:
            reader.load_model(model, change_row)
            after(reader, model, tmp_path / "log")
            assert reader.lookup("m.t", np.array([1]))[0].tolist() == ONES


def test_messages_of_a_read_that_takes_long_are_counted_as_waiting(tmp_path, model, log, monkeypatch):
    """A read may return tens of thousands of small messages, which take seconds."""
    count, truth = 40, MemoryStore()
    send(log, *[message(Kind.UPSERT, [77], ONES)] * count)
    insert = truth.write

    def slow(*arguments):
        time.sleep(0.01)
        return insert(*arguments)

    monkeypatch.setattr(truth, "write", slow)
    lags = []
    with serving(model, tmp_path / "log", truth) as server:
        reader = server.updates(model)
        while reader.positions != {"folder": str(count)}:
            lags.append(reader.counters.freshness()["lag_messages"])
            time.sleep(0.002)
        assert until(lambda: reader.counters.freshness()["lag_messages"] == 0)
    assert max(lags) > count / 2
    assert len(set(lags)) > 3
