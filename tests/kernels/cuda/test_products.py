"""Products of matrices on a device."""

import re

import numpy as np
import pytest

from kernels.errors import KernelError


@pytest.fixture
def stream(device):
    return device.stream()


SHAPES = [((3, 5), (5, 2)), ((1, 1), (1, 1)), ((4, 3, 5), (5, 2)), ((4, 3, 5), (4, 5, 2)), ((2, 3, 4, 5), (2, 3, 5, 6))]


@pytest.mark.parametrize(("x_shape", "y_shape"), SHAPES)
@pytest.mark.parametrize("turned", ["", "x", "y", "xy"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_products_match_numpy(device, stream, x_shape, y_shape, turned, dtype):
    rng = np.random.default_rng(3)
    x, y = (rng.integers(-8, 9, shape).astype(dtype) / 8 for shape in (x_shape, y_shape))
    with device.using(stream):
        on_device = [
            device.xp.asarray(np.ascontiguousarray(host.swapaxes(-1, -2))).swapaxes(-1, -2)
            if name in turned
            else device.xp.asarray(host)
            for name, host in zip("xy", (x, y), strict=True)
        ]
        product = device.to_host(device.product(*on_device, stream))

    assert product.dtype == np.float32
    assert np.array_equal(product, x.astype(np.float32) @ y.astype(np.float32))  # exact in any order


def test_products_of_halves_are_summed_in_float32(device, stream):
    with device.using(stream):
        x = device.xp.asarray(np.array([[60000, 60000, 2**-5]], np.float16))
        y = device.xp.asarray(np.ones((3, 1), np.float16))
        product = device.to_host(device.product(x, y, stream))

    assert product.tolist() == [[2 * float(np.float16(60000)) + 2**-5]]


def test_the_error_of_tf32_is_below_a_thousandth(device, stream):
    x, y = np.random.default_rng(0).random((2, 64, 64), np.float32)
    with device.using(stream):
        product = device.to_host(device.product(device.xp.asarray(x), device.xp.asarray(y), stream, is_tf32=True))

    np.testing.assert_allclose(product, x.astype(float) @ y, rtol=1e-3)


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 3, 2), (2, 3, 0), (2, 0, 3)])
def test_a_product_with_an_empty_dimension_is_zeros(device, stream, rows, depth, columns):
    x, y = device.empty((rows, depth), np.float32), device.empty((depth, columns), np.float32)
    with device.using(stream):
        product = device.to_host(device.product(x, y, stream))

    assert product.shape == (rows, columns)
    assert not product.any()


def test_a_captured_product_reads_its_factors_at_each_launch(device, stream):
    x, y = device.zeros((2, 2), np.float32), device.zeros((2, 2), np.float32)
    device.product(x, y, stream)

    graph = device.capture(stream, lambda: device.product(x, y, stream))
    for value in (2, 3):
        for factor in (x, y):
            device.upload(np.full((2, 2), value, np.float32), factor, stream)
        graph.launch(stream)
        with device.using(stream):
            assert device.to_host(graph.result).tolist() == [[2 * value * value] * 2] * 2


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        pytest.param(((2, 3), "f4"), ((2, 3), "f4"), "cannot multiply [2, 3] by [2, 3]", id="depth"),
        pytest.param(((3,), "f4"), ((3, 2), "f4"), "cannot multiply [3] by [3, 2]", id="a-vector"),
        pytest.param(((4, 2, 3), "f4"), ((5, 3, 2), "f4"), "cannot multiply [4, 2, 3] by [5, 3, 2]", id="batches"),
        pytest.param(((2, 3), "f4"), ((4, 3, 2), "f4"), "cannot multiply [2, 3] by [4, 3, 2]", id="one-by-many"),
        pytest.param(((2, 3), "f4"), ((3, 2), "f2"), "expected two factors of float32 or two of float16", id="mixed"),
        pytest.param(((2, 3), "f8"), ((3, 2), "f8"), "got float64 and float64", id="float64"),
    ],
)
def test_factors_that_do_not_fit_are_refused(device, stream, x, y, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        device.product(device.zeros(*x), device.zeros(*y), stream)


def test_host_arrays_and_streams_of_another_device_are_refused(device, runner):
    zeros = device.zeros((2, 2), np.float32)

    with pytest.raises(TypeError, match="expected an array of"):
        device.product(zeros, np.zeros((2, 2), np.float32), device.stream())
    with pytest.raises(KernelError, match="expected a stream of"):
        device.product(zeros, zeros, object())


def test_halves_are_rounded_to_nearest_and_values_that_overflow_become_nan(device, stream):
    bits = np.random.default_rng(1).integers(0, 2**32, 5000, dtype=np.uint32)
    edges = [65504, 65519.996, 65520, -65520, 0, -0.0, 2**-24, 2**-25, 3 * 2**-26, 2**-14, np.inf, np.nan, 1 + 2**-11]
    parts = [bits.view(np.float32), np.random.default_rng(2).normal(size=500).astype(np.float32), np.float32(edges)]
    values = np.concatenate(parts)
    given, halves = device.empty(values.shape, np.float32), device.empty(values.shape, np.float16)
    device.upload(values, given, stream)

    device.kernel("halves.cu", "round_to_half")((4,), (256,), (given, halves, np.int64(values.size)), stream)

    with device.using(stream):
        rounded = device.to_host(halves)
    with np.errstate(all="ignore"):
        expected = values.astype(np.float16)
    expected[~np.isfinite(expected)] = np.nan
    assert np.array_equal(rounded, expected, equal_nan=True)
    assert np.array_equal(np.signbit(rounded[np.isfinite(rounded)]), np.signbit(expected[np.isfinite(expected)]))
