"""Tables that a tier could not be given when their model was loaded, or has lost rows of: it gets them later."""

import logging
import threading
from collections.abc import Iterable
from time import monotonic as now_s

from kernels.errors import HotrowError
from serving.errors import StoreError, StoreUnreachableError, told
from serving.parameter_server.durable_load import CacheLoad
from serving.parameter_server.served_table import ServedTable
from serving.parameter_server.tier import Tier

logger = logging.getLogger(__name__)

# How long a tier is left alone after an attempt: doubled from the first to the second.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
# Rows that are lost again and again, to a server that evicts them say, are brought back a tenth of the time at most.
REST_RATIO = 9.0


class LateTable:
    """A table that a tier is to be given, which counts as not answering about it until then.

    Attributes:
        tier: the tier.
        held: the table.
    """

    def __init__(self, tier: Tier, held: ServedTable, load: CacheLoad) -> None:
        """Take what loads the table."""
        self.tier = tier
        self.held = held
        self._load = load
        self._is_cancelled = threading.Event()
        self._loading = threading.Lock()  # held while rows are given to the tier
        self._told = ""

    def try_to_load(self) -> bool:
        """Load the table, if the tier can be reached; whether it has it now, or need not have it any more."""
        try:
            self._load.check_files()  # before the lock: who unloads it does not wait for a tier that keeps silent
            with self._loading:
                self._check_wanted()
                self._run()
                return True
        except HotrowError as err:
            with self.held.changes.lock:
                if self.held.changes.is_gone or self._is_cancelled.is_set():
                    return True
                self._failed(err)
            self._tell(err)
        return False

    @property
    def is_due(self) -> bool:
        """Whether it is time to try."""
        return True

    def cancel(self) -> None:
        """Let it be; a load under way ends before its next batch of rows."""
        self._is_cancelled.set()

    def wait(self) -> None:
        """Wait until no load is under way."""
        with self._loading:
            pass

    def _run(self) -> None:
        # Changes are refused until it has been loaded, so the rows stay as they are.
        self._load.run(self._check_wanted)
        self.tier.was_loaded(self.held.name)

    def _failed(self, error: HotrowError) -> None:
        # Another tier's fault, of that which it would be filled from, is told with that tier's name.
        reason = error.reason if isinstance(error, StoreError) and error.store == self.tier.name else str(error)
        self.tier.missed_load(self.held.name, reason)

    def _check_wanted(self) -> None:
        if self._is_cancelled.is_set() or self.held.changes.is_gone:
            raise StoreError(self.tier.name, self.held.name, "is not to be loaded any more")

    def _tell(self, error: HotrowError) -> None:
        """Log, once, what no waiting mends; that the tier could not be reached was logged at the start."""
        if not isinstance(error, StoreUnreachableError) and self._told != told(error):
            self._told = told(error)
            logger.warning("not loaded: %s", self._told)


class LostTable(LateTable):
    """A table of which a tier has lost rows: it answers about the others, or fails, and takes changes all the while."""

    _rests_until_s = 0.0
    _is_told = False

    @property
    def is_due(self) -> bool:
        """See ``LateTable.is_due``."""
        return now_s() >= self._rests_until_s

    def _run(self) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning("tier %s has lost rows of table %r: they are brought back", self.tier.name, self.held.name)
        began = now_s()
        if self._load.refill(self.held.changes, self._check_wanted):
            self.tier.was_refilled(self.held)
        self._rests_until_s = now_s() + max(REST_RATIO * (now_s() - began), LONGEST_PAUSE_S)
        self._is_told = False
        logger.warning("tier %s has all rows again, table %r", self.tier.name, self.held.name)

    def _failed(self, error: HotrowError) -> None:
        """Nothing more is lost by that."""


class LateTables:
    """Those tables, and one thread that tries again and again; there is none while there are no such tables.

    Every method may be called from any thread.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._condition = threading.Condition()  # guards the fields below
        self._tables: list[LateTable] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, tables: Iterable[LateTable]) -> None:
        """Have ``tables`` loaded as soon as can be, if they are not waiting for that already."""
        with self._condition:
            if self._is_closed:
                return
            self._tables += [table for table in tables if table not in self._tables]
            if self._tables and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hotrow-late-tables", daemon=True)
                self._thread.start()

    def forget(self, held: Iterable[ServedTable]) -> None:
        """Load these tables no more, and return when no load of theirs is under way, which is soon."""
        gone = set(held)
        with self._condition:
            cancelled = [table for table in self._tables if table.held in gone]
            for table in cancelled:
                table.cancel()
            self._tables = [table for table in self._tables if table.held not in gone]
            self._condition.notify_all()
        for table in cancelled:
            table.wait()

    def close(self) -> None:
        """Load none any more, and return when the thread has ended."""
        with self._condition:
            self._is_closed = True
            thread, tables = self._thread, [table.held for table in self._tables]
        self.forget(tables)
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while tables := self._waiting(pause_s):
            loaded = {table for table in tables if table.is_due and self._is_loaded(table)}
            with self._condition:
                self._tables = [table for table in self._tables if table not in loaded]
            pause_s = FIRST_PAUSE_S if loaded else min(2 * pause_s, LONGEST_PAUSE_S)

    def _is_loaded(self, table: LateTable) -> bool:
        try:
            return table.try_to_load()
        except Exception:  # a thread's top: the tier is passed over, the next tables are tried
            logger.exception("%s was not loaded into %s", table.held.name, table.tier.name)
            return False

    def _waiting(self, pause_s: float) -> list[LateTable]:
        """The tables after a pause; none where the thread is to end."""
        with self._condition:
            self._condition.wait_for(lambda: not self._tables, pause_s)
            if not self._tables:
                self._thread = None
            return list(self._tables)
