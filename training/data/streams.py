"""Streams of samples: opened for a graph, cut into batches, read ahead."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from numpy.typing import DTypeLike

from training.data.columns import read_hugectr_parquet
from training.data.norm import read_norm
from training.data.raw import read_raw
from training.document import TrainingDocument
from training.samples import Samples

Item = TypeVar("Item")


def read_hugectr(
    path: str | Path, document: TrainingDocument, key_dtype: DTypeLike, batch_size: int = 4096
) -> Iterator[Samples]:
    """Yield the samples of files in the document's format: Norm, Raw or Parquet.

    Args:
        path: the file, or the file list.
        document: its Data layer says what the files look like.
        key_dtype: of the keys of Norm files, uint32 or int64.
        batch_size: the samples of a batch. The last batch of a file may be smaller.

    Raises:
        DataError: a file is missing, cut short or damaged. The message names the file and the record.
    """
    graph, data = document.graph, document.data
    if data.format == "Norm":
        return read_norm(path, key_dtype, batch_size)
    if data.format == "Parquet":
        return read_hugectr_parquet(path, slot_sizes=data.slot_sizes, batch_size=batch_size)
    return read_raw(
        path,
        graph.label_dim,
        graph.dense_dim,
        sum(entry.slots for entry in graph.sparse),
        slot_sizes=data.slot_sizes,
        has_floats=data.has_floats,
        batch_size=batch_size,
    )


def batches_of(parts: Iterable[Samples], batch_size: int, *, keeps_rest: bool) -> Iterator[Samples]:
    """Cut a stream into batches of ``batch_size`` samples. With ``keeps_rest``, the last batch may be smaller."""
    waiting: list[Samples] = []
    count = 0
    for part in parts:
        waiting.append(part)
        count += len(part)
        if count < batch_size:
            continue
        samples = Samples.joined(waiting) if len(waiting) > 1 else part
        whole = count - count % batch_size
        for first in range(0, whole, batch_size):
            yield samples[first : first + batch_size]
        waiting, count = [samples[whole:]], count - whole
    if keeps_rest and count:
        yield Samples.joined(waiting)


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items, and make the next one in a thread meanwhile."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item
    finally:
        thread.shutdown(wait=False)  # a garbage collection in that thread may close this generator
