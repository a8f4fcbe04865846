"""What a publisher publishes: rows of tables, in this process or elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from training.processes import Processes
from training.tables.table import EmbeddingTable

PART_KEYS = 65_536
Keys = NDArray[np.int64]


class Part(NamedTuple):
    """Changes of one table.

    Attributes:
        table: its name.
        keys: int64[N].
        rows: float32[N, D]; None: the keys have no row any more.
        step: the last step of the table.
    """

    table: str
    keys: Keys
    rows: NDArray[np.float32] | None
    step: int


@runtime_checkable
class PublishedRows(Protocol):
    """The rows of tables, and what has changed in them since they were published.

    Attributes:
        names: the served names of the tables.
        processes: the processes that have the rows.
    """

    names: tuple[str, ...]
    processes: Processes

    def changed(self) -> Iterator[Part]:
        """Yield the changes. Training must not go on before the last part. ``commit`` says that they are published."""

    def present(self, keys: Mapping[str, Keys]) -> Iterator[Part]:
        """Yield the rows of those keys of each table that have one."""

    def commit(self) -> None:
        """Note that what ``changed`` yielded is published."""

    def commit_all(self) -> None:
        """Note that the present rows are what was published."""

    def close(self) -> None:
        """Note no more changes."""


class TrainedTables:
    """Tables in this process; see ``PublishedRows``."""

    def __init__(self, tables: Mapping[str, EmbeddingTable], processes: Processes) -> None:
        """Take tables by their served names.

        Raises:
            ValueError: a table has a publisher.
        """
        self.names = tuple(tables)
        self.processes = processes
        self._tables = tables
        with ExitStack() as stack:
            self._changes = {}
            for name, table in tables.items():
                self._changes[name] = table.note_changes()
                stack.callback(table.forget_changes)
            self._stack = stack.pop_all()

    def changed(self) -> Iterator[Part]:
        """Yield the changes; see ``PublishedRows``."""
        for name, changes in self._changes.items():
            table = self._tables[name]
            deleted, parts = changes.collect()
            for first in range(0, deleted.size, PART_KEYS):
                yield Part(name, deleted[first : first + PART_KEYS], None, table.step)
            for part in parts:
                yield Part(name, part.keys, table.as_served(part.vectors), table.step)

    def present(self, keys: Mapping[str, Keys]) -> Iterator[Part]:
        """Yield rows; see ``PublishedRows``."""
        for name, of_table in keys.items():
            table = self._tables[name]
            for first in range(0, of_table.size, PART_KEYS):
                rows = table.select(of_table[first : first + PART_KEYS])
                yield Part(name, rows.keys, table.as_served(rows.vectors), table.step)

    def commit(self) -> None:
        """Note what is published; see ``PublishedRows``."""
        for changes in self._changes.values():
            changes.commit()

    def commit_all(self) -> None:
        """Note what is published; see ``PublishedRows``."""
        for changes in self._changes.values():
            changes.commit_all()

    def close(self) -> None:
        """Note no more changes."""
        self._stack.close()
