"""Dumps as RocksDB's SST files, and as HugeCTR's folders."""

import os

import numpy as np
import pytest

from serving.dumps.formats import check_target, open_dump, write_dump
from serving.dumps.sst import write_sst
from serving.errors import ModelFileError, OutputError, StoreError
from serving.storage import TableSpec
from serving.storage.rocksdb.engine import import_rocksdict, open_database, table_options

SPEC, NARROW = TableSpec("m.t", 4), TableSpec("m.t", 4, key_bytes=4)
# In the order of their numbers, which is not that of their little-endian bytes.
KEYS = np.arange(0, 60_000, 3)
ROWS = (KEYS[:, None] + np.arange(4)).astype(np.float32)


def batches(keys=KEYS, rows=ROWS, batch_rows=7000):
    return ((keys[at : at + batch_rows], rows[at : at + batch_rows]) for at in range(0, keys.size, batch_rows))


def rows_of(path, spec=SPEC):
    with open_dump(path, spec, "t") as dump:
        found = {}
        for keys, rows in dump.batches(999):
            found |= dict(zip(keys.tolist(), rows.tolist(), strict=True))
        assert dump.rows == len(found)
    return found


@pytest.fixture
def sst(tmp_path):
    write_dump(tmp_path / "t.sst", SPEC, batches(), in_key_order=False)
    return tmp_path / "t.sst"


@pytest.mark.parametrize("spec", [SPEC, NARROW], ids=["int64", "uint32"])
def test_rows_in_any_order_become_a_file_that_rocksdb_takes_in(tmp_path, spec, monkeypatch):
    monkeypatch.setattr("serving.storage.rocksdb.sort.RUN_BYTES", 100_000)  # several sorted runs
    write_dump(tmp_path / "t.sst", spec, batches(), in_key_order=False)
    assert os.listdir(tmp_path) == ["t.sst"]

    rocksdict = import_rocksdict()
    database, _ = open_database(rocksdict, tmp_path / "db", read_only=False, num_threads=1)
    database.ingest_external_file([str(tmp_path / "t.sst")])
    for key, row in zip(KEYS[::500].tolist(), ROWS[::500], strict=True):
        assert database[key.to_bytes(spec.key_bytes, "little")] == row.tobytes()
    assert sum(1 for _ in database.items()) == KEYS.size
    database.close()


def test_a_file_is_read_back_and_is_as_it_was(sst, tmp_path):
    before = sst.read_bytes()

    for _ in range(2):
        assert rows_of(sst) == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))

    assert sst.read_bytes() == before
    assert os.listdir(tmp_path) == ["t.sst"]


def test_a_file_on_a_disk_that_is_only_read_is_read_by_way_of_a_temporary_folder(sst, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.setattr("os.access", lambda *_: False)

    with open_dump(sst, SPEC, "t") as dump:
        assert dump.rows == KEYS.size
        assert os.listdir(sst.parent) == ["t.sst"]
        assert len(os.listdir(elsewhere)) == 1

    assert os.listdir(elsewhere) == []


def test_a_file_of_hps_is_read_where_links_are_not_possible(sst, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)

    assert len(rows_of(sst)) == KEYS.size
    assert sst.exists()


def test_rows_out_of_order_are_refused_where_the_caller_promised_order(tmp_path):
    with pytest.raises(StoreError, match=r"t\.sst"):
        write_sst(tmp_path / "t.sst", SPEC, batches(), in_key_order=True)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("at", [0.0, 0.25, 0.5, 0.75, 0.999, 1.0])
def test_a_byte_that_changed_anywhere_in_an_sst_file_is_found(sst, at):
    content = bytearray(sst.read_bytes())
    content[round(at * (len(content) - 1))] ^= 0x10
    sst.write_bytes(content)

    expected = "(damaged: the block at byte [0-9,]+ does not|expected a whole SST file of RocksDB, found)"
    with pytest.raises(ModelFileError, match=rf"t\.sst: {expected}"):
        rows_of(sst)


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.5, 0.9999])
def test_an_sst_file_that_was_cut_is_refused(sst, tmp_path, kept):
    sst.write_bytes(sst.read_bytes()[: int(kept * sst.stat().st_size)])

    found = "an empty file" if kept == 0 else "([0-9,]+ bytes, which begin with|the byte)"
    with pytest.raises(ModelFileError, match=rf"t\.sst: expected a whole SST file of RocksDB, found {found}"):
        rows_of(sst)
    assert os.listdir(tmp_path) == ["t.sst"]


