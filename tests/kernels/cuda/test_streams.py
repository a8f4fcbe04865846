"""A stream runs its work in order and in parallel with the host; only events order different streams."""

import gc
from pathlib import Path

import numpy as np
import pytest

from kernels.device import open_device
from kernels.errors import KernelError

SOURCE = Path(__file__).parent / "flags.cu"


@pytest.fixture
def affine(device):
    return device.kernel(SOURCE, "affine")


@pytest.fixture
def gate(device):
    """``close(stream)`` blocks later work of a stream until ``open()``."""

    class Gate:
        def __init__(self):
            self.flag = device.pinned(1, np.int32)

        def close(self, stream):
            device.kernel(SOURCE, "await_flag")((1,), (1,), (device.device_view(self.flag),), stream)

        def open(self):
            self.flag[0] = 1

    gate = Gate()
    yield gate
    gate.open()


def test_a_launch_returns_before_the_kernel_has_run(device, gate):
    stream = device.stream()

    gate.close(stream)
    event = stream.record()

    assert not event.is_done()
    gate.open()
    event.synchronize()
    assert event.is_done()


def test_a_stream_runs_its_work_in_order(device, affine):
    stream, out = device.stream(), device.zeros(1, np.int32)

    for factor, term in ((1, 5), (3, 1), (2, -2)):
        affine((1,), (1,), (out, np.int32(factor), np.int32(term)), stream)
    stream.synchronize()

    assert device.to_host(out)[0] == ((0 * 1 + 5) * 3 + 1) * 2 - 2


def test_a_stream_does_not_wait_for_another(device, affine, gate):
    held, free = device.stream(), device.stream()
    out = device.zeros(1, np.int32)

    gate.close(held)
    affine((1,), (1,), (out, np.int32(1), np.int32(1)), free)
    with device.using(free):
        assert device.to_host(out)[0] == 1

    assert not held.record().is_done()


def test_a_stream_that_waits_for_an_event_runs_after_it(device, affine, gate):
    first, second = device.stream(), device.stream()
    out = device.zeros(1, np.int32)

    gate.close(first)
    affine((1,), (1,), (out, np.int32(1), np.int32(3)), first)
    second.wait(first.record())
    affine((1,), (1,), (out, np.int32(10), np.int32(0)), second)
    done = second.record()

    assert not done.is_done()
    gate.open()
    done.synchronize()
    assert device.to_host(out)[0] == 30


def test_an_event_covers_only_the_work_before_it(device, gate):
    stream = device.stream()

    event = stream.record()
    gate.close(stream)

    event.synchronize()


def test_an_upload_reads_pinned_memory_when_the_copy_runs(device, affine, gate):
    stream = device.stream()
    pinned, result, array = device.pinned(3, np.int32), device.pinned(3, np.int32), device.zeros(3, np.int32)

    gate.close(stream)
    device.upload(pinned, array, stream)
    affine((3,), (1,), (array, np.int32(2), np.int32(0)), stream)
    device.download(array, result, stream)
    pinned[:] = [1, 2, 3]
    gate.open()
    stream.synchronize()

    assert result.tolist() == [2, 4, 6]


def test_a_host_array_that_is_not_pinned_is_copied_before_the_upload_returns(device, gate):
    stream, array = device.stream(), device.zeros(3, np.int32)
    host = np.array([1, 2, 3], dtype=np.int32)

    gate.close(stream)
    device.upload(host, array, stream)
    host[:] = 0
    gate.open()
    stream.synchronize()

    assert device.to_host(array).tolist() == [1, 2, 3]


def test_kernels_write_pinned_memory_where_the_host_reads_it(device, affine):
    stream, pinned = device.stream(), device.pinned((2, 2), np.int32)
    pinned[...] = [[1, 2], [3, 4]]

    affine((4,), (1,), (device.device_view(pinned), np.int32(10), np.int32(1)), stream)
    stream.synchronize()

    assert pinned.tolist() == [[11, 21], [31, 41]]


