"""The files of a session's parameters: HugeCTR's models, and the states of the optimizer.

- dense model and sparse models: HugeCTR's formats; see ``serving.model.dense_file`` and ``serving.model.sparse_file``.
  A sparse model is a single file.
- dense states: for each state of the optimizer, the float32 states of all dense weights, in the order of the dense
  model, as in HugeCTR (v3.0 to v24.06). A file ``<dense states>.json`` next to it has what HugeCTR does not store:
  the optimizer's name, the number of steps, and the CRC-32 of the states.
- sparse states: the format of ``training.row_file``, because HugeCTR's format depends on its GPUs. The file
  has the rows of the sparse model, in the same order, with the states instead of the vectors. Earlier versions wrote
  packed rows without checksums: int64 key, int64 step of the last update, float32[D] for each state. Such files load.

Every file is complete or absent.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError, ModelFileError
from serving.model.atomic import atomic_write
from serving.model.dense_file import Weights, weight_key
from serving.model.graph import Embedding, Graph
from serving.model.mapped_file import map_file
from serving.model.regular_file import is_absent, open_regular
from serving.model.sparse_file import KeyType, open_sparse
from serving.model.sparse_rows import refuse_repeated_keys, row_dtype
from serving.model.strict_json import Fields, read_json
from training.row_file import BLOCK_ROWS, TableRows, check_rule, is_row_file, read_rows, shape_of, write_rows
from training.tables.table import EmbeddingTable


def write_dense_states(path: Path, graph: Graph, states: Iterable[Weights], optimizer: str, step: int) -> None:
    """Write the states of the dense weights, and the file with the optimizer's name and the number of steps.

    Raises:
        ModelFileError: the disk refuses.
    """
    checksum = 0
    with _written(path) as file:
        for state in states:
            for spec in graph.weights:
                data = np.ascontiguousarray(state[weight_key(spec)], dtype="<f4").tobytes()
                checksum = zlib.crc32(data, checksum)
                file.write(data)
    with _written(_steps_path(path)) as file:
        document = {"optimizer": optimizer, "step": step, "crc32": f"{checksum:08x}"}
        file.write(json.dumps(document).encode() + b"\n")


def read_dense_states(path: Path, graph: Graph, states: Iterable[Weights], optimizer: str) -> int:
    """Fill the states of the dense weights, and return the number of steps.

    The number is 0 if there is no file with it, so HugeCTR's files can be read.

    Raises:
        ModelFileError: a file is missing or of another size, or the states are those of another optimizer.
    """
    states = list(states)
    expected_bytes = 4 * len(states) * sum(math.prod(spec.shape) for spec in graph.weights)
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err
    if len(data) != expected_bytes:
        reason = f"expected {expected_bytes:,} bytes, {len(states)} states of {optimizer}, found {len(data):,} bytes"
        raise ModelFileError(path, reason)
    step = _read_step(_steps_path(path), optimizer, path, data)
    floats, begin = np.frombuffer(data, "<f4"), 0
    for state in states:
        for spec in graph.weights:
            end = begin + math.prod(spec.shape)
            state[weight_key(spec)][...] = floats[begin:end].reshape(spec.shape)
            begin = end
    return step


def write_table(
    path: Path,
    states_path: Path,
    embedding: Embedding,
    key_type: KeyType,
    table: EmbeddingTable,
    parts: Iterable[TableRows],
) -> None:
    """Write the sparse model and the states of one table, part by part.

    Raises:
        ModelFileError: the disk refuses.
    """
    row = row_dtype(embedding.dim, key_type, embedding.row_layout)
    rule, _, states = shape_of(table.native)
    with _written(path) as file, _written(states_path) as states_file:

        def written() -> Iterator[TableRows]:
            for part in parts:
                rows = np.empty(len(part), row)
                rows["key"], rows["vector"] = part.keys, part.vectors
                if embedding.row_layout == "localized":
                    rows["slot_id"] = part.slot_ids
                file.write(rows.tobytes())
                yield part

        write_rows(states_file, rule, 0, states, written())


def read_table(
    path: Path, states_path: Path | None, embedding: Embedding, key_type: KeyType, table: EmbeddingTable
) -> Iterator[TableRows]:
    """Yield the rows of a sparse model for a table, part by part. Without ``states_path`` they have new states.

    Raises:
        ModelFileError: a file is missing, cut short or damaged, a key is repeated, or the states are not those of the
            sparse model's rows or of the table's optimizer.
    """
    parts: Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]] = iter(())
    count, slots = 0, None
    if not path.is_file() or path.stat().st_size:  # an empty file is a table without rows
        model = open_sparse(path, embedding.dim, key_type, embedding.row_layout)
        refuse_repeated_keys(path, np.concatenate(list(model.key_batches(BLOCK_ROWS))), key_type)
        parts, count, slots = model.batches(BLOCK_ROWS), model.rows, model.slot_ids
    states = None if states_path is None else _read_states(states_path, count, table)
    first = 0
    for keys, vectors in parts:
        slot_ids = None if slots is None else slots[first : first + len(keys)].astype(np.uint64)
        rows = table.new_rows(keys, vectors, slot_ids)
        if states is not None:
            of_rows = next(states, rows[:0])
            _check_same_keys(states_path, of_rows.keys, keys, first)
            rows.states[:], rows.last_steps[:] = of_rows.states, of_rows.last_steps
        yield rows
        first += len(keys)
    if states is not None and (more := next(states, None)) is not None:
        raise ModelFileError(states_path, f"expected the states of {first:,} rows, found those of key {more.keys[0]}")


def _read_states(path: Path, rows: int, table: EmbeddingTable) -> Iterator[TableRows] | None:
    """Return the states of a sparse model's rows, block by block. None: an empty file of an earlier version."""
    rule, _, floats = shape_of(table.native)
    try:
        if is_row_file(path):
            return read_rows(path, rule, 0, floats)
        dtype = np.dtype([("key", "<i8"), ("last_step", "<i8"), ("states", "<f4", (floats,))])
        found_bytes, expected_bytes = path.stat().st_size, rows * dtype.itemsize if floats else 0
        if found_bytes != expected_bytes:
            reason = f"{floats} floats of states for each of the sparse model's {rows:,} rows"
            raise ModelFileError(path, f"expected {expected_bytes:,} bytes, {reason}, found {found_bytes:,} bytes")
        if not found_bytes:
            return None
        stored = map_file(path, dtype, (rows,))
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err

    def blocks() -> Iterator[TableRows]:
        for first in range(0, rows, BLOCK_ROWS):
            one = stored[first : first + BLOCK_ROWS]
            of_rows = table.new_rows(one["key"], np.empty((len(one), 0), np.float32))
            yield replace(of_rows, states=one["states"], last_steps=one["last_step"])

    return blocks()


def _check_same_keys(path: Path | None, found: NDArray[np.int64], expected: NDArray[np.int64], first_row: int) -> None:
    if len(found) != len(expected):
        reason = f"expected the states of {len(expected):,} rows as in the sparse model, found those of {len(found):,}"
        raise ModelFileError(path, f"row {first_row:,}: {reason}")
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        at = int(wrong[0])
        reason = f"the states of key {found[at]}, but the sparse model has key {expected[at]} there"
        raise ModelFileError(path, f"row {first_row + at:,}: {reason}")


def _steps_path(path: Path) -> Path:
    return Path(f"{path}.json")


def _read_step(path: Path, optimizer: str, states_path: Path, states: bytes) -> int:
    if is_absent(path):
        return 0
    try:
        fields = Fields(read_json(path), str(path), "", ("optimizer", "step", "crc32"))
        found = fields.text("optimizer")
        check_rule(path, optimizer, found)
        came = f"{zlib.crc32(states):08x}"
        if (expected := fields.text("crc32", came)) != came:  # an earlier version does not write it
            raise ModelFileError(states_path, f"expected CRC-32 {expected}, found {came}")
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
