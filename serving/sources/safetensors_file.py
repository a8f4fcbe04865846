"""Safetensors files. Rows are read where they are in the file.

Format (https://github.com/huggingface/safetensors, "Format"): a uint64, the size of the header in bytes; the header,
``{"<name>": {"dtype": "F32", "shape": [V, D], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}``; the data.
``safetensors.torch.save_model`` writes the other names of a tensor into ``__metadata__``: ``{"<other>": "<name>"}``.
Offsets count from the first byte of the data. Numbers are little-endian, tensors row-major and dense.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.errors import ConfigError, ModelFileError
from serving.model.mapped_file import map_file
from serving.model.regular_file import open_regular
from serving.model.sparse_rows import Keys
from serving.model.strict_json import Fields, parse_json
from serving.sources.checkpoint import matrices_of
from serving.sources.rows import TableRows, check_matrix, rows_of_parts

_LARGEST_HEADER_BYTES = 100_000_000  # the format's own limit
_LARGEST = 2**63 - 1
_METADATA = "__metadata__"
_FLOATS = ("F32", "F16", "BF16")
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8"}
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I64": "int64", "I32": "int32"}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One entry of the header. ``begin`` and ``end`` count from the first byte of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """The tensors of a safetensors file. See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raise ModelFileError if the file does not have this format."""
        self.path = path
        self._tensors = _read_header(path)
        self._content = map_file(path, "u1", (path.stat().st_size,))

    def names(self) -> Sequence[str]:
        """See ``Checkpoint.names``."""
        return list(self._tensors)

    def tables(self) -> Sequence[str]:
        """See ``Checkpoint.tables``."""
        return matrices_of({name: tensor.shape for name, tensor in self._tensors.items()})

    def rows(self, name: str) -> TableRows:
        """See ``Checkpoint.rows``."""
        return rows_of_parts(f"{self.path}#{name}", [self.matrix(name)], None)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._tensors[name].shape

    def matrix(self, name: str) -> NDArray[Any]:
        """Return a view of a table's vectors; uint16 is bfloat16. Raise ModelFileError if the tensor is no table."""
        tensor = self._tensors[name]
        check_matrix(
            f"{self.path}#{name}", _NAMES.get(tensor.dtype, tensor.dtype), tensor.dtype in _FLOATS, tensor.shape
        )
        return self._stored(name)

    def keys(self, name: str) -> Keys:
        """Return a view of keys, int64[V]. Raise ModelFileError if the tensor is something else."""
        tensor = self._tensors[name]
        if tensor.dtype != "I64" or len(tensor.shape) != 1:
            found = f"{_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
            raise ModelFileError(f"{self.path}#{name}", f"expected int64 keys [V], got {found}")
        return self._stored(name)

    def _stored(self, name: str) -> NDArray[Any]:
        tensor = self._tensors[name]
        dtype = np.dtype(_STORED[tensor.dtype])
        expected = math.prod(tensor.shape) * dtype.itemsize
        if tensor.end - tensor.begin != expected:
            reason = f"expected {expected:,} bytes for {_NAMES[tensor.dtype]} {list(tensor.shape)}"
            raise ModelFileError(f"{self.path}#{name}", f"{reason}, found offsets of {tensor.end - tensor.begin:,}")
        return self._content[tensor.begin : tensor.end].view(dtype).reshape(tensor.shape)


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Read the header and check that every tensor is inside the file."""
    try:
        with open_regular(path) as file:
            size_bytes = path.stat().st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or not 2 <= header_bytes <= min(size_bytes - 8, _LARGEST_HEADER_BYTES):
                raise ModelFileError(path, f"not a safetensors file: {size_bytes:,} bytes, header {header_bytes:,}")
            header = file.read(header_bytes).decode()
    except OSError as err:
        raise ModelFileError(path, f"cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ModelFileError(path, "not a safetensors file: the header is not UTF-8") from err
    try:
        fields = Fields(parse_json(header, ""), "", "")
        names = [name for name in fields if name != _METADATA]
        tensors = {name: _read_tensor(fields.object(name), 8 + header_bytes) for name in names}
        notes = fields.object(_METADATA) if _METADATA in fields else ()
        # ``save_model`` writes a tensor with several names once, and its other names here
        tied = {name: notes.value(name) for name in notes if name not in tensors} if notes else {}
    except ConfigError as err:
        where = ": ".join(part for part in (err.path, err.reason) if part)
        raise ModelFileError(path, f"not a safetensors file: header: {where}") from err
    for name, tensor in tensors.items():
        if not tensor.begin <= tensor.end <= size_bytes:
            reason = f"expected at least {tensor.end:,} bytes, found {size_bytes:,}: the file is truncated"
            raise ModelFileError(f"{path}#{name}", reason)
    _check_order(path, tensors, 8 + header_bytes, size_bytes)
    return tensors | {name: tensors[of] for name, of in tied.items() if isinstance(of, str) and of in tensors}


def _check_order(path: Path, tensors: Mapping[str, _Tensor], data_begin: int, size_bytes: int) -> None:
    """Refuse tensors that overlap or leave bytes over, which the format forbids: the file is damaged."""
    end = data_begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != end:
            reason = f"expected the tensor to begin at byte {end:,}, where the one before ends, found {tensor.begin:,}"
            raise ModelFileError(f"{path}#{name}", reason)
        end = tensor.end
    if end != size_bytes:
        raise ModelFileError(path, f"expected {end:,} bytes, found {size_bytes:,}: bytes of no tensor follow")


def _read_tensor(fields: Fields, data_begin: int) -> _Tensor:
    fields.allow(("dtype", "shape", "data_offsets"))
    offsets = fields.integers("data_offsets", minimum=0, maximum=_LARGEST)
    if len(offsets) != 2:
        raise fields.error(f"expected a begin and an end, got {len(offsets)} numbers", "data_offsets")
    is_scalar = fields.value("shape") == []
    shape = () if is_scalar else fields.integers("shape", minimum=0, maximum=_LARGEST)
    return _Tensor(fields.text("dtype"), shape, data_begin + offsets[0], data_begin + offsets[1])