def test_an_sst_file_of_another_table_is_refused(sst):
    with pytest.raises(ModelFileError, match="pair 0: a key has 8 bytes, expected 4"):
        rows_of(sst, NARROW)
    with pytest.raises(ModelFileError, match="pair 0: a value has 16 bytes, expected 20"):
        rows_of(sst, TableSpec("m.t", 5))


def test_an_sst_file_with_a_reserved_key_is_refused(tmp_path):
    rocksdict = import_rocksdict()
    writer = rocksdict.SstFileWriter(table_options(rocksdict, 1))
    writer.open(str(tmp_path / "t.sst"))
    for key, row in zip((5, 2**63 - 1), ROWS[:2], strict=True):
        writer[key.to_bytes(8, "little")] = row.tobytes()
    writer.finish()

    with pytest.raises(ModelFileError, match=f"pair 1: key {2**63 - 1} is reserved"):
        rows_of(tmp_path / "t.sst")


def test_an_sst_file_that_is_absent_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"t\.sst: cannot be read: No such file"):
        rows_of(tmp_path / "t.sst")


@pytest.mark.parametrize("name", ["t.sst", "folder"])
def test_only_a_bin_file_can_say_that_a_table_is_empty(tmp_path, name):
    with pytest.raises(OutputError, match=r"table 'm\.t' is empty, but .* cannot be empty; write a \.bin file"):
        write_dump(tmp_path / name, SPEC, iter(()), in_key_order=False)

    assert os.listdir(tmp_path) == []


def test_a_folder_has_hugectrs_two_files(tmp_path):
    write_dump(tmp_path / "t", SPEC, batches(), in_key_order=False)

    assert np.fromfile(tmp_path / "t" / "key", np.int64).tolist() == KEYS.tolist()
    assert np.fromfile(tmp_path / "t" / "emb_vector", np.float32).tobytes() == ROWS.tobytes()
    assert rows_of(tmp_path / "t") == dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))


@pytest.mark.parametrize("name", ["t.bin", "t.sst", "t"])
def test_what_was_there_is_replaced_at_the_end_and_kept_when_rows_stop_coming(tmp_path, name):
    path = tmp_path / name
    write_dump(path, SPEC, batches(), in_key_order=False)

    def broken():
        yield KEYS[:10], ROWS[:10]
        raise StoreError("redis", "m.t", "gone")

    with pytest.raises(StoreError, match="gone"):
        write_dump(path, SPEC, broken(), in_key_order=False)
    assert len(rows_of(path)) == KEYS.size
    write_dump(path, SPEC, batches(KEYS[:3], ROWS[:3]), in_key_order=False)
    assert len(rows_of(path)) == 3
    assert os.listdir(tmp_path) == [name]


def test_a_dump_takes_no_other_things_place(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    (tmp_path / "t.bin").mkdir()
    (tmp_path / "t.bin" / "key").touch()

    for name, reason in (
        ("photos", "is a folder with 'cat.png' in it"),
        ("t.bin", "is a folder with 'key' in it"),
        ("t.csv", r"expected a file that ends in \.bin .*; got '\.csv'"),
        ("absent/t.bin", "there is no folder .*absent"),
    ):
        with pytest.raises(OutputError, match=reason):
            check_target(tmp_path / name)


@pytest.mark.parametrize("name", ["t.bin", "t.sst", "t"])
def test_the_error_of_a_disk_that_refuses_names_the_file(tmp_path, name):
    (tmp_path / "file").touch()

    with pytest.raises((OutputError, StoreError), match="Not a directory"):
        write_dump(tmp_path / "file" / name, SPEC, batches(), in_key_order=True)
