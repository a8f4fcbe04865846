import fcntl
import os
import shutil
import threading
from contextlib import suppress

import pytest

from serving.model.atomic import atomic_directory, atomic_write, remove_killed_writes, temporary_directory


class _InterruptedError(Exception):
    pass


def test_a_file_appears_when_it_is_complete(tmp_path):
    with atomic_write(tmp_path / "a") as file:
        file.write(b"new")
        assert not (tmp_path / "a").exists()

    assert (tmp_path / "a").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path):
    (tmp_path / "a").write_bytes(b"old")

    with suppress(_InterruptedError), atomic_write(tmp_path / "a") as file:
        file.write(b"ne")
        raise _InterruptedError

    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b"old"), os.mkfifo, lambda path: path.symlink_to("x")])
def test_a_file_that_is_there_stays_if_the_caller_asks(tmp_path, make):
    make(tmp_path / "a")

    with pytest.raises(FileExistsError), atomic_write(tmp_path / "a", replace=False):
        pass

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_of_two_writers_that_replace_nothing_one_wins(tmp_path):
    with suppress(FileExistsError), atomic_write(tmp_path / "a", replace=False) as slow:
        slow.write(b"slow")
        with atomic_write(tmp_path / "a", replace=False) as fast:
            fast.write(b"fast")

    assert (tmp_path / "a").read_bytes() == b"fast"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("real")

    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_folder_is_no_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(IsADirectoryError), atomic_write(path):
        pass

    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()

    with atomic_write(tmp_path / "pipe") as file:
        file.write(b"new")

    reader.join()
    assert received == [b"new"]
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_bytes(b"")

    with atomic_directory(tmp_path / "d") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "new").write_bytes(b"")
        assert (tmp_path / "d" / "old").exists()

    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "d",
        "d/deep",
        "d/deep/new",
    ]


def test_an_interrupted_folder_leaves_the_old_one_and_no_other(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_bytes(b"")

    with suppress(_InterruptedError), atomic_directory(tmp_path / "d") as folder:
        (folder / "new").write_bytes(b"")
        raise _InterruptedError

    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["d", "d/old"]


def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_bytes(b"")

    with pytest.raises(FileNotFoundError), atomic_directory(tmp_path / "d") as folder:
        folder.rmdir()

    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["d", "d/old"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "a").write_bytes(b"old")

    with pytest.raises(NotADirectoryError), atomic_directory(tmp_path / "a"):
        pass

    assert (tmp_path / "a").read_bytes() == b"old"


def test_the_next_writer_removes_what_killed_writers_of_this_path_left(tmp_path):
    for name in (".d.0a1b2c3d.tmp", ".d.0a1b2c3d.old", ".e.0a1b2c3d.tmp", ".d.mine.tmp", ".d.0a1b2c3d.bak", ".d.tmp"):
        (tmp_path / name / "deep").mkdir(parents=True)

    with atomic_directory(tmp_path / "d") as live:
        (live / "half").write_bytes(b"")
        with atomic_directory(tmp_path / "d") as folder:
            (folder / "whole").write_bytes(b"")
        assert (live / "half").exists()

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".d.0a1b2c3d.bak", ".d.mine.tmp", ".d.tmp", ".e.0a1b2c3d.tmp", "d"]
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["half"]


def test_the_next_write_of_a_file_removes_what_killed_writers_of_it_left(tmp_path):
    for name in (".f.0a1b2c3d.tmp", ".g.0a1b2c3d.tmp"):
        (tmp_path / name).write_bytes(b"half")

    with atomic_write(tmp_path / "f") as live, atomic_write(tmp_path / "f") as file:
        live.write(b"live")
        file.write(b"new")

    assert sorted(path.name for path in tmp_path.iterdir()) == [".g.0a1b2c3d.tmp", "f"]
    assert (tmp_path / "f").read_bytes() == b"live"


def test_a_folder_that_a_killed_writer_has_moved_away_gets_its_name_back(tmp_path):
    (tmp_path / ".d.0a1b2c3d.old").mkdir()
    (tmp_path / ".d.0a1b2c3d.tmp").mkdir()

    remove_killed_writes(tmp_path, "d")
    remove_killed_writes(tmp_path / "absent", "d")

    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_file_of_a_live_writer_stays(tmp_path):
    (tmp_path / ".a.0a1b2c3d.tmp").write_bytes(b"half")
    with atomic_write(tmp_path / "a") as file:
        remove_killed_writes(tmp_path, "a")
        file.write(b"new")

    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.parametrize("write", [atomic_write, temporary_directory])
def test_a_write_begins_again_if_another_process_took_it_for_a_killed_write(write, tmp_path, monkeypatch):
    lock = fcntl.flock

    def lock_after_the_other(descriptor, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        remove_killed_writes(tmp_path, "a")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_other)
    with write(tmp_path / "a"):
        assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]


def test_what_is_being_removed_cannot_be_locked_by_its_writer(tmp_path, monkeypatch):
    (tmp_path / ".d.0a1b2c3d.tmp").mkdir()
    remove, removed = shutil.rmtree, []

    def remove_while_the_writer_locks(path, **options):
        if path.exists():
            descriptor = os.open(path, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
            removed.append(path.name)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove_while_the_writer_locks)
    remove_killed_writes(tmp_path, "d")

    assert removed == [".d.0a1b2c3d.tmp"]
    assert list(tmp_path.iterdir()) == []
