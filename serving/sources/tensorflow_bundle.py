"""The files of TensorFlow's checkpoints: the tensors of ``<prefix>.index`` and ``<prefix>.data-00000-of-00001``.

The index is a table of LevelDB, which TensorFlow does not compress:

    blocks    entries in the order of their keys; a byte for the compression and a masked CRC-32C follow each block
    footer    48 bytes: the handle of a block that is not needed, the handle of the block whose values are the handles
              of the others, zeros, and a magic number

A handle is two varints, a block's first byte and size. An entry is three varints, ``shared``, ``rest`` and ``size``,
then the rest of the key, whose first bytes are those of the key before, and the value. A block ends with places in it,
and their number, uint32 each.

The value of the empty key is a BundleHeaderProto. That of a tensor's name is a BundleEntryProto: the type, the shape,
the file with the numbers, their place in it, and their masked CRC-32C. The entry of a partitioned variable lists
slices, each of which has an entry of its own. Numbers in the files are little-endian.

Sources: tensorflow/core/protobuf/tensor_bundle.proto and tensor_slice.proto, core/util/tensor_bundle,
core/util/saved_tensor_slice_util.cc, core/lib/io/format.cc and core/lib/strings/ordered_code.cc of
https://github.com/tensorflow/tensorflow
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serving.errors import ModelFileError
from serving.model.mapped_file import map_file
from serving.model.regular_file import open_regular
from serving.sources.crc32c import masked_crc32c

INDEX: Final = ".index"
_FOOTER_BYTES, _TRAILER_BYTES, _MAGIC = 48, 5, 0xDB4775248B80FB57
_STRING = 7
_TYPES = {1: "float32", 2: "float64", 3: "int32", _STRING: "string", 9: "int64", 14: "bfloat16", 19: "float16"}
_STORED = {1: "<f4", 2: "<f8", 3: "<i4", 9: "<i8", 14: "<u2", 19: "<f2"}

#: Where a slice begins in each dimension, and its length; None: all of the dimension.
Extents: TypeAlias = tuple[tuple[int, int | None], ...]
#: The values of a protocol buffer's fields by number: int, or bytes.
Message: TypeAlias = dict[int, list[Any]]


class Entry(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size_bytes: int
    crc32c: int
    slices: tuple[Extents, ...]

    @property
    def type_name(self) -> str:
        """The type of its numbers, for messages."""
        return _TYPES.get(self.dtype, f"TensorFlow's type {self.dtype}")


class TensorFlowBundle:
    """The tensors of a checkpoint. ``entries`` has all names, also those of slices."""

    def __init__(self, prefix: Path) -> None:
        """Read the index. Raise ModelFileError if it cannot be read or is damaged."""
        self.prefix = prefix
        self._index = prefix.with_name(prefix.name + INDEX)
        try:
            with open_regular(self._index) as file:
                content = file.read()
        except OSError as err:
            raise ModelFileError(self._index, f"cannot be read: {err.strerror}") from err
        try:
            values = dict(self._values(content))
            header = read_message(values.pop(b""))
            self.entries = {key: _entry(value) for key, value in values.items()}
        except (LookupError, TypeError, ValueError) as err:
            raise ModelFileError(self._index, "is damaged: expected the index of a TensorFlow checkpoint") from err
        if _number(header, 2):
            raise ModelFileError(self._index, "expected little-endian numbers, found big-endian")
        self._shards = _number(header, 1)

    def tensor(self, name: bytes) -> NDArray[Any]:
        """Return a view of a tensor; uint16 is bfloat16.

        Raises:
            ModelFileError: its bytes are missing or damaged, or its type is none of float32, float64, float16,
                bfloat16, int32 and int64.
        """
        entry, source = self.entries[name], self.source(name)
        if entry.dtype not in _STORED:
            raise ModelFileError(source, f"expected numbers, found {entry.type_name}")
        dtype = np.dtype(_STORED[entry.dtype])
        if math.prod(entry.shape) * dtype.itemsize != entry.size_bytes:
            reason = f"expected the bytes of {entry.type_name} {list(entry.shape)}, found {entry.size_bytes:,}"
            raise ModelFileError(source, reason)
        if not entry.size_bytes:
            return np.empty(entry.shape, dtype)
        stored = self._stored(entry)
        if masked_crc32c(stored) != entry.crc32c:
            raise ModelFileError(source, "is damaged: its bytes do not have the check sum of the index")
        return stored.view(dtype).reshape(entry.shape)

    def text(self, name: bytes) -> bytes:
        """Return the one string of a tensor. Raise ModelFileError if its bytes are missing or damaged."""
        entry = self.entries[name]
        stored = self._stored(entry).tobytes()
        try:
            size, begin = _varint(stored, 0)
        except IndexError:
            size, begin = 0, 0
        content = size.to_bytes(8, "little")[:4] + stored[begin:]
        if entry.dtype != _STRING or masked_crc32c(np.frombuffer(content, np.uint8)) != entry.crc32c:
            raise ModelFileError(self.source(name), "is damaged: its bytes do not have the check sum of the index")
        return stored[begin + 4 :]

    def source(self, name: bytes) -> str:
        """Return the name of a tensor for messages."""
        return f"{self.prefix}#{name.decode(errors='replace')}"

    def _stored(self, entry: Entry) -> NDArray[np.uint8]:
        file = self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self._shards:05d}")
        end = entry.offset + entry.size_bytes
        try:
            return map_file(file, "u1", (end,))[entry.offset :]
        except OSError as err:
            raise ModelFileError(file, f"cannot be read: {err.strerror}") from err
        except ValueError as err:
            raise ModelFileError(file, f"expected at least {end:,} bytes: the file is truncated") from err

    def _values(self, content: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys and values of the table."""
        if int.from_bytes(content[-8:], "little") != _MAGIC or len(content) < _FOOTER_BYTES:
            raise ModelFileError(self._index, "is not the index of a TensorFlow checkpoint, or is truncated")
        footer = content[-_FOOTER_BYTES:]
        at = _varint(footer, _varint(footer, 0)[1])[1]
        for _, handle in _items(self._block(content, footer[at:])):
            yield from _items(self._block(content, handle))

    def _block(self, content: bytes, handle: bytes) -> bytes:
        begin, at = _varint(handle, 0)
        end = begin + _varint(handle, at)[0]
        compression, crc = content[end], content[end + 1 : end + _TRAILER_BYTES]
        if masked_crc32c(np.frombuffer(content[begin : end + 1], np.uint8)) != int.from_bytes(crc, "little"):
            raise ModelFileError(self._index, f"is damaged: the block at byte {begin:,} does not have its check sum")
        if compression:
            reason = "expected blocks without compression, as TensorFlow 1.2 and later write them"
            raise ModelFileError(self._index, f"{reason}, found type {compression}")
        return content[begin:end]


