import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import ModelFileError, OutputError
from serving.model.manifest import write_manifest
from serving.model.sparse_file import open_sparse, write_sparse_directory
from serving.model.sparse_writer import write_table_folders
from tests.serving.model.single_file import write_single_file
from tests.serving.ordinary_rights import ordinary_rights

RESERVED = [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1]
KEYS = np.array([5, -3, 2**40], np.int64)
VECTORS = np.arange(6, dtype=np.float32).reshape(3, 2)


def rows_of(model, batch_rows=2):
    """Return (key, vector) pairs, in order, as Python objects."""
    return [
        (key, vector)
        for keys, vectors in model.batches(batch_rows)
        for key, vector in zip(keys.tolist(), vectors.tolist(), strict=True)
    ]


def tables(key_range):
    """Unique keys, and vectors of 1 to 4 floats."""
    keys = st.lists(st.integers(*key_range), min_size=1, max_size=20, unique=True)
    return st.tuples(keys, st.integers(1, 4), st.integers(0, 2**32)).map(
        lambda drawn: (
            np.array(drawn[0], np.int64),
            np.random.default_rng(drawn[2]).standard_normal((len(drawn[0]), drawn[1])).astype(np.float32),
        )
    )


@settings(deadline=None, max_examples=25)
@given(table=tables((-(2**63) + 2, 2**63 - 3)), batch_rows=st.integers(1, 25))
def test_a_directory_gives_back_what_was_written(tmp_path_factory, table, batch_rows):
    keys, vectors = table
    path = tmp_path_factory.mktemp("sparse") / "ad_id"

    write_sparse_directory(path, keys, vectors)
    model = open_sparse(path, vectors.shape[1])

    assert model.rows == keys.size
    assert rows_of(model, batch_rows) == list(zip(keys.tolist(), vectors.tolist(), strict=True))


@settings(deadline=None, max_examples=25)
@given(table=tables((0, 2**32 - 1)), wide=st.booleans(), localized=st.booleans(), batch_rows=st.integers(1, 25))
def test_a_single_file_gives_back_what_was_written(tmp_path_factory, table, wide, localized, batch_rows):
    keys, vectors = table
    path = tmp_path_factory.mktemp("sparse") / "0_sparse_10.model"
    key_type, row_layout = "I64" if wide else "I32", "localized" if localized else "distributed"

    write_single_file(path, keys, vectors, key_type, np.zeros(keys.size, np.uint64) if localized else None)
    model = open_sparse(path, vectors.shape[1], key_type, row_layout)

    assert rows_of(model, batch_rows) == list(zip(keys.tolist(), vectors.tolist(), strict=True))


def test_batches_are_new_plain_arrays(tmp_path):
    write_single_file(tmp_path / "f", KEYS, VECTORS)
    write_sparse_directory(tmp_path / "d", KEYS, VECTORS)

    for name in ("f", "d"):
        batches = list(open_sparse(tmp_path / name, 2).batches(2))
        assert [keys.size for keys, _ in batches] == [2, 1]
        for keys, vectors in batches:
            assert (keys.dtype, vectors.dtype) == (np.int64, np.float32)
            assert all(type(array) is np.ndarray and array.flags.c_contiguous for array in (keys, vectors))
            vectors[:] = 0  # the array is writable, and the file does not change
        assert rows_of(open_sparse(tmp_path / name, 2))[1] == (-3, [2.0, 3.0])


def test_a_directory_is_one_file_per_column(tmp_path):
    write_sparse_directory(tmp_path / "d", KEYS, VECTORS, np.array([1, 0, 2], np.uint64))

    assert {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()} == {
        "key": struct.pack("<3q", 5, -3, 2**40),
        "emb_vector": struct.pack("<6f", 0, 1, 2, 3, 4, 5),
        "slot_id": struct.pack("<3Q", 1, 0, 2),
    }
    assert len(rows_of(open_sparse(tmp_path / "d", 2))) == 3


