"""Update messages that arrive while a model is served: each takes effect exactly once, and bad ones never."""

import json
import logging
import shutil
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.config import read_ps_config, read_repository
from serving.config.models import StreamStart
from serving.errors import ConfigError
from serving.model.sparse_file import write_sparse_directory
from serving.parameter_server import ParameterServer
from serving.parameter_server.opening import open_updates
from serving.parameter_server.updates import reader as updates
from serving.parameter_server.updates.rejected import RejectedMessages
from serving.storage import MemoryStore, RocksDbStore, SnapshotStore
from serving.stream.folder import FolderSink
from serving.stream.message import Kind, UpdateMessage, encode
from tests.serving.parameter_server.stream import (
    MESSAGES,
    RUN,
    STARTED,
    after,
    message,
    messages_of,
    samples_of,
    send,
    serving,
    until,
    write_streamed_model,
)
from tests.serving.ps_files import write_ps
from tests.serving.small_server import KEYS, ROWS, DictStore, held_by
from tests.tools.tiny_model import TinyModel

TRUTHS = {
    "RAM": lambda folder: [MemoryStore()],
    "RAM and a slower tier": lambda folder: [MemoryStore(), DictStore("slow")],
    "RocksDB": lambda folder: [RocksDbStore(folder / "db", num_threads=1)],
    "RAM and RocksDB": lambda folder: [MemoryStore(), RocksDbStore(folder / "db", num_threads=1)],
    "a snapshot": lambda folder: [SnapshotStore(folder / "snapshots", 100)],
}


@pytest.mark.parametrize("stores", TRUTHS.values(), ids=TRUTHS)
def test_messages_change_every_tier(tmp_path, model, log, stores):
    with serving(model, tmp_path / "log", *stores(tmp_path)) as server:
        send(
            log,
            message(Kind.UPSERT, [1, 77], [[1, 2, 3], [4, 5, 6]]),
            message(Kind.DELETE, [2, 88]),
            message(Kind.ACCUMULATE, [3, 77, 99, 77], [[1, 1, 1]] * 4),
            UpdateMessage(Kind.BARRIER, "m", "", np.array([], dtype=np.int64), None, run=RUN),
        )
        rows = after(server, model, tmp_path / "log")
        expected = STARTED | {1: [1, 2, 3], 77: [6, 7, 8], 99: [1, 1, 1], 3: (ROWS[2] + np.float32(1)).tolist()}
        del expected[2]
        assert rows == expected
        keys = np.array([1, 2, 3, 77, 99])
        assert server.lookup("m.t", keys)[0].tolist() == [expected.get(key, [0, 0, 0]) for key in keys.tolist()]


@settings(deadline=None, max_examples=8)
@given(MESSAGES, st.integers(1, 8), st.booleans())
def test_a_restart_goes_on_where_the_rows_are(tmp_path_factory, drawn, stop, repeats):
    """Also if the publisher sends everything again, because it does not know what arrived."""
    folder = tmp_path_factory.mktemp("stream")
    model = write_streamed_model(folder)
    (folder / "log").mkdir()
    log, (sent, expected) = FolderSink(folder / "log"), messages_of(drawn)
    send(log, *sent[:stop])
    with serving(model, folder / "log", RocksDbStore(folder / "db", num_threads=1)) as server:
        after(server, model, folder / "log")
    send(log, *(sent if repeats else sent[stop:]))
    with serving(model, folder / "log", RocksDbStore(folder / "db", num_threads=1)) as server:
        assert after(server, model, folder / "log") == expected


@settings(deadline=None, max_examples=6)
@given(MESSAGES, st.lists(st.integers(0, 8), max_size=3))
def test_a_process_that_only_reads_the_database_has_every_row_at_once(tmp_path_factory, drawn, looks):
    """Whenever its view of the database is renewed, and whether the writer is ahead of it or behind."""
    folder = tmp_path_factory.mktemp("follow")
    model = write_streamed_model(folder)
    (folder / "log").mkdir()
    log, (sent, expected) = FolderSink(folder / "log"), messages_of(drawn)
    keys = np.array([*KEYS, 77, 78])
    with (
        serving(model, folder / "log", RocksDbStore(folder / "db", num_threads=1)) as writer,
        serving(model, folder / "log", MemoryStore(), RocksDbStore(folder / "db", read_only=True)) as reader,
    ):
        for number, each in enumerate(sent):
            send(log, each)
            if number in looks:
                reader.stores[-1].catch_up()
        last = {"folder": str(len(drawn))}
        assert until(lambda: [server.updates(model).positions for server in (writer, reader)] == [last, last])
        for server in (writer, reader):
            rows, found = server.lookup("m.t", keys)
            rows_by_key = {
                key: row for key, row, is_held in zip(keys.tolist(), rows.tolist(), found, strict=True) if is_held
            }
            assert rows_by_key == expected
        assert held_by(reader.stores[0]).items() <= rows_by_key.items()


