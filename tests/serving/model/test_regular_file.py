"""Only regular files are read: a pipe or a device in a model's folder blocks nothing."""

import os
import socket

import pytest

from serving.model.regular_file import open_regular, read_regular


def test_a_file_and_a_link_to_it_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")

    assert read_regular(tmp_path / "file", 3) == read_regular(tmp_path / "link", 3) == b"abc"
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"abc"


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_socket, lambda path: os.symlink("/dev/zero", path)])
def test_anything_else_is_refused_at_once(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    make("file")

    with pytest.raises(OSError, match="not a regular file"):
        open_regular("file")


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(OSError, match="expected at most 1,000 bytes, found 1,099,511,627,776"):
        read_regular(tmp_path / "file", 1000)


def test_a_dead_link_is_not_an_absent_file(tmp_path):
    (tmp_path / "link").symlink_to("gone")

    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "gone")
    with pytest.raises(OSError, match="a link to a file that does not exist") as caught:
        open_regular(tmp_path / "link")
    assert not isinstance(caught.value, FileNotFoundError)
