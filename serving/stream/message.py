"""One update message in Hotrow's own format. docs/updates.md has the layout.

``decode`` accepts any bytes. It raises BadMessageError before it allocates more than a multiple of the payload's size.
"""

import json
import struct
import zlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kernels.host import first_outside
from serving.errors import BadMessageError, ConfigError
from serving.model.names import MODEL_NAME, TABLE_NAME
from serving.model.sparse_rows import LARGEST_KEY, SMALLEST_KEY
from serving.model.strict_json import Fields, describe, log_newer, parse_json

__all__ = [
    "MOST_ACCUMULATE_ROWS",
    "MOST_DIM",
    "MOST_MESSAGE_BYTES",
    "REASONS",
    "BadMessageError",
    "Kind",
    "UpdateMessage",
    "WireDtype",
    "check_keys",
    "check_rows",
    "decode",
    "encode",
]

#: The values of ``BadMessageError.reason``.
REASONS = ("format", "length", "checksum", "header", "key", "value", "dim")
MOST_MESSAGE_BYTES = 64 << 20
MOST_DIM = 65_536  # as a host table
#: An accumulate is not repeatable, so a server may have to keep the new rows of a message until all are written.
MOST_ACCUMULATE_ROWS = 2048

_MAGIC, _HPS_MAGIC = b"HRUP", b"HCTR"
_FORMAT = 1
_START = struct.Struct("<4sHHII")  # magic, format, zero, bytes of the header, CRC-32 of everything after this struct
_MOST_HEADER_BYTES = 65_536
_ALIGNMENT = 8
_LARGEST = 2**63 - 1
_STAMPS = ("run", "publisher", "sequence", "version", "step", "time_ms")
_MEMBERS = {"kind", "model", "table", *_STAMPS, "keys", "dim", "dtype"}

WireDtype = Literal["float32", "float16", "int8"]
#: Bytes of a value, and bytes of a row before its values.
_ROW_BYTES: dict[WireDtype, tuple[int, int]] = {"float32": (4, 0), "float16": (2, 0), "int8": (1, 4)}


class Kind(StrEnum):
    """What a message does to its table."""

    UPSERT = "upsert"
    DELETE = "delete"
    ACCUMULATE = "accumulate"
    BARRIER = "barrier"


_WITH_ROWS = (Kind.UPSERT, Kind.ACCUMULATE)


@dataclass(frozen=True, slots=True, eq=False)
class UpdateMessage:
    """One message of a stream of updates. A key may repeat: its rows take effect in order.

    Attributes:
        kind: what the message does.
        model: the model's name.
        table: the table's name inside the model; empty for a barrier.
        keys: int64[N]; none for a barrier.
        rows: float32[N, D]; None for deletes and barriers.
        run: the training run; None in HPS's format.
        publisher: the process that wrote the message; None in HPS's format.
        sequence: rises by message within one publisher and one partition of the log.
        version: the version of the model that the trainer started from.
        step: the trainer's step.
        time_ms: the trainer's clock, in milliseconds since 1970.
    """

    kind: Kind
    model: str
    table: str
    keys: NDArray[np.int64]
    rows: NDArray[np.float32] | None
    run: str | None = None
    publisher: str | None = None
    sequence: int | None = None
    version: int | None = None
    step: int | None = None
    time_ms: int | None = None


def encode(message: UpdateMessage, dtype: WireDtype = "float32") -> bytes:
    """Return a message as bytes, with its rows in ``dtype``.

    int8 rows have a float32 scale each: max|x| / 127. Values are rounded to the nearest.

    Raises:
        BadMessageError: ``decode`` would refuse the message, or a value is too large for ``dtype``.
    """
    if dtype not in _ROW_BYTES:
        raise ValueError(f"expected float32, float16 or int8, got {dtype!r}")
    _check_arrays(message)
    check_keys(message.keys)
    members: dict[str, Any] = {"kind": message.kind.value, "model": message.model, "table": message.table}
    for name in _STAMPS:
        if (value := getattr(message, name)) is not None:
            members[name] = value
    members["keys"] = message.keys.size
    body = [np.ascontiguousarray(message.keys, "<i8").tobytes()]
    if message.rows is not None:
        members |= {"dim": message.rows.shape[1], "dtype": dtype}
        check_rows(message.keys, message.rows)
        body.append(_encoded_rows(message, dtype))
    text = json.dumps(members, separators=(",", ":"))
    header = text.encode()
    header += b" " * (-(_START.size + len(header)) % _ALIGNMENT)
    _read_header(header)
    content = b"".join([header, *body])
    if _START.size + len(content) > MOST_MESSAGE_BYTES:
        size_bytes = _START.size + len(content)
        raise BadMessageError("length", f"expected at most {MOST_MESSAGE_BYTES:,} bytes, got {size_bytes:,}")
    return _START.pack(_MAGIC, _FORMAT, 0, len(header), zlib.crc32(content)) + content