def test_shown_changes_are_forgotten_once_the_view_has_them(tmp_path, model, log, monkeypatch):
    monkeypatch.setattr(updates, "MANY_SHOWN_BYTES", 1)
    with (
        serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", num_threads=1)) as writer,
        serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", read_only=True)) as reader,
    ):
        table = reader.stores[0].tables["m.t"]
        for number in range(1, 50):
            send(log, message(Kind.ACCUMULATE, [1, 1000 + number], [[1, 1, 1]] * 2))
        assert until(lambda: reader.updates(model).positions == {"folder": "49"})
        assert until(lambda: writer.updates(model).positions == {"folder": "49"})
        rows = [held_by(writer.stores[0])[1], [1, 1, 1]]
        assert reader.lookup("m.t", np.array([1, 1049]))[0].tolist() == rows
        assert until(lambda: not table.shown_bytes)
        assert reader.lookup("m.t", np.array([1, 1049]))[0].tolist() == rows


def test_a_version_starts_at_the_position_of_its_manifest(tmp_path, model, log):
    send(log, message(Kind.ACCUMULATE, [1], [[1, 1, 1]]), message(Kind.ACCUMULATE, [2], [[1, 1, 1]]))
    start = StreamStart(run=RUN, positions=(("folder", "1"),))
    with serving(model.model_copy(update={"stream": start}), tmp_path / "log", MemoryStore()) as server:
        assert until(lambda: samples_of(server, model, "hotrow_update_messages") == {"accumulate": 1})
        rows = held_by(server.stores[-1])
    assert (rows[1], rows[2]) == (STARTED[1], (ROWS[1] + np.float32(1)).tolist())


BAD = {
    "another form": (b"other bytes", "format"),
    "a check sum": (encode(message(Kind.DELETE, [1]))[:-1] + b"\xff", "checksum"),
    "an unknown table": (encode(UpdateMessage(Kind.DELETE, "m", "u", np.array([1]), None, run=RUN)), "table"),
    "another dimension": (encode(message(Kind.UPSERT, [1], [[1, 2]])), "row"),
    "an infinite sum": (encode(message(Kind.ACCUMULATE, [5], [[3e38, 0, 0]])), "row"),
}


@pytest.mark.parametrize(("payload", "reason"), BAD.values(), ids=BAD)
def test_a_bad_message_is_counted_and_changes_nothing(tmp_path, model, log, caplog, payload, reason):
    send(log, message(Kind.UPSERT, [5], [[3e38, 0, 0]]), payload, message(Kind.UPSERT, [77], [[1, 2, 3]]))
    with serving(model, tmp_path / "log", MemoryStore()) as server:
        rows = after(server, model, tmp_path / "log")
        assert samples_of(server, model, "hotrow_update_rejected") == {reason: 1}
    assert rows == STARTED | {5: [np.float32(3e38), 0, 0], 77: [1, 2, 3]}
    assert f"an update message of folder before position 2 is skipped ({reason}, 1 of this reason)" in caplog.text


def test_rejected_messages_are_kept_in_a_file(tmp_path, model, log):
    send(log, b"other bytes", message(Kind.UPSERT, [77], [[1, 2, 3]]))
    kept = RejectedMessages(tmp_path / "rejected")
    with serving(model, tmp_path / "log", MemoryStore(), rejected=kept) as server:
        after(server, model, tmp_path / "log")

    [line] = map(json.loads, (tmp_path / "rejected").read_text().splitlines())
    assert (line["model"], line["partition"], line["position"], line["reason"]) == ("m", "folder", "1", "format")


def test_an_error_of_the_log_does_not_show_a_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HIDDEN", "hunter2")
    kafka = {"security.protocol": {"env": "HIDDEN"}}
    source = {"type": "kafka", "brokers": "127.0.0.1:9", "kafka": kafka}
    config = read_ps_config(write_ps(tmp_path, update_source=source))

    with pytest.raises(ConfigError, match=r"\*\*\*") as error:
        open_updates(config)
    assert "hunter2" not in str(error.value)


