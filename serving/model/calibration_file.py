"""The file in a version's folder on which the engine int8 is measured: one request, by the names it has on the wire."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CALIBRATION_FILE = "calibration.npz"


def write_calibration(
    path: Path, dense: NDArray[np.float32], keys: NDArray[np.int64], row_ptrs: NDArray[np.int64]
) -> None:
    """Write the samples of a request.

    Args:
        path: the file.
        dense: float32[B, F].
        keys: int64[N]; see ``serving.batch.read_batch`` for the order.
        row_ptrs: int64[R], CSR offsets.

    Raises:
        OSError: the disk refuses.
    """
    np.savez(path, DES=dense, CATCOLUMN=keys, ROWINDEX=row_ptrs)
