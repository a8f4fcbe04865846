"""Checks of the arrays of a copy or a product on every device, before anything is queued."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.device import Array


def require_same_form(host: npt.NDArray[Any], array: Array) -> None:
    """Check the two sides of a copy.

    Raises:
        ValueError: shape or dtype differ, or one is not C-contiguous.
    """
    if host.shape != array.shape or host.dtype != array.dtype:
        raise ValueError(f"cannot copy between {host.dtype}{list(host.shape)} and {array.dtype}{list(array.shape)}")
    if not (host.flags.c_contiguous and array.flags.c_contiguous):
        raise ValueError("both sides of a copy must be C-contiguous")


def require_factors(x: Array, y: Array) -> tuple[int, ...]:
    """Check the factors of a product, and return its shape; see ``Device.product``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if x.dtype != y.dtype or x.dtype not in (np.float32, np.float16):
        raise ValueError(f"expected two factors of float32 or two of float16, got {x.dtype} and {y.dtype}")
    fits = x.ndim >= 2 and y.ndim >= 2 and x.shape[-1] == y.shape[-2] and y.shape[:-2] in ((), x.shape[:-2])
    if not fits:
        raise ValueError(
            f"cannot multiply {list(x.shape)} by {list(y.shape)}: expected [..., M, K] by [..., K, N] or [K, N]"
        )
    return (*x.shape[:-1], y.shape[-1])


def pinned_address(host: npt.NDArray[Any], block_type: type) -> int | None:
    """Return the address of a host array in a pinned block of that type, or None if it is elsewhere."""
    owner: Any = host
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return int(host.__array_interface__["data"][0]) if isinstance(owner, block_type) else None
