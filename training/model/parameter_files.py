"""The files of a session's parameters: HugeCTR's models, and the states of the optimizer.

- dense model and sparse models: HugeCTR's formats; see ``serving.model.dense_file`` and ``serving.model.sparse_file``.
  A sparse model is a single file.
- dense states: for each state of the optimizer, the float32 states of all dense weights, in the order of the dense
  model, as in HugeCTR (v3.0 to v24.06). A file ``<dense states>.json`` next to it has the optimizer's name and the
  number of steps, which HugeCTR does not store.
- sparse states: Hotrow's own format, because HugeCTR's depends on its GPUs. One packed row for each row of the sparse
  model, in the same order: int64 key, int64 step of the last update, float32[S] with all states. All little-endian.

The files of states are empty if the optimizer has no states. Every file is complete or absent.
"""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError, ModelFileError
from serving.model.atomic import atomic_write
from serving.model.dense_file import Weights, weight_key
from serving.model.graph import Embedding, Graph
from serving.model.sparse_file import KeyType, open_sparse
from serving.model.sparse_rows import refuse_repeated_keys, row_dtype
from serving.model.strict_json import Fields, read_json
from training.embedding.table import EmbeddingTable, TableRows

_CHUNK_ROWS = 65_536


def write_dense_states(path: Path, graph: Graph, states: Iterable[Weights], optimizer: str, step: int) -> None:
    """Write the states of the dense weights, and the file with the optimizer's name and the number of steps.

    Raises:
        ModelFileError: the disk refuses.
    """
    with _written(_steps_path(path)) as file:
        file.write(json.dumps({"optimizer": optimizer, "step": step}).encode() + b"\n")
    with _written(path) as file:
        for state in states:
            for spec in graph.weights:
                file.write(np.ascontiguousarray(state[weight_key(spec)], dtype="<f4").tobytes())


def read_dense_states(path: Path, graph: Graph, states: Iterable[Weights], optimizer: str) -> int:
    """Fill the states of the dense weights, and return the number of steps.

    The number is 0 if there is no file with it, so HugeCTR's files can be read.

    Raises:
        ModelFileError: a file is missing or of another size, or the states are those of another optimizer.
    """
    states = list(states)
    expected_bytes = 4 * len(states) * sum(math.prod(spec.shape) for spec in graph.weights)
    try:
        data = path.read_bytes()
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err
    if len(data) != expected_bytes:
        reason = f"expected {expected_bytes:,} bytes, {len(states)} states of {optimizer}, found {len(data):,} bytes"
        raise ModelFileError(path, reason)
    step = _read_step(_steps_path(path), optimizer)
    floats, begin = np.frombuffer(data, "<f4"), 0
    for state in states:
        for spec in graph.weights:
            end = begin + math.prod(spec.shape)
            state[weight_key(spec)][...] = floats[begin:end].reshape(spec.shape)
            begin = end
    return step


def write_table(
    path: Path, states_path: Path, embedding: Embedding, key_type: KeyType, parts: Iterable[TableRows]
) -> None:
    """Write the sparse model and the states of one table, part by part.

    Raises:
        ModelFileError: the disk refuses.
    """
    row = row_dtype(embedding.dim, key_type, embedding.row_layout)
    with _written(path) as file, _written(states_path) as states_file:
        for part in parts:
            for first in range(0, len(part), _CHUNK_ROWS):
                chunk = part[first : first + _CHUNK_ROWS]
                rows = np.empty(len(chunk), row)
                rows["key"], rows["vector"] = chunk.keys, chunk.vectors
                if embedding.row_layout == "localized":
                    rows["slot_id"] = chunk.slot_ids
                file.write(rows.tobytes())
                states_file.write(_encoded_states(chunk))


def read_table(
    path: Path, states_path: Path | None, embedding: Embedding, key_type: KeyType, table: EmbeddingTable
) -> Iterator[TableRows]:
    """Yield the rows of a sparse model for a table, part by part. Without ``states_path`` they have the first states.

    Raises:
        ModelFileError: a file is missing, cut short or damaged, a key is repeated, or the states are not those of the
            sparse model's rows.
    """
    if path.is_file() and not path.stat().st_size:
        return  # a table without rows
    model = open_sparse(path, embedding.dim, key_type, embedding.row_layout)
    refuse_repeated_keys(path, np.concatenate(list(model.key_batches(_CHUNK_ROWS))), key_type)
    states = None if states_path is None else _open_states(states_path, model.rows, len(table.native.first_states))
    first = 0
    for keys, vectors in model.batches(_CHUNK_ROWS):
        some = slice(first, first + len(keys))
        slot_ids = None if model.slot_ids is None else model.slot_ids[some].astype(np.uint64)
        rows = table.new_rows(keys, vectors, slot_ids)
        if states is not None:
            _check_same_keys(states_path, states["key"][some], keys, first)
            rows.states[:], rows.last_steps[:] = states["states"][some], states["last_step"][some]
        yield rows
        first += len(keys)


def _states_dtype(floats: int) -> np.dtype[Any]:
    return np.dtype([("key", "<i8"), ("last_step", "<i8"), ("states", "<f4", (floats,))])


def _encoded_states(rows: TableRows) -> bytes:
    floats = rows.states.shape[1]
    if not floats:
        return b""
    encoded = np.empty(len(rows), _states_dtype(floats))
    encoded["key"], encoded["last_step"], encoded["states"] = rows.keys, rows.last_steps, rows.states
    return encoded.tobytes()


def _open_states(path: Path, rows: int, floats: int) -> NDArray[Any] | None:
    """Return the stored states of a sparse model with ``rows`` rows, or None if the optimizer has none."""
    dtype = _states_dtype(floats)
    expected_bytes = rows * dtype.itemsize if floats else 0
    try:
        found_bytes = path.stat().st_size
        if found_bytes != expected_bytes:
            reason = f"{rows:,} rows with {floats} floats of states as the sparse model beside it"
            raise ModelFileError(path, f"expected {expected_bytes:,} bytes, {reason}, found {found_bytes:,} bytes")
        return np.memmap(path, dtype, "r") if floats else None
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err


def _check_same_keys(path: Path | None, found: NDArray[np.int64], expected: NDArray[np.int64], first_row: int) -> None:
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        at = int(wrong[0])
        reason = f"the states of key {found[at]}, but the sparse model has key {expected[at]} there"
        raise ModelFileError(path, f"row {first_row + at:,}: {reason}")


def _steps_path(path: Path) -> Path:
    return Path(f"{path}.json")


def _read_step(path: Path, optimizer: str) -> int:
    if not path.exists():
        return 0
    try:
        fields = Fields(read_json(path), str(path), "", ("optimizer", "step"))
        found = fields.text("optimizer")
        if found != optimizer:
            raise ModelFileError(path, f"expected the states of {optimizer}, found those of {found}")
        return fields.integer("step", minimum=0)
    except ConfigError as err:
        raise ModelFileError(path, ": ".join(part for part in (err.path, err.reason) if part)) from err


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Open a file for an atomic write. Raise ModelFileError if the disk refuses."""
    try:
        with atomic_write(path) as file:
            yield file
    except OSError as err:
        raise ModelFileError(path, f"cannot be written: {err.strerror}") from err
