"""Damaged, truncated or changed snapshots: always an error, never a wrong row, and never the end of the process."""

import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from kernels.errors import SnapshotError
from kernels.host import lookup_threads, set_lookup_threads
from kernels.snapshot import Snapshot
from tests.kernels.snapshot_files import (
    HEADER,
    HEADER_BYTES,
    PAGE,
    bucket_at,
    header_of,
    home,
    random_rows,
    seal,
    seal_header,
    sections,
    set_field,
    write,
)

DIM = 16
STRIDE = 64
ROWS = 20_000


@pytest.fixture
def table(tmp_path):
    """A snapshot's path, its keys and rows."""
    keys, rows = random_rows(ROWS, DIM)
    write(tmp_path / "t.snapshot", keys, rows)
    return tmp_path / "t.snapshot", keys, rows


def fetch(snapshot, keys):
    out = np.full((len(keys), snapshot.dim), np.nan, dtype=np.float32)
    found = snapshot.fetch(np.asarray(keys, dtype=np.int64), out)
    return out, found


def changed(path, change):
    """Write a copy with ``change`` applied to its bytes; returns its path."""
    data = bytearray(path.read_bytes())
    change(data)
    copy = path.with_name("changed.snapshot")
    copy.write_bytes(data)
    return copy


@pytest.mark.parametrize("field", HEADER)
def test_a_header_with_a_damaged_field_is_refused(table, field):
    path, _, _ = table
    at, code = HEADER[field]

    def damage(data):
        data[at + struct.calcsize(code) - 1] ^= 0x10

    with pytest.raises(
        SnapshotError, match=r"changed\.snapshot: (not a snapshot|format \d+, expected 1 or 2|its header is)"
    ):
        Snapshot(changed(path, damage))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", 3, "format 3, expected 1 or 2"),
        ("format", 1, "header is damaged"),  # whose checksum ends earlier
        ("dim", 0, "is inconsistent"),
        ("dim", 2**16 + 1, "is inconsistent"),
        ("dim", DIM + 1, "expected .* bytes by its header"),
        ("row_type", 5, "is inconsistent"),
        ("row_type", 1, "expected .* bytes by its header"),
        ("key_bytes", 4, "is inconsistent"),
        ("rows", ROWS + 1, "is inconsistent"),
        ("capacity_rows", 2**40, "is inconsistent"),
        ("capacity_rows", ROWS + 5000, "expected .* bytes by its header"),
        ("bucket_count", 0, "is inconsistent"),
        ("bucket_count", 2**40, "is inconsistent"),
        ("bucket_count", 7000, "expected .* bytes by its header"),
        ("index_checksum", 1, "checksums of its index"),
    ],
)
def test_a_wrong_header_with_a_right_checksum_is_refused(table, field, value, message):
    path, _, _ = table

    def alter(data):
        set_field(data, field, value)
        seal_header(data)

    with pytest.raises(SnapshotError, match=message):
        Snapshot(changed(path, alter))


