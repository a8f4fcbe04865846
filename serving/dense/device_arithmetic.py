"""The layers' primitives on a device: products in a chosen precision, constants uploaded once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kernels.device import Array, Device, Stream

Precision = Literal["fp32", "tf32", "fp16"]

FIRST_INFINITE_HALF = 65520.0
"""The smallest magnitude that float16 rounds to infinity."""

_BLOCK_THREADS = 256
_MOST_BLOCKS = 1 << 14  # with more values, each block takes several


def check_precision(precision: str) -> None:
    """Raise ValueError if there is no such precision."""
    if precision not in get_args(Precision):
        raise ValueError(f"expected precision fp32, tf32 or fp16, got {precision!r}")


class DeviceArithmetic:
    """Arithmetic that all runs of one network share; after a first run of the network, any thread may use it.

    Sums are float32 in every precision. ``fp16`` rounds both factors of each product to float16. A factor of 65520 or
    more becomes NaN, so the answer becomes NaN and not a probability computed from infinities.
    """

    def __init__(self, device: Device, precision: Precision, weights: Sequence[Array]) -> None:
        """Compute on ``device``; keep rounded copies of ``weights``, which are arrays there."""
        self._device = device
        self._precision = precision
        self._weights = {id(weight): weight for weight in weights}
        self._halves: dict[int, Array] = {}  # rounded copies by the id of the weight
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Array] = {}
        self._round = device.kernel("halves.cu", "round_to_half")

    def on(self, stream: Stream) -> "StreamArithmetic":
        """Return the ``Arithmetic`` for work of one stream."""
        return StreamArithmetic(self, stream)

    def constant(self, values: NDArray[Any], stream: Stream) -> Array:
        """See ``Arithmetic.constant``; the same values always give the same array, complete for every stream."""
        key = values.dtype.str, values.shape, values.tobytes()
        found = self._constants.get(key)
        if found is None:
            array = self._device.empty(values.shape, values.dtype)
            # Uploaded on the stream that allocated it: earlier work of this stream may still write the memory.
            self._device.upload(np.ascontiguousarray(values).reshape(values.shape), array, stream)
            stream.synchronize()
            found = self._constants.setdefault(key, array)
        return found

    def product(self, x: Array, y: Array, stream: Stream) -> Array:
        """See ``Arithmetic.product``."""
        if self._precision == "fp16":
            x, y = self._half(x, stream), self._half(y, stream)
        return self._device.product(x, y, stream, is_tf32=self._precision == "tf32")

    def concat(self, arrays: Sequence[Array], axis: int) -> Array:
        """See ``Arithmetic.concat``.

        This does not use CuPy's ``concatenate``. For more than eight arrays it uploads their addresses, and a captured
        graph would read them again from host memory that has been reused by then.
        """
        first = arrays[0]
        sizes = [array.shape[axis] for array in arrays]
        joined = self._device.empty((*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :]), first.dtype)
        begin = 0
        for array, size in zip(arrays, sizes, strict=True):
            joined[(*[slice(None)] * axis, slice(begin, begin + size))] = array
            begin += size
        return joined

    def rounded_weights(self) -> list[Array]:
        """Return the weights that have rounded copies: the weights that were a factor so far."""
        return [self._weights[name] for name in self._halves]

    def _half(self, x: Array, stream: Stream) -> Array:
        if id(x) in self._halves:
            return self._halves[id(x)]
        halves = self._device.empty(x.shape, np.float16)
        if x.size:
            blocks = min(-(-x.size // _BLOCK_THREADS), _MOST_BLOCKS)
            values = self._device.xp.ascontiguousarray(x)
            self._round((blocks,), (_BLOCK_THREADS,), (values, halves, np.int64(x.size)), stream)
        if id(x) in self._weights:
            self._halves[id(x)] = halves
        return halves


@dataclass(frozen=True, slots=True)
class StreamArithmetic:
    """A ``DeviceArithmetic`` for work of one stream; see ``primitives.Arithmetic``."""

    shared: DeviceArithmetic
    stream: Stream

    def product(self, x: Array, y: Array) -> Array:
        """See ``Arithmetic.product``."""
        return self.shared.product(x, y, self.stream)

    def constant(self, values: NDArray[Any]) -> Array:
        """See ``Arithmetic.constant``."""
        return self.shared.constant(values, self.stream)

    def concat(self, arrays: Sequence[Array], axis: int) -> Array:
        """See ``Arithmetic.concat``."""
        return self.shared.concat(arrays, axis)