def decode(payload: bytes | memoryview) -> UpdateMessage:
    """Read a message that ``encode`` wrote.

    Raises:
        BadMessageError: it is not a message of this format, is damaged, or holds a value that no table may hold.
    """
    data = memoryview(payload).cast("B")
    content = _checked_content(data)
    header_bytes = _START.unpack_from(data)[3]
    header = _read_header(bytes(content[:header_bytes]))
    message, count = header.message, header.count
    body = content[header_bytes:]
    value_bytes, scale_bytes = _ROW_BYTES[header.dtype] if header.dtype else (0, 0)
    expected = count * (8 + scale_bytes + header.dim * value_bytes)
    if len(body) != expected:
        raise BadMessageError(
            "length", f"expected {expected:,} bytes of {count:,} keys and their rows, got {len(body):,}"
        )
    keys = np.frombuffer(body, "<i8", count).astype(np.int64)
    check_keys(keys)
    if header.dtype is None:
        return replace(message, keys=keys)
    rows = _decoded_rows(body[8 * count :], count, header.dim, header.dtype)
    check_rows(keys, rows)
    return replace(message, keys=keys, rows=rows)


def check_keys(keys: NDArray[np.int64]) -> None:
    """Raise BadMessageError if one of int64[N] keys is reserved."""
    at = first_outside(keys, SMALLEST_KEY, LARGEST_KEY)
    if at < keys.size:
        raise BadMessageError(
            "key", f"key {keys[at]} at position {at} is reserved: expected {SMALLEST_KEY} to {LARGEST_KEY}"
        )


