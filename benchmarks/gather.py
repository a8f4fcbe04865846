"""The limit of a table lookup: a C loop that copies rows with known numbers, with prefetch (host_gather.c)."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

HUGE_PAGE_BYTES = 2 << 20


def compile_gather():
    """The loops ``gather_<level>_<dim>``, as a library."""
    folder = tempfile.mkdtemp(prefix="host_gather")
    library = Path(folder) / "host_gather.so"
    source = Path(__file__).with_name("host_gather.c")
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def gather(library, level, rows, numbers, out):
    """Copy ``rows[numbers]`` to ``out``, float32[N, D], with prefetch into the cache ``level``."""
    function = getattr(library, f"gather_{level}_{rows.shape[1]}")
    addresses = (ctypes.c_void_p(array.ctypes.data) for array in (rows, numbers))
    function(*addresses, ctypes.c_int64(numbers.size), ctypes.c_void_p(out.ctypes.data))


def aligned(rows, dim):
    """float32[rows, dim] on a huge-page border, so that no row of the peer straddles cache lines."""
    memory = np.empty(rows * dim + HUGE_PAGE_BYTES // 4, dtype=np.float32)
    start = -memory.ctypes.data % HUGE_PAGE_BYTES // 4
    return memory[start : start + rows * dim].reshape(rows, dim)
