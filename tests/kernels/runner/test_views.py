"""A view is made on the host: it waits for nothing, on the runner as on a GPU."""

import threading

import numpy as np
import pytest

from kernels.device import open_device


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[1:],
        lambda array: array[1, None, ...],
        lambda array: array[1, 2],
        lambda array: array.reshape(-1),
        lambda array: array.view(np.int32),
        lambda array: array.T,
        lambda array: array.mT if hasattr(array, "mT") else array.T,  # NumPy 1.26, the oracle, has no mT
        lambda array: array.swapaxes(0, 1),
    ],
)
def test_a_view_waits_for_no_work_and_shows_its_results(view):
    device = open_device("runner")
    stream, may_run = device.stream(), threading.Event()
    array = device.zeros((3, 4), np.float32)
    stream.submit(lambda: may_run.wait(60) and None)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    device.upload(rows, array, stream)
    views = []
    viewing = threading.Thread(target=lambda: views.append(view(array)))

    viewing.start()
    viewing.join(30)
    was_made = bool(views)
    may_run.set()
    viewing.join()
    stream.synchronize()

    assert was_made
    assert np.array_equal(device.to_host(views[0]), view(rows))
