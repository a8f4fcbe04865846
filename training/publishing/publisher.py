"""``Publisher``: sends the rows that training changes to servers that follow."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from kernels.errors import HotrowError
from serving.errors import ConfigError, OutputError
from serving.model.names import MODEL_NAME, NAME_EXPECTED, TABLE_NAME
from serving.stream import Encoded, MessageEncoder, MessageFormat, WireDtype
from training.embedding.collection import EmbeddingBagCollection
from training.embedding.parameter import TableParameter
from training.model.ctr_model import CtrModel
from training.processes import Processes
from training.publishing.outbox import Outbox
from training.publishing.rows import Part, PublishedRows, TrainedTables
from training.publishing.sender import Sender
from training.tables.table import EmbeddingTable

#: By default, deltas of at most this size wait for a log that is away.
MOST_OUTBOX_BYTES = 8 << 30
_log = logging.getLogger(__name__)


class Publisher:
    """Publishes the changes of a model's tables as messages to an update log.

    Each call of ``publish`` writes a delta into the outbox, and a thread sends it from there. So a log that is away
    does not stop the training, and a crash loses nothing. A training that goes back to a checkpoint calls ``resume``.

    Under torchrun, every process makes the same calls with its own rows. The first process has the outbox and sends.

    Attributes:
        run: the name of the training run, which an exported manifest and the messages have. It stays the same as long
            as the outbox's folder.
        is_new: whether the outbox's folder had no outbox before.
        unsent_deletes: by table, how many keys without a row HPS's format could not delete.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tables: PublishedRows | CtrModel | EmbeddingBagCollection | Mapping[str, EmbeddingTable | TableParameter],
        outbox: str | Path,
        *,
        message_format: MessageFormat = "hotrow",
        rows: WireDtype = "float32",
        key_bytes: int = 8,
        most_outbox_bytes: int = MOST_OUTBOX_BYTES,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Begin to send what an earlier publisher has left in the outbox.

        Args:
            url: the log, see ``serving.stream.open_sink``.
            model: the model's name in the repository.
            tables: what is published: a model, a collection, or tables by their served names. A table of several
                processes is given as its parameter, such as a ``DynamicVariable`` of ``training.sok``. Only one
                publisher can have a table. Rows of other processes are ``PublishedRows``.
            outbox: a folder for this publisher alone. One outbox belongs to one log.
            message_format: ``"hotrow"`` or ``"hps"``, whose messages cannot delete.
            rows: the type of the rows in the messages. HPS's have float32.
            key_bytes: of a key in HPS's messages: 4 for a model with uint32 keys.
            most_outbox_bytes: ``publish`` raises an error when more would wait for the log.
            settings: more settings of the log, such as a password; see ``serving.stream.open_sink``.

        Raises:
            ConfigError: an argument cannot be used, or the outbox is of another model.
            OutputError: the outbox cannot be used.
            MissingExtraError: the log needs a library that is not installed.
            ValueError: a table has a publisher.
        """
        _check_arguments(model, message_format, rows, key_bytes)
        self._rows = _rows_of(tables)
        self._processes = self._rows.processes
        self.unsent_deletes: Counter[str] = Counter()
        self._format = message_format
        self._outbox: Outbox | None = None
        self._encoder: MessageEncoder | None = None
        self._sender: Sender | None = None
        with ExitStack() as stack:
            stack.callback(self._rows.close)
            _check_names(self._rows.names)
            if self._processes.is_first:
                self._outbox = Outbox(outbox, model, most_outbox_bytes)
                stack.callback(self._outbox.close)
                self._encoder = MessageEncoder(
                    model,
                    message_format,
                    rows,
                    key_bytes,
                    self._outbox.run,
                    self._outbox.publisher,
                    self._outbox.sequence,
                )
                self._sender = Sender(url, settings, self._outbox)
            found = (self._outbox.run, self._outbox.is_new) if self._outbox is not None else ("", False)
            self.run, self.is_new = self._processes.from_first("the run", found)
            self._stack = stack.pop_all()

    def publish(self) -> dict[str, int]:
        """Publish the changes since the last call: changed rows, and keys whose rows were replaced by other rows.

        The first call publishes every row. With the update type "Global", every row changes in every step.

        Returns:
            for each table, how many keys the delta has.

        Raises:
            OutputError: the outbox is full or cannot be written. The next call publishes the changes again.
            BadMessageError: a row has a value that the messages cannot hold.
            ModelFileError: a file of the outbox is damaged.
        """
        counts = self._write("changed rows", self._rows.changed())
        self._rows.commit()
        return counts

    def resume(self, step: int) -> dict[str, int]:
        """Publish the present value of every key that was published after a checkpoint; the tables are back at it.

        Args:
            step: of the checkpoint, see ``checkpoint``.

        Returns:
            see ``publish``.

        Raises:
            ConfigError: nothing is known of this checkpoint.
            OutputError: see ``publish``.
        """
        keys, refusal = {}, None
        if self._outbox is not None:
            try:
                keys = self._outbox.keys_since(step)
            except HotrowError as err:
                refusal = err
        keys, text = self._processes.from_first("the published keys", (keys, str(refusal) if refusal else ""))
        if text:
            raise refusal or OutputError(text)
        keys = {table: of_table for table, of_table in keys.items() if table in self._rows.names}
        counts = self._write("rows of published keys", self._rows.present(keys), keys)
        self._rows.commit_all()
        return counts

    @contextmanager
    def checkpoint(self, step: int, keeps: Iterable[int] = ()) -> Iterator[None]:
        """Publish the changes. Inside the block, write a checkpoint that ``resume`` may name later.

        Args:
            step: the name of the checkpoint. A later checkpoint may have the same name, and then it takes its place.
            keeps: the steps of the earlier checkpoints that are still there after the block.

        Raises:
            OutputError: see ``publish``.
        """
        self.publish()
        if self._outbox is not None:
            self._outbox.add_checkpoint(step)
        yield
        if self._outbox is not None:
            self._outbox.keep_checkpoints([step, *keeps])

    @contextmanager
    def moving_rows(self) -> Iterator[None]:
        """Publish the changes. Inside the block, rows may leave the tables and come back, and servers keep them.

        Raises:
            OutputError: see ``publish``.
        """
        self.publish()
        yield
        self._rows.commit_all()

    def flush(self) -> dict[str, str]:
        """Wait until the log has everything that was published. Do not wait for a log that is away.

        Returns:
            for each partition of the log, the position after the last message that the log has confirmed.
        """
        positions: dict[str, str] = {}
        if self._outbox is not None and self._sender is not None:
            if not self._sender.flush():
                _log.warning("%d deltas still wait in the outbox", len(self._outbox.waiting()))
            positions = dict(self._outbox.positions)
        return self._processes.from_first("positions", positions)

    def close(self) -> None:
        """Flush, and release the tables and the outbox. Closing twice is allowed."""
        if self._sender is not None:
            self._sender.flush()
        self._close()

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._stack.close()

    def __enter__(self) -> Self:
        """Return the publisher."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the publisher. After an error, do not wait for the log."""
        if kind is None:
            self.close()
        else:
            self._close()

    def _write(
        self, title: str, parts: Iterator[Part], expected: Mapping[str, NDArray[np.int64]] | None = None
    ) -> dict[str, int]:
        """Write a delta with the parts of all processes. Of the expected keys, those without a row are deleted."""
        stream = self._processes.to_first(title, parts)
        counts: dict[str, int] = {}
        refusal: HotrowError | None = None
        if self._outbox is not None and self._encoder is not None and self._sender is not None:
            keys: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
            try:
                if self._sender.error is not None:
                    raise self._sender.error
                messages = self._messages(stream, keys, expected or {})
                self._outbox.write(messages, keys, self._next_sequence)
                self._sender.wake()
                counts = {name: sum(part.size for part in keys[name]) for name in self._rows.names}
            except HotrowError as err:
                refusal = err
        for _ in stream:  # the others send their rows, and the first process takes the rows that it did not write
            pass
        counts, text = self._processes.from_first("the published rows", (counts, str(refusal) if refusal else ""))
        if text:
            raise refusal or OutputError(text)
        return counts

    def _messages(
        self,
        parts: Iterator[Part],
        keys: dict[str, list[NDArray[np.int64]]],
        expected: Mapping[str, NDArray[np.int64]],
    ) -> Iterator[Encoded]:
        """Yield the messages of the parts, and note their keys."""
        assert self._encoder is not None
        time_ms, step = time.time_ns() // 1_000_000, 0
        for part in parts:
            step = max(step, part.step)
            if part.rows is None:
                yield from self._deletes(part.table, part.keys, keys, step, time_ms)
            elif part.keys.size:
                keys[part.table].append(part.keys)
                yield from self._encoder.upserts(part.table, part.keys, part.rows, step, time_ms)
        for table, of_table in expected.items():
            found = np.concatenate([of_table[:0], *keys[table]])
            yield from self._deletes(table, np.setdiff1d(of_table, found, assume_unique=True), keys, step, time_ms)

    def _deletes(
        self,
        table: str,
        deleted: NDArray[np.int64],
        keys: dict[str, list[NDArray[np.int64]]],
        step: int,
        time_ms: int,
    ) -> Iterator[Encoded]:
        assert self._encoder is not None
        if not deleted.size:
            return
        if self._format == "hps":
            if not self.unsent_deletes[table]:
                _log.warning("table %s: HPS's format cannot delete keys, so servers keep rows that are gone", table)
            self.unsent_deletes[table] += deleted.size
            return
        keys[table].append(deleted)
        yield from self._encoder.deletes(table, deleted, step, time_ms)

    def _next_sequence(self) -> int:
        assert self._encoder is not None
        assert self._encoder.sequence is not None
        return self._encoder.sequence


