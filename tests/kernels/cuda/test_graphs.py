"""Captured work: nothing runs during the capture, and each launch runs all of it on the arrays' current content."""

from pathlib import Path

import numpy as np
import pytest

from kernels.device import open_device
from kernels.errors import KernelError

AFFINE = Path(__file__).parent / "flags.cu"


@pytest.fixture
def stream(device):
    return device.stream()


@pytest.fixture
def affine(device):
    return device.kernel(AFFINE, "affine")


def test_nothing_runs_during_a_capture(device, stream, affine):
    out = device.zeros(1, np.int32)

    device.capture(stream, lambda: affine((1,), (1,), (out, np.int32(1), np.int32(1)), stream))
    stream.synchronize()

    assert device.to_host(out)[0] == 0


def test_each_launch_runs_copies_and_kernels_in_order(device, stream, affine):
    given, result, array = device.pinned(2, np.int32), device.pinned(2, np.int32), device.zeros(2, np.int32)

    def work():
        device.upload(given, array, stream)
        affine((2,), (1,), (array, np.int32(10), np.int32(1)), stream)
        device.download(array, result, stream)

    graph = device.capture(stream, work)
    for content in ([1, 2], [3, 4]):
        given[:] = content
        graph.launch(stream)
        stream.synchronize()
        assert result.tolist() == [10 * content[0] + 1, 10 * content[1] + 1]


def test_each_launch_repeats_array_operations_into_the_same_arrays(device, stream):
    x, total = device.zeros((2, 2), np.float32), device.zeros(2, np.float32)
    xp = device.xp

    def work():
        nonlocal total
        y = xp.maximum(x * x - 1, 0)
        total += y.sum(axis=1)
        return y, y[0] * 2

    graph = device.capture(stream, work)
    y, doubled = graph.result
    for content in (np.eye(2) * 2, np.eye(2) * 3):
        device.upload(content.astype(np.float32), x, stream)
        graph.launch(stream)
    with device.using(stream):
        results = [device.to_host(array).tolist() for array in (y, doubled, total)]

    assert results == [[[8, 0], [0, 8]], [16, 0], [3 + 8, 3 + 8]]


def test_a_graphs_zeros_are_zero_at_each_launch(device, stream, affine):
    result = device.pinned(1, np.int32)

    def work():
        count = device.zeros(1, np.int32)
        affine((1,), (1,), (count, np.int32(1), np.int32(5)), stream)
        device.download(count, result, stream)

    graph = device.capture(stream, work)
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()

    assert result[0] == 5


def test_a_graph_runs_on_the_stream_that_launches_it(device, stream, affine):
    out, other = device.zeros(1, np.int32), device.stream()

    graph = device.capture(stream, lambda: affine((1,), (1,), (out, np.int32(1), np.int32(1)), stream))
    graph.launch(other)
    other.synchronize()

    assert device.to_host(out)[0] == 1


def test_a_graph_keeps_its_arrays_alive(device, stream, affine):
    result = device.pinned(100, np.int32)

    def work():
        scratch = device.zeros(100, np.int32)
        affine((100,), (1,), (scratch, np.int32(0), np.int32(7)), stream)
        device.download(scratch, result, stream)

    graph = device.capture(stream, work)
    others = [device.zeros(100, np.int32) for _ in range(20)]
    graph.launch(stream)
    stream.synchronize()

    assert (result == 7).all()
    assert not any(device.to_host(other).any() for other in others)


def test_a_failed_capture_leaves_the_stream_usable(device, stream, affine):
    out = device.zeros(1, np.int32)

    def fails():
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        device.capture(stream, fails)
    affine((1,), (1,), (out, np.int32(1), np.int32(1)), stream)
    stream.synchronize()

    assert device.to_host(out)[0] == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda device, stream: stream.synchronize(),
        lambda device, stream: device.to_host(device.zeros(1, np.int32)),
        lambda device, stream: device.capture(stream, lambda: None),
    ],
    ids=["synchronize", "to_host", "capture"],
)
def test_the_host_cannot_wait_during_a_capture(device, stream, use):
    with pytest.raises(KernelError):
        device.capture(stream, lambda: use(device, stream))


def test_a_graph_belongs_to_one_device(runner):
    graph = runner.capture(runner.stream(), lambda: None)

    with pytest.raises(KernelError, match="a graph of runner cannot be launched on"):
        graph.launch(open_device("runner:1").stream())


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        pytest.param(lambda xp, x: x @ x, "multiply matrices by cuBLAS", id="matmul-operator"),
        pytest.param(lambda xp, x: xp.matmul(x, x), "multiply matrices by cuBLAS", id="matmul"),
        pytest.param(lambda xp, x: x.dot(x), "multiply matrices by cuBLAS", id="dot"),
        pytest.param(lambda xp, x: xp.asarray(np.ones(2)), "copy a host array", id="host-array"),
        pytest.param(lambda xp, x: xp.concatenate([x] * 9), "join more than 8 arrays", id="nine-arrays"),
    ],
)
def test_the_runner_refuses_to_capture_what_cupy_cannot(runner, work, reason):
    x = runner.zeros((2, 2), np.float32)

    with pytest.raises(KernelError, match=f"a captured graph cannot {reason}"):
        runner.capture(runner.stream(), lambda: work(runner.xp, x))
    with runner.using(runner.stream()):
        work(runner.xp, x)
