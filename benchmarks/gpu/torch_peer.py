"""PyTorch on the same GPU: ``embedding`` and ``embedding_bag`` with known row numbers."""

import time

import numpy as np

PAUSE_CYCLES = 400_000  # the same pause as in ``on_stream``


class TorchPeer:
    """PyTorch's answers and their times.

    Args:
        device: the device of the arrays.
        where: PyTorch's name of the same device.
    """

    def __init__(self, device, where):
        import torch

        self._torch, self._device, self._where = torch, device, where

    def tensor(self, array):
        """A device array as a tensor, on a GPU without a copy."""
        if self._where == "cpu":
            return self._torch.from_numpy(self._device.to_host(array))
        return self._torch.from_dlpack(array)

    def embedding(self, weights, indices):
        """float32[N, D]: a row for each index."""
        return self._torch.nn.functional.embedding(indices, weights)

    def embedding_bag(self, weights, indices, offsets):
        """float32[B, D]: the sums of bags; ``offsets`` ends with the number of indices, as ``row_ptrs`` do."""
        return self._torch.nn.functional.embedding_bag(indices, weights, offsets, mode="sum", include_last_offset=True)

    def host(self, tensor):
        """A result as a NumPy array."""
        return tensor.detach().cpu().numpy()

    def indices(self, array):
        """int64[N] from the host on the device of the weights."""
        return self._torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self._where)

    def contender(self, work, calls):
        """A function that runs ``work``, which is ``calls`` calls, and returns the microseconds of one call."""
        if self._where == "cpu":
            return lambda: _host_us(work) / calls
        torch = self._torch
        work()
        torch.cuda.synchronize()
        graph, start, stop = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.graph(graph):
            work()

        def run_us():
            torch.cuda._sleep(PAUSE_CYCLES)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            return 1000.0 * start.elapsed_time(stop) / calls

        return run_us


def open_peer(device):
    """Return PyTorch on that GPU, or None and the reason."""
    if not device.name.startswith("cuda:"):
        return None, f"absent: {device.name} is no GPU"
    try:
        import torch
    except ImportError as err:
        return None, f"absent: {err}"
    if not torch.cuda.is_available():
        return None, "absent: this PyTorch has no CUDA"
    torch.cuda.set_device(int(device.name.partition(":")[2]))
    return TorchPeer(device, device.name), "in the same run"


def _host_us(work):
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e6
