"""The shared tier: embedding tables in a Redis server or cluster, laid out as HPS does."""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import numpy as np

from serving.config import RedisConfig
from serving.errors import MissingExtraError, StoreError, StoreTimeoutError, StoreUnreachableError
from serving.reading import Reading
from serving.storage.hps_layout import storable
from serving.storage.redis_changes import ChangeNumbers
from serving.storage.redis_commands import RedisNodeError, RedisNodeTimeoutError, RedisUnreachableError
from serving.storage.redis_overflow import Touches
from serving.storage.redis_rows import STORE_NAME
from serving.storage.redis_strings import StringTable
from serving.storage.redis_table import RedisTable
from serving.storage.store import Keys, Mask, TableSpec, Vectors, none_found

if TYPE_CHECKING:
    from serving.storage.redis_nodes import RedisNodes

logger = logging.getLogger(__name__)

# Warn when the busiest node has this many times its fair share of a table's partitions.
LOPSIDED_RATIO = 1.5


class RedisStore:
    """Rows in Redis, shared by every process that connects to it. See ``DurableStore``.

    Tables have HPS's layout (HugeCTR v24.06), so what HPS wrote can be read, and the other way round. Rows outlive the
    process: a table that is there and was loaded from the same files is not loaded again. A partition whose record of
    that load is gone, because its node came back empty, counts as a tier that does not answer, not as one without keys.
    With ``RedisConfig.overflow`` it holds a part of the rows only: a slower tier must hold all of them.
    """

    def __init__(self, config: RedisConfig, *, may_be_late: bool = False) -> None:
        """Connect.

        Args:
            config: where to, and how.
            may_be_late: where no node can be reached, that is no error, but of every call until one can.

        Raises:
            MissingExtraError: redis or hiredis is not installed.
            StoreUnreachableError: no node answers in time.
            StoreError: the user is refused, or a TLS file cannot be read.
        """
        self._config = config
        self._is_closed = False
        self._is_slowest = False
        self._touches: Touches | None = None
        self._lock = threading.Lock()  # one change of the tables at a time
        # Replaced as a whole, never changed in place; readers take no lock.
        self._tables: dict[str, RedisTable | StringTable] = {}
        self._numbers: dict[str, ChangeNumbers] = {}  # by table; they outlive it, until it is dropped
        try:
            self._nodes = _nodes_of(config)
        except OSError as err:
            raise StoreError(STORE_NAME, "", f"TLS: {err}") from err
        with suppress(StoreUnreachableError) if may_be_late else nullcontext(), self._translated(""):
            self._nodes.topology.connect()
        if config.overflow is not None:
            self._touches = Touches()

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return STORE_NAME

    @property
    def keeps_row_dtype(self) -> bool:
        """See ``Store.keeps_row_dtype``."""
        return self._config.row_dtype is not None

    def open_table(self, spec: TableSpec, capacity_rows: int) -> None:
        """See ``Store.open_table``; some rows of each partition are looked at.

        Raises:
            StoreError: besides ``Store.open_table``'s reasons, the table was written with another ``num_partitions``.
        """
        with self._translated(spec.name):
            table = self._table(spec)
            table.check()
        self._take(table)

    def capacity_rows(self, table: str) -> int | None:
        """See ``Store.capacity_rows``; where an overflow evicts rows, as many as all margins together."""
        self._check_open(table)
        if table not in self._tables:
            return 0
        overflow = self._config.overflow
        return None if overflow is None else overflow.margin_rows * self._config.num_partitions

    def tables(self) -> list[str]:
        """See ``Store.tables``."""
        self._check_open()
        return sorted(self._tables)

    def count(self, table: str) -> int:
        """See ``Store.count``; exact."""
        with self._translated(table):
            held = self._tables.get(table)
            return held.count() if held else 0

    def spread(self, table: str) -> Mapping[str, int]:
        """By node, ``"host:port"``, how many of an open table's partitions it holds; empty for an unknown table."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is None:
            return {}
        return self._nodes.topology.spread(held.spread_keys)

    def fetch(self, table: str, keys: Keys, out: Vectors) -> Mask:
        """See ``Store.fetch``."""
        self._check_open(table)
        held = self._tables.get(table)
        if held is None:
            return none_found(keys, out)
        if out.shape[1] != held.spec.dim:
            raise StoreError(STORE_NAME, table, f"holds vectors of {held.spec.dim} floats, asked for {out.shape[1]}")
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
        self._check_open(table)
        held = self._open_table(table)
        if rows.shape[1] != held.spec.dim:
            raise StoreError(STORE_NAME, table, f"holds vectors of {held.spec.dim} floats, got {rows.shape[1]}")
        if storable(keys, held.spec.key_bytes) is not None:
            raise StoreError(STORE_NAME, table, f"a key does not fit {held.spec.key_bytes} bytes")
        with self._translated(table):
            held.insert(keys, rows)

    def evict(self, table: str, keys: Keys) -> int | None:
        """See ``Store.evict``; exact, unless an answer was lost on the way and the command sent again."""
        with self._translated(table):
            held = self._tables.get(table)
            if held is None:
                return 0
            fits = storable(keys, held.spec.key_bytes)
            return held.evict(keys if fits is None else keys[fits])

    def drop_table(self, table: str) -> None:
        """See ``Store.drop_table``; every process that shares the table loses it."""
        with self._translated(table):
            held = self._tables.get(table) or self._unopened(table)
            with self._lock:
                self._tables = {name: one for name, one in self._tables.items() if name != table}
            held.drop()
            self._numbers.pop(table, None)

    def items(self, table: str, batch_rows: int = 65536) -> Iterator[tuple[Keys, Vectors]]:
        """See ``Store.items``; while others write, a row may come twice."""
        with self._translated(table):
            held = self._tables.get(table)
            if held is not None:
                yield from held.items(batch_rows)

    def loaded_from(self, table: str) -> str | None:
        """See ``DurableStore.loaded_from``; None too where a partition has lost what it was loaded with."""
        with self._translated(table):
            return (self._tables.get(table) or self._unopened(table)).loaded_from()

    def mark_changed(self, table: str) -> None:
        """See ``DurableStore.mark_changed``."""
        with self._translated(table):
            self._open_table(table).mark(has_changed=True)

    def put_seal(self, table: str, seal: str, former: str | None, has_changed: bool) -> None:
        """See ``SealedStore.put_seal``."""
        with self._translated(table):
            self._open_table(table).mark(has_changed, seal, former or "")

    def seals(self, table: str) -> set[str]:
        """See ``SealedStore.seals``."""
        with self._translated(table):
            return (self._tables.get(table) or self._unopened(table)).seals()

    def be_slowest(self) -> None:
        """See ``ForgetfulStore.be_slowest``."""
        with self._lock:
            self._is_slowest = True
            for table in self._tables.values():
                table.is_slowest = True

    def note_change(self, table: str, keys: Keys) -> None:
        """See ``ForgetfulStore.note_change``; not with ``RedisConfig.layout`` ``strings``, nor for what HPS wrote."""
        held = self._tables.get(table)
        if isinstance(held, RedisTable):
            with self._translated(table):
                held.note_change(keys)

    def refill(self, table: str, batches: Iterator[tuple[Keys, Vectors | None]], digest: str) -> bool:
        """See ``ForgetfulStore.refill``; with ``RedisConfig.layout`` ``strings`` others' changes do not end it."""
        with self._translated(table):
            return self._open_table(table).refill(batches, digest)

    def bulk_load(
        self, spec: TableSpec, batches: Iterator[tuple[Keys, Vectors]], digest: str, *, unless_loaded: bool = False
    ) -> None:
        """See ``DurableStore.bulk_load``; with ``RedisConfig.layout`` ``strings`` it is always loaded.

        Processes that share the table read on all the while; each partition changes in one instant. Redis needs room
        for the old and the new rows together.

        Raises:
            StoreError: besides other reasons, another process, which began later, has loaded other rows meanwhile.
        """
        with self._translated(spec.name):
            table = self._table(spec)
            table.load(batches, digest, unless_loaded=unless_loaded)
        self._take(table)

    def close(self) -> None:
        """See ``Store.close``; the rows stay."""
        with self._lock:
            touches, self._touches = self._touches, None
            self._is_closed = True
            self._tables = {}
        if touches is not None:
            touches.close()
        self._nodes.topology.close()

    def readings(self, table: str) -> Iterator[Reading]:
        """See ``MeasuredStore.readings``."""
        held = self._tables.get(table)
        if held is None:
            return
        spread = self._nodes.topology.spread(held.spread_keys) if held.spread_keys else {}
        help_text = "Partitions of a table that a Redis node holds."
        for node, count in spread.items():
            yield Reading("hotrow_redis_partitions", help_text, (("node", node),), count, is_gauge=True)
        if self._config.overflow is not None:
            yield Reading("hotrow_tier_evicted_rows", "Rows that overflows evicted.", (), held.evicted_rows)

    def evicted_rows(self, table: str) -> int:
        """Rows that this process evicted from an open table as it overflowed."""
        held = self._tables.get(table)
        return held.evicted_rows if held else 0

    def _touch(self, table: RedisTable | StringTable, keys: Keys) -> None:
        touches = self._touches
        if touches is not None and table.is_touched_by_fetches and keys.size:
            touches.note(table.touch, keys)

    def _table(self, spec: TableSpec) -> RedisTable | StringTable:
        numbers = self._numbers.setdefault(spec.name, ChangeNumbers())
        return RedisTable(self._nodes, self._config, spec, numbers)

    def _open_table(self, table: str) -> RedisTable | StringTable:
        held = self._tables.get(table)
        if held is None:
            raise StoreError(STORE_NAME, table, "not an open table")
        return held

    def _unopened(self, table: str) -> RedisTable | StringTable:
        """A table of which nothing but the name counts."""
        return self._table(TableSpec(table, dim=1, row_dtype=self._config.row_dtype or "fp32"))

    def _take(self, table: RedisTable | StringTable) -> None:
        """Answer for ``table`` from now on, and tell how evenly the nodes hold it."""
        name = table.spec.name
        with self._lock:
            self._check_open(name)
            table.is_slowest = self._is_slowest
            self._tables = {**self._tables, name: table}
        spread = self.spread(name)
        if not table.spread_keys:
            return
        fair_share = len(table.spread_keys) / len(spread)
        is_lopsided = max(spread.values()) >= LOPSIDED_RATIO * fair_share
        text = ", ".join(f"{node} holds {count}" for node, count in spread.items())
        if is_lopsided:
            logger.warning("%s: one node will be the busiest; more num_partitions would spread wider: %s", name, text)
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


def _nodes_of(config: RedisConfig) -> "RedisNodes":
    """Import redis-py, and hiredis, without which it would work too, but slowly."""
    try:
        import hiredis  # noqa: F401

        from serving.storage.redis_nodes import RedisNodes
    except ModuleNotFoundError as err:
        raise MissingExtraError(str(err.name), "redis", "a volatile_db of type redis_cluster") from err
    return RedisNodes(config)