@pytest.mark.parametrize(
    ("key_type", "row_layout", "row"),
    [
        ("I64", "distributed", "<q2f"),
        ("I64", "localized", "<qQ2f"),
        ("I32", "distributed", "<I2f"),
        ("I32", "localized", "<IQ2f"),
    ],
)
def test_a_single_file_is_packed_rows(tmp_path, key_type, row_layout, row):
    slots = {"distributed": (), "localized": (6,)}[row_layout]
    by_hand = struct.pack(row, 3, *slots, 0.5, 1.5) + struct.pack(row, 2**32 - 1, *slots, 2.5, 3.5)
    (tmp_path / "by_hand").write_bytes(by_hand)

    read = rows_of(open_sparse(tmp_path / "by_hand", 2, key_type, row_layout))

    assert read == [(3, [0.5, 1.5]), (2**32 - 1, [2.5, 3.5])]


def test_rows_beyond_one_chunk_are_written_too(tmp_path):
    keys = np.arange(65_536 * 2 + 3, dtype=np.int64)
    vectors = keys.astype(np.float32)[:, None]

    write_sparse_directory(tmp_path / "d", keys, vectors)

    (read_keys, read_vectors), *rest = open_sparse(tmp_path / "d", 1, "I32").batches(10**6)
    assert not rest
    assert np.array_equal(read_keys, keys)
    assert np.array_equal(read_vectors, vectors)


def test_writing_again_replaces_the_whole_model(tmp_path):
    write_sparse_directory(tmp_path / "d", KEYS, VECTORS)
    (tmp_path / "d" / "meta").write_bytes(KEYS.tobytes())
    write_sparse_directory(tmp_path / "d", KEYS[:1], VECTORS[:1])

    assert rows_of(open_sparse(tmp_path / "d", 2)) == [(5, [0.0, 1.0])]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["d", "emb_vector", "key"]


@pytest.mark.parametrize("name", ["key", "emb_vector", "slot_id", "meta"])
@pytest.mark.parametrize("change", [-8, -4, -1, 1, 4, 8])
def test_a_directorys_columns_of_other_lengths_are_refused(tmp_path, name, change):
    write_sparse_directory(tmp_path / "d", KEYS, VECTORS, KEYS.astype(np.uint64))
    (tmp_path / "d" / "meta").write_bytes(KEYS.tobytes())
    content = (tmp_path / "d" / name).read_bytes()
    (tmp_path / "d" / name).write_bytes(content[:change] if change < 0 else content + b"\0" * change)

    with pytest.raises(ModelFileError, match=r"expected .* found \d+(, as if of 3 floats each)?$"):
        open_sparse(tmp_path / "d", 2)


def test_a_directorys_message_has_sizes_and_counts(tmp_path):
    write_sparse_directory(tmp_path / "d", KEYS, VECTORS)

    with pytest.raises(ModelFileError) as caught:
        open_sparse(tmp_path / "d", 4)

    assert (
        str(caught.value)
        == f"{tmp_path}/d/emb_vector: expected 48 bytes for 3 keys of 16 bytes, found 24, as if of 2 floats each"
    )


def test_an_empty_directory_model_is_refused(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "key").write_bytes(b"")
    (tmp_path / "d" / "emb_vector").write_bytes(b"")

    with pytest.raises(ModelFileError, match="key: expected a multiple of 8 bytes, at least 8, found 0"):
        open_sparse(tmp_path / "d", 2)


@pytest.mark.parametrize("name", ["key", "emb_vector"])
def test_a_directory_without_a_column_is_refused(tmp_path, name):
    write_sparse_directory(tmp_path / "d", KEYS, VECTORS)
    (tmp_path / "d" / name).unlink()

    with pytest.raises(ModelFileError, match=f"{name}: no such file"):
        open_sparse(tmp_path / "d", 2)


@pytest.mark.parametrize("change", range(1, 16))
def test_a_truncated_single_file_is_refused(tmp_path, change):
    write_single_file(tmp_path / "f", KEYS, VECTORS)
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-change])

    with pytest.raises(ModelFileError, match=r"expected a multiple of 16 bytes \(I64 keys, distributed rows, 2 floats"):
        open_sparse(tmp_path / "f", 2)


