"""HostTable, KeyIndex and pool_rows refuse wrong arrays, and the error says what they expected and what they got."""

import ctypes
import sys

import numpy as np
import pytest

from kernels.host import HostTable, KeyIndex, pool_rows

DIM = 4
KEYS = np.arange(6)
ROW_PTRS = np.array([0, 2, 6])


@pytest.fixture
def table():
    table = HostTable(DIM, 10)
    table.insert(KEYS, np.ones((6, DIM), np.float32))
    return table


def out_for(rows, dtype=np.float32):
    return np.full((rows, DIM), 7, dtype=dtype)


BAD_KEYS = [
    pytest.param([1, 2, 3], TypeError, r"keys: expected int64\[N\], got list", id="a list"),
    pytest.param(None, TypeError, r"keys: expected int64\[N\], got NoneType", id="nothing"),
    pytest.param(KEYS.astype(np.int32), TypeError, r"keys: expected int64\[N\], got int32\[6\]", id="int32"),
    pytest.param(KEYS.astype(np.uint64), TypeError, r"got uint64\[6\]", id="uint64"),
    pytest.param(KEYS.astype(np.float64), TypeError, r"got float64\[6\]", id="floats"),
    pytest.param(KEYS.astype(">i8"), TypeError, r"got items of format '>q' \[6\]|format '>l'", id="foreign byte order"),
    pytest.param(KEYS.reshape(2, 3), ValueError, r"keys: expected int64\[N\], got int64\[2, 3\]", id="two dimensions"),
    pytest.param(np.array(3), ValueError, r"got int64\[\]", id="no dimension"),
    pytest.param(np.arange(12)[::2], ValueError, r"got int64\[6\] that is not C-contiguous", id="strided"),
]


@pytest.mark.parametrize(("keys", "error", "message"), BAD_KEYS)
def test_keys_other_than_an_int64_vector_are_refused(table, keys, error, message):
    index = KeyIndex()
    for call in (
        lambda: table.fetch(keys, out_for(6)),
        lambda: table.fetch_pooled(keys, ROW_PTRS, out_for(2), "sum"),
        lambda: table.holds(keys),
        lambda: table.insert(keys, out_for(6)),
        lambda: table.evict(keys),
        lambda: index.find(keys),
        lambda: index.find_or_insert(keys),
    ):
        with pytest.raises(error, match=message):
            call()
    assert len(table) == 6
    assert len(index) == 0


