"""Rows of every row dtype come back as an oracle rounds them, bit for bit, with both compilations of the loops."""

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kernels.errors import RowValueError
from kernels.host import HostTable, decode_rows, encode_rows, pool_rows, round_rows, row_bytes

ROW_DTYPES = ["fp32", "fp16", "bf16", "int8", "uint8"]
DIMS = [1, 3, 8, 16, 31, 32, 64, 100, 128, 130]
LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.float32(1e-45))  # the smallest subnormal

pytestmark = pytest.mark.usefixtures("reading_loops")


def brain_floats(rows):
    """Round to eight significant bits, ties to even, down to 2^-133, with exact float64 arithmetic."""
    _, exponents = np.frexp(rows.astype(np.float64))
    quanta = np.ldexp(1.0, np.maximum(exponents - 8, -133))
    return (np.rint(rows / quanta) * quanta).astype(np.float32)


def symmetric_bytes(rows):
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0))
    return np.clip(codes, -127, 127).astype(np.int8).astype(np.float32) * scales


def affine_bytes(rows):
    offsets = rows.min(axis=1, keepdims=True)
    scales = (rows.max(axis=1, keepdims=True) - offsets) / np.float32(255)
    codes = np.rint(np.divide(rows - offsets, scales, out=np.zeros_like(rows), where=scales > 0))
    return np.clip(codes, 0, 255).astype(np.uint8).astype(np.float32) * scales + offsets


ORACLES = {
    "fp32": np.copy,
    "fp16": lambda rows: rows.astype(np.float16).astype(np.float32),
    "bf16": brain_floats,
    "int8": symmetric_bytes,
    "uint8": affine_bytes,
}
# Row dtypes that hold every value of these magnitudes.
MOST = {"fp32": LARGEST, "fp16": 65504.0, "bf16": 3e38, "int8": 3e38, "uint8": 1.5e38}


def table_of(rows, row_dtype):
    table = HostTable(rows.shape[1], max(len(rows), 1), row_dtype)
    table.insert(np.arange(len(rows)), rows)
    return table


def fetched(rows, row_dtype):
    out = np.full_like(rows, np.nan)
    assert table_of(rows, row_dtype).fetch(np.arange(len(rows)), out).all()
    return out


def random_rows(row_dtype, dim, n=200, seed=0):
    """Rows of very different sizes, subnormals among them."""
    rng = np.random.default_rng(seed)
    sizes = np.float32(10.0) ** rng.integers(-42, 4, (n, 1)).astype(np.float32)
    return rng.standard_normal((n, dim), dtype=np.float32) * sizes


