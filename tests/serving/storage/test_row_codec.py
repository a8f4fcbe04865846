import numpy as np
import pytest

from kernels.host import round_rows
from serving.errors import StoreError
from serving.storage import TableSpec
from serving.storage.row_codec import RowCodec, value_list

ROW_DTYPES = ["fp32", "fp16", "bf16", "int8", "uint8"]
ROWS = np.random.default_rng(0).standard_normal((7, 12), dtype=np.float32)


@pytest.mark.parametrize("row_dtype", ROW_DTYPES)
def test_values_give_back_the_rounded_rows_whichever_piece_is_read(row_dtype):
    codec = RowCodec("store", TableSpec("m.t", 12, row_dtype=row_dtype), row_dtype)
    rounded = np.empty_like(ROWS)
    round_rows(ROWS, row_dtype, rounded)

    values = value_list(codec.encode(np.arange(7), ROWS))

    assert [len(value) for value in values] == [codec.value_bytes] * 7
    assert codec.decode(b"".join(values[2:5])).tobytes() == rounded[2:5].tobytes()
    assert codec.decode(b"").shape == (0, 12)


def test_a_store_without_a_row_type_keeps_float32_of_a_narrow_table():
    codec = RowCodec("store", TableSpec("m.t", 12, row_dtype="int8"), None)

    assert value_list(codec.encode(np.arange(7), ROWS)) == [row.tobytes() for row in ROWS]
    assert codec.expectation() == "12 floats are 48"


def test_rows_that_do_not_lie_side_by_side_are_encoded():
    codec = RowCodec("store", TableSpec("m.t", 6), None)

    assert codec.encode(np.arange(7), ROWS[:, ::2]).tobytes() == ROWS[:, ::2].tobytes()


def test_a_store_refuses_another_row_type_than_the_tables():
    with pytest.raises(StoreError, match="a table of int8 rows in a store that keeps fp32 rows"):
        RowCodec("store", TableSpec("m.t", 12, row_dtype="int8"), "fp32")


def test_a_value_that_does_not_fit_is_refused_by_its_key():
    codec = RowCodec("redis", TableSpec("m.t", 12, row_dtype="fp16"), "fp16")
    rows = ROWS.copy()
    rows[3, 5] = 1e6

    with pytest.raises(StoreError, match=r"redis: table 'm\.t': row 3, of key 1003: column 5 is 1000000, which fp16"):
        codec.encode(np.arange(1000, 1007), rows)
