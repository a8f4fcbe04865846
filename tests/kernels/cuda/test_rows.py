"""A device encodes rows like the host, bit for bit. fp8, which the host does not have, is compared with PyTorch."""

from pathlib import Path

import numpy as np
import pytest

from kernels.host import decode_rows, encode_rows, row_bytes

torch = pytest.importorskip("torch", reason="needs PyTorch, whose fp8 is the oracle")

SOURCE = Path(__file__).parent / "row_forms.cu"
HOST_FORMS = ["fp32", "fp16", "bf16", "int8", "uint8"]
FORMS = [*HOST_FORMS, "fp8"]
DIMS = [1, 7, 130]
LARGEST = float(np.finfo(np.float32).max)


def bytes_of(form, dim):
    return 4 + dim if form == "fp8" else row_bytes(dim, form)


def encoded_on(device, form, rows):
    """uint8[N, stride] and whether each row fits."""
    count, dim = rows.shape
    stride = -(-bytes_of(form, dim) // 16) * 16
    given, out, fits = (
        device.xp.asarray(rows),
        device.empty((count, stride), np.uint8),
        device.empty(count, np.uint8),
    )
    stream = device.stream()
    kernel = device.kernel(SOURCE, "encode", HOTROW_ROW=f"rows::{form}<{dim}>")
    kernel((-(-count // 32),), (256,), (given, out, fits, np.uint32(count)), stream)
    with device.using(stream):
        return device.to_host(out), device.to_host(fits).astype(bool)


def decoded_on(device, form, encoded, dim):
    count = len(encoded)
    given, out = device.xp.asarray(encoded), device.empty((count, dim), np.float32)
    stream = device.stream()
    kernel = device.kernel(SOURCE, "decode", HOTROW_ROW=f"rows::{form}<{dim}>")
    kernel((-(-count // 32),), (256,), (given, out, np.uint32(count)), stream)
    with device.using(stream):
        return device.to_host(out)


def random_rows(dim, count=300):
    """Rows of very different sizes, subnormals, zeros of both signs and equal values among them."""
    rng = np.random.default_rng(dim)
    sizes = np.float32(10.0) ** rng.integers(-42, 4, (count, 1)).astype(np.float32)
    rows = rng.standard_normal((count, dim), dtype=np.float32) * sizes
    rows[:3] = [[0.0], [-0.0], [5.0]]
    return rows


@pytest.mark.parametrize("form", HOST_FORMS)
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_encoded_and_decoded_as_on_the_host(device, dim, form):
    rows = random_rows(dim)
    expected = encode_rows(rows, form)
    expected_rows = np.empty_like(rows)
    decode_rows(expected, form, expected_rows)

    encoded, fits = encoded_on(device, form, rows)
    decoded = decoded_on(device, form, encoded, dim)

    assert fits.all()
    assert encoded[:, : expected.shape[1]].tobytes() == expected.tobytes()
    assert not encoded[:, expected.shape[1] :].any()  # zeros follow a row
    assert decoded.tobytes() == expected_rows.tobytes()


@pytest.mark.parametrize("dim", DIMS)
def test_fp8_rows_are_scaled_to_448_and_rounded_as_pytorch_rounds(device, dim):
    rows = random_rows(dim)
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(448)
    quotients = np.divide(rows, scales, out=np.copysign(0, rows), where=scales > 0).clip(-448, 448)
    codes = torch.from_numpy(quotients).to(torch.float8_e4m3fn)

    encoded, fits = encoded_on(device, "fp8", rows)
    decoded = decoded_on(device, "fp8", encoded, dim)

    assert fits.all()
    assert encoded[:, :4].tobytes() == scales.tobytes()
    assert (encoded[:, 4 : 4 + dim] == codes.view(torch.uint8).numpy()).all()
    assert decoded.tobytes() == (codes.float().numpy() * scales).tobytes()


def test_every_binary16_is_decoded(device):
    halves = np.arange(2**16, dtype=np.uint16).reshape(-1, 16)
    expected = halves.view(np.float16).astype(np.float32)

    decoded = decoded_on(device, "fp16", halves.view(np.uint8), 16)

    numbers = ~np.isnan(expected)
    assert (decoded.view(np.uint32) == expected.view(np.uint32))[numbers].all()
    assert np.isnan(decoded[~numbers]).all()


def test_ties_between_two_halves_go_to_the_even_half(device):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = ((halves[:-1] + halves[1:]) / 2).reshape(-1, 9)  # exact in float32

    encoded, fits = encoded_on(device, "fp16", middles)

    assert fits.all()
    assert encoded[:, :18].tobytes() == middles.astype(np.float16).tobytes()


@pytest.mark.parametrize(
    ("form", "value", "fits"),
    [
        ("fp32", np.nan, True),
        ("fp16", 65519.0, True),
        ("fp16", -65520.0, False),
        ("fp16", np.inf, True),
        ("fp16", np.nan, True),
        ("bf16", LARGEST, False),
        ("bf16", -np.inf, True),
        ("int8", 3e38, True),
        ("int8", np.nan, False),
        ("int8", np.inf, False),
        ("uint8", 1e38, True),
        ("uint8", LARGEST, True),
        ("uint8", np.nan, False),
        ("uint8", -np.inf, False),
        ("fp8", 3e38, True),
        ("fp8", np.nan, False),
        ("fp8", np.inf, False),
    ],
)
def test_a_row_fits_a_form_that_loses_none_of_its_values(device, form, value, fits):
    rows = np.full((40, 7), 0.5, dtype=np.float32)
    rows[17, 6] = value

    _, told = encoded_on(device, form, rows)

    assert told[17] == fits
    assert told[np.arange(40) != 17].all()


def test_a_uint8_row_whose_range_is_infinite_does_not_fit(device):
    rows = np.zeros((2, 7), dtype=np.float32)
    rows[1, :2] = LARGEST, -LARGEST

    _, fits = encoded_on(device, "uint8", rows)

    assert fits.tolist() == [True, False]


@pytest.mark.parametrize(("form", "step"), [("fp16", 2.0**-10), ("bf16", 2.0**-7)])
def test_ties_go_to_the_even_value(device, form, step):
    halfway = (1 + step * (np.arange(16, dtype=np.float32) + 0.5)).reshape(1, 16)

    encoded, _ = encoded_on(device, form, halfway)

    assert (encoded.view(np.uint16) % 2 == 0).all()
    assert encoded.tobytes() == encode_rows(halfway, form).tobytes()


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_a_decoded_row_is_encoded_to_the_same_bytes(device, form):
    rows = random_rows(16)
    once = decoded_on(device, form, encoded_on(device, form, rows)[0], 16)

    twice = decoded_on(device, form, encoded_on(device, form, once)[0], 16)

    assert twice.tobytes() == once.tobytes()
