"""The Redis tier: embedding tables in a Redis server or cluster, laid out as HPS does."""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import numpy as np

from serving.background import QueueWorker
from serving.config import RedisConfig
from serving.errors import MissingExtraError, StoreError, StoreTimeoutError, StoreUnreachableError
from serving.metrics import MetricSample
from serving.storage.hps_layout import storable
from serving.storage.marker import Marker
from serving.storage.redis.commands import RedisNodeError, RedisNodeTimeoutError, RedisUnreachableError
from serving.storage.redis.rows import STORE_NAME, identity_of
from serving.storage.store import Batches, Keys, Mask, Store, TableSpec, Truth, Vectors, none_found

if TYPE_CHECKING:
    from serving.storage.redis.nodes import RedisNodes
    from serving.storage.redis.table import RedisTable

logger = logging.getLogger(__name__)

# Warn if a node has more than this many times its fair share of a table's partitions.
LOPSIDED_RATIO = 1.5
# Found keys that wait to be reported to an overflow policy; more are not counted.
MOST_WAITING_TOUCHES = 64


class RedisStore(Store):
    """Rows in Redis, shared by every process that connects to it; see the package for the layout and the contract.

    Rows outlive the process, so a table that was loaded from the same files is not loaded again. With
    ``RedisConfig.overflow`` Redis holds some of the rows, and a slower tier must hold all of them.
    """

    outlives_process = True

    def __init__(self, config: RedisConfig, *, may_be_late: bool = False) -> None:
        """Connect.

        Args:
            config: the addresses and options.
            may_be_late: no error is raised now if no node can be reached; calls raise it until a node answers.

        Raises:
            MissingExtraError: redis or hiredis is not installed.
            StoreUnreachableError: no node answers in time.
            StoreError: the user is refused, or a TLS file cannot be read.
        """
        self._config = config
        self._is_closed = self._has_asked_for_policy = False
        self._lock = threading.Lock()  # one change of the tables at a time
        self._tables: dict[str, RedisTable] = {}  # replaced as a whole, so readers take no lock
        try:
            self._nodes = _nodes_of(config)
        except OSError as err:
            raise StoreError(STORE_NAME, "", f"TLS: {err}") from err
        with suppress(StoreUnreachableError) if may_be_late else nullcontext(), self._translated(""):
            self._nodes.topology.connect()
        self._touches = QueueWorker("hotrow-redis-touches", MOST_WAITING_TOUCHES)

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return STORE_NAME

    @property
    def identity(self) -> str:
        """See ``Store.identity``."""
        return identity_of(self._config)

    @property
    def keeps_row_dtype(self) -> bool:
        """See ``Store.keeps_row_dtype``."""
        return self._config.row_dtype is not None

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``; samples a few rows of each partition.

        Raises:
            StoreError: also if the table was written with another ``num_partitions``.
        """
        with self._translated(spec.name):
            held = self._tables.get(spec.name)
            table = held if held is not None and held.spec == spec else self._new_table(spec)
            table.check(range(len(table.partitions)))
            table.states.verify(range(len(table.partitions)))
        self._take(table)

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``; with an overflow policy, the margins of all partitions together."""
        self._check_open(table)
        if table not in self._tables:
            return 0
        overflow = self._config.overflow
        return None if overflow is None else overflow.margin_rows * self._config.num_partitions

    def count(self, table: str) -> int:
        """See ``Store.count``."""
        with self._translated(table):
            held = self._tables.get(table)
            return held.count() if held else 0

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``; a cache does not find keys of invalid partitions."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is None:
            return none_found(keys, out)
        if out.shape[1] != held.spec.dim:
            raise StoreError(
                STORE_NAME, table, f"holds vectors of {held.spec.dim} floats, but {out.shape[1]} were asked for"
            )
        fits, found = storable(keys, held.spec.key_bytes), np.zeros(keys.size, dtype=np.bool_)
        with self._translated(table):
            if fits is None and out.flags.c_contiguous:
                held.fetch(keys, out, found)
                self._touch(held, keys[found])
                return found
            wanted = np.flatnonzero(fits) if fits is not None else np.arange(keys.size)
            rows, hits = np.empty((wanted.size, held.spec.dim), dtype=np.float32), np.empty(wanted.size, dtype=np.bool_)
            held.fetch(keys[wanted], rows, hits)
            self._touch(held, keys[wanted[hits]])
        out[...], out[wanted], found[wanted] = 0.0, rows, hits
        return found

    def insert(self, table: str, keys: Keys, rows: Vectors) -> None:
        """See ``Store.insert``; when it fails, some of the rows may have been written."""
        with self._translated(table):
            self._checked(table, keys, rows).insert(keys, rows)

    def add(self, table: str, keys: Keys, rows: Vectors) -> int:
        """See ``Store.add``; Redis itself decides which keys are absent."""
        with self._translated(table):
            return self._checked(table, keys, rows).add(keys, rows)

    def evict(self, table: str, keys: Keys) -> None:
        """See ``Store.evict``."""
        with self._translated(table):
            held = self._tables.get(table)
            if held is not None:
                fits = storable(keys, held.spec.key_bytes)
                held.evict(keys if fits is None else keys[fits])

    def close_table(self, table: str) -> None:
        """See ``Store.close_table``; asks no node."""
        self._check_open(table)
        with self._lock:
            self._tables = {name: one for name, one in self._tables.items() if name != table}

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; every process that shares the table loses it."""
        with self._translated(table):
            held = self._tables.get(table) or self._unopened(table)
            self.close_table(table)
            held.drop()

    def items(self, table: str, batch_rows: int = 65536) -> Batches:
        """See ``Store.items``; while others write, a row may come twice."""
        with self._translated(table):
            held = self._tables.get(table)
            if held is not None:
                yield from held.items(batch_rows)

    def marker(self, table: str) -> Marker | None:
        """See ``Store.marker``; None if a partition has lost its marker."""
        with self._translated(table):
            return (self._tables.get(table) or self._unopened(table)).states.marker()

    def load(self, spec: TableSpec, batches: Batches, marker: Marker, *, keep: bool) -> None:
        """See ``Store.load``; each partition changes in one instant.

        Processes that share the table can still read. Redis needs room for the old and the new rows together. A process
        that loads the same files waits for this load.

        Raises:
            StoreUnreachableError: another process holds the lease too long, or took it.
        """
        from serving.storage.redis.filling import Filling

        with self._translated(spec.name):
            table = self._new_table(spec)
            table.states.wanted = marker
            Filling(self._nodes, table).load(batches, marker, keep=keep)
        self._take(table)

    def write_flags(
        self, table: str, *, changed: bool | None = None, current_caches: tuple[str, ...] | None = None
    ) -> None:
        """See ``Store.write_flags``; Redis does not keep ``current_caches``."""
        with self._translated(table):
            held = self._open_table(table)
            if changed:
                held.set_changed()

    def serve_as_cache(self, spec: TableSpec, truth: Truth, *, keeps_rows: bool = False) -> None:
        """See ``Store.serve_as_cache``."""
        from serving.storage.redis.states import Status

        with self._translated(spec.name):
            table = self._new_table(spec)
        table.states.truth = truth
        if not keeps_rows:
            table.states.wanted = truth.marker()
            table.states.mark(range(len(table.partitions)), Status.INVALID, "it has not been filled yet")
        with self._lock:
            self._tables = {**self._tables, spec.name: table}

    def fill(self, spec: TableSpec, truth: Truth, *, starting: bool) -> bool:
        """See ``Store.fill``."""
        from serving.storage.redis.filling import Filling

        with self._translated(spec.name):
            table = self._open_table(spec.name)
            table.states.wanted = truth.marker()
            was_written = Filling(self._nodes, table).fill(truth, starting=starting)
        if starting:
            self._log_spread(table)
        return was_written

    def is_whole(self, table: str) -> bool:
        """See ``Store.is_whole``."""
        held = self._tables.get(table)
        return held is None or held.states.truth is None or held.states.is_whole

    def samples(self, table: str) -> Iterator[MetricSample]:
        """See ``Store.samples``."""
        held = self._tables.get(table)
        if held is None:
            return
        help_text = "Partitions of a table that a Redis node holds."
        for node, count in self.spread(table).items():
            yield MetricSample("hotrow_redis_partitions", help_text, (("node", node),), count, is_gauge=True)
        if self._config.overflow is not None:
            yield MetricSample("hotrow_tier_evicted_rows", "Rows that overflows evicted.", (), held.evicted_rows)

    def spread(self, table: str) -> Mapping[str, int]:
        """By node, ``"host:port"``, how many of an open table's partitions it holds; empty for an unknown table."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is None:
            return {}
        with suppress(RedisNodeError):
            return self._nodes.topology.spread([one.values for one in held.partitions])
        return {}

    def close(self) -> None:
        """See ``Store.close``; the rows stay."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            self._tables = {}
        if not was_closed:
            self._touches.wait(self._config.timeout_ms / 1000)
            self._touches.close()
            self._nodes.topology.close()

    def _touch(self, table: "RedisTable", keys: Keys) -> None:
        if table.is_touched_by_fetches and keys.size:
            self._touches.submit(lambda: _touch(table, keys))

    def _checked(self, name: str, keys: Keys, rows: Vectors) -> "RedisTable":
        table = self._open_table(name)
        if rows.shape[1] != table.spec.dim:
            raise StoreError(STORE_NAME, name, f"holds vectors of {table.spec.dim} floats, got {rows.shape[1]}")
        if storable(keys, table.spec.key_bytes) is not None:
            raise StoreError(STORE_NAME, name, f"a key does not fit {table.spec.key_bytes} bytes")
        return table

    def _new_table(self, spec: TableSpec) -> "RedisTable":
        from serving.storage.redis.table import RedisTable  # needs redis-py

        return RedisTable(self._nodes, self._config, spec)

    def _open_table(self, table: str) -> "RedisTable":
        held = self._tables.get(table)
        if held is None:
            raise StoreError(STORE_NAME, table, "not an open table")
        return held

    def _unopened(self, table: str) -> "RedisTable":
        """A table that is only a name."""
        return self._new_table(TableSpec(table, dim=1, row_dtype=self._config.row_dtype or "fp32"))

    def _take(self, table: "RedisTable") -> None:
        """Serve ``table`` from now on."""
        with self._lock:
            self._check_open(table.spec.name)
            self._tables = {**self._tables, table.spec.name: table}
        self._log_spread(table)
        if table.states.truth is None and not self._has_asked_for_policy:
            self._has_asked_for_policy = True
            self._warn_of_evictions()

    def _warn_of_evictions(self) -> None:
        for policy in self._nodes.topology.eviction_policies():
            advice = "set it to noeviction, or put a persistent_db behind Redis"
            logger.warning("redis: maxmemory-policy is %s, so a full Redis loses rows: %s", policy, advice)

    def _log_spread(self, table: "RedisTable") -> None:
        """Log how evenly the nodes hold a table."""
        name, spread = table.spec.name, self.spread(table.spec.name)
        if not spread:
            return
        fair_share = len(table.partitions) / len(spread)
        text = ", ".join(f"{node} holds {count}" for node, count in spread.items())
        if max(spread.values()) > LOPSIDED_RATIO * fair_share:
            logger.warning(
                "%s: one node has far more partitions than the others; raise num_partitions to spread them: %s",
                name,
                text,
            )
        else:
            logger.info("%s: partitions by node: %s", name, text)

    def _check_open(self, table: str = "") -> None:
        if self._is_closed:
            raise StoreError(STORE_NAME, table, "the store is closed")

    @contextmanager
    def _translated(self, table: str) -> Iterator[None]:
        self._check_open(table)
        try:
            yield
        except RedisNodeTimeoutError as err:
            raise StoreTimeoutError(STORE_NAME, table, str(err)) from err
        except RedisUnreachableError as err:
            raise StoreUnreachableError(STORE_NAME, table, str(err)) from err
        except RedisNodeError as err:
            raise StoreError(STORE_NAME, table, str(err)) from err


def _touch(table: "RedisTable", keys: Keys) -> None:
    with suppress(RedisNodeError):  # a use that is not counted costs no answer
        table.touch(keys)


def _nodes_of(config: RedisConfig) -> "RedisNodes":
    """Import redis-py, and hiredis, without which redis-py works slowly."""
    try:
        import hiredis  # noqa: F401

        from serving.storage.redis.nodes import RedisNodes
    except ModuleNotFoundError as err:
        raise MissingExtraError(str(err.name), "redis", "a volatile_db of type redis_cluster") from err
    return RedisNodes(config)