def _rows_of(tables: Any) -> PublishedRows:
    """Return what is published of a model, a collection or tables.

    Raises:
        ValueError: a table has a publisher.
    """
    return tables if isinstance(tables, PublishedRows) else TrainedTables(*_tables_of(tables))


def _tables_of(tables: Any) -> tuple[dict[str, EmbeddingTable], Processes]:
    """Return the tables by their served names, and the processes that have their rows."""
    if isinstance(tables, CtrModel):
        names = [embedding.table for embedding in tables.graph.embeddings]
        return dict(zip(names, tables.tables, strict=True)), tables.processes
    if isinstance(tables, EmbeddingBagCollection):
        return dict(tables.tables), tables.processes
    named, processes = {}, Processes()
    for name, table in tables.items():
        if isinstance(table, TableParameter):
            processes, table = table.processes, table.table
        named[name] = table
    return named, processes


def _check_names(tables: Iterable[str]) -> None:
    for name in tables:
        if not TABLE_NAME.fullmatch(name):
            expected = "names that begin with a letter, a digit or '_', and also have '.' and '-'"
            raise ConfigError("Publisher", "tables", f"expected {expected}, got {name!r}")


def _check_arguments(model: str, message_format: str, rows: str, key_bytes: int) -> None:
    if not MODEL_NAME.fullmatch(model):
        raise ConfigError("Publisher", "model", f"{NAME_EXPECTED}, got {model!r}")
    choices: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
        ("message_format", message_format, get_args(MessageFormat)),
        ("rows", rows, ("float32",) if message_format == "hps" else get_args(WireDtype)),
        ("key_bytes", key_bytes, (4, 8)),
    )
    for argument, value, values in choices:
        if value not in values:
            raise ConfigError("Publisher", argument, f"expected {' or '.join(map(str, values))}, got {value!r}")