def check_rows(keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
    """Raise BadMessageError if one of float32[N, D] rows has a value that is NaN or infinite."""
    if np.isfinite(rows).all():
        return
    at, column = np.argwhere(~np.isfinite(rows))[0]
    raise BadMessageError("value", f"row {at}, of key {keys[at]}: column {column} is {rows[at, column]}, not a number")


def _check_arrays(message: UpdateMessage) -> None:
    keys, rows = message.keys, message.rows
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise BadMessageError("key", f"expected keys int64[N], got {keys.dtype}{list(keys.shape)}")
    if (rows is not None) != (message.kind in _WITH_ROWS):
        raise BadMessageError("length", f"{message.kind}: expected {'no ' * (rows is not None)}rows")
    if rows is None:
        return
    if rows.dtype != np.float32 or rows.ndim != 2 or len(rows) != keys.size:
        raise BadMessageError("dim", f"expected rows float32[{keys.size}, D], got {rows.dtype}{list(rows.shape)}")


def _encoded_rows(message: UpdateMessage, dtype: WireDtype) -> bytes:
    rows = message.rows
    assert rows is not None
    if dtype == "float32":
        return np.ascontiguousarray(rows, "<f4").tobytes()
    with np.errstate(over="ignore"):
        if dtype == "float16":
            halves = rows.astype("<f2")
            if not np.isfinite(halves).all():
                at, column = np.argwhere(~np.isfinite(halves))[0]
                where = f"row {at}, of key {message.keys[at]}: column {column}"
                raise BadMessageError("value", f"{where} is {rows[at, column]:.9g}, which float16 cannot hold")
            return bytes(halves.tobytes())
        scales = np.abs(rows).max(axis=1, initial=0) / np.float32(127)
        scales = np.where(np.isfinite(scales * np.float32(127)), scales, np.nextafter(scales, np.float32(0)))
    divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
    codes = np.clip(np.rint(rows / divisors), -127, 127).astype(np.int8)
    return b"".join([scales.astype("<f4").tobytes(), codes.tobytes()])


def _decoded_rows(body: memoryview, count: int, dim: int, dtype: WireDtype) -> NDArray[np.float32]:
    if dtype == "float32":
        return np.frombuffer(body, "<f4").astype(np.float32).reshape(count, dim)
    if dtype == "float16":
        return np.frombuffer(body, "<f2").astype(np.float32).reshape(count, dim)
    scales = np.frombuffer(body, "<f4", count).astype(np.float32)
    codes = np.frombuffer(body, np.int8, offset=4 * count).reshape(count, dim)
    with np.errstate(over="ignore", invalid="ignore"):
        return scales[:, None] * codes.astype(np.float32)


def _checked_content(data: memoryview) -> memoryview:
    """Return everything after the fixed start: the header and the arrays, whose checksum is right."""
    if len(data) > MOST_MESSAGE_BYTES:
        raise BadMessageError("length", f"expected at most {MOST_MESSAGE_BYTES:,} bytes, got {len(data):,}")
    magic = bytes(data[:4])
    if magic == _HPS_MAGIC:
        raise BadMessageError("format", "expected HRUP, got HCTR, with which a message in HPS's format begins")
    if magic != _MAGIC:
        raise BadMessageError("format", f"expected the message to begin with HRUP, got {magic!r}")
    if len(data) < _START.size:
        raise BadMessageError("length", f"expected at least {_START.size} bytes, got {len(data)}")
    _, number, zero, header_bytes, checksum = _START.unpack_from(data)
    if number != _FORMAT:
        raise BadMessageError("format", f"expected format {_FORMAT}, got {number}")
    if zero:
        raise BadMessageError("format", f"expected zero at byte 6, got {zero}")
    content = data[_START.size :]
    if header_bytes > min(_MOST_HEADER_BYTES, len(content)):
        most = min(_MOST_HEADER_BYTES, len(content))
        raise BadMessageError("length", f"expected a header of at most {most:,} bytes, got {header_bytes:,}")
    if (found := zlib.crc32(content)) != checksum:
        raise BadMessageError("checksum", f"expected the checksum {checksum:08x}, got {found:08x}")
    return content


@dataclass(frozen=True, slots=True)
class _Header:
    """A header, as a message without its arrays.

    Attributes:
        message: the members that a message has.
        count: number of keys.
        dim: values of a row; 0 without rows.
        dtype: type of the values; None without rows.
    """

    message: UpdateMessage
    count: int
    dim: int = 0
    dtype: WireDtype | None = None


def _read_header(raw: bytes) -> _Header:
    try:
        return _header_of(Fields(parse_json(raw.decode("utf-8"), "header"), "header", ""))
    except UnicodeDecodeError as err:
        raise BadMessageError("header", f"header: not UTF-8 at byte {err.start}") from err
    except ConfigError as err:
        raise BadMessageError("header", str(err)) from err


def _header_of(fields: Fields) -> _Header:
    log_newer("update messages", frozenset(fields.others(_MEMBERS)))
    kind = fields.choice("kind", {member.value: member for member in Kind})
    message = UpdateMessage(
        kind,
        _name(fields, "model", MODEL_NAME.fullmatch),
        "" if kind == Kind.BARRIER else _name(fields, "table", TABLE_NAME.fullmatch),
        np.empty(0, np.int64),
        None,
        run=fields.text("run") if "run" in fields else None,
        publisher=fields.text("publisher") if "publisher" in fields else None,
        sequence=_number(fields, "sequence"),
        version=_number(fields, "version"),
        step=_number(fields, "step"),
        time_ms=_number(fields, "time_ms"),
    )
    count = fields.integer("keys", minimum=0, maximum=_LARGEST)
    if kind not in _WITH_ROWS:
        _check_no_rows(fields, kind, count)
        return _Header(message, count)
    if kind == Kind.ACCUMULATE and count > MOST_ACCUMULATE_ROWS:
        raise BadMessageError(
            "length", f"header: expected at most {MOST_ACCUMULATE_ROWS:,} keys of an accumulate, got {count:,}"
        )
    dim = fields.integer("dim", maximum=_LARGEST)
    if dim > MOST_DIM:
        raise BadMessageError("dim", f"header: dim: expected at most {MOST_DIM:,}, got {dim}")
    return _Header(message, count, dim, fields.choice("dtype", {name: name for name in _ROW_BYTES}))


def _check_no_rows(fields: Fields, kind: Kind, count: int) -> None:
    for name in ("dim", "dtype"):
        if name in fields:
            raise fields.error(f"a {kind} has no rows", name)
    if kind == Kind.BARRIER and (count or fields.value("table", "")):
        raise fields.error("a barrier has neither keys nor a table")


def _name(fields: Fields, key: str, is_valid: Any) -> str:
    name = fields.text(key)
    if not is_valid(name):
        raise fields.error(f"expected a {key}'s name, got {describe(name)}", key)
    return name


def _number(fields: Fields, key: str) -> int | None:
    return fields.integer(key, minimum=0, maximum=_LARGEST) if key in fields else None
