"""The file of `hotrow serve --record`."""

import json
import os
import resource
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from serving.errors import OutputError
from serving.frontend.recorder import Recorder
from serving.planner import read_trace
from tests.serving.small_server import model_of


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr("serving.request_log.writer._INTERVAL_S", 0.01)


@pytest.fixture
def config(tmp_path):
    return model_of(tmp_path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces"


def keys_of(keys):
    return [np.array(keys, dtype=np.int64)]


def test_every_recorded_request_is_one_line_that_the_planner_reads(tmp_path, config):
    file = tmp_path / "trace.jsonl"
    with closing(Recorder(file, share=1.0)) as recorder:
        for number in range(100):
            recorder.record(config, keys_of([number, -number, 7]))

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[5] == {"model": "m", "lookups": {"t": [5, -5, 7]}}
    expected = [key for number in range(100) for key in (number, -number, 7)]
    assert {name: keys.tolist() for name, keys in read_trace([file], [config]).items()} == {"m.t": expected}


def test_about_the_requested_share_is_recorded(tmp_path, config):
    file = tmp_path / "trace.jsonl"
    with closing(Recorder(file, share=0.25)) as recorder:
        for number in range(4000):
            recorder.record(config, keys_of([number]))

    assert 800 < len(file.read_text().splitlines()) < 1200  # 1,000, and more than seven standard deviations


def test_threads_do_not_mix_their_lines(tmp_path, config):
    file = tmp_path / "trace.jsonl"
    with closing(Recorder(file, share=1.0)) as recorder:

        def record(first):
            for number in range(first, first + 200):
                recorder.record(config, keys_of([number] * 300))

        threads = [threading.Thread(target=record, args=(first,)) for first in (0, 1000, 2000, 3000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    recorded = [json.loads(line)["lookups"]["t"] for line in file.read_text().splitlines()]
    assert len(recorded) == 800
    assert all(len(keys) == 300 and len(set(keys)) == 1 for keys in recorded)


def test_a_file_without_records_is_removed(tmp_path):
    Recorder(tmp_path / "trace.jsonl", share=1.0).close()

    assert not (tmp_path / "trace.jsonl").exists()


def test_while_the_disk_is_full_requests_are_dropped_and_counted_and_lines_stay_whole(tmp_path, config, caplog):
    file = tmp_path / "trace.jsonl"
    caplog.set_level("INFO", "hotrow.record")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with closing(Recorder(file, share=1.0)) as recorder:
            for number in range(100):
                recorder.record(config, keys_of([number]))
            while "cannot be written" not in caplog.text:
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            recorder.record(config, keys_of([100]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    lines = [json.loads(line)["lookups"]["t"] for line in file.read_text().splitlines()]
    lost = 101 - len(lines)
    assert lines == sorted(lines)
    assert lines[-1] == [100]
    assert lost > 0
    left_out = "were dropped because the disk was too slow or full"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", f"{file} cannot be written, so requests are not recorded: the disk is full"),
        ("WARNING", f"{file} is written again; {lost} requests were dropped"),
        ("INFO", f"{len(lines)} requests were recorded in {file}; {lost} {left_out}"),
    ]


@pytest.mark.parametrize(
    ("rotate", "moved"),
    [
        pytest.param(lambda file: file.unlink(), {}, id="removed"),
        pytest.param(lambda file: file.rename(f"{file}.old"), {"trace.jsonl.old": [[1]]}, id="moved"),
        pytest.param(
            lambda file: (file.rename(f"{file}.old"), file.touch()), {"trace.jsonl.old": [[1]]}, id="made again"
        ),
        pytest.param(lambda file: os.truncate(file, 0), {}, id="truncated"),
    ],
)
def test_records_after_a_rotation_are_in_the_file_again(folder, config, caplog, rotate, moved):
    file = folder / "trace.jsonl"
    caplog.set_level("INFO", "hotrow.record")
    with closing(Recorder(file, share=1.0)) as recorder:
        recorder.record(config, keys_of([1]))
        while not file.stat().st_size:
            time.sleep(0.01)
        rotate(file)
        recorder.record(config, keys_of([2]))
        recorder.record(config, keys_of([3]))

    lines = {one.name: one.read_text().splitlines() for one in folder.iterdir()}
    keys = {name: [json.loads(line)["lookups"]["t"] for line in of_file] for name, of_file in lines.items()}
    assert keys == {"trace.jsonl": [[2], [3]], **moved}
    assert f"3 requests were recorded in {file}" in caplog.text


def test_without_its_folder_requests_are_dropped_until_the_folder_is_back(folder, config, caplog):
    file = folder / "trace.jsonl"
    with closing(Recorder(file, share=1.0)) as recorder:
        file.unlink()
        folder.rmdir()
        recorder.record(config, keys_of([1]))
        while f"{file} cannot be written, so requests are not recorded: No such file" not in caplog.text:
            time.sleep(0.01)
        folder.mkdir()
        recorder.record(config, keys_of([2]))

    assert f"{file} is written again; 1 requests were dropped" in caplog.text
    assert read_trace([file], [config])["m.t"].tolist() == [2]


def test_requests_are_dropped_if_too_many_bytes_wait_for_the_disk(tmp_path, config, caplog, monkeypatch):
    monkeypatch.setattr("serving.request_log.writer._MOST_WAITING_BYTES", 100)
    caplog.set_level("INFO")
    with closing(Recorder(tmp_path / "trace.jsonl", share=1.0)) as recorder:
        recorder.record(config, keys_of([1]))
        recorder.record(config, keys_of(range(1000)))

    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == 1
    assert "1 requests were recorded" in caplog.text
    assert "1 were dropped because the disk was too slow" in caplog.text


def test_requests_that_wait_for_a_hanging_disk_at_the_end_are_counted(tmp_path, config, caplog, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr("serving.request_log.writer._CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr("serving.frontend.recorder._is_at", lambda path, file: answers.wait())
    caplog.set_level("INFO")
    recorder = Recorder(tmp_path / "trace.jsonl", share=1.0)
    recorder.record(config, keys_of([1]))
    recorder.record(config, keys_of([2]))

    recorder.close()
    answers.set()

    assert "0 requests were recorded" in caplog.text
    assert "2 were dropped because the disk was too slow" in caplog.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("trace.npz", "expected a file that ends in .jsonl, got ", id="another suffix"),
        pytest.param("none/trace.jsonl", "trace.jsonl cannot be written: No such file or directory", id="no folder"),
    ],
)
def test_a_file_that_cannot_be_created_is_refused(tmp_path, name, expected):
    with pytest.raises(OutputError, match=f"^--record: .*{expected}"):
        Recorder(Path(tmp_path / name), share=1.0)


def test_records_of_earlier_servers_stay(folder, config):
    for _ in range(3):
        with closing(Recorder(folder / "trace.jsonl", share=1.0)) as recorder:
            recorder.record(config, keys_of([5]))

    files = sorted(folder.iterdir())
    assert [file.name for file in files] == ["trace.1.jsonl", "trace.2.jsonl", "trace.jsonl"]
    assert read_trace(files, [config])["m.t"].tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    "occupy",
    [
        lambda path: path.write_text("kept"),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to("elsewhere"),
        lambda path: os.mkfifo(path),
    ],
    ids=["a file", "a folder", "a link", "a pipe"],
)
def test_anything_else_with_the_name_is_left_unchanged(folder, config, occupy):
    occupy(folder / "trace.jsonl")
    before = os.lstat(folder / "trace.jsonl")

    with closing(Recorder(folder / "trace.jsonl", share=1.0)) as recorder:
        recorder.record(config, keys_of([5]))

    after = os.lstat(folder / "trace.jsonl")
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert sorted(file.name for file in folder.iterdir()) == ["trace.1.jsonl", "trace.jsonl"]


def test_the_empty_file_of_a_killed_server_is_used_but_not_of_a_running_server(folder, config):
    (folder / "trace.jsonl").touch()
    with closing(Recorder(folder / "trace.jsonl", share=1.0)) as first:
        with closing(Recorder(folder / "trace.jsonl", share=1.0)) as second:
            second.record(config, keys_of([2]))
        first.record(config, keys_of([1]))

    for name, key in (("trace.jsonl", 1), ("trace.1.jsonl", 2)):
        assert read_trace([folder / name], [config])["m.t"].tolist() == [key]