def test_arrays_live_until_the_work_that_uses_them_has_run(device, affine, gate):
    stream, result = device.stream(), device.pinned(1000, np.int32)

    gate.close(stream)
    array = device.zeros(1000, np.int32)
    affine((1000,), (1,), (array, np.int32(0), np.int32(7)), stream)
    device.download(array, result, stream)
    del array
    others = [device.zeros(1000, np.int32) for _ in range(20)]
    gate.open()
    stream.synchronize()

    assert (result == 7).all()
    assert not any(device.to_host(other).any() for other in others)


def test_work_of_a_dropped_stream_continues_with_its_arrays(device, affine, gate):
    stream, result = device.stream(), device.pinned(1000, np.int32)

    gate.close(stream)
    array = device.zeros(1000, np.int32)
    affine((1000,), (1,), (array, np.int32(0), np.int32(7)), stream)
    device.download(array, result, stream)
    done = stream.record()
    del array, stream
    others = [device.zeros(1000, np.int32) for _ in range(20)]
    gate.open()
    done.synchronize()

    assert (result == 7).all()
    assert not any(device.to_host(other).any() for other in others)


def test_work_of_a_stream_that_the_garbage_collector_takes_keeps_its_memory(device, affine, gate):
    class Owner:
        """Part of a reference cycle."""

    owner, result = Owner(), device.pinned(1000, np.int32)
    owner.itself, owner.stream = owner, device.stream()

    gate.close(owner.stream)
    for _ in range(40):  # more than are kept until one event
        owner.array = device.empty(1000, np.int32)
        device.upload(np.full(1000, 7, np.int32), owner.array, owner.stream)
    device.download(owner.array, result, owner.stream)
    done = owner.stream.record()
    del owner
    gc.collect()
    other = device.stream()
    for _ in range(80):
        device.upload(np.zeros(1000, np.int32), device.empty(1000, np.int32), other)
    assert not done.is_done()
    gate.open()
    done.synchronize()

    assert (result == 7).all()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4,), np.int32), ((3,), np.int64), ((3, 1), np.int32)], ids=["size", "dtype", "dimensions"]
)
def test_copies_between_different_forms_are_refused(device, shape, dtype):
    stream, array = device.stream(), device.zeros(3, np.int32)
    pinned = device.pinned(shape, dtype)

    with pytest.raises(ValueError, match="cannot copy between"):
        device.upload(pinned, array, stream)
    with pytest.raises(ValueError, match="cannot copy between"):
        device.download(array, pinned, stream)


def test_copies_of_strided_arrays_are_refused(device):
    stream, array = device.stream(), device.zeros((4, 2), np.int32)

    with pytest.raises(ValueError, match="C-contiguous"):
        device.upload(np.zeros((2, 4), np.int32).T, array, stream)
    with device.using(stream), pytest.raises(ValueError, match="C-contiguous"):
        device.download(array[:, 0], device.pinned(4, np.int32), stream)


def test_a_download_to_memory_that_is_not_pinned_is_refused(device):
    with pytest.raises(ValueError, match=r"a download needs an array from Device\.pinned"):
        device.download(device.zeros(3, np.int32), np.zeros(3, np.int32), device.stream())


def test_a_device_view_of_memory_that_is_not_pinned_is_refused(device):
    with pytest.raises(ValueError, match=r"C-contiguous array from Device\.pinned"):
        device.device_view(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=r"C-contiguous array from Device\.pinned"):
        device.device_view(device.pinned((3, 2), np.int32)[:, 0])


def test_arrays_and_streams_of_another_device_are_refused(runner):
    other = open_device("runner:1")
    array, stream = runner.zeros(1, np.int32), runner.stream()
    affine = runner.kernel(SOURCE, "affine")
    numbers = np.int32(1), np.int32(1)

    with pytest.raises(KernelError, match=r"affine: argument 0, 'out': expected an array of runner, not"):
        affine((1,), (1,), (other.zeros(1, np.int32), *numbers), stream)
    with pytest.raises(KernelError, match="expected a stream of runner, not"):
        affine((1,), (1,), (array, *numbers), other.stream())
    with pytest.raises(TypeError, match="expected an array of runner:1, not"):
        other.to_host(array)
    with pytest.raises(TypeError, match="expected an array of runner:1, not"):
        other.upload(np.zeros(1, np.int32), array, other.stream())