def askew(array):
    """The same items, one byte off their dtype's alignment."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(array.dtype).reshape(array.shape)
    moved[...] = array
    assert not moved.flags.aligned
    return moved


def read_only():
    out = out_for(6)
    out.flags.writeable = False
    return out


BAD_OUT = [
    pytest.param(lambda: out_for(5), ValueError, r"out: .* of shape \[6, 4\], got float32\[5, 4\]", id="too few rows"),
    pytest.param(lambda: out_for(7), ValueError, r"got float32\[7, 4\]", id="too many rows"),
    pytest.param(lambda: np.zeros((6, 5), np.float32), ValueError, r"got float32\[6, 5\]", id="another dim"),
    pytest.param(lambda: np.zeros(24, np.float32), ValueError, r"got float32\[24\]", id="one dimension"),
    pytest.param(lambda: np.zeros((4, 6), np.float32).T, ValueError, "is not C-contiguous", id="transposed"),
    pytest.param(lambda: np.zeros((12, 4), np.float32)[::2], ValueError, "is not C-contiguous", id="strided"),
    pytest.param(lambda: out_for(6, np.float64), TypeError, r"out: .*, got float64\[6, 4\]", id="float64"),
    pytest.param(lambda: out_for(6, np.float16), TypeError, r"got float16\[6, 4\]", id="float16"),
    pytest.param(read_only, ValueError, "that is read-only", id="read-only"),
    pytest.param(lambda: askew(out_for(6)), ValueError, r"got float32\[6, 4\] that is not aligned", id="askew"),
    pytest.param(lambda: [[0.0] * 4] * 6, TypeError, r"out: expected .*, got list", id="a list"),
]


@pytest.mark.parametrize(("make_out", "error", "message"), BAD_OUT)
def test_an_unsuitable_out_is_refused(table, make_out, error, message):
    row_ptrs = np.arange(7)
    for call in (
        lambda out: table.fetch(KEYS, out),
        lambda out: table.fetch_pooled(KEYS, row_ptrs, out, "sum"),
        lambda out: pool_rows(np.ones((6, DIM), np.float32), row_ptrs, out, "sum"),
    ):
        with pytest.raises(error, match=message):
            call(make_out())


@pytest.mark.parametrize("rows", [
    pytest.param(np.ones((5, DIM), np.float32), id="too few"),
    pytest.param(np.ones((6, 3), np.float32), id="another dim"),
    pytest.param(np.ones((6, DIM, 1), np.float32), id="three dimensions"),
    pytest.param(np.ones((DIM, 6), np.float32).T, id="transposed"),
    pytest.param(askew(np.ones((6, DIM), np.float32)), id="askew"),
])  # fmt: skip
def test_rows_of_another_shape_are_refused_and_nothing_is_written(table, rows):
    with pytest.raises(ValueError, match=r"^rows: expected float32\[N, D\]"):
        table.insert(KEYS + 100, rows)
    assert len(table) == 6


def test_rows_of_another_dtype_are_refused(table):
    with pytest.raises(TypeError, match=r"^rows: expected float32\[N, D\], got float64\[6, 4\]"):
        table.insert(KEYS, out_for(6, np.float64))
    with pytest.raises(TypeError, match=r"^rows: expected float32\[N, D\], got float64\[6, 4\]"):
        pool_rows(out_for(6, np.float64), ROW_PTRS, out_for(2), "sum")


BAD_ROW_PTRS = [
    pytest.param([1, 2, 6], ValueError, r"the first offset must be 0, got 1 at position 0", id="late start"),
    pytest.param([0, 4, 3, 6], ValueError, r"offsets must not fall, got 3 at position 2", id="falling"),
    pytest.param([0, -1, 6], ValueError, r"offsets must not fall, got -1 at position 1", id="negative"),
    pytest.param([0, 2, 5], ValueError, r"must be the number of keys, 6, got 5 at position 2", id="short"),
    pytest.param([0, 2, 7], ValueError, r"must be the number of keys, 6, got 7 at position 2", id="beyond the end"),
    pytest.param([0], ValueError, r"must be the number of keys, 6, got 0 at position 0", id="no bag"),
    pytest.param([[0, 6]], ValueError, r"got int(32|64)\[1, 2\]", id="two dimensions"),
    pytest.param([], ValueError, r"row_ptrs: expected at least one offset", id="no offset"),
]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("offsets", "error", "message"), BAD_ROW_PTRS)
def test_row_ptrs_that_are_not_csr_offsets_are_refused(table, dtype, offsets, error, message):
    row_ptrs = np.array(offsets, dtype=dtype)
    out = out_for(max(row_ptrs.size - 1, 0))
    with pytest.raises(error, match=message):
        table.fetch_pooled(KEYS, row_ptrs, out, "sum")
    with pytest.raises(error, match=message):
        pool_rows(np.ones((6, DIM), np.float32), row_ptrs, out, "sum")
    assert (out == 7).all()


def test_row_ptrs_of_another_dtype_are_refused(table):
    with pytest.raises(TypeError, match=r"row_ptrs: expected int32\[R \+ 1\] or int64\[R \+ 1\], got float64\[3\]"):
        table.fetch_pooled(KEYS, ROW_PTRS.astype(np.float64), out_for(2), "sum")


def test_rows_too_wide_to_pool_are_refused():
    wide = np.empty((0, 65_537), np.float32)
    with pytest.raises(ValueError, match="rows: expected at most 65536 columns, got 65537"):
        pool_rows(wide, np.array([0]), wide, "sum")


@pytest.mark.parametrize("combiner", ["max", "", "Sum"])
def test_an_unknown_combiner_is_refused(table, combiner):
    with pytest.raises(ValueError, match=f"combiner: expected 'sum', 'mean' or 'sqrtn', got '{combiner}'"):
        table.fetch_pooled(KEYS, ROW_PTRS, out_for(2), combiner)
    with pytest.raises(ValueError, match=f"combiner: expected 'sum', 'mean' or 'sqrtn', got '{combiner}'"):
        pool_rows(out_for(6), ROW_PTRS, out_for(2), combiner)


def test_a_batch_of_less_than_one_row_is_refused(table):
    with pytest.raises(ValueError, match="batch_rows: expected 1 to"):
        list(table.items(batch_rows=0))


def test_a_key_index_without_capacity_is_refused():
    with pytest.raises(ValueError, match="capacity_rows: expected 1 to"):
        KeyIndex(0)


def test_read_only_keys_and_rows_are_accepted(table):
    keys, rows = KEYS.copy(), out_for(6)
    keys.flags.writeable = rows.flags.writeable = False

    table.insert(keys, rows)

    out = np.empty((6, DIM), np.float32)
    assert table.fetch(keys, out).all()
    assert (out == 7).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_misaligned_keys_and_row_ptrs_are_read_correctly(table, dtype):
    table.insert(askew(KEYS), np.arange(24, dtype=np.float32).reshape(6, DIM))
    out, pooled = out_for(6), out_for(2)

    assert table.fetch(askew(KEYS), out).all()
    assert table.fetch_pooled(askew(KEYS), askew(ROW_PTRS.astype(dtype)), pooled, "sum").all()

    assert (out == np.arange(24).reshape(6, DIM)).all()
    assert (pooled == [out[:2].sum(axis=0), out[2:].sum(axis=0)]).all()
    assert KeyIndex().find_or_insert(askew(KEYS)).tolist() == KEYS.tolist()
    assert table.evict(askew(KEYS)) == 6


def test_an_out_that_overlaps_the_row_ptrs_gets_the_right_answer():
    table = HostTable(2, 10)
    table.insert(KEYS, np.full((6, 2), 1e30, np.float32))
    row_ptrs = np.arange(7)
    over = row_ptrs[1:].view(np.float32).reshape(6, 2)  # writing bag 0 destroys the end of bag 1
    again = np.arange(7)

    assert table.fetch_pooled(KEYS, row_ptrs, over, "sum").all()
    pool_rows(np.full((6, 2), 1e30, np.float32), again, again[1:].view(np.float32).reshape(6, 2), "sum")

    assert (over == np.float32(1e30)).all()
    assert np.array_equal(again, row_ptrs)


def test_ctypes_arrays_that_name_the_native_byte_order_are_accepted(table):
    """ctypes writes the byte order into the format string: "<f" instead of NumPy's "f"."""
    rows, out, pooled = ((ctypes.c_float * DIM * count)() for count in (6, 6, 2))
    keys, row_ptrs = (ctypes.c_int64 * 6)(*KEYS), (ctypes.c_int32 * 3)(*ROW_PTRS)
    weights = (ctypes.c_float * 6)(*[2.0] * 6)
    np.ctypeslib.as_array(rows)[:] = np.arange(24).reshape(6, DIM)
    native = "<" if sys.byteorder == "little" else ">"
    assert memoryview(rows).format == f"{native}f"

    table.insert(keys, rows)

    assert table.fetch(keys, out).all()
    assert table.fetch_pooled(keys, row_ptrs, pooled, "sum", weights).all()
    assert bytes(out) == bytes(rows)
    assert np.ctypeslib.as_array(pooled).tolist() == [[8, 12, 16, 20], [112, 120, 128, 136]]
    pool_rows(rows, row_ptrs, pooled, "mean")
    assert np.ctypeslib.as_array(pooled).tolist() == [[2, 3, 4, 5], [14, 15, 16, 17]]


def test_floats_of_the_other_byte_order_are_refused(table):
    other = ">" if sys.byteorder == "little" else "<"
    with pytest.raises(TypeError, match=rf"^rows: expected float32\[N, D\], got items of format '{other}f' \[6, 4\]"):
        table.insert(KEYS, np.ones((6, DIM), f"{other}f4"))
