"""Tables that are larger than memory: each pass trains the rows of its keys, and the other rows are on disk."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kernels.host import KeyIndex
from serving.errors import ConfigError, MissingExtraError, ModelFileError
from serving.model.atomic import temporary_directory
from training.data.keyset import read_keyset
from training.errors import DataError
from training.model.ctr_model import CtrModel
from training.publishing import Publisher
from training.row_file import TableRows
from training.samples import Bags
from training.tables.table import EmbeddingTable

_CHUNK_ROWS = 65_536
_ROW_FIELDS = [("last_step", "<i8"), ("slot_id", "<u8")]
FileName = str | PathLike[str]


class ModelOversubscriber:
    """Keeps all rows of a model's tables in a folder, and in the tables only those of a keyset. Not thread-safe.

    The folder is temporary: it is deleted with the object. If the process was killed, the next object deletes it. Each
    table has a RocksDB in the folder. A key is an int64, and a value is a row with its states, last step and slot.

    Attributes:
        publisher: publishes the rows that changed before they leave the tables; None: nothing does.
    """

    def __init__(self, model: CtrModel, folder: FileName, key_dtype: DTypeLike) -> None:
        """Make a temporary folder in ``folder``.

        Raises:
            MissingExtraError: rocksdict is not installed.
            ConfigError: the folder cannot be written.
        """
        self._model = model
        self._key_dtype = key_dtype
        self._stores: list[_RowStore] = []
        at_end = ExitStack()
        try:
            path = at_end.enter_context(temporary_directory(Path(folder, "hotrow-tables")))
        except OSError as err:
            reason = f"{folder}: no folder can be made there: {err.strerror}"
            raise ConfigError("Session", "temp_embedding_dir", reason) from err
        at_end.callback(_close, self._stores)
        weakref.finalize(self, at_end.close)
        for t, table in enumerate(model.tables):
            self._stores.append(_RowStore(Path(path, str(t)), table))
        self._keysets: list[KeyIndex] | None = None
        self.publisher: Publisher | None = None

    def update(
        self,
        keyset_file: FileName | Sequence[FileName] | None = None,
        *,
        keyset_file_list: Sequence[FileName] | None = None,
    ) -> None:
        """Write the tables to disk, and read the rows of the keysets into them.

        Until the next call, training may use only keys of the keysets. A key without a row gets one in training.

        Args:
            keyset_file: one file for all tables, or a list with a file for each table. A file has unique keys, uint32
                or int64 as in the training data, and nothing else.
            keyset_file_list: the list of files, in place of ``keyset_file``.

        Raises:
            ConfigError: the list has another length than the tables, or both arguments or none are given.
            DataError: a file is missing or cut short. The tables did not change.
            ModelFileError: the disk refuses.
            OutputError: changed rows cannot be published; see ``Publisher.publish``.
        """
        tables = self._model.tables
        if (keyset_file is None) == (keyset_file_list is None):
            reason = f"expected either keyset_file or keyset_file_list, got {'none' if keyset_file is None else 'both'}"
            raise ConfigError("ModelOversubscriber.update", "", reason)
        if keyset_file is None:
            keyset_file = keyset_file_list
        assert keyset_file is not None
        files = [keyset_file] * len(tables) if isinstance(keyset_file, str | PathLike) else list(keyset_file)
        if len(files) != len(tables):
            reason = f"expected one file for each of the {len(tables)} tables, got {len(files)}"
            raise ConfigError("ModelOversubscriber.update", "keyset_file", reason)
        keysets = [read_keyset(Path(file), self._key_dtype) for file in files]
        self.write_back()
        with nullcontext() if self.publisher is None else self.publisher.moving_rows():
            self._load(keysets)

    def _load(self, keysets: Sequence[NDArray[np.int64]]) -> None:
        self._keysets = []
        for table, store, keys in zip(self._model.tables, self._stores, keysets, strict=True):
            table.clear()
            for first in range(0, len(keys), _CHUNK_ROWS):
                table.load(store.read(keys[first : first + _CHUNK_ROWS]))
            keyset = KeyIndex()
            keyset.find_or_insert(keys)
            self._keysets.append(keyset)

    def check_keys(self, bags: Sequence[Bags], source: str | None) -> None:
        """Raise DataError for a key outside the keysets: its new row would replace the trained one on disk."""
        if self._keysets is None:
            return
        for table, part, keyset in zip(self._model.graph.embeddings, bags, self._keysets, strict=True):
            places = keyset.find(part.keys)
            if (places < 0).any():
                key = part.keys[int(np.argmax(places < 0))]
                raise DataError(source, f"key {key} of table {table.table} is not in the keyset of the last update")

    def tables_of(self, bags: Sequence[Bags]) -> list[EmbeddingTable]:
        """Return tables with those rows of a batch that training has made, wherever they are."""
        return [
            _table_of(table, store, np.unique(part.keys))
            for table, store, part in zip(self._model.tables, self._stores, bags, strict=True)
        ]

    def add(self, table: int, rows: TableRows) -> None:
        """Write rows of a table to disk."""
        self._stores[table].write(rows)

    def write_back(self) -> None:
        """Write all rows of the tables to disk. The tables do not change."""
        for table, store in zip(self._model.tables, self._stores, strict=True):
            for part in table.dump():
                store.write(part)

    def rows(self, table: int) -> Iterator[TableRows]:
        """Yield all rows of a table on disk, part by part, in the order of RocksDB."""
        return self._stores[table].all()


def _close(stores: list["_RowStore"]) -> None:
    for store in stores:
        store.close()


def _table_of(table: EmbeddingTable, store: "_RowStore", keys: NDArray[np.int64]) -> EmbeddingTable:
    scratch = table.empty_copy()
    scratch.load(store.read(keys))
    scratch.load(table.select(keys))
    return scratch


class _RowStore:
    """The rows of one table in a RocksDB of its own."""

    def __init__(self, path: Path, table: EmbeddingTable) -> None:
        try:
            import rocksdict
        except ImportError as err:
            raise MissingExtraError("rocksdict", "rocksdb", "use_model_oversubscriber") from err
        self._path = path
        self._rocksdict: Any = rocksdict
        floats = [("vector", "<f4", (table.config.dim,)), ("states", "<f4", table.native.first_states.shape)]
        self._dtype = np.dtype([*_ROW_FIELDS, *floats])
        with self._errors():
            self._rows = rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))

    def write(self, rows: TableRows) -> None:
        for first in range(0, len(rows), _CHUNK_ROWS):
            chunk = rows[first : first + _CHUNK_ROWS]
            values = np.empty(len(chunk), self._dtype)
            values["last_step"], values["slot_id"] = chunk.last_steps, chunk.slot_ids
            values["vector"], values["states"] = chunk.vectors, chunk.states
            batch = self._rocksdict.WriteBatch(raw_mode=True)
            for key, value in zip(_cut(chunk.keys.astype("<i8")), _cut(values), strict=True):
                batch.put(key, value)
            with self._errors():
                self._rows.write(batch)

    def read(self, keys: NDArray[np.int64]) -> TableRows:
        """Return the rows that exist."""
        with self._errors():
            values = self._rows.get(list(_cut(keys.astype("<i8"))))
        found = [index for index, value in enumerate(values) if value is not None]
        return self._decoded(keys[found], b"".join(values[index] for index in found))

    def all(self) -> Iterator[TableRows]:
        keys, values = bytearray(), bytearray()
        with self._errors():
            for key, value in self._rows.items():
                keys += key
                values += value
                if len(keys) == 8 * _CHUNK_ROWS:
                    yield self._decoded(np.frombuffer(bytes(keys), "<i8").astype(np.int64), bytes(values))
                    keys, values = bytearray(), bytearray()
        yield self._decoded(np.frombuffer(bytes(keys), "<i8").astype(np.int64), bytes(values))

    def close(self) -> None:
        self._rows.close()

    def _decoded(self, keys: NDArray[np.int64], data: bytes) -> TableRows:
        values = np.frombuffer(data, self._dtype)
        vectors, states = values["vector"].astype(np.float32), values["states"].astype(np.float32)
        return TableRows(
            keys, vectors, states, values["last_step"].astype(np.int64), values["slot_id"].astype(np.uint64)
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise ModelFileError for what rocksdict raises, which is a plain Exception."""
        try:
            yield
        except (ModelFileError, GeneratorExit):
            raise
        except Exception as err:
            raise ModelFileError(self._path, f"RocksDB: {err}") from err


def _cut(rows: NDArray[Any]) -> Iterator[bytes]:
    """Yield the bytes of each row."""
    data, size = rows.tobytes(), rows.dtype.itemsize
    return (data[begin : begin + size] for begin in range(0, len(data), size))
