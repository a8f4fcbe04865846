"""Rows that the host fetched for missing keys, on their way to a device.

Letters for shapes: T tables, M missing keys, D embedding_vec_size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_cache.bag_layout import TABLE_BAGS, aligned
from kernels.device import Array, Device, Stream

_UNIT_BYTES = 16


class Staging:
    """A request's fetched rows: round after round, each round's in the order of its missing keys.

    One piece of memory: the rows, then for each row where it is, then a head of TableBags[T]. What follows the rows is
    written anew each round, so that a round's upload is one copy. Grows as needed.
    """

    def __init__(self, device: Device) -> None:
        """Begin without rows and without memory."""
        self._device = device
        self._host: NDArray[np.uint8] = device.pinned(0, np.uint8)
        self._on_device: Array = device.empty(0, np.uint8)
        self._places: list[NDArray[np.uint32]] = []
        self._rows_end = 0

    def begin(self) -> None:
        """Forget all rows, for the next request."""
        self._places.clear()
        self._rows_end = 0

    def upload(
        self, rows: Sequence[NDArray[np.float32]], head: NDArray[np.void], stream: Stream
    ) -> tuple[Array, Array, Array]:
        """Add a round's rows and queue the upload. The round before must have been uploaded.

        Args:
            rows: float32[M, D] by table.
            head: TableBags[T].
            stream: where to queue.

        Returns:
            on the device: the rows of all rounds, where each is in units of 16 bytes, and the head.
        """
        begin = self._rows_end
        strides = [aligned(4 * of_table.shape[1]) for of_table in rows]
        self._rows_end += sum(len(of_table) * stride for of_table, stride in zip(rows, strides, strict=True))
        places_at = self._rows_end
        head_at = aligned(places_at + 4 * (sum(map(len, self._places)) + sum(map(len, rows))))
        end = head_at + len(head) * TABLE_BAGS.itemsize
        if end > self._host.size:
            begin = self._grow(end, begin)
        self._write_rows(rows, strides, places_at)
        self._host[places_at:head_at].view(np.uint32)[: sum(map(len, self._places))] = np.concatenate(self._places)
        self._host[head_at:end].view(TABLE_BAGS)[:] = head
        self._device.upload(self._host[begin:end], self._on_device[begin:end], stream)
        return self._on_device, self._on_device[places_at:head_at], self._on_device[head_at:end]

    def _grow(self, size: int, kept: int) -> int:
        """Make room, with what lies before ``kept``; return from where on to upload."""
        host = self._device.pinned(aligned(2 * size, 256), np.uint8)
        host[:kept] = self._host[:kept]
        self._host, self._on_device = host, self._device.empty(host.size, np.uint8)
        return 0

    def _write_rows(self, rows: Sequence[NDArray[np.float32]], strides: Sequence[int], end: int) -> None:
        at = end - sum(len(of_table) * stride for of_table, stride in zip(rows, strides, strict=True))
        for of_table, stride in zip(rows, strides, strict=True):
            count, dim = of_table.shape
            room = self._host[at : at + count * stride].view(np.float32).reshape(count, stride // 4)
            room[:, :dim] = of_table
            units = stride // _UNIT_BYTES
            self._places.append(at // _UNIT_BYTES + units * np.arange(count, dtype=np.uint32))
            at += count * stride