OTHERS = {
    "another model": (UpdateMessage(Kind.DELETE, "n", "t", np.array([1]), None, run=RUN), "model"),
    "another run": (message(Kind.DELETE, [1], run="run-2"), "run"),
}


@pytest.mark.parametrize(("other", "reason"), OTHERS.values(), ids=OTHERS)
def test_a_message_for_others_is_counted_and_changes_nothing(tmp_path, model, log, other, reason):
    send(log, other)
    with serving(model, tmp_path / "log", MemoryStore()) as server:
        assert after(server, model, tmp_path / "log") == STARTED
        assert samples_of(server, model, "hotrow_update_skipped") == {reason: 1}


@pytest.mark.parametrize(
    ("filters", "takes"), [(["^hps_.+$"], True), (["m"], True), ([r"m\.t"], True), (["other"], False)]
)
def test_the_filters_choose_the_tables(tmp_path, model, log, filters, takes):
    send(log, message(Kind.DELETE, [1]))
    with serving(model, tmp_path / "log", MemoryStore(), filters=filters) as server:
        assert (1 in after(server, model, tmp_path / "log")) == (not takes)


@pytest.mark.parametrize(
    ("tier", "overlaid"),
    [
        pytest.param({"type": "hash_map"}, 0, id="RAM"),
        pytest.param({"type": "snapshot", "path": "snapshots"}, 1000, id="files"),  # each row may change
    ],
)
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_ram_without_a_bound_has_room_for_new_keys(tmp_path, tier, overlaid, ratio):
    TinyModel(tables={"t": 1}).write(tmp_path, "m")
    source = {"type": "folder", "path": "log", "update_headroom_ratio": ratio}
    write_ps(tmp_path, volatile_db=tier, persistent_db={"type": "disabled"}, update_source=source)

    with ParameterServer.from_config(read_repository(tmp_path)) as server:
        assert [table.capacity_rows for table in server.stores[-1].tables.values()] == [1000 * (1 + ratio) + overlaid]


def test_a_truth_that_is_nearly_full_is_logged_once(tmp_path, model, log, caplog):
    """The model has 12 rows, so 18 of 20 are nine tenths."""
    caplog.set_level(logging.WARNING)
    with serving(model, tmp_path / "log", MemoryStore(capacity_rows_of_each_table=20)) as server:
        send(log, message(Kind.UPSERT, np.arange(100, 105), np.ones((5, 3))))
        after(server, model, tmp_path / "log")
        assert "full" not in caplog.text
        for key in (105, 106):
            send(log, message(Kind.UPSERT, [key], np.ones((1, 3))))
            assert until(lambda: "tier memory is 90 % full" in caplog.text)
    assert caplog.text.count("the room for updates") == 1


@pytest.mark.parametrize("kind", [Kind.UPSERT, Kind.DELETE])
def test_the_overlay_of_a_snapshot_that_is_nearly_full_is_logged(tmp_path, model, log, caplog, kind):
    with serving(model, tmp_path / "log", SnapshotStore(tmp_path / "snapshots", 3)) as server:
        keys = KEYS[:3]
        send(log, message(kind, keys, np.ones((3, 3)) if kind is Kind.UPSERT else None))
        after(server, model, tmp_path / "log")
        assert until(lambda: "the room for updates in tier snapshot is 100 % full" in caplog.text)


def test_every_row_of_a_snapshot_may_change(tmp_path):
    write_sparse_directory(tmp_path / "t", np.arange(1000), np.zeros((1000, 2), np.float32))
    file = write_ps(
        tmp_path,
        [{"model": "m", "sparse_files": ["t"], "embedding_vecsize_per_table": [2]}],
        volatile_db={"type": "snapshot", "path": "snapshots"},
        update_source={"type": "folder", "path": str(tmp_path / "log")},
    )
    log = FolderSink(tmp_path / "log")
    rows = np.ones((1000, 2), np.float32)
    send(log, UpdateMessage(Kind.UPSERT, "m", "sparse_embedding0", np.arange(1000), rows))
    with ParameterServer.from_config(file) as server:
        name = "m.sparse_embedding0"
        assert until(lambda: server.lookup(name, np.arange(1000))[0].tolist() == rows.tolist())


