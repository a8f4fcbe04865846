"""Tables that processes share, with real processes: killed readers, killed writers, forks."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import SharedMemoryError
from kernels.shared import SharedTable

DIM = 16
FIXED = 2_000  # keys 0 .. FIXED - 1 are always there
CAPACITY = 4_000
BLOCK_BYTES = 64 * 64 + 64  # of the slots where one process announces its readers
PEERS = 64


@pytest.fixture
def path():
    """A folder for a table, in memory if the system has such a folder."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder) / "table"


def rows_of(keys, version):
    """Rows whose even columns hold the key and whose odd columns hold the version."""
    rows = np.empty((len(keys), DIM), dtype=np.float32)
    rows[:, 0::2] = (np.asarray(keys) % 10_007)[:, None]
    rows[:, 1::2] = version
    return rows


def assert_whole(keys, rows):
    assert (rows[:, 0::2] == (np.asarray(keys) % 10_007)[:, None]).all(), "a row of another key"
    assert (rows[:, 1::2] == rows[:, 1:2]).all(), "a torn row"


def filled(path):
    table = SharedTable.create(path, DIM, CAPACITY, source="digest")
    table.insert(np.arange(FIXED), rows_of(range(FIXED), 0))
    return table


def start(path, code):
    """Run ``code`` in a separate process with ``table``'s path; return once it has printed a line."""
    preamble = f"""
import itertools, sys
import numpy as np
from kernels.shared import SharedTable
PATH = {str(path)!r}
"""
    command = [sys.executable, "-c", preamble + code]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


READ_ONCE = """
table = SharedTable.attach(PATH, writes=False)
print("ready", flush=True)
sys.stdin.readline()
out = np.empty((3, 16), np.float32)
found = table.fetch(np.array([1, 5000, 1999]), out)
print(table.source, table.is_changed, len(table), found.tolist(), out[:, :2].tolist(), flush=True)
"""


def test_another_process_reads_what_the_writer_writes(path):
    table = filled(path)
    process = start(path, READ_ONCE)
    table.mark_changed()
    table.insert(np.array([1, 5000]), rows_of([1, 5000], 7))
    table.evict(np.array([1999]))

    answer, _ = process.communicate("go\n", timeout=60)

    assert answer == "digest True 2000 [True, True, False] [[1.0, 7.0], [5000.0, 7.0], [0.0, 0.0]]\n"


def test_a_process_that_only_reads_cannot_write(path):
    writer = filled(path)
    reader = SharedTable.attach(path, writes=False)

    for write in (
        lambda: reader.insert(np.array([1]), rows_of([1], 2)),
        lambda: reader.evict(np.array([1])),
        reader.mark_changed,
    ):
        with pytest.raises(SharedMemoryError, match="table: this process only reads"):
            write()
    assert len(writer) == FIXED


READ_FOR_EVER = """
table = SharedTable.attach(PATH, writes=False)
keys, out = np.arange(200_000) % 2000, np.empty((200_000, 16), np.float32)
print("ready", flush=True)
while True:
    table.fetch(keys, out)
"""


