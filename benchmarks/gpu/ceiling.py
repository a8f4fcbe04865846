"""The two ceilings: how fast memory is copied, and how fast rows are gathered whose slots are known."""

import numpy as np

from benchmarks.gpu.keys import WrongAnswerError
from benchmarks.gpu.records import Record
from benchmarks.gpu.rounds import SOURCE, as_graph, take_turns

_ODD = np.uint32(2654435761)
_THREADS, _UNDER_WAY = 256, 4


def copy_bandwidth(device, size_bytes, rounds):
    """Copy some memory, by a kernel and by an array operation. The faster rate is the limit of all others.

    Returns:
        records of both; the faster one is the last.
    """
    stream = device.stream()
    source = device.xp.arange(size_bytes // 4, dtype=np.uint32)
    target, copied = device.zeros(size_bytes // 4, np.uint32), device.zeros(size_bytes // 4, np.uint32)
    kernel = device.kernel(SOURCE, "copy_units", ROW_UNITS=1, OUT_UNITS=1)
    units = size_bytes // 16

    def by_kernel():
        grid = (-(-units // (_THREADS * _UNDER_WAY)),)
        kernel(grid, (_THREADS,), (source, np.uint64(units), target), stream)

    def by_array():
        with device.using(stream):
            copied[...] = source

    times = take_turns([as_graph(device, stream, copy, 1) for copy in (by_kernel, by_array)], rounds)
    if int(device.to_host((source != target).sum() + (source != copied).sum())):
        raise WrongAnswerError("copy: a copy differs")
    records = [
        Record.of(name, [(us[place],) for us in times], "none: it is the limit of the others", batch=size_bytes)
        for place, name in enumerate(("copy_kernel", "copy_array"))
    ]
    for record in records:
        record.details.update(bytes=2 * size_bytes, gb_per_s=2 * size_bytes / record.median_us / 1e3)
    return sorted(records, key=lambda record: record.details["gb_per_s"])


class KnownRows:
    """Rows in the layout of a cache, without an index."""

    def __init__(self, device, layout, slots):
        self.device, self.slots = device, slots
        self._row_units, self._out_units = layout.row_stride_bytes // 16, layout.dim // 4
        self._slab = device.xp.arange(slots * self._row_units * 4, dtype=np.uint32)
        self._slab *= _ODD
        self._places = device.xp.asarray(np.random.default_rng(3).permutation(slots))
        defines = {"ROW_UNITS": self._row_units, "OUT_UNITS": self._out_units}
        self._kernel = device.kernel(SOURCE, "copy_known_rows", **defines)

    def numbers(self, places):
        """Random row numbers, one for each place in a population."""
        return self._places[self.device.xp.asarray(places)]

    def queue(self, numbers, out, stream):
        """Queue the copying of rows to out, float32[N, D]."""
        blocks = -(-numbers.size * self._out_units // (_THREADS * _UNDER_WAY))
        self._kernel((blocks,), (_THREADS,), (self._slab, numbers, np.uint32(numbers.size), out), stream)

    def check(self, numbers, out):
        """Compare with NumPy.

        Raises:
            WrongAnswerError: a row differs.
        """
        host = self.device.to_host(numbers)
        some = np.unique(np.linspace(0, host.size - 1, min(host.size, 4096)).astype(np.int64))
        units = np.arange(self._out_units) * self._row_units // self._out_units
        words = (host[some, None] * self._row_units + units)[:, :, None] * 4 + np.arange(4)
        found = self.device.to_host(out[self.device.xp.asarray(some)]).view(np.uint32)
        if not np.array_equal(found, (words.astype(np.uint32) * _ODD).reshape(found.shape)):
            raise WrongAnswerError("gather: rows differ from NumPy's")
