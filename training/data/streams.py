"""Streams of samples: cut into batches, read ahead."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from training.samples import Samples

Item = TypeVar("Item")


def batches_of(parts: Iterable[Samples], batch_size: int, *, keeps_rest: bool) -> Iterator[Samples]:
    """Cut a stream into batches of ``batch_size`` samples. With ``keeps_rest``, the last batch may be smaller."""
    waiting: list[Samples] = []
    count = 0
    for part in parts:
        waiting.append(part)
        count += len(part)
        if count < batch_size:
            continue
        samples = Samples.joined(waiting)
        whole = count - count % batch_size
        for first in range(0, whole, batch_size):
            yield samples[first : first + batch_size]
        waiting, count = [samples[whole:]], count - whole
    if keeps_rest and count:
        yield Samples.joined(waiting)


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items, and make the next one in a thread."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item
    finally:
        thread.shutdown(wait=False)  # a garbage collection in that thread may close this generator
