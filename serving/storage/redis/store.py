"""The Redis tier: embedding tables in a Redis server or cluster, laid out as HPS does."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from serving.background import PeriodicWorker, QueueWorker
from serving.config import RedisConfig
from serving.errors import MissingExtraError, StoreError, StoreTimeoutError, StoreUnreachableError
from serving.storage.redis.commands import RedisNodeError, RedisNodeTimeoutError, RedisUnreachableError
from serving.storage.redis.rows import STORE_NAME
from serving.storage.store import LastingStore, StoreTable, TableSpec

if TYPE_CHECKING:
    from serving.storage.redis.nodes import RedisNodes
    from serving.storage.redis.table import RedisTable

logger = logging.getLogger(__name__)

# Warn if a node has more than this many times its fair share of a table's partitions.
LOPSIDED_RATIO = 1.5
# Found keys that wait to be reported to an overflow policy; more are not counted.
MOST_WAITING_TOUCHES = 64
# How often silent nodes are looked at.
PROBE_INTERVAL_S = 0.25


class RedisStore(LastingStore):
    """Rows in Redis, shared by every process that connects to it; see the package for the layout and the contract.

    Rows outlive the process, so a table that was loaded from the same files is not loaded again. With
    ``RedisConfig.overflow`` Redis holds some of the rows, and a slower tier must hold all of them.

    Attributes:
        config: the addresses and options.
        nodes: the connections.
        expects_logs: see ``LastingStore.expect_logs``.
        touches: reports found keys to an overflow policy, in the background.
    """

    name = STORE_NAME
    has_one_writer = False

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
        super().__init__()
        self.config = config
        self.keeps_row_dtype = config.row_dtype is not None
        self.expects_logs = self._has_asked_for_policy = False
        self._lock = threading.Lock()  # one change of the tables at a time
        try:
            self.nodes = _nodes_of(config)
        except OSError as err:
            raise StoreError(STORE_NAME, "", f"TLS: {err}") from err
        with suppress(StoreUnreachableError) if may_be_late else nullcontext(), self.translated(""):
            self.nodes.topology.connect()
        self.touches = QueueWorker("hotrow-redis-touches", MOST_WAITING_TOUCHES)
        self._prober = PeriodicWorker("hotrow-redis-probes", self.nodes.probe, PROBE_INTERVAL_S)

    @property
    def identity(self) -> str:
        """See ``LastingStore.identity``."""
        return " ".join([STORE_NAME, *sorted(f"{host}:{port}" for host, port in self.config.addresses)])

    def _new_table(self, spec: TableSpec) -> "RedisTable":
        from serving.storage.redis.table import RedisTable  # needs redis-py

        return RedisTable(self, spec)

    def expect_logs(self) -> None:
        """See ``LastingStore.expect_logs``; asks the nodes."""
        self.expects_logs = True
        with self.translated(""):
            policies = sorted(self.nodes.topology.eviction_policies())
        if policies:
            reason = f"maxmemory-policy is {policies[0]}, so a full Redis drops rows: set it to noeviction"
            raise StoreError(STORE_NAME, "", reason)

    def erase(self, table: str) -> None:
        """See ``Store.erase``; every process that shares the table loses it."""
        from serving.storage.redis.table import RedisTable

        self._check_open(table)
        RedisTable(self, TableSpec(table, dim=1, row_dtype=self.config.row_dtype or "fp32")).erase()
        open_table = self._tables.get(table)
        if open_table is not None:
            open_table.close()

    def close(self) -> None:
        """See ``Store.close``; the rows stay."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
        if not was_closed:
            super().close()
            self.touches.wait(self.config.timeout_ms / 1000)
            self.touches.close()
            self._prober.close(self.config.timeout_ms / 1000)
            self.nodes.topology.close()

    def add(self, table: StoreTable) -> None:
        """See ``Store.add``; may be called by several threads."""
        with self._lock:
            super().add(table)

    def remove(self, table: StoreTable) -> None:
        """See ``Store.remove``; may be called by several threads."""
        with self._lock:
            super().remove(table)

    def log_opened(self, table: "RedisTable") -> None:
        """Log how evenly the nodes hold a new table, and once whether a full Redis would lose rows."""
        self.log_spread(table)
        if table.is_truth and not self._has_asked_for_policy:
            self._has_asked_for_policy = True
            self._warn_of_evictions()

    def _warn_of_evictions(self) -> None:
        for policy in self.nodes.topology.eviction_policies():
            advice = "set it to noeviction, or put a persistent_db behind Redis"
            logger.warning("redis: maxmemory-policy is %s, so a full Redis loses rows: %s", policy, advice)

    def log_spread(self, table: "RedisTable") -> None:
        """Log how evenly the nodes hold a table."""
        name, spread = table.spec.name, table.spread()
        if not spread:
            return
        fair_share = self.config.num_partitions / len(spread)
        text = ", ".join(f"{node} holds {count}" for node, count in spread.items())
        if max(spread.values()) > LOPSIDED_RATIO * fair_share:
            logger.warning(
                "%s: one node has far more partitions than the others; raise num_partitions to spread them: %s",
                name,
                text,
            )
        else:
            logger.info("%s: partitions by node: %s", name, text)

    @contextmanager
    def translated(self, table: str) -> Iterator[None]:
        """Raise errors of nodes inside the block as StoreError."""
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
    """Import redis-py, and hiredis, without which redis-py works slowly."""
    try:
        import hiredis  # noqa: F401

        from serving.storage.redis.nodes import RedisNodes
    except ModuleNotFoundError as err:
        raise MissingExtraError(str(err.name), "redis", "a volatile_db of type redis_cluster") from err
    return RedisNodes(config)