def test_a_file_of_the_wrong_size_is_refused(table):
    path, _, _ = table
    size = path.stat().st_size

    for other in (1, 7, HEADER_BYTES, PAGE - 1, PAGE, PAGE + 1, size // 2, size - 1, size + 1, size + PAGE):

        def resize(data, other=other):
            data[other:] = bytes(max(other - size, 0))

        with pytest.raises(SnapshotError, match=r"expected"):
            Snapshot(changed(path, resize))


def test_an_unfinished_snapshot_is_refused(table):
    path, _, _ = table

    def forget_the_header(data):  # it is written last
        data[:PAGE] = bytes(PAGE)

    with pytest.raises(SnapshotError, match="not a snapshot"):
        Snapshot(changed(path, forget_the_header))


def test_a_file_that_is_not_a_snapshot_is_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("keys and rows\n" * 1000)
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")

    for name, reason in {
        "text": "not a snapshot",
        "empty": "the file is empty",
        "pipe": "not a regular file",
        "absent": "No such file",
        ".": "not a regular file",
    }.items():
        with pytest.raises(SnapshotError, match=reason) as caught:
            Snapshot(tmp_path / name)
        assert str(caught.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize("byte", [0, 41, 60, 63])  # both ends of a key, a row number, and the count of passing keys
def test_a_damaged_index_page_fails_only_the_lookups_that_read_it(table, byte):
    path, keys, rows = table
    header = header_of(path.read_bytes())
    page = np.array([home(key, header) * 64 // PAGE for key in keys.tolist()])
    snapshot = Snapshot(changed(path, lambda data: data.__setitem__(PAGE + 5 * PAGE + byte, data[6 * PAGE + byte] ^ 4)))
    elsewhere = (page > 6) | (page < 3)  # a probe may continue on the next page

    out, found = fetch(snapshot, keys[elsewhere])

    assert found.all()
    assert (out == rows[elsewhere]).all()
    for _ in range(2):
        with pytest.raises(
            SnapshotError, match=f"damaged: the page of 4,096 bytes at offset {6 * PAGE} has wrong content"
        ):
            fetch(snapshot, keys[page == 5][:1])
        with pytest.raises(SnapshotError, match="damaged"):
            snapshot.fetch_pooled(keys, np.array([0, ROWS]), np.empty((1, DIM), np.float32), "sum")
        with pytest.raises(SnapshotError, match="damaged"):
            snapshot.check_index()


def test_a_probe_that_reaches_a_damaged_page_finds_the_damage(tmp_path, table):
    _, keys, rows = table
    path = tmp_path / "t"
    late = []
    while not late:  # one seed in two hundred has no such key
        write(path, keys, rows)
        data = path.read_bytes()
        header = header_of(data)
        # The last bucket of a page that keys have passed, and a key whose home it is.
        homes = {key: home(key, header) for key in keys.tolist()}
        late = [key for key, at in homes.items() if at % 64 == 63 and at + 1 < header["bucket_count"]]
        late = [key for key in late if bucket_at(data, homes[key])[2]]
    next_page = homes[late[0]] // 64 + 1
    snapshot = Snapshot(changed(path, lambda data: data.__setitem__((1 + next_page) * PAGE + 8, 77)))

    with pytest.raises(SnapshotError, match=f"at offset {(1 + next_page) * PAGE} "):
        fetch(snapshot, late[:1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda keys, rows: (keys, (ROWS, *rows[1:])),  # a row beyond the last
        lambda keys, rows: (keys, (2**32 - 1, *rows[1:])),  # no row: a search for its key would never end
        lambda keys, rows: ((2**63 - 1, *keys[1:]), rows),  # a reserved key
        lambda keys, rows: ((-(2**63), *keys[1:]), rows),  # a free slot with a row
    ],
    ids=["row beyond the last", "key without a row", "reserved key", "row without a key"],
)
def test_a_wrong_index_with_right_checksums_is_refused(table, damage):
    path, keys, _ = table
    key = keys.tolist()[0]

    def mislead(data):
        at = PAGE + 64 * home(key, header_of(data))
        slots, numbers = damage(struct.unpack_from("<5q", data, at), struct.unpack_from("<5I", data, at + 40))
        struct.pack_into("<5q5I", data, at, *slots, *numbers)
        seal(data, STRIDE)

    snapshot = Snapshot(changed(path, mislead))

    with pytest.raises(SnapshotError, match="damaged"):
        fetch(snapshot, [key])
    with pytest.raises(SnapshotError, match="damaged"):
        snapshot.check_index()


@pytest.mark.parametrize("section", ["keys", "rows"])
def test_check_content_finds_damaged_keys_and_rows(table, section):
    path, keys, _ = table
    at = sections(header_of(path.read_bytes()), STRIDE)[section] + 3 * PAGE + 1000
    snapshot = Snapshot(changed(path, lambda data: data.__setitem__(at, data[at] ^ 1)))

    snapshot.check_index()
    assert fetch(snapshot, keys)[1].all()
    with pytest.raises(SnapshotError, match=f"at offset {at // PAGE * PAGE} "):
        snapshot.check_content()


@pytest.mark.parametrize("batch_rows", [1, 63, 100, ROWS])
@pytest.mark.parametrize("section", ["keys", "rows"])
def test_items_stops_at_a_damaged_page_and_returns_nothing_of_it(table, section, batch_rows):
    path, keys, rows = table
    width = {"keys": 8, "rows": STRIDE}[section]
    page = sections(header_of(path.read_bytes()), STRIDE)[section] + 3 * PAGE
    first = 3 * PAGE // width  # the row that begins in the page
    snapshot = Snapshot(changed(path, lambda data: data.__setitem__(page + 1000, data[page + 1000] ^ 1)))

    walk = snapshot.items(batch_rows)
    for begin in range(0, first // batch_rows * batch_rows, batch_rows):
        some_keys, some_rows = next(walk)
        np.testing.assert_array_equal(some_keys, keys[begin : begin + batch_rows])
        np.testing.assert_array_equal(some_rows, rows[begin : begin + batch_rows])
    with pytest.raises(SnapshotError, match=f"at offset {page} "):
        next(walk)


def test_keys_are_readable_with_damaged_rows_and_rows_with_a_damaged_index(table):
    path, keys, rows = table
    where = sections(header_of(path.read_bytes()), STRIDE)

    of_rows = Snapshot(changed(path, lambda data: data.__setitem__(where["rows"], data[where["rows"]] ^ 1)))
    np.testing.assert_array_equal(of_rows.read_keys(0, ROWS), keys)
    of_index = Snapshot(changed(path, lambda data: data.__setitem__(PAGE, data[PAGE] ^ 1)))
    np.testing.assert_array_equal(of_index.read_items(0, ROWS)[1], rows)


def test_reading_no_rows_by_number_reads_no_page(table):
    snapshot = Snapshot(table[0])

    assert snapshot.read_keys(0, 0).size == snapshot.read_items(ROWS, 0)[0].size == 0


def test_damaged_checksums_are_found(table):
    path, _, _ = table
    where = sections(header_of(path.read_bytes()), STRIDE)

    with pytest.raises(SnapshotError, match="checksums of its index"):
        Snapshot(changed(path, lambda data: data.__setitem__(where["checksums"], data[where["checksums"]] ^ 1)))
    of_rows = changed(path, lambda data: data.__setitem__(-1, data[-1] ^ 1))
    with pytest.raises(SnapshotError, match="checksums of its rows"):
        Snapshot(of_rows).check_content()


def test_check_content_finds_rows_in_the_wrong_place_with_right_checksums(table):
    path, _, _ = table

    def swap_two_keys(data):
        at = sections(header_of(data), STRIDE)["keys"]
        data[at : at + 16] = data[at + 8 : at + 16] + data[at : at + 8]
        seal(data, STRIDE)

    def fill_the_row_of_absent_keys(data):
        data[sections(header_of(data), STRIDE)["rows"] + ROWS * STRIDE] = 1
        seal(data, STRIDE)

    with pytest.raises(SnapshotError, match="row 0 is not the row of its key"):
        Snapshot(changed(path, swap_two_keys)).check_content()
    with pytest.raises(SnapshotError, match="absent keys is not zero"):
        Snapshot(changed(path, fill_the_row_of_absent_keys)).check_content()


def test_a_key_missing_from_the_index_is_found_with_right_checksums(table):
    path, keys, _ = table

    def lose_a_key(data):
        header = header_of(data)
        key = next(key for key in keys.tolist() if key in bucket_at(data, home(key, header))[0])
        at = PAGE + 64 * home(key, header)
        slot = struct.unpack_from("<5q", data, at).index(key)
        struct.pack_into("<q", data, at + 8 * slot, -(2**63))
        struct.pack_into("<I", data, at + 40 + 4 * slot, 2**32 - 1)
        seal(data, STRIDE)

    with pytest.raises(SnapshotError, match="its index has 19999 keys, expected 20000"):
        Snapshot(changed(path, lose_a_key)).check_index()


def test_a_file_written_to_while_open_returns_no_more_rows(table):
    path, keys, _ = table
    snapshot = Snapshot(path)
    assert fetch(snapshot, keys)[1].all()
    with path.open("r+b") as file:
        file.seek(sections(header_of(path.read_bytes()), STRIDE)["rows"])
        file.write(b"\1" * PAGE)

    for call in (lambda: fetch(snapshot, keys[:1]), lambda: snapshot.read_items(0, 5), snapshot.check_index):
        with pytest.raises(SnapshotError, match="was written to while it was open"):
            call()


def test_an_open_file_stays_readable_after_it_is_replaced_or_deleted(table):
    path, keys, rows = table
    snapshot = Snapshot(path)
    write(path.with_name("new"), keys, -rows)

    path.with_name("new").replace(path)
    after_the_rename = fetch(snapshot, keys)
    path.unlink()
    after_the_deletion = fetch(snapshot, keys)

    for out, found in (after_the_rename, after_the_deletion):
        assert found.all()
        assert (out == rows).all()


def test_a_file_truncated_while_threads_read_it_is_an_error_in_each_thread(table):
    path, keys, rows = table
    snapshot = Snapshot(path)
    started, ends = threading.Barrier(4), []
    lock = threading.Lock()

    def read(seed):
        rng = np.random.default_rng(seed)
        started.wait()
        while True:
            chosen = rng.integers(0, ROWS, 500)
            try:
                out, found = fetch(snapshot, keys[chosen])
            except SnapshotError as err:
                with lock:
                    ends.append(str(err))
                return
            assert found.all()
            assert (out == rows[chosen]).all()

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    started.wait()

    os.truncate(path, 3 * PAGE)

    for thread in threads:
        thread.join(timeout=60)
    assert len(ends) == 3
    assert all("bytes while it was open" in end for end in ends)
    with pytest.raises(SnapshotError, match="bytes while it was open"):
        snapshot.check_content()
    with pytest.raises(SnapshotError, match="bytes while it was open"):
        snapshot.fetch_pooled(keys, np.array([0, ROWS]), np.empty((1, DIM), np.float32), "sum")


def run_python(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_bus_error_outside_snapshots_goes_to_the_earlier_handler(table, tmp_path):
    path, _, _ = table
    script = """
        import faulthandler, os, sys
        import numpy as np
        faulthandler.enable()
        from kernels.snapshot import Snapshot
        snapshot = Snapshot(sys.argv[1])
        np.full(10000, 7).tofile(sys.argv[2])
        other = np.memmap(sys.argv[2], mode="r")
        os.truncate(sys.argv[2], 0)
        print("reads", flush=True)
        print(other[50000])
    """

    result = run_python(script, path, tmp_path / "other")

    assert result.returncode == -signal.SIGBUS
    assert result.stdout == "reads\n"
    assert "Fatal Python error: Bus error" in result.stderr


@pytest.mark.parametrize(
    ("before", "code"), [("SIG_DFL", -signal.SIGBUS), ("SIG_IGN", 0), ("lambda *_: print('handled')", 0)]
)
def test_a_bus_signal_sent_by_a_process_goes_to_the_earlier_handler(table, before, code):
    path, _, _ = table
    script = f"""
        import os, signal, sys
        signal.signal(signal.SIGBUS, {before if "lambda" in before else "signal." + before})
        from kernels.snapshot import Snapshot
        snapshot = Snapshot(sys.argv[1])
        os.kill(os.getpid(), signal.SIGBUS)
        for _ in range(10): pass
    """

    result = run_python(script, path)

    assert result.returncode == code, result.stderr
    assert result.stdout == ("handled\n" if "lambda" in before else "")


def test_a_forked_child_reads_its_parents_snapshot(table):
    path, _, _ = table
    script = """
        import os, sys
        import numpy as np
        from kernels.snapshot import Snapshot
        snapshot = Snapshot(sys.argv[1])
        keys, rows = snapshot.read_items(0, 1000)
        out = np.empty_like(rows)
        child = os.fork()
        right = snapshot.fetch(keys, out).all() and (out == rows).all()
        if child:
            right = right and os.waitpid(child, 0)[1] == 0
        os._exit(0 if right else 1)
    """

    assert run_python(script, path).returncode == 0


def test_a_fault_passes_a_later_faulthandler_and_does_not_end_the_process(table):
    path, _, _ = table
    script = """
        import faulthandler, os, signal, sys
        import numpy as np
        from kernels.errors import SnapshotError
        from kernels.snapshot import Snapshot
        snapshot = Snapshot(sys.argv[1])
        faulthandler.enable()
        os.truncate(sys.argv[1], 4096)
        for _ in range(2):
            try:
                snapshot.fetch(np.arange(20), np.empty((20, 16), np.float32))
            except SnapshotError as err:
                print(err)
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """

    result = run_python(script, path)

    assert result.returncode == 0, result.stderr
    *errors, blocked = result.stdout.splitlines()
    assert len(errors) == 2
    assert all("bytes while it was open" in error for error in errors)
    assert blocked == "set()"
    assert "Bus error" in result.stderr


def test_a_big_lookup_of_a_truncated_file_is_an_error_in_any_thread_of_the_pool(table):
    path, keys, _ = table
    asked = np.random.default_rng(0).choice(keys, 40_000)
    before = lookup_threads()
    set_lookup_threads(4)
    try:
        snapshot = Snapshot(path)
        assert fetch(snapshot, asked)[1].all()
        os.truncate(path, 3 * PAGE)

        for _ in range(20):
            with pytest.raises(SnapshotError, match="bytes while it was open"):
                fetch(snapshot, asked)
            with pytest.raises(SnapshotError, match="bytes while it was open"):
                snapshot.fetch_pooled(asked, np.arange(asked.size + 1), np.empty((asked.size, DIM), np.float32), "sum")
    finally:
        set_lookup_threads(before)


def test_a_big_lookup_that_reads_a_damaged_page_is_an_error_too(table):
    path, keys, _ = table
    asked = np.random.default_rng(0).choice(keys, 40_000)
    snapshot = Snapshot(changed(path, lambda data: data.__setitem__(6 * PAGE, data[6 * PAGE] ^ 4)))

    snapshot.warm_up()  # it does not raise the error

    for _ in range(2):
        with pytest.raises(
            SnapshotError, match=f"damaged: the page of 4,096 bytes at offset {6 * PAGE} has wrong content"
        ):
            fetch(snapshot, asked)
