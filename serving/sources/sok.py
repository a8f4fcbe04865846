"""Dumps of SparseOperationKit 2, which ``sok.dump`` of HugeCTR writes in TensorFlow.

A dump is a folder with two files for each table, and files of the optimizer's states, which predictions do not need:

    <table>-key       the head, and then the keys [V]
    <table>-weight    the head, and then the rows [V, D]

``<table>`` is the variable's name with ``_`` in place of punctuation. The head has 296 bytes: the variable's name,
right-justified in 256 bytes; what the file has, uint32 (0: keys, 1: rows); the name of the optimizer's state in 32
bytes; and the type of the numbers, uint32. The two integers are big-endian. What follows the head is little-endian.

Source: ``write_file_head`` in sparse_operation_kit/sparse_operation_kit/dump_load.py of
https://github.com/NVIDIA-Merlin/HugeCTR
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.sources.checkpoint import without_hidden
from serving.sources.numpy_files import bare_numbers
from serving.sources.rows import TableRows, rows_of_array

_HEAD_BYTES, _NAME_BYTES, _STATE_BYTES = 296, 256, 32
_KEY, _WEIGHT = "-key", "-weight"
_DTYPES = ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8")


class SokDump:
    """The tables of a dump. See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """List the tables in a folder. There may be none."""
        self.path = path
        files = without_hidden(path, path.glob(f"*{_KEY}"))
        keys = [file for file in files if file.with_name(file.name.removesuffix(_KEY) + _WEIGHT).exists()]
        self._keys = {_name_in(file) or file.name.removesuffix(_KEY): file for file in keys}

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return list(self._keys)

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``. Every name is a table."""
        return self.names()

    def rows(self, name: str) -> TableRows:
        """See ``Checkpoint.rows``."""
        key_file = self._keys[name]
        weight_file = key_file.with_name(key_file.name.removesuffix(_KEY) + _WEIGHT)
        keys, vectors = _numbers(key_file, 0), _numbers(weight_file, 1)
        if not keys.size or vectors.size % keys.size:
            expected = f"expected a multiple of {keys.size:,} numbers, a row for each key in {key_file.name}"
            raise ModelFileError(weight_file, f"{expected}, found {vectors.size:,}")
        return rows_of_array(str(weight_file), vectors.reshape(keys.size, -1), keys, str(key_file))


def _name_in(file: Path) -> str:
    """Return the variable's name in a file's head; empty if there is no whole head."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    return head[:_NAME_BYTES].decode(errors="replace").strip() if len(head) == _HEAD_BYTES else ""


def _numbers(file: Path, kind: int) -> NDArray[Any]:
    """Return a view of the numbers after a head. Raise ModelFileError if the head is another one."""
    stored = bare_numbers(file, "u1")
    if stored.size < _HEAD_BYTES:
        raise ModelFileError(file, f"expected a head of {_HEAD_BYTES} bytes, found {stored.size:,} bytes in all")
    head = stored[_NAME_BYTES:_HEAD_BYTES].tobytes()
    found, number = int.from_bytes(head[:4], "big"), int.from_bytes(head[4 + _STATE_BYTES :], "big")
    if found != kind or number >= len(_DTYPES):
        expected = f"kind {kind} and a type below {len(_DTYPES)} in the head, as sok.dump writes them"
        raise ModelFileError(file, f"expected {expected}, found kind {found} and type {number}")
    dtype, rest = np.dtype(_DTYPES[number]), stored[_HEAD_BYTES:]
    if rest.size % dtype.itemsize:
        raise ModelFileError(file, f"expected a multiple of {dtype.itemsize} bytes ({dtype.name}), found {rest.size:,}")
    return rest.view(dtype)