def readers_announced(path):
    """The number of taken reader slots in the file."""
    memory = np.memmap(path, dtype=np.uint64, mode="r", offset=4096, shape=PEERS * BLOCK_BYTES // 8)
    slots = memory.reshape(PEERS, BLOCK_BYTES // 8)[:, :512:8]
    return int(np.count_nonzero(slots))


def wait_until_it_reads(path):
    """Wait until the started process does its first lookup."""
    end = time.monotonic() + 60
    while not readers_announced(path):
        assert time.monotonic() < end


@pytest.mark.slow
def test_readers_killed_during_a_read_do_not_stop_the_writer(path):
    table = filled(path)
    left_behind = 0
    for version in range(1, 6):
        process = start(path, READ_FOR_EVER)
        wait_until_it_reads(path)
        kill(process)
        left_behind += readers_announced(path) > 0
        for _ in range(10):  # many times the spare rows
            table.insert(np.arange(FIXED), rows_of(range(FIXED), version))

    assert left_behind, "no reader was killed while it read: the test shows nothing"
    out = np.empty((FIXED, DIM), dtype=np.float32)
    assert table.fetch(np.arange(FIXED), out).all()
    assert (out[:, 1] == 5).all()


WRITE_FOR_EVER = """
table = SharedTable.attach(PATH, writes=True)
def rows_of(keys, version):
    rows = np.empty((len(keys), 16), dtype=np.float32)
    rows[:, 0::2] = (keys % 10_007)[:, None]
    rows[:, 1::2] = version
    return rows
print("ready", flush=True)
for version in itertools.count():
    fixed, fresh = np.random.default_rng(version).integers(0, 2000, 500), 10_000 + 700 * (version % 50) + np.arange(700)
    table.insert(fixed, rows_of(fixed, version % 1000))
    table.insert(fresh, rows_of(fresh, version % 1000))
    table.evict(fresh[::-1].copy())
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_rows_and_the_next_writer_loses_no_room(path):
    filled(path)
    reader = SharedTable.attach(path, writes=False)
    keys, out = np.arange(FIXED), np.empty((FIXED, DIM), dtype=np.float32)
    rng = np.random.default_rng(1)
    for _ in range(6):
        process = start(path, WRITE_FOR_EVER)
        for _ in range(int(rng.integers(5, 60))):
            assert reader.fetch(keys, out).all()
            assert_whole(keys, out)
        kill(process)

        assert reader.fetch(keys, out).all()
        assert_whole(keys, out)
        writer = SharedTable.attach(path, writes=True)
        held = dict(pair for part, rows in writer.items() for pair in zip(part.tolist(), rows, strict=True))
        assert len(held) == len(writer) == len(reader)
        assert set(range(FIXED)) <= held.keys()
        assert_whole(list(held), np.array(list(held.values())))
        others = np.array([key for key in held if key >= FIXED], dtype=np.int64)
        assert writer.evict(others) == others.size
        full = 1_000_000 + np.arange(CAPACITY - FIXED)
        for version in range(3):  # enough to use every row and every spare row
            writer.insert(full, rows_of(full, version))
            assert len(reader) == CAPACITY
            assert writer.evict(full) == full.size
        assert writer.stats().longest_probe_buckets <= 16
        del writer


def refusals_in_a_child(calls):
    """The number of calls that a forked child is refused."""
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except RuntimeError as err:
                refused += "a forked child, is not attached" in str(err)
        os._exit(refused)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_refused(path):
    table = filled(path)
    many = np.arange(20_000) % FIXED  # big enough for several cores
    calls = [
        lambda: table.fetch(np.arange(5), np.empty((5, DIM), np.float32)),
        lambda: table.fetch(many, np.empty((many.size, DIM), np.float32)),
        lambda: table.fetch_pooled(np.arange(5), np.array([0, 5]), np.empty((1, DIM), np.float32), "sum"),
        lambda: next(table.items()),
        lambda: table.insert(np.array([1]), rows_of([1], 1)),
        lambda: table.evict(np.array([1])),
        table.mark_changed,
    ]
    table.fetch(many, np.empty((many.size, DIM), np.float32))

    assert refusals_in_a_child(calls) == len(calls)
    assert refusals_in_a_child([lambda: len(table), table.stats]) == 0  # nor does it crash
    assert len(table) == FIXED
    assert not table.is_changed


READ_AND_FORK = """
import os, threading
table = SharedTable.attach(PATH, writes=False)
keys, out = np.arange(200_000) % 2000, np.empty((200_000, 16), np.float32)
def read():
    while True:
        table.fetch(keys, out)
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=read, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_forked_child_of_a_killed_reader_does_not_stop_the_writer(path):
    table = filled(path)
    left_behind = 0
    for version in range(1, 6):
        process = start(path, READ_AND_FORK)
        wait_until_it_reads(path)
        process.kill()
        process.wait(timeout=60)
        left_behind += readers_announced(path) > 0
        for _ in range(10):
            table.insert(np.arange(FIXED), rows_of(range(FIXED), version))
        process.communicate(timeout=60)

    assert left_behind, "no reader was killed while it read: the test shows nothing"


def insert_versions(table, versions):
    for version in versions:
        table.insert(np.arange(FIXED), rows_of(range(FIXED), version))


READ_LONG_BAGS = """
import os
table = SharedTable.attach(PATH, writes=False)
keys, out = np.zeros(3_000_000, np.int64), np.empty((1, 16), np.float32)
print("ready", flush=True)
while True:
    table.fetch_pooled(keys, np.array([0, keys.size]), out, "sum")
"""


def test_a_stopped_reader_fails_writes_and_a_reader_that_goes_on_does_not(path):
    table = filled(path)
    process = start(path, READ_LONG_BAGS)
    try:
        while not readers_announced(path):
            time.sleep(0.001)
        while True:  # stopped between two reads, it holds nothing
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            if readers_announced(path):
                break
            process.send_signal(signal.SIGCONT)
        began = time.monotonic()
        message = rf"table: process {process.pid} has been in the middle of a read for seconds, so a row could not be"
        with pytest.raises(SharedMemoryError, match=message):
            insert_versions(table, range(1, 10))
        assert 4 < time.monotonic() - began < 60

        keys, out = np.arange(FIXED), np.empty((FIXED, DIM), np.float32)
        assert table.fetch(keys, out).all()
        assert_whole(keys, out)
        assert table.evict(np.array([0])) == 1
        process.send_signal(signal.SIGCONT)
        insert_versions(table, range(20, 40))
        assert table.fetch(keys, out).all()
        assert (out[:, 1] == 39).all()
        assert len(table) == FIXED
    finally:
        kill(process)


def test_a_table_that_replaces_another_is_recognised(path):
    filled(path)
    table = SharedTable.attach(path, writes=False)
    assert table.is_at(path)

    path.unlink()
    assert not table.is_at(path)
    filled(path)
    assert not table.is_at(path)


def test_a_key_without_a_row_reads_as_absent_and_a_writer_is_refused(path):
    table = filled(path)
    memory = np.memmap(path, dtype=np.uint32, mode="r+")
    buckets = memory[table_index_bytes() // 4 :][: 16 * table.stats().buckets].reshape(-1, 16)
    taken = buckets[:, 10:15] != 0xFFFFFFFF
    buckets[:, 10:15][taken] = 1_000_000

    with pytest.raises(SharedMemoryError, match="is damaged: a key refers to a row that does not exist"):
        SharedTable.attach(path, writes=True)
    out = np.ones((FIXED, DIM), np.float32)
    SharedTable.attach(path, writes=False).fetch(np.arange(FIXED), out)
    assert not out.any()


def table_index_bytes():
    """The offset of the index: after the header and the epochs, at a huge-page boundary."""
    return 2**21


def test_a_65th_process_is_refused_until_one_leaves(path):
    tables = [filled(path)] + [SharedTable.attach(path, writes=False) for _ in range(PEERS - 1)]

    with pytest.raises(SharedMemoryError, match="is already shared by 64 processes"):
        SharedTable.attach(path, writes=False)
    tables.pop()

    assert len(SharedTable.attach(path, writes=False)) == FIXED


def test_an_existing_file_is_not_overwritten(path):
    filled(path)

    with pytest.raises(SharedMemoryError, match="cannot be made: File exists"):
        SharedTable.create(path, DIM, CAPACITY)


def test_too_little_room_in_the_file_system_is_an_error_and_leaves_no_file(path, monkeypatch):
    monkeypatch.setattr("kernels.shared.check_memory", lambda _: None)

    with pytest.raises(SharedMemoryError, match=r"cannot allocate [0-9]+ bytes: [0-9]+ are free"):
        SharedTable.create(path, 65_536, 3_500_000_000)

    assert not path.exists()


def damaged(path, damage):
    filled(path)
    content = bytearray(path.read_bytes())
    path.write_bytes(damage(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:100], "expected a table, found a file of 100 bytes"),
        (lambda content: b"X" + content[1:], "is not a table of this version of Hotrow"),
        (lambda content: content[:8] + b"\xff" + content[9:], "is not a table of this version of Hotrow"),
        (lambda content: content[:16] + b"\x09" + content[17:], "its row type is unknown"),
        (lambda content: content[:-4096], r"expected [0-9]+ bytes, found "),
        (lambda content: content[:12] + b"\xff" + content[13:], r"expected [0-9]+ bytes, found "),
        (lambda content: content[:12] + bytes(4) + content[16:], "damaged: a table cannot have 4000 rows of dim 0"),
        (
            lambda content: content[:24] + b"\xff" * 8 + content[32:],
            "damaged: a table cannot have 18446744073709551615",
        ),
        (lambda content: content[:48] + b"x" * 256 + content[304:], "the name of its source has no end"),
        (lambda content: content[:48] + b"\xff" + content[49:], "is damaged: the name of its source is not text"),
    ],
    ids=[
        "a few bytes",
        "another magic",
        "another format",
        "no row type",
        "cut short",
        "another dim",
        "no dim",
        "no capacity",
        "a source without end",
        "a source that is no text",
    ],
)
def test_a_file_that_is_not_a_shared_table_is_refused(path, damage, message):
    damaged(path, damage)

    with pytest.raises(SharedMemoryError, match=message):
        SharedTable.attach(path, writes=False)


def test_a_missing_file_is_refused(path):
    with pytest.raises(SharedMemoryError, match="cannot be opened: No such file"):
        SharedTable.attach(path, writes=False)


@pytest.mark.parametrize("source", ["x" * 256, "ü" * 128])
def test_a_source_of_more_than_255_bytes_is_refused(path, source):
    with pytest.raises(ValueError, match="source: expected at most 255 bytes"):
        SharedTable.create(path, DIM, CAPACITY, source=source)
    assert not path.exists()