@pytest.mark.parametrize("row_dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_fetched_rows_are_the_rounded_rows(dim, row_dtype):
    rows = random_rows(row_dtype, dim)
    expected = ORACLES[row_dtype](rows)
    rounded = np.empty_like(rows)

    round_rows(rows, row_dtype, rounded)

    assert fetched(rows, row_dtype).tobytes() == expected.tobytes()
    assert rounded.tobytes() == expected.tobytes()


def encoded_by_numpy(rows, row_dtype):
    """The documented layout, from the oracles' values; bf16 is the upper half of the rounded float32."""
    if row_dtype in ("fp32", "fp16"):
        return rows.astype("<f4" if row_dtype == "fp32" else "<f2").view(np.uint8)
    if row_dtype == "bf16":
        return (brain_floats(rows).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    if row_dtype == "int8":
        parameters = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        scales, offsets, low, high, code = parameters, np.float32(0), -127, 127, np.int8
    else:
        offsets = rows.min(axis=1, keepdims=True)
        scales = (rows.max(axis=1, keepdims=True) - offsets) / np.float32(255)
        parameters, low, high, code = np.hstack([scales, offsets]), 0, 255, np.uint8
    steps = np.rint(np.divide(rows - offsets, scales, out=np.zeros_like(rows), where=scales > 0))
    return np.hstack([parameters.astype("<f4").view(np.uint8), np.clip(steps, low, high).astype(code).view(np.uint8)])


@pytest.mark.parametrize("row_dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_encoded_rows_have_the_documented_layout_and_decode_to_the_rounded_rows(dim, row_dtype):
    rows = random_rows(row_dtype, dim)
    decoded = np.full_like(rows, np.nan)

    encoded = encode_rows(rows, row_dtype)
    decode_rows(encoded, row_dtype, decoded)

    assert encoded.dtype == np.uint8
    assert encoded.shape == (200, row_bytes(dim, row_dtype))
    assert encoded.tobytes() == encoded_by_numpy(rows, row_dtype).tobytes()
    assert decoded.tobytes() == ORACLES[row_dtype](rows).tobytes()


@pytest.mark.parametrize("row_dtype", ROW_DTYPES)
def test_encoded_rows_may_be_misaligned_and_read_only(row_dtype):
    rows = random_rows(row_dtype, 9, n=70)
    bytes_of = encode_rows(rows, row_dtype).tobytes()
    askew = np.frombuffer(b"x" + bytes_of, dtype=np.uint8)[1:].reshape(70, -1)
    decoded = np.empty_like(rows)

    decode_rows(askew, row_dtype, decoded)

    assert decoded.tobytes() == ORACLES[row_dtype](rows).tobytes()


@pytest.mark.parametrize("row_dtype", ROW_DTYPES)
def test_no_rows_encode_to_no_rows(row_dtype):
    encoded = encode_rows(np.empty((0, 5), np.float32), row_dtype)

    decode_rows(encoded, row_dtype, np.empty((0, 5), np.float32))

    assert encoded.shape == (0, row_bytes(5, row_dtype))


@pytest.mark.parametrize(("encoded", "out", "error"), [
    (np.zeros((2, 7), np.int8), np.zeros((2, 3), np.float32), TypeError),
    ([[0] * 7] * 2, np.zeros((2, 3), np.float32), TypeError),
    (np.zeros((2, 7), np.uint8), np.zeros((2, 3)), TypeError),
    (np.zeros((2, 8), np.uint8), np.zeros((2, 3), np.float32), ValueError),
    (np.zeros((3, 7), np.uint8), np.zeros((2, 3), np.float32), ValueError),
    (np.zeros((2, 14), np.uint8)[:, ::2], np.zeros((2, 3), np.float32), ValueError),
    (np.zeros(14, np.uint8), np.zeros((2, 3), np.float32), ValueError),
    (np.zeros((0, 65_541), np.uint8), np.zeros((0, 65_537), np.float32), ValueError),
])  # fmt: skip
def test_encoded_rows_of_the_wrong_form_are_not_decoded(encoded, out, error):
    with pytest.raises(error, match=r"^(encoded|out): expected"):
        decode_rows(encoded, "int8", out)


@pytest.mark.parametrize("rows", [np.zeros((2, 3)), np.zeros(6, np.float32), np.zeros((0, 65_537), np.float32)])
def test_rows_of_the_wrong_form_are_not_encoded(rows):
    with pytest.raises((TypeError, ValueError), match=r"^rows: expected"):
        encode_rows(rows, "int8")


@pytest.mark.parametrize("dim", [0, -1, 65_537])
def test_a_dim_out_of_range_has_no_row_size(dim):
    with pytest.raises(ValueError, match=f"dim: expected 1 to 65536, got {dim}"):
        row_bytes(dim, "int8")


@settings(deadline=None, max_examples=50)
@given(data=st.data(), row_dtype=st.sampled_from(ROW_DTYPES))
def test_all_values_that_fit_are_rounded_as_the_oracle_rounds_them(data, row_dtype):
    most = float(np.float32(MOST[row_dtype]))
    values = st.floats(-most, most, width=32, allow_subnormal=True) | st.sampled_from([0.0, -0.0, TINY, -TINY])
    shape = (data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 8, 9, 16])))
    rows = data.draw(arrays(np.float32, shape, elements=values))
    out = rows.copy()

    round_rows(rows, row_dtype, out)

    assert out.tobytes() == ORACLES[row_dtype](rows).tobytes()


@pytest.mark.parametrize("row_dtype", ["fp16", "bf16"])
def test_every_tie_goes_to_the_even_value(row_dtype):
    high = np.arange(0x0000, 0x7BFF if row_dtype == "fp16" else 0x7F7F, dtype=np.uint16)
    if row_dtype == "fp16":
        low, up = high.view(np.float16).astype(np.float32), (high + np.uint16(1)).view(np.float16).astype(np.float32)
    else:
        low, up = ((high.astype(np.uint32) + more << 16).view(np.float32) for more in (0, 1))
    halfway = ((low.astype(np.float64) + up) / 2).astype(np.float32)[:, None]

    expected = np.where(high % 2 == 0, low, up)

    assert np.array_equal(fetched(halfway, row_dtype)[:, 0], expected)
    assert np.array_equal(fetched(-halfway, row_dtype)[:, 0], -expected)


