"""Exact float operations and bit operations, against NumPy and Python's integers."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

SOURCE = Path(__file__).parent / "arithmetic.cu"

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(min_value=2.0**-40, max_value=2.0**40, width=32)
word = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def compute(device):
    """Run a kernel on columns of the same length and return ``rows`` of results."""

    def compute(kernel, rows, *columns):
        stream, n = device.stream(), len(columns[0])
        given = [device.empty(n, column.dtype) for column in columns]
        for column, array in zip(columns, given, strict=True):
            device.upload(column, array, stream)
        out = device.zeros((rows, n), columns[0].dtype)
        device.kernel(SOURCE, kernel)((n,), (1,), (*given, out), stream)
        stream.synchronize()
        return device.to_host(out)

    return compute


def rounded(value):
    """Return the float32 nearest to an exact number, ties to even; computed with integers, not with float64."""
    if value == 0:
        return np.float32(0)
    exponent = max(value.numerator.bit_length() - value.denominator.bit_length() - 25, -149)
    scaled = value / Fraction(2) ** exponent
    while abs(scaled) >= 2**24:
        exponent, scaled = exponent + 1, scaled / 2
    return np.float32(np.ldexp(float(round(scaled)), exponent))


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.tuples(floats, floats), min_size=1, max_size=20))
@example(values=[(1e-40, 1e-5), (3.4e38, 3.4e38), (1.0, 3.0)])
def test_each_operation_is_rounded_once_as_in_ieee_754(compute, values):
    a, b = np.array(values, np.float32).T.copy()
    with np.errstate(all="ignore"):
        expected = np.stack([a + b, a - b, a * b, a / b, np.sqrt(np.abs(a))])

    out = compute("floats", 6, a, b, b)[[0, 1, 2, 3, 5]]

    np.testing.assert_array_equal(out, expected)


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.tuples(ordinary, ordinary, ordinary), min_size=1, max_size=10))
def test_a_fused_operation_is_rounded_only_once_and_other_operations_are_never_fused(compute, values):
    a, b, c = np.array(values, np.float32).T.copy()

    fused = compute("floats", 6, a, b, -c)[4]
    apart = compute("not_fused", 1, a, b, -c)[0]

    exact = [
        rounded(Fraction(float(x)) * Fraction(float(y)) - Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(fused, np.array(exact, np.float32))
    np.testing.assert_array_equal(apart, a * b - c)


@settings(deadline=None, max_examples=50)
@given(values=st.lists(word, min_size=1, max_size=20))
@example(values=[0, 1, 2**31, 2**32 - 1])
def test_bit_operations_match_pythons_integers(compute, values):
    expected = [
        [
            x.bit_count(),
            (x & -x).bit_length(),
            32 - x.bit_length(),
            x * y >> 32,
            ((x << 32 | y) * 0x123456789ABCDEF >> 64) & 0xFFFFFFFF,
            x,
            int(f"{x:032b}"[::-1], 2),
        ]
        for x, y in zip(values, reversed(values), strict=True)
    ]

    words = compute("bit_tricks", 7, np.array(values, np.uint32))

    assert words.T.tolist() == expected
