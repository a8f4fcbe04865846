"""How a durable store gets a table: from the model's files or, before a durable one that has changed, from that."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

import numpy as np

from serving.config import ModelConfig, TableConfig
from serving.errors import StoreError
from serving.model.sparse_file import SparseModel
from serving.parameter_server.changes import Changes
from serving.parameter_server.rows_beside_changes import rows_beside_changes
from serving.parameter_server.seals import is_of_another_state, put_seal
from serving.parameter_server.table_files import open_table_file
from serving.storage.row_dtype import may_be_copied
from serving.storage.store import (
    CHANGED,
    DurableStore,
    FollowingStore,
    ForgetfulStore,
    Keys,
    ReservingStore,
    SourceStore,
    Store,
    TableSpec,
    Vectors,
    WitnessStore,
    files_of,
    has_rows_of,
)

logger = logging.getLogger(__name__)

LOAD_BATCH_ROWS = 65536


@dataclass(frozen=True, slots=True)
class TableSource:
    """One table and the file its rows come from."""

    spec: TableSpec
    model: SparseModel


def table_source(config: ModelConfig, table: TableConfig) -> TableSource:
    """What is to be loaded for ``table``.

    Raises:
        ModelFileError: its file is missing or is not such a model.
    """
    return TableSource(table_spec(config, table), open_table_file(config, table))


def table_spec(config: ModelConfig, table: TableConfig) -> TableSpec:
    """What stores must know of ``table``."""
    key_bytes: Literal[4, 8] = 8 if config.key_type == "I64" else 4
    return TableSpec(config.full_name(table), table.dim, key_bytes, table.row_dtype)


class CacheLoad:
    """The load of a table into a durable store before the slowest.

    Attributes:
        store: which is given the table.
        source: the table.
        slowest: the store that has all of its rows already.
    """

    def __init__(
        self, store: DurableStore, source: TableSource, slowest: DurableStore | SourceStore, kept: Sequence[Store]
    ) -> None:
        """Take who gives and who gets; stores that are ``kept`` keep what they have. Nothing is loaded yet."""
        self.store = store
        self.source = source
        self.slowest = slowest
        self._kept = kept
        self._files = files_of(self._record())
        self._is_behind = isinstance(slowest, WitnessStore) and slowest.others_are_behind(source.spec.name)

    @property
    def can_refill(self) -> bool:
        """Whether the store tells what it has lost, and is to be given it again."""
        return isinstance(self.store, ForgetfulStore) and self.store not in self._kept

    def run(self, check: Callable[[], None] = lambda: None) -> None:
        """Load the table, unless the store has it already, with the rows of ``slowest``, the files' if it has those.

        A store that a process has left without a change which ``slowest`` took is loaded, whatever its record says, and
        so is one that goes with another state of ``slowest``, which was put back from a copy say.

        Args:
            check: called before each batch of rows; raises where the load is to end.

        Raises:
            StoreError: a store does not answer, or does not take the rows.
            ModelFileError: a file is damaged.
        """
        name = self.source.spec.name
        if self.store in self._kept:
            self.store.open_table(self.source.spec, self.source.model.rows)
            return
        is_of_another = is_of_another_state(self.store, self.slowest, name)
        if is_of_another:
            reason = f"{self.store.name} and {self.slowest.name} are not of one state, one was put back from a copy"
            logger.warning("%s: %s: %s is loaded anew", name, reason, self.store.name)
        is_behind, record = self._is_behind or is_of_another, self._record()
        truth = truth_of(self.slowest, self.source, self._kept)
        load_durable(self.store, self.source, record, truth, check, is_behind=is_behind)
        put_seal(self.store, self.slowest, name)
        if is_behind and isinstance(self.slowest, WitnessStore):
            self.slowest.note_others(name, are_behind=False)
        if self.store.loaded_from(name) not in (None, record):
            reason = f"{self.store.name} has changes that {self.slowest.name} has not: those of a process with a"
            logger.warning("%s: %s database of its own, or this one's were removed", name, reason)

    def refill(self, changes: Changes, check: Callable[[], None]) -> bool:
        """Bring back what the store has lost of the table since it was loaded, if it ``can_refill``.

        Args:
            changes: the table's; changes go on beside, but for the time of a batch.
            check: see ``run``.

        Returns:
            whether it had lost any.

        Raises:
            StoreError: a store does not answer, or does not take the rows, or it is to be tried again later.
            ModelFileError: a file is damaged.
        """
        if not isinstance(self.store, ForgetfulStore):
            return False
        name, record = self.source.spec.name, self._record()
        with ExitStack() as until_taken:
            walk = rows_beside_changes(self._rows_of_slowest(), self._read_slowest, changes, check, until_taken)
            # Closed, it gives the lock back, and listens no more, though it is not at its end.
            has_lost = self.store.refill(name, until_taken.enter_context(closing(walk)), record)
            if has_lost and self._record() != record:  # the first change ever came meanwhile
                self.store.mark_changed(name)
            if has_lost:
                put_seal(self.store, self.slowest, name)
        return has_lost

    def check_files(self) -> None:
        """Check that the stores answer, and that nobody has loaded the table into them from other files meanwhile.

        Raises:
            StoreError: one does not, or somebody has.
        """
        held = self.store.loaded_from(self.source.spec.name)
        if held is not None and self.store not in self._kept:
            self._check(self.store, held)
        self._check(self.slowest, self._record())

    def _check(self, store: Store, record: str) -> None:
        if files_of(record) != self._files:
            reason = f"was loaded from other files, {files_of(record)}, expected {self._files}"
            advice = "load the model again to have them replaced"
            raise StoreError(store.name, self.source.spec.name, f"{reason}: {advice}")

    def _rows_of_slowest(self) -> Iterator[tuple[Keys, Vectors]]:
        """All rows as they are now, or none, where they would be rounded twice; the files may be gone by now."""
        if isinstance(self.slowest, FollowingStore):
            self.slowest.catch_up()
            self._check(self.slowest, self._record())
        if may_be_copied(self.slowest, self.source.spec.row_dtype):
            yield from self.slowest.items(self.source.spec.name, LOAD_BATCH_ROWS)
        elif truth_of(self.slowest, self.source, self._kept) is None:
            yield from self.source.model.batches(LOAD_BATCH_ROWS)

    def _read_slowest(self, keys: Keys) -> tuple[Keys, Vectors]:
        """Those of ``keys`` that have rows now, and these; none, where they would be rounded twice."""
        rows = np.empty((keys.size, self.source.spec.dim), dtype=np.float32)
        if not may_be_copied(self.slowest, self.source.spec.row_dtype):
            return keys[:0], rows[:0]
        found = self.slowest.fetch(self.source.spec.name, keys, rows)
        return keys[found], rows[found]

    def _record(self) -> str:
        if not isinstance(self.slowest, DurableStore):
            return self.source.model.digest()
        # Of rows that came without a load all that can be told is that they are not the files'.
        return self.slowest.loaded_from(self.source.spec.name) or self.source.model.digest() + CHANGED


def load_durable(
    store: DurableStore,
    source: TableSource,
    wanted: str,
    truth: DurableStore | None = None,
    check: Callable[[], None] = lambda: None,
    *,
    is_behind: bool = False,
) -> None:
    """Load the rows of ``truth``, or the files', with the record ``wanted``, unless it has that, or it and changes.

    One that ``is_behind`` is loaded all the same. Rows that would be rounded twice are left out.
    """
    name, may_fill = source.spec.name, may_fill_others(truth, source.spec)
    if isinstance(store, ReservingStore):
        store.reserve(source.spec, source.model.rows)
    record = None if is_behind else store.loaded_from(name)
    if has_rows_of(record, wanted):
        store.open_table(source.spec, source.model.rows)
        return
    announce(source, store)
    batches: Iterator[tuple[Keys, Vectors]] = iter(())
    if truth is None:
        # Every key of the files is checked here, before the old rows are touched.
        batches = source.model.batches(LOAD_BATCH_ROWS)
    elif may_fill:
        if isinstance(store, ReservingStore):  # not before: every row is read once more
            store.reserve(source.spec, max(source.model.rows, truth.count(name)))
        batches = truth.items(name, LOAD_BATCH_ROWS)
    store.bulk_load(source.spec, _checked(batches, check), wanted, unless_loaded=not is_behind)


def announce(source: TableSource, store: Store) -> None:
    """Log that a load begins."""
    logger.info("loading %s, %s rows, into %s", source.spec.name, f"{source.model.rows:,}", store.name)


def truth_of(slowest: DurableStore | SourceStore, source: TableSource, kept: Sequence[Store]) -> DurableStore | None:
    """``slowest``, once it is loaded, where it has other rows than the files; None where theirs are right."""
    if not isinstance(slowest, DurableStore):
        return None
    record = slowest.loaded_from(source.spec.name)
    has_changed = record is not None and record.endswith(CHANGED)  # rows came into it that are not the files'
    return slowest if slowest in kept or has_changed else None


def may_fill_others(truth: Store | None, spec: TableSpec) -> bool:
    """Whether faster stores can be filled from the store that has the rows, or, if it is None, from the files."""
    if truth is None or may_be_copied(truth, spec.row_dtype):
        return True
    reason = f"its {spec.row_dtype} rows would be rounded twice"
    logger.warning("%s is served from %s alone: in a faster tier %s", spec.name, truth.name, reason)
    return False


def _checked(batches: Iterator[tuple[Keys, Vectors]], check: Callable[[], None]) -> Iterator[tuple[Keys, Vectors]]:
    for batch in batches:
        check()
        yield batch