@pytest.mark.parametrize(("row_dtype", "bound"), [("int8", 1 / 127 / 2), ("uint8", 1 / 255 / 2)])
def test_the_error_of_8_bit_rows_is_at_most_half_a_step(row_dtype, bound):
    rows = np.random.default_rng(1).standard_normal((300, 64), dtype=np.float32)
    spans = np.abs(rows).max(axis=1) if row_dtype == "int8" else np.ptp(rows, axis=1)

    errors = np.abs(fetched(rows, row_dtype) - rows).max(axis=1)

    assert (errors <= spans * bound * 1.00001).all()
    assert (errors > spans * bound * 0.5).all()  # some of 64 values lie far from every step


def test_eight_bit_rows_agree_with_pytorchs_row_wise_bytes():
    torch = pytest.importorskip("torch")
    rows = np.random.default_rng(2).standard_normal((100, 32), dtype=np.float32)
    packed = torch.ops.quantized.embedding_bag_byte_prepack(torch.from_numpy(rows))

    theirs = torch.ops.quantized.embedding_bag_byte_unpack(packed).numpy()

    # PyTorch multiplies by a rounded reciprocal, which moves some ties.
    steps = np.ptp(rows, axis=1, keepdims=True) / 255
    off = np.abs(fetched(rows, "uint8") - theirs)
    assert (off <= 1.001 * steps).all()
    assert (off > 0.5 * steps).mean() < 0.01


@pytest.mark.parametrize("row_dtype", ["fp16", "bf16"])
def test_row_dtypes_with_nan_and_infinity_keep_them(row_dtype):
    rows = np.array([[np.nan, np.inf, -np.inf, 1.0]] * 3, dtype=np.float32).repeat(3, axis=1)

    assert np.array_equal(fetched(rows, row_dtype), rows, equal_nan=True)


UNFIT = [
    ("fp16", 65520.0),
    ("fp16", -65520.0),
    ("fp16", LARGEST),
    ("bf16", LARGEST),
    ("bf16", -LARGEST),
    *((row_dtype, value) for row_dtype in ("int8", "uint8") for value in (np.nan, np.inf, -np.inf)),
]


@pytest.mark.parametrize(("row_dtype", "value"), UNFIT)
def test_a_value_that_does_not_fit_is_refused_with_its_key_and_nothing_is_written(row_dtype, value):
    rows = np.ones((5, 11), dtype=np.float32)
    table = HostTable(11, 5, row_dtype)
    table.insert(np.arange(5), rows)
    rows[:] = 2.0
    rows[3, 7] = rows[3, 9] = rows[4, 0] = value

    with pytest.raises(RowValueError, match=f"row 3, of key 103: column 7 is .*, which {row_dtype} rows cannot hold"):
        table.insert(np.arange(100, 105), rows)
    with pytest.raises(RowValueError, match=r"^row 3: column 7 is ") as caught:
        round_rows(rows, row_dtype, np.empty_like(rows))
    with pytest.raises(RowValueError, match=r"^row 3: column 7 is "):
        encode_rows(rows, row_dtype)

    error = caught.value
    assert (error.row_dtype, error.position, error.column, error.key) == (row_dtype, 3, 7, None)
    assert np.array_equal(error.value, np.float32(value), equal_nan=True)
    assert len(table) == 5
    out = np.empty_like(rows)
    table.fetch(np.arange(5), out)
    assert (out == 1.0).all()


def test_a_range_wider_than_float32_is_refused_for_uint8():
    rows = np.array([[-3e38, 0.0, 3.1e38]], dtype=np.float32)

    with pytest.raises(RowValueError, match=r"column 2 is 3\.0999"):
        round_rows(rows, "uint8", rows.copy())


@pytest.mark.parametrize(("row_dtype", "value"), [("fp16", 65519.996), ("bf16", 3.396e38)])
def test_the_largest_value_that_fits_becomes_the_types_largest(row_dtype, value):
    largest = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}[row_dtype]

    assert fetched(np.array([[value, -value]], dtype=np.float32), row_dtype).tolist() == [[largest, -largest]]


@pytest.mark.parametrize("row_dtype", ["int8", "uint8"])
def test_constant_rows_come_back_unchanged(row_dtype):
    rows = np.array([[0.0] * 9, [-0.1] * 9, [7e-45] * 9], dtype=np.float32)

    rounded = fetched(rows, row_dtype)

    assert np.array_equal(rounded[0], rows[0])
    if row_dtype == "uint8":
        assert np.array_equal(rounded, rows)


