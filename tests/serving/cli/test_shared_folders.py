"""The folders of /dev/shm that the workers of one server share."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from serving.cli import shared_folders
from serving.cli.shared_folders import remove_abandoned_sockets, sockets_folder, tables_identity
from serving.config import shared_ram_name
from serving.errors import ConfigError, StoreError
from serving.storage.shared.folder import SharedFolder


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A folder in the place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(shared_folders, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path / "shm"


def identity_of(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        return tables_identity(listener)


def test_the_same_relative_path_in_two_folders_is_two_servers(tmp_path, memory, monkeypatch):
    identities = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        identities.add(identity_of("h.sock"))

    assert len(identities) == 2


def test_every_spelling_of_a_path_is_one_server(tmp_path, memory, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    identities = set()
    for path in (tmp_path / "real/h.sock", "real/h.sock", "link/h.sock"):
        identities.add(identity_of(path))
        (tmp_path / "real/h.sock").unlink()

    assert len(identities) == 1


@pytest.mark.parametrize(
    "occupy",
    [
        lambda path: path.mkdir(mode=0o777) or path.chmod(0o777),
        lambda path: path.symlink_to("/tmp"),
        lambda path: path.write_text(""),
        lambda path: path.mkdir(mode=0o700) or os.chown(path, 65534, 65534),
    ],
    ids=["others may write", "a link", "a file", "another user's"],
)
def test_a_folder_that_others_can_change_is_not_used(memory, caplog, occupy):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = tables_identity(listener)
        assert tables_identity(listener) == first
        try:
            occupy(memory / shared_ram_name(first))
        except PermissionError:
            pytest.skip("only root can give a folder away")

        second = tables_identity(listener)

    assert second != first
    assert shared_ram_name(first) in caplog.text


def test_a_folder_of_tables_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables").chmod(0o770)

    with pytest.raises(StoreError, match="tables: other users may write to it: chmod 700 it or remove it"):
        SharedFolder(tmp_path / "tables")


def test_the_folder_of_a_killed_server_is_removed_once_its_last_worker_has_ended(memory):
    code = """
import os, signal, subprocess, sys
from pathlib import Path
from serving.cli import shared_folders
shared_folders.SHARED_MEMORY = Path(sys.argv[1])
with shared_folders.sockets_folder() as (folder, lock):
    (folder / "joining").touch()
    worker = subprocess.Popen(["sleep", "60"], pass_fds=[lock], stdout=subprocess.DEVNULL)
    print(worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(memory)], stdout=subprocess.PIPE, timeout=60)
    [left] = memory.iterdir()

    remove_abandoned_sockets()
    assert [*left.iterdir()] == [left / "joining"]

    os.kill(int(killed.stdout), signal.SIGKILL)
    while left.exists():
        remove_abandoned_sockets()
    assert not list(memory.iterdir())


def test_the_folders_of_running_servers_and_of_other_users_stay(memory):
    (memory / "hotrow-workers-open").mkdir()
    (memory / "hotrow-workers-open").chmod(0o755)
    (memory / "hotrow-workers-file").touch()
    (memory / "hotrow-workers-link").symlink_to(memory / "hotrow-workers-open")
    others = sorted(memory.iterdir())
    with sockets_folder() as (running, _), sockets_folder() as (other, _):
        remove_abandoned_sockets()

        assert sorted(memory.iterdir()) == sorted([*others, running, other])
        assert other.stat().st_mode & 0o777 == 0o700

    assert sorted(memory.iterdir()) == others


def test_without_shared_memory_workers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folders, "SHARED_MEMORY", tmp_path / "none")

    with pytest.raises(ConfigError, match=r"--workers: needs .*none: .*No such file"), sockets_folder():
        pass
