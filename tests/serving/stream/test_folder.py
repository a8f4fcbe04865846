"""A folder as a log: gaps, half files, files of another kind, files without permission, several writers."""

import os

import pytest

from serving.errors import ConfigError, PositionLostError, SinkError, SourceUnreachableError
from serving.stream import BadMessageError, decode, open_sink, open_source
from serving.stream import folder as folder_log
from tests.serving.ordinary_rights import ordinary_rights


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "updates"


@pytest.fixture
def source(folder):
    """A source of three messages."""
    sink = open_sink(str(folder))
    for number in range(3):
        sink.send(b"message %d" % number, number)
    source = open_source(str(folder))
    source.start({})
    return source


def payloads(source):
    return [record.payload for record in source.poll(0.0)]


def test_files_are_numbered_from_one_and_hold_the_messages(folder, source):
    assert sorted(path.name for path in folder.iterdir()) == [f"000000000{number}.update" for number in (1, 2, 3)]
    assert (folder / "0000000002.update").read_bytes() == b"message 1"
    assert payloads(source) == [b"message 0", b"message 1", b"message 2"]


def test_a_folder_of_many_files_is_seldom_listed(source, monkeypatch):
    """A list of a million files takes a second of the processor that requests need."""
    clock, lists, numbers_in = [100.0], [], folder_log._numbers_in

    def slow(folder):
        clock[0] += 2.0
        lists.append(clock[0])
        return numbers_in(folder)

    assert len(source.poll(0.0)) == 3
    monkeypatch.setattr(folder_log, "monotonic", lambda: clock[0])
    monkeypatch.setattr(folder_log, "_numbers_in", slow)
    for _ in range(300):
        clock[0] += 1.0
        assert source.poll(0.0) == []
        assert source.lag() == {"folder": 0}

    assert len(lists) == 3


def test_files_stay_after_they_were_read(folder, source):
    source.poll(0.0)

    assert len(list(folder.iterdir())) == 3


def test_a_gap_in_the_numbers_is_an_error(folder, source):
    (folder / "0000000002.update").unlink()

    assert payloads(source) == [b"message 0"]
    with pytest.raises(PositionLostError, match=r"position 1 are gone; .* 0000000001\.update to 0000000003\.update"):
        source.poll(0.0)


def test_without_a_position_reading_begins_at_the_first_file_there_is(folder, source):
    (folder / "0000000001.update").unlink()

    assert payloads(source) == [b"message 1", b"message 2"]


def test_applied_files_may_be_removed_except_the_newest(folder, source):
    source.poll(0.0)
    for number in (1, 2):
        (folder / f"000000000{number}.update").unlink()

    assert payloads(source) == []

    (folder / "0000000003.update").unlink()
    with pytest.raises(PositionLostError, match="position 3 are gone; the log is empty"):
        open_started(folder, "3").poll(0.0)


def open_started(folder, position):
    source = open_source(str(folder))
    source.start({"folder": position})
    return source


@pytest.mark.parametrize(
    "name",
    [".0000000004.update.1a2b3c4d.tmp", "0000000004.update.part", "0000000004", "4.update", "000000000000004.update"],
)
def test_a_file_with_half_a_name_is_not_read(folder, source, name):
    (folder / name).write_bytes(b"half")
    source.poll(0.0)

    assert payloads(source) == []


def test_an_empty_file_is_not_read_until_it_has_content(folder, source):
    source.poll(0.0)
    (folder / "0000000004.update").touch()
    assert payloads(source) == []

    (folder / "0000000004.update").write_bytes(b"copied")
    assert payloads(source) == [b"copied"]


def test_an_empty_file_before_others_is_a_gap(folder, source):
    (folder / "0000000002.update").write_bytes(b"")
    source.poll(0.0)

    with pytest.raises(PositionLostError):
        source.poll(0.0)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_another_kind_of_file_is_named_and_nothing_waits_for_it(folder, source, make):
    (folder / "0000000002.update").unlink()
    make(folder / "0000000002.update")

    assert payloads(source) == [b"message 0"]
    with pytest.raises(SourceUnreachableError, match=r"0000000002\.update: cannot be read: not a regular file"):
        source.poll(0.0)


def test_a_file_without_permission_is_named_and_read_when_it_may_be_read(folder, source):
    (folder / "0000000001.update").chmod(0)
    with ordinary_rights(), pytest.raises(SourceUnreachableError, match="Permission denied"):
        source.poll(0.0)
    (folder / "0000000001.update").chmod(0o600)

    assert len(payloads(source)) == 3


def test_a_file_larger_than_any_message_is_a_bad_message_and_the_stream_goes_on(folder, source):
    with (folder / "0000000002.update").open("wb") as file:
        file.truncate(1 << 40)

    [_, large] = source.poll(0.0)
    [last] = source.poll(0.0)

    with pytest.raises(BadMessageError, match="expected at most 67,108,864 bytes"):
        decode(large.payload)
    assert last.payload == b"message 2"


def test_a_poll_returns_a_bounded_number_of_bytes(folder, source):
    for number in (1, 2, 3):
        (folder / f"000000000{number}.update").write_bytes(bytes(5 << 20))

    assert [len(source.poll(0.0)) for _ in range(3)] == [2, 1, 0]


def test_a_folder_that_appears_later_is_read_then(tmp_path):
    source = open_source(str(tmp_path / "later"))
    with pytest.raises(SourceUnreachableError, match="cannot be listed: No such file"):
        source.poll(0.0)
    assert source.lag() == {}

    open_sink(str(tmp_path / "later")).send(b"first", 0)

    assert payloads(source) == [b"first"]


def test_two_sinks_take_turns_and_replace_nothing(folder, source):
    sinks = [open_sink(str(folder)) for _ in range(2)]
    for number in range(3, 7):
        sinks[number % 2].send(b"message %d" % number, 0)

    assert payloads(source) == [b"message %d" % number for number in range(7)]
    assert sinks[0].flush() == {"folder": "7"}


def test_what_a_killed_sink_left_is_removed(folder, source):
    (folder / ".0000000004.update.1a2b3c4d.tmp").write_bytes(b"half")

    open_sink(str(folder))

    assert len(list(folder.iterdir())) == 3


def test_a_sink_that_failed_takes_nothing_more(folder, source):
    sink = open_sink(str(folder))
    folder.chmod(0o500)
    try:
        with ordinary_rights(), pytest.raises(SinkError, match=r"cannot write 0000000004\.update: Permission denied"):
            sink.send(b"lost", 0)
    finally:
        folder.chmod(0o700)

    for call in (lambda: sink.send(b"next", 0), sink.flush):
        with pytest.raises(SinkError, match="Permission denied"):
            call()
    assert len(list(folder.iterdir())) == 3


def test_a_folder_has_no_topics_and_no_empty_messages(folder):
    with pytest.raises(SinkError, match=r"a folder has no topic 'hps_et\.dcn\.user'"):
        open_sink(str(folder)).send(b"message", 0, "hps_et.dcn.user")
    with pytest.raises(SinkError, match="the message is empty"):
        open_sink(str(folder)).send(b"", 0)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(SinkError, match="cannot be used: File exists"):
        open_sink(str(tmp_path / "file"))


@pytest.mark.parametrize("url", ["ftp://host/updates", "file://host/updates", "file:///updates?x=1", "file://"])
def test_a_url_of_another_kind_is_refused(url):
    with pytest.raises(ConfigError, match="expected"):
        open_source(url)
    with pytest.raises(ConfigError, match="expected"):
        open_sink(url)