@pytest.mark.parametrize("row_dtype", ROW_DTYPES)
def test_absent_keys_are_zeros_and_items_returns_the_rounded_rows(row_dtype):
    rows = random_rows(row_dtype, 20)
    table = table_of(rows, row_dtype)
    out = np.full((2, 20), np.nan, dtype=np.float32)

    assert not table.fetch(np.array([-5, 10**9]), out).any()

    assert out.tobytes() == bytes(out.nbytes)
    walked = {int(key): row.tobytes() for keys, part in table.items(7) for key, row in zip(keys, part, strict=True)}
    assert walked == {key: row.tobytes() for key, row in enumerate(ORACLES[row_dtype](rows))}


@pytest.mark.parametrize("row_dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_pooling_equals_pooling_of_the_rounded_rows_bit_for_bit(dim, row_dtype):
    rows = random_rows(row_dtype, dim)
    table = table_of(rows, row_dtype)
    rng = np.random.default_rng(3)
    row_ptrs = np.concatenate([[0], np.cumsum(rng.integers(0, 7, 80))])
    keys = rng.integers(0, 210, row_ptrs[-1])  # from 200 on absent
    gathered = np.where(keys[:, None] < 200, ORACLES[row_dtype](rows)[keys % 200], np.float32(0))

    for combiner, weights in product(("sum", "mean", "sqrtn"), (None, rng.standard_normal(keys.size, np.float32))):
        pooled, recomputed = np.empty((2, 80, dim), dtype=np.float32)
        found = table.fetch_pooled(keys, row_ptrs, pooled, combiner, weights)
        pool_rows(gathered, row_ptrs, recomputed, combiner, weights)

        assert np.array_equal(found, keys < 200)
        assert pooled.tobytes() == recomputed.tobytes()
        assert recomputed.tobytes() == pooled_by_numpy(gathered, row_ptrs, combiner, weights).tobytes()


def pooled_by_numpy(rows, row_ptrs, combiner, weights):
    """Bags summed row by row in float32."""
    out = np.zeros((len(row_ptrs) - 1, rows.shape[1]), dtype=np.float32)
    for bag, row in enumerate(out):
        total = squares = np.float32(0)
        for at in range(row_ptrs[bag], row_ptrs[bag + 1]):
            row += rows[at] if weights is None else rows[at] * weights[at]
            weight = np.float32(1) if weights is None else weights[at]
            total, squares = total + weight, squares + weight * weight
        if combiner == "mean":
            row[:] = row / total if total else 0
        if combiner == "sqrtn":
            row[:] = row / np.sqrt(squares) if squares else 0
    return out


@pytest.mark.parametrize("dim", [5, 32])
def test_weighted_sums_match_embedding_bag(dim):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    rows, weights = rng.standard_normal((100, dim), dtype=np.float32), rng.random(60, dtype=np.float32)
    keys, row_ptrs = rng.integers(0, 100, 60), np.arange(0, 61, 5)
    out = np.empty((12, dim), dtype=np.float32)

    table_of(rows, "fp32").fetch_pooled(keys, row_ptrs, out, "sum", weights)

    expected = torch.nn.functional.embedding_bag(
        torch.from_numpy(keys), torch.from_numpy(rows), torch.from_numpy(row_ptrs[:-1]), mode="sum",
        per_sample_weights=torch.from_numpy(weights),
    )  # fmt: skip
    assert np.allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [5, 32])
def test_sqrtn_divides_by_the_root_of_the_sum_of_the_squared_weights(dim):
    rows = np.full((8, dim), 8.0, dtype=np.float32)
    weights = np.array([3.0, 4.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], dtype=np.float32)
    row_ptrs = np.array([0, 2, 4, 8, 8])
    weighted, plain = np.full((2, 4, dim), np.nan, dtype=np.float32)

    pool_rows(rows, row_ptrs, weighted, "sqrtn", weights)
    pool_rows(rows, row_ptrs, plain, "sqrtn")

    assert weighted[:, 0] == pytest.approx([8.0 * 7 / 5, 0.0, 16.0, 0.0], rel=1e-6)
    assert plain[:, 0] == pytest.approx([16 / np.sqrt(2), 16 / np.sqrt(2), 16.0, 0.0], rel=1e-6)
    assert (weighted == weighted[:, :1]).all()
    assert (plain == plain[:, :1]).all()


