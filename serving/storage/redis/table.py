"""One table of a ``RedisStore``."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

import numpy as np

from serving.metrics import MetricSample
from serving.storage.hps_layout import storable
from serving.storage.marker import Marker
from serving.storage.redis.commands import RedisNodeError
from serving.storage.redis.filling import Filling
from serving.storage.redis.states import Status
from serving.storage.redis.table_commands import TableCommands
from serving.storage.store import (
    Batches,
    Change,
    Keys,
    LastingTable,
    Mask,
    Reached,
    StoreTable,
    TableSpec,
    Truth,
    Vectors,
)

if TYPE_CHECKING:
    from serving.storage.redis.store import RedisStore


class RedisTable(LastingTable):
    """A table of all partitions of one name."""

    def __init__(self, store: "RedisStore", spec: TableSpec) -> None:
        """Ask no node."""
        super().__init__(store, spec)
        self._redis = store
        self._nodes = store.nodes
        self._is_open = False
        with self._translated():
            self._commands = self._new_commands()

    @property
    def capacity_rows(self) -> int | None:
        """See ``StoreTable.capacity_rows``; with an overflow policy, the margins of all partitions together."""
        self._require_open()
        config = self._redis.config
        return None if config.overflow is None else config.overflow.margin_rows * config.num_partitions

    def open(self, rows: int) -> None:
        """See ``StoreTable.open``; samples a few rows of each partition.

        Raises:
            StoreError: also if the table was written with another ``num_partitions``.
        """
        self._redis.check_name(self)
        with self._translated():
            numbers = range(len(self._commands.partitions))
            self._commands.check(numbers)
            self._commands.states.verify(numbers)
        self._opened()
        self._redis.log_opened(self)

    def count(self) -> int:
        """See ``StoreTable.count``."""
        self._require_open()
        with self._translated():
            return self._commands.count()

    def fetch(self, keys: Keys, out: Vectors) -> Mask:
        """See ``StoreTable.fetch``; a cache does not find keys of invalid partitions."""
        self._require_open()
        self._check_dim(out.shape[1])
        fits, found = storable(keys, self.spec.key_bytes), np.zeros(keys.size, dtype=np.bool_)
        with self._translated():
            if fits is None and out.flags.c_contiguous:
                self._commands.fetch(keys, out, found)
                self._touch(keys[found])
                return found
            wanted = np.flatnonzero(fits) if fits is not None else np.arange(keys.size)
            rows, hits = np.empty((wanted.size, self.spec.dim), dtype=np.float32), np.empty(wanted.size, dtype=np.bool_)
            self._commands.fetch(keys[wanted], rows, hits)
            self._touch(keys[wanted[hits]])
        out[...], out[wanted], found[wanted] = 0.0, rows, hits
        return found

    def insert(self, keys: Keys, rows: Vectors) -> None:
        """See ``StoreTable.insert``; when it fails, some of the rows may have been written."""
        self._check_rows(keys, rows)
        with self._translated():
            self._commands.insert(keys, rows)

    def insert_absent(self, keys: Keys, rows: Vectors) -> int:
        """See ``StoreTable.insert_absent``; Redis itself decides which keys are absent."""
        self._check_rows(keys, rows)
        with self._translated():
            return self._commands.insert_absent(keys, rows)

    def evict(self, keys: Keys) -> None:
        """See ``StoreTable.evict``."""
        self._require_open()
        fits = storable(keys, self.spec.key_bytes)
        with self._translated():
            self._commands.evict(keys if fits is None else keys[fits])

    def items(self, batch_rows: int = 65536) -> Batches:
        """See ``StoreTable.items``; while others write, a row may come twice."""
        self._require_open()
        with self._translated():
            yield from self._commands.items(batch_rows)

    def close(self) -> None:
        """See ``StoreTable.close``; asks no node."""
        self._is_open = False
        self._redis.remove(self)

    def erase(self) -> None:
        """Remove every row and everything that belongs to it; the table need not be open."""
        with self._translated():
            self._commands.drop()

    def marker(self) -> Marker | None:
        """See ``LastingTable.marker``; None if a partition has lost its marker."""
        with self._translated():
            return self._commands.states.marker()

    def load(self, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """See ``LastingTable.load``; each partition changes in one instant.

        Processes that share the table can still read. Redis needs room for the old and the new rows together. A process
        that loads the same files waits for this load.

        Raises:
            StoreUnreachableError: another process holds the lease too long, or took it.
        """
        self._redis.check_name(self)
        with self._translated():
            commands = self._new_commands()
            commands.states.wanted = marker
            Filling(self._nodes, commands).load(batches, marker, keep=keep)
        self._commands = commands
        self._opened()
        self._redis.log_opened(self)

    def write_flags(self, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None) -> None:
        """See ``LastingTable.write_flags``; Redis does not keep ``current_caches``."""
        self._require_open()
        if changed:
            with self._translated():
                self._commands.set_changed()

    def serve_as_cache(self, truth: Truth, *, keeps_rows: bool = False) -> None:
        """See ``LastingTable.serve_as_cache``."""
        with self._translated():
            self._commands = self._new_commands()
        states = self._commands.states
        states.truth = truth
        if not keeps_rows:
            states.wanted = truth.marker()
            states.mark(range(len(self._commands.partitions)), Status.INVALID, "it has not been filled yet")
        self._opened()

    def fill(self, truth: Truth, *, starting: bool) -> bool:
        """See ``LastingTable.fill``."""
        self._require_open()
        with self._translated():
            self._commands.states.wanted = truth.marker()
            was_written = Filling(self._nodes, self._commands).fill(truth, starting=starting)
        if starting:
            self._redis.log_spread(self)
        return was_written

    def reached(self) -> Mapping[str, str]:
        """See ``LastingTable.reached``."""
        self._require_open()
        with self._translated():
            return self._commands.logs.reached()

    def write_from_log(self, change: Change[StoreTable], reached: Reached) -> None:
        """See ``Store.write``; a key that does not fit the table cannot be removed."""
        self._require_open()
        if change.rows is not None:
            self._check_rows(change.keys, change.rows)
        elif (fits := storable(change.keys, self.spec.key_bytes)) is not None:
            change = change._replace(keys=change.keys[fits])
        with self._translated():
            self._commands.logs.write(change, reached)

    @property
    def is_truth(self) -> bool:
        """Whether no slower tier has the rows."""
        return self._commands.states.truth is None

    @property
    def is_whole(self) -> bool:
        """See ``LastingTable.is_whole``."""
        states = self._commands.states
        return states.truth is None or states.is_whole

    def samples(self) -> Iterator[MetricSample]:
        """See ``StoreTable.samples``."""
        help_text = "Partitions of a table that a Redis node holds."
        for node, count in self.spread().items():
            yield MetricSample("hotrow_redis_partitions", help_text, (("node", node),), count, is_gauge=True)
        if self._redis.config.overflow is not None:
            rows = self._commands.evicted_rows
            yield MetricSample("hotrow_tier_evicted_rows", "Rows that overflows evicted.", (), rows)

    def spread(self) -> Mapping[str, int]:
        """By node, ``"host:port"``, how many of the partitions it holds, as far as this process knows."""
        with suppress(RedisNodeError):
            return self._nodes.topology.spread([partition.values for partition in self._commands.partitions])
        return {}

    def _new_commands(self) -> TableCommands:
        return TableCommands(self._nodes, self._redis.config, self.spec, expects_logs=self._redis.expects_logs)

    def _opened(self) -> None:
        self._redis.add(self)
        self._is_open = True

    def _require_open(self) -> None:
        if not self._is_open:
            raise self._not_open()

    def _check_rows(self, keys: Keys, rows: Vectors) -> None:
        self._require_open()
        self._check_dim(rows.shape[1])
        if storable(keys, self.spec.key_bytes) is not None:
            raise self._error(f"a key does not fit {self.spec.key_bytes} bytes")

    def _touch(self, keys: Keys) -> None:
        if self._commands.is_touched_by_fetches and keys.size:
            self._redis.touches.submit(lambda: self._touch_now(keys))

    def _touch_now(self, keys: Keys) -> None:
        with suppress(RedisNodeError):  # a use that is not counted costs no answer
            self._commands.touch(keys)

    def _translated(self) -> AbstractContextManager[None]:
        return self._redis.translated(self.spec.name)
