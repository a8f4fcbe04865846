"""A store as one tier of a parameter server: its settings, its time budget, and whether it answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.errors import StoreError, StoreUnreachableError
from serving.parameter_server.circuit_breaker import CircuitBreaker
from serving.parameter_server.first_rows import FirstRows
from serving.storage import SnapshotStore
from serving.storage.store import LastingStore, Store

if TYPE_CHECKING:
    from serving.parameter_server.tier_table import TierTable


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What a configuration says of a tier in addition to its store.

    Attributes:
        timeout_ms: maximum time that a lookup waits for the tier; None: no limit.
        is_initialized: models' files are loaded into the tier; False: it keeps what it has. RAM then starts empty, and
            a store that outlives the process must have the tables.
        first_rows: which rows of the files a partial cache gets first.
        takes_copies: rows found in slower tiers are copied into this tier, if the server promotes.
    """

    timeout_ms: int | None = None
    is_initialized: bool = True
    first_rows: FirstRows = field(default_factory=FirstRows)
    takes_copies: bool = True


class Tier:
    """One store, and what all its tables share.

    Attributes:
        store: the store.
        name: the store's name.
        depth: counts from the fastest tier, 0.
        settings: the rest of its configuration.
        breaker: ends calls that take too long; None: no call has a limit.
    """

    def __init__(self, store: Store, depth: int, settings: TierSettings) -> None:
        """Assume that ``store`` answers."""
        self.store = store
        self.name = store.name
        self.depth = depth
        self.settings = settings
        self.breaker = None if settings.timeout_ms is None else CircuitBreaker(store.name, settings.timeout_ms)
        self._beats = 0

    @property
    def is_volatile(self) -> bool:
        """Whether the rows are in this process's memory only."""
        return not isinstance(self.store, LastingStore | SnapshotStore)

    def watch(self, tables: Sequence["TierTable"], *, is_beat: bool) -> None:
        """Probe the silent tables of this tier and, if ``is_beat``, one more table in turn. Probes are not counted.

        So outages begin and end without requests. A tier that cannot be reached is asked once.
        """
        usable = [table for table in tables if table.is_asked]  # a refill ends other outages
        asked = [table for table in usable if table.is_failing]
        if is_beat and usable:
            self._beats += 1
            asked.append(usable[self._beats % len(usable)])
        for table in asked:
            try:
                table.probe()
            except StoreUnreachableError as err:
                for other in usable:
                    other.fell_silent(err)
                return
            except StoreError as err:
                table.fell_silent(err)

    def close(self) -> None:
        """Close the store."""
        if self.breaker is not None:
            self.breaker.close()
        self.store.close()
