"""Regions of system shared memory: what may be registered, and what happens if a client changes it later."""

import errno
import os
import secrets
from pathlib import Path

import pytest

from serving.errors import RequestError
from serving.protocol.shared_memory import RegionPart, SharedMemory


@pytest.fixture
def memory():
    """POSIX shared memory of 100 bytes."""
    path = Path("/dev/shm") / f"hotrow-test-{secrets.token_hex(8)}"
    path.write_bytes(bytes(range(100)))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def regions(memory):
    regions = SharedMemory()
    regions.register("r", f"/{memory.name}", 10, 50)
    yield regions
    regions.unregister()


def test_a_part_of_a_region_is_read_and_written_at_its_place(regions, memory):
    assert regions.read(RegionPart("r", 5, 3)) == bytes([15, 16, 17])

    assert regions.write(RegionPart("r", 40, 10), b"abcd") == RegionPart("r", 40, 4)

    assert memory.read_bytes()[50:55] == b"abcd" + bytes([54])


def test_the_status_lists_regions_and_an_unregistered_region_is_gone(regions, memory):
    regions.register("a", memory.name, 0, 100)
    r, a = (
        {"name": "r", "key": f"/{memory.name}", "offset": 10, "byte_size": 50},
        {"name": "a", "key": memory.name, "offset": 0, "byte_size": 100},
    )
    assert (regions.status(), regions.status("r")) == ([a, r], [r])

    regions.unregister("r")
    regions.unregister("r")  # an unknown name is no error

    assert regions.status() == [a]
    with pytest.raises(RequestError, match="shared memory region 'r': not registered"):
        regions.status("r")
    with pytest.raises(RequestError, match="shared memory region 'r': not registered"):
        regions.read(RegionPart("r", 0, 1))


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo], ids=["link", "pipe"])
def test_only_a_regular_file_is_registered(memory, make):
    memory.unlink()
    make(memory)

    with pytest.raises(RequestError, match=f"key '/{memory.name}': cannot be opened: not a regular file"):
        SharedMemory().register("x", f"/{memory.name}", 0, 1)


@pytest.mark.parametrize(
    ("key", "offset", "size", "message"),
    [
        ("/no-such-memory", 0, 1, "key '/no-such-memory': cannot be opened: No such file or directory"),
        ("/../etc/passwd", 0, 1, "key: expected the name of a POSIX shared memory"),
        ("..", 0, 1, "key: expected the name of a POSIX shared memory"),
        ("/", 0, 1, "key: expected the name of a POSIX shared memory"),
        ("/{}", 1, 100, "needs 101 bytes, but '/hotrow-test-.*' has 100"),
        ("/{}", -1, 5, "expected offset >= 0 and byte_size >= 1, got -1 and 5"),
        ("/{}", 0, 0, "expected offset >= 0 and byte_size >= 1, got 0 and 0"),
    ],
)
def test_memory_that_is_not_there_is_not_registered(memory, key, offset, size, message):
    regions = SharedMemory()

    with pytest.raises(RequestError, match=f"shared memory region 'x': {message}"):
        regions.register("x", key.format(memory.name), offset, size)

    assert regions.status() == []


def test_a_name_is_registered_once(regions, memory):
    with pytest.raises(RequestError, match="'r': already registered"):
        regions.register("r", memory.name, 0, 1)


@pytest.mark.parametrize("part", [RegionPart("r", 50, 1), RegionPart("r", 0, 51)])
def test_bytes_beyond_a_region_are_refused(regions, part):
    with pytest.raises(RequestError, match="are not within its 50 bytes"):
        regions.read(part)
    with pytest.raises(RequestError, match="are not within its 50 bytes"):
        regions.write(part, b"x")


def test_an_answer_that_does_not_fit_is_refused(regions):
    with pytest.raises(RequestError, match="needs 4 bytes, but shared_memory_byte_size is 3"):
        regions.write(RegionPart("r", 0, 3), b"abcd")


def test_memory_that_its_client_makes_smaller_is_an_error_and_not_the_servers_end(regions, memory):
    os.truncate(memory, 12)

    with pytest.raises(RequestError, match="'r': its memory was made smaller"):
        regions.read(RegionPart("r", 0, 3))


def test_a_link_is_not_followed(memory):
    link = memory.with_name(memory.name + "-link")
    link.symlink_to("/etc/hostname")
    try:
        with pytest.raises(RequestError, match="cannot be opened"):
            SharedMemory().register("x", link.name, 0, 1)
    finally:
        link.unlink()


def test_an_output_that_does_not_fit_is_an_error(regions, monkeypatch):
    def half(descriptor, data, begin):
        if len(data) > 5:
            return 5
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", half)

    with pytest.raises(RequestError, match="shared memory region 'r': No space left on device"):
        regions.write(RegionPart("r", 0, 10), b"0123456789")


def test_an_output_that_the_system_writes_in_pieces_is_written_whole(regions, memory, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, begin: pwrite(descriptor, data[:3], begin))

    regions.write(RegionPart("r", 0, 10), b"0123456789")

    assert memory.read_bytes()[10:20] == b"0123456789"


def test_an_output_does_not_make_memory_larger_that_its_client_made_smaller(regions, memory):
    os.truncate(memory, 15)

    with pytest.raises(RequestError, match="shared memory region 'r': its memory was made smaller"):
        regions.write(RegionPart("r", 0, 10), b"0123456789")

    assert memory.stat().st_size == 15


def test_memory_that_was_replaced_is_refused_until_it_is_registered_again(regions, memory):
    memory.unlink()
    assert len(regions.read(RegionPart("r", 0, 10))) == 10  # the client still has it open
    memory.write_bytes(bytes(100))

    for use in (lambda: regions.read(RegionPart("r", 0, 10)), lambda: regions.write(RegionPart("r", 0, 10), b"1")):
        with pytest.raises(RequestError, match="shared memory region 'r': its memory was replaced; unregister"):
            use()

    regions.unregister("r")
    regions.register("r", memory.name, 0, 100)
    assert regions.read(RegionPart("r", 0, 10)) == bytes(10)


def test_a_server_has_at_most_256_regions_and_closes_what_is_unregistered(memory):
    regions, before = SharedMemory(), len(os.listdir("/proc/self/fd"))
    for number in range(256):
        regions.register(f"r{number}", memory.name, 0, 1)

    with pytest.raises(RequestError, match="region 'more': 256 regions are registered; the server accepts no more"):
        regions.register("more", memory.name, 0, 1)

    regions.unregister()
    assert len(os.listdir("/proc/self/fd")) == before
    regions.register("more", memory.name, 0, 1)
    regions.unregister()


def test_only_a_regular_file_can_be_shared_memory(memory):
    memory.unlink()
    os.mkfifo(memory)

    with pytest.raises(RequestError, match="cannot be opened"):
        SharedMemory().register("r", memory.name, 0, 1)