@pytest.mark.parametrize(
    ("written", "opened", "message"),
    [
        pytest.param(("I32", False, 16), ("I64", "distributed", 16), "I32 keys, distributed rows, 16", id="key-width"),
        pytest.param(("I64", True, 16), ("I64", "distributed", 16), "I64 keys, localized rows, 16", id="localized"),
        pytest.param(("I64", False, 16), ("I64", "localized", 16), "I64 keys, distributed rows, 16", id="distributed"),
        pytest.param(("I64", False, 17), ("I64", "distributed", 16), "I64 keys, distributed rows, 17", id="dim"),
        pytest.param(("I64", False, 32), ("I64", "distributed", 16), "I64 keys, distributed rows, 32", id="twice-dim"),
    ],
)
def test_the_message_says_which_layout_would_fit(tmp_path, written, opened, message):
    key_type, localized, dim = written
    keys = np.arange(1, 8, dtype=np.int64)
    slot_ids = np.zeros(7, np.uint64) if localized else None
    write_single_file(tmp_path / "f", keys, np.zeros((7, dim), np.float32), key_type, slot_ids)

    with pytest.raises(ModelFileError, match=re.escape(message)):
        open_sparse(tmp_path / "f", opened[2], opened[0], opened[1])


def test_the_message_says_when_no_layout_fits(tmp_path):
    (tmp_path / "f").write_bytes(b"\0" * 1009)

    with pytest.raises(ModelFileError, match="fits no other layout"):
        open_sparse(tmp_path / "f", 16)


def test_an_empty_single_file_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"")

    with pytest.raises(ModelFileError, match="the file is empty"):
        open_sparse(tmp_path / "f", 2)


def test_a_missing_model_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="f: no such file"):
        open_sparse(tmp_path / "f", 2)


def test_a_model_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ModelFileError, match="file/f: cannot be read: Not a directory"):
        open_sparse(tmp_path / "file" / "f", 2)


@pytest.mark.parametrize("key", RESERVED)
def test_a_reserved_key_is_refused_by_readers_and_writers(tmp_path, key):
    message = re.escape(f"row 1: key {key} is reserved")
    (tmp_path / "f").write_bytes(struct.pack("<qfqf", 3, 0, key, 0))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "key").write_bytes(struct.pack("<2q", 3, key))
    (tmp_path / "d" / "emb_vector").write_bytes(struct.pack("<2f", 0, 0))

    with pytest.raises(ModelFileError, match=f"f: {message}"):
        open_sparse(tmp_path / "f", 1).batches(10)
    with pytest.raises(ModelFileError, match=f"d/key: {message}"):
        open_sparse(tmp_path / "d", 1).batches(10)
    with pytest.raises(ModelFileError, match=message):
        write_sparse_directory(tmp_path / "e", np.array([3, key]), VECTORS[:2])


@pytest.mark.parametrize("key", [-1, 2**32])
def test_a_key_beyond_uint32_is_refused_for_a_uint32_model(tmp_path, key):
    keys = np.array([3, key])
    write_sparse_directory(tmp_path / "d", keys, VECTORS[:2])
    message = re.escape(f"row 1: key {key} is not a uint32, the model's key type; keys go from 0 to 4294967295")

    with pytest.raises(ModelFileError, match=message):
        open_sparse(tmp_path / "d", 2, "I32").batches(10)


def test_a_repeated_key_in_a_directory_is_refused(tmp_path):
    write_sparse_directory(tmp_path / "d", KEYS, VECTORS)
    (tmp_path / "d" / "key").write_bytes(struct.pack("<3q", 4, 9, 4))

    with pytest.raises(ModelFileError, match="d/key: key 4 is in row 0 and again in row 2"):
        open_sparse(tmp_path / "d", 2).batches(10)


@settings(deadline=None, max_examples=30)
@given(keys=st.lists(st.integers(0, 5), min_size=1, max_size=15), batch_rows=st.integers(1, 6))
def test_the_first_row_of_a_repeated_key_in_a_single_file_counts(tmp_path_factory, keys, batch_rows):
    path = tmp_path_factory.mktemp("sparse") / "f"
    path.write_bytes(b"".join(struct.pack("<qf", key, row) for row, key in enumerate(keys)))
    first = {}
    for row, key in enumerate(keys):
        first.setdefault(key, [float(row)])

    model = open_sparse(path, 1)

    assert model.rows == len(keys)
    assert rows_of(model, batch_rows) == list(first.items())