@pytest.mark.parametrize("dim", [5, 32])
def test_a_weighted_mean_divides_by_the_sum_of_the_weights_and_is_zero_if_that_sum_is(dim):
    rows = np.full((4, dim), 8.0, dtype=np.float32)
    weights = np.array([3.0, 1.0, 2.0, -2.0], dtype=np.float32)
    rows[1] = 4.0
    out = np.full((3, dim), np.nan, dtype=np.float32)

    pool_rows(rows, np.array([0, 2, 4, 4]), out, "mean", weights)

    assert out[:, 0].tolist() == [7.0, 0.0, 0.0]
    assert (out == out[:, :1]).all()


@settings(deadline=None, max_examples=30)
@given(dim=st.integers(1, 200), row_dtype=st.sampled_from(ROW_DTYPES))
@example(dim=32, row_dtype="int8")
def test_memory_bytes_counts_the_rows_and_the_index(dim, row_dtype):
    bytes_per_row = {"fp32": 4 * dim, "fp16": 2 * dim, "bf16": 2 * dim, "int8": 4 + dim, "uint8": 8 + dim}[row_dtype]
    if row_dtype in ("int8", "uint8"):
        stride = -(-bytes_per_row // 4) * 4
    else:
        stride = -(-bytes_per_row // 32) * 32 if bytes_per_row > 64 else max(1 << (bytes_per_row - 1).bit_length(), 4)
    huge_page = 2 << 20
    index_bytes = (1_000_000 * 2 // 5 + 1) * 64

    size = HostTable.memory_bytes(dim, 1_000_000, row_dtype)

    assert 0 <= size - index_bytes - 1_200_001 * stride < 2 * huge_page


def test_a_table_reports_its_row_dtype_and_its_memory():
    table = HostTable(32, 100, "int8")

    assert table.row_dtype == "int8"
    assert HostTable(32, 100).row_dtype == "fp32"
    assert table.stats().memory_bytes == HostTable.memory_bytes(32, 100, "int8")


@pytest.mark.parametrize("row_dtype", ["float32", "", "INT8"])
def test_an_unknown_row_dtype_is_refused(row_dtype):
    rows = np.zeros((1, 4), np.float32)
    for call in (
        lambda: HostTable(4, 10, row_dtype),
        lambda: HostTable.memory_bytes(4, 10, row_dtype),
        lambda: round_rows(rows, row_dtype, rows),
        lambda: encode_rows(rows, row_dtype),
        lambda: decode_rows(np.zeros((1, 8), np.uint8), row_dtype, rows),
        lambda: row_bytes(4, row_dtype),
    ):
        with pytest.raises(ValueError, match=f"row_dtype: expected one of 'fp32', 'fp16', .*, got '{row_dtype}'"):
            call()


@pytest.mark.parametrize(("rows", "out", "error"), [
    (np.zeros((2, 3)), np.zeros((2, 3), np.float32), TypeError),
    (np.zeros((2, 3), np.float32), np.zeros((2, 3)), TypeError),
    (np.zeros(6, np.float32), np.zeros((2, 3), np.float32), ValueError),
    (np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), ValueError),
    (np.zeros((0, 65_537), np.float32), np.zeros((0, 65_537), np.float32), ValueError),
])  # fmt: skip
def test_rows_and_out_of_the_wrong_form_are_not_rounded(rows, out, error):
    with pytest.raises(error, match=r"^(rows|out): expected"):
        round_rows(rows, "int8", out)


def test_rows_may_be_rounded_in_place():
    rows = random_rows("int8", 24, n=1000)
    expected = ORACLES["int8"](rows)

    round_rows(rows, "int8", rows)

    assert rows.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("weights", "error", "message"), [
    (np.ones(3), TypeError, r"weights: expected float32\[N\], got float64\[3\]"),
    ([1.0, 1.0, 1.0], TypeError, r"weights: expected float32\[N\], got list"),
    (np.ones(2, np.float32), ValueError, r"weights: expected float32\[N\] of shape \[3\], got float32\[2\]"),
    (np.ones((3, 1), np.float32), ValueError, r"got float32\[3, 1\]"),
    (np.ones(6, np.float32)[::2], ValueError, "is not C-contiguous"),
])  # fmt: skip
def test_weights_that_are_not_one_float32_per_key_are_refused(weights, error, message):
    table, out = HostTable(4, 10), np.full((1, 4), 7, np.float32)
    with pytest.raises(error, match=message):
        table.fetch_pooled(np.arange(3), np.array([0, 3]), out, "sum", weights)
    with pytest.raises(error, match=message):
        pool_rows(np.zeros((3, 4), np.float32), np.array([0, 3]), out, "sum", weights)
    assert (out == 7).all()
