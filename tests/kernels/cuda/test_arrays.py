"""Array operations of a device: they match NumPy, and they refuse implicit work on the host."""

from pathlib import Path

import numpy as np
import pytest

SCALE = Path(__file__).parent / "scale.cu"


@pytest.fixture
def host():
    return np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def array(device, host):
    return device.xp.asarray(host)


@pytest.mark.parametrize(
    "compute",
    [
        lambda xp, x: x * 2 + 1 - x / 4,
        lambda xp, x: 1 - x,
        lambda xp, x: x @ x.T,
        lambda xp, x: -(x**2),
        lambda xp, x: xp.where(x > 5, x, xp.zeros_like(x)),
        lambda xp, x: xp.concatenate([x, x + 1], axis=1),
        lambda xp, x: x.sum(axis=0, keepdims=True),
        lambda xp, x: xp.exp(x - x.max(axis=1, keepdims=True)),
        lambda xp, x: x.reshape(2, 6)[:, ::2],
        lambda xp, x: x[xp.asarray([2, 0])],
        lambda xp, x: x[x > 3],
        lambda xp, x: x.astype(xp.float16).view(xp.uint16),
        lambda xp, x: xp.linalg.norm(x),
        lambda xp, x: x.sum(),
        lambda xp, x: xp.stack(xp.split(x, 2, axis=1)),
        lambda xp, x: (x == 4) | ~(x < 2),
    ],
)
def test_operations_match_numpy(device, array, host, compute):
    result = compute(device.xp, array)

    expected = np.asarray(compute(np, host))
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    np.testing.assert_allclose(device.to_host(result), expected, rtol=1e-6)


def test_in_place_operations_write_the_array_and_its_views(device, array, host):
    view = array[1]

    array += 1
    array[0] = array[2]
    array[:, 1] = 7
    view *= 2

    host = host + 1
    host[0] = host[2]
    host[:, 1] = 7
    host[1] *= 2
    np.testing.assert_array_equal(device.to_host(array), host)


def test_a_single_number_stays_on_the_device(device, array):
    total = array.sum()

    assert total.shape == ()
    assert device.to_host(total + array)[0, 0] == 66


def test_asarray_copies_from_the_host(device, host):
    array = device.xp.asarray(host)

    host[...] = 0

    assert device.to_host(array)[2, 3] == 11


def test_an_operation_runs_after_earlier_work_of_its_stream(device, array, host):
    stream = device.stream()
    device.kernel(SCALE, "scale")((1,), (12,), (array, array, np.int32(12), np.float32(3)), stream)

    with device.using(stream):
        doubled = array * 2
        result = device.to_host(doubled)

    np.testing.assert_array_equal(result, host * 6)


def test_an_operation_outside_using_runs_between_earlier_and_later_work_of_all_streams(device, array, host):
    scale, streams = device.kernel(SCALE, "scale"), [device.stream() for _ in range(3)]
    parts = [array[i] for i in range(3)]

    for stream, part in zip(streams, parts, strict=True):
        scale((1,), (4,), (part, part, np.int32(4), np.float32(3)), stream)
    doubled = array * 2
    out = device.empty(4, np.float32)
    scale((1,), (4,), (doubled[2], out, np.int32(4), np.float32(5)), streams[0])

    np.testing.assert_array_equal(device.to_host(doubled), host * 6)
    np.testing.assert_array_equal(device.to_host(out), host[2] * 30)


def test_using_ends_with_its_block(device, array):
    outer, inner = device.stream(), device.stream()

    with device.using(outer):
        with device.using(inner):
            pass
        device.kernel(SCALE, "scale")((1,), (12,), (array, array, np.int32(12), np.float32(0)), outer)
        assert not device.to_host(array).any()


@pytest.mark.parametrize(
    "mix",
    [
        lambda xp, x, host: x + host,
        lambda xp, x, host: xp.concatenate([x, host]),
        lambda xp, x, host: np.asarray(x),
        pytest.param(
            lambda xp, x, host: np.array(x),
            marks=pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # NumPy 2.5, of a GPU's array
        ),
        lambda xp, x, host: host.__iadd__(x),
    ],
    ids=["x + host", "xp of host", "np.asarray", "np.array", "host += x"],
)
def test_device_and_host_arrays_do_not_mix(device, array, host, mix):
    with pytest.raises(TypeError):
        mix(device.xp, array, host)


@pytest.mark.parametrize("convert", [bool, int, float, complex, [10, 20].__getitem__, list.__len__])
def test_on_the_runner_a_value_is_not_converted_implicitly(runner, convert):
    with pytest.raises(TypeError):
        convert(runner.xp.asarray(np.ones((), np.int32)))


@pytest.mark.parametrize("name", ["tolist", "item", "tobytes", "ctypes", "__array_interface__", "__dlpack__"])
def test_on_the_runner_only_the_device_copies_an_array_to_the_host(runner, name):
    with pytest.raises(AttributeError, match=name):
        getattr(runner.zeros(3, np.int32), name)


def test_new_memory_on_the_runner_is_not_zero(runner):
    assert (runner.to_host(runner.empty(5, np.uint8)) == 0xA5).all()


@pytest.mark.parametrize("shape", [0, (0, 3), 5, (2, 3), ()])
def test_memory_has_the_requested_shape_and_a_gpus_alignment(device, shape):
    for make in (device.empty, device.zeros):
        assert make(shape, np.float32).shape == np.empty(shape).shape
    assert not device.to_host(device.zeros(shape, np.int16)).any()
    assert device.pinned(shape, np.int64).shape == np.empty(shape).shape


def test_memory_is_reported_in_bytes(device):
    free, total = device.memory()

    assert 0 < free <= total
