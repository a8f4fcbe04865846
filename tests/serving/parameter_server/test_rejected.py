"""The file of rejected messages: what it keeps, its bound, and that its faults stop nothing."""

import json
import os
from base64 import b64decode

import pytest

from serving.errors import OutputError
from serving.parameter_server.updates import rejected
from serving.parameter_server.updates.rejected import RejectedMessages
from serving.stream import Record

RECORD = Record("hotrow.m/0", "12", b"\x00bytes", None, "hotrow.m", 5_000)


def lines_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_message_is_one_line_that_has_its_place_and_its_bytes(tmp_path):
    RejectedMessages(tmp_path / "f").append("m", RECORD, "format", "expected\nHRUP")

    [line] = lines_of(tmp_path / "f")
    assert b64decode(line.pop("payload")) == b"\x00bytes"
    assert line == {
        "model": "m",
        "topic": "hotrow.m",
        "partition": "hotrow.m/0",
        "position": "12",
        "reason": "format",
        "text": "expected\nHRUP",
        "time_ms": 5_000,
        "payload_bytes": 6,
    }


def test_only_this_user_reads_the_file(tmp_path):
    RejectedMessages(tmp_path / "f")

    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_earlier_lines_stay_and_a_file_that_was_moved_begins_again(tmp_path):
    RejectedMessages(tmp_path / "f").append("m", RECORD, "format", "1")
    second = RejectedMessages(tmp_path / "f")
    second.append("m", RECORD, "format", "2")
    (tmp_path / "f").rename(tmp_path / "moved")
    second.append("m", RECORD, "format", "3")

    assert [line["text"] for line in lines_of(tmp_path / "moved")] == ["1", "2"]
    assert [line["text"] for line in lines_of(tmp_path / "f")] == ["3"]


def test_a_long_payload_is_cut(tmp_path):
    RejectedMessages(tmp_path / "f").append("m", RECORD._replace(payload=bytes(100_000)), "length", "")

    [line] = lines_of(tmp_path / "f")
    assert (line["payload_bytes"], b64decode(line["payload"])) == (100_000, bytes(64 << 10))


def test_a_full_file_gets_no_more_lines_and_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rejected, "MOST_FILE_BYTES", 300)
    messages = RejectedMessages(tmp_path / "f")
    for number in range(5):
        messages.append("m", RECORD, "format", str(number))

    assert [line["text"] for line in lines_of(tmp_path / "f")] == ["0", "1"]
    [warning] = caplog.messages
    assert "rejected messages are not kept" in warning
    assert "bytes, which is the most" in warning


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path, monkeypatch, caplog):
    messages = RejectedMessages(tmp_path / "f")
    messages.append("m", RECORD, "format", "1")
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, line: write(file, line[:5]))
        messages.append("m", RECORD, "format", "2")
    messages.append("m", RECORD, "format", "3")

    assert [line["text"] for line in lines_of(tmp_path / "f")] == ["1", "3"]
    assert caplog.messages == [f"rejected messages are not kept: {tmp_path / 'f'}: the disk is full"]


def test_a_folder_that_is_gone_is_logged_once(tmp_path, caplog):
    (tmp_path / "folder").mkdir()
    messages = RejectedMessages(tmp_path / "folder" / "f")
    (tmp_path / "folder" / "f").unlink()
    (tmp_path / "folder").rmdir()
    for _ in range(3):
        messages.append("m", RECORD, "format", "1")

    assert caplog.messages == [f"rejected messages are not kept: {tmp_path / 'folder/f'}: No such file or directory"]


def pipe(path):
    os.mkfifo(path)


def link_to_a_device(path):
    path.symlink_to("/dev/null")


def folder(path):
    path.mkdir()


@pytest.mark.parametrize("make", [pipe, link_to_a_device, folder])
def test_a_file_that_is_not_a_regular_file_is_refused(tmp_path, make):
    make(tmp_path / "f")

    with pytest.raises(OutputError, match=r"rejected_file: .*/f cannot be written: "):
        RejectedMessages(tmp_path / "f")


def test_a_device_is_refused():
    with pytest.raises(OutputError, match=r"rejected_file: /dev/null cannot be written: not a regular file"):
        RejectedMessages(os.fspath("/dev/null"))