def name_of_slice(name: bytes, extents: Extents) -> bytes:
    """Return the name of a slice's own entry, as TensorFlow's ``EncodeTensorNameSlice``."""
    escaped = re.sub(rb"[\x00\xff]", lambda found: found[0] + bytes([found[0][0] ^ 0xFF]), name)
    numbers = b"".join(_signed(number) for begin, length in extents for number in (begin, length))
    return b"\x00" + escaped + b"\x00\x01" + bytes([1, len(extents)]) + numbers


def read_message(content: bytes) -> Message:
    """Read a protocol buffer. Raise ValueError or IndexError if it is damaged."""
    message: Message = {}
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        kind, value = tag & 7, 0
        if kind == 0:
            value, at = _varint(content, at)
            message.setdefault(tag >> 3, []).append(value)
            continue
        size, at = _varint(content, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        part, at = content[at : at + size], at + size
        if len(part) != size:
            raise ValueError("truncated")
        message.setdefault(tag >> 3, []).append(part if kind == 2 else int.from_bytes(part, "little"))
    return message


def _entry(content: bytes) -> Entry:
    message = read_message(content)
    shape = tuple(_number(read_message(size), 1) for size in read_message(_bytes(message, 2)).get(2, []))
    slices = tuple(
        tuple(
            (_number(extent, 1), extent[2][0] if 2 in extent else None)
            for extent in map(read_message, read_message(part).get(1, []))
        )
        for part in message.get(7, [])
    )
    dtype, shard, offset, size_bytes, crc = (_number(message, number) for number in (1, 3, 4, 5, 6))
    return Entry(dtype, shape, shard, offset, size_bytes, crc, slices)


def _number(message: Message, field: int) -> int:
    """Return the last value of a field, 0 if there is none."""
    return int(message.get(field, [0])[-1])


def _bytes(message: Message, field: int) -> bytes:
    return bytes(message.get(field, [b""])[-1])


def _items(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block."""
    end = len(block) - 4 * (1 + int.from_bytes(block[-4:], "little"))
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        rest, at = _varint(block, at)
        size, at = _varint(block, at)
        key = key[:shared] + block[at : at + rest]
        at += rest
        yield key, block[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return a number, and the place after it."""
    value = shift = 0
    while content[at] & 0x80:
        value |= (content[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | content[at] << shift, at + 1


def _signed(number: int | None) -> bytes:
    """Return a number as ``OrderedCode::WriteSignedNumIncreasing`` does; None is -1."""
    if number is None:
        return b"\x7f"
    size = number.bit_length() // 7 + 1
    return (((1 << size) - 1) << 7 * size | number).to_bytes(size, "big")
