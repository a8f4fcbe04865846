"""Array operations of a device: NumPy's results, and a refusal wherever the host would take part unseen."""

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
def test_operations_give_what_numpy_gives(device, array, host, compute):
    result = compute(device.xp, array)

    expected = np.asarray(compute(np, host))
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    np.testing.assert_allclose(device.to_host(result), expected, rtol=1e-6)


def test_operations_in_place_write_the_array_and_its_views(device, array, host):
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


def test_a_result_is_on_the_device_even_where_it_is_one_number(device, array):
    total = array.sum()

    assert total.shape == ()
    assert device.to_host(total + array)[0, 0] == 66


def test_asarray_copies_from_the_host(device, host):
    array = device.xp.asarray(host)

    host[...] = 0

    assert device.to_host(array)[2, 3] == 11


def test_an_operation_comes_after_what_its_stream_has_queued(device, array, host):
    stream = device.stream()
    device.kernel(SCALE, "scale")((1,), (12,), (array, array, np.int32(12), np.float32(3)), stream)

    with device.using(stream):
        doubled = array * 2
        result = device.to_host(doubled)

    np.testing.assert_array_equal(result, host * 6)


def test_an_operation_outside_using_comes_after_all_streams_and_before_what_they_are_given_next(device, array, host):
    scale, streams = device.kernel(SCALE, "scale"), [device.stream() for _ in range(3)]
    parts = [array[i] for i in range(3)]

    for stream, part in zip(streams, parts, strict=True):
        scale((1,), (4,), (part, part, np.int32(4), np.float32(3)), stream)
    doubled = array * 2
    out = device.empty(4, np.float32)
    scale((1,), (4,), (doubled[2], out, np.int32(4), np.float32(5)), streams[0])

    np.testing.assert_array_equal(device.to_host(doubled), host * 6)
    np.testing.assert_array_equal(device.to_host(out), host[2] * 30)


def test_using_a_stream_ends_with_its_block(device, array):
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
        lambda xp, x, host: np.array(x),
        lambda xp, x, host: host.__iadd__(x),
    ],
    ids=["x + host", "xp of host", "np.asarray", "np.array", "host += x"],
)
def test_device_and_host_arrays_do_not_mix(device, array, host, mix):
    with pytest.raises(TypeError):
        mix(device.xp, array, host)


@pytest.mark.parametrize("convert", [bool, int, float, complex, [10, 20].__getitem__, list.__len__])
def test_on_the_runner_a_value_does_not_reach_the_host_unseen(runner, convert):
    with pytest.raises(TypeError):
        convert(runner.xp.asarray(np.ones((), np.int32)))


@pytest.mark.parametrize("name", ["tolist", "item", "tobytes", "ctypes", "__array_interface__", "__dlpack__"])
def test_on_the_runner_an_array_has_no_way_to_the_host_but_the_devices(runner, name):
    with pytest.raises(AttributeError, match=name):
        getattr(runner.zeros(3, np.int32), name)


def test_new_memory_on_the_runner_is_nobodys_zero(runner):
    assert (runner.to_host(runner.empty(5, np.uint8)) == 0xA5).all()


@pytest.mark.parametrize("shape", [0, (0, 3), 5, (2, 3), ()])
def test_memory_has_the_shape_asked_for_and_is_aligned_for_a_gpu(device, shape):
    for make in (device.empty, device.zeros):
        assert make(shape, np.float32).shape == np.empty(shape).shape
    assert not device.to_host(device.zeros(shape, np.int16)).any()
    assert device.pinned(shape, np.int64).shape == np.empty(shape).shape


def test_memory_is_told_in_bytes(device):
    free, total = device.memory()

    assert 0 < free <= total
