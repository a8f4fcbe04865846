"""Samples that can be read from the beginning again and again: in memory, or from a file."""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from training.data.streams import batches_of, read_ahead
from training.samples import ContentSum, Samples


class SampleSource(Protocol):
    """Samples in a fixed order. ``Samples`` itself is one."""

    def __len__(self) -> int:
        """Return B."""

    def parts(self) -> Iterator[Samples]:
        """Yield all samples in order, in parts of any size."""


class FileSource:
    """Some of the samples that a reader of files yields. Memory does not grow with their number.

    Attributes:
        content: the checksum of all samples that the reader yields.
    """

    def __init__(self, read: Callable[[], Iterator[Samples]], rows: int, content: str, begin: int = 0) -> None:
        """Take the samples ``begin`` to ``begin + rows`` of those that ``read()`` yields each time."""
        self.content = content
        self._read = read
        self._rows = rows
        self._begin = begin

    def __len__(self) -> int:
        """Return B."""
        return self._rows

    def __getitem__(self, some: slice) -> "FileSource":
        """Select samples by a slice without a step."""
        begin, end, _ = some.indices(self._rows)
        return FileSource(self._read, end - begin, self.content, self._begin + begin)

    def parts(self) -> Iterator[Samples]:
        """See ``SampleSource``."""
        passed = 0
        for part in self._read():
            begin, end = max(self._begin - passed, 0), min(self._begin + self._rows - passed, len(part))
            if begin < end:
                yield part[begin:end]
            passed += len(part)
            if passed >= self._begin + self._rows:
                return


def content_of(source: Samples | FileSource) -> str:
    """Return the checksum of samples, which tells whether they have changed."""
    if isinstance(source, FileSource):
        return source.content
    found = ContentSum()
    found.add(source)
    return str(found)


def shuffled_batches(
    source: SampleSource, batch_size: int, window_rows: int, rng: np.random.Generator
) -> Iterator[Samples]:
    """Yield all samples in batches, shuffled within windows of the source, one window after another.

    A thread reads the next window ahead, so about three windows are in memory. The last batch may be smaller.
    """
    window_rows = max(window_rows // batch_size, 1) * batch_size
    windows = batches_of(source.parts(), window_rows, keeps_rest=True)
    for window in windows if len(source) <= window_rows else read_ahead(windows):
        order = rng.permutation(len(window))
        for first in range(0, len(window), batch_size):
            yield window[order[first : first + batch_size]]