@pytest.mark.parametrize("batch_rows", [0, -1])
def test_an_empty_batch_size_is_refused(tmp_path, batch_rows):
    write_sparse_directory(tmp_path / "d", KEYS, VECTORS)

    with pytest.raises(ValueError, match="at least 1 row"):
        open_sparse(tmp_path / "d", 2).batches(batch_rows)


@pytest.mark.parametrize(
    ("keys", "vectors", "message"),
    [
        pytest.param(KEYS.astype(np.int32), VECTORS, "expected keys int64[N], got int32 [3]", id="key-dtype"),
        pytest.param(KEYS[:, None], VECTORS, "expected keys int64[N], got int64 [3, 1]", id="key-shape"),
        pytest.param(KEYS, VECTORS.astype(float), "expected vectors float32[N, D], got float64", id="vector-dtype"),
        pytest.param(KEYS, VECTORS.ravel(), "expected vectors float32[N, D], got float32 [6]", id="vector-shape"),
        pytest.param(KEYS, VECTORS[:, :0], "expected vectors float32[N, D], got float32 [3, 0]", id="no-columns"),
        pytest.param(KEYS[:2], VECTORS, "got 2 keys, 3 vectors", id="fewer-keys"),
        pytest.param(KEYS[:0], VECTORS[:0], "at least one; got 0 keys", id="no-rows"),
        pytest.param(np.array([4, 9, 4]), VECTORS, "key 4 is in row 0 and again in row 2", id="repeated-key"),
    ],
)
def test_rows_that_are_not_a_table_are_not_written(tmp_path, keys, vectors, message):
    with pytest.raises(ModelFileError, match=re.escape(message)):
        write_sparse_directory(tmp_path / "d", keys, vectors)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("slot_ids", [np.zeros(2, np.uint64), np.zeros(3, np.int64)])
def test_slot_ids_that_do_not_fit_are_not_written(tmp_path, slot_ids):
    with pytest.raises(ModelFileError, match=r"slot_id: expected uint64\[3\]"):
        write_sparse_directory(tmp_path / "d", KEYS, VECTORS, slot_ids)


def test_a_disk_that_refuses_writes_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ModelFileError, match="file: cannot be written: Not a directory"):
        write_sparse_directory(tmp_path / "file", KEYS, VECTORS)


@pytest.mark.parametrize("single_file", [False, True])
def test_the_digest_names_the_content(tmp_path, single_file):
    def digest(name, vectors, with_manifest=False):
        path = tmp_path / name / "t"
        path.parent.mkdir()
        if single_file:
            write_single_file(path, KEYS, vectors)
        else:
            write_sparse_directory(path, KEYS, vectors)
        if with_manifest:
            write_manifest(path.parent, "dcn", 1)
        return open_sparse(path, 2).digest()

    changed = VECTORS.copy()
    changed[2, 1] += 1

    assert digest("one", VECTORS) == digest("two", VECTORS) == digest("three", VECTORS, with_manifest=True)
    assert digest("four", changed) == digest("five", changed, with_manifest=True) != digest("six", VECTORS)


def test_the_digest_is_taken_from_the_manifest_unless_the_size_differs(tmp_path):
    write_single_file(tmp_path / "f", KEYS, VECTORS)
    write_manifest(tmp_path, "dcn", 1)
    digest = open_sparse(tmp_path / "f", 2).digest()

    write_single_file(tmp_path / "f", KEYS, VECTORS + 1)
    assert open_sparse(tmp_path / "f", 2).digest() == digest  # only `verify_manifest` finds the change

    write_single_file(tmp_path / "f", KEYS[:2], VECTORS[:2])
    assert open_sparse(tmp_path / "f", 2).digest() != digest


def test_equal_bytes_read_as_another_table_have_another_digest(tmp_path):
    write_single_file(tmp_path / "f", KEYS, np.zeros((3, 4), np.float32))

    digests = {open_sparse(tmp_path / "f", 4).digest(), open_sparse(tmp_path / "f", 2, "I64", "localized").digest()}

    assert len(digests) == 2