def test_a_full_truth_pauses_the_stream_and_loses_nothing(tmp_path, model, log, caplog):
    caplog.set_level(logging.WARNING)
    with serving(model, tmp_path / "log", MemoryStore(capacity_rows=13)) as server:
        many = np.arange(100, 130)
        send(log, message(Kind.UPSERT, many, np.ones((30, 3))), message(Kind.UPSERT, [77], [[1, 2, 3]]))
        health = server.health("m")
        assert until(lambda: health.readiness().state == "degraded")
        assert "no updates: memory: table 'm.t'" in health.readiness().reason
        assert "raise update_source.update_headroom_ratio or the bound of the tier" in health.readiness().reason
        counters = server.updates(model).counters
        assert until(lambda: counters.freshness()["lag_messages"] == 2)  # it may have met the first message alone
        assert server.lookup("m.t", np.array(KEYS))[0].tolist() == ROWS.tolist()
        assert caplog.text.count("gets no updates") == 1


def test_a_position_that_is_gone_is_never_skipped(tmp_path, model, log, caplog):
    send(log, *[message(Kind.ACCUMULATE, [1], [[1, 1, 1]])] * 3)
    (tmp_path / "log" / "0000000001.update").unlink()
    (tmp_path / "log" / "0000000002.update").unlink()
    start = StreamStart(run=RUN, positions=(("folder", "0"),))
    with serving(model.model_copy(update={"stream": start}), tmp_path / "log", MemoryStore()) as server:
        health = server.health("m")
        assert until(lambda: health.readiness().state == "degraded")
        assert "the records after position 0 are gone" in health.readiness().reason
        assert "serve a version whose manifest states a position that the log has" in caplog.text
        assert held_by(server.stores[-1]) == STARTED


def test_a_recreated_log_is_never_read_from_its_middle(tmp_path, model, log):
    folder, store = tmp_path / "log", partial(RocksDbStore, tmp_path / "db", num_threads=1)
    send(log, message(Kind.UPSERT, [1], [[1, 1, 1]]), message(Kind.UPSERT, [77], [[2, 2, 2]]))
    with serving(model, folder, store()) as server:
        assert until(lambda: held_by(server.stores[-1]).get(77) == [2, 2, 2])
        rows = held_by(server.stores[-1])
    shutil.rmtree(folder)
    send(FolderSink(folder), *[message(Kind.UPSERT, [2], [[3, 3, 3]])] * 5)
    with serving(model, folder, store()) as server:
        health = server.health("m")
        assert until(lambda: health.readiness().state == "degraded")
        assert "the log was recreated: another record is before position 2" in health.readiness().reason
        assert held_by(server.stores[-1]) == rows


def test_rows_that_are_too_old_make_a_model_not_ready(tmp_path, model):
    """Until the log has answered, the rows may be of any age."""
    folder = tmp_path / "log"
    with serving(model, folder, MemoryStore(), max_staleness_s=0.1) as server:
        health = server.health("m")
        assert health.readiness().state == "not ready"
        assert "has not answered yet" in health.readiness().reason
        folder.mkdir()
        send(FolderSink(folder), message(Kind.DELETE, [1]))
        assert until(lambda: health.readiness().state == "ready")
        folder.rename(tmp_path / "away")
        assert until(lambda: "more than max_staleness_s, 0.1" in health.readiness().reason)
        assert health.readiness().state == "not ready"


def test_an_unloaded_model_gets_no_more_updates(tmp_path, model, log):
    with serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        server.unload_model("m")
        send(log, message(Kind.UPSERT, [77], [[1, 2, 3]]))
        server.load_model(model)
        assert until(lambda: held_by(server.stores[-1]).get(77) == [1, 2, 3])


def test_the_reader_gives_way_while_lookups_come(tmp_path, model, log, monkeypatch):
    seen, write = [], RocksDbStore.write

    def noted(store, changes, reached=None):
        if changes[0].keys.size and reached is not None:
            seen.append(reached.gives_way)
        write(store, changes, reached)

    monkeypatch.setattr(RocksDbStore, "write", noted)
    with serving(model, tmp_path / "log", RocksDbStore(tmp_path / "db", num_threads=1)) as server:
        for is_asked in (False, True, False):
            if is_asked:
                server.lookup("m.t", np.array(KEYS))
            send(log, message(Kind.UPSERT, [1], [[1, 2, 3]]))
            after(server, model, tmp_path / "log")
    assert seen[1:] == [True, False]
