"""Read recorded traffic: the keys that were looked up in each table, in order.

==========  ==========================================================================================================
``.npy``    integers [N], the keys of one table: the table that ``table`` names, the model's only table, or the table
            that has the file's name
``.npz``    one such array per table, by its name; or a request's ``CATCOLUMN`` and ``ROWINDEX``, [n] or [1, n], or
            [Q, n] for Q requests of equal size. ``DES`` is ignored
``.json``   one request in the form of ``POST /predict/<model>``
``.jsonl``  one such request per line, or one record of ``hotrow serve --record`` per line
==========  ==========================================================================================================

Requests are read by the code that serves them, so their keys go to the same tables in the same order. The number of
samples of a request is not limited.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.arrays import flat_integers
from serving.batch import INT32_MAX, Batch
from serving.config import ModelConfig
from serving.errors import RequestError, TraceError
from serving.model.data_files import list_data_files
from serving.model.names import DENSE, KEYS, ROW_PTRS
from serving.model.numpy_faults import UNREADABLE, unreadable
from serving.model.sparse_rows import key_range
from serving.protocol.document import parse_document
from serving.protocol.recorded import LOOKUPS, decode_lookups, is_cut_off, model_of_lookups
from serving.protocol.samples import read_samples
from serving.reading import read_batch

Keys = NDArray[np.int64]
#: The keys by full table name, in the order of the lookups.
Trace = Mapping[str, Keys]
_Named = Iterator[tuple[str, Keys]]
_MOST_SMALL_PARTS = 4096
_SUFFIXES = (".npy", ".npz", ".json", ".jsonl")

_log = logging.getLogger(__name__)


def read_trace(paths: Sequence[Path], models: Sequence[ModelConfig], table: str = "") -> Trace:
    """Read files as one trace. The data files of a folder are read in the order of their names.

    Args:
        paths: files and folders, in the order of the traffic.
        models: the models that were looked up. Requests do not name their model, so they need exactly one model.
        table: the table of ``.npy`` files, by its full name, or by its name if only one model has the name.

    Returns:
        int64[N] by full table name, for the tables that were looked up.

    Raises:
        TraceError: a file does not have the format that its name says, or does not fit the models, or there is no key.
            The message names the file and the position in it.
    """
    reader = _Reader(models, table)
    parts: defaultdict[str, _Parts] = defaultdict(_Parts)
    for file in _files(paths):
        for name, keys in reader.read(file):
            parts[name].append(keys)
    trace = {name: of_table.joined() for name, of_table in parts.items()}
    if not any(keys.size for keys in trace.values()):
        others = ", ".join(repr(name[:64]) for name in sorted(reader.other_models))
        reason = f"the trace has no keys of these models, only keys of {others}" if others else "the trace has no keys"
        raise TraceError(", ".join(map(str, paths)), reason)
    return trace


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise TraceError(str(path), "no such file or folder")
        if not path.is_dir():
            yield path
            continue
        try:
            found = list_data_files(path, _SUFFIXES)
        except OSError as err:
            raise TraceError(str(path), f"cannot be read: {err.strerror or err}") from err
        if not found.files:
            raise TraceError(str(path), f"the folder has no trace: {found}")
        if found.left_out:
            _log.warning("%s: %s", path, found)
        yield from found.files


class _Parts:
    """Keys of one table, piece by piece. Small pieces are joined early, because a million arrays take gigabytes."""

    def __init__(self) -> None:
        self._joined: list[Keys] = []
        self._small: list[Keys] = []

    def append(self, keys: Keys) -> None:
        self._small.append(keys)
        if len(self._small) == _MOST_SMALL_PARTS:
            self._joined.append(np.concatenate(self._small))
            self._small = []

    def joined(self) -> Keys:
        """Return all keys in order."""
        return np.concatenate([*self._joined, *self._small])


class _Reader:
    """Reads the files of a trace, one after the other.

    Attributes:
        other_models: the models whose records were skipped.
    """

    def __init__(self, models: Sequence[ModelConfig], table: str) -> None:
        self._models = models
        self.other_models: set[str] = set()
        self._owners = {config.hps_name(table): config for config in models for table in config.tables}
        self._table = self._find(table, "--table") if table else ""
        self._forms: dict[str, Callable[[Path], _Named]] = {
            ".npy": self._array,
            ".npz": self._arrays,
            ".json": self._document,
            ".jsonl": self._lines,
        }

    def read(self, file: Path) -> _Named:
        """Yield every array of keys in ``file``, with the full name of its table."""
        form = self._forms.get(file.suffix)
        if form is None:
            raise TraceError(str(file), f"expected a file that ends in {', '.join(self._forms)}")
        if file.exists() and not file.is_file():  # reading a pipe would block
            raise TraceError(str(file), "not a regular file")
        return form(file)

    def _array(self, file: Path) -> _Named:
        name = self._table or (next(iter(self._owners)) if len(self._owners) == 1 else self._find(file.stem, str(file)))
        array = _load(file)
        if isinstance(array, dict):
            raise TraceError(str(file), "holds an archive of arrays: rename it to .npz")
        yield name, self._table_keys(array, name, str(file))

    def _arrays(self, file: Path) -> _Named:
        arrays = _load(file)
        if not isinstance(arrays, dict):
            raise TraceError(str(file), "holds one array without a name: rename it to .npy")
        if not arrays.keys() & {DENSE, KEYS, ROW_PTRS}:
            for name, array in arrays.items():
                table = self._find(name, str(file))
                yield table, self._table_keys(array, table, f"{file}: {name}")
            return
        unknown = sorted(arrays.keys() - {DENSE, KEYS, ROW_PTRS})
        if unknown or not {KEYS, ROW_PTRS} <= arrays.keys():
            found = ", ".join(repr(name[:64]) for name in sorted(arrays))
            raise TraceError(str(file), f"expected {KEYS} and {ROW_PTRS}, with or without {DENSE}, found {found}")
        yield from self._tensors(_requests(arrays[KEYS]), _requests(arrays[ROW_PTRS]), file)

    def _tensors(self, keys: NDArray[Any], row_ptrs: NDArray[Any], file: Path) -> _Named:
        config = self._only_model(str(file))
        if len(keys) != len(row_ptrs):
            raise TraceError(str(file), f"{KEYS} has {len(keys):,} requests, but {ROW_PTRS} has {len(row_ptrs):,}")
        without_dense = _without_limits(config).model_copy(update={"dense_dim": 0})
        for number, (request_keys, request_ptrs) in enumerate(zip(keys, row_ptrs, strict=True)):
            where = str(file) if len(keys) == 1 else f"{file}: request {number}"
            try:
                batch = read_batch(without_dense, None, request_keys, request_ptrs)
            except RequestError as err:
                raise TraceError(where, str(err)) from err
            yield from _by_table(config, batch)

    def _document(self, file: Path) -> _Named:
        try:
            body = file.read_bytes()
        except OSError as err:
            raise TraceError(str(file), f"cannot be read: {err.strerror}") from err
        yield from self._line(body, str(file))

    def _lines(self, file: Path) -> _Named:
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip() and not is_cut_off(line):
                        yield from self._line(line, f"{file}: line {number}")
        except OSError as err:
            raise TraceError(str(file), f"cannot be read: {err.strerror}") from err

    def _line(self, line: bytes, where: str) -> _Named:
        try:
            document = parse_document(line, None, "the text")
            if LOOKUPS in document:
                yield from self._record(document, where)
                return
            config = self._only_model(where)
            batch = read_samples(document, _without_limits(config))
        except RequestError as err:
            raise TraceError(where, str(err)) from err
        yield from _by_table(config, batch)

    def _record(self, document: dict[str, Any], where: str) -> _Named:
        name = model_of_lookups(document)
        config = next((model for model in self._models if model.name == name), None)
        if config is None:  # a server records all of its models in one file
            self.other_models.add(name)
            return
        for table, keys in decode_lookups(document, config):
            full_name = config.hps_name(table)
            yield full_name, self._table_keys(keys, full_name, where)

    def _only_model(self, where: str) -> ModelConfig:
        if len(self._models) != 1:
            names = ", ".join(repr(config.name) for config in self._models)
            raise TraceError(where, f"requests do not name their model; say which with --model: {names}")
        return self._models[0]

    def _find(self, name: str, where: str) -> str:
        """Return the full name of the table called ``name``."""
        if name in self._owners:
            return name
        called_so = [full for full, config in self._owners.items() if full == f"{config.name}.{name}"]
        if len(called_so) == 1:
            return called_so[0]
        problem = "several models have" if called_so else "no model has"
        expected = ", ".join(repr(full) for full in self._owners)
        raise TraceError(where, f"{problem} a table {name[:64]!r}; expected one of {expected}")

    def _table_keys(self, array: Any, table: str, where: str) -> Keys:
        try:
            keys = flat_integers(array, "keys")
        except RequestError as err:
            raise TraceError(where, str(err)) from err
        smallest, largest = key_range(self._owners[table].key_type)
        wrong = (keys < smallest) | (keys > largest)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise TraceError(where, f"{keys[at]} at position {at}: expected a key in {smallest}..{largest}")
        return keys


def _without_limits(config: ModelConfig) -> ModelConfig:
    """Return the model without a limit on the samples of a request."""
    return config.model_copy(update={"max_batchsize": INT32_MAX})


def _by_table(config: ModelConfig, batch: Batch) -> _Named:
    for table, lookups in zip(config.tables, batch.tables, strict=True):
        yield config.hps_name(table), lookups.keys


def _requests(array: NDArray[Any]) -> NDArray[Any]:
    """Return one request per row; an array of one dimension is one request."""
    return array if array.ndim == 2 else array[np.newaxis]


def _load(file: Path) -> Any:
    """Return the array in an .npy file, or the dict of arrays in an .npz file."""
    try:
        with file.open("rb") as opened:  # NumPy does not close a damaged archive that it opened
            loaded = np.load(opened, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                return loaded
            with loaded:
                return {name: loaded[name] for name in loaded.files}
    except OSError as err:
        raise TraceError(str(file), f"cannot be read: {err.strerror or err}") from err
    except (MemoryError, *UNREADABLE) as err:
        raise TraceError(str(file), unreadable(file, "a NumPy file of numbers", err)) from err