@pytest.mark.parametrize("name", ["key", "emb_vector", "../manifest.json"])
def test_a_file_that_changes_while_the_model_is_open_is_refused_after_the_last_batch(tmp_path, name):
    write_sparse_directory(tmp_path / "t", KEYS, VECTORS)
    write_manifest(tmp_path, "m", 1)
    batches = open_sparse(tmp_path / "t", 2, "I64").batches(2)
    assert next(batches)[0].tolist() == [5, -3]

    (tmp_path / "new").write_bytes((tmp_path / "t" / name).read_bytes())
    (tmp_path / "new").rename(tmp_path / "t" / name)

    assert next(batches)[0].tolist() == [2**40]
    with pytest.raises(ModelFileError, match=f"{tmp_path / 't'}: a file was changed while the model was read"):
        next(batches)


def test_a_row_that_is_not_finite_is_reported_by_its_key(tmp_path, caplog):
    vectors = np.ones((3, 2), np.float32)
    vectors[1, 0] = np.nan
    write_sparse_directory(tmp_path / "table", np.array([5, 6, 7]), vectors)

    [(keys, _)] = open_sparse(tmp_path / "table", 2, "I64", "distributed").batches(10)

    assert keys.tolist() == [5, 6, 7]
    assert "the row of key 6 has values that are NaN or infinite" in caplog.text


@pytest.mark.parametrize("name", ["key", "emb_vector"])
def test_an_unreadable_file_is_named(tmp_path, name):
    write_sparse_directory(tmp_path / "t", KEYS, VECTORS)
    (tmp_path / "t" / name).chmod(0)

    with ordinary_rights(), pytest.raises(ModelFileError, match=rf"t/{name}: cannot be read: Permission denied"):
        open_sparse(tmp_path / "t", 2)


@pytest.mark.parametrize("mode", [0, 0o600], ids=oct)
def test_a_folder_that_cannot_be_entered_is_named(tmp_path, mode):
    write_sparse_directory(tmp_path / "t", KEYS, VECTORS)
    (tmp_path / "t").chmod(mode)

    with ordinary_rights(), pytest.raises(ModelFileError, match=r"t/key: cannot be read: Permission denied"):
        open_sparse(tmp_path / "t", 2)
    (tmp_path / "t").chmod(0o700)


def test_an_unreadable_single_file_is_named(tmp_path):
    write_single_file(tmp_path / "t", KEYS, VECTORS)
    (tmp_path / "t").chmod(0)

    with ordinary_rights(), pytest.raises(ModelFileError, match="t: cannot be read: Permission denied"):
        open_sparse(tmp_path / "t", 2)


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes").write_text("mine")

    with pytest.raises(ModelFileError, match=r"d: cannot be written: .*d/notes is no file of a table, and would be e"):
        write_sparse_directory(tmp_path / "d", KEYS, VECTORS)

    assert [path.name for path in tmp_path.rglob("*")] == ["d", "notes"]


class TestTableFolders:
    def test_they_replace_earlier_ones_as_a_whole(self, tmp_path):
        write_table_folders(tmp_path / "all", {"old": [(KEYS, VECTORS)], "user": [(KEYS, VECTORS)]})

        rows = write_table_folders(tmp_path / "all", {"user": [(KEYS[:1], VECTORS[:1])], "none": [], "item": []})

        assert rows == {"user": 1, "none": 0, "item": 0}
        assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["all", "user"]
        assert open_sparse(tmp_path / "all" / "user", VECTORS.shape[1]).rows == 1

    @pytest.mark.parametrize("strange", ["notes", "user/notes", "user/key/notes"])
    def test_other_files_are_not_erased(self, tmp_path, strange):
        file = tmp_path / "all" / strange
        file.parent.mkdir(parents=True)
        file.write_text("mine")

        named = strange.removesuffix("/notes") if "key" in strange else strange
        with pytest.raises(OutputError, match=f"all: cannot be written: .*{named} is no file of a table, and would be"):
            write_table_folders(tmp_path / "all", {"user": [(KEYS, VECTORS)]})

        assert file.read_text() == "mine"

    @pytest.mark.parametrize("name", ["../escaped", "a/b", ""])
    def test_a_name_that_leaves_the_folder_is_refused(self, tmp_path, name):
        with pytest.raises(OutputError, match="all: expected a table's name to match "):
            write_table_folders(tmp_path / "all", {name: [(KEYS, VECTORS)]})

        assert not list(tmp_path.iterdir())
